// SPDX-License-Identifier: Apache-2.0

//! All wiring: which thread runs what, and what flows between them.
//!
//! ```text
//!   source (async) ──┐ updates                       ┌── health and metrics servers (async)
//!   host addresses ──┴──────────> reconcile thread ──┤ status, metrics
//!   (thread)                           │ stale flows └──────────────
//!                                      └──────────> conntrack thread
//! ```

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, atomic::AtomicU64, mpsc as channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use dataplane::{Dataplane, Mode};
use model::{Family, PerFamily, Settings, Update};
use netlink::Netns;
use source::Problems;
use tokio::{
    runtime::{Builder, Runtime},
    signal::unix::{SignalKind, signal},
    sync::{Notify, mpsc, watch},
};

use crate::{
    checks,
    claim::Seat,
    config::{Config, check::Checked, surprise},
    connections::Connections,
    endpoints::Endpoints,
    events::{Note, Recorder, Regarding},
    fallback::{Fallback, settle},
    farewell,
    feed::Feed,
    flags::{Options, Source},
    flows, health, host, http,
    live::Live,
    metrics::{self, Accounted, Metrics, Outside, ip_family},
    node,
    reconcile::{Ports, Reconciler, Tuning},
    reload::{Origin, Reload},
    status::Status,
    systemd::Systemd,
};

/// So many updates may wait for the reconcile thread; then sources wait.
const INBOX: usize = 16 * 1024;
/// A failed write is tried again at least this often.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// So long an event that tells why we end has to leave.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What to run, and where.
pub struct Setup {
    pub config: Config,
    pub checked: Checked,
    pub source: Source,
    pub master: String,
    /// Every flag with its value, for `/flagz`.
    pub flags: BTreeMap<&'static str, String>,
    /// The network namespace to serve; the process's own if `None`. The servers are in the process's own.
    pub netns: Option<Netns>,
}

/// A proxy that runs until it is dropped. What is in the kernel stays.
pub struct Proxy {
    pub status: Arc<Status>,
    pub metrics: Arc<Metrics>,
    pub problems: Arc<Problems>,
    pub connections: Arc<Connections>,
    systemd: Arc<Systemd>,
    /// Connections that this process carries, and how long they may go on at the end.
    carried: Option<farewell::Carried>,
    /// Why it cannot go on, if that happens.
    fatal: mpsc::Receiver<String>,
    give_up: mpsc::Sender<String>,
    live: Arc<Live>,
    runtime: Option<Runtime>,
    stop: Arc<Notify>,
    reconcile: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts everything. The error is one sentence.
    pub fn start(setup: Setup) -> Result<Proxy, String> {
        let Setup { mut config, mut checked, source, master, flags, netns } = setup;
        let netns = netns.map(Arc::new);
        let (families, fallback) = in_netns(netns.as_deref(), || foresee(&mut config, &mut checked))??;
        let mode = checked.mode;
        let accounted = Accounted::find(mode, netns.as_deref());
        let node_name = host::node_name(&config.hostname_override)?;
        let started = metrics::start_time();
        let metrics = Arc::new(Metrics::new(started));
        let problems = Arc::new(Problems::new());
        let from_files = matches!(source, Source::File(_));
        let status = Arc::new(Status::new(families, checked.sync_period, !from_files));
        let runtime = runtime()?;
        let feed = Feed::open(source, (&config, &master), &node_name)?;

        describe(&metrics, &config, &feed);
        let events = recorder(&runtime, &feed, &node_name, &metrics);
        fallback.iter().for_each(|fallback| fallback.tell(&metrics, &events));
        let place = (node_name, families);
        let (live, tuning) = Live::new((config, &checked), place, (&status, &metrics), netns.clone());
        let connections = Arc::new(Connections::default());
        let for_dataplane = checked.clone();
        let open = Box::new(move || open(&for_dataplane, families));
        let ports = ports(open, (&events, &connections), (&status, &metrics), tuning);
        let (updates, inbox) = mpsc::channel(INBOX);
        let stop = Arc::new(Notify::new());
        let systemd = Arc::new(Systemd::from_environment());
        let told = Arc::clone(&systemd);
        let relief = farewell::relief(&checked, families);
        let make = move || {
            let reconciler = Reconciler::new(at_home(ports), MAX_BACKOFF, from_files)?;
            Ok(reconciler.watched_by(told).taking_over(mode).relieved_by(relief))
        };
        // To ask what the kernel can do takes a while (some 20 ms), in which much can be read.
        let (host, api) = (updates.downgrade(), feed.api());
        feed.start(updates, Arc::clone(&problems))?;
        let reconcile = reconcile(netns.clone(), make, (inbox, Arc::clone(&stop)))?;
        spawn("host", netns, move || host::watch(&host))?;
        events.note(Note::normal("Starting", "StartKubeProxy", Regarding::Node, String::new()));

        let (fatal_sender, fatal) = mpsc::channel(1);
        let carried = farewell::carried(&checked);
        let carrier = carried.as_ref().map(|carried| carried.carrier.clone());
        let endpoints = Endpoints {
            metrics: Arc::clone(&metrics),
            outside: Outside { accounted, carried: carrier, ..Outside::new(&problems, api, &connections) },
            config: live.current().clone(),
            flags,
            started,
            pings: AtomicU64::new(0),
        };
        serve(&runtime, &checked, (&status, endpoints, events), &fatal_sender);
        tell_start(&status, mode);
        Ok(Proxy {
            status,
            metrics,
            problems,
            connections,
            systemd,
            carried,
            fatal,
            give_up: fatal_sender,
            live,
            runtime: Some(runtime),
            stop,
            reconcile: Some(reconcile),
        })
    }

