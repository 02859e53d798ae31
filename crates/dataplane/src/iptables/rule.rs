// SPDX-License-Identifier: Apache-2.0

//! One rule, in the nouns of iptables and only those we use. It prints as `iptables-save` prints it, so that what we
//! write can be compared with what the kernel holds.

use std::{
    fmt::{self, Write as _},
    net::SocketAddr,
};

use ipnet::IpNet;
use model::{Family, PodTraffic, Protocol};

use super::name::Name;

/// A rule without its chain. Matches are tried in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    pub source: Option<Is<IpNet>>,
    pub destination: Option<Is<IpNet>>,
    /// The interface it arrives on; a `+` at the end stands for any rest.
    pub arrives: Option<Is<Box<str>>>,
    pub protocol: Option<Protocol>,
    pub matches: Vec<Match>,
    /// `None` only counts.
    pub target: Option<Target>,
}

/// Something that must be so, or must not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Is<T> {
    pub value: T,
    pub is: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    /// For people.
    Comment(Box<str>),
    /// The destination port; the rule has a protocol.
    Port(u16),
    /// The protocol once more, as kube-proxy writes it beside DNAT.
    Protocol,
    /// The source is an address of this node.
    FromLocal,
    /// The destination is an address of this node.
    ToLocal,
    /// Remember the source in this list.
    Remember(Name, Family),
    /// The source was remembered in this list, within so many seconds.
    Remembered(Name, Family, u32),
    /// By chance, in units of 2^-31.
    Chance(u32),
    State(Is<State>),
    /// Always so, and counted under this name.
    Counted(&'static str),
    /// The mark has this bit.
    Marked(Is<u32>),
    /// These parts of the packet are in this set.
    InSet(Is<Box<str>>, Sides),
}

/// Which parts of a packet are looked up in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sides {
    Source,
    /// The address, or for sets of ports the port.
    Destination,
    /// Address and port of the destination.
    Place,
    /// The same, and the source address.
    PlaceAndSource,
}

impl Sides {
    const ALL: [(Sides, &'static str); 4] = [
        (Sides::Source, "src"),
        (Sides::Destination, "dst"),
        (Sides::Place, "dst,dst"),
        (Sides::PlaceAndSource, "dst,dst,src"),
    ];

    pub(crate) fn parse(word: &str) -> Option<Sides> {
        Sides::ALL.iter().find(|(_, text)| *text == word).map(|(sides, _)| *sides)
    }
}

impl fmt::Display for Sides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, text) = Sides::ALL.iter().find(|(sides, _)| sides == self).expect("all are listed");
        f.write_str(text)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    New,
    Invalid,
    /// Answers, and what belongs to a connection.
    Known,
    /// The same, and what has been translated.
    KnownOrTranslated,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Jump(Name),
    Return,
    Accept,
    Drop,
    /// With "port unreachable".
    Reject(Family),
    /// Set this bit of the mark.
    Mark(u32),
    /// Toggle this bit of the mark.
    Unmark(u32),
    Masquerade,
    Dnat(SocketAddr),
    /// Give the packet the mark that this set has for its destination, if it has one.
    MapMark(Box<str>),
}

impl Rule {
    pub(crate) fn to(target: Target) -> Rule {
        Rule { target: Some(target), ..Rule::default() }
    }

    pub(crate) fn jump(chain: Name) -> Rule {
        Rule::to(Target::Jump(chain))
    }

    pub(crate) fn with(mut self, matches: impl IntoIterator<Item = Match>) -> Rule {
        self.matches.extend(matches);
        self
    }

    pub(crate) fn from(mut self, net: IpNet, is: bool) -> Rule {
        self.source = Some(Is { value: net, is });
        self
    }

    pub(crate) fn toward(mut self, net: IpNet, is: bool) -> Rule {
        self.destination = Some(Is { value: net, is });
        self
    }

    pub(crate) fn over(mut self, protocol: Protocol) -> Rule {
        self.protocol = Some(protocol);
        self
    }

    /// For pods only, or for all others only.
    pub(crate) fn of_pods(mut self, pods: &PodTraffic, is: bool) -> Rule {
        match pods {
            PodTraffic::Source(net) => self.source = Some(Is { value: *net, is }),
            PodTraffic::Interface(name) => self.arrives = Some(Is { value: (&**name).into(), is }),
            PodTraffic::InterfacePrefix(prefix) => {
                self.arrives = Some(Is { value: format!("{prefix}+").into(), is });
            }
        }
        self
    }
}

/// What the kernel takes. The rest is cut off: a comment is for people.
const LONGEST_COMMENT: usize = 255;

impl Match {
    /// A comment. What could end it, and what could end the line, is replaced: names come from outside.
    pub(crate) fn comment(text: impl fmt::Display) -> Match {
        let mut clean = String::new();
        let _ = write!(clean, "{text}");
        clean = clean.chars().map(|c| if is_plain(c) { c } else { '?' }).collect();
        clean.truncate(LONGEST_COMMENT);
        Match::Comment(clean.into())
    }

    /// One of `count`.
    pub(crate) fn one_of(count: usize) -> Match {
        let share = f64::from(1_u32 << 31) / count.max(1) as f64;
        Match::Chance(share.round() as u32)
    }

