// SPDX-License-Identifier: Apache-2.0

#![doc = include_str!("README.md")]
//!
//! # Layout of the code
//!
//! Pure: [`program`] (a table in nft's nouns) with `text`, `lower`, `lift` and [`sim`]; `layout` and `frame` (which
//! sets and rules we have); `slots`, `entry` and [`render`] (from the Plan to elements); `diff` and `holdings`.
//! Effects: `kernel` and `readback` read, `pass`, `turn`, `tidy` and `script` commit, `affinity` and `forgetter` forget clients,
//! `carry` keeps them, `meter` reads what was counted, `probe` asks what the kernel can do, `watch` and `audit` see what others do.

mod affinity;
mod audit;
mod carry;
mod diff;
mod entry;
mod forgetter;
mod frame;
mod holdings;
mod kernel;
mod layout;
mod lift;
mod lower;
mod meter;
mod pass;
mod probe;
pub mod program;
mod readback;
pub mod render;
mod script;
pub mod sim;
mod slots;
#[cfg(test)]
pub(crate) mod tests;
mod text;
mod tidy;
mod turn;
mod watch;

use model::{Family, PerFamily, Plan};
use netlink::{
    Socket, Transport,
    nft::{Batch, Delete, Monitor, Nft},
};

use self::{
    forgetter::Forgetter,
    holdings::Holdings,
    turn::{Settings, Turn},
};
pub(crate) use self::{frame::guard, layout::wire, lower::rule as lower};
use crate::{
    Abilities, Applied, Audited, Config, Dataplane, Error, Listed, Loopback, Scope, Unsupported,
    loopback::Localnet,
};

/// Keeps our tables.
#[derive(Debug)]
pub struct Nftables<T = Socket> {
    nft: Nft<T>,
    config: Config,
    /// What the tables hold; `None` when that is not known, at the start and after an error.
    known: Option<Box<PerFamily<Holdings>>>,
    audit: audit::Audit,
    forgetter: Forgetter,
    localnet: Localnet,
    /// What the rules do about loopback addresses.
    loopback: PerFamily<Loopback>,
    /// In which families connections are counted.
    counted: PerFamily<bool>,
    /// The kernel can draw by a hash of the client.
    hashes: bool,
    /// What the generation was before the tables were last read as a whole, less the commits we had made by then.
    origin: Option<u32>,
}

impl Nftables<Socket> {
    /// Connects in the network namespace of this thread, and asks whether the kernel can do what we need.
    pub fn open(config: &Config) -> Result<Nftables<Socket>, Unsupported> {
        let nft = Nft::open().map_err(|error| {
            Unsupported(format!("no connection to the kernel's packet filter (netlink): {error}"))
        })?;
        let mut nftables = Nftables::probed(nft, config)?;
        nftables.forgetter = Forgetter::start().map_err(|error| {
            Unsupported(format!("no thread to forget clients of endpoints that go: {error}"))
        })?;
        Ok(nftables)
    }
}

impl<T: Transport> Nftables<T> {
    fn probed(mut nft: Nft<T>, config: &Config) -> Result<Nftables<T>, Unsupported> {
        probe::probe(&mut nft, config.families)?;
        let hashes = probe::hashes(&mut nft, config.families);
        Ok(Nftables { hashes, ..Nftables::over(nft, config) })
    }

    /// Works over any connection, and takes for granted that the kernel can do what we need.
    pub fn over(nft: Nft<T>, config: &Config) -> Nftables<T> {
        let audit = audit::Audit::default();
        Nftables {
            nft,
            config: config.clone(),
            known: None,
            audit,
            forgetter: Forgetter::default(),
            localnet: Localnet::of_kernel(),
            loopback: PerFamily::default(),
            counted: PerFamily { v4: false, v6: false },
            hashes: true,
            origin: None,
        }
    }

    /// The connection: its port tells our own changes from those of others.
    pub fn connection(&mut self) -> &mut Nft<T> {
        &mut self.nft
    }

    /// All that we have made.
    fn commits(&self) -> u32 {
        self.nft.commits().wrapping_add(self.forgetter.commits())
    }

    /// The tables that are there.
    fn programs(&mut self) -> Result<Vec<program::Program>, Error> {
        let each = Family::BOTH.map(|family| kernel::program(&mut self.nft, family).transpose());
        each.into_iter().flatten().collect()
    }

    /// What the tables hold, and where that could not be read.
    fn read(&mut self) -> (Box<PerFamily<Holdings>>, PerFamily<Option<Error>>) {
        let _quiet = self.forgetter.quiet();
        self.origin = self.nft.generation().ok().map(|generation| generation.wrapping_sub(self.commits()));
        let mut known = Box::<PerFamily<Holdings>>::default();
        let mut failed = PerFamily::default();
        for family in Family::BOTH.into_iter().filter(|family| self.config.families[*family]) {
            match kernel::read(&mut self.nft, family) {
                Ok(holdings) => known[family] = holdings,
                Err(error) => failed[family] = Some(error),
            }
        }
        (known, failed)
    }
}

