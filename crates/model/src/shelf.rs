// SPDX-License-Identifier: Apache-2.0

//! Where a world keeps what it knows of each service.
//!
//! Entries lie side by side and are found by number; the two indexes, by service and by slice, hold numbers only.
//! With keys in both indexes the same would take two and a half times the memory at 10,000 services.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::{
    endpoint::SliceKey,
    service::{Service, ServiceKey},
    slice::Slice,
};

/// What is known under one service key; the Service itself may come after its slices.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: ServiceKey,
    pub(crate) service: Option<Box<Service>>,
    /// The list in which the service was last seen.
    pub(crate) seen: u32,
    /// Sorted by name, so that decisions do not depend on the order of arrival.
    slices: Vec<Slice>,
}

impl Entry {
    pub(crate) fn slices(&self) -> &[Slice] {
        &self.slices
    }

    fn is_empty(&self) -> bool {
        self.service.is_none() && self.slices.is_empty()
    }

    fn position(&self, name: &str) -> Result<usize, usize> {
        self.slices.binary_search_by(|slice| (*slice.name).cmp(name))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Shelf {
    entries: Vec<Option<Entry>>,
    /// Numbers of vacant places in `entries`.
    vacant: Vec<u32>,
    by_service: HashTable<u32>,
    by_slice: HashTable<Filed>,
    hasher: DefaultHashBuilder,
}

/// The entry under which a slice is filed. An entry has many slices, so the hash cannot be found again from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Filed {
    hash: u64,
    entry: u32,
}

impl Shelf {
    pub(crate) fn entry(&self, key: &ServiceKey) -> Option<&Entry> {
        self.at(self.number(key)?)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().flatten()
    }

    /// The service under which a slice is filed.
    pub(crate) fn owner(&self, key: &SliceKey) -> Option<&ServiceKey> {
        Some(&self.at(self.filed(key)?.entry)?.key)
    }

    /// Files a service and returns its key if it says anything new.
    pub(crate) fn put_service(&mut self, mut service: Service, seen: u32) -> Option<&ServiceKey> {
        let number = self.open(&service.key);
        let entry = self.entries[number as usize].as_mut()?;
        entry.seen = seen;
        // One copy of the name is enough.
        service.key = entry.key.clone();
        if entry.service.as_deref() == Some(&service) {
            return None;
        }
        entry.service = Some(Box::new(service));
        Some(&entry.key)
    }

    /// Returns whether there was one.
    pub(crate) fn remove_service(&mut self, key: &ServiceKey) -> bool {
        let Some(number) = self.number(key) else { return false };
        let entry = self.entries[number as usize].as_mut();
        let was_there = entry.is_some_and(|entry| entry.service.take().is_some());
        self.close_if_empty(number);
        was_there
    }

    /// Files a slice and returns the key of its service if it says anything new. It must not be filed elsewhere.
    pub(crate) fn put_slice(&mut self, service: &ServiceKey, slice: Slice) -> Option<&ServiceKey> {
        let number = self.open(service);
        let hash = self.hasher.hash_one((&service.namespace, &slice.name));
        let entry = self.entries[number as usize].as_mut()?;
        match entry.position(&slice.name) {
            Ok(at) => {
                let known = &mut entry.slices[at];
                known.seen = slice.seen;
                if known.same_as(&slice) {
                    return None;
                }
                *known = slice;
            }
            Err(at) => {
                // Most services have one slice; `Vec` would make room for four.
                entry.slices.reserve_exact(1);
                entry.slices.insert(at, slice);
                self.by_slice.insert_unique(hash, Filed { hash, entry: number }, |filed| filed.hash);
            }
        }
        Some(&entry.key)
    }

    /// Returns the key of its service, if it was filed.
    pub(crate) fn remove_slice(&mut self, key: &SliceKey) -> Option<ServiceKey> {
        let filed = self.filed(key)?;
        self.unfile(filed);
        let entry = self.entries[filed.entry as usize].as_mut()?;
        entry.slices.retain(|slice| slice.name != key.name);
        let service = entry.key.clone();
        self.close_if_empty(filed.entry);
        Some(service)
    }

    /// Removes the services that were last seen in another list, and tells of each.
    pub(crate) fn sweep_services(&mut self, seen: u32, mut tell: impl FnMut(&ServiceKey)) {
        for number in 0..self.entries.len() {
            if let Some(entry) = &mut self.entries[number]
                && entry.seen != seen
                && entry.service.take().is_some()
            {
                tell(&entry.key);
                self.close_if_empty(number as u32);
            }
        }
    }

