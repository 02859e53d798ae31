// SPDX-License-Identifier: Apache-2.0

use std::{collections::BTreeMap, ffi::OsStr, path::Path};

use proptest::prelude::*;

use super::*;
use crate::{
    file::manifest::{self, ManifestScope},
    intern::Interner,
};

impl Store {
    /// Every claim has its place, and at most one of those for an object is served.
    fn check(&self) {
        let claims: usize = self.files.values().map(|file| self.shelves[*file as usize].claims.len()).sum();
        assert_eq!(self.places.len(), claims);
        for claim in self.shelves.iter().flat_map(|shelf| &shelf.claims) {
            let places = self.places_of(&claim.key);
            let served = |place: &Place| self.shelves[place.file as usize].claims[place.at as usize].served;
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
    said: Vec<Problem>,
}

impl Bench {
    /// The same for updates of any kind.
    fn write_any(&mut self, path: &str, text: &str) -> Vec<String> {
        let manifest = self.read(path, text);
        let told = self.replace(path, manifest).0;
        told.iter().map(|update| format!("{update:?}")).collect()
    }

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
            report: &mut |problem| {
                self.problems.push(problem.reason);
                self.said.push(problem);
            },
        };
        manifest::read(Path::new(path), &mut text.as_bytes(), &mut scope).unwrap()
    }

    fn take(&mut self, path: &str, manifest: Manifest) -> (Vec<String>, usize) {
        let (told, reread) = self.replace(path, manifest);
        (text_of(&told), reread)
    }

