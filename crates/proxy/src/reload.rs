// SPDX-License-Identifier: Apache-2.0

//! Follows the configuration files while the proxy runs.
//!
//! ```text
//!   a file of other content, or SIGHUP
//!      -> cannot be used: told, and what is in force stays
//!      -> differs in what can be changed: applied at once
//!      -> differs in anything else: the process ends, and its supervisor starts a new one
//! ```
//!
//! What counts is the content. The folder is watched rather than the file, so that a file that is replaced, and
//! a mounted ConfigMap, which is replaced by turning a link, are noticed; and a regular look finds what no
//! notification told (links into other folders, file systems without notifications).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::StreamExt as _;
use inotify::{Inotify, WatchMask};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::{
    config::{
        check::Checked,
        fields::{self, Difference, Effect},
    },
    flags::Options,
    live::Live,
    systemd::Systemd,
};

/// How often the files are looked at without a notification.
const REGULAR: Duration = Duration::from_secs(15);
/// A file that is being written is read again after this, until it stays the same.
const STEADY: Duration = Duration::from_millis(50);

/// What the files looked like: a file that cannot be read is a state too.
type Snapshot = Vec<(PathBuf, Result<Vec<u8>, String>)>;

/// See the module.
pub struct Reload {
    live: Arc<Live>,
    /// The command line, before any file was read.
    parsed: Options,
    /// What is in force.
    options: Options,
    seen: Snapshot,
    systemd: Arc<Systemd>,
}

/// A command line, and how its files looked before they were read: what changes from then on is a change.
pub struct Origin {
    parsed: Options,
    seen: Snapshot,
}

impl Origin {
    /// To be made before [`Options::complete`].
    pub fn of(parsed: Options) -> Origin {
        let seen = snapshot(&parsed);
        Origin { parsed, seen }
    }
}

/// What to do about a changed file.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// Nothing that anybody could notice.
    Nothing,
    /// These can be changed while we run.
    Adopt { options: Box<Options>, checked: Box<Checked>, fields: Vec<String> },
    /// These cannot.
    Restart(Vec<String>),
    /// The sentence that says why it cannot be used.
    Refuse(String),
}

impl Reload {
    /// `options` is what the command line and its files made together.
    pub fn new(live: Arc<Live>, origin: Origin, options: Options) -> Reload {
        let Origin { parsed, seen } = origin;
        Reload { live, parsed, options, seen, systemd: Arc::default() }
    }

    /// Has systemd told when it asked for a reload, and what became of it.
    pub fn watched_by(self, systemd: Arc<Systemd>) -> Reload {
        Reload { systemd, ..self }
    }

    /// Never returns; `fatal` hears why the process has to end.
    pub async fn run(mut self, fatal: mpsc::Sender<String>) {
        let mut hangup = match signal(SignalKind::hangup()) {
            Ok(hangup) => hangup,
            Err(error) => {
                let _ = fatal.send(format!("cannot receive signals: {error}")).await;
                return;
            }
        };
        let mut notifier = Notifier::new(&self.parsed);
        loop {
            let asked = tokio::select! {
                _ = hangup.recv() => true,
                () = notifier.changed() => false,
                () = sleep(REGULAR) => false,
            };
            if asked {
                self.systemd.reloading();
            }
            let now = steady(&self.parsed).await;
            if !asked && now == self.seen {
                continue;
            }
            self.seen = now;
            notifier.arm(&self.parsed);
            match self.take(asked) {
                Some(reason) => {
                    let _ = fatal.send(reason).await;
                }
                None if asked => self.systemd.reloaded(),
                None => {}
            }
        }
    }

    /// Reads the files and does what follows. Returns why the process has to end, if it has to.
    fn take(&mut self, asked: bool) -> Option<String> {
        match step(&self.parsed, &self.options) {
            Step::Refuse(reason) => {
                tracing::error!("{reason}; the settings in force stay");
            }
            Step::Restart(fields) => {
                let fields = fields.join(", ");
                return Some(format!("the configuration has changed in what needs a restart: {fields}"));
            }
            Step::Adopt { options, checked, fields } => {
                self.live.adopt(options.config.clone(), *checked);
                tracing::info!(fields = fields.join(", "), "the configuration has changed and is in force");
                self.options = *options;
            }
            Step::Nothing if asked => {
                let files = self.seen.len();
                tracing::info!(files, "asked to reload: the configuration is what is in force");
                // Somebody may have changed them meanwhile, or given us the privileges.
                self.live.settle();
            }
            Step::Nothing => tracing::info!("the configuration file has changed, but no setting has"),
        }
        None
    }
}

