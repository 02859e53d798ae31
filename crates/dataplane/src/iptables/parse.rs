// SPDX-License-Identifier: Apache-2.0

//! From a line of `iptables-save` to a [`Rule`]. What is no rule of ours is `None`.
//!
//! Versions of the tool differ in the order of options and in what they print that goes without saying; rules are
//! compared in our own words, so that none of this looks like a change.

use std::{borrow::Cow, slice::Iter};

use ipnet::IpNet;
use model::{Family, Protocol};

use super::{
    name::Name,
    rule::{Is, Match, Rule, Sides, State, Target, mask, unreachable},
};
use crate::{names::xt, xtables::words::words};

/// The rule that follows the name of the chain, as a tool of this family prints it.
pub(crate) fn rule(text: &str, family: Family) -> Option<Rule> {
    let words = words(text);
    let mut parser = Parser { words: words.iter().peekable(), family, rule: Rule::default() };
    while let Some(word) = parser.words.next() {
        parser.take(word)?;
    }
    let needs_protocol = |part: &Match| matches!(part, Match::Port(_) | Match::Protocol);
    let is_whole = parser.rule.protocol.is_some() || !parser.rule.matches.iter().any(needs_protocol);
    Some(parser.rule).filter(|_| is_whole)
}

struct Parser<'a> {
    words: std::iter::Peekable<Iter<'a, Cow<'a, str>>>,
    family: Family,
    rule: Rule,
}

impl<'a> Parser<'a> {
    fn take(&mut self, word: &'a str) -> Option<()> {
        let (is, word) = match word {
            "!" => (false, self.word()?),
            word => (true, word),
        };
        match word {
            "-s" => self.rule.source = Some(Is { value: self.net()?, is }),
            "-d" => self.rule.destination = Some(Is { value: self.net()?, is }),
            "-i" => self.rule.arrives = Some(Is { value: self.word()?.into(), is }),
            "-p" if is => self.rule.protocol = Some(protocol(self.word()?)?),
            "-m" if is => {
                let part = self.part()?;
                self.rule.matches.extend(part);
            }
            "-j" if is => self.rule.target = Some(self.target()?),
            _ => return None,
        }
        Some(())
    }

    fn word(&mut self) -> Option<&'a str> {
        self.words.next().map(|word| &**word)
    }

    /// The next word must be this one.
    fn expect(&mut self, expected: &str) -> Option<()> {
        (self.word()? == expected).then_some(())
    }

    /// Takes the next word if it is this one.
    fn skip(&mut self, word: &str) -> bool {
        self.words.next_if(|next| **next == word).is_some()
    }

    fn net(&mut self) -> Option<IpNet> {
        let word = self.word()?;
        word.parse().ok().or_else(|| word.parse().ok().map(|ip: std::net::IpAddr| ip.into()))
    }

    fn name(&mut self) -> Option<Name> {
        Name::new(self.word()?)
    }

    fn part(&mut self) -> Option<Option<Match>> {
        Some(Some(match self.word()? {
            "comment" => {
                self.expect("--comment")?;
                Match::Comment(self.word()?.into())
            }
            word @ ("tcp" | "udp" | "sctp") => {
                if self.rule.protocol != Some(protocol(word)?) {
                    return None;
                }
                match self.skip("--dport") {
                    true => Match::Port(self.word()?.parse().ok()?),
                    false => Match::Protocol,
                }
            }
            "addrtype" => {
                let part = match self.word()? {
                    "--src-type" => Match::FromLocal,
                    "--dst-type" => Match::ToLocal,
                    _ => return None,
                };
                self.expect("LOCAL")?;
                part
            }
            "recent" => self.recent()?,
            "statistic" => {
                self.expect("--mode")?;
                self.expect("random")?;
                self.expect("--probability")?;
                let chance: f64 = self.word()?.parse().ok()?;
                Match::Chance((chance * f64::from(1_u32 << 31)).round() as u32)
            }
            "conntrack" => {
                let is = !self.skip("!");
                self.expect("--ctstate")?;
                let word = self.word()?;
                let (state, _) = State::ALL.iter().find(|(_, text)| *text == word)?;
                Match::State(Is { value: *state, is })
            }
            "nfacct" => {
                self.expect("--nfacct-name")?;
                let word = self.word()?;
                Match::Counted(xt::ACCOUNTS.into_iter().find(|name| *name == word)?)
            }
            "mark" => {
                let is = !self.skip("!");
                self.expect("--mark")?;
                let (value, mask) = pair(self.word()?)?;
                (value == mask).then_some(Match::Marked(Is { value, is }))?
            }
            "set" => {
                let is = !self.skip("!");
                self.expect("--match-set")?;
                let set = self.word()?.into();
                Match::InSet(Is { value: set, is }, Sides::parse(self.word()?)?)
            }
            _ => return None,
        }))
    }

    fn recent(&mut self) -> Option<Match> {
        let (mut list, mut seconds, mut sets, mut reaps) = (None, None, false, false);
        while let Some(option) = self.words.next_if(|word| word.starts_with("--")) {
            match &**option {
                "--set" => sets = true,
                "--rcheck" => {}
                "--seconds" => seconds = Some(self.word()?.parse().ok()?),
                "--reap" => reaps = true,
                "--name" => list = Some(self.name()?),
                "--mask" => self.expect(mask(self.family))?,
                "--rsource" => {}
                _ => return None,
            }
        }
        match (sets, seconds, reaps) {
            (true, None, false) => Some(Match::Remember(list?, self.family)),
            (false, Some(seconds), true) => Some(Match::Remembered(list?, self.family, seconds)),
            _ => None,
        }
    }

    fn target(&mut self) -> Option<Target> {
        Some(match self.word()? {
            "RETURN" => Target::Return,
            "ACCEPT" => Target::Accept,
            "DROP" => Target::Drop,
            "REJECT" => {
                if self.skip("--reject-with") {
                    self.expect(unreachable(self.family))?;
                }
                Target::Reject(self.family)
            }
            "MARK" => {
                self.expect("--set-xmark")?;
                match pair(self.word()?)? {
                    (bit, mask) if bit == mask => Target::Mark(bit),
                    (bit, 0) => Target::Unmark(bit),
                    _ => return None,
                }
            }
            "MASQUERADE" => {
                self.expect("--random-fully")?;
                Target::Masquerade
            }
            "SET" => {
                self.expect("--map-set")?;
                let set = self.word()?.into();
                self.expect("dst,dst")?;
                self.expect("--map-mark")?;
                Target::MapMark(set)
            }
            "DNAT" => {
                self.expect("--to-destination")?;
                Target::Dnat(self.word()?.parse().ok()?)
            }
            chain => Target::Jump(Name::new(chain)?),
        })
    }
}

fn protocol(word: &str) -> Option<Protocol> {
    [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].into_iter().find(|protocol| protocol.to_string() == word)
}

/// `0x4000/0x4000`.
fn pair(word: &str) -> Option<(u32, u32)> {
    let number = |text: &str| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let (value, mask) = word.split_once('/')?;
    Some((number(value)?, number(mask)?))
}
