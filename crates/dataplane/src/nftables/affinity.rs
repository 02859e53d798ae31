// SPDX-License-Identifier: Apache-2.0

//! Forgets clients whose endpoint is gone.
//!
//! The kernel fills the affinity map; a client stays in it until its time is over. When an endpoint leaves a
//! frontend, its clients must be balanced anew at once, so right after the commit they are searched and removed.
//! None can come back: rules remember only pairs of frontend and endpoint that are in force.

use hashbrown::{HashMap, HashSet};
use model::{Address, Family, Frontend};
use netlink::{
    Errno, Transport,
    nft::{Batch, Delete, Element, ElementValue, Nft, Visit},
};

use super::{
    entry::{Entry, Target},
    holdings::{Held, Holdings},
    layout::{self, Container, Side, Space},
    program::{Bytes, address_len},
    script::table,
    slots,
};
use crate::Error;

/// Endpoints that left frontends with affinity since the turn began.
#[derive(Debug, Default)]
pub(super) struct Departed {
    /// Packed endpoints that left the frontend on either side. One that is still there on the other side counts,
    /// too: whether a client comes from inside is not known here, and being balanced anew does little harm.
    endpoints: HashMap<Frontend, HashSet<Box<[u8]>>>,
}

impl Departed {
    /// Takes note of a change that the kernel has acknowledged.
    pub(super) fn note(&mut self, frontend: &Frontend, old: Option<&Held>, new: Option<&Entry>) {
        let Some(Held::Entry(old)) = old else { return };
        if old.sticky_secs.is_none() {
            return;
        }
        let is_sticky = new.is_some_and(|new| new.sticky_secs.is_some());
        for side in Side::BOTH {
            let slots = |target: Option<&Target>| -> HashSet<Box<[u8]>> {
                target.into_iter().flat_map(|target| target.slots.packed()).map(Box::from).collect()
            };
            let stays = slots(new.filter(|_| is_sticky).and_then(|new| new.target(side)));
            let gone = slots(old.target(side)).into_iter().filter(|endpoint| !stays.contains(endpoint));
            let gone: Vec<_> = gone.collect();
            if !gone.is_empty() {
                self.endpoints.entry(*frontend).or_default().extend(gone);
            }
        }
    }

    /// Something left a frontend of this family.
    pub(super) fn concerns(&self, family: Family) -> bool {
        self.endpoints.keys().any(|frontend| frontend.family() == family)
    }

    fn contains(&self, frontend: &Frontend, packed: &[u8]) -> bool {
        self.endpoints.get(frontend).is_some_and(|gone| gone.contains(packed))
    }
}

/// Removes all clients whose endpoint has departed or is not in force; returns how many.
pub(super) fn forget<T: Transport>(
    nft: &mut Nft<T>,
    family: Family,
    holdings: &Holdings,
    departed: &Departed,
) -> Result<u64, Error> {
    let mut stale: Vec<Bytes> = Vec::new();
    let set = Container::Affinity.name();
    let listed = nft.elements_in_motion(table(family), &set, |visit| match visit {
        Visit::Start => stale.clear(),
        Visit::Element(element) => {
            if !is_in_force(family, &element, holdings, departed) {
                stale.extend(Bytes::new(element.key));
            }
        }
    });
    let failed = |act, error| Error::kernel(act, "the affinity map", error);
    listed.map_err(|error| failed("list", error))?;
    stale.sort_unstable();
    stale.dedup();
    for keys in stale.chunks(4_000) {
        delete(nft, family, keys).map_err(|error| failed("remove clients from", error))?;
    }
    Ok(stale.len() as u64)
}

fn is_in_force(family: Family, element: &Element<'_>, holdings: &Holdings, departed: &Departed) -> bool {
    let ElementValue::Bytes(value) = element.value else { return false };
    let Some(packed) = slots::pack(family, value) else { return false };
    let Some(frontend) = frontend(family, element.key, holdings) else { return false };
    let Some(Held::Entry(entry)) = holdings.frontends.get(&frontend) else { return false };
    let mut targets = Side::BOTH.into_iter().filter_map(|side| entry.target(side));
    entry.sticky_secs.is_some()
        && !departed.contains(&frontend, packed)
        && targets.any(|target| target.slots.packed().any(|at| at == packed))
}

/// The frontend that an entry's key is about: client, address, protocol, port. An address that is no frontend's
/// must be one of the node's, and the port a node port.
fn frontend(family: Family, key: &[u8], holdings: &Holdings) -> Option<Frontend> {
    let key = key.get(address_len(family)..)?;
    let (frontend, _) = layout::read_key(family, Space::Service, key)?;
    if holdings.frontends.contains_key(&frontend) {
        return Some(frontend);
    }
    Some(Frontend { address: Address::NodePort(family), ..frontend })
}

/// Deletes clients, of which any may have been forgotten by the kernel meanwhile.
fn delete<T: Transport>(nft: &mut Nft<T>, family: Family, keys: &[Bytes]) -> Result<(), netlink::Error> {
    match nft.commit(&deletion(family, keys, Delete::IfPresent)) {
        // Linux before 6.3 cannot delete what may be missing; then one by one.
        Err(error) if error.is_unsupported() || error.errno() == Some(Errno::INVAL) => (),
        outcome => return outcome,
    }
    for key in keys {
        match nft.commit(&deletion(family, &[*key], Delete::Existing)) {
            Err(error) if error.is_not_found() => (),
            outcome => outcome?,
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
