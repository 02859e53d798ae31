// SPDX-License-Identifier: Apache-2.0

//! The program under a service manager: a socket that hears what systemd would.

use std::{
    fs,
    os::unix::net::UnixDatagram,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use netlink::Netns;
use rustix::process::{Pid, Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(60);
const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web, annotations: {portolan.dev/endpoints: \
                       \"10.244.1.1:8080\"}}\nspec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}\n";

/// Ends the child, however the test ends.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Daemon {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it lives");
    }
}

/// Reads on until `word` is heard; returns all that was, the word included.
fn hear(ear: &UnixDatagram, word: &str) -> Vec<String> {
    let deadline = Instant::now() + PATIENCE;
    let mut all: Vec<String> = Vec::new();
    let mut buffer = [0; 4096];
    while all.last().is_none_or(|last| !last.starts_with(word)) {
        assert!(Instant::now() < deadline, "{word} not heard, but {all:?}");
        if let Ok(length) = ear.recv(&mut buffer) {
            all.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
    }
    all
}

#[test]
fn systemd_hears_ready_watchdog_reloading_and_stopping() {
    let netns = match Netns::new() {
        Ok(netns) => netns,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "this test must have privileges in CI: {error}");
            println!("skipped: {error}");
            return;
        }
    };
    let folder = tempfile::tempdir().expect("a folder");
    // Not an abstract socket: those belong to a network namespace, and the program has one of its own here.
    let socket = folder.path().join("notify");
    let ear = UnixDatagram::bind(&socket).expect("a socket");
    ear.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    let services = folder.path().join("services");
    fs::create_dir(&services).expect("a folder");
    let spawn = || {
        Command::new(env!("CARGO_BIN_EXE_portolan"))
            .arg(format!("--source=file:{}", services.display()))
            .args(["--healthz-port=0", "--metrics-port=0"])
            .env("NOTIFY_SOCKET", &socket)
            .env("WATCHDOG_USEC", "300000")
            .stderr(Stdio::null())
            .spawn()
    };
    fs::write(services.join("web.yaml"), SERVICE).expect("written");
    let mut daemon = Daemon(netns.run(spawn).expect("entered").expect("spawned"));

    let before = hear(&ear, "READY=1");
    let waiting =
        before.iter().position(|heard| heard.starts_with("STATUS=waiting")).expect("a first status");
    assert!(waiting < before.len() - 1, "{before:?}");
    let dump = || Command::new(env!("CARGO_BIN_EXE_portolan")).arg("dump").output();
    let dump = netns.run(dump).expect("entered").expect("it runs");
    assert!(
        String::from_utf8_lossy(&dump.stdout).contains("10.96.0.10"),
        "ready means that the kernel has it all: {dump:?}"
    );
    for _ in 0..3 {
        hear(&ear, "WATCHDOG=1");
    }
    daemon.signal(Signal::HUP);
    let reload = hear(&ear, "RELOADING=1");
    assert!(reload.last().is_some_and(|words| words.contains("\nMONOTONIC_USEC=")), "{reload:?}");
    hear(&ear, "READY=1");
    daemon.signal(Signal::TERM);
    hear(&ear, "STOPPING=1");
    assert!(daemon.0.wait().expect("it ends").success());
}
