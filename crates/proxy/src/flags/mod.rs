// SPDX-License-Identifier: Apache-2.0

//! The command line: kube-proxy's flags, and a few of our own.
//!
//! - [`parse`]: how flags are written
//! - [`table`]: which there are
//! - this file: what they make together with a configuration file

pub mod parse;
pub mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use self::parse::{Parsed, usage};
use crate::{
    config::{
        Config,
        check::{self, Checked},
        decode::{self, Notice},
        own::{COUNTED_ENDPOINTS, Fallback, Own, PortRange},
    },
    syntax::{GoDuration, parse_ip},
};

pub use crate::config::own::Source;

/// Everything flags and the configuration file said.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub config: Config,
    pub config_file: Option<PathBuf>,
    /// Our own settings, if not beside the configuration.
    pub own_file: Option<PathBuf>,
    pub write_config_to: Option<PathBuf>,
    pub cleanup: bool,
    pub init_only: bool,
    pub master: String,
    pub version: Option<String>,
    pub help: bool,
    pub source: Source,
    pub node_port_range: PortRange,
    /// Connections are counted up to so many endpoints.
    pub counted_endpoints: u32,
    /// The mode to take where the kernel cannot do ipvs.
    pub ipvs_fallback: Fallback,
    /// The userspace mode's own.
    pub userspace: Userspace,
    /// Flags that belong to whichever mode is in use; which one is known only at the end.
    per_mode: PerMode,
    healthz_port: i32,
    metrics_port: i32,
    given: Vec<(&'static str, String)>,
}

/// What only the userspace mode asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Userspace {
    /// A UDP flow without datagrams for so long is forgotten.
    pub udp_timeout: GoDuration,
    /// Connections that are open when the process is told to end may go on for so long.
    pub drain: GoDuration,
    /// Listen on the service addresses themselves, without a packet filter.
    pub bind: bool,
}

impl Userspace {
    /// What cannot be, in one sentence.
    pub fn check(&self) -> Result<(), String> {
        if self.udp_timeout.0 <= 0 {
            return Err("the UDP timeout of the userspace mode must be greater than 0".to_owned());
        }
        if self.drain.0 < 0 {
            return Err("the drain time of the userspace mode must not be negative".to_owned());
        }
        Ok(())
    }
}

