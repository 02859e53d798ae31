// SPDX-License-Identifier: Apache-2.0

//! What a Service asks of balancing beyond the fields of its spec; written as annotations on it.
//!
//! A dataplane does what it can of it and says what it cannot; nothing here ever keeps a service from being served.

use std::{fmt, num::NonZeroU32, sync::Arc};

/// See the module. Most services have none, so a new wish costs nothing where nobody wishes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tuning {
    pub algorithm: Algorithm,
    pub relay: RelayWishes,
}

/// What only a mode that carries connections itself can do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RelayWishes {
    /// Tells endpoints who the client is: PROXY protocol, version 2.
    pub proxy_protocol: bool,
    /// Connections (or UDP flows) at once, for each of the service's addresses.
    pub connections: Option<NonZeroU32>,
    /// Asks endpoints whether they live.
    pub check: Option<Check>,
}

/// A question to endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Check {
    /// A TCP connection can be made.
    Tcp,
    /// A GET of this path is answered with a status from 200 to 399.
    Http(Arc<str>),
}

impl Check {
    /// `tcp`, or `http:/path`.
    pub fn parse(text: &str) -> Option<Check> {
        let is_plain = |path: &str| path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic());
        match text.strip_prefix("http:") {
            Some(path) if is_plain(path) => Some(Check::Http(path.into())),
            None if text == "tcp" => Some(Check::Tcp),
            _ => None,
        }
    }
}

/// How one of a pool's backends is chosen for a new connection. The default is that of the mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Algorithm {
    /// `None`: whatever the mode does by default, by weight if there are any.
    pub scheduler: Option<Scheduler>,
    pub flags: SchedulerFlags,
}

impl Algorithm {
    /// This scheduler, without flags.
    pub fn of(scheduler: Scheduler) -> Algorithm {
        Algorithm { scheduler: Some(scheduler), flags: SchedulerFlags::NONE }
    }
}

impl fmt::Display for Algorithm {
    /// `rr`, `sh sh-port`, `default`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.scheduler.map_or("default", Scheduler::name))?;
        let prefix = if self.scheduler == Some(Scheduler::Maglev) { "mh" } else { "sh" };
        for (flag, name) in [(SchedulerFlags::FALLBACK, "fallback"), (SchedulerFlags::PORT, "port")] {
            if self.flags.contains(flag) {
                write!(f, " {prefix}-{name}")?;
            }
        }
        f.write_str(if self.flags.contains(SchedulerFlags::THIRD) { " flag-3" } else { "" })?;
        f.write_str(if self.flags.contains(SchedulerFlags::ONE_PACKET) { " ops" } else { "" })
    }
}

macro_rules! schedulers {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, [$($alias:literal),*], $weighs:literal;)*) => {
        /// A way to choose. All of the kernel's IPVS are here, so that none is lost on its way to that mode.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Scheduler {
            $($(#[$doc])* $variant,)*
        }

        impl Scheduler {
            pub const ALL: &'static [Scheduler] = &[$(Scheduler::$variant,)*];

            /// The kernel's name where it has one (all but `random`).
            pub fn name(self) -> &'static str {
                match self { $(Scheduler::$variant => $name,)* }
            }

            /// By the kernel's name or by the word people use.
            pub fn parse(text: &str) -> Option<Scheduler> {
                match text {
                    $($name $(| $alias)* => Some(Scheduler::$variant),)*
                    _ => None,
                }
            }

            /// Weights count. Where they do not, all backends are taken alike.
            pub fn weighs(self) -> bool {
                match self { $(Scheduler::$variant => $weighs,)* }
            }
        }
    };
}

