// SPDX-License-Identifier: Apache-2.0

//! The packet table: `FROM PROTO DESTINATION:PORT -> OUTCOME`.

use std::net::{IpAddr, SocketAddr};

use lab::address::{CLIENTS, Version, address_of};
use model::Protocol;

/// A line of a `packets` section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub number: usize,
    /// As written, for messages.
    pub text: String,
    pub entry: Entry,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// New connections.
    Probe(Probe),
    /// A connection that was opened by an earlier line goes on.
    Flow { name: String, expect: Expect },
}

/// Who connects to what, and what must become of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Where it starts: a pod, a node, a client.
    pub from: String,
    /// One source address, or those of `clients`.
    pub sources: Vec<IpAddr>,
    pub protocol: Protocol,
    pub destination: SocketAddr,
    pub expect: Expect,
    /// The connection is kept open under this name.
    pub flow: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    Forward {
        to: Vec<Target>,
        /// How many entries the pool has, where doubles are to be looked out for.
        count: Option<usize>,
        source: SourceSeen,
        stick: Option<Stick>,
        /// They are taken one after the other, so that each gets exactly its share.
        turns: bool,
    },
    Reject,
    Drop,
    /// As if there were no proxy.
    Pass,
}

/// An endpoint by its name, and its port where that is worth saying.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub name: String,
    pub port: Option<u16>,
    /// How much it gets, beside the others.
    pub share: u32,
}

/// Which source address the endpoint sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceSeen {
    /// One of the node's.
    Masqueraded,
    /// The client's own; the node's nonetheless where an endpoint is its own client.
    Original,
    /// The endpoint is its own client, and sees the node.
    Hairpin,
}

/// What session affinity, or a hash of the client, must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stick {
    /// Each source meets one endpoint, however often it comes.
    Sticky,
    /// As sticky, and the one it met in the line before with the same beginning.
    Same,
    /// As sticky, but at least one source meets another endpoint than in that line.
    Moved,
    /// As sticky, but nothing is remembered.
    Hashed,
}

impl Line {
    pub(super) fn parse((number, text): (usize, &str)) -> Result<Line, (usize, String)> {
        let entry = parse(text).map_err(|reason| (number, format!("{reason}: {text}")))?;
        Ok(Line { number, text: text.split_whitespace().collect::<Vec<_>>().join(" "), entry })
    }
}

fn parse(text: &str) -> Result<Entry, String> {
    let (left, right) = text.split_once("->").ok_or("no ->")?;
    let words: Vec<&str> = left.split_whitespace().collect();
    let mut outcome = Outcome::parse(right)?;
    let expect = outcome.expect()?;
    match words.as_slice() {
        ["flow", name] if outcome.flow.is_none() => Ok(Entry::Flow { name: (*name).to_owned(), expect }),
        [from, protocol, destination] => {
            let destination: SocketAddr = destination.parse().map_err(|_| "no address and port")?;
            let (from, sources) = sources(from, Version::of(destination.ip()))?;
            let protocol = Protocol::ALL
                .into_iter()
                .find(|known| known.to_string() == *protocol)
                .ok_or_else(|| format!("no such protocol as {protocol}"))?;
            Ok(Entry::Probe(Probe { from, sources, protocol, destination, expect, flow: outcome.flow }))
        }
        _ => Err("a line is FROM PROTO ADDRESS:PORT -> OUTCOME, or flow NAME -> OUTCOME".to_owned()),
    }
}

/// `a1`, `clients`, or `node-a@192.0.2.1` with a source address that is not the usual one.
fn sources(from: &str, version: Version) -> Result<(String, Vec<IpAddr>), String> {
    if from == "clients" {
        let all = (0..1 << (32 - CLIENTS.bits)).map(|n| version.address(CLIENTS.nth(n)));
        return Ok((from.to_owned(), all.collect()));
    }
    let (name, source) = from.split_once('@').map_or((from, None), |(name, source)| (name, Some(source)));
    let own = address_of(name).ok_or_else(|| format!("nobody is called {name}"))?;
    let source = match source {
        None => version.address(own),
        Some(text) => text.parse().map_err(|_| format!("not an address: {text}"))?,
    };
    if Version::of(source) != version {
        return Err("source and destination are of two families".to_owned());
    }
    Ok((name.to_owned(), vec![source]))
}

