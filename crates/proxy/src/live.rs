// SPDX-License-Identifier: Apache-2.0

//! What of the configuration a running proxy can be given anew, and the one place that knows what is in force.

use std::{
    sync::{Arc, PoisonError, RwLock},
    thread,
    time::Duration,
};

use dataplane::Mode;
use model::PerFamily;
use netlink::{
    Netns,
    conntrack::{Conntrack, Filter},
};
use tokio::sync::watch;

use crate::{
    app,
    config::{Config, check::Checked, own::PortRange, surprise},
    host, log,
    metrics::{self, Metrics},
    node::{
        report,
        settle::{self, Refusal},
        sysctl::Sysctls,
    },
    reconcile::Tuning,
    status::Status,
};

/// How long the first programming may take before kernel settings that were missing are given up.
const PATIENCE: Duration = Duration::from_secs(600);

/// The configuration in force, for those who tell of it.
#[derive(Clone, Debug)]
pub struct Current(Arc<RwLock<Arc<Config>>>);

impl Current {
    /// In force from now on.
    pub fn new(config: Config) -> Current {
        Current(Arc::new(RwLock::new(Arc::new(config))))
    }

    /// What is in force now.
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace(&self, config: Config) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }
}

/// The handles on what can be changed.
pub struct Live {
    current: Current,
    /// The same, checked, with our own settings and the mode that was taken.
    checked: RwLock<Checked>,
    tuning: watch::Sender<Tuning>,
    status: Arc<Status>,
    metrics: Arc<Metrics>,
    netns: Option<Arc<Netns>>,
}

impl Live {
    /// Of a proxy that starts with this configuration; the other half is for its reconcile loop.
    pub fn new(
        (config, checked): (Config, &Checked),
        (node_name, families): (Arc<str>, PerFamily<bool>),
        (status, metrics): (&Arc<Status>, &Arc<Metrics>),
        netns: Option<Arc<Netns>>,
    ) -> (Arc<Live>, watch::Receiver<Tuning>) {
        let settings = app::settings(&config, checked, node_name, families);
        let (tuning, receiver) = watch::channel(Tuning { settings, max_pause: checked.min_sync_period });
        let (current, checked) = (Current::new(config), RwLock::new(checked.clone()));
        let (status, metrics) = (Arc::clone(status), Arc::clone(metrics));
        let live = Live { current, checked, tuning, status, metrics, netns };
        (Arc::new(live), receiver)
    }

    /// What is in force, now and later.
    pub fn current(&self) -> &Current {
        &self.current
    }

    /// Puts everything of a new configuration in force that can be while we run.
    pub fn adopt(&self, config: Config, checked: Checked) {
        let checked = &self.checked().followed_by(checked);
        log::init(&config.logging);
        host::adjust_oom_score(config.oom_score_adj.unwrap_or_default());
        self.status.set_sync_period(checked.sync_period);
        metrics::features(&self.metrics, &config);
        let families = self.tuning.borrow().settings.families;
        surprise::surprises(checked, families).iter().for_each(|says| tracing::warn!("{says}"));
        self.tuning.send_if_modified(|tuning| {
            let node_name = Arc::clone(&tuning.settings.node_name);
            let settings = app::settings(&config, checked, node_name, families);
            let wanted = Tuning { settings, max_pause: checked.min_sync_period };
            let differs = *tuning != wanted;
            *tuning = wanted;
            differs
        });
        self.current.replace(config);
        *self.checked.write().unwrap_or_else(PoisonError::into_inner) = checked.clone();
        self.settle();
    }

    fn checked(&self) -> Checked {
        self.checked.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// [`Live::settle`], and once more when everything is in force if the kernel lacked some: connection tracking
    /// comes with the first rule that needs it.
    pub fn settle_at_start(self: &Arc<Live>) {
        if !self.settle().iter().any(Refusal::is_missing) {
            return;
        }
        let live = Arc::clone(self);
        let later = move || {
            if live.status.commit_after(0, PATIENCE).is_none() {
                return;
            }
            for refusal in live.settle().iter().filter(|refusal| refusal.is_missing()) {
                tracing::warn!("{refusal}; serving goes on without");
            }
        };
        if let Err(error) = thread::Builder::new().name("settle".to_owned()).spawn(later) {
            tracing::warn!(%error, "cannot start a thread; some kernel settings are left as they are");
        }
    }

    /// Looks around on this node, in a thread of its own, and logs what will get in the way.
    pub fn report(&self, node_ports: PortRange) {
        let (config, checked, netns) = (self.current.config(), self.checked(), self.netns.clone());
        let look = move || {
            let found = app::in_netns(netns.as_deref(), || report::findings(&config, &checked, node_ports));
            match found {
                Ok(findings) => report::log(&findings),
                Err(error) => tracing::warn!(%error, "cannot look around on this node"),
            }
        };
        if let Err(error) = thread::Builder::new().name("report".to_owned()).spawn(look) {
            tracing::warn!(%error, "cannot start a thread to look around on this node");
        }
    }

    /// Sets the kernel settings that the configuration asks for, and tells which were refused.
    pub fn settle(&self) -> Vec<Refusal> {
        let (config, checked) = (self.current.config(), self.checked());
        let refused = app::in_netns(self.netns.as_deref(), || settle(&config, &checked, Occasion::Serving));
        let refused = refused.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot look at the kernel's settings");
            Vec::new()
        });
        for refusal in refused.iter().filter(|refusal| !refusal.is_missing()) {
            tracing::warn!(
                "{refusal}; serving goes on: set it on the host, or run portolan --init-only once with full \
                 privileges"
            );
        }
        refused
    }
}

