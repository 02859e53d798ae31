// SPDX-License-Identifier: Apache-2.0

//! A set whose members several owners may ask for, and which can tell what came and went.

use std::collections::BTreeMap;

/// A member stays until everyone who added it has removed it.
#[derive(Debug)]
pub(crate) struct Counted<T> {
    counts: BTreeMap<T, u32>,
    /// Whether each member touched since the last [`Counted::settle`] was there before. `None` until the first:
    /// up to then all is new.
    touched: Option<BTreeMap<T, bool>>,
}

impl<T> Default for Counted<T> {
    fn default() -> Counted<T> {
        Counted { counts: BTreeMap::new(), touched: None }
    }
}

impl<T: Copy + Ord> Counted<T> {
    pub(crate) fn add(&mut self, member: T) {
        let count = self.counts.entry(member).or_insert(0);
        if let Some(touched) = &mut self.touched {
            touched.entry(member).or_insert(*count > 0);
        }
        *count += 1;
    }

    pub(crate) fn remove(&mut self, member: T) {
        let Some(count) = self.counts.get_mut(&member) else { return };
        if let Some(touched) = &mut self.touched {
            touched.entry(member).or_insert(true);
        }
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&member);
        }
    }

    pub(crate) fn contains(&self, member: &T) -> bool {
        self.counts.contains_key(member)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.counts.keys().copied()
    }

    /// What came or went since the last call, sorted.
    pub(crate) fn settle(&mut self) -> Vec<T> {
        match self.touched.replace(BTreeMap::new()) {
            None => self.iter().collect(),
            Some(touched) => {
                let differs = touched.into_iter().filter(|(member, was)| self.contains(member) != *was);
                differs.map(|(member, _)| member).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_stays_until_its_last_owner_goes() {
        let mut set = Counted::default();
        set.add(1);
        set.add(1);
        assert_eq!(set.settle(), [1]);
        set.remove(1);
        assert!(set.contains(&1));
        assert_eq!(set.settle(), []);
        set.remove(1);
        assert_eq!(set.settle(), [1]);
        assert_eq!(set.iter().count(), 0);
    }

    #[test]
    fn coming_and_going_in_one_step_is_no_change() {
        let mut set = Counted::default();
        set.add(1);
        set.settle();
        set.remove(1);
        set.add(1);
        set.add(2);
        set.remove(2);
        set.remove(3);
        assert_eq!(set.settle(), []);
    }
}
