// SPDX-License-Identifier: Apache-2.0

//! From the Plan to the kernel.
//!
//! A dataplane makes the kernel match a [`model::Plan`]. It never looks at a traffic policy, a topology hint or a
//! Kubernetes type, and it is synchronous: one thread reconciles.
//!
//! # Layout
//!
//! - [`nftables`]: maps of ports in tables of our own; the default
//! - [`iptables`]: kube-proxy's chains, written by the iptables tools
//! - [`ipvs`]: virtual servers of the kernel, IP sets, and constant rules beside them
//! - [`xtables`]: the iptables tools, run within bounds
//! - [`userspace`]: steers traffic to a relay in this process
//! - `relieved`: a relay beside a mode that writes rules, for what the kernel cannot do
//! - [`none`]: does nothing; for dry runs, and the template for another dataplane
//! - [`conntrack`]: flows that became stale, for every dataplane that leaves translation to the kernel
//! - [`leftovers`]: what other modes and other proxies left on the node
//! - [`wishes`]: what services ask for beyond their spec, against what a mode can do
//! - [`names`]: every name put into a kernel
//! - [`error`]: what can go wrong

#![forbid(unsafe_code)]

pub mod conntrack;
pub mod error;
pub mod iptables;
pub mod ipvs;
pub mod leftovers;
mod loopback;
pub mod names;
pub mod nftables;
pub mod none;
mod notices;
mod relieved;
pub mod userspace;
pub mod wishes;
pub mod xtables;

use std::{fmt, net::SocketAddr, time::Duration};

use model::{Changes, Family, Frontend, PerFamily, Plan};

pub use error::{Error, Unsupported};
pub use loopback::Loopback;
pub use wishes::Abilities;

/// Makes the kernel match a Plan.
pub trait Dataplane: Send {
    /// Makes the kernel match `plan`. Idempotent. After an `Err` the next call is complete, whatever its scope.
    fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Result<Applied, Error>;

    /// Removes all we own, and nothing else. Goes on after errors and reports them together.
    fn cleanup(&mut self) -> Result<(), Error>;

    /// What the kernel holds now, as text; nothing where there is nothing of this mode.
    fn dump(&mut self) -> Result<String, Error>;

    /// The same in parts, for programs; nothing in modes that have no tables of their own.
    fn listed(&mut self) -> Result<Vec<Listed>, Error> {
        Ok(Vec::new())
    }

    /// What of the wishes of services this mode can do. What it cannot is told to people by whoever runs it.
    fn abilities(&self) -> Abilities {
        Abilities { instead: "endpoints are drawn at random", ..Abilities::default() }
    }

    /// Compares a small part of what the kernel holds with what it should hold; the next call goes on with the next
    /// part. Finds what no [`Watch`] told, for [`Scope::All`] to mend. What a call costs is bounded.
    fn audit(&mut self) -> Result<Audited, Error> {
        Ok(Audited::default())
    }

    /// Whether there are changes by others that no [`Watch`] tells, so that the audit had better look soon and often.
    fn is_untold(&self) -> bool {
        false
    }

    /// Whether the kernel serves node ports on the loopback addresses of a family, as of the last [`Dataplane::apply`].
    fn serves_loopback(&self, _family: Family) -> bool {
        false
    }

    /// The iptables whose tables it writes, if it does.
    fn variant(&self) -> Option<xtables::Variant> {
        None
    }

    /// What keeps open connections translated that a mode before began. `None` where this one has chains to do so.
    fn keep(&self) -> Option<leftovers::Keep> {
        None
    }

    /// How long others have been waited for since this was last asked, also where it was in vain.
    fn take_lock_wait(&mut self) -> Duration {
        Duration::ZERO
    }

    /// A meter of connections, for another thread; `None` where nothing is counted. It is opened in the network
    /// namespace of the calling thread, which must be the dataplane's.
    fn meter(&self) -> Result<Option<Box<dyn Meter>>, Error> {
        Ok(None)
    }