/// What the files, with this command line, mean for a proxy that runs with these options.
pub fn step(parsed: &Options, now: &Options) -> Step {
    let mut next = parsed.clone();
    match next.complete() {
        Ok(notices) => notices.iter().for_each(|notice| tracing::warn!("{notice}")),
        Err(reason) => return Step::Refuse(reason),
    }
    let checked = match next.checked() {
        Ok(checked) => checked,
        Err(reason) => return Step::Refuse(reason),
    };
    let differences = fields::differences(&now.config, &next.config);
    let named = |effect: Effect| {
        let with = move |found: &&Difference| found.effect == effect;
        differences.iter().filter(with).map(|found| found.field.clone()).collect::<Vec<_>>()
    };
    let mut restart = named(Effect::Restart);
    if next.source != now.source {
        restart.push("source".to_owned());
    }
    if next.counted_endpoints != now.counted_endpoints {
        restart.push("countedEndpoints".to_owned());
    }
    if next.ipvs_fallback != now.ipvs_fallback {
        restart.push("ipvsFallback".to_owned());
    }
    if next.userspace != now.userspace {
        restart.push("settings of the userspace mode".to_owned());
    }
    let node_port_range = (next.node_port_range != now.node_port_range).then(|| "nodePortRange".to_owned());
    let fields: Vec<String> =
        named(Effect::Live).into_iter().chain(node_port_range).chain(named(Effect::Nothing)).collect();
    match (restart.is_empty(), fields.is_empty()) {
        (false, _) => Step::Restart(restart),
        (true, true) => Step::Nothing,
        (true, false) => Step::Adopt { options: Box::new(next), checked: Box::new(checked), fields },
    }
}

/// The files that are read: the configuration, and our own settings.
fn files(parsed: &Options) -> impl Iterator<Item = PathBuf> {
    parsed.config_file.clone().into_iter().chain(parsed.own_path())
}

fn snapshot(parsed: &Options) -> Snapshot {
    files(parsed)
        .map(|path| {
            let content = std::fs::read(&path).map_err(|error| error.to_string());
            (path, content)
        })
        .collect()
}

/// The files, once nobody is writing them any more.
async fn steady(parsed: &Options) -> Snapshot {
    let mut last = snapshot(parsed);
    loop {
        sleep(STEADY).await;
        let now = snapshot(parsed);
        if now == last {
            return now;
        }
        last = now;
    }
}

/// The kernel's word that something in the folders of the files has changed.
struct Notifier(Option<inotify::EventStream<Vec<u8>>>);

impl Notifier {
    fn new(parsed: &Options) -> Notifier {
        let stream = Inotify::init()
            .and_then(|inotify| inotify.into_event_stream(vec![0; 4096]))
            .inspect_err(|error| {
                tracing::debug!(%error, "no notifications for the configuration; it is looked at regularly");
            });
        let mut notifier = Notifier(stream.ok());
        notifier.arm(parsed);
        notifier
    }

    /// Watches the folders as they are now. To watch one again is no harm.
    fn arm(&mut self, parsed: &Options) {
        let Some(stream) = &self.0 else { return };
        let changes = WatchMask::CLOSE_WRITE | WatchMask::CREATE | WatchMask::MOVED_TO | WatchMask::DELETE;
        for path in files(parsed) {
            let folder = match path.parent() {
                Some(folder) if !folder.as_os_str().is_empty() => folder,
                _ => Path::new("."),
            };
            if let Err(error) = stream.watches().add(folder, changes) {
                tracing::debug!(folder = %folder.display(), %error, "cannot watch");
            }
        }
    }