/// What the kernel is settled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// `--init-only`: all that a proxy with fewer privileges will need.
    Beforehand,
    /// A proxy that runs here.
    Serving,
}

/// The same in the network namespace of this thread, without a word on what was refused.
pub fn settle(config: &Config, checked: &Checked, occasion: Occasion) -> Vec<Refusal> {
    let sysctls = Sysctls::host();
    if sysctls.read("net/netfilter/nf_conntrack_max").is_err() {
        load_conntrack();
    }
    let mut wishes = settle::wishes(config, checked, sysctls.cpus());
    // To ask for IPVS makes the kernel load it. Where there is none, another mode is taken, or the start says so.
    if checked.mode == Mode::Ipvs && netlink::ipvs::Ipvs::open().is_err() {
        wishes.retain(|wish| !wish.name.starts_with("net/ipv4/vs/"));
    }
    if occasion == Occasion::Serving {
        wishes.retain(|wish| wish.name != settle::ROUTE_LOCALNET);
    }
    settle::apply(&sysctls, &wishes)
}

/// Any question about tracked connections makes the kernel load what can answer it. If it cannot, the settings stay
/// missing, and that is told.
fn load_conntrack() {
    let sctp = Filter::protocol(netlink::Family::V4, 132);
    let asked = Conntrack::open().and_then(|mut conntrack| conntrack.flows(&sctp, |_| {}));
    if let Err(error) = asked {
        tracing::debug!(%error, "connection tracking is not there");
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::config::{check::check, decode::decode};

    const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    fn read(body: &str) -> (Config, Checked) {
        let mut config = decode(&format!("{HEAD}{body}")).expect(body).config;
        config.settle();
        let checked = check(&config).expect(body);
        (config, checked)
    }

    /// As SIGHUP does: what the loop needs reaches it once, everybody who asks for the configuration gets the new one, and
    /// what takes a new process stays as it was.
    #[test]
    fn a_new_configuration_reaches_everybody() {
        // Kernel settings are made there and not here.
        let Ok(netns) = Netns::new() else {
            assert!(std::env::var_os("CI").is_none(), "network namespaces need root");
            return println!("skipped: network namespaces need root");
        };
        let families = PerFamily { v4: true, v6: false };
        let (config, checked) = read("mode: nftables\noomScoreAdj: 0\nclusterCIDR: 10.1.0.0/16\n");
        let status = Arc::new(Status::new(families, checked.sync_period, false));
        let metrics = Arc::new(Metrics::new(SystemTime::now()));
        let place = (Arc::from("node-a"), families);
        let (live, mut tuning) =
            Live::new((config, &checked), place, (&status, &metrics), Some(Arc::new(netns)));
        let current = live.current().clone();
        let before = tuning.borrow_and_update().clone();

        let body = "mode: iptables\noomScoreAdj: 0\nclusterCIDR: 10.2.0.0/16\nnodePortAddresses: [192.0.2.0/24]\n\
                    iptables: {masqueradeAll: true}\nnftables: {minSyncPeriod: 7s}\n";
        let (config, checked) = read(&format!("{body}conntrack: {{tcpCloseWaitTimeout: 33s}}\n"));
        live.adopt(config.clone(), checked.clone());
        assert_eq!(*current.config(), config);
        assert!(tuning.has_changed().expect("it lives"));
        let after = tuning.borrow_and_update().clone();
        assert_ne!(after.settings.detect_local, before.settings.detect_local);
        assert_ne!(after.settings.node_port_addresses, before.settings.node_port_addresses);
        assert_eq!(after.max_pause, checked.min_sync_period);
        assert_eq!(after.settings.node_name, before.settings.node_name);
        assert_eq!(live.checked().mode, Mode::Nftables, "the mode is for the next process");

        live.adopt(config, checked);
        assert!(!tuning.has_changed().expect("it lives"), "the same again is no reason to plan anew");
    }
}