impl Default for Userspace {
    fn default() -> Userspace {
        let (udp_timeout, drain) = (GoDuration::from_secs(30), GoDuration::from_secs(25));
        Userspace { udp_timeout, drain, bind: false }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct PerMode {
    masquerade_all: bool,
    sync_period: GoDuration,
    min_sync_period: GoDuration,
    ipvs_sync_period: GoDuration,
    ipvs_min_sync_period: GoDuration,
}

impl Default for Options {
    fn default() -> Options {
        let (min, max) = (GoDuration::from_secs(1), GoDuration::from_secs(30));
        Options {
            config: Config::with_defaults(),
            config_file: None,
            own_file: None,
            write_config_to: None,
            cleanup: false,
            init_only: false,
            master: String::new(),
            version: None,
            help: false,
            source: Source::Kubernetes,
            node_port_range: PortRange::default(),
            counted_endpoints: COUNTED_ENDPOINTS,
            ipvs_fallback: Fallback::default(),
            userspace: Userspace::default(),
            per_mode: PerMode {
                masquerade_all: false,
                sync_period: max,
                min_sync_period: min,
                ipvs_sync_period: max,
                ipvs_min_sync_period: min,
            },
            healthz_port: 10256,
            metrics_port: 10249,
            given: Vec::new(),
        }
    }
}

impl Options {
    /// Reads the flags alone. Returns the words that are none.
    pub fn parse(args: &[String]) -> Result<(Options, Vec<String>), String> {
        let mut options = Options::default();
        let Parsed { given, positional } = parse::parse(table::FLAGS, &mut options, args)?;
        options.given = given;
        Ok((options, positional))
    }

    /// Reads the configuration files, if there are any, and lets the program's own defaults have their say.
    /// A file replaces everything but the flags that are always effective.
    pub fn complete(&mut self) -> Result<Vec<Notice>, String> {
        let mut notices = Vec::new();
        if let Some(path) = &self.config_file {
            let decoded = read(path).and_then(|text| decode::decode(&text));
            let decoded = decoded.map_err(|reason| unusable(path, &reason))?;
            self.config = decoded.config;
            notices = decoded.notices;
        } else {
            self.apply_ports();
            self.apply_mode();
        }
        if let Some(timeout) = self.config.udp_idle_timeout.filter(|timeout| timeout.0 != 0) {
            self.userspace.udp_timeout = timeout;
        }
        if let Some(path) = self.own_path() {
            let own = read(&path).and_then(|text| Own::decode(&text));
            self.apply_own(own.map_err(|reason| unusable(&path, &reason))?);
        }
        self.again()?;
        self.config.settle();
        Ok(notices)
    }

    /// Checks everything, our own settings too. The error is one sentence.
    pub fn checked(&self) -> Result<Checked, String> {
        let mut checked = check::check(&self.config).map_err(|wrong| check::sentence(&wrong))?;
        checked.counted_endpoints = self.counted_endpoints;
        checked.ipvs_fallback = self.ipvs_fallback;
        self.userspace.check()?;
        checked.userspace.relay.udp_timeout = self.userspace.udp_timeout.to_std();
        checked.userspace.bind = self.userspace.bind;
        checked.drain = self.userspace.drain.to_std();
        Ok(checked)
    }

    /// The file with our own settings: the one that was named, else the one beside the configuration.
    pub fn own_path(&self) -> Option<PathBuf> {
        let beside = || self.config_file.as_deref().and_then(Own::beside);
        self.own_file.clone().or_else(beside)
    }

    fn apply_own(&mut self, own: Own) {
        let Own { mode, counted_endpoints, source, node_port_range, ipvs_fallback, .. } = own;
        let Userspace { udp_timeout, drain, bind } = &mut self.userspace;
        *udp_timeout = own.udp_timeout.unwrap_or(*udp_timeout);
        *drain = own.userspace_drain.unwrap_or(*drain);
        *bind = own.userspace_bind.unwrap_or(*bind);
        self.ipvs_fallback = ipvs_fallback.unwrap_or(self.ipvs_fallback);
        self.counted_endpoints = counted_endpoints.unwrap_or(self.counted_endpoints);
        self.config.mode = mode.unwrap_or(std::mem::take(&mut self.config.mode));
        self.source = source.unwrap_or(std::mem::take(&mut self.source));
        self.node_port_range = node_port_range.unwrap_or(self.node_port_range);
    }

    /// Sets the flags that beat the files once more, now on top of them.
    fn again(&mut self) -> Result<(), String> {
        // Its entries add up: those of the first round are in here already, where no file has replaced them.
        if self.config_file.is_none() {
            self.config.logging.vmodule.clear();
        }
        for (name, value) in self.given.clone() {
            let flag = table::FLAGS.iter().find(|flag| flag.always && flag.name == name);
            if let Some(flag) = flag {
                (flag.set)(self, &value)?;
            }
        }
        Ok(())
    }

    /// The deprecated port flags: 0 turns the server off, anything else is the port of an address without one.
    fn apply_ports(&mut self) {
        let config = &mut self.config;
        let ports = [
            (&mut config.healthz_bind_address, self.healthz_port),
            (&mut config.metrics_bind_address, self.metrics_port),
        ];
        for (address, port) in ports {
            if port == 0 {
                address.clear();
            } else if let Some(ip) = parse_ip(address) {
                *address = if ip.is_ipv6() { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") };
            }
        }
    }

    fn apply_mode(&mut self) {
        let PerMode { masquerade_all, sync_period, min_sync_period, ipvs_sync_period, ipvs_min_sync_period } =
            self.per_mode.clone();
        let config = &mut self.config;
        (config.iptables.sync_period, config.iptables.min_sync_period) = (sync_period, min_sync_period);
        (config.nftables.sync_period, config.nftables.min_sync_period) = (sync_period, min_sync_period);
        (config.ipvs.sync_period, config.ipvs.min_sync_period) = (ipvs_sync_period, ipvs_min_sync_period);
        config.iptables.masquerade_all = masquerade_all;
        config.nftables.masquerade_all = masquerade_all;
    }

    /// Every flag with its value, by name; the last one given, else the default.
    pub fn listing(&self) -> BTreeMap<&'static str, String> {
        let mut listing: BTreeMap<_, _> =
            table::FLAGS.iter().map(|flag| (flag.name, flag.default.to_owned())).collect();
        listing.extend(self.given.iter().cloned());
        listing
    }

    /// Whether the mode was asked for, be it by a file; else it is the default.
    pub fn has_mode(&self) -> bool {
        let has_file = self.config_file.is_some() || self.own_file.is_some();
        has_file || self.given.iter().any(|(name, _)| *name == "proxy-mode")
    }

    /// A sentence for each deprecated flag that was used.
    pub fn deprecations(&self) -> Vec<String> {
        let advice = |name: &str| {
            let flag = table::FLAGS.iter().find(|flag| flag.name == name)?;
            flag.deprecated.map(|advice| format!("Flag --{name} has been deprecated, {advice}"))
        };
        self.given.iter().filter_map(|(name, _)| advice(name)).collect()
    }
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| error.to_string())
}

fn unusable(path: &Path, reason: &str) -> String {
    format!("cannot read the configuration {}: {reason}", path.display())
}

/// The usage text.
pub fn help() -> String {
    format!(
        "Portolan keeps a chart of Service ports in the kernel: a replacement for kube-proxy.\n\n\
         Usage:\n  \
         portolan [flags]               serve the cluster's Services on this node\n  \
         portolan --source file:PATH    serve the Services of a file or folder, without a cluster\n  \
         portolan plan PATH [flags]     print what would be served, without touching the kernel\n  \
         portolan dump [flags]          print what the kernel holds\n  \
         portolan check-config FILE     say what is wrong with a configuration, and what it would change\n  \
         portolan check-node [flags]    say what on this node will get in the way, and what to do\n  \
         portolan withdraw [--now]      remove only our own tables, once kube-proxy serves\n  \
         portolan demo [--seconds N]    show it at work in a cluster of network namespaces (as root)\n  \
         portolan help [COMMAND]        print what a command does, or this text\n\n\
         Flags:\n{}",
        usage(table::FLAGS)
    )
}
