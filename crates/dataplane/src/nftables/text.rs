// SPDX-License-Identifier: Apache-2.0

//! A table as `nft list` shows it, but with elements in the order of their keys.

use std::{
    fmt::{self, Display, Formatter},
    net::{Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use model::{Family, Protocol};
use netlink::nft;

use super::program::{
    Base, Bytes, Chain, ChainKind, Element, Field, Hook, Policy, Program, Rule, Set, Statement, Type, Typeof,
    Value,
};
use crate::{Listed, ListedChain, ListedSet, names};

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "table {} {} {{", keyword(self.family), names::TABLE)?;
        writeln!(f, "\tcomment \"{}\"", names::TABLE_COMMENT)?;
        for (index, set) in self.frame.sets.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            self.set(f, set)?;
        }
        for chain in &self.frame.chains {
            writeln!(f)?;
            self.chain(f, chain)?;
        }
        writeln!(f, "}}")
    }
}

impl Program {
    fn set(&self, f: &mut Formatter<'_>, set: &Set) -> fmt::Result {
        writeln!(f, "\t{} {} {{", if set.value.is_some() { "map" } else { "set" }, set.name)?;
        let (word, key) = types(&set.key);
        write!(f, "\t\t{word} {key}")?;
        match &set.value {
            None => writeln!(f)?,
            Some(nft::Value::Verdict) => writeln!(f, " : verdict")?,
            Some(nft::Value::Fields(fields)) => writeln!(f, " : {}", types(fields).1)?,
            Some(nft::Value::Range(fields)) => writeln!(f, " : interval {}", types(fields).1)?,
        }
        if let Some(size) = set.size {
            writeln!(f, "\t\tsize {size}")?;
        }
        let flags = [
            (set.interval, "interval"),
            (set.dynamic, "dynamic"),
            (set.lifetime != nft::Lifetime::Forever, "timeout"),
        ];
        let flags: Vec<&str> = flags.iter().filter(|(has, _)| *has).map(|(_, flag)| *flag).collect();
        if !flags.is_empty() {
            writeln!(f, "\t\tflags {}", flags.join(","))?;
        }
        if let Some(elements) = self.elements.get(&set.name).filter(|elements| !elements.is_empty()) {
            for (index, (key, element)) in elements.iter().enumerate() {
                f.write_str(if index == 0 { "\t\telements = { " } else { ",\n\t\t\t     " })?;
                write!(f, "{}", ElementText { set, key, element })?;
            }
            writeln!(f, " }}")?;
        }
        writeln!(f, "\t}}")
    }

    /// The same in parts.
    pub fn listed(&self) -> Listed {
        let element = |set, (key, element)| {
            let text = ElementText { set, key, element };
            (text.key(), text.value())
        };
        let sets = self.frame.sets.iter().map(|set| {
            let elements = self.elements.get(&set.name).into_iter().flatten();
            ListedSet { name: set.name.clone(), elements: elements.map(|it| element(set, it)).collect() }
        });
        let chains = self.frame.chains.iter().map(|chain| ListedChain {
            name: chain.name.clone(),
            base: chain.base.as_ref().map(|base| BaseText(base).to_string()),
            rules: chain.rules.iter().map(|rule| rule.text(self.family)).collect(),
        });
        Listed {
            family: keyword(self.family),
            table: names::TABLE,
            sets: sets.collect(),
            chains: chains.collect(),
        }
    }

    fn chain(&self, f: &mut Formatter<'_>, chain: &Chain) -> fmt::Result {
        writeln!(f, "\tchain {} {{", chain.name)?;
        if let Some(base) = &chain.base {
            writeln!(f, "\t\t{}", BaseText(base))?;
        }
        for rule in &chain.rules {
            writeln!(f, "\t\t{}", rule.text(self.family))?;
        }
        writeln!(f, "\t}}")
    }
}

impl Rule {
    /// The rule as `nft` writes it in a table of this family.
    pub(super) fn text(&self, family: Family) -> String {
        let words: Vec<String> = self.0.iter().map(|statement| statement.text(family)).collect();
        words.join(" ")
    }
}

