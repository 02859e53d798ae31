// SPDX-License-Identifier: Apache-2.0

//! Which clients are to be forgotten, and how they are found.
//!
//! The kernel fills the affinity map; a client stays in it until its time is over. When an endpoint leaves a
//! frontend, its clients must be balanced anew, so right after the commit they are searched and removed. None can come
//! back: rules remember, and renew, only pairs of frontend and endpoint that are in force. So each look finds fewer, and
//! one that finds none is the last.

use hashbrown::{HashMap, HashSet};
use model::{Address, Family, Frontend, PerFamily};
use netlink::{
    Errno, Transport,
    nft::{Batch, Delete, Element, ElementValue, Nft},
};

use super::{
    entry::Entry,
    holdings::{Held, Holdings},
    layout::{self, Container, Side, Space},
    program::{Bytes, address_len},
    script::table,
    slots,
};
use crate::Error;

/// What happened to frontends with affinity since the turn began.
#[derive(Debug, Default)]
pub(super) struct Departed {
    /// All that changed; with each, packed endpoints that left it on either side. One that is still there on the other
    /// side counts, too: whether a client comes from inside is not known here, and being balanced anew does little harm.
    endpoints: HashMap<Frontend, HashSet<Box<[u8]>>>,
}

impl Departed {
    pub(super) fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// Takes note of a change that the kernel has acknowledged.
    pub(super) fn note(&mut self, frontend: &Frontend, old: Option<&Held>, new: Option<&Entry>) {
        let is_sticky = |entry: &&Entry| entry.sticky_secs.is_some();
        let old = old.and_then(Held::entry).filter(is_sticky);
        let new = new.filter(is_sticky);
        if old.is_none() && new.is_none() {
            return;
        }
        let departed = self.endpoints.entry(*frontend).or_default();
        for side in Side::BOTH {
            let slots = |entry: Option<&Entry>| -> HashSet<Box<[u8]>> {
                let target = entry.and_then(|entry| entry.target(side));
                target.into_iter().flat_map(|target| target.slots.packed()).map(Box::from).collect()
            };
            let stays = slots(new);
            departed.extend(slots(old).into_iter().filter(|endpoint| !stays.contains(endpoint)));
        }
    }
}

/// Which clients of one family may be remembered.
#[derive(Debug, Default)]
pub(super) struct Remembered {
    /// Frontends with affinity and their packed endpoints, one behind the other.
    in_force: HashMap<Frontend, Box<[u8]>>,
    /// Packed endpoints that left one side, with the number of the request to forget their clients. They may be in force
    /// on the other.
    departed: HashMap<Frontend, HashMap<Box<[u8]>, u64>>,
    /// How often it was asked to forget.
    asked: u64,
    /// Up to which request all is forgotten.
    done: u64,
    /// The last look since the last request found nothing.
    is_clear: bool,
}

impl Remembered {
    /// Takes over what the turn did. `all`: what else was in force before is not known either.
    pub(super) fn follow(&mut self, family: Family, holdings: &Holdings, departed: &Departed, all: bool) {
        let (mut is_work, asked) = (all, self.asked + 1);
        if all {
            self.in_force.clear();
            let known = holdings.frontends.iter();
            let sticky = known.filter_map(|(at, held)| Some((*at, in_force(held.entry()?)?)));
            self.in_force.extend(sticky);
        }
        for (at, gone) in departed.endpoints.iter().filter(|(at, _)| at.family() == family) {
            match holdings.frontends.get(at).and_then(Held::entry).and_then(in_force) {
                Some(endpoints) => self.in_force.insert(*at, endpoints),
                None => self.in_force.remove(at),
            };
            is_work |= !gone.is_empty();
            let gone = gone.iter().map(|endpoint| (endpoint.clone(), asked));
            self.departed.entry(*at).or_default().extend(gone);
        }
        if is_work {
            self.asked = asked;
            self.is_clear = false;
        }
    }

    /// Something is to be forgotten.
    pub(super) fn has_work(&self) -> bool {
        self.asked != self.done
    }

    /// The last request, to be given to [`Remembered::looked`].
    pub(super) fn asked(&self) -> u64 {
        self.asked
    }

    /// The map was looked through after this request, and the clients found were removed. `none`: there were none. Unless
    /// the look was whole, it takes another one like it: while clients come, hardly any is.
    pub(super) fn looked(&mut self, asked: u64, none: bool, whole: bool) {
        self.departed.retain(|_, endpoints| {
            endpoints.retain(|_, since| *since > asked);
            !endpoints.is_empty()
        });
        if none && (whole || self.is_clear) {
            self.done = asked;
        }
        self.is_clear = none;
    }