    /// Sets the kernel settings that are asked for, tells what on this node will get in the way, and follows the
    /// configuration files from now on: `origin` is the command line, `options` what it made with them.
    pub fn follow(&self, origin: Origin, options: Options) {
        self.live.settle_at_start();
        self.live.report(options.node_port_range);
        if let Some(runtime) = &self.runtime {
            let reload = Reload::new(Arc::clone(&self.live), origin, options);
            let reload = reload.watched_by(Arc::clone(&self.systemd));
            runtime.spawn(reload.run(self.give_up.clone()));
        }
    }

    /// Waits for a signal to stop, or a reason to give up.
    pub fn wait(mut self) -> Result<(), String> {
        let runtime = self.runtime.take().expect("it is taken only here and when dropped");
        let outcome = runtime.block_on(async {
            tokio::select! {
                signal = stop_signal() => {
                    tracing::info!(signal = signal?, "stopping; what is in the kernel stays");
                    Ok(())
                }
                Some(reason) = self.fatal.recv() => Err(reason),
            }
        });
        self.systemd.stopping();
        // Everything ends with the process. To wait for a sweep that is under way would only delay it, and what
        // the kernel has not taken whole it has not taken at all.
        runtime.shutdown_background();
        if let (Some(carried), Ok(())) = (self.carried.take(), &outcome) {
            farewell::drain(&carried, &self.stop, self.reconcile.take());
        }
        std::mem::forget(self);
        outcome
    }
}

impl Drop for Proxy {
    /// Returns when the kernel is no longer written.
    fn drop(&mut self) {
        self.stop.notify_one();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        if let Some(reconcile) = self.reconcile.take() {
            // It catches its panics, so there is nothing to learn from the result.
            let _ = reconcile.join();
        }
    }
}

/// What the loop needs; what belongs to its thread comes [`at_home`].
fn ports(
    open: Box<dyn FnMut() -> Result<Box<dyn Dataplane>, String> + Send>,
    (events, connections): (&Recorder, &Arc<Connections>),
    (status, metrics): (&Arc<Status>, &Arc<Metrics>),
    tuning: watch::Receiver<Tuning>,
) -> Ports {
    Ports {
        open,
        sweep: Box::new(|_, _| {}),
        publish: Box::new(|_, _| {}),
        events: events.clone(),
        connections: Arc::clone(connections),
        seat: Seat::default(),
        status: Arc::clone(status),
        metrics: Arc::clone(metrics),
        tuning,
    }
}

/// Where events go: to the API server, if there is one.
fn recorder(runtime: &Runtime, feed: &Feed, node_name: &Arc<str>, metrics: &Arc<Metrics>) -> Recorder {
    let start = |access| Recorder::start(runtime.handle(), access, node_name, metrics);
    feed.access().map_or_else(Recorder::default, start)
}

/// Opens the dataplane for these families, in the network namespace of this thread. The error is one sentence.
pub fn open(checked: &Checked, families: PerFamily<bool>) -> Result<Box<dyn Dataplane>, String> {
    let config = dataplane::Config {
        masquerade_bit: checked.masquerade_bit,
        families,
        counted_endpoints: checked.counted_endpoints as usize,
        ipvs: checked.ipvs.clone(),
        relays_loopback: true,
        userspace: checked.userspace.clone(),
        ..dataplane::Config::default()
    };
    dataplane::open(checked.mode, &config).map_err(|error| error.to_string())
}

/// What the configuration decides for the model.
pub fn settings(
    config: &Config,
    checked: &Checked,
    node_name: Arc<str>,
    families: PerFamily<bool>,
) -> Settings {
    let bind = |family: Family| checked.bind_address.filter(|ip| Family::of(*ip) == family);
    Settings {
        node_name,
        families,
        node_ip_override: PerFamily::from_fn(bind),
        detect_local: checked.detect_local.clone(),
        node_port_addresses: node::settle::node_port_addresses(config, checked),
        masquerade_all: config.masquerade_all(),
        external_ips: config.gate("AllowServiceExternalIPs"),
    }
}