impl Statement {
    fn text(&self, family: Family) -> String {
        let concat = |key: &[Field]| {
            let fields: Vec<String> = key.iter().map(|field| field.text(family)).collect();
            fields.join(" . ")
        };
        let unless = |is: &bool| if *is { "" } else { "!= " };
        match self {
            Statement::IsNew => "ct state new".into(),
            Statement::IsTranslated => "ct status dnat".into(),
            Statement::IsMarked(bit) => format!("meta mark & {bit:#010x} != 0x00000000"),
            Statement::IsUnmarked(bit) => format!("meta mark & {bit:#010x} == 0x00000000"),
            Statement::IsLocal(Field::Source) => "fib saddr type local".into(),
            Statement::IsLocal(_) => "fib daddr type local".into(),
            Statement::Arrives { on, prefix, is } => {
                format!("iifname {}\"{on}{}\"", unless(is), if *prefix { "*" } else { "" })
            }
            Statement::Within { field, net, is } => {
                format!("{} {}{}", field.text(family), unless(is), NetText(net))
            }
            Statement::Contained { key, set, is } => format!("{} {}@{set}", concat(key), unless(is)),
            Statement::Mark(bit) => format!("meta mark set meta mark | {bit:#010x}"),
            Statement::Unmark(bit) => format!("meta mark set meta mark & {:#010x}", !bit),
            Statement::Vmap { key, map } => format!("{} vmap @{map}", concat(key)),
            Statement::Dnat { key, map } => format!("dnat {} to {} map @{map}", keyword(family), concat(key)),
            Statement::Update { map, key, timeout_secs, value } => format!(
                "update @{map} {{ {} timeout {} : {} }}",
                concat(key),
                TimeText(*timeout_secs),
                concat(value)
            ),
            Statement::Masquerade => "masquerade fully-random".into(),
            Statement::Reject => "reject".into(),
            Statement::Drop => "drop".into(),
            Statement::Jump(chain) => format!("jump {chain}"),
            Statement::Goto(chain) => format!("goto {chain}"),
            Statement::Foreign(what) => format!("# {what}"),
        }
    }
}

impl Field {
    fn text(self, family: Family) -> String {
        let ip = keyword(family);
        match self {
            Field::Source => format!("{ip} saddr"),
            Field::Destination => format!("{ip} daddr"),
            Field::Protocol => "meta l4proto".into(),
            Field::Port => "th dport".into(),
            Field::OriginalSource => format!("ct original {ip} saddr"),
            Field::OriginalDestination => format!("ct original {ip} daddr"),
            Field::OriginalPort => "ct original proto-dst".into(),
            Field::Random(below) => format!("numgen random mod {below}"),
            Field::Turn(below) => format!("numgen inc mod {below}"),
            Field::Hash { below, seed, port } => {
                let sport = if port { " . th sport" } else { "" };
                format!("jhash {ip} saddr{sport} mod {below} seed {seed:#x}")
            }
        }
    }
}

struct ElementText<'a> {
    set: &'a Set,
    key: &'a Bytes,
    element: &'a Element,
}

impl ElementText<'_> {
    fn key(&self) -> String {
        let last = self.element.key_end.as_ref().unwrap_or(self.key);
        let key = Concat(&self.set.key, self.key, last);
        match self.element.timeout_secs {
            Some(secs) => format!("{key} timeout {}", TimeText(secs)),
            None => key.to_string(),
        }
    }

    fn value(&self) -> Option<String> {
        Some(match (&self.element.value, &self.set.value) {
            (Value::Bytes(bytes), Some(nft::Value::Fields(of))) => Concat(of, bytes, bytes).to_string(),
            (Value::Bytes(bytes), _) => format!("{bytes:?}"),
            (Value::Goto(chain), _) => format!("goto {chain}"),
            (Value::Foreign(what), _) => what.to_string(),
            (Value::None, _) => return None,
        })
    }
}

impl Display for ElementText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key())?;
        self.value().map_or(Ok(()), |value| write!(f, " : {value}"))
    }
}

/// A concatenation from the first to the last, where each field may be a range.
struct Concat<'a>(&'a [nft::Field], &'a [u8], &'a [u8]);

impl Display for Concat<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Concat(types, first, last) = *self;
        let mut at = 0;
        for (index, field) in types.iter().enumerate() {
            if index > 0 {
                f.write_str(" . ")?;
            }
            let ty = field.ty();
            let part = |bytes: &[u8]| bytes.get(at..at + ty.len()).unwrap_or_default().to_vec();
            let (from, to) = (part(first), part(last));
            match net(&from, &to) {
                _ if from == to => write!(f, "{}", Scalar(ty, &from))?,
                Some(net) => write!(f, "{net}")?,
                None => write!(f, "{}-{}", Scalar(ty, &from), Scalar(ty, &to))?,
            }
            at += ty.padded_len();
        }
        Ok(())
    }
}

/// The network that reaches from one address to the other, if there is one.
fn net(from: &[u8], to: &[u8]) -> Option<IpNet> {
    let family = if from.len() == 4 { Family::V4 } else { Family::V6 };
    let first = super::program::read_address(family, from)?;
    let last = super::program::read_address(family, to)?;
    super::lift::net_between(first, last)
}