schedulers! {
    /// Any, by chance.
    Random, "random", [], true;
    /// One after the other, weights aside.
    RoundRobin, "rr", ["round-robin"], false;
    WeightedRoundRobin, "wrr", ["weighted-round-robin"], true;
    /// The one with the fewest connections, weights aside.
    LeastConnections, "lc", ["least-connections"], false;
    WeightedLeastConnections, "wlc", ["weighted-least-connections"], true;
    /// By destination while it is not overloaded.
    LocalityLeastConnections, "lblc", [], true;
    LocalityReplication, "lblcr", [], true;
    /// The same client address, the same backend.
    SourceHash, "sh", ["source-hash"], true;
    DestinationHash, "dh", ["destination-hash"], false;
    /// The one that would be done first.
    ShortestDelay, "sed", ["shortest-expected-delay"], true;
    NeverQueue, "nq", ["never-queue"], true;
    /// Always the one of greatest weight.
    Failover, "fo", ["failover"], true;
    /// The one of greatest weight, until it has as many connections as its weight.
    Overflow, "ovf", ["overflow"], true;
    /// By client address, few of them moved when a backend comes or goes.
    Maglev, "mh", ["maglev"], true;
    /// The less busy of two drawn by chance.
    RandomOfTwo, "twos", ["random-of-two"], true;
}

impl Scheduler {
    /// The scheduler of that name in the kernel's IPVS; `None` where it has none.
    pub fn kernel_name(self) -> Option<&'static str> {
        (self != Scheduler::Random).then(|| self.name())
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The three bits that IPVS hands to a scheduler, whose affair it is what they mean; and one for UDP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SchedulerFlags(u8);

impl SchedulerFlags {
    pub const NONE: SchedulerFlags = SchedulerFlags(0);
    /// `sh-fallback`, `mh-fallback`: another backend where the hashed one is not available.
    pub const FALLBACK: SchedulerFlags = SchedulerFlags(1);
    /// `sh-port`, `mh-port`: the client's port is hashed too.
    pub const PORT: SchedulerFlags = SchedulerFlags(2);
    /// No scheduler of the kernel reads it.
    pub const THIRD: SchedulerFlags = SchedulerFlags(4);
    /// `ops`: each packet of UDP is scheduled by itself, and its answer, if there is one, is not the service's affair.
    pub const ONE_PACKET: SchedulerFlags = SchedulerFlags(8);

    /// One flag, as `ipvsadm` or kube-router call it.
    pub fn parse(text: &str) -> Option<SchedulerFlags> {
        match text {
            "sh-fallback" | "mh-fallback" | "flag-1" => Some(SchedulerFlags::FALLBACK),
            "sh-port" | "mh-port" | "flag-2" => Some(SchedulerFlags::PORT),
            "flag-3" => Some(SchedulerFlags::THIRD),
            "ops" => Some(SchedulerFlags::ONE_PACKET),
            _ => None,
        }
    }

    pub fn contains(self, other: SchedulerFlags) -> bool {
        self.0 & other.0 == other.0
    }

    pub fn is_empty(self) -> bool {
        self == SchedulerFlags::NONE
    }
}

impl std::ops::BitOr for SchedulerFlags {
    type Output = SchedulerFlags;

    fn bitor(self, other: SchedulerFlags) -> SchedulerFlags {
        SchedulerFlags(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_back_to_its_scheduler() {
        for scheduler in Scheduler::ALL {
            assert_eq!(Scheduler::parse(scheduler.name()), Some(*scheduler));
        }
        assert_eq!(Scheduler::parse("source-hash"), Some(Scheduler::SourceHash));
        assert_eq!(Scheduler::parse("RR"), None);
        assert_eq!(Scheduler::Random.kernel_name(), None);
    }

    #[test]
    fn checks_are_read() {
        assert_eq!(Check::parse("tcp"), Some(Check::Tcp));
        assert_eq!(Check::parse("http:/healthz?a=1"), Some(Check::Http("/healthz?a=1".into())));
        for bad in ["", "udp", "http:", "http:healthz", "http:/a b", "http:/a\r\nX: y"] {
            assert_eq!(Check::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn flags_are_called_by_their_scheduler() {
        let flags = SchedulerFlags::PORT | SchedulerFlags::FALLBACK;
        let say = |scheduler| Algorithm { scheduler, flags }.to_string();
        assert_eq!(say(Some(Scheduler::Maglev)), "mh mh-fallback mh-port");
        assert_eq!(say(None), "default sh-fallback sh-port");
        assert_eq!(Algorithm::of(Scheduler::RoundRobin).to_string(), "rr");
        let ops = Algorithm { flags: SchedulerFlags::ONE_PACKET, ..Algorithm::of(Scheduler::RoundRobin) };
        assert_eq!(ops.to_string(), "rr ops");
    }
}
