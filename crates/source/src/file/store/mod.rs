// SPDX-License-Identifier: Apache-2.0

//! What the files said last, and what of it is served. Only hashes are kept of the objects themselves.
//!
//! If two files give one object, the file whose name sorts first has it.

#[cfg(test)]
mod tests;

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashSet, HashTable};
use model::Update;

use super::{
    manifest::{Content, Found, Known, Manifest, ObjectKey},
    scan::Name,
};
use crate::problem::{Outcome, Problem, Reason};

#[derive(Debug, Default)]
pub(super) struct Store {
    files: HashMap<Name, u32>,
    /// By the numbers in `files`; those in `free` are nobody's.
    shelves: Vec<Shelf>,
    free: Vec<u32>,
    /// Where each object is claimed. An object that several files give has several places.
    places: HashTable<Place>,
    hasher: DefaultHashBuilder,
}

/// What one file gives.
#[derive(Debug)]
struct Shelf {
    name: Name,
    claims: Box<[Claim]>,
}

#[derive(Clone, Debug)]
struct Claim {
    key: ObjectKey,
    hash: u64,
    /// It was handed on, and not that of another file since.
    served: bool,
    /// Nothing was wrong with its document.
    sound: bool,
}

impl Claim {
    /// Whether a version with which something is wrong must not take its place.
    fn is_good(&self) -> bool {
        self.served && self.sound
    }
}

/// A claim: the file's number, and the claim's place among those of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    file: u32,
    at: u32,
}

/// Files whose objects are wanted now that another file no longer gives them: read them again, and
/// [`Store::replace`] them.
pub(super) type Reread = HashSet<Name>;

impl Store {
    /// Puts what a file says now in place of what it said before. If not all of the file could be used,
    /// nothing it said before is taken back. What differs is told at once, because a large file should not be held
    /// twice; `report` is called with the line and the problem.
    pub(super) fn replace(
        &mut self,
        name: &Name,
        manifest: Manifest,
        tell: &mut dyn FnMut(Update),
        report: &mut dyn FnMut(usize, Problem),
    ) -> Reread {
        let file = self.number(name);
        let mut turn = Turn {
            said: HashSet::with_capacity(manifest.found.len()),
            claims: Vec::with_capacity(manifest.found.len()),
            held: HashSet::new(),
            reread: Reread::new(),
            store: self,
            file,
            tell,
            report,
        };
        manifest.found.into_iter().for_each(|found| turn.take(found));
        let Turn { said, mut claims, mut reread, .. } = turn;
        let before = std::mem::take(&mut self.shelves[file as usize].claims);
        self.forget(file, &before);
        let missing = before.into_iter().filter(|claim| !said.contains(&claim.key));
        // An empty file is rarely meant: it is what a writer leaves who has only got as far as truncating it.
        if manifest.complete && manifest.documents > 0 {
            reread.extend(self.release(missing.collect(), tell));
        } else {
            let found = claims.len();
            claims.extend(missing);
            if claims.len() > found {
                let is_empty = manifest.complete && manifest.documents == 0;
                let reason = if is_empty { Reason::Emptied } else { Reason::Kept };
                report(0, Problem::new("", "", reason, ""));
            }
        }
        self.keep(file, claims.into());
        reread
    }

    /// The documents of a file that need not be read again as long as they stay the same: all that they gave is served, and
    /// there is nothing to be said of them.
    pub(super) fn known(&self, name: &Name) -> Known {
        let file = self.files.get(name).map(|file| &self.shelves[*file as usize]);
        let claims = file.map_or(&[][..], |shelf| &shelf.claims);
        let held_back: HashSet<u64> =
            claims.iter().filter(|claim| !claim.served || !claim.sound).map(|claim| claim.hash).collect();
        let known = claims.iter().filter(|claim| !held_back.contains(&claim.hash));
        known.map(|claim| (claim.hash, claim.key.clone())).collect()
    }

    /// Takes back all that a file said.
    pub(super) fn remove(&mut self, name: &Name, tell: &mut dyn FnMut(Update)) -> Reread {
        let Some(file) = self.files.remove(name) else { return Reread::new() };
        let claims = std::mem::take(&mut self.shelves[file as usize].claims);
        self.forget(file, &claims);
        self.free.push(file);
        self.release(claims.into_vec(), tell)
    }

    /// Frees what was only needed for growing.
    pub(super) fn shrink(&mut self) {
        let Store { files, shelves, places, hasher, .. } = self;
        files.shrink_to_fit();
        shelves.shrink_to_fit();
        places.shrink_to_fit(|place| {
            hasher.hash_one(&shelves[place.file as usize].claims[place.at as usize].key)
        });
    }

    fn number(&mut self, name: &Name) -> u32 {
        if let Some(file) = self.files.get(name) {
            return *file;
        }
        let shelf = Shelf { name: name.clone(), claims: Box::default() };
        let file = match self.free.pop() {
            Some(file) => {
                self.shelves[file as usize] = shelf;
                file
            }
            None => {
                self.shelves.push(shelf);
                // Four billion files do not fit into a folder.
                (self.shelves.len() - 1) as u32
            }
        };
        self.files.insert(name.clone(), file);
        file
    }

    fn name_of(&self, place: Place) -> &Name {
        &self.shelves[place.file as usize].name
    }

    fn claim(&self, place: Place) -> &Claim {
        &self.shelves[place.file as usize].claims[place.at as usize]
    }

    fn claim_mut(&mut self, place: Place) -> &mut Claim {
        &mut self.shelves[place.file as usize].claims[place.at as usize]
    }

