// SPDX-License-Identifier: Apache-2.0

//! What the files said last, and what of it is served. Only hashes are kept of the objects themselves.
//!
//! If two files give one object, the file whose name sorts first has it.

use std::{path::Path, sync::Arc};

use hashbrown::{HashMap, HashSet};
use model::Update;

use super::manifest::{Manifest, ObjectKey};
use crate::problem::{Problem, Reason};

#[derive(Debug, Default)]
pub(super) struct Store {
    objects: HashMap<ObjectKey, Object>,
    files: HashMap<Arc<Path>, HashSet<ObjectKey>>,
}

#[derive(Debug)]
struct Object {
    /// All files that give it, with the hash of what each gives; sorted by name, hardly ever more than one.
    claims: Vec<(Arc<Path>, u64)>,
    /// Which of the claims was handed on last.
    served: Option<(Arc<Path>, u64)>,
}

/// What follows from a change.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub updates: Vec<Update>,
    /// Files whose objects are wanted now that another file no longer gives them: read them again, and
    /// [`Store::replace`] them.
    pub reread: HashSet<Arc<Path>>,
}

impl Store {
    /// Puts what a file says now in place of what it said before. If not all of the file could be used,
    /// nothing it said before is taken back.
    pub(super) fn replace(
        &mut self,
        path: &Arc<Path>,
        manifest: Manifest,
        report: &mut dyn FnMut(Problem),
    ) -> Outcome {
        let mut outcome = Outcome::default();
        let mut said = HashSet::with_capacity(manifest.found.len());
        for found in manifest.found {
            let duplicate = |other: &Path| {
                let mut problem =
                    Problem::new(found.key.describe(), "", Reason::DuplicateObject, other.display());
                problem.place = Some((path.to_path_buf(), found.line));
                problem
            };
            if !said.insert(found.key.clone()) {
                report(duplicate(path));
                continue;
            }
            let object =
                self.objects.entry(found.key.clone()).or_insert(Object { claims: Vec::new(), served: None });
            match object.claims.binary_search_by(|(claimant, _)| claimant.cmp(path)) {
                Ok(at) => object.claims[at].1 = found.hash,
                Err(at) => object.claims.insert(at, (Arc::clone(path), found.hash)),
            }
            if object.claims[0].0 != *path {
                report(duplicate(&object.claims[0].0));
                continue;
            }
            let changed = object.served.as_ref().is_none_or(|(_, hash)| *hash != found.hash);
            object.served = Some((Arc::clone(path), found.hash));
            if changed {
                outcome.updates.push(found.update);
            }
        }
        let before = self.files.remove(path).unwrap_or_default();
        let missing: Vec<_> = before.into_iter().filter(|key| !said.contains(key)).collect();
        // An empty file is rarely meant: it is what a writer leaves who has only got as far as truncating it.
        let emptied = manifest.documents == 0;
        if manifest.complete && !emptied {
            self.release(path, missing, &mut outcome);
        } else {
            if !missing.is_empty() {
                let mut problem = Problem::new("", "", Reason::Kept, "");
                problem.place = Some((path.to_path_buf(), 0));
                report(problem);
            }
            said.extend(missing);
        }
        self.files.insert(Arc::clone(path), said);
        outcome
    }

    /// Takes back all that a file said.
    pub(super) fn remove(&mut self, path: &Arc<Path>) -> Outcome {
        let mut outcome = Outcome::default();
        let said = self.files.remove(path).unwrap_or_default();
        self.release(path, said.into_iter().collect(), &mut outcome);
        outcome
    }

    fn release(&mut self, path: &Arc<Path>, mut keys: Vec<ObjectKey>, outcome: &mut Outcome) {
        // A set has no order of its own; what is sent should have one.
        keys.sort_unstable();
        for key in keys {
            let Some(object) = self.objects.get_mut(&key) else {
                continue;
            };
            object.claims.retain(|(claimant, _)| claimant != path);
            match object.claims.first() {
                None => {
                    self.objects.remove(&key);
                    outcome.updates.push(key.gone());
                }
                Some((heir, _)) => {
                    if object.served.as_ref().is_some_and(|(claimant, _)| claimant == path) {
                        outcome.reread.insert(Arc::clone(heir));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hashbrown::DefaultHashBuilder;

    use super::*;
    use crate::{
        file::manifest::{self, ManifestScope},
        intern::Interner,
    };

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
            let path: Arc<Path> = Path::new(path).into();
            let mut scope = ManifestScope {
                interner: &mut self.interner,
                node_name: "worker-1",
                hasher: &self.hasher,
                report: &mut |problem| self.problems.push(problem.reason),
            };
            let manifest = manifest::read(&path, &mut text.as_bytes(), &mut scope).unwrap();
            let outcome =
                self.store.replace(&path, manifest, &mut |problem| self.problems.push(problem.reason));
            (text_of(&outcome.updates), outcome.reread.len())
        }

        fn remove(&mut self, path: &str) -> (Vec<String>, usize) {
            let outcome = self.store.remove(&Path::new(path).into());
            (text_of(&outcome.updates), outcome.reread.len())
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
        assert_eq!((bench.store.objects.len(), bench.problems), (0, vec![]));
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
    fn twice_in_one_file() {
        let mut bench = Bench::default();
        let text = service("a", "10.0.0.1") + &service("a", "10.0.0.2");
        assert_eq!(bench.write("x.yaml", &text), updates(&["a=10.0.0.1"]));
        assert_eq!(bench.problems, [Reason::DuplicateObject]);
    }
}