    /// A watch, for another thread, that tells when somebody else changes what we own. `None` where that cannot be
    /// told. What happened between an [`Dataplane::apply`] and the watch is told too, or found by the audit: the
    /// kernel makes no notices of a large load if nobody listens yet. It is opened in the network namespace of the
    /// calling thread, which must be the dataplane's.
    fn watch(&self) -> Result<Option<Box<dyn Watch>>, Error> {
        Ok(None)
    }
}

/// A table, in the words of `nft`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// `ip` or `ip6`.
    pub family: &'static str,
    pub table: &'static str,
    pub sets: Vec<ListedSet>,
    pub chains: Vec<ListedChain>,
}

/// A set or map, with each key and its value, if it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedSet {
    pub name: String,
    pub elements: Vec<(String, Option<String>)>,
}

/// A chain; `base` says where packets enter it, if it is not only jumped to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedChain {
    pub name: String,
    pub base: Option<String>,
    pub rules: Vec<String>,
}

/// Tells when somebody else changes what a dataplane owns. [`Scope::All`] mends it.
pub trait Watch: Send {
    /// The next change by somebody else; `None` if nothing happened for as long as `wait`.
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, netlink::Error>;
}

/// Reads how many connections the kernel has sent where.
pub trait Meter: Send {
    /// All that is counted now, one reading for each frontend and endpoint, in any order. What an endpoint that is
    /// gone had counted is not here but in [`Applied::retired`].
    fn read(&mut self) -> Result<Vec<Reading>, Error>;

    /// What else the kernel counted, as of the last [`Meter::read`]; nothing in most modes.
    fn traffic(&mut self) -> Vec<Traffic> {
        Vec::new()
    }
}

/// What went to an endpoint by a frontend, and what is open there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    pub frontend: Frontend,
    pub endpoint: SocketAddr,
    /// Towards the endpoint.
    pub packets_in: u64,
    pub packets_out: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    /// Connections that are open.
    pub active: u64,
    /// Connections that are over but remembered, and flows without connections.
    pub inactive: u64,
}

impl Traffic {
    /// Nothing yet.
    pub fn none(frontend: Frontend, endpoint: SocketAddr) -> Traffic {
        let (packets_in, packets_out, bytes_in, bytes_out, active, inactive) = (0, 0, 0, 0, 0, 0);
        Traffic { frontend, endpoint, packets_in, packets_out, bytes_in, bytes_out, active, inactive }
    }
}

/// New connections to a frontend that were sent to an endpoint. Those of a client that was remembered are not
/// among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reading {
    pub frontend: Frontend,
    pub endpoint: SocketAddr,
    pub connections: u64,
}

/// A change by somebody else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// The first thing that was changed, in words.
    pub what: String,
    /// Who did it, where the kernel tells: name and number of the thread.
    pub by: Option<String>,
    /// It may not concern us. [`Scope::All`] finds out, and says so in [`Applied::mended`] if it does.
    pub suspected: bool,
}

/// What a step of an audit found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audited {
    /// What is not as it should be, in words.
    pub drift: Option<String>,
    /// The round is not over.
    pub more: bool,
    /// What had counted that went meanwhile.
    pub retired: Vec<Reading>,
    /// How full the kernel's memory of clients is, where it has a limit and the kernel tells; once in a round.
    pub affinity: Vec<Affinity>,
}

/// Clients that are remembered by session affinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affinity {
    pub family: Family,
    pub clients: u32,
    /// Beyond, further clients are balanced without being remembered.
    pub limit: u32,
}

/// How much of a Plan to look at. A hint: [`Scope::All`] is always right.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    /// All of it, compared with what the kernel really holds: at the start, after an error, and to mend what
    /// somebody else changed.
    All,
    /// What the last [`Plan::update`] changed. The cost grows with the change, not with the Plan.
    Only(&'a Changes),
}