    pub(crate) fn state(state: State, is: bool) -> Match {
        Match::State(Is { value: state, is })
    }
}

/// Printable, of one byte, and neither quote nor backslash.
fn is_plain(c: char) -> bool {
    (c.is_ascii_graphic() || c == ' ') && !matches!(c, '"' | '\\' | '\'')
}

impl State {
    pub(super) const ALL: [(State, &'static str); 4] = [
        (State::New, "NEW"),
        (State::Invalid, "INVALID"),
        (State::Known, "RELATED,ESTABLISHED"),
        (State::KnownOrTranslated, "RELATED,ESTABLISHED,DNAT"),
    ];
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, text) = State::ALL.iter().find(|(state, _)| state == self).expect("all are listed");
        f.write_str(text)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = Line { f, has_begun: false };
        if let Some(source) = &self.source {
            line.word(format_args!("{}-s {}", Not(source.is), source.value))?;
        }
        if let Some(destination) = &self.destination {
            line.word(format_args!("{}-d {}", Not(destination.is), destination.value))?;
        }
        if let Some(arrives) = &self.arrives {
            line.word(format_args!("{}-i {}", Not(arrives.is), arrives.value))?;
        }
        if let Some(protocol) = self.protocol {
            line.word(format_args!("-p {protocol}"))?;
        }
        for part in &self.matches {
            line.word(format_args!("{}", Printed(part, self)))?;
        }
        if let Some(target) = &self.target {
            line.word(format_args!("-j {target}"))?;
        }
        Ok(())
    }
}

/// Words with a space between.
struct Line<'a, 'b> {
    f: &'a mut fmt::Formatter<'b>,
    has_begun: bool,
}

impl Line<'_, '_> {
    fn word(&mut self, word: fmt::Arguments<'_>) -> fmt::Result {
        if std::mem::replace(&mut self.has_begun, true) {
            self.f.write_char(' ')?;
        }
        self.f.write_fmt(word)
    }
}

struct Not(bool);

impl fmt::Display for Not {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 { "" } else { "! " })
    }
}

/// A match of a rule.
struct Printed<'a>(&'a Match, &'a Rule);

impl fmt::Display for Printed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = self.1.protocol.unwrap_or(Protocol::Tcp);
        match self.0 {
            Match::Comment(text) => write!(f, "-m comment --comment {}", Quoted(text)),
            Match::Port(port) => write!(f, "-m {protocol} --dport {port}"),
            Match::Protocol => write!(f, "-m {protocol}"),
            Match::FromLocal => f.write_str("-m addrtype --src-type LOCAL"),
            Match::ToLocal => f.write_str("-m addrtype --dst-type LOCAL"),
            Match::Remember(list, family) => {
                write!(f, "-m recent --set --name {list} --mask {} --rsource", mask(*family))
            }
            Match::Remembered(list, family, seconds) => {
                let mask = mask(*family);
                write!(
                    f,
                    "-m recent --rcheck --seconds {seconds} --reap --name {list} --mask {mask} --rsource"
                )
            }
            Match::Chance(share) => {
                let chance = f64::from(*share) / f64::from(1_u32 << 31);
                write!(f, "-m statistic --mode random --probability {chance:.11}")
            }
            Match::State(state) => write!(f, "-m conntrack {}--ctstate {}", Not(state.is), state.value),
            Match::Counted(name) => write!(f, "-m nfacct --nfacct-name {name}"),
            Match::InSet(set, sides) => write!(f, "-m set {}--match-set {} {sides}", Not(set.is), set.value),
            Match::Marked(Is { value, is }) => write!(f, "-m mark {}--mark {value:#x}/{value:#x}", Not(*is)),
        }
    }
}

/// Whole addresses are remembered.
pub(crate) fn mask(family: Family) -> &'static str {
    match family {
        Family::V4 => "255.255.255.255",
        Family::V6 => "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    }
}

pub(crate) fn unreachable(family: Family) -> &'static str {
    match family {
        Family::V4 => "icmp-port-unreachable",
        Family::V6 => "icmp6-port-unreachable",
    }
}

/// Quoted where the tool quotes.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        match !self.0.is_empty() && self.0.bytes().all(is_word) {
            true => f.write_str(self.0),
            false => write!(f, "\"{}\"", self.0),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Jump(chain) => write!(f, "{chain}"),
            Target::Return => f.write_str("RETURN"),
            Target::Accept => f.write_str("ACCEPT"),
            Target::Drop => f.write_str("DROP"),
            Target::Reject(family) => write!(f, "REJECT --reject-with {}", unreachable(*family)),
            Target::Mark(bit) => write!(f, "MARK --set-xmark {bit:#x}/{bit:#x}"),
            Target::Unmark(bit) => write!(f, "MARK --set-xmark {bit:#x}/0x0"),
            Target::Masquerade => f.write_str("MASQUERADE --random-fully"),
            Target::Dnat(to) => write!(f, "DNAT --to-destination {to}"),
            Target::MapMark(set) => write!(f, "SET --map-set {set} dst,dst --map-mark"),
        }
    }
}
