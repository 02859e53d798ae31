// SPDX-License-Identifier: Apache-2.0

//! `portolan demo`: a small cluster in network namespaces, real requests, and a live table of who answers them
//! while an endpoint goes away and comes back.
//!
//! - [`stage`]: the cluster, the manifests, the proxy
//! - [`load`]: the requests
//! - [`screen`]: the table
//! - this file: the story

mod load;
mod screen;
mod stage;

use std::{
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use self::{
    load::{Load, PATHS, Sample, Summary},
    screen::{Row, Screen, time},
    stage::{Change, Stage},
};
use super::{say, usage_error};
use crate::flags::parse::{Flag, parse, usage};

/// The pods that answer, and the columns of the table.
const PODS: [&str; 3] = ["a1", "b1", "b2"];
/// The one that goes away.
const LEAVES: &str = "b1";
/// How often the table is drawn.
const TICK: Duration = Duration::from_millis(200);
/// What the endpoint columns show while it is live.
const WINDOW: Duration = Duration::from_secs(1);

struct Options {
    seconds: u64,
}

const FLAGS: &[Flag<Options>] = &[
    Flag::new("seconds", "n", "18", "How long it takes, at least 3.", |options, value| {
        options.seconds =
            value.parse().ok().filter(|n| (3..=86_400).contains(n)).ok_or("not a number from 3 to 86400")?;
        Ok(())
    }),
    Flag::boolean("help", "false", "Print this text.", |_: &mut Options, _| Ok(())).letter('h'),
];

/// Ends with success if every request was answered by a pod that should.
pub fn run(args: &[String]) -> ExitCode {
    let mut options = Options { seconds: 18 };
    match parse(FLAGS, &mut options, args) {
        Ok(parsed) if parsed.positional.is_empty() => {}
        Ok(parsed) => return usage_error(&format!("demo takes no arguments, got {:?}", parsed.positional)),
        Err(error) => return usage_error(&error),
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    if let Err(error) = listen_for_interrupt(Arc::clone(&interrupted)) {
        return say(&error);
    }
    match play(Duration::from_secs(options.seconds), &interrupted) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => say(&error),
    }
}

/// What it does.
pub fn help() -> String {
    format!(
        "Usage: portolan demo [flags]    (as root)\n\n\
         Builds a small cluster of network namespaces, serves examples/ there, sends requests, and shows who answers\n\
         while an endpoint goes and comes back. Leaves nothing behind.\n\nFlags:\n{}",
        usage(FLAGS)
    )
}

/// The story; whether all went well.
fn play(length: Duration, interrupted: &AtomicBool) -> Result<bool, String> {
    let begun = Instant::now();
    let stage = Stage::build()?;
    stage.first_commit()?;
    let mut screen = Screen::open();
    screen.say(
        "{b}portolan demo{0}: two nodes, pods and a client in network namespaces, served from examples/",
    );
    screen.say(&format!(
        "built and in force after {}; each request is a new connection",
        time(begun.elapsed())
    ));
    screen.outcome()?;
    let mut show = Show::start(&stage, screen, interrupted)?;
    let act = length / 3;

    show.run("all endpoints serve", act);
    if show.goes_on() {
        let gone = stage.save(Some(LEAVES))?;
        show.tell(&format!("{LEAVES} is taken out of the manifests"), gone);
        show.run(&format!("without {LEAVES}"), act);
        show.strays = show.answers_since(show.scene);
    }
    if show.goes_on() {
        let back = stage.save(None)?;
        show.tell(&format!("{LEAVES} is put back"), back);
        show.run("all endpoints serve again", act);
    }
    show.end()
}

struct Show<'a> {
    load: Load,
    screen: Screen,
    interrupted: &'a AtomicBool,
    begun: Instant,
    /// When the present scene began.
    scene: Instant,
    /// Requests that reached the endpoint although it was gone.
    strays: usize,
}

