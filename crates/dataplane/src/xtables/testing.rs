// SPDX-License-Identifier: Apache-2.0

//! What tests of the tools and of the mode share.

use std::{collections::VecDeque, env, time::Duration};

use model::Family;
use netlink::Netns;

use super::{Failure, Table, Tables, Variant};

/// Runs `work` in a namespace of its own for each variant; or not at all, without the privileges for one.
pub(crate) fn with_each(work: impl Fn(Variant) + Sync) {
    for variant in Variant::BOTH {
        if let Some(netns) = namespace() {
            netns.run(|| work(variant)).unwrap();
        }
    }
}

/// A network namespace, if this process may make one.
pub(crate) fn namespace() -> Option<Netns> {
    match Netns::new() {
        Ok(netns) => {
            netns.run(crate::loopback::close).unwrap();
            Some(netns)
        }
        Err(error) => {
            assert!(env::var_os("CI").is_none(), "no namespace: {error}");
            eprintln!("skipped: no namespace: {error}");
            None
        }
    }
}

/// Tables of a kernel that refuses every rule with this in it.
pub(crate) struct Without(pub(crate) &'static str);

impl Tables for Without {
    fn save(&mut self, _: Family, _: Table, _: &mut dyn FnMut(&str)) -> Result<(), Failure> {
        Ok(())
    }

    fn restore(&mut self, _: Family, input: &str) -> Result<(), Failure> {
        let refused = || Failure::Refused {
            tool: "iptables-restore".to_owned(),
            reason: "line 9 failed".to_owned(),
            line: Some("COMMIT".to_owned()),
            advice: None,
        };
        if input.contains(self.0) { Err(refused()) } else { Ok(()) }
    }
}

/// How the next trial ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    Done,
    Refused,
    /// Somebody else has the lock.
    Locked,
    /// The tool takes too long.
    Slow,
    /// The kernel does not answer when it is asked for counters.
    NoAnswer,
}

/// Tables that are in another mood each time; always well, in the end.
#[derive(Debug)]
pub(crate) struct Moody(pub(crate) VecDeque<Mood>);

impl Moody {
    fn next(&mut self) -> Mood {
        self.0.pop_front().unwrap_or(Mood::Done)
    }
}

impl Tables for Moody {
    fn save(&mut self, _: Family, _: Table, _: &mut dyn FnMut(&str)) -> Result<(), Failure> {
        Ok(())
    }

    fn restore(&mut self, _: Family, _: &str) -> Result<(), Failure> {
        let tool = "iptables-restore".to_owned();
        match self.next() {
            Mood::Done | Mood::NoAnswer => Ok(()),
            Mood::Refused => {
                Err(Failure::Refused { tool, reason: "line 3 failed".to_owned(), line: None, advice: None })
            }
            Mood::Locked => Err(Failure::Locked { waited: Duration::from_secs(1), holder: None }),
            Mood::Slow => Err(Failure::Slow { tool, limit: Duration::from_secs(1) }),
        }
    }

    fn keep_accounts(&mut self, _: &[&str]) -> Option<bool> {
        match self.0.front() {
            Some(Mood::NoAnswer) => {
                self.next();
                None
            }
            _ => Some(true),
        }
    }
}
