// SPDX-License-Identifier: Apache-2.0

//! The `iptables` tools: found, told apart, and run within bounds.
//!
//! There are two kinds of them. The *nft* variant keeps its rules in nf_tables, the *legacy* variant in ip_tables.
//! Neither sees the rules of the other, and the kernel obeys both, so a node must have one of them only. Which one is
//! the host's, the kubelet shows by a chain that it makes with the host's own tool.
//!
//! Everything happens in the network namespace of the calling thread, which a child process inherits. Nothing here
//! knows services.
//!
//! # Layout
//!
//! - `find`: which tools there are, and which variant the host uses
//! - `run`: a child process with input, output and a time limit
//! - `lock`: the lock of the legacy variant, and who holds it
//! - `canary`: hears that somebody else took that lock
//! - `failure`: what went wrong, in one sentence
//! - [`words`]: a line of `iptables-save`
//! - `watch`: what others do to our chains
//! - `ledger`: what tables of the legacy variant look like when only we wrote
//! - [`leftovers`]: which chains are of Kubernetes proxies

mod canary;
mod failure;
mod find;
mod ledger;
pub mod leftovers;
mod lock;
mod run;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod watch;
pub mod words;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use model::{Family, PerFamily};
use netlink::{
    Errno,
    accounts::Accounts,
    nft::{Nft, TableRef},
};

pub use self::{
    failure::Failure,
    find::{Found, SEARCH, find, find_variant, open},
};
use self::{
    ledger::Ledger,
    lock::{Held, Lock},
    run::Job,
    watch::{LegacyWatch, NftWatch},
};

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Rules live in nf_tables, in tables that `nft` shows too.
    Nft,
    /// Rules live in ip_tables and ip6_tables. Every change reads and writes a whole table, under a lock.
    Legacy,
}

impl Variant {
    pub const BOTH: [Variant; 2] = [Variant::Nft, Variant::Legacy];

    /// The other one.
    pub fn other(self) -> Variant {
        match self {
            Variant::Nft => Variant::Legacy,
            Variant::Legacy => Variant::Nft,
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Variant::Nft => "nft",
            Variant::Legacy => "legacy",
        })
    }
}

/// A table of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    Mangle,
    Nat,
    Filter,
}

impl Table {
    /// All that a Kubernetes proxy or the kubelet uses.
    pub const ALL: [Table; 3] = [Table::Mangle, Table::Nat, Table::Filter];

    pub fn name(self) -> &'static str {
        match self {
            Table::Mangle => "mangle",
            Table::Nat => "nat",
            Table::Filter => "filter",
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How long a tool may take, and wait for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For the lock that users of the legacy variant share.
    pub lock: Duration,
    /// For all of one run, the wait included. Then the tool is ended; it has changed all of a table, or nothing.
    pub run: Duration,
}

impl Default for Limits {
    /// The lock as long as kube-proxy waits for it. A load of 100,000 endpoints takes some ten seconds.
    fn default() -> Limits {
        Limits { lock: Duration::from_secs(5), run: Duration::from_secs(180) }
    }
}

/// What reads and writes tables: the tools, or in tests a table in memory.
pub trait Tables: Send {
    /// What `iptables-save -t` prints, line by line.
    fn save(&mut self, family: Family, table: Table, each_line: &mut dyn FnMut(&str)) -> Result<(), Failure>;

    /// What `iptables-restore --noflush --counters` does: each table of the input changes whole, or not at all.
    fn restore(&mut self, family: Family, input: &str) -> Result<(), Failure>;

    /// Makes counters for `nfacct` if they are not there; whether they are now, and `None` if that is not known.
    fn keep_accounts(&mut self, _names: &[&str]) -> Option<bool> {
        Some(false)
    }

    /// The same for a network namespace that nobody else writes to, to try something there.
    fn elsewhere(&self) -> Option<Box<dyn Tables>> {
        None
    }

    /// Which of the two it is, if it is one.
    fn variant(&self) -> Option<Variant> {
        None
    }

    /// How many chains are best written in one commit, where a commit need not hold everything.
    fn chains_at_once(&self) -> usize {
        usize::MAX
    }

    /// How long others have been waited for since this was last asked.
    fn take_waited(&mut self) -> Duration {
        Duration::ZERO
    }

    /// The tables of a family are about to be read: what others do from now on is news.
    fn look(&mut self, _family: Family) {}

