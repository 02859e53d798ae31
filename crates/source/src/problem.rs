// SPDX-License-Identifier: Apache-2.0

//! What was wrong with an object: named, logged once, counted by reason. The rest of the world goes on.

use std::{
    borrow::Cow,
    collections::{BTreeSet, VecDeque},
    fmt,
    hash::{BuildHasher, Hash},
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use hashbrown::{DefaultHashBuilder, HashSet};

/// One thing that was wrong with one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Kind, namespace and name as people write them: `Service shop/cart`. Empty if that could not be read.
    pub object: String,
    /// The path inside the object, `spec.ports[2].port`. Empty if the whole object is meant.
    pub field: Cow<'static, str>,
    pub reason: Reason,
    /// What was written there, shortened.
    pub value: String,
    /// The file and the line (from 1; 0 for the whole file) it came from; none for objects from the API.
    pub place: Option<(PathBuf, usize)>,
    pub outcome: Outcome,
}

/// What follows from a problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// What its reason says.
    #[default]
    Usual,
    /// A good version of the object is served, and stays.
    Kept,
}

impl Problem {
    /// A value longer than this says nothing more to a reader.
    const MAX_VALUE: usize = 120;

    /// A problem without a place.
    pub fn new(
        object: impl Into<String>,
        field: impl Into<Cow<'static, str>>,
        reason: Reason,
        value: impl fmt::Display,
    ) -> Problem {
        let mut value = value.to_string();
        if value.len() > Problem::MAX_VALUE {
            let cut = (0..=Problem::MAX_VALUE).rev().find(|at| value.is_char_boundary(*at)).unwrap_or(0);
            value.truncate(cut);
            value.push('…');
        }
        Problem {
            object: object.into(),
            field: field.into(),
            reason,
            value,
            place: None,
            outcome: Outcome::Usual,
        }
    }
}

impl fmt::Display for Problem {
    /// `svc.yaml:12: Service shop/cart: spec.ports[2].port: not a port from 1 to 65535: "70000"; port left out`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((path, line)) = &self.place {
            match line {
                0 => write!(f, "{}: ", path.display())?,
                _ => write!(f, "{}:{line}: ", path.display())?,
            }
        }
        for part in [self.object.as_str(), &self.field] {
            if !part.is_empty() {
                write!(f, "{part}: ")?;
            }
        }
        f.write_str(self.reason.text())?;
        if !self.value.is_empty() {
            write!(f, ": {:?}", self.value)?;
        }
        let consequence = match self.outcome {
            Outcome::Usual => self.reason.consequence(),
            Outcome::Kept => "the version before stays in force",
        };
        match consequence {
            "" => Ok(()),
            _ => write!(f, "; {consequence}"),
        }
    }
}

macro_rules! reasons {
    ($($variant:ident, $label:literal, $text:literal, $consequence:literal;)*) => {
        /// Why something was left out. Few and fixed, so that each can be a counter's label.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $(#[doc = $text] $variant,)*
        }

        impl Reason {
            pub const ALL: &'static [Reason] = &[$(Reason::$variant,)*];

            /// The counter's label, in snake case.
            pub fn label(self) -> &'static str {
                match self { $(Reason::$variant => $label,)* }
            }

            /// What is wrong, for people.
            pub fn text(self) -> &'static str {
                match self { $(Reason::$variant => $text,)* }
            }

            /// What follows from it, for people; may be empty.
            pub fn consequence(self) -> &'static str {
                match self { $(Reason::$variant => $consequence,)* }
            }
        }
    };
}

