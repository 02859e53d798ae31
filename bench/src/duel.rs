// SPDX-License-Identifier: Apache-2.0

//! Builds of Portolan side by side: which of them takes less processor time for a change?
//!
//! On a machine that is shared, the same build takes half as much again from one minute to the next, which is more than most
//! improvements bring. So all of them run at once, each on a node and from a folder of its own, and are changed
//! in turns: whatever the machine does, it does to all of them.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{
    figures::Quantiles,
    ground::Namespace,
    machine::Load,
    meter::{Cpu, settle},
    objects::{self, Objects, Size},
    store::{Files, Store},
    subject::{Origin, Programs, Running, Subject, Tools},
    undo,
};

#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Services x endpoints
    #[arg(long, default_value = "10000x10")]
    size: Size,
    /// Changes a second, of each
    #[arg(long, default_value_t = 20.0)]
    changes_per_second: f64,
    /// How often each is looked at; the spread between parts is what the machine does
    #[arg(long, default_value_t = 6)]
    parts: u32,
    /// Length of a part
    #[arg(long, default_value_t = 10)]
    part_secs: u64,
    /// The programs
    #[arg(required = true)]
    programs: Vec<PathBuf>,
}

/// A build with what it serves.
struct Rival {
    program: PathBuf,
    running: Running,
    store: Store<'static>,
    objects: Objects,
    /// Milliseconds of CPU for a change, of each part.
    costs: Vec<f64>,
}

pub fn run(options: &Options) -> Result<()> {
    undo::on_interrupt()?;
    let (scratch, undo) = undo::scratch()?;
    let mut rivals = Vec::new();
    for (number, program) in options.programs.iter().enumerate() {
        rivals.push(Rival::start(program, options.size, &scratch.path().join(number.to_string()))?);
    }
    for rival in &mut rivals {
        settle(&rival.running.group, START_LIMIT)?;
        rival.running.check()?;
    }
    let mut turn = 0;
    // The first changes find more to do than any later one.
    change(&mut rivals, options, WARM_UP, &mut turn)?;
    for _ in 0..options.parts {
        measure(&mut rivals, options, &mut turn)?;
    }
    print(&rivals);
    undo.cancel();
    Ok(())
}

impl Rival {
    fn start(program: &Path, size: Size, scratch: &Path) -> Result<Rival> {
        let objects = Objects::new(size);
        let files = Files::new(scratch)?;
        files.fill(&objects)?;
        let programs = Programs {
            portolan: program.canonicalize().with_context(|| program.display().to_string())?,
            kube_proxy: None,
            kube_proxy_flags: Vec::new(),
            iptables: Tools::Legacy,
        };
        let origin = Origin::Folder(files.folder().to_owned());
        let mut running =
            Running::prepare(Subject::PortolanFile, &programs, &Namespace::new()?, origin, scratch)?;
        running.start()?;
        Ok(Rival {
            program: program.to_owned(),
            running,
            store: Store::Files(files),
            objects,
            costs: Vec::new(),
        })
    }

    /// Puts one endpoint in another's place.
    fn swap(&mut self, turn: usize) -> Result<()> {
        let (services, endpoints) = (self.objects.services.len(), self.objects.size.endpoints as usize);
        let entry = &mut self.objects.services[objects::concerned(turn, services)];
        entry.swap(turn % endpoints);
        self.store.write(entry)
    }
}

/// Changes all of them for a while, one after the other. Returns how many changes each had.
fn change(rivals: &mut [Rival], options: &Options, length: Duration, turn: &mut usize) -> Result<u32> {
    let interval = 1.0 / options.changes_per_second.max(0.1) / rivals.len() as f64;
    let (began, mut rounds, mut changes) = (Instant::now(), 0, 0);
    while began.elapsed() < length {
        for rival in rivals.iter_mut() {
            rival.swap(*turn)?;
            changes += 1;
            let next = began + Duration::from_secs_f64(interval * f64::from(changes));
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        rounds += 1;
        *turn += 1;
    }
    // What was written last is in force by then.
    thread::sleep(Duration::from_millis(200));
    Ok(rounds)
}

fn measure(rivals: &mut [Rival], options: &Options, turn: &mut usize) -> Result<()> {
    let before = rivals.iter().map(|rival| rival.running.group.cpu()).collect::<Result<Vec<Cpu>>>()?;
    let rounds = change(rivals, options, Duration::from_secs(options.part_secs), turn)?;
    if rounds == 0 {
        bail!("a part is too short for a single change");
    }
    for (rival, before) in rivals.iter_mut().zip(before) {
        rival.running.check()?;
        let cpu = rival.running.group.cpu()?.since(before);
        rival.costs.push(1e3 * cpu.total_s() / f64::from(rounds));
    }
    Ok(())
}

fn print(rivals: &[Rival]) {
    println!("CPU for each change, ms; load now {:.2}", Load::now().one_minute);
    for rival in rivals {
        let parts: Vec<String> = rival.costs.iter().map(|cost| format!("{cost:.3}")).collect();
        let mean = rival.costs.iter().sum::<f64>() / rival.costs.len().max(1) as f64;
        let median = Quantiles::of(rival.costs.clone()).map_or(f64::NAN, |found| found.p50_ms);
        println!(
            "{:30} mean {mean:.3}  median {median:.3}  parts {}",
            rival.program.display(),
            parts.join(" ")
        );
    }
}

const START_LIMIT: Duration = Duration::from_secs(120);
const WARM_UP: Duration = Duration::from_secs(3);