    /// Waits for the next notification, and takes those that come with it.
    async fn changed(&mut self) {
        let Some(stream) = &mut self.0 else { return std::future::pending().await };
        match stream.next().await {
            Some(Ok(_)) => while timeout(STEADY, stream.next()).await.is_ok_and(|event| event.is_some()) {},
            // The descriptor is gone: the regular look has to do.
            _ => self.0 = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    /// What becomes of a proxy that runs with the first file when the second is put in its place.
    fn after(first: &str, second: &str, own: Option<&str>) -> Step {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("config.conf");
        fs::write(&path, format!("{HEAD}{first}")).expect("written");
        let args = [format!("--config={}", path.display()), "--hostname-override=node".to_owned()];
        let (parsed, _) = Options::parse(&args).expect("valid flags");
        let mut now = parsed.clone();
        now.complete().expect("a valid file");
        fs::write(&path, format!("{HEAD}{second}")).expect("written");
        if let Some(own) = own {
            let text = format!("apiVersion: portolan.dev/v1alpha1\nkind: PortolanConfiguration\n{own}");
            fs::write(folder.path().join("portolan.conf"), text).expect("written");
        }
        step(&parsed, &now)
    }

    fn adopted(step: Step) -> Vec<String> {
        match step {
            Step::Adopt { fields, .. } => fields,
            other => panic!("not adopted: {other:?}"),
        }
    }

    #[test]
    fn what_can_be_changed_is_adopted() {
        let second = "clusterCIDR: 10.0.0.0/8\nlogging: {verbosity: 4}\nnodePortAddresses: [all]\n\
                      nftables: {masqueradeAll: true, minSyncPeriod: 5s}\nconntrack: {min: 5}\nportRange: x\n";
        assert_eq!(
            adopted(after("", second, None)),
            [
                "clusterCIDR",
                "conntrack.min",
                "logging.verbosity",
                "nftables.masqueradeAll",
                "nftables.minSyncPeriod",
                "nodePortAddresses",
                "portRange"
            ]
        );
        assert_eq!(adopted(after("", "", Some("nodePortRange: 1-2\n"))), ["nodePortRange"]);
    }

    #[test]
    fn the_rest_takes_a_restart_and_is_named() {
        let restart = |second, own| match after("", second, own) {
            Step::Restart(fields) => fields,
            other => panic!("no restart: {other:?}"),
        };
        assert_eq!(
            restart("clusterCIDR: 10.0.0.0/8\nhealthzBindAddress: 127.0.0.1:1\n", None),
            ["healthzBindAddress"]
        );
        assert_eq!(restart("", Some("source: file:/x\n")), ["source"]);
        assert_eq!(restart("", Some("userspaceBind: true\n")), ["settings of the userspace mode"]);
        assert!(restart("", Some("mode: iptables\n")).contains(&"mode".to_owned()));
        assert_eq!(
            after("", "hostnameOverride: other\n", None),
            Step::Nothing,
            "the flag beats the file, before and after"
        );
    }

    #[test]
    fn what_cannot_be_used_changes_nothing() {
        for (second, own, says) in [
            ("oomScoreAdj: 5000\n", None, "oomScoreAdj"),
            ("oomScoreAdj: [\n", None, "cannot read the configuration"),
            ("", Some("nonsense: 1\n"), "line 3: nonsense: unknown field"),
        ] {
            match after("", second, own) {
                Step::Refuse(reason) => assert!(reason.contains(says), "{reason}"),
                other => panic!("not refused: {other:?}"),
            }
        }
        assert_eq!(after("", "# a remark\n", None), Step::Nothing);
    }

    #[tokio::test]
    async fn a_folder_tells_of_files_and_of_turned_links() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, two) = (folder.path().join("..1"), folder.path().join("..2"));
        for (version, name) in [&one, &two].into_iter().zip(["a", "b"]) {
            fs::create_dir(version).expect("made");
            fs::write(version.join("config.conf"), name).expect("written");
        }
        let (data, config) = (folder.path().join("..data"), folder.path().join("config.conf"));
        std::os::unix::fs::symlink(&one, &data).expect("linked");
        std::os::unix::fs::symlink("..data/config.conf", &config).expect("linked");
        let (parsed, _) = Options::parse(&[format!("--config={}", config.display())]).expect("valid");
        let mut notifier = Notifier::new(&parsed);
        let before = snapshot(&parsed);
        // As the kubelet does it: a new link beside, then over the old one.
        let beside = folder.path().join("..data_tmp");
        std::os::unix::fs::symlink(&two, &beside).expect("linked");
        fs::rename(&beside, &data).expect("turned");
        timeout(Duration::from_secs(10), notifier.changed()).await.expect("told in time");
        let after = steady(&parsed).await;
        assert_ne!(before, after);
        assert_eq!(after[0].1.as_deref(), Ok(&b"b"[..]));
    }
}