impl<'a> Show<'a> {
    fn start(stage: &Stage, screen: Screen, interrupted: &'a AtomicBool) -> Result<Show<'a>, String> {
        let load = Load::start(&stage.lab)?;
        let now = Instant::now();
        Ok(Show { load, screen, interrupted, begun: now, scene: now, strays: 0 })
    }

    fn goes_on(&self) -> bool {
        !self.interrupted.load(Relaxed)
    }

    /// A scene: the table, live or at its end.
    fn run(&mut self, title: &str, length: Duration) {
        self.scene = Instant::now();
        while self.goes_on() && self.scene.elapsed() < length {
            if self.screen.is_live() {
                let heading = format!("{title}; shares of the last second; Ctrl-C ends it");
                self.draw(&heading, Instant::now().checked_sub(WINDOW).unwrap_or(self.scene));
            }
            thread::sleep(TICK.min(length.saturating_sub(self.scene.elapsed())));
        }
        self.draw(&format!("{title}; shares of {}", time(self.scene.elapsed())), self.scene);
        if self.screen.is_live() {
            let scene = self.sum(|sample| sample.start >= self.scene);
            self.screen.say(&format!("{:>8}  {title}: {}", self.clock(Instant::now()), shares(&scene)));
        }
    }

    /// All paths together.
    fn sum(&self, choose: impl Fn(&Sample) -> bool) -> Summary {
        let paths = (0..PATHS.len()).map(|path| self.load.summary(path, &choose));
        paths.reduce(Summary::plus).unwrap_or_default()
    }

    fn clock(&self, at: Instant) -> String {
        format!("{:.1} s", at.saturating_duration_since(self.begun).as_secs_f64())
    }

    fn draw(&mut self, heading: &str, since: Instant) {
        let rows = std::array::from_fn(|path| Row {
            total: self.load.summary(path, |_| true),
            recent: self.load.summary(path, |sample| sample.start >= since),
        });
        self.screen.table(heading, &rows);
    }

    /// What was changed, and how fast it was in force.
    fn tell(&mut self, what: &str, change: Change) {
        let (at, took) = (self.clock(change.at), time(change.took));
        if !self.screen.is_live() {
            self.screen.say("");
        }
        self.screen.say(&format!("{{b}}{at:>8}  {what}: in the kernel {took} after the file was saved{{0}}"));
    }

    /// How many requests that began after `since` were answered by the endpoint that left.
    fn answers_since(&self, since: Instant) -> usize {
        let answers = self.sum(|sample| sample.start > since).answers;
        PODS.iter().zip(answers).filter(|(pod, _)| **pod == LEAVES).map(|(_, count)| count).sum()
    }

    fn end(mut self) -> Result<bool, String> {
        self.load.stop();
        if self.screen.is_live() {
            self.draw("from the beginning to the end", self.begun);
            self.screen.keep();
        }
        let Summary { requests, failed, .. } = self.sum(|_| true);
        let good = failed + self.strays == 0;
        let (color, paths, strays) = (if good { "{g}" } else { "{r}" }, PATHS.len(), self.strays);
        self.screen.say("");
        self.screen.say(&format!(
            "{color}{requests} requests on {paths} paths: {failed} failed, {strays} went to {LEAVES} after it had gone{{0}}"
        ));
        for (reason, count) in self.load.failures() {
            self.screen.say(&format!("{{r}}{count} x {reason}{{0}}"));
        }
        self.screen.say("{d}the namespaces, and everything in them, go with this process{0}");
        self.screen.outcome().map(|()| good)
    }
}

/// `a1 34%  b1 33%  b2 33%  of 2345 requests`
fn shares(summary: &Summary) -> String {
    let answered = summary.answers.iter().sum::<usize>().max(1);
    let each =
        PODS.iter().zip(summary.answers).map(|(pod, count)| format!("{pod} {}%  ", count * 100 / answered));
    format!("{}of {} requests, {} failed", each.collect::<String>(), summary.requests, summary.failed)
}

/// Ctrl-C, or SIGTERM, ends the present scene and the ones to come.
fn listen_for_interrupt(interrupted: Arc<AtomicBool>) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot receive signals: {error}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let signal = runtime.block_on(crate::app::stop_signal());
            interrupted.store(signal.is_ok(), Relaxed);
        })
        .map_err(failed)?;
    Ok(())
}
