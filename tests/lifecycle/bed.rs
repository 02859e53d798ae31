// SPDX-License-Identifier: Apache-2.0

//! A node to live on: a lab, an API server on node-a that can be sent away, and the real program beside it.

use std::{
    env,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Arc, OnceLock},
    thread,
};

use lab::{Lab, Layout, address::Version};
use netlink::Netns;
use serde_json::Value;
use stage::{
    Daemon, answer_everywhere,
    load::{self, Line, Load},
    manifest,
};
use tempfile::TempDir;
use testkit::{
    apiserver::{ApiServer, Login},
    pace::slowness,
};

/// The node port of [`Bed::build`]'s service.
pub(crate) const NODE_PORT: u16 = 30_080;

/// What goes on while something happens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Traffic {
    /// New connections, and streams and UDP flows that stay open.
    All,
    /// New connections only.
    New,
}

/// Connections between two events: so many that each line has some, and no more than a slow machine makes in time.
pub(crate) fn round() -> u64 {
    if slowness() > 1 { 30 } else { 100 }
}

/// See the module.
pub(crate) struct Bed {
    // First, so that it ends first.
    pub(crate) daemon: Daemon,
    pub(crate) server: ApiServer,
    /// Shared, so that a load can use it while the rest is borrowed.
    pub(crate) lab: Arc<Lab>,
    kubeconfig: PathBuf,
    state: TempDir,
}

impl Bed {
    /// A node with one service `web` on three pods, and no daemon yet. `None`, with a line that says so, without
    /// root; but in CI that fails.
    pub(crate) fn build() -> Option<Bed> {
        if !rustix::process::geteuid().is_root() {
            assert!(env::var_os("CI").is_none(), "network namespaces need root");
            println!("skipped: network namespaces need root");
            return None;
        }
        let mut lab = Lab::build(Layout::default()).expect("a lab can be built");
        answer_everywhere(&mut lab);
        let state = TempDir::with_prefix("lifecycle-").expect("a folder for temporary files");
        let server = node_a(&lab).run(ApiServer::start).expect("node-a can be entered");
        let kubeconfig = server.kubeconfig(state.path(), Login::Token);
        let daemon = Daemon::new(
            program().to_owned(),
            node_a(&lab).try_clone().expect("a handle"),
            state.path().to_owned(),
        );
        let bed = Bed { daemon, server, lab: Arc::new(lab), kubeconfig, state };
        bed.put([manifest::node(), manifest::exposed("web", 10, NODE_PORT)]);
        bed.put(manifest::slices("web", &["a1", "a2", "b1"]));
        Some(bed)
    }

    pub(crate) fn put(&self, objects: impl IntoIterator<Item = Value>) {
        for object in objects {
            self.server.put(object);
        }
    }

    /// The flags of every start.
    pub(crate) fn flags(&self) -> Vec<String> {
        vec![format!("--kubeconfig={}", self.kubeconfig.display())]
    }

    /// What any proxy finds the API server by.
    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Starts the daemon, and returns when it serves.
    pub(crate) fn start(&mut self) {
        self.start_with(&[]);
    }

    /// The same with more flags.
    pub(crate) fn start_with(&mut self, more: &[&str]) {
        let flags: Vec<String> =
            self.flags().into_iter().chain(more.iter().map(|flag| (*flag).to_owned())).collect();
        self.daemon.start(&flags);
        self.daemon.must_serve();
    }

    /// Runs `event` under load from everywhere. Somebody must serve when it begins, the daemon when it ends; `event` gets
    /// a function that lets the load go on for a while.
    pub(crate) fn under_load(
        &mut self,
        traffic: Traffic,
        what: &str,
        event: impl FnOnce(&mut Bed, &dyn Fn()),
    ) {
        let lab = Arc::clone(&self.lab);
        thread::scope(|scope| {
            let load = match traffic {
                Traffic::All => Load::begin(scope, &lab, &everywhere()),
                Traffic::New => Load::begin_new(scope, &lab, &everywhere()),
            };
            let go_on = || load.go_on(round());
            go_on();
            event(self, &go_on);
            self.daemon.must_serve();
            go_on();
            load.end(what);
        });
    }

    /// Where a test may write files.
    pub(crate) fn folder(&self) -> &Path {
        self.state.path()
    }

    pub(crate) fn node(&self) -> &Netns {
        node_a(&self.lab)
    }

    /// Runs a program on node-a, which must succeed; what it printed.
    #[track_caller]
    pub(crate) fn command(&self, words: &[&str]) -> String {
        let output = self.try_command(words).expect("it can be run");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a program on node-a; `None` where there is no such program.
    pub(crate) fn try_command(&self, words: &[&str]) -> Option<Output> {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        self.node().run(|| command.output()).expect("node-a can be entered").ok()
    }
}

/// From everywhere to the service of [`Bed::build`].
pub(crate) fn everywhere() -> Vec<Line> {
    load::everywhere(NODE_PORT)
}

/// A cluster IP of the lab.
pub(crate) fn cluster_ip(host: u16) -> IpAddr {
    manifest::cluster_ip(Version::V4, host)
}

fn node_a(lab: &Lab) -> &Netns {
    lab.netns("node-a").expect("it is in the lab")
}

/// The program under test, as it is now: `PORTOLAN_PROGRAM`, or a debug build that is made here if it is not fresh.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(given) = env::var_os("PORTOLAN_PROGRAM") {
            return given.into();
        }
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package", "portolan"]).current_dir(portolan_tests::root());
        // What cargo tells a test of its package would make build scripts run anew, and half of everything with them.
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_", "CARGO_PRIMARY_"];
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy();
            if of_package.iter().any(|prefix| name.starts_with(prefix)) {
                build.env_remove(&*name);
            }
        }
        let status = build.status();
        assert!(status.is_ok_and(|status| status.success()), "the program cannot be built");
        // We are in DIR/debug/deps.
        let here = env::current_exe().expect("we run from a file");
        let folder = here.parent().and_then(Path::parent).expect("it is in a folder of a folder");
        folder.join("portolan")
    })
}