reasons! {
    BadAddress, "bad_address", "not an IP address", "address left out";
    BadVip, "bad_vip",
        "loopback, unspecified, multicast and IPv6 link-local addresses cannot be those of a Service", "address left out";
    BadClusterIp, "bad_cluster_ip",
        "loopback, unspecified, multicast and IPv6 link-local addresses cannot be those of a Service", "Service left out";
    BadCidr, "bad_cidr", "not a CIDR", "range left out";
    BadPort, "bad_port", "not a port from 1 to 65535", "port left out";
    BadNodePort, "bad_node_port", "not a node port from 0 to 65535", "node port left out";
    NoHealthCheckPort, "no_health_check_port",
        "a load balancer with externalTrafficPolicy Local needs a port for health checks", "none are answered";
    BadProtocol, "bad_protocol", "not one of TCP, UDP, SCTP", "port left out";
    BadPolicy, "bad_policy", "not one of Cluster, Local", "Cluster is assumed";
    BadServiceType, "bad_service_type",
        "not one of ClusterIP, NodePort, LoadBalancer, ExternalName", "ClusterIP is assumed";
    BadAffinity, "bad_affinity", "not one of None, ClientIP", "no affinity is assumed";
    BadTimeout, "bad_timeout", "not a number of seconds from 1 to 86400", "10800 is assumed";
    BadFamily, "bad_family", "not one of IPv4, IPv6", "the cluster IP at this place is left out";
    BadIpMode, "bad_ip_mode", "not one of VIP, Proxy", "address left out";
    BadTime, "bad_time", "not an RFC 3339 time", "time ignored";
    BadAddressType, "bad_address_type", "not one of IPv4, IPv6, FQDN", "slice left out";
    FqdnSlice, "fqdn_slice", "addresses by name cannot be proxied", "slice left out";
    WrongFamily, "wrong_family", "the address is not of the family it is declared for", "address left out";
    NoServiceName, "no_service_name", "the label kubernetes.io/service-name is missing", "slice left out";
    NoName, "no_name", "metadata.name is missing", "object left out";
    NoNamespace, "no_namespace", "metadata.namespace is missing", "object left out";
    NoClusterIp, "no_cluster_ip", "no usable cluster IP; one must be given", "Service left out";
    NoAddress, "no_address", "an endpoint without address", "endpoint left out";
    NoPorts, "no_ports", "a slice with endpoints but without ports", "it serves nothing";
    NoServicePorts, "no_service_ports", "a Service without ports", "Service left out";
    NoKey, "no_key", "this key is missing; to say that there are none, write an empty list", "slice left out";
    UnknownKey, "unknown_key", "no such key, did you mean", "it is ignored";
    MisspelledKind, "misspelled_kind", "no such kind, did you mean", "document left out";
    NoPortNumber, "no_port_number", "a slice port without number", "port left out";
    DuplicatePort, "duplicate_port",
        "two ports of one name and protocol", "the later one is used";
    DuplicateObject, "duplicate_object", "this object is already given elsewhere", "the earlier one is used";
    BadEndpoints, "bad_endpoints", "not written as in \"10.0.0.1:80\" or \"http=10.0.0.1:80\"", "endpoint left out";
    UnknownPort, "unknown_port", "the Service has no such port", "endpoint left out";
    WhichPort, "which_port",
        "the Service has several ports; say which one, as in \"http=10.0.0.1:8080\"", "endpoint left out";
    BadScheduler, "bad_scheduler",
        "not a scheduler: one of random, rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, fo, ovf, mh, twos",
        "the mode's own is used";
    BadSchedulerFlag, "bad_scheduler_flag",
        "not one of sh-fallback, sh-port, mh-fallback, mh-port, flag-1, flag-2, flag-3", "flag left out";
    BadWeights, "bad_weights",
        "not written as in \"node:big=3\", \"zone:a=2\", \"10.1.2.0/24=0\" or \"*=1\", with 0 to 65535", "left out";
    BadWeight, "bad_weight", "not a number from 0 to 65535", "1 is assumed";
    TooManyWeights, "too_many_weights", "more than 256 entries", "this one and those after it are left out";
    BadProxyProtocol, "bad_proxy_protocol", "not v2", "endpoints are not told who the client is";
    BadMaxConnections, "bad_max_connections", "not a number from 1 on", "the relay's own limit is used";
    BadCheck, "bad_check", "not tcp or http:/path", "endpoints are not checked";
    UnknownAnnotation, "unknown_annotation", "no such annotation; see docs/configuration.md", "it is ignored";
    Undecodable, "undecodable", "the object cannot be read", "object left out";
    UnknownKind, "unknown_kind", "nothing to be proxied", "document ignored";
    OtherNode, "other_node", "a node other than this one", "document ignored";
    BadSyntax, "bad_syntax", "not valid YAML or JSON", "";
    Unreadable, "unreadable", "the file cannot be read", "what it gave before stays served";
    Away, "away", "it cannot be looked into", "all stays as it is until it can";
    NoManifests, "no_manifests",
        "no file here counts: only *.yaml, *.yml and *.json do, and only those directly in the folder",
        "nothing is served from it";
    Kept, "kept", "not everything in this file could be used",
        "objects that are no longer in it stay served until it is mended or deleted";
    Emptied, "emptied", "the file is empty", "what it said before stays in force; delete it to remove that";
}

