// SPDX-License-Identifier: Apache-2.0

//! The daemon on a stage: the real API server and etcd inside a lab, kubectl, and packets.
//!
//! # Layout
//!
//! - `control`: the API server, started, stopped and started again
//! - `daemon`: the program under test
//! - [`load`]: traffic that goes on while something happens, and the count of what suffered
//! - `manifest`: the objects
//! - [`rival`]: the real kube-proxy
//! - `traffic`: questions and what is expected of the answers
//! - [`Stage`]: all of them together
//!
//! Nothing here is on a clock: what is expected is asked for again until it is so, and only a generous patience
//! ends the wait.

#![forbid(unsafe_code)]

mod control;
mod daemon;
pub mod load;
pub mod manifest;
pub mod rival;
mod traffic;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use lab::{Lab, Layout};
use serde_json::Value;
use tempfile::TempDir;
use testkit::pace::slowness;

pub use self::{
    control::Control,
    daemon::{Daemon, Ending},
    traffic::{Steady, Target, answer_everywhere},
};

/// The longest anything may take. The machine may be busy: only a test that fails waits so long.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// One cluster: a lab with node-a's API server and the daemon on node-a.
pub struct Stage {
    // First, so that it ends first: a daemon without its network only fills its log.
    pub daemon: Daemon,
    pub control: Control,
    pub lab: Lab,
    /// Where the programs of Kubernetes are.
    pub tools: PathBuf,
    _state: TempDir,
}

impl Stage {
    /// A stage with an empty cluster that has this node, and no daemon yet.
    ///
    /// `None`, with a line that says so, where the API server is not given (see `tests/cluster/run`).
    pub fn build() -> Option<Stage> {
        let tools = folder("PORTOLAN_CLUSTER_TOOLS_DIR")?;
        let program = folder("PORTOLAN_PROGRAM")?;
        let mut lab = Lab::build(Layout::default()).expect("a lab can be built");
        answer_everywhere(&mut lab);
        let state = TempDir::with_prefix("stage-").expect("a folder for temporary files");
        let node =
            lab.netns("node-a").and_then(|netns| Ok(netns.try_clone()?)).expect("node-a is in the lab");
        let control =
            Control::start(&tools, state.path().join("control"), node.try_clone().expect("a handle"));
        control.create(&manifest::node());
        let daemon = Daemon::new(program, node, state.path().to_owned());
        Some(Stage { daemon, control, lab, tools, _state: state })
    }

    /// The real kube-proxy on node-a, not started yet. `None`, with a line that says so, where it was not built.
    pub fn kube_proxy(&self) -> Option<Daemon> {
        let program = folder("PORTOLAN_CLUSTER_TOOLS_DIR")?.join("kube-proxy");
        if !program.exists() {
            println!("skipped: there is no kube-proxy; `tools/cluster/build kube-proxy` builds it");
            return None;
        }
        let folder = self.state().join("kube-proxy");
        std::fs::create_dir_all(&folder).expect("a folder can be made");
        let node = self.lab.netns("node-a").and_then(|netns| Ok(netns.try_clone()?));
        Some(Daemon::new(program, node.expect("node-a is in the lab"), folder))
    }

    /// Where a test may write files.
    pub fn state(&self) -> &Path {
        self._state.path()
    }

    /// Another daemon on node-a that does not run.
    pub fn idle_daemon(&self) -> Daemon {
        let node = self.lab.netns("node-a").and_then(|netns| Ok(netns.try_clone()?)).expect("node-a");
        Daemon::new(self.daemon.program().to_owned(), node, self.state().to_owned())
    }

    /// Starts the daemon with this kubeconfig.
    pub fn start_daemon(&mut self, kubeconfig: &Path) {
        self.daemon.start(&[format!("--kubeconfig={}", kubeconfig.display())]);
    }

    /// Creates or changes objects with kubectl.
    pub fn apply(&self, objects: &[Value]) {
        let list = manifest::list(objects);
        self.control.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", "-"], Some(&list));
    }

    /// Deletes an object with kubectl.
    pub fn delete(&self, kind: &str, name: &str) {
        self.control.kubectl(&["delete", kind, name, "--wait=false"], None);
    }
}

fn folder(variable: &str) -> Option<PathBuf> {
    let value = std::env::var_os(variable).map(PathBuf::from);
    if value.is_none() {
        println!("skipped: {variable} is not set; `make test-cluster` sets it");
    }
    value
}

/// Asks until the answer is `Ok`, and fails with the last answer when patience is over.
#[track_caller]
pub fn eventually<T>(what: &str, ask: impl FnMut() -> Result<T, String>) -> T {
    match wait_for(PATIENCE, ask) {
        Ok(value) => value,
        Err(last) => panic!("{what}: not within {:?}: {last}", PATIENCE * slowness()),
    }
}

/// Asks until the answer is `Ok` or patience is over, which lasts longer on a slow machine; the last answer.
pub fn wait_for<T>(patience: Duration, mut ask: impl FnMut() -> Result<T, String>) -> Result<T, String> {
    let deadline = Instant::now() + patience * slowness();
    loop {
        match ask() {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            answer => return answer,
        }
    }
}

/// The last lines of a log, for a test that fails.
fn print_end(whose: &str, log: &Path, count: usize) {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    println!("the end of what {whose} logged:\n{}", lines[lines.len().saturating_sub(count)..].join("\n"));
}
