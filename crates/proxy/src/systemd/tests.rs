// SPDX-License-Identifier: Apache-2.0

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, mpsc as channel},
    thread,
    time::SystemTime,
};

use dataplane::{Applied, Dataplane, Error, Scope};
use model::{DetectLocal, Kind, PerFamily, Plan, Settings, Update};
use tempfile::TempDir;
use tokio::sync::{Notify, mpsc};

use super::*;
use crate::{
    metrics::Metrics,
    reconcile::{Ports, Reconciler, Tuning},
    status::Status,
};

const SECOND: Duration = Duration::from_secs(1);

/// A socket that listens, as systemd's does.
struct Ear {
    socket: UnixDatagram,
    path: PathBuf,
    _folder: TempDir,
}

impl Ear {
    fn new() -> Ear {
        let folder = TempDir::new().expect("a folder for temporary files");
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_nonblocking(true).expect("a flag");
        Ear { socket, path, _folder: folder }
    }

    fn systemd(&self, watchdog: Option<Duration>) -> Systemd {
        Systemd::open(self.path.as_os_str(), watchdog).expect("somebody listens")
    }

    /// Everything said since the last look, a datagram each.
    fn heard(&self) -> Vec<String> {
        heard(&self.socket)
    }
}

fn heard(socket: &UnixDatagram) -> Vec<String> {
    let mut buffer = [0; 4096];
    let mut all = Vec::new();
    while let Ok(length) = socket.recv(&mut buffer) {
        all.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    all
}

#[test]
fn ready_is_said_once_and_only_when_everything_is_served() {
    let ear = Ear::new();
    let systemd = ear.systemd(None);
    let now = Instant::now();
    assert_eq!(systemd.round(now, false), None);
    assert_eq!(ear.heard(), [""; 0]);
    systemd.round(now, true);
    systemd.round(now, true);
    systemd.round(now, false);
    systemd.round(now, true);
    assert_eq!(ear.heard(), ["READY=1"]);
}

#[test]
fn the_watchdog_is_fed_by_rounds_and_by_nothing_else() {
    let ear = Ear::new();
    let systemd = ear.systemd(Some(30 * SECOND));
    let start = Instant::now();
    assert_eq!(systemd.round(start, false), Some(start + 10 * SECOND));
    assert_eq!(ear.heard(), ["WATCHDOG=1"]);
    // A busy loop does not flood, and is told the same time again.
    assert_eq!(systemd.round(start + 3 * SECOND, false), Some(start + 10 * SECOND));
    assert_eq!(ear.heard(), [""; 0]);
    assert_eq!(systemd.round(start + 10 * SECOND, true), Some(start + 20 * SECOND));
    assert_eq!(ear.heard(), ["READY=1", "WATCHDOG=1"]);
    systemd.status("anything else");
    systemd.reloading();
    assert!(!ear.heard().contains(&"WATCHDOG=1".to_owned()));
}

#[test]
fn a_reload_names_its_time_and_ends_ready() {
    let ear = Ear::new();
    let systemd = ear.systemd(None);
    systemd.reloading();
    systemd.reloaded();
    let heard_early = ear.heard();
    assert_eq!(heard_early.len(), 1, "not ready before the first programming: {heard_early:?}");
    systemd.round(Instant::now(), true);
    ear.heard();
    systemd.reloading();
    systemd.reloaded();
    systemd.stopping();
    let heard = ear.heard();
    let micros = heard[0].strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect("the time of the reload");
    assert!(micros.parse::<u64>().expect("a number") > 0);
    assert_eq!(heard[1..], ["READY=1", "STOPPING=1"]);
}

#[test]
fn status_is_one_line_and_told_when_it_differs() {
    let ear = Ear::new();
    let systemd = ear.systemd(None);
    systemd.status("serving");
    systemd.status("serving");
    systemd.status("cannot program\nREADY=1");
    assert_eq!(ear.heard(), ["STATUS=serving", "STATUS=cannot program"]);
}

#[test]
fn abstract_sockets_are_found() {
    let name = format!("portolan-test-{}-{:?}", std::process::id(), Instant::now());
    let address = SocketAddr::from_abstract_name(&name).expect("a short name");
    let socket = UnixDatagram::bind_addr(&address).expect("a socket");
    socket.set_nonblocking(true).expect("a flag");
    let systemd = Systemd::open(OsStr::new(&format!("@{name}")), None).expect("somebody listens");
    systemd.stopping();
    assert_eq!(heard(&socket), ["STOPPING=1"]);
}

#[test]
fn nobody_there_is_no_trouble() {
    let nobody = Systemd::default();
    nobody.stopping();
    assert_eq!(nobody.round(Instant::now(), true), None);
    assert!(!nobody.listens());
    for wrong in ["", "@", "relative", "/absent/notify", "@portolan-nobody-listens-here"] {
        assert!(Systemd::open(OsStr::new(wrong), None).is_err(), "{wrong}");
    }
    let ear = Ear::new();
    let systemd = ear.systemd(Some(SECOND));
    drop(ear);
    systemd.round(Instant::now(), true);
    systemd.stopping();
}

#[test]
fn what_a_full_queue_refused_is_said_again() {
    let ear = Ear::new();
    let systemd = ear.systemd(Some(30 * SECOND));
    // Longer than any queue that the kernel allows: net.unix.max_dgram_qlen, or what the buffer holds.
    while systemd.told.lock().expect("unpoisoned").failed.eq(&false) {
        systemd.tell(&"X=".repeat(4000));
    }
    let start = Instant::now();
    assert_eq!(systemd.round(start, true), Some(start + AGAIN));
    systemd.status("serving");
    assert!(ear.heard().iter().all(|words| words.starts_with("X=")));
    assert_eq!(systemd.round(start + AGAIN, true), Some(start + AGAIN + 10 * SECOND));
    systemd.status("serving");
    assert_eq!(ear.heard(), ["READY=1", "WATCHDOG=1", "STATUS=serving"]);
}

#[test]
fn the_interval_is_for_the_process_it_names() {
    let interval = |pairs: &[(&str, &str)]| {
        let variables: HashMap<&str, &str> = pairs.iter().copied().collect();
        interval(|name| variables.get(name).map(|value| (*value).to_owned()))
    };
    let me = std::process::id().to_string();
    assert_eq!(interval(&[]), None);
    assert_eq!(interval(&[("WATCHDOG_USEC", "30000000")]), Some(30 * SECOND));
    assert_eq!(interval(&[("WATCHDOG_USEC", "30000000"), ("WATCHDOG_PID", &me)]), Some(30 * SECOND));
    assert_eq!(interval(&[("WATCHDOG_USEC", "30000000"), ("WATCHDOG_PID", "1")]), None);
    for wrong in ["0", "", "-1", "soon", "99999999999999999999999"] {
        assert_eq!(interval(&[("WATCHDOG_USEC", wrong)]), None, "{wrong}");
    }
}

/// A dataplane whose every write lasts until it is let go.
struct Stuck(channel::Receiver<()>);

impl Dataplane for Stuck {
    fn apply(&mut self, _: &Plan, _: Scope<'_>) -> Result<Applied, Error> {
        let _ = self.0.recv();
        Ok(Applied::default())
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn dump(&mut self) -> Result<String, Error> {
        Ok(String::new())
    }
}

fn watched_loop(systemd: Systemd) -> (Reconciler, channel::Sender<()>) {
    let families = PerFamily { v4: true, v6: false };
    let settings = Settings {
        node_name: "here".into(),
        families,
        node_ip_override: PerFamily::default(),
        detect_local: DetectLocal::ClusterCidr(PerFamily::default()),
        node_port_addresses: Box::default(),
        masquerade_all: false,
        external_ips: true,
    };
    let (release, held) = channel::channel();
    let mut held = Some(held);
    let ports = Ports {
        seat: crate::claim::Seat::free(),
        open: Box::new(move || Ok(Box::new(Stuck(held.take().ok_or("opened once")?)))),
        sweep: Box::new(|_, _| {}),
        publish: Box::new(|_, _| {}),
        events: crate::events::Recorder::default(),
        connections: Arc::default(),
        status: Arc::new(Status::new(families, 30 * SECOND, false)),
        metrics: Arc::new(Metrics::new(SystemTime::now())),
        tuning: tokio::sync::watch::channel(Tuning { settings, max_pause: SECOND }).1,
    };
    let reconciler = Reconciler::new(ports, SECOND, true).expect("it opens");
    (reconciler.watched_by(Arc::new(systemd)), release)
}

/// Waits until all of these have been heard, in any number and order.
fn hear(ear: &Ear, wanted: &[&str]) {
    let mut all = Vec::new();
    let deadline = Instant::now() + 60 * SECOND;
    while !wanted.iter().all(|word| all.iter().any(|heard| heard == word)) {
        assert!(Instant::now() < deadline, "{wanted:?} not heard, but {all:?}");
        all.extend(ear.heard());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_loop_that_hangs_starves_the_watchdog() {
    let ear = Ear::new();
    let period = Duration::from_millis(60);
    let (reconciler, release) = watched_loop(ear.systemd(Some(period)));
    let (updates, inbox) = mpsc::channel(100);
    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let thread = thread::spawn(move || reconciler.run(inbox, &stopped));

    // Nothing to do, and fed all the same.
    hear(&ear, &["WATCHDOG=1", "STATUS=waiting for a complete view of the cluster"]);
    hear(&ear, &["WATCHDOG=1"]);
    for kind in [Kind::Service, Kind::EndpointSlice, Kind::Node, Kind::ServiceCidr] {
        updates.blocking_send(Update::Begin(kind)).expect("the loop listens");
        updates.blocking_send(Update::End(kind)).expect("the loop listens");
    }
    updates
        .blocking_send(Update::HostAddresses(Box::new([[192, 0, 2, 5].into()])))
        .expect("the loop listens");
    // The write hangs. What was said before it may still arrive; then there is silence, for thirty feedings.
    let deadline = Instant::now() + 60 * SECOND;
    loop {
        ear.heard();
        thread::sleep(period * 10);
        if ear.heard().is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "the watchdog is fed while the loop hangs");
    }
    release.send(()).expect("the write waits");
    hear(&ear, &["READY=1", "WATCHDOG=1", "STATUS=all services are in force"]);
    stop.notify_one();
    // A write that is under way must end first.
    drop(release);
    thread.join().expect("the loop ends");
}