/// The words right of the arrow.
#[derive(Default)]
struct Outcome {
    verdict: String,
    source: Option<SourceSeen>,
    stick: Option<Stick>,
    count: Option<usize>,
    flow: Option<String>,
    turns: bool,
}

impl Outcome {
    fn parse(text: &str) -> Result<Outcome, String> {
        let mut words = text.split_whitespace();
        let verdict = words.next().ok_or("no outcome")?.to_owned();
        let mut outcome = Outcome { verdict, ..Outcome::default() };
        for word in words {
            match word.split_once('=') {
                None => outcome.word(word)?,
                Some(("count", n)) => outcome.count = Some(n.parse().map_err(|_| "count is not a number")?),
                Some(("flow", name)) => outcome.flow = Some(name.to_owned()),
                Some(_) => return Err(format!("no such option as {word}")),
            }
        }
        Ok(outcome)
    }

    fn word(&mut self, word: &str) -> Result<(), String> {
        match word {
            "masq" => self.source = Some(SourceSeen::Masqueraded),
            "nomasq" => self.source = Some(SourceSeen::Original),
            "hairpin" => self.source = Some(SourceSeen::Hairpin),
            "sticky" => self.stick = Some(Stick::Sticky),
            "same" => self.stick = Some(Stick::Same),
            "moved" => self.stick = Some(Stick::Moved),
            "hashed" => self.stick = Some(Stick::Hashed),
            "turns" => self.turns = true,
            _ => return Err(format!("no such option as {word}")),
        }
        Ok(())
    }

    fn expect(&mut self) -> Result<Expect, String> {
        let bare = self.source.is_none() && self.stick.is_none() && self.count.is_none() && !self.turns;
        match self.verdict.as_str() {
            "reject" | "drop" | "pass" if !bare => Err("only endpoints have options".to_owned()),
            "reject" => Ok(Expect::Reject),
            "drop" => Ok(Expect::Drop),
            "pass" => Ok(Expect::Pass),
            endpoints => Ok(Expect::Forward {
                to: endpoints.split(',').map(Target::parse_all).collect::<Result<Vec<_>, _>>()?.concat(),
                count: self.count,
                source: self.source.ok_or("endpoints need one of masq, nomasq, hairpin")?,
                stick: self.stick,
                turns: self.turns,
            }),
        }
    }
}

impl Target {
    /// One, or a span of them: `c1-c300`.
    fn parse_all(text: &str) -> Result<Vec<Target>, String> {
        let span = text.split_once('-').and_then(|(first, last)| {
            let (first, last) = (first.strip_prefix('c')?, last.strip_prefix('c')?);
            Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
        });
        match span {
            None => Ok(vec![Target::parse(text)?]),
            Some(span) => span.map(|number| Target::parse(&format!("c{number}"))).collect(),
        }
    }

    /// `a1`, `a1:8080`, `a1=3`.
    fn parse(text: &str) -> Result<Target, String> {
        let (text, share) = match text.split_once('=') {
            None => (text, 1),
            Some((text, share)) => (text, share.parse().map_err(|_| format!("not a share: {share}"))?),
        };
        let (name, port) = match text.split_once(':') {
            None => (text, None),
            Some((name, port)) => (name, Some(port.parse().map_err(|_| format!("not a port: {port}"))?)),
        };
        address_of(name).ok_or_else(|| format!("nobody is called {name}"))?;
        Ok(Target { name: name.to_owned(), port, share })
    }
}
