// SPDX-License-Identifier: Apache-2.0

//! A table with a bound, which forgets what was used longest ago.

use std::{collections::BTreeMap, hash::Hash};

use hashbrown::HashMap;

#[derive(Debug)]
pub(crate) struct Lru<K, V> {
    entries: HashMap<K, (u64, V)>,
    /// By last use.
    order: BTreeMap<u64, K>,
    uses: u64,
}

impl<K: Copy + Eq + Hash, V> Lru<K, V> {
    pub(crate) fn new() -> Lru<K, V> {
        Lru { entries: HashMap::new(), order: BTreeMap::new(), uses: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Without counting as a use.
    pub(crate) fn peek(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|(_, value)| value)
    }

    pub(crate) fn touch(&mut self, key: &K) -> Option<&mut V> {
        let (used, value) = self.entries.get_mut(key)?;
        self.uses += 1;
        self.order.remove(used);
        self.order.insert(self.uses, *key);
        *used = self.uses;
        Some(value)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.remove(&key);
        self.uses += 1;
        self.order.insert(self.uses, key);
        self.entries.insert(key, (self.uses, value));
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let (used, value) = self.entries.remove(key)?;
        self.order.remove(&used);
        Some(value)
    }

    /// What was used longest ago.
    pub(crate) fn oldest(&self) -> Option<(&K, &V)> {
        let key = self.order.values().next()?;
        Some((key, self.peek(key)?))
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&V) -> bool) {
        self.entries.retain(|_, (used, value)| {
            let stays = keep(value);
            if !stays {
                self.order.remove(used);
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_the_one_used_longest_ago() {
        let mut table = Lru::new();
        for key in 0..5 {
            table.insert(key, key * 10);
        }
        table.touch(&0);
        table.insert(1, 11);
        assert_eq!(table.oldest(), Some((&2, &20)));
        assert_eq!(table.remove(&2), Some(20));
        table.retain(|value| *value != 30);
        assert_eq!(table.oldest(), Some((&4, &40)));
        assert_eq!((table.len(), table.order.len()), (3, 3));
    }
}
