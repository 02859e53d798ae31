// SPDX-License-Identifier: Apache-2.0

//! Walks a packet through a [`Program`], as the kernel would, and tells every way it can end and how likely.
//!
//! It knows nft and the way of a packet through the hooks, and nothing else: what comes out is what the rules and
//! elements say. Random numbers are not drawn but all tried, so the answer is exact; turns and hashes of clients are
//! taken for random numbers, which is what they are to somebody who does not know the last turn or the client.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use model::{Backend, Origin, Outcome, Packet, Scheduler};

use super::program::{
    Bytes, Chain, ChainKind, Element, Field, Hook, Program, Rule, Set, Statement, Value, address_len,
    read_address,
};

/// One way the first packet of a connection can end.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    pub probability: f64,
    pub fate: Fate,
    /// How its destination was chosen.
    pub choice: Choice,
    /// What rules have put into dynamic maps on the way.
    pub learned: Vec<Learned>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// There was none: it is the packet's own, or a client was remembered.
    #[default]
    None,
    Random,
    Turn,
    Hash,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It went on to this address and port.
    Delivered {
        destination: IpAddr,
        port: u16,
        translated: bool,
        masqueraded: bool,
    },
    Rejected,
    Dropped,
}

/// An element that a packet left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Learned {
    pub map: String,
    pub key: Bytes,
    pub value: Bytes,
    pub timeout_secs: u32,
}

impl Program {
    /// Remembers what a packet left behind, for the next one.
    pub fn learn(&mut self, learned: &Learned) {
        let element =
            Element { timeout_secs: Some(learned.timeout_secs), ..Element::new(Value::Bytes(learned.value)) };
        self.elements.entry(learned.map.clone()).or_default().insert(learned.key, element);
    }
}

/// Every way the packet can end. `is_local` tells which addresses are the node's.
pub fn simulate(program: &Program, packet: &Packet, is_local: &dyn Fn(IpAddr) -> bool) -> Vec<Ending> {
    let walk = Walk::new(program, is_local);
    let mut endings = Vec::new();
    let arrives = match &packet.origin {
        Origin::Node => None,
        Origin::Interface(name) => Some(name.clone()),
    };
    let from_node = arrives.is_none();
    let start = vec![State::new(packet, arrives)];
    let mut states = match from_node {
        true => {
            let states = walk.hook(Hook::Output, start, &mut endings);
            walk.hook(Hook::Postrouting, states, &mut endings)
        }
        false => walk.hook(Hook::Prerouting, start, &mut endings),
    };
    let (mut local, mut remote) = (Vec::new(), Vec::new());
    for state in states.drain(..) {
        if is_local(state.destination) { local.push(state) } else { remote.push(state) }
    }
    if from_node {
        // What stays on the node comes back through its loopback interface.
        local.iter_mut().for_each(|state| state.arrives = Some("lo".into()));
        local = walk.hook(Hook::Prerouting, local, &mut endings);
    } else {
        remote = walk.hook(Hook::Forward, remote, &mut endings);
        remote = walk.hook(Hook::Postrouting, remote, &mut endings);
    }
    local = walk.hook(Hook::Input, local, &mut endings);
    endings.extend(local.into_iter().chain(remote).map(State::delivered));
    endings
}

/// How the endings differ from what must happen; `None` if they do not. Shares of endpoints may differ from
/// what their weights ask for by this fraction.
pub fn disagreement(
    expected: &Outcome,
    packet: &Packet,
    endings: &[Ending],
    tolerance: f64,
) -> Option<String> {
    let unlike = |wanted: &dyn Fn(&Fate) -> bool| {
        endings.iter().find(|ending| !wanted(&ending.fate)).map(|ending| format!("{:?}", ending.fate))
    };
    let Outcome::Forward { backends, masquerade, algorithm } = expected else {
        let untouched = Fate::Delivered {
            destination: packet.destination,
            port: packet.port,
            translated: false,
            masqueraded: false,
        };
        return match expected {
            Outcome::Reject => unlike(&|fate| *fate == Fate::Rejected),
            Outcome::Drop => unlike(&|fate| *fate == Fate::Dropped),
            _ => unlike(&|fate| *fate == untouched),
        };
    };
    let mut shares: BTreeMap<(IpAddr, u16), f64> = BTreeMap::new();
    for ending in endings {
        let Fate::Delivered { destination, port, translated: true, masqueraded } = ending.fate else {
            return Some(format!("{:?}", ending.fate));
        };
        let is_own = |backend: &Backend| backend.local && backend.address == destination;
        let hairpin = destination == packet.source && backends.iter().any(is_own);
        if masqueraded != (*masquerade || hairpin) {
            return Some(format!("{:?}", ending.fate));
        }
        *shares.entry((destination, port)).or_default() += ending.probability;
    }
    let share = |backend: &Backend| match algorithm.scheduler.is_none_or(Scheduler::weighs) {
        true => f64::from(backend.weight),
        false => 1.0,
    };
    let all: f64 = backends.iter().map(share).sum();
    let off = |backend: &&Backend| {
        let met = shares.get(&(backend.address, backend.port)).copied().unwrap_or(0.0);
        (met * all / share(backend) - 1.0).abs() > tolerance
    };
    let unfair = backends.iter().find(off);
    let is_known = |at: &&(IpAddr, u16)| backends.iter().any(|to| (to.address, to.port) == **at);
    let unknown = shares.keys().find(|at| !is_known(at));
    unfair
        .map(|backend| format!("{}:{} has not its share of {shares:?}", backend.address, backend.port))
        .or_else(|| unknown.map(|(address, port)| format!("{address}:{port} is not one of the backends")))
}

