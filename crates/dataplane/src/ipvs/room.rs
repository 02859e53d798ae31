// SPDX-License-Identifier: Apache-2.0

//! How much sets can hold. kube-proxy's end at 65,536 elements, and it refuses a set of its name that ends elsewhere: it
//! could not take over from us. So ours end there too, until more is needed; then a larger one takes a set's place, with
//! all it holds, and rules that look into it see no gap.

use std::collections::BTreeMap;

use hashbrown::HashSet;
use model::Family;
use netlink::{
    Error,
    ipset::{Element, SetKind, Spec},
};

use super::{
    kernel::Machine,
    readback::Readback,
    render::{Block, Item},
    sets::Set,
};

/// What kube-proxy's sets can hold.
pub(super) const USUAL: u32 = 65_536;
/// For sets that kube-proxy does not have.
const AMPLE: u32 = 1 << 20;
/// The name of a set that is about to take the place of another.
pub(crate) const SPARE: &str = "KUBE-PORTOLAN-SPARE";

/// What sets lack of what is wanted, as far as it was counted.
#[derive(Debug, Default)]
pub(super) struct Needs(BTreeMap<Set, usize>);

impl Needs {
    /// Several blocks may need the same, so this may be too much.
    pub(super) fn count(&mut self, block: &Block, found: &Readback) {
        for item in block.items.iter().filter(|item| !found.items.contains(*item)) {
            if let Item::Member(set, _) = item {
                *self.0.entry(*set).or_default() += 1;
            }
        }
    }
}

/// What a set is to be able to hold, if it is `held` at most now (`None` for one that is not there).
fn size(set: Set, needed: usize, held: Option<u32>) -> u32 {
    let needed = u32::try_from(needed).unwrap_or(u32::MAX / 4);
    let wanted = match Set::OWN.contains(&set) {
        _ if needed > AMPLE => (2 * needed).next_power_of_two(),
        true => AMPLE,
        false if needed > USUAL => (2 * needed).next_power_of_two(),
        false => USUAL,
    };
    match held {
        // One that has grown stays until there is much room in the usual one.
        Some(held) if held >= needed && held > USUAL && needed > USUAL / 2 => held,
        _ => wanted,
    }
}

/// Makes the sets that are not there, and room in those that are. `blocks` are all that is wanted; they are looked at
/// again only where a set may be too small. How many sets were written.
pub(super) fn make(
    machine: &mut dyn Machine,
    family: Family,
    found: &Readback,
    needs: &Needs,
    blocks: impl Fn() -> Vec<Block>,
) -> Result<u32, Error> {
    let mut written = 0;
    for set in Set::ALL.into_iter().filter(|set| set.kind() != SetKind::BitmapPort || !has(found, *set)) {
        let held = found.room.get(&set).copied();
        let holds: Vec<Element> = elements(found, set);
        let mut needed = holds.len() + needs.0.get(&set).copied().unwrap_or_default();
        if needed > USUAL as usize {
            needed = exactly(set, &holds, &blocks());
        }
        let spec = Spec { max_elements: size(set, needed, held), ..set.spec(family) };
        match held {
            None => machine.create(&spec)?,
            Some(held) if held == spec.max_elements => continue,
            Some(_) => replace(machine, spec, &holds)?,
        }
        written += 1;
    }
    Ok(written)
}

fn has(found: &Readback, set: Set) -> bool {
    found.room.contains_key(&set)
}

fn elements(found: &Readback, set: Set) -> Vec<Element> {
    let of_set = |item: &Item| match item {
        Item::Member(of, element) if *of == set => Some(*element),
        _ => None,
    };
    found.items.iter().filter_map(of_set).collect()
}

fn exactly(set: Set, holds: &[Element], blocks: &[Block]) -> usize {
    let mut all: HashSet<Element> = holds.iter().copied().collect();
    for item in blocks.iter().flat_map(|block| &block.items) {
        if let Item::Member(of, element) = item
            && *of == set
        {
            all.insert(*element);
        }
    }
    all.len()
}

fn replace(machine: &mut dyn Machine, spec: Spec, holds: &[Element]) -> Result<(), Error> {
    // Somebody may have been killed in the midst of this.
    machine.destroy(SPARE)?;
    let spare = Spec { name: SPARE.to_owned(), ..spec.clone() };
    machine.create(&spare)?;
    machine.add(SPARE, spec.family, holds)?;
    machine.swap(SPARE, &spec.name)?;
    machine.destroy(SPARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_as_large_as_kube_proxys_while_that_will_do() {
        assert_eq!(size(Set::ClusterIp, 0, None), USUAL);
        assert_eq!(size(Set::ClusterIp, 65_536, Some(USUAL)), USUAL);
        assert_eq!(size(Set::ClusterIp, 65_537, Some(USUAL)), 1 << 18);
        assert_eq!(size(Set::ClusterIp, 65_000, Some(1 << 18)), 1 << 18, "it may grow again");
        assert_eq!(size(Set::ClusterIp, 30_000, Some(1 << 18)), USUAL);
        assert_eq!(size(Set::ClusterIp, 10, Some(1024)), USUAL, "somebody made a small one");
        assert_eq!(size(Set::Inside, 10, None), AMPLE);
        assert_eq!(size(Set::Inside, 10, Some(AMPLE)), AMPLE);
    }
}