impl<T: Transport> Dataplane for Nftables<T> {
    fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Result<Applied, Error> {
        // Whoever leaves by `?` leaves nothing known behind: the next turn is complete in both families.
        let known = self.known.take();
        let changes = match scope {
            Scope::Only(changes) if known.is_some() => Some(changes),
            _ => None,
        };
        let mut warnings = Vec::new();
        let is_node_wide = changes.is_none_or(|changes| changes.node_wide);
        if is_node_wide {
            self.loopback = self.localnet.look(plan, self.config.families, &mut warnings);
        }
        let (known, failed) = match known.filter(|_| changes.is_some()) {
            Some(known) => (known, PerFamily::default()),
            None => self.read(),
        };
        if changes.is_none() {
            self.counted = meter::worthwhile(plan, &known, self.config.counted_endpoints);
        }
        let settings = Settings {
            counted: self.counted,
            hashes: self.hashes,
            families: self.config.families,
            loopback: self.loopback,
            mark: 1 << (self.config.masquerade_bit % 32),
        };
        let mut turn = Turn::new(&mut self.nft, plan, known, settings);
        turn.failed = failed;
        match changes {
            Some(changes) => turn.changes(changes),
            None => turn.everything(),
        }
        let Turn { known, mut applied, failed, refused, departed, .. } = turn;
        if changes.is_none() || !departed.is_empty() {
            for family in Family::BOTH.into_iter().filter(|family| self.config.families[*family]) {
                // Of a family that failed it is not known what is in force.
                if failed[family].is_none() {
                    self.forgetter.follow(family, &known[family], &departed, changes.is_none());
                }
            }
        }
        let (forgotten, failure) = self.forgetter.settle(&mut self.nft);
        let is_guarded = is_node_wide && failed.v4.is_none();
        let served = if is_guarded { self.localnet.serve(self.loopback) } else { Ok(()) };
        let mut errors: Vec<Error> = [failed.v4, failed.v6, served.err()].into_iter().flatten().collect();
        let refused = refused.v4.into_iter().chain(refused.v6);
        if changes.is_some() || !errors.is_empty() {
            // It may be that the tables are not as we believe: all is compared, and what is refused then is bad itself.
            errors.extend(refused);
        } else {
            let before = warnings.len();
            warnings.extend(refused.map(|error| format!("left out, and tried again later: {error}")));
            applied.left_out = warnings.len() - before;
        }
        Error::collect(errors)?;
        self.known = Some(known);
        applied.forgotten = forgotten;
        warnings.extend(failure.map(|failure| {
            format!(
                "clients of endpoints that went are not all forgotten yet, which is tried again: {failure}"
            )
        }));
        applied.warnings.extend(warnings);
        Ok(applied)
    }

    fn abilities(&self) -> Abilities {
        let schedulers = render::SCHEDULERS.into_iter();
        let schedulers = schedulers.filter(|it| self.hashes || !render::is_by_hash(*it)).collect();
        Abilities {
            schedulers,
            weights: true,
            instead: "endpoints are drawn at random",
            ..Abilities::default()
        }
    }

    fn serves_loopback(&self, family: Family) -> bool {
        self.loopback[family].is_served()
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        self.known = None;
        let mut errors = Vec::new();
        for family in Family::BOTH {
            let mut batch = Batch::new();
            batch.delete_table(0, script::table(family), Delete::Existing);
            match self.nft.commit(&batch) {
                Err(error) if !error.is_not_found() => {
                    let object = format!("table {} {}", text::keyword(family), crate::names::TABLE);
                    errors.push(Error::kernel("delete", object, error));
                }
                _ => (),
            }
        }
        Error::collect(errors)
    }

    fn dump(&mut self) -> Result<String, Error> {
        Ok(self.programs()?.iter().map(|program| program.to_string()).collect())
    }

    fn listed(&mut self) -> Result<Vec<Listed>, Error> {
        Ok(self.programs()?.iter().map(|program| program.listed()).collect())
    }

    fn audit(&mut self) -> Result<Audited, Error> {
        let Some(known) = &self.known else { return Ok(Audited::default()) };
        let affinity = match self.audit.is_under_way() {
            true => Vec::new(),
            // A gauge is not worth a look that found something.
            false => affinity::sizes(&mut self.nft, self.config.families).unwrap_or_default(),
        };
        let found = self.audit.step(&mut self.nft, known, self.config.families);
        if !matches!(found, Ok(None)) {
            self.audit.restart();
        }
        Ok(Audited { drift: found?, more: self.audit.is_under_way(), affinity, ..Audited::default() })
    }

    fn meter(&self) -> Result<Option<Box<dyn crate::Meter>>, Error> {
        if self.config.counted_endpoints == 0 {
            return Ok(None);
        }
        let nft = Nft::open().map_err(|error| Error::kernel("read", "what was counted", error))?;
        Ok(Some(Box::new(meter::Meter::new(nft, self.config.families))))
    }

    fn watch(&self) -> Result<Option<Box<dyn crate::Watch>>, Error> {
        let port = self.nft.port();
        let failed = |error| Error::kernel("watch", "our tables", error);
        let monitor = Monitor::open().and_then(|monitor| monitor.passing_over(port)).map_err(failed)?;
        // From here on nothing is missed. What was, shows in the number of commits.
        let late = match self.origin {
            Some(origin) => {
                let now = Nft::open().and_then(|mut nft| nft.generation()).map_err(failed)?;
                now != origin.wrapping_add(self.commits())
            }
            None => false,
        };
        Ok(Some(Box::new(watch::Watch::new(monitor, port, late))))
    }
}