/// What problems are about: what is well again may be spoken of again when it is not.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Subject {
    /// All that is in a file, or the folder at this path.
    File(PathBuf),
    /// An object from the API, as in [`Problem::object`].
    Object(String),
}

impl Subject {
    fn of(problem: &Problem) -> Subject {
        match &problem.place {
            Some((path, _)) => Subject::File(path.clone()),
            None => Subject::Object(problem.object.clone()),
        }
    }
}

/// Where problems go. Shared by everything that finds some; cheap enough to be asked on every event.
#[derive(Debug)]
pub struct Problems {
    counts: Box<[AtomicU64]>,
    memory: Mutex<Memory>,
    hasher: DefaultHashBuilder,
}

#[derive(Debug, Default)]
struct Memory {
    /// Hashes of what was logged already, each after that of its subject: an object that stays bad is logged once, not on
    /// each of its updates.
    logged: BTreeSet<(u64, u64)>,
    recent: VecDeque<Problem>,
}

impl Problems {
    const RECENT: usize = 64;
    /// After so many different problems, forget which were logged; a few repeated lines cost less than memory.
    const LOGGED: usize = 4096;

    pub fn new() -> Problems {
        Problems {
            counts: Reason::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            memory: Mutex::default(),
            hasher: DefaultHashBuilder::default(),
        }
    }

    /// Counts the problem, keeps it among the recent ones, and logs it unless it was logged before.
    pub fn report(&self, problem: Problem) {
        self.counts[problem.reason as usize].fetch_add(1, Ordering::Relaxed);
        let hash = (self.hasher.hash_one(Subject::of(&problem)), self.hash(&problem));
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.logged.len() >= Problems::LOGGED {
            memory.logged.clear();
        }
        if !memory.logged.insert(hash) {
            return;
        }
        if memory.recent.len() == Problems::RECENT {
            memory.recent.pop_front();
        }
        memory.recent.push_back(problem.clone());
        drop(memory);
        if matches!(problem.reason, Reason::UnknownKind | Reason::OtherNode) {
            tracing::info!(reason = problem.reason.label(), "{problem}");
        } else {
            tracing::warn!(reason = problem.reason.label(), "{problem}");
        }
    }

    /// Reports all that is wrong with something now. What was wrong with it before and is not any more is forgotten, so
    /// that it is logged again should it come back. `subject` is asked only if it matters.
    pub(crate) fn settle(&self, subject: impl FnOnce() -> Subject, found: Vec<Problem>) {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if !memory.logged.is_empty() {
            let subject = self.hasher.hash_one(subject());
            let still: HashSet<u64> = found.iter().map(|problem| self.hash(problem)).collect();
            let said = memory.logged.range((subject, 0)..=(subject, u64::MAX));
            let over: Vec<_> = said.filter(|(_, problem)| !still.contains(problem)).copied().collect();
            for problem in over {
                memory.logged.remove(&problem);
            }
        }
        drop(memory);
        found.into_iter().for_each(|problem| self.report(problem));
    }

