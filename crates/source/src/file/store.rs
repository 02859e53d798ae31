// SPDX-License-Identifier: Apache-2.0

//! What the files said last, and what of it is served. Only hashes are kept of the objects themselves.
//!
//! If two files give one object, the file whose name sorts first has it.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashSet, HashTable};
use model::Update;

use super::{
    manifest::{Found, Known, Manifest, ObjectKey},
    scan::Name,
};
use crate::problem::{Problem, Reason};

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
        let mut reread = Reread::new();
        let file = self.number(name);
        let mut said = HashSet::with_capacity(manifest.found.len());
        let mut claims = Vec::with_capacity(manifest.found.len());
        for Found { key, update, hash, line, sound } in manifest.found {
            let duplicate =
                |other: &Name| Problem::new(key.describe(), "", Reason::DuplicateObject, other.display());
            if !said.insert(key.clone()) {
                report(line, duplicate(name));
                continue;
            }
            let claimed = self.places_of(&key);
            let first = claimed.iter().map(|place| self.name_of(*place)).min().filter(|first| *first < name);
            if let Some(first) = first {
                report(line, duplicate(first));
                claims.push(Claim { key, hash, served: false, sound });
                continue;
            }
            let mut served = None;
            for place in claimed {
                let claim = self.claim_mut(place);
                if std::mem::take(&mut claim.served) {
                    served = Some(claim.hash);
                }
            }
            let is_served = served == Some(hash) || update.is_some();
            match update {
                _ if served == Some(hash) => {}
                Some(update) => tell(update),
                // It was served when the file was read, and is not any more.
                None => drop(reread.insert(name.clone())),
            }
            claims.push(Claim { key, hash, served: is_served, sound });
        }
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
                report(0, Problem::new("", "", Reason::Kept, ""));
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

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, path::Path};

    use super::*;
    use crate::{
        file::manifest::{self, ManifestScope},
        intern::Interner,
    };

    impl Store {
        /// Every claim has its place, and at most one of those for an object is served.
        fn check(&self) {
            let claims: usize =
                self.files.values().map(|file| self.shelves[*file as usize].claims.len()).sum();
            assert_eq!(self.places.len(), claims);
            for claim in self.shelves.iter().flat_map(|shelf| &shelf.claims) {
                let places = self.places_of(&claim.key);
                let served =
                    |place: &Place| self.shelves[place.file as usize].claims[place.at as usize].served;
                assert!(!places.is_empty() && places.into_iter().filter(served).count() <= 1);
            }
        }
    }

    #[derive(Default)]
    struct Bench {
        store: Store,
        interner: Interner,
        hasher: DefaultHashBuilder,
        problems: Vec<Reason>,
    }

    impl Bench {
        /// What is sent on when the file has this content; `name=address` for each Service, `-name` if gone.
        fn write(&mut self, path: &str, text: &str) -> (Vec<String>, usize) {
            let manifest = self.read(path, text);
            self.take(path, manifest)
        }

        fn read(&mut self, path: &str, text: &str) -> Manifest {
            let known = self.store.known(&OsStr::new(path).into());
            let mut scope = ManifestScope {
                interner: &mut self.interner,
                node_name: "worker-1",
                hasher: &self.hasher,
                known: &known,
                report: &mut |problem| self.problems.push(problem.reason),
            };
            manifest::read(Path::new(path), &mut text.as_bytes(), &mut scope).unwrap()
        }

        fn take(&mut self, path: &str, manifest: Manifest) -> (Vec<String>, usize) {
            let name: Name = OsStr::new(path).into();
            let mut told = Vec::new();
            let mut report = |_, problem: Problem| self.problems.push(problem.reason);
            let reread = self.store.replace(&name, manifest, &mut |update| told.push(update), &mut report);
            self.store.check();
            (text_of(&told), reread.len())
        }

        fn remove(&mut self, path: &str) -> (Vec<String>, usize) {
            let mut told = Vec::new();
            let reread = self.store.remove(&OsStr::new(path).into(), &mut |update| told.push(update));
            self.store.check();
            (text_of(&told), reread.len())
        }
    }

    fn text_of(updates: &[Update]) -> Vec<String> {
        let text = |update: &Update| match update {
            Update::Service(service) => {
                format!("{}={}", service.key.name, service.cluster_ips.v4.unwrap())
            }
            Update::ServiceGone(key) => format!("-{}", key.name),
            other => panic!("{other:?}"),
        };
        updates.iter().map(text).collect()
    }

    fn service(name: &str, ip: &str) -> String {
        format!("---\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {ip}}}\n")
    }

    fn updates(texts: &[&str]) -> (Vec<String>, usize) {
        (texts.iter().map(|text| (*text).to_owned()).collect(), 0)
    }

    #[test]
    fn only_differences_are_sent() {
        let mut bench = Bench::default();
        let (a, b) = (service("a", "10.0.0.1"), service("b", "10.0.0.2"));
        assert_eq!(bench.write("x.yaml", &(a.clone() + &b)), updates(&["a=10.0.0.1", "b=10.0.0.2"]));
        assert_eq!(bench.write("x.yaml", &(b.clone() + &a)), updates(&[]));
        assert_eq!(bench.write("x.yaml", &(service("a", "10.0.0.9") + &b)), updates(&["a=10.0.0.9"]));
        assert_eq!(bench.write("x.yaml", &b), updates(&["-a"]));
        assert_eq!(bench.remove("x.yaml"), updates(&["-b"]));
        assert_eq!((bench.store.places.len(), bench.problems), (0, vec![]));
    }

    #[test]
    fn a_document_that_is_served_is_not_read_again() {
        let mut bench = Bench::default();
        let (a, b) = (service("a", "10.0.0.1"), service("b", "10.0.0.2"));
        bench.write("x.yaml", &(a.clone() + &b));
        bench.write("y.yaml", &b);
        let mut read = |path, text: &str| -> Vec<(String, bool)> {
            let found = bench.read(path, text).found.into_iter();
            found.map(|found| (found.key.describe(), found.update.is_some())).collect()
        };
        let objects = |reads: [bool; 2]| {
            [("Service default/b".to_owned(), reads[0]), ("Service default/a".to_owned(), reads[1])]
        };
        let changed = service("a", "10.0.0.9");
        assert_eq!(read("x.yaml", &(b.clone() + &changed)), objects([false, true]), "wherever it stands");
        assert_eq!(read("y.yaml", &(b.clone() + &a)), objects([true, true]), "another file has it");
        assert_eq!(read("z.yaml", &(b.clone() + &a)), objects([true, true]), "nothing is known of the file");
    }

    #[test]
    fn what_was_not_read_and_is_not_served_any_more_is_asked_for() {
        let mut bench = Bench::default();
        let a = service("a", "10.0.0.1");
        bench.write("x.yaml", &a);
        let unread = bench.read("x.yaml", &a);
        bench.remove("x.yaml");
        assert_eq!(bench.take("x.yaml", unread), (vec![], 1));
        assert_eq!(bench.write("x.yaml", &a), updates(&["a=10.0.0.1"]));
    }

    #[test]
    fn a_file_that_cannot_be_used_whole_takes_nothing_back() {
        let mut bench = Bench::default();
        let (a, b) = (service("a", "10.0.0.1"), service("b", "10.0.0.2"));
        bench.write("x.yaml", &(a.clone() + &b));
        assert_eq!(bench.write("x.yaml", ""), updates(&[]));
        for bad in ["---\nkind: [\n", "---\nkind: Service\nmetadata: {name: a}\n", "---\nspec: {}\n"] {
            bench.problems.clear();
            assert_eq!(bench.write("x.yaml", &(b.clone() + bad)), updates(&[]), "{bad}");
            assert!(bench.problems.contains(&Reason::Kept), "{bad}");
        }
        // What is good in it counts all the same.
        let changed = service("b", "10.0.0.3");
        assert_eq!(bench.write("x.yaml", &(changed.clone() + "---\nkind: [\n")), updates(&["b=10.0.0.3"]));
        assert_eq!(bench.write("x.yaml", &changed), updates(&["-a"]));
    }

    #[test]
    fn the_first_file_by_name_has_the_object() {
        let mut bench = Bench::default();
        assert_eq!(bench.write("m.yaml", &service("a", "10.0.0.1")), updates(&["a=10.0.0.1"]));
        assert_eq!(bench.write("z.yaml", &service("a", "10.0.0.2")), updates(&[]));
        assert_eq!(bench.problems, [Reason::DuplicateObject]);
        assert_eq!(bench.write("b.yaml", &service("a", "10.0.0.3")), updates(&["a=10.0.0.3"]));
        // The next one in line has to be read again: only its hash is known.
        assert_eq!(bench.remove("b.yaml"), (vec![], 1));
        assert_eq!(bench.write("m.yaml", &service("a", "10.0.0.1")), updates(&["a=10.0.0.1"]));
        assert_eq!(bench.remove("z.yaml"), updates(&[]));
        assert_eq!(bench.remove("m.yaml"), updates(&["-a"]));
    }

    #[test]
    fn an_heir_that_goes_as_well_passes_it_on() {
        let mut bench = Bench::default();
        let nothing = "kind: ConfigMap\nmetadata: {name: x}\n";
        for (path, ip) in [("a.yaml", "10.0.0.1"), ("b.yaml", "10.0.0.1"), ("c.yaml", "10.0.0.2")] {
            bench.write(path, &service("s", ip));
        }
        assert_eq!(bench.write("a.yaml", nothing), (vec![], 1));
        assert_eq!(bench.write("b.yaml", nothing), (vec![], 1));
        assert_eq!(bench.write("c.yaml", &service("s", "10.0.0.2")), updates(&["s=10.0.0.2"]));
    }

    #[test]
    fn twice_in_one_file() {
        let mut bench = Bench::default();
        let text = service("a", "10.0.0.1") + &service("a", "10.0.0.2");
        assert_eq!(bench.write("x.yaml", &text), updates(&["a=10.0.0.1"]));
        assert_eq!(bench.problems, [Reason::DuplicateObject]);
    }
}
