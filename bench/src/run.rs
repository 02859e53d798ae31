// SPDX-License-Identifier: Apache-2.0

//! All subjects at all sizes, one after the other; what is known is kept after each of them.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use crate::{
    control::Control,
    datapath,
    figures::{Outcome, Run},
    ground::Ground,
    machine::{self, Load, Machine},
    objects::{Objects, Size},
    phases::{Effort, Phase, Trial},
    probe::Timing,
    report,
    responder::Responder,
    store::{Files, Store},
    subject::{Origin, Programs, Running, Subject, Tools},
    undo,
};

/// The figures of a run, inside its folder.
pub const RESULTS: &str = "results.json";
const SUMMARY: &str = "summary.txt";
/// The kernel takes apart the rules of the last subject in the background: not in the next one's time.
const REST: Duration = Duration::from_secs(3);

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Services x endpoints
    #[arg(long, value_delimiter = ',', default_value = "10x10,100x10,1000x10,10000x10,45000x1")]
    sizes: Vec<Size>,
    /// All of them when none is named
    #[arg(long, value_delimiter = ',', value_enum)]
    subjects: Vec<Subject>,
    /// What to measure beyond the cold start; everything when nothing is named
    #[arg(long, value_delimiter = ',', value_enum)]
    phases: Vec<Phase>,
    /// The data path is measured at these numbers of services
    #[arg(long, value_delimiter = ',', default_value = "10,10000")]
    datapath_at: Vec<u32>,
    /// The program under test, built for release
    #[arg(long)]
    portolan: PathBuf,
    /// kube-proxy; without it the peer is left out
    #[arg(long)]
    kube_proxy: Option<PathBuf>,
    /// One more flag for kube-proxy; can be repeated
    #[arg(long, allow_hyphen_values = true)]
    kube_proxy_flag: Vec<String>,
    /// The variant of iptables that the iptables modes use
    #[arg(long, value_enum, default_value_t = Tools::Legacy)]
    iptables: Tools,
    /// tools/cluster; without it everything through the API server is left out
    #[arg(long)]
    cluster: Option<PathBuf>,
    /// Where the results go; a folder for this run is made inside
    #[arg(long)]
    out: Option<PathBuf>,
    /// What kind of machine this is, for the folder's name
    #[arg(long)]
    host_kind: Option<String>,
    /// Give a start up after this long
    #[arg(long, default_value_t = 300)]
    start_limit_secs: u64,
    /// Length of each churn
    #[arg(long, default_value_t = 20)]
    churn_secs: u64,
    #[arg(long, default_value_t = 20.0)]
    changes_per_second: f64,
    /// How many changes are timed, of each kind
    #[arg(long, default_value_t = 200)]
    samples: usize,
    /// And for how long at most
    #[arg(long, default_value_t = 40)]
    sample_secs: u64,
    #[arg(long, default_value_t = 100)]
    rolling_services: usize,
    #[arg(long, default_value_t = 12)]
    repair_limit_secs: u64,
    /// Connections of each client thread in each round
    #[arg(long, default_value_t = 10_000)]
    connections: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[arg(long, default_value_t = 1)]
    client_threads: usize,
    /// Keep the subjects' logs in this folder
    #[arg(long)]
    logs: Option<PathBuf>,
}

pub fn run(options: &Options) -> Result<()> {
    undo::on_interrupt()?;
    let subjects = options.available_subjects();
    if subjects.is_empty() {
        bail!("nothing to measure: every subject asked for was left out");
    }
    let mut run = Run {
        date: machine::today(),
        machine: Machine::this(),
        arguments: options.described(&subjects),
        outcomes: Vec::new(),
    };
    let folder = options.out.as_deref().map(|out| options.folder(out, &run)).transpose()?;
    for size in &options.sizes {
        measure_size(options, *size, &subjects, &mut |outcome| {
            run.outcomes.push(outcome);
            folder.as_deref().map_or(Ok(()), |folder| keep(folder, &run))
        })?;
    }
    print!("{}", report::text(&run));
    if let Some(folder) = folder {
        println!("kept in {}", folder.display());
    }
    Ok(())
}

fn keep(folder: &Path, run: &Run) -> Result<()> {
    fs::write(folder.join(RESULTS), serde_json::to_string_pretty(run)? + "\n")?;
    Ok(fs::write(folder.join(SUMMARY), report::text(run))?)
}

fn measure_size(
    options: &Options,
    size: Size,
    subjects: &[Subject],
    keep: &mut dyn FnMut(Outcome) -> Result<()>,
) -> Result<()> {
    let mut objects = Objects::new(size);
    let (scratch, undo) = undo::scratch()?;
    let control = match &options.cluster {
        Some(scripts) if subjects.iter().any(|subject| subject.needs_api()) => {
            let control = Control::start(scripts, scratch.path().join("control"))?;
            let began = Instant::now();
            control.fill(&objects)?;
            eprintln!("{size}: written to the API server in {:.1} s", began.elapsed().as_secs_f64());
            Some(control)
        }
        _ => None,
    };
    for (number, subject) in subjects.iter().enumerate() {
        thread::sleep(REST);
        eprintln!("{size}: {subject}");
        let place =
            Place { options, control: control.as_ref(), scratch: scratch.path().join(number.to_string()) };
        keep(place.measure(*subject, &mut objects)?)?;
    }
    undo.cancel();
    Ok(())
}

/// Where one subject is measured.
struct Place<'a> {
    options: &'a Options,
    control: Option<&'a Control>,
    scratch: PathBuf,
}