/// What an [`Dataplane::apply`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Atomic commits.
    pub batches: u32,
    /// Elements added, a replaced one included.
    pub added: u64,
    /// Elements removed, a replaced one included.
    pub removed: u64,
    /// Chains created, written anew or removed.
    pub chains: u64,
    /// Remembered clients forgotten because their endpoint went, since the last time. Many may take longer.
    pub forgotten: u64,
    /// Frontends that a complete write found in the kernel and the Plan does not know. What became of them was nobody's
    /// change, so that no [`FlowRule`](model::FlowRule) tells of flows to them. Not every dataplane can say.
    pub vanished: Vec<Frontend>,
    /// Families in which the change alone failed, and everything was compared instead.
    pub fallbacks: Vec<Family>,
    /// Something was not as we had left it, and no [`Drift`] told for certain.
    pub mended: bool,
    /// Tables of iptables, where there are any.
    pub tables: Vec<TableRules>,
    /// What elements that were removed or replaced had counted.
    pub retired: Vec<Reading>,
    /// So many parts of the Plan did the kernel refuse; the warnings name them. Another complete write tries them again.
    pub left_out: usize,
    /// Parts of the Plan this dataplane or this node cannot serve; one sentence each. The rest is in force.
    pub warnings: Vec<String>,
}

/// The rules of a table of iptables that are ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRules {
    pub family: Family,
    pub table: xtables::Table,
    /// All of them, without those in built-in chains.
    pub total: u64,
    /// Those that this time were written.
    pub written: u64,
}

impl Applied {
    /// The kernel was as it should be.
    pub fn changed_nothing(&self) -> bool {
        self.batches == 0
    }
}

/// Which dataplane. It is shown as operators write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Maps of ports, over netlink; the default.
    Nftables,
    /// The chains kube-proxy makes.
    Iptables,
    /// Virtual servers.
    Ipvs,
    /// A proxy process.
    Userspace,
    /// None: nothing is programmed.
    None,
}

impl Mode {
    /// All that leave something in a kernel.
    pub const ALL: [Mode; 4] = [Mode::Nftables, Mode::Iptables, Mode::Ipvs, Mode::Userspace];
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Nftables => "nftables",
            Mode::Iptables => "iptables",
            Mode::Ipvs => "ipvs",
            Mode::Userspace => "userspace",
            Mode::None => "none",
        })
    }
}

/// What a dataplane must know beyond the Plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The bit of the packet mark that means "masquerade"; below 32.
    pub masquerade_bit: u8,
    /// The families to program. A table of a family that is not among them is left alone.
    pub families: PerFamily<bool>,
    /// Connections are counted as long as frontends have no more endpoints than this in one family, each counted
    /// once for each frontend; 0: not at all. Looked at only when everything is written.
    pub counted_endpoints: usize,
    /// Which iptables to use; found out if `None`.
    pub xtables: Option<xtables::Variant>,
    /// For the ipvs mode.
    pub ipvs: ipvs::Settings,
    /// Node ports on loopback addresses that the kernel cannot translate are served by this process, where the operator
    /// asks for them.
    pub relays_loopback: bool,
    /// The userspace mode's own.
    pub userspace: userspace::Options,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            masquerade_bit: names::MASQUERADE_BIT,
            families: PerFamily { v4: true, v6: true },
            counted_endpoints: 0,
            xtables: None,
            ipvs: ipvs::Settings::default(),
            relays_loopback: false,
            userspace: userspace::Options::default(),
        }
    }
}

/// Opens a dataplane in the network namespace of this thread. Asks the kernel once whether it can do all that is
/// needed, and changes nothing.
pub fn open(mode: Mode, config: &Config) -> Result<Box<dyn Dataplane>, Unsupported> {
    let dataplane: Box<dyn Dataplane> = match mode {
        Mode::Nftables => Box::new(nftables::Nftables::open(config)?),
        Mode::Iptables => Box::new(iptables::Iptables::open(config)?),
        Mode::Ipvs => Box::new(ipvs::Ipvs::open(config)?),
        Mode::Userspace if config.userspace.bind => Box::new(userspace::Bind::open(config)?),
        Mode::Userspace => Box::new(userspace::Userspace::open(config)?),
        Mode::None => Box::new(none::None),
    };
    let writes_rules = !matches!(mode, Mode::Userspace | Mode::None);
    Ok(match config.relays_loopback && writes_rules {
        true => Box::new(relieved::Relieved::new(dataplane)),
        false => dataplane,
    })
}