fn runtime() -> Result<Runtime, String> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.map_err(|error| format!("cannot start threads: {error}"))
}

/// What the metrics say of the program rather than of its work.
fn describe(metrics: &Arc<Metrics>, config: &Config, feed: &Feed) {
    metrics.build.with(&[env!("CARGO_PKG_VERSION")]).set(1.0);
    metrics::features(metrics, config);
    if let Some(access) = feed.access() {
        metrics::requests(metrics, &access);
    }
}

/// Whether it can be done, and with what; to be called in the network namespace that is served. The error is a sentence; what
/// only surprises is told.
fn foresee(
    config: &mut Config,
    checked: &mut Checked,
) -> Result<(PerFamily<bool>, Option<Fallback>), String> {
    // First of all: with many manifests it would otherwise be a while until it is said.
    if checked.mode != Mode::None {
        host::privileged()?;
    }
    let (families, fallback) = settle(config, checked)?;
    if let Some(reason) = surprise::impossible(checked, families) {
        return Err(reason);
    }
    surprise::surprises(checked, families).iter().for_each(|says| tracing::warn!("{says}"));
    Ok((families, fallback))
}

fn tell_start(status: &Status, mode: Mode) {
    let families: Vec<_> = status.served().map(ip_family).collect();
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(version, %mode, families = families.join(","), "started");
}

/// A thread, in a network namespace if one is named. The error is one sentence.
pub(crate) fn spawn(
    name: &str,
    netns: Option<Arc<Netns>>,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, String> {
    let inside = move || match netns.as_deref().map(Netns::enter) {
        None | Some(Ok(())) => work(),
        Some(Err(error)) => tracing::error!(%error, "cannot enter the network namespace"),
    };
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(inside)
        .map_err(|error| format!("cannot start a thread: {error}"))
}

/// Does it in a network namespace, if one is named.
pub fn in_netns<R: Send>(netns: Option<&Netns>, work: impl FnOnce() -> R + Send) -> Result<R, String> {
    match netns {
        Some(netns) => netns.run(work).map_err(|error| error.to_string()),
        None => Ok(work()),
    }
}

/// Starts the loop in its thread, and returns once the dataplane is open.
fn reconcile(
    netns: Option<Arc<Netns>>,
    make: impl FnOnce() -> Result<Reconciler, String> + Send + 'static,
    (inbox, stop): (mpsc::Receiver<Update>, Arc<Notify>),
) -> Result<JoinHandle<()>, String> {
    let (report, opened) = channel::channel();
    let thread = spawn("reconcile", netns, move || match make() {
        Ok(reconciler) => {
            let _ = report.send(Ok(()));
            reconciler.run(inbox, &stop);
        }
        Err(error) => {
            let _ = report.send(Err(error));
        }
    })?;
    opened.recv().unwrap_or_else(|_| Err("the reconcile thread could not start".to_owned()))?;
    Ok(thread)
}

/// Health and metrics, each where it is configured.
fn serve(
    runtime: &Runtime,
    checked: &Checked,
    (status, endpoints, events): (&Arc<Status>, Endpoints, Recorder),
    fatal: &mpsc::Sender<String>,
) {
    let (status, metrics) = (Arc::clone(status), Arc::clone(&endpoints.metrics));
    let health: Arc<http::Route> =
        Arc::new(move |request| health::route(&status, &metrics, request.uri().path()));
    let operators: Arc<http::Route> = Arc::new(move |request| endpoints.route(request));
    for (name, reason, address, route) in [
        ("healthz", "FailedToStartProxierHealthcheck", checked.healthz, health),
        ("metrics", "FailedToStartMetricServer", checked.metrics, operators),
    ] {
        let Some(address) = address else { continue };
        let (hard_fail, fatal, events) = (checked.bind_address_hard_fail, fatal.clone(), events.clone());
        runtime.spawn(async move {
            if let Err(error) = http::serve(name, address, hard_fail, route).await {
                let text = format!("the {name} server cannot listen on {address}: {error}");
                events.note(Note::warning(reason, "StartKubeProxy", Regarding::Node, text.clone()));
                tokio::time::sleep(LAST_WORDS).await;
                let _ = fatal.send(text).await;
            }
        });
    }
}

/// What belongs to the network namespace of the thread of the loop: to be called there.
fn at_home(ports: Ports) -> Ports {
    let sweep = flows::sweep(&ports.status, &ports.metrics);
    let publish = checks::publish(&ports.status, &ports.metrics, &ports.events);
    Ports { sweep, publish, seat: Seat::take(), ..ports }
}

/// Resolves to the name of the first signal that asks us to stop.
pub async fn stop_signal() -> Result<&'static str, String> {
    let failed = |error: io::Error| format!("cannot receive signals: {error}");
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    Ok(tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    })
}