/// One value of a type that a set of ours has.
struct Scalar<'a>(Type, &'a [u8]);

impl Display for Scalar<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match (self.0, self.1) {
            (Type::IPV4_ADDR, &[a, b, c, d]) => write!(f, "{}", Ipv4Addr::new(a, b, c, d)),
            (Type::IPV6_ADDR, bytes) => match <[u8; 16]>::try_from(bytes) {
                Ok(bytes) => write!(f, "{}", Ipv6Addr::from(bytes)),
                Err(_) => write!(f, "{bytes:?}"),
            },
            (Type::INET_PROTO, &[number]) => match Protocol::from_number(number) {
                Some(protocol) => write!(f, "{protocol}"),
                None => write!(f, "{number}"),
            },
            (Type::INET_SERVICE, &[high, low]) => write!(f, "{}", u16::from_be_bytes([high, low])),
            (Type::INTEGER, &[a, b, c, d]) => write!(f, "{}", u32::from_ne_bytes([a, b, c, d])),
            (_, bytes) => write!(f, "{bytes:?}"),
        }
    }
}

/// The words of a set's types: `type` with names, or `typeof` with expressions.
fn types(fields: &[nft::Field]) -> (&'static str, String) {
    let names: Vec<String> = fields.iter().map(type_name).collect();
    let is_typeof = fields.iter().any(|field| matches!(field, nft::Field::Of(_)));
    (if is_typeof { "typeof" } else { "type" }, names.join(" . "))
}

fn type_name(field: &nft::Field) -> String {
    match *field {
        nft::Field::Plain(Type::IPV4_ADDR) => "ipv4_addr".into(),
        nft::Field::Plain(Type::IPV6_ADDR) => "ipv6_addr".into(),
        nft::Field::Plain(Type::INET_PROTO) => "inet_proto".into(),
        nft::Field::Plain(Type::INET_SERVICE) => "inet_service".into(),
        nft::Field::Of(Typeof::Saddr(family)) => format!("{family} saddr"),
        nft::Field::Of(Typeof::Daddr(family)) => format!("{family} daddr"),
        nft::Field::Of(Typeof::L4Proto) => "meta l4proto".into(),
        nft::Field::Of(Typeof::Dport) => "th dport".into(),
        nft::Field::Of(Typeof::NumgenRandom(below)) => format!("numgen random mod {below}"),
        nft::Field::Of(Typeof::NumgenInc(below)) => format!("numgen inc mod {below}"),
        other => format!("{other:?}"),
    }
}

struct BaseText<'a>(&'a Base);

impl Display for BaseText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let kind = match self.0.kind {
            ChainKind::Filter => "filter",
            ChainKind::Nat => "nat",
            ChainKind::Route => "route",
            ChainKind::Other => "unknown",
        };
        let hook = match self.0.hook {
            Hook::Prerouting => "prerouting".to_owned(),
            Hook::Input => "input".to_owned(),
            Hook::Forward => "forward".to_owned(),
            Hook::Output => "output".to_owned(),
            Hook::Postrouting => "postrouting".to_owned(),
            Hook::Other(number) => number.to_string(),
        };
        let policy = match self.0.policy {
            Policy::Accept => "accept",
            Policy::Drop => "drop",
        };
        let priority = priority(self.0.hook, self.0.priority);
        write!(f, "type {kind} hook {hook} priority {priority}; policy {policy};")
    }
}

/// Priorities near one that has a name at this hook are written relative to it, as `nft` does.
fn priority(hook: Hook, priority: i32) -> String {
    let named = match hook {
        Hook::Prerouting => Some(("dstnat", -100)),
        Hook::Postrouting => Some(("srcnat", 100)),
        _ => None,
    };
    for (name, value) in named.into_iter().chain([("filter", 0)]) {
        match priority - value {
            0 => return name.into(),
            distance @ 1..=10 => return format!("{name} + {distance}"),
            distance @ -10..=-1 => return format!("{name} - {}", -distance),
            _ => (),
        }
    }
    priority.to_string()
}

/// A network as `nft` writes it: a single address without its length.
struct NetText<'a>(&'a IpNet);

impl Display for NetText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.0.prefix_len() == self.0.max_prefix_len() {
            write!(f, "{}", self.0.addr())
        } else {
            write!(f, "{}", self.0)
        }
    }
}

/// `3h`, `1d30s`
struct TimeText(u32);

impl Display for TimeText {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        for (unit, secs) in [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)] {
            if rest >= secs {
                write!(f, "{}{unit}", rest / secs)?;
                rest %= secs;
            }
        }
        Ok(())
    }
}

/// The family as `nft` calls it.
pub(super) fn keyword(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}