/// A packet on its way.
#[derive(Clone)]
struct State {
    probability: f64,
    arrives: Option<Arc<str>>,
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    port: u16,
    original: (IpAddr, u16),
    mark: u32,
    /// Destination and source are settled, by the first nat chains at which they could be.
    settled: [bool; 2],
    translated: bool,
    masqueraded: bool,
    choice: Choice,
    learned: Vec<Learned>,
}

impl State {
    fn new(packet: &Packet, arrives: Option<Arc<str>>) -> State {
        State {
            probability: 1.0,
            arrives,
            source: packet.source,
            destination: packet.destination,
            protocol: packet.protocol.number(),
            port: packet.port,
            original: (packet.destination, packet.port),
            mark: 0,
            settled: [false; 2],
            translated: false,
            masqueraded: false,
            choice: Choice::None,
            learned: Vec::new(),
        }
    }

    fn delivered(self) -> Ending {
        let fate = Fate::Delivered {
            destination: self.destination,
            port: self.port,
            translated: self.translated,
            masqueraded: self.masqueraded,
        };
        self.ended(fate)
    }

    fn ended(self, fate: Fate) -> Ending {
        Ending { probability: self.probability, fate, choice: self.choice, learned: self.learned }
    }

    fn with(&self, share: f64) -> State {
        State { probability: self.probability * share, ..self.clone() }
    }
}

/// How a chain or a rule is left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exit {
    /// At its end, undecided.
    End,
    /// On to the next base chain.
    Accept,
    Reject,
    Drop,
}

/// What follows a statement.
enum Step {
    /// The next statement.
    On,
    /// The next rule: it did not hold.
    Break,
    Exit(Exit),
}

struct Walk<'a> {
    program: &'a Program,
    chains: HashMap<&'a str, &'a Chain>,
    sets: HashMap<&'a str, (&'a Set, &'a BTreeMap<Bytes, Element>)>,
    is_local: &'a dyn Fn(IpAddr) -> bool,
}