impl Place<'_> {
    /// A subject that fails is noted and does not end the run.
    fn measure(&self, subject: Subject, objects: &mut Objects) -> Result<Outcome> {
        let programs = self.options.programs();
        let mut outcome = Outcome {
            subject: subject.to_string(),
            version: programs.version(subject),
            size: objects.size,
            load_before: Load::now(),
            cold: None,
            kernel: None,
            restart: None,
            churn: Vec::new(),
            in_force: Vec::new(),
            rolling: None,
            data_path: None,
            repair: None,
            tool_floor_ms: None,
            floor: None,
            lone_swap_cpu_ms: None,
            memory: None,
            notes: Vec::new(),
        };
        fs::create_dir_all(&self.scratch)?;
        if let Err(error) = self.try_measure(subject, &programs, objects, &mut outcome) {
            eprintln!("{}: {subject}: {error:#}", objects.size);
            outcome.notes.push(format!("{error:#}"));
        }
        self.keep_log(subject, objects.size)?;
        Ok(outcome)
    }

    fn try_measure(
        &self,
        subject: Subject,
        programs: &Programs,
        objects: &mut Objects,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let ground = Ground::new(self.control.map(|control| &control.namespace))?;
        let _responder = Responder::start(&ground.sink)?;
        // What changes in a folder is not what changed in the API server.
        let mut own = Objects::new(objects.size);
        let objects = if subject.needs_api() { objects } else { &mut own };
        let (store, origin) = match (subject.needs_api(), self.control) {
            (true, Some(control)) => (Store::Api(&control.api), Origin::Kubeconfig(control.kubeconfig()?)),
            (true, None) => bail!("there is no API server"),
            (false, _) => {
                let files = Files::new(&self.scratch)?;
                files.fill(objects)?;
                let folder = files.folder().to_owned();
                (Store::Files(files), Origin::Folder(folder))
            }
        };
        let running = Running::prepare(subject, programs, &ground.node, origin, &self.scratch)?;
        let phases = self.options.phases_at(objects.size);
        let mut trial = Trial { running, ground: &ground, store, objects, effort: self.options.effort() };
        trial.run(&phases, outcome)
    }

    fn keep_log(&self, subject: Subject, size: Size) -> Result<()> {
        let Some(logs) = &self.options.logs else { return Ok(()) };
        fs::create_dir_all(logs)?;
        // Absent when the subject was not even prepared.
        let _ = fs::copy(
            self.scratch.join("subject.log"),
            logs.join(format!("{}-{size}.log", subject.argument())),
        );
        Ok(())
    }
}

impl Options {
    fn programs(&self) -> Programs {
        Programs {
            portolan: self.portolan.clone(),
            kube_proxy: self.kube_proxy.clone(),
            kube_proxy_flags: self.kube_proxy_flag.clone(),
            iptables: self.iptables,
        }
    }

    fn available_subjects(&self) -> Vec<Subject> {
        let asked = match self.subjects.as_slice() {
            [] => Subject::value_variants(),
            some => some,
        };
        let available = |subject: &&Subject| {
            let why = match subject {
                _ if subject.needs_api() && self.cluster.is_none() => "there is no API server",
                _ if subject.is_peer() && self.kube_proxy.is_none() => "there is no kube-proxy",
                _ => return true,
            };
            println!("skipped: {subject}: {why}");
            false
        };
        asked.iter().filter(available).copied().collect()
    }

    fn phases_at(&self, size: Size) -> Vec<Phase> {
        let wanted = |phase: &&Phase| {
            (self.phases.is_empty() || self.phases.contains(phase))
                && (**phase != Phase::Datapath || self.datapath_at.contains(&size.services))
        };
        Phase::value_variants().iter().filter(wanted).copied().collect()
    }

    fn effort(&self) -> Effort {
        let start_limit = Duration::from_secs(self.start_limit_secs);
        Effort {
            start_limit,
            churn: Duration::from_secs(self.churn_secs),
            changes_per_second: self.changes_per_second.max(0.1),
            timing: Timing {
                samples: self.samples,
                at_most: Duration::from_secs(self.sample_secs),
                limit: Duration::from_secs(30),
            },
            rolling_services: self.rolling_services,
            repair_limit: Duration::from_secs(self.repair_limit_secs),
            connections: datapath::Effort {
                threads: self.client_threads,
                rounds: self.rounds,
                connections: self.connections,
            },
        }
    }

    /// What was asked for, without any path of this machine.
    fn described(&self, subjects: &[Subject]) -> Vec<String> {
        let list = |items: Vec<String>| items.join(",");
        let mut arguments = vec![
            format!("sizes={}", list(self.sizes.iter().map(Size::to_string).collect())),
            format!("subjects={}", list(subjects.iter().map(|subject| subject.argument()).collect())),
            format!("churn-secs={}", self.churn_secs),
            format!("changes-per-second={}", self.changes_per_second),
            format!("samples={}", self.samples),
            format!("connections={}x{}x{}", self.client_threads, self.rounds, self.connections),
        ];
        arguments.push(format!("iptables={:?}", self.iptables).to_lowercase());
        arguments.extend(self.kube_proxy_flag.iter().map(|flag| format!("kube-proxy-flag={flag}")));
        arguments
    }

    /// A new folder; a second run of the same day gets a number.
    fn folder(&self, out: &Path, run: &Run) -> Result<PathBuf> {
        let kind = self.host_kind.clone();
        let kind = kind.unwrap_or_else(|| format!("{}core-{}", run.machine.cores, std::env::consts::ARCH));
        fs::create_dir_all(out)?;
        for number in 1.. {
            let suffix = if number == 1 { String::new() } else { format!("-{number}") };
            let folder = out.join(format!("{}-{kind}{suffix}", run.date));
            match fs::create_dir(&folder) {
                Ok(()) => return Ok(folder),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| format!("making {}", folder.display())),
            }
        }
        unreachable!("some number is free")
    }
}