    /// Without the line, which changes with every line before it.
    fn hash(&self, problem: &Problem) -> u64 {
        let Problem { object, field, reason, value, outcome, .. } = problem;
        self.hasher.hash_one((object, field, reason, value, outcome))
    }

    /// How often each reason occurred. Repeated reports of one problem count each time.
    pub fn counts(&self) -> impl Iterator<Item = (Reason, u64)> + '_ {
        Reason::ALL.iter().map(|reason| (*reason, self.count(*reason)))
    }

    /// How often one reason occurred.
    pub fn count(&self, reason: Reason) -> u64 {
        self.counts[reason as usize].load(Ordering::Relaxed)
    }

    /// The latest different problems, oldest first.
    pub fn recent(&self) -> Vec<Problem> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).recent.iter().cloned().collect()
    }
}

impl Default for Problems {
    fn default() -> Problems {
        Problems::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_reads_as_one_sentence() {
        let mut problem = Problem::new("Service shop/cart", "spec.ports[2].port", Reason::BadPort, 70000);
        assert_eq!(
            problem.to_string(),
            "Service shop/cart: spec.ports[2].port: not a port from 1 to 65535: \"70000\"; port left out"
        );
        problem.place = Some((PathBuf::from("svc.yaml"), 12));
        assert!(problem.to_string().starts_with("svc.yaml:12: Service shop/cart: "));
    }

    #[test]
    fn long_values_are_cut_at_a_character() {
        let problem = Problem::new("", "", Reason::BadAddress, "é".repeat(1000));
        assert!(problem.value.len() <= Problem::MAX_VALUE + '…'.len_utf8());
    }

    #[test]
    fn repeated_problems_are_counted_but_kept_once() {
        let problems = Problems::new();
        for _ in 0..3 {
            problems.report(Problem::new("Service a/b", "", Reason::NoClusterIp, ""));
        }
        assert_eq!(problems.count(Reason::NoClusterIp), 3);
        assert_eq!(problems.recent().len(), 1);
        assert_eq!(problems.counts().map(|(_, count)| count).sum::<u64>(), 3);
    }

    #[test]
    fn what_comes_back_after_it_was_well_is_logged_again() {
        let problems = Problems::new();
        let bad = |name: &str, port: u32| Problem::new(name, "spec.ports[0].port", Reason::BadPort, port);
        let settle = |name: &str, ports: &[u32]| {
            let found = ports.iter().map(|port| bad(name, *port)).collect();
            problems.settle(|| Subject::Object(name.to_owned()), found);
            problems.recent().len()
        };
        assert_eq!(settle("Service a/b", &[]), 0);
        assert_eq!(settle("Service a/b", &[0, 70000]), 2);
        assert_eq!(settle("Service a/b", &[0, 70000]), 2, "it has not changed");
        assert_eq!(settle("Service a/c", &[]), 2);
        assert_eq!(settle("Service a/b", &[70000]), 2, "another one being well says nothing of this one");
        assert_eq!(settle("Service a/b", &[0, 70000]), 3);
        assert_eq!(settle("Service a/b", &[]), 3);
        assert_eq!(settle("Service a/b", &[70000]), 4);
    }

    #[test]
    fn memory_is_bounded() {
        let problems = Problems::new();
        for n in 0..3 * Problems::LOGGED {
            problems.report(Problem::new("", "", Reason::BadPort, n));
        }
        assert_eq!(problems.recent().len(), Problems::RECENT);
        assert!(problems.memory.lock().unwrap().logged.len() <= Problems::LOGGED);
    }

    #[test]
    fn labels_are_distinct() {
        let labels: HashSet<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();
        assert_eq!(labels.len(), Reason::ALL.len());
    }
}