impl<'a> Walk<'a> {
    fn new(program: &'a Program, is_local: &'a dyn Fn(IpAddr) -> bool) -> Walk<'a> {
        let chains = program.frame.chains.iter().map(|chain| (chain.name.as_str(), chain)).collect();
        let named = |set: &'a Set| Some((set.name.as_str(), (set, program.elements.get(&set.name)?)));
        Walk { program, chains, sets: program.frame.sets.iter().filter_map(named).collect(), is_local }
    }

    /// Lets all base chains of a hook work on the packets, and returns those that go on.
    fn hook(&self, hook: Hook, mut states: Vec<State>, endings: &mut Vec<Ending>) -> Vec<State> {
        let chains = self.program.frame.chains.iter();
        let mut chains: Vec<_> =
            chains.filter_map(|chain| Some((chain, chain.base.filter(|base| base.hook == hook)?))).collect();
        chains.sort_by_key(|(_, base)| base.priority);
        for (chain, base) in chains {
            let mut next = Vec::new();
            for mut state in states {
                if base.kind == ChainKind::Nat {
                    let manip = usize::from(matches!(hook, Hook::Postrouting | Hook::Input));
                    if std::mem::replace(&mut state.settled[manip], true) {
                        next.push(state);
                        continue;
                    }
                }
                for (state, exit) in self.chain(chain, state, 0) {
                    match exit {
                        Exit::End | Exit::Accept => next.push(state),
                        Exit::Reject => endings.push(state.ended(Fate::Rejected)),
                        Exit::Drop => endings.push(state.ended(Fate::Dropped)),
                    }
                }
            }
            states = next;
        }
        states
    }

    fn chain(&self, chain: &Chain, state: State, depth: usize) -> Vec<(State, Exit)> {
        let mut exits = Vec::new();
        let mut states = vec![state];
        for rule in &chain.rules {
            let mut next = Vec::new();
            for state in states {
                for (state, exit) in self.rule(rule, state, depth) {
                    match exit {
                        None => next.push(state),
                        Some(exit) => exits.push((state, exit)),
                    }
                }
            }
            states = next;
        }
        exits.extend(states.into_iter().map(|state| (state, Exit::End)));
        exits
    }

    /// `None` for those that go on with the next rule.
    fn rule(&self, rule: &Rule, state: State, depth: usize) -> Vec<(State, Option<Exit>)> {
        let mut done = Vec::new();
        let mut states = vec![state];
        for statement in &rule.0 {
            let mut next = Vec::new();
            for state in states {
                for (state, step) in self.statement(statement, state, depth) {
                    match step {
                        Step::On => next.push(state),
                        Step::Break => done.push((state, None)),
                        Step::Exit(exit) => done.push((state, Some(exit))),
                    }
                }
            }
            states = next;
        }
        done.extend(states.into_iter().map(|state| (state, None)));
        done
    }

    fn statement(&self, statement: &Statement, mut state: State, depth: usize) -> Vec<(State, Step)> {
        let step = match statement {
            Statement::IsNew => Step::On,
            Statement::IsTranslated => on_if(state.translated),
            Statement::IsMarked(bit) => on_if(state.mark & bit != 0),
            Statement::IsUnmarked(bit) => on_if(state.mark & bit == 0),
            Statement::IsLocal(Field::Source) => on_if((self.is_local)(state.source)),
            Statement::IsLocal(_) => on_if((self.is_local)(state.destination)),
            Statement::Arrives { on, prefix, is } => {
                let name = state.arrives.as_deref().unwrap_or_default();
                on_if((if *prefix { name.starts_with(on) } else { name == on }) == *is)
            }
            Statement::Within { field, net, is } => on_if(self.within(&state, *field, net) == *is),
            Statement::Contained { key, set, is } => {
                let lookup = |key: &Bytes| self.lookup(set, key).is_some() == *is;
                return self.draw(
                    key,
                    &state,
                    |key| lookup(key).then_some(()),
                    |state, ()| (state, Step::On),
                );
            }
            Statement::Mark(bit) => {
                state.mark |= bit;
                Step::On
            }
            Statement::Unmark(bit) => {
                state.mark &= !bit;
                Step::On
            }
            Statement::Vmap { key, map } => return self.vmap(key, map, &state, depth),
            Statement::Dnat { key, map } => return self.dnat(key, map, &state),
            Statement::Update { map, key, timeout_secs, value } => {
                let (key, value) = (self.key(&state, key, 0), self.key(&state, value, 0));
                state.learned.push(Learned { map: map.clone(), key, value, timeout_secs: *timeout_secs });
                Step::On
            }
            Statement::Masquerade => {
                state.masqueraded = true;
                Step::Exit(Exit::Accept)
            }
            Statement::Reject => Step::Exit(Exit::Reject),
            Statement::Drop => Step::Exit(Exit::Drop),
            Statement::Jump(chain) => return self.enter(chain, state, depth, Step::On),
            Statement::Goto(chain) => return self.enter(chain, state, depth, Step::Exit(Exit::End)),
            Statement::Foreign(_) => Step::Break,
        };
        vec![(state, step)]
    }

    /// Into another chain; at its end, `then`.
    fn enter(&self, name: &str, state: State, depth: usize, then: Step) -> Vec<(State, Step)> {
        let chain = self.chains.get(name).copied();
        // The kernel refuses deeper nesting, and jumps to chains that do not exist.
        let Some(chain) = chain.filter(|_| depth < 16) else { return vec![(state, Step::Exit(Exit::Drop))] };
        let resume = |exit| match (exit, &then) {
            (Exit::End, Step::On) => Step::On,
            (exit, _) => Step::Exit(exit),
        };
        let exits = self.chain(chain, state, depth + 1);
        exits.into_iter().map(|(state, exit)| (state, resume(exit))).collect()
    }

    fn vmap(&self, key: &[Field], map: &str, state: &State, depth: usize) -> Vec<(State, Step)> {
        let found = |key: &Bytes| match &self.lookup(map, key)?.value {
            Value::Goto(chain) => Some(chain.clone()),
            _ => None,
        };
        let decided = self.draw(key, state, found, |state, chain| (state, Ok(chain)));
        decided
            .into_iter()
            .flat_map(|(state, chain)| match chain {
                Ok(chain) => self.enter(&chain, state, depth, Step::Exit(Exit::End)),
                Err(step) => vec![(state, step)],
            })
            .collect()
    }

    fn dnat(&self, key: &[Field], map: &str, state: &State) -> Vec<(State, Step)> {
        let family = self.program.family;
        let found = |key: &Bytes| match self.lookup(map, key)?.value {
            Value::Bytes(value) => Some(value),
            _ => None,
        };
        let choice = key.iter().find_map(|field| match field {
            Field::Random(_) => Some(Choice::Random),
            Field::Turn(_) => Some(Choice::Turn),
            Field::Hash { .. } => Some(Choice::Hash),
            _ => None,
        });
        self.draw(key, state, found, |mut state, value: Bytes| {
            state.choice = choice.unwrap_or_default();
            if let Some(destination) = read_address(family, &value) {
                let at = address_len(family);
                state.destination = destination;
                state.port = u16::from_be_bytes([value[at], value[at + 1]]);
                state.translated = true;
            }
            (state, Step::Exit(Exit::Accept))
        })
    }

    /// Tries all numbers a key may draw. Draws with the same result are one way; all that find nothing are one,
    /// too, and break the rule.
    fn draw<R: Clone + Eq + std::hash::Hash, S: From<Step>>(
        &self,
        key: &[Field],
        state: &State,
        find: impl Fn(&Bytes) -> Option<R>,
        found: impl Fn(State, R) -> (State, S),
    ) -> Vec<(State, S)> {
        let below = key.iter().find_map(|field| field.drawn_below()).unwrap_or(1);
        let mut results: HashMap<R, u32> = HashMap::new();
        let mut missed = 0;
        for number in 0..below {
            match find(&self.key(state, key, number)) {
                Some(result) => *results.entry(result).or_default() += 1,
                None => missed += 1,
            }
        }
        let share = |count: u32| f64::from(count) / f64::from(below);
        let mut ways: Vec<(State, S)> =
            results.into_iter().map(|(result, count)| found(state.with(share(count)), result)).collect();
        if missed > 0 {
            ways.push((state.with(share(missed)), Step::Break.into()));
        }
        ways
    }

    fn key(&self, state: &State, fields: &[Field], number: u32) -> Bytes {
        fields.iter().fold(Bytes::EMPTY, |key, field| match field {
            Field::Source | Field::OriginalSource => key.address(state.source),
            Field::Destination => key.address(state.destination),
            Field::Protocol => key.protocol(state.protocol),
            Field::Port => key.port(state.port),
            Field::OriginalDestination => key.address(state.original.0),
            Field::OriginalPort => key.port(state.original.1),
            Field::Random(_) | Field::Turn(_) | Field::Hash { .. } => key.number(number),
        })
    }

    fn lookup(&self, set: &str, key: &Bytes) -> Option<&Element> {
        let (definition, elements) = *self.sets.get(set)?;
        if !definition.interval {
            return elements.get(key);
        }
        let covers = |first: &Bytes, element: &Element| {
            let last = element.key_end.as_ref().unwrap_or(first);
            covers(definition, key, first, last)
        };
        elements.iter().find(|(first, element)| covers(first, element)).map(|(_, element)| element)
    }

    fn within(&self, state: &State, field: Field, net: &IpNet) -> bool {
        match field {
            Field::Source => net.contains(&state.source),
            _ => net.contains(&state.destination),
        }
    }
}

/// Every field of the key lies between those of the first and last key.
fn covers(set: &Set, key: &[u8], first: &[u8], last: &[u8]) -> bool {
    let mut at = 0;
    set.key.iter().all(|field| {
        let from = at;
        at += field.ty().padded_len();
        let [key, first, last] = [key, first, last].map(|bytes| bytes.get(from..at).unwrap_or_default());
        (first..=last).contains(&key)
    })
}

fn on_if(holds: bool) -> Step {
    if holds { Step::On } else { Step::Break }
}

impl From<Step> for Result<String, Step> {
    fn from(step: Step) -> Result<String, Step> {
        Err(step)
    }
}