    /// [`Tables::watch`] tells only what concerns us.
    fn is_sure(&self) -> bool {
        true
    }

    /// Numbers that stand for the rules of some chains, each of which changes when a rule does and not with what it
    /// counts; `None` where [`Tables::watch`] looks at all of them itself.
    fn digests(
        &mut self,
        _family: Family,
        _chains: &[(Table, &str)],
    ) -> Result<Option<Vec<u64>>, netlink::Error> {
        Ok(None)
    }

    /// Tells when somebody else changes chains of ours; `None` where that cannot be told. In the network namespace of
    /// the calling thread.
    fn watch(&self) -> Result<Option<Box<dyn crate::Watch>>, crate::Error> {
        Ok(None)
    }
}

/// What a tool locks that is to lock nothing: its own standard input, the pipe that nobody else has. Not `/dev/null`: all
/// tools that are told so would wait for each other there, and whoever may open it could hold them up.
const NO_LOCK: &str = "/proc/self/fd/0";

/// The tools of one variant.
#[derive(Clone, Debug)]
pub struct Xtables {
    variant: Variant,
    tools: PerFamily<Pair>,
    limits: Limits,
    /// The last few processes that wrote, youngest last.
    writers: Arc<Mutex<Vec<u32>>>,
    /// What tables of the legacy variant look like when only we wrote.
    ledger: Ledger,
    /// `None` where nobody else can write.
    lock: Option<Lock>,
    waited: Duration,
}

/// The two tools of a family.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pair {
    save: PathBuf,
    restore: PathBuf,
}

impl Xtables {
    fn new(variant: Variant, tools: PerFamily<Pair>) -> Xtables {
        Xtables {
            variant,
            tools,
            limits: Limits::default(),
            writers: Arc::default(),
            ledger: Ledger::default(),
            lock: Some(Lock::default()),
            waited: Duration::ZERO,
        }
    }

    /// The same, within other limits.
    pub fn within(mut self, limits: Limits) -> Xtables {
        self.limits = limits;
        self
    }

    /// The same, which look at another lock first than the tools take.
    #[cfg(test)]
    pub(crate) fn behind(mut self, lock: PathBuf) -> Xtables {
        self.lock = Some(Lock::at(lock));
        self
    }

    /// The same tools for a network namespace that nobody else writes to. A clone shares what is known of this one. There
    /// is one lock for all namespaces, and here it guards nothing: whoever holds it is not waited for.
    pub fn elsewhere(&self) -> Xtables {
        Xtables { lock: None, ..Xtables::new(self.variant, self.tools.clone()).within(self.limits) }
    }

    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Tells the changes of our own tools from those of others.
    pub fn writers(&self) -> Writers {
        Writers(Arc::clone(&self.writers))
    }

    /// Waits until nobody holds the lock, and takes it; `None` where there is none to take, or the tool has to.
    fn take_lock(&mut self) -> Result<Option<Held>, Failure> {
        let Some(lock) = self.lock.as_mut().filter(|_| self.variant == Variant::Legacy) else {
            return Ok(None);
        };
        let begun = Instant::now();
        let outcome = lock.take(self.limits.lock);
        self.waited += begun.elapsed();
        outcome
    }

    fn restore_once(&mut self, family: Family, input: &str, held: Option<&Held>) -> Result<(), Failure> {
        let tool = &self.tools[family].restore;
        let is_guarded = held.is_some() || self.lock.is_none();
        // The nft variant knows the option and has nothing to wait for.
        let seconds = if is_guarded { 1 } else { self.limits.lock.as_secs().max(1) }.to_string();
        let args = ["-w", &seconds, "--noflush", "--counters"];
        let lock = is_guarded.then_some(NO_LOCK);
        let job = Job { tool, args: &args, input: Some(input), lock, limit: self.limits.run };
        let writers = &self.writers;
        let mut entry = (self.variant == Variant::Legacy).then(|| self.ledger.open(family, input));
        let ended = job.run(&mut |_| {}, |process| Writers::add(writers, process));
        if let Some(entry) = &mut entry {
            entry.close();
        }
        ended?.check(tool, Some(input))
    }
}

