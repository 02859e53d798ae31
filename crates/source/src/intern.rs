// SPDX-License-Identifier: Apache-2.0

//! One copy of each string that occurs often: namespaces, node names, zones, port names, service names.

use std::{hash::Hash, sync::Arc};

use hashbrown::HashSet;
use model::Hints;

/// Hands out shared strings and hints. Entries nobody else holds are dropped when the table has doubled since
/// the last sweep, so it stays within twice what is in use and a sweep costs O(1) for each insertion.
#[derive(Debug, Default)]
pub struct Interner {
    strings: Table<str>,
    hints: Table<Hints>,
}

impl Interner {
    /// The shared copy of `text`.
    pub fn string(&mut self, text: &str) -> Arc<str> {
        self.strings.share(text, |text| Arc::from(text))
    }

    /// The shared copy of `hints`.
    pub fn hints(&mut self, hints: Hints) -> Arc<Hints> {
        // `Hints` is small; the clone happens once for each distinct value.
        self.hints.share(&hints, |hints| Arc::new(hints.clone()))
    }

    /// Takes over what another one holds.
    pub(crate) fn absorb(&mut self, other: Interner) {
        self.strings.absorb(other.strings);
        self.hints.absorb(other.hints);
    }

    /// How many strings are held.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.strings.entries.len()
    }
}

#[derive(Debug)]
struct Table<T: ?Sized> {
    entries: HashSet<Arc<T>>,
    sweep_at: usize,
}

impl<T: ?Sized + Eq + Hash> Table<T> {
    fn share(&mut self, value: &T, make: impl FnOnce(&T) -> Arc<T>) -> Arc<T> {
        if let Some(known) = self.entries.get(value) {
            return Arc::clone(known);
        }
        if self.entries.len() >= self.sweep_at {
            self.entries.retain(|entry| Arc::strong_count(entry) > 1);
            self.sweep_at = (self.entries.len() * 2).max(SMALLEST_SWEEP);
            self.entries.shrink_to(self.sweep_at);
        }
        let made = make(value);
        self.entries.insert(Arc::clone(&made));
        made
    }

    /// Of two equal values the one known here stays; the other one goes with those who hold it.
    fn absorb(&mut self, other: Table<T>) {
        for entry in other.entries.into_iter().filter(|entry| Arc::strong_count(entry) > 1) {
            self.entries.get_or_insert(entry);
        }
        self.sweep_at = self.sweep_at.max(self.entries.len() * 2);
    }
}

impl<T: ?Sized> Default for Table<T> {
    fn default() -> Table<T> {
        Table { entries: HashSet::default(), sweep_at: SMALLEST_SWEEP }
    }
}

const SMALLEST_SWEEP: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_strings_are_one() {
        let mut interner = Interner::default();
        let first = interner.string("default");
        assert!(Arc::ptr_eq(&first, &interner.string("default")));
    }

    #[test]
    fn unused_entries_go_and_used_ones_stay() {
        let mut interner = Interner::default();
        let kept = interner.string("kept");
        for n in 0..100_000 {
            interner.string(&format!("passing-{n}"));
        }
        assert!(interner.len() <= 2 * SMALLEST_SWEEP, "{} entries", interner.len());
        assert!(Arc::ptr_eq(&kept, &interner.string("kept")));
    }

    #[test]
    fn a_large_set_in_use_is_not_swept_over_and_over() {
        let mut interner = Interner::default();
        let held: Vec<_> = (0..50_000).map(|n| interner.string(&format!("in-use-{n}"))).collect();
        assert!(interner.strings.sweep_at >= 50_000 && interner.strings.sweep_at <= 2 * 50_000);
        drop(held);
    }

    #[test]
    fn what_another_one_holds_is_known() {
        let (mut one, mut two) = (Interner::default(), Interner::default());
        let (ours, theirs, new) = (one.string("a"), two.string("a"), two.string("b"));
        two.string("unused");
        one.absorb(two);
        assert!(Arc::ptr_eq(&ours, &one.string("a")) && Arc::ptr_eq(&new, &one.string("b")));
        assert_eq!((one.len(), &*theirs), (2, "a"));
    }

    #[test]
    fn hints_are_shared() {
        let mut interner = Interner::default();
        let hints = || Hints { zones: Box::new([Arc::from("a")]), nodes: Box::new([]) };
        let first = interner.hints(hints());
        assert!(Arc::ptr_eq(&first, &interner.hints(hints())));
    }
}