    fn replace(&mut self, path: &str, manifest: Manifest) -> (Vec<Update>, usize) {
        let name: Name = OsStr::new(path).into();
        let mut told = Vec::new();
        let mut report = |_, problem: Problem| {
            self.problems.push(problem.reason);
            self.said.push(problem);
        };
        let reread = self.store.replace(&name, manifest, &mut |update| told.push(update), &mut report);
        self.store.check();
        (told, reread.len())
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
    format!(
        "---\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}\n"
    )
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
        found.map(|found| (found.key.describe(), matches!(found.content, Content::Whole(_)))).collect()
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
    for empty in ["", "# a: 1\n", "---\n\n---\n"] {
        bench.problems.clear();
        assert_eq!(bench.write("x.yaml", empty), updates(&[]), "{empty}");
        assert_eq!(bench.problems, [Reason::Emptied], "{empty}");
    }
    for bad in ["---\nkind: [\n", "---\nkind: Service\nmetadata: {name: a}\n", "---\nspec: {}\n"] {
        bench.said.clear();
        assert_eq!(bench.write("x.yaml", &(b.clone() + bad)), updates(&[]), "{bad}");
        let is_kept = |problem: &Problem| problem.reason == Reason::Kept || problem.outcome == Outcome::Kept;
        assert!(bench.said.iter().any(is_kept), "{bad}");
    }
    // What is good in it counts all the same.
    let changed = service("b", "10.0.0.3");
    assert_eq!(bench.write("x.yaml", &(changed.clone() + "---\nkind: [\n")), updates(&["b=10.0.0.3"]));
    assert_eq!(bench.write("x.yaml", &changed), updates(&["-a"]));
}

/// A Service with endpoints of its own, and a slice: what is served, and what becomes of it when part of it is written
/// differently. A slip leaves the version before in force, and says so.
#[test]
fn a_slip_in_what_is_served_takes_nothing_down() {
    let service = "---\nkind: Service\nmetadata:\n  name: a\n  annotations:\n    portolan.dev/endpoints: 10.1.0.1:1, 10.1.0.2:2\n\
                   spec:\n  clusterIP: 10.0.0.1\n  ports:\n  - port: 80\n    protocol: TCP\n";
    let slice = "---\nkind: EndpointSlice\nmetadata:\n  name: s\n  labels: {kubernetes.io/service-name: a}\n\
                 addressType: IPv4\nports:\n- port: 80\nendpoints:\n- addresses: [10.1.0.3]\n";
    let good = service.to_owned() + slice;
    for (from, to, line, reason) in [
        (" ports:", " prots:", 9, Reason::UnknownKey),
        ("port: 80", "port: 80000", 10, Reason::BadPort),
        ("port: 80", "port: http", 10, Reason::Undecodable),
        ("protocol: TCP", "protocol: tcp", 11, Reason::BadProtocol),
        ("clusterIP:", "clusterIp:", 8, Reason::UnknownKey),
        ("clusterIP: 10.0.0.1", "clusterIP: 10.0.0.256", 8, Reason::BadAddress),
        ("10.1.0.2:2", "10.1.0.2:x", 6, Reason::BadEndpoints),
        ("/endpoints", "/endpoint", 6, Reason::UnknownAnnotation),
        ("kind: Service", "kind: Servce", 2, Reason::MisspelledKind),
        ("ports:\n  - port: 80\n    protocol: TCP\n", "ports: []\n", 9, Reason::NoServicePorts),
        ("\nendpoints:", "\nendpoint:", 20, Reason::UnknownKey),
        ("\nports:", "\nport:", 18, Reason::UnknownKey),
        ("\nendpoints:\n- addresses: [10.1.0.3]\n", "\n", 13, Reason::NoKey),
        ("- addresses:", "- adresses:", 21, Reason::UnknownKey),
        ("[10.1.0.3]", "[10.1.0]", 21, Reason::BadAddress),
        ("\n- port: 80\n", "\n- port: 0\n", 19, Reason::BadPort),
        ("/service-name", "/service-nam", 16, Reason::NoServiceName),
    ] {
        let mut bench = Bench::default();
        assert_eq!(bench.write_any("x.yaml", &good).len(), 4);
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        for _ in 0..2 {
            bench.said.clear();
            assert_eq!(bench.write_any("x.yaml", &bad), [""; 0], "{to}");
            let said = bench.said.iter().find(|problem| problem.reason == reason);
            let said = said.unwrap_or_else(|| panic!("{to}: {:?}", bench.said));
            assert_eq!(said.place.as_ref().map(|place| place.1), Some(line), "{to}: {said}");
            let is_kept = said.outcome == Outcome::Kept || bench.problems.contains(&Reason::Kept);
            assert!(is_kept, "{to}: {:?}", bench.said);
        }
        assert_eq!(bench.write_any("x.yaml", &good), [""; 0], "{to}");
        // Where nothing of it is served yet, what is good of it is.
        let mut fresh = Bench::default();
        let told = fresh.write_any("x.yaml", &bad);
        assert!(fresh.said.iter().all(|problem| problem.outcome == Outcome::Usual), "{to}: {:?}", fresh.said);
        assert!((1..=4).contains(&told.len()), "{to}: {told:?}");
        assert!(!fresh.write_any("x.yaml", &good).is_empty(), "{to}");
    }
}

#[test]
fn a_good_version_in_another_file_stays_too() {
    let mut bench = Bench::default();
    let good = |ip: &str| service("a", ip);
    let bad = good("10.0.0.1").replace("port: 80", "port: 0");
    assert_eq!(bench.write("b.yaml", &good("10.0.0.2")), updates(&["a=10.0.0.2"]));
    assert_eq!(bench.write("a.yaml", &bad), updates(&[]));
    assert_eq!(bench.write("b.yaml", &good("10.0.0.3")), updates(&["a=10.0.0.3"]), "it still has the object");
    assert_eq!(bench.write("a.yaml", &good("10.0.0.1")), updates(&["a=10.0.0.1"]));
    assert_eq!(bench.write("a.yaml", &bad), updates(&[]));
    assert_eq!(bench.remove("a.yaml"), (vec![], 1));
    assert_eq!(bench.write("b.yaml", &good("10.0.0.3")), updates(&["a=10.0.0.3"]));
    bench.write("a.yaml", &bad);
    assert_eq!(bench.remove("b.yaml"), (vec![], 1));
    assert_eq!(bench.write("a.yaml", &bad), updates(&["a=10.0.0.1"]), "better than nothing");
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

/// Good or with a port that is none, and the last number of its address.
type Version = (bool, u8);

proptest! {
    /// Against the rule in few words: a version with a mistake is served where no good one is.
    #[test]
    fn a_mistake_never_takes_the_place_of_a_good_version(
        turns in prop::collection::vec(prop::option::weighted(0.9, [prop::option::of(any::<Version>()), prop::option::of(any::<Version>())]), 1..12),
    ) {
        let (mut bench, mut told, mut rule) = (Bench::default(), BTreeMap::new(), BTreeMap::new());
        for turn in turns {
            let updates = match turn {
                None => bench.remove("x.yaml").0,
                Some(versions) => {
                    let text = |(name, version): (&str, Option<Version>)| {
                        let (is_good, last) = version?;
                        let text = service(name, &format!("10.0.0.{last}"));
                        Some(if is_good { text } else { text.replace("port: 80", "port: 0") })
                    };
                    let texts = ["a", "b"].into_iter().zip(versions).filter_map(text);
                    bench.write("x.yaml", &texts.collect::<String>()).0
                }
            };
            for update in updates {
                match update.strip_prefix('-') {
                    Some(name) => drop(told.remove(name)),
                    None => drop(update.split_once('=').map(|(name, ip)| told.insert(name.to_owned(), ip.to_owned()))),
                }
            }
            // An empty file takes nothing back.
            if turn.is_none_or(|versions| versions != [None, None]) {
                for (at, name) in ["a", "b"].into_iter().enumerate() {
                    match (turn.and_then(|versions| versions[at]), rule.get(name)) {
                        (None, _) => drop(rule.remove(name)),
                        (Some((false, _)), Some((true, _))) => {}
                        (Some(version), _) => drop(rule.insert(name.to_owned(), version)),
                    }
                }
            }
            let expected = rule.iter().map(|(name, (_, last)): (&String, &Version)| (name.clone(), format!("10.0.0.{last}")));
            prop_assert_eq!(&told, &expected.collect::<BTreeMap<_, _>>());
        }
    }
}