impl Tables for Xtables {
    fn save(&mut self, family: Family, table: Table, each_line: &mut dyn FnMut(&str)) -> Result<(), Failure> {
        // Merely to look into a table of the legacy variant creates it, with its hooks.
        let table = table.to_string();
        if find::present_tables(self.variant, family)
            .is_some_and(|names| names.lines().all(|name| name != table))
        {
            return Ok(());
        }
        let tool = &self.tools[family].save;
        let job = Job { tool, args: &["-t", &table], input: None, lock: None, limit: self.limits.run };
        let ended = job.run(each_line, |_| {})?;
        ended.check(tool, None)
    }

    fn restore(&mut self, family: Family, input: &str) -> Result<(), Failure> {
        let held = self.take_lock()?;
        match (self.restore_once(family, input, held.as_ref()), &self.lock) {
            // It waited for us: a tool that does not know how to leave the lock alone.
            (Err(Failure::Locked { .. }), Some(lock)) if held.is_some() => {
                lock.leave_to_tool();
                drop(held);
                self.restore_once(family, input, None)
            }
            (outcome, _) => outcome,
        }
    }

    fn chains_at_once(&self) -> usize {
        match self.variant {
            // Every commit replaces the whole table.
            Variant::Legacy => usize::MAX,
            // The tool compares each name with half of all that the commit names. With 1,000 services of 10 endpoints in
            // one commit it took 2.0 s of CPU time beside the kernel's, with 550 chains to a commit 0.3 s; with
            // 10,000 services it had not ended after four minutes, and took 17 s with the kernel's (1.8.9, a busy machine).
            Variant::Nft => 500,
        }
    }

    fn keep_accounts(&mut self, names: &[&str]) -> Option<bool> {
        let kept =
            Accounts::open().and_then(|mut accounts| names.iter().try_for_each(|name| accounts.ensure(name)));
        // So the kernel says that it knows no such counters. All else passes: no memory, no answer.
        let is_no = |error: &netlink::Error| {
            error.is_unsupported() || error.is_permission() || error.errno() == Some(Errno::INVAL)
        };
        match kept {
            Ok(()) => Some(true),
            Err(error) if is_no(&error) => Some(false),
            Err(_) => None,
        }
    }

    fn elsewhere(&self) -> Option<Box<dyn Tables>> {
        Some(Box::new(Xtables::elsewhere(self)))
    }

    fn variant(&self) -> Option<Variant> {
        Some(self.variant)
    }

    fn is_sure(&self) -> bool {
        self.variant == Variant::Nft
    }

    fn digests(
        &mut self,
        family: Family,
        chains: &[(Table, &str)],
    ) -> Result<Option<Vec<u64>>, netlink::Error> {
        if self.variant != Variant::Nft {
            return Ok(None);
        }
        let mut nft = Nft::open()?;
        let digest = |(table, chain): &(Table, &str)| {
            nft.digest(TableRef { family: crate::nftables::wire(family), name: table.name() }, chain)
        };
        chains.iter().map(digest).collect::<Result<_, _>>().map(Some)
    }

    fn look(&mut self, family: Family) {
        if self.variant == Variant::Legacy {
            self.ledger.look(family);
        }
    }

    fn watch(&self) -> Result<Option<Box<dyn crate::Watch>>, crate::Error> {
        let failed = |error| crate::Error::kernel("watch", "the tables of iptables", error);
        Ok(Some(match self.variant {
            Variant::Nft => Box::new(NftWatch::open(self.writers()).map_err(failed)?),
            Variant::Legacy => {
                let lock = self.lock.clone().unwrap_or_default();
                Box::new(LegacyWatch::open(self.ledger.clone(), lock).map_err(failed)?)
            }
        }))
    }

    fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

/// The processes that wrote for us. A netlink socket that a process opens first has its number as port.
#[derive(Clone, Debug)]
pub struct Writers(Arc<Mutex<Vec<u32>>>);

impl Writers {
    /// Numbers come round: what is older than so many runs is somebody else.
    const REMEMBERED: usize = 32;

    pub fn contains(&self, process: u32) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&process)
    }

    fn add(writers: &Mutex<Vec<u32>>, process: u32) {
        let mut writers = writers.lock().unwrap_or_else(PoisonError::into_inner);
        writers.push(process);
        let excess = writers.len().saturating_sub(Writers::REMEMBERED);
        writers.drain(..excess);
    }
}

/// The file name of a tool, for messages.
fn name(tool: &Path) -> String {
    tool.file_name().unwrap_or(tool.as_os_str()).to_string_lossy().into_owned()
}