    /// Hardly ever more than one.
    fn places_of(&self, key: &ObjectKey) -> Vec<Place> {
        let places = self.places.iter_hash(self.hasher.hash_one(key));
        places.filter(|place| self.claim(**place).key == *key).copied().collect()
    }

    fn keep(&mut self, file: u32, claims: Box<[Claim]>) {
        self.shelves[file as usize].claims = claims;
        let Store { shelves, places, hasher, .. } = self;
        let key = |place: &Place| &shelves[place.file as usize].claims[place.at as usize].key;
        for at in 0..shelves[file as usize].claims.len() as u32 {
            let place = Place { file, at };
            places.insert_unique(hasher.hash_one(key(&place)), place, |place| hasher.hash_one(key(place)));
        }
    }

    fn forget(&mut self, file: u32, claims: &[Claim]) {
        for (at, claim) in claims.iter().enumerate() {
            let place = Place { file, at: at as u32 };
            if let Ok(entry) =
                self.places.find_entry(self.hasher.hash_one(&claim.key), |known| *known == place)
            {
                entry.remove();
            }
        }
    }

    /// What becomes of objects that a file gave and no longer gives.
    fn release(&mut self, mut claims: Vec<Claim>, tell: &mut dyn FnMut(Update)) -> Reread {
        let mut reread = Reread::new();
        claims.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        for Claim { key, .. } in claims {
            let heirs = self.places_of(&key);
            // Not only if this claim was the one that is served: the heir of that one may be going as well.
            let is_served = heirs.iter().any(|place| self.claim(*place).served);
            match heirs.into_iter().map(|place| self.name_of(place)).min() {
                None => tell(key.gone()),
                Some(heir) if !is_served => {
                    reread.insert(heir.clone());
                }
                Some(_) => {}
            }
        }
        reread
    }
}

/// A file's objects, one after the other, on their way into the store.
struct Turn<'a> {
    store: &'a mut Store,
    file: u32,
    tell: &'a mut dyn FnMut(Update),
    report: &'a mut dyn FnMut(usize, Problem),
    said: HashSet<ObjectKey>,
    claims: Vec<Claim>,
    /// Documents in whose place the version before stays.
    held: HashSet<u64>,
    reread: Reread,
}

impl Turn<'_> {
    fn take(&mut self, Found { key, content, hash, line }: Found) {
        let (update, problems, sound) = match content {
            Content::Same => (None, Vec::new(), true),
            Content::Whole(update) => (Some(update), Vec::new(), true),
            Content::Part(..) if self.held.contains(&hash) => return,
            Content::Part(update, problems) => (Some(update), problems, false),
            Content::Nothing(problems) => return self.refuse(&key, problems),
        };
        let claimed = self.store.places_of(&key);
        if let Some(other) = self.rival(&key, &claimed) {
            self.report(problems, Outcome::Usual);
            (self.report)(line, Problem::new(key.describe(), "", Reason::DuplicateObject, other.display()));
            if self.said.insert(key.clone()) {
                self.claims.push(Claim { key, hash, served: false, sound });
            }
            return;
        }
        let good = claimed.iter().copied().find(|place| self.store.claim(*place).is_good());
        if let Some(place) = good.filter(|_| !sound) {
            self.held.insert(hash);
            self.report(problems, Outcome::Kept);
            if place.file == self.file {
                return self.hold(place);
            }
            self.said.insert(key.clone());
            return self.claims.push(Claim { key, hash, served: false, sound });
        }
        self.report(problems, Outcome::Usual);
        self.said.insert(key.clone());
        let mut served = None;
        for place in claimed {
            let claim = self.store.claim_mut(place);
            if std::mem::take(&mut claim.served) {
                served = Some(claim.hash);
            }
        }
        let is_served = served == Some(hash) || update.is_some();
        match update {
            _ if served == Some(hash) => {}
            Some(update) => (self.tell)(update),
            // It was served when the file was read, and is not any more.
            None => drop(self.reread.insert(self.name())),
        }
        self.claims.push(Claim { key, hash, served: is_served, sound });
    }

    /// An object that cannot be used: what the file said of it before stays.
    fn refuse(&mut self, key: &ObjectKey, problems: Vec<Problem>) {
        let own = self.store.places_of(key).into_iter().find(|place| place.file == self.file);
        let Some(place) = own.filter(|_| !self.said.contains(key)) else {
            return self.report(problems, Outcome::Usual);
        };
        let is_served = self.store.claim(place).served;
        self.report(problems, if is_served { Outcome::Kept } else { Outcome::Usual });
        self.hold(place);
    }

    /// Keeps all that came from one document before.
    fn hold(&mut self, place: Place) {
        let before = &self.store.shelves[self.file as usize].claims;
        let hash = self.store.claim(place).hash;
        let held = before.iter().filter(|claim| claim.hash == hash);
        self.claims.extend(held.filter(|claim| self.said.insert(claim.key.clone())).cloned());
    }

    /// The file that has the object, if it is not this one, or if this one has given it already. One in which something is
    /// wrong with it has it only if no other had.
    fn rival(&self, key: &ObjectKey, claimed: &[Place]) -> Option<Name> {
        if self.said.contains(key) {
            return Some(self.name());
        }
        let counts = |place: &&Place| {
            let claim = self.store.claim(**place);
            claim.sound || claim.served
        };
        let first = claimed.iter().filter(counts).map(|place| self.store.name_of(*place)).min();
        first.filter(|first| *first < &self.store.shelves[self.file as usize].name).cloned()
    }

    fn report(&mut self, problems: Vec<Problem>, outcome: Outcome) {
        for problem in problems {
            (self.report)(0, Problem { outcome, ..problem });
        }
    }

    fn name(&self) -> Name {
        self.store.shelves[self.file as usize].name.clone()
    }
}