    /// Whether this entry of the map is to go.
    pub(super) fn is_stale(&self, family: Family, element: &Element<'_>) -> bool {
        let ElementValue::Bytes(value) = element.value else { return true };
        let Some(packed) = slots::pack(family, value) else { return true };
        let Some(frontend) = self.frontend(family, element.key) else { return true };
        let endpoints = self.in_force.get(&frontend).map(|all| all.chunks_exact(slots::stride(family)));
        endpoints.is_none_or(|mut endpoints| endpoints.all(|endpoint| endpoint != packed))
            || self.departed.get(&frontend).is_some_and(|gone| gone.contains_key(packed))
    }

    /// The frontend that an entry's key is about: client, address, protocol, port. An address that is no frontend's
    /// must be one of the node's, and the port a node port.
    fn frontend(&self, family: Family, key: &[u8]) -> Option<Frontend> {
        let key = key.get(address_len(family)..)?;
        let (frontend, _) = layout::read_key(family, Space::Service, key)?;
        if self.in_force.contains_key(&frontend) {
            return Some(frontend);
        }
        Some(Frontend { address: Address::NodePort(family), ..frontend })
    }
}

/// The endpoints whose clients are remembered, one behind the other; `None` without affinity.
fn in_force(entry: &Entry) -> Option<Box<[u8]>> {
    entry.sticky_secs?;
    Some(entry.sticky_endpoints().concat().into())
}

/// Looks through the map once and gives back the keys that are stale. `true` if none can have been passed over.
pub(super) fn stale<T: Transport>(
    nft: &mut Nft<T>,
    family: Family,
    is_stale: impl Fn(&Element<'_>) -> bool,
) -> Result<(Vec<Bytes>, bool), netlink::Error> {
    let mut keys = Vec::new();
    let set = Container::Affinity.name();
    let whole = nft.glance(table(family), &set, |element| {
        if is_stale(element) {
            keys.extend(Bytes::new(element.key));
        }
    })?;
    keys.sort_unstable();
    keys.dedup();
    Ok((keys, whole))
}

/// How many clients are remembered. Older kernels do not tell.
pub(super) fn sizes<T: Transport>(
    nft: &mut Nft<T>,
    families: PerFamily<bool>,
) -> Result<Vec<crate::Affinity>, Error> {
    let mut all = Vec::new();
    for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
        let sizes = nft.set_sizes(table(family)).map_err(|error| Error::kernel("list", "the sets", error))?;
        let is_ours = |(name, _): &(String, _)| *name == Container::Affinity.name();
        let clients = sizes.into_iter().find(is_ours).and_then(|(_, size)| size);
        let told = |clients| crate::Affinity { family, clients, limit: layout::AFFINITY_SIZE };
        all.extend(clients.map(told));
    }
    Ok(all)
}

/// Deletes clients, of which any may have been forgotten by the kernel meanwhile.
pub(super) fn delete<T: Transport>(
    nft: &mut Nft<T>,
    family: Family,
    keys: &[Bytes],
) -> Result<(), netlink::Error> {
    match nft.commit(&deletion(family, keys, Delete::IfPresent)) {
        // Linux before 6.3 cannot delete what may be missing.
        Err(error) if error.is_unsupported() || error.errno() == Some(Errno::INVAL) => (),
        outcome => return outcome,
    }
    for some in keys.chunks(FEW) {
        match nft.commit(&deletion(family, some, Delete::Existing)) {
            Err(error) if error.is_not_found() => (),
            outcome => {
                outcome?;
                continue;
            }
        }
        for key in some {
            match nft.commit(&deletion(family, &[*key], Delete::Existing)) {
                Err(error) if error.is_not_found() => (),
                outcome => outcome?,
            }
        }
    }
    Ok(())
}

fn deletion(family: Family, keys: &[Bytes], how: Delete) -> Batch {
    let mut batch = Batch::new();
    let set = Container::Affinity.name();
    let mut writer = batch.delete_elements(0, table(family), &set, how);
    keys.iter().for_each(|key| writer.push(&Element::key(key)));
    drop(writer);
    batch
}

/// Where one client that is gone already spoils the deletion of the others, not many are deleted at once.
const FEW: usize = 64;