    /// Removes the slices that were last seen in another list, and tells of the service of each.
    pub(crate) fn sweep_slices(&mut self, seen: u32, mut tell: impl FnMut(&ServiceKey)) {
        for number in 0..self.entries.len() {
            let Some(entry) = &mut self.entries[number] else { continue };
            let stale: Vec<_> = entry.slices.extract_if(.., |slice| slice.seen != seen).collect();
            if stale.is_empty() {
                continue;
            }
            let namespace = entry.key.namespace.clone();
            tell(&entry.key);
            for slice in stale {
                let hash = self.hasher.hash_one((&namespace, &slice.name));
                self.unfile(Filed { hash, entry: number as u32 });
            }
            self.close_if_empty(number as u32);
        }
    }

    fn at(&self, number: u32) -> Option<&Entry> {
        self.entries.get(number as usize)?.as_ref()
    }

    fn number(&self, key: &ServiceKey) -> Option<u32> {
        let is_it = |number: &u32| self.at(*number).is_some_and(|entry| entry.key == *key);
        self.by_service.find(self.hasher.hash_one(key), is_it).copied()
    }

    fn filed(&self, key: &SliceKey) -> Option<Filed> {
        let hash = self.hasher.hash_one((&key.namespace, &key.name));
        let holds = |entry: &Entry| entry.key.namespace == key.namespace && entry.position(&key.name).is_ok();
        self.by_slice
            .find(hash, |filed| filed.hash == hash && self.at(filed.entry).is_some_and(holds))
            .copied()
    }

    /// Of two slices of one entry whose hashes are equal, either may go: their files are equal too.
    fn unfile(&mut self, filed: Filed) {
        if let Ok(found) = self.by_slice.find_entry(filed.hash, |other| *other == filed) {
            found.remove();
        }
    }

    /// The number of the entry for this key, made if there is none.
    fn open(&mut self, key: &ServiceKey) -> u32 {
        if let Some(number) = self.number(key) {
            return number;
        }
        let entry = Entry { key: key.clone(), service: None, seen: 0, slices: Vec::new() };
        let number = self.vacant.pop().unwrap_or(self.entries.len() as u32);
        match self.entries.get_mut(number as usize) {
            Some(place) => *place = Some(entry),
            None => self.entries.push(Some(entry)),
        }
        let (entries, hasher) = (&self.entries, &self.hasher);
        let hash_of =
            |number: &u32| entries[*number as usize].as_ref().map_or(0, |entry| hasher.hash_one(&entry.key));
        self.by_service.insert_unique(hasher.hash_one(key), number, hash_of);
        number
    }

    fn close_if_empty(&mut self, number: u32) {
        let Some(entry) = self.at(number).filter(|entry| entry.is_empty()) else { return };
        let hash = self.hasher.hash_one(&entry.key);
        if let Ok(found) = self.by_service.find_entry(hash, |other| *other == number) {
            found.remove();
        }
        self.entries[number as usize] = None;
        self.vacant.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{endpoint::EndpointSlice, family::Family, places::Places};

    fn key(number: usize) -> ServiceKey {
        ServiceKey { namespace: "n".into(), name: format!("service-{number}").into() }
    }

    fn slice(name: &str, seen: u32) -> Slice {
        let key = SliceKey { namespace: "n".into(), name: name.into() };
        let service = self::key(0);
        let (ports, endpoints) = (Box::default(), Box::default());
        let slice = EndpointSlice {
            key,
            service,
            family: Family::V4,
            ports,
            endpoints,
            weight: 1,
            trigger_time_nanos: None,
        };
        Slice::compact(slice, "here", &mut Places::default(), seen)
    }

    fn fill(shelf: &mut Shelf, seen: u32) {
        for number in 0..100 {
            for name in ["a", "b"] {
                shelf.put_slice(&key(number), slice(&format!("{name}-{number}"), seen));
            }
        }
    }

    #[test]
    fn nothing_is_left_of_what_goes() {
        let mut shelf = Shelf::default();
        for round in 0..3 {
            fill(&mut shelf, round);
            assert_eq!((shelf.by_service.len(), shelf.by_slice.len()), (100, 200));
            for number in 0..100 {
                let name = SliceKey { namespace: "n".into(), name: format!("a-{number}").into() };
                assert_eq!(shelf.owner(&name), Some(&key(number)));
                assert_eq!(shelf.remove_slice(&name), Some(key(number)));
                assert_eq!(shelf.remove_slice(&name), None);
            }
            assert_eq!((shelf.by_service.len(), shelf.by_slice.len()), (100, 100));
            shelf.sweep_slices(u32::MAX, |_| {});
            assert_eq!((shelf.by_service.len(), shelf.by_slice.len()), (0, 0));
            assert_eq!((shelf.entries.len(), shelf.vacant.len()), (100, 100), "places are used again");
        }
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn an_entry_takes_72_bytes() {
        assert_eq!(size_of::<Option<Entry>>(), 72);
    }
}
