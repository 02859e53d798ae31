// SPDX-License-Identifier: Apache-2.0

//! One table with every construct this crate can write.

use std::time::Duration;

use crate::{Family, nft::*};

pub(super) const TABLE: &str = "gallery";

/// Everything in one table of a family.
pub(super) struct Gallery {
    pub(super) family: Family,
    pub(super) chains: Vec<Chain>,
    pub(super) sets: Vec<Set>,
    pub(super) rules: Vec<Rule>,
    pub(super) elements: Vec<(&'static str, Vec<OwnedElement>)>,
}

/// An element that owns its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedElement {
    pub(super) key: Vec<u8>,
    pub(super) key_end: Option<Vec<u8>>,
    pub(super) interval_end: bool,
    pub(super) value: OwnedValue,
    pub(super) timeout: Option<Duration>,
    pub(super) comment: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OwnedValue {
    None,
    Bytes(Vec<u8>),
    Verdict(Verdict),
}

impl OwnedElement {
    pub(super) fn key(key: Vec<u8>) -> OwnedElement {
        let value = OwnedValue::None;
        OwnedElement { key, key_end: None, interval_end: false, value, timeout: None, comment: None }
    }

    pub(super) fn borrow(&self) -> Element<'_> {
        Element {
            key: &self.key,
            key_end: self.key_end.as_deref(),
            interval_end: self.interval_end,
            value: match &self.value {
                OwnedValue::None => ElementValue::None,
                OwnedValue::Bytes(bytes) => ElementValue::Bytes(bytes),
                OwnedValue::Verdict(verdict) => ElementValue::Verdict(verdict.as_ref()),
            },
            timeout: self.timeout,
            expires_in: None,
            counter: None,
            comment: self.comment.as_deref(),
        }
    }

    pub(super) fn from(element: &Element<'_>) -> OwnedElement {
        OwnedElement {
            key: element.key.to_vec(),
            key_end: element.key_end.map(<[u8]>::to_vec),
            interval_end: element.interval_end,
            value: match element.value {
                ElementValue::None => OwnedValue::None,
                ElementValue::Bytes(bytes) => OwnedValue::Bytes(bytes.to_vec()),
                ElementValue::Verdict(verdict) => OwnedValue::Verdict(verdict.to_owned()),
            },
            timeout: element.timeout,
            comment: element.comment.map(str::to_owned),
        }
    }
}

impl Gallery {
    pub(super) fn table(&self) -> TableRef<'static> {
        TableRef { family: self.family, name: TABLE }
    }

    /// One batch that makes all of it.
    pub(super) fn batch(&self) -> Batch {
        let mut batch = Batch::new();
        let table = self.table();
        let object = Table { comment: Some("every construct".into()), ..Table::new(self.family, TABLE) };
        batch.add_table(1, &object, Create::Exclusive);
        for set in &self.sets {
            batch.add_set(2, table, set, Create::Exclusive);
        }
        for chain in &self.chains {
            batch.add_chain(3, table, chain, Create::Exclusive);
        }
        for (set, elements) in &self.elements {
            let mut writer = batch.add_elements(4, table, set, Create::Exclusive);
            writer.extend(elements.iter().map(OwnedElement::borrow));
        }
        for rule in &self.rules {
            batch.add_rule(5, table, rule);
        }
        batch
    }
}

/// The parts of a key: address, protocol, port, each padded.
pub(super) fn frontend(family: Family, last: u8, protocol: u8, port: u16) -> Vec<u8> {
    let mut key = address(family, last);
    key.extend([protocol, 0, 0, 0]);
    key.extend(port.to_be_bytes());
    key.extend([0, 0]);
    key
}

pub(super) fn address(family: Family, last: u8) -> Vec<u8> {
    match family {
        Family::V4 => vec![10, 96, 0, last],
        Family::V6 => {
            let mut address = vec![0xfd, 0, 0, 96, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            address.push(last);
            address
        }
    }
}

fn endpoint(family: Family, last: u8, port: u16) -> Vec<u8> {
    let mut value = address(family, last);
    value.extend(port.to_be_bytes());
    value.extend([0, 0]);
    value
}

/// What the rules and maps need to know of a family.
#[derive(Clone, Copy)]
struct Layout {
    family: Family,
    /// Offsets of the addresses in the header.
    saddr: u32,
    daddr: u32,
    address_len: u32,
}

impl Layout {
    fn of(family: Family) -> Layout {
        match family {
            Family::V4 => Layout { family, saddr: 12, daddr: 16, address_len: 4 },
            Family::V6 => Layout { family, saddr: 8, daddr: 24, address_len: 16 },
        }
    }

    fn load_saddr(self, dst: Reg) -> Expr {
        Expr::Payload { base: Header::Network, offset: self.saddr, len: self.address_len, dst }
    }

    fn load_daddr(self, dst: Reg) -> Expr {
        Expr::Payload { base: Header::Network, offset: self.daddr, len: self.address_len, dst }
    }

    fn address_field(self) -> Field {
        Type::address(self.family).into()
    }

    /// Address, protocol and port from `first` on, and the register behind them.
    fn load_frontend(self, first: Reg) -> (Vec<Expr>, Reg) {
        let protocol = first.after(self.address_len as usize);
        let port = protocol.after(1);
        let exprs = vec![
            self.load_daddr(first),
            Expr::Meta { key: MetaKey::L4Proto, dst: protocol },
            Expr::Payload { base: Header::Transport, offset: 2, len: 2, dst: port },
        ];
        (exprs, port.after(2))
    }

    fn dnat(self, address: Reg) -> Expr {
        Expr::Nat {
            kind: NatKind::Dnat,
            family: self.family,
            address: Some(address),
            port: Some(address.after(self.address_len as usize)),
            flags: NatFlags::NONE,
        }
    }
}

const R0: Reg = Reg::word(0);

fn rule(chain: &str, exprs: Vec<Expr>) -> Rule {
    Rule { chain: chain.to_owned(), exprs, comment: None }
}

fn mark(value: u32) -> Vec<u8> {
    value.to_ne_bytes().to_vec()
}

fn lookup(set: &str, key: Reg, dst: Option<Reg>) -> Expr {
    Expr::Lookup { set: set.to_owned(), key, dst, invert: false }
}

/// What `nft list` 1.0.6 can print, which is what a table of ours may hold.
pub(super) fn printable(family: Family) -> Gallery {
    let layout = Layout::of(family);
    Gallery {
        family,
        chains: chains(),
        sets: sets(layout),
        rules: [balancing_rules, filter_rules, masquerading_rules, translation_rules]
            .map(|rules| rules(layout))
            .concat(),
        elements: elements(family),
    }
}

/// Everything, also what `nft list` cannot print.
pub(super) fn complete(family: Family) -> Gallery {
    let mut gallery = printable(family);
    gallery.rules.push(odd_rule());
    gallery
}

fn chains() -> Vec<Chain> {
    vec![
        Chain { comment: Some("a remark".into()), ..Chain::regular("n3") },
        Chain::regular("hashed"),
        Chain::regular("sticky"),
        Chain::regular("mark-for-masquerade"),
        Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, -100),
        Chain::base("output", ChainKind::Nat, Hook::Output, -100),
        Chain::base("postrouting", ChainKind::Nat, Hook::Postrouting, 100),
        Chain::base("input", ChainKind::Filter, Hook::Input, 0),
        Chain::base("record", ChainKind::Filter, Hook::Postrouting, 90),
        Chain::base("raw", ChainKind::Filter, Hook::Prerouting, -300),
        Chain::base("reroute", ChainKind::Route, Hook::Output, -150),
        Chain {
            base: Some(Base {
                kind: ChainKind::Filter,
                hook: Hook::Forward,
                priority: 1,
                policy: Policy::Drop,
            }),
            ..Chain::regular("forward")
        },
    ]
}

fn sets(layout: Layout) -> Vec<Set> {
    let address = layout.address_field();
    let (saddr, daddr) = (Typeof::Saddr(layout.family).into(), Typeof::Daddr(layout.family).into());
    let (proto, port) = (Type::INET_PROTO.into(), Type::INET_SERVICE.into());
    let endpoint = Value::Fields(vec![daddr, Typeof::Dport.into()]);
    let indexed = [daddr, Typeof::L4Proto.into(), Typeof::Dport.into(), Typeof::NumgenRandom(65536).into()];
    let client = [saddr, daddr, Typeof::L4Proto.into(), Typeof::Dport.into()];
    vec![
        Set::map("services", [address, proto, port], Value::Verdict),
        Set { counter: true, ..Set::map("endpoints", indexed, endpoint.clone()) },
        Set {
            dynamic: true,
            lifetime: Lifetime::Default(Duration::from_secs(10800)),
            size: Some(65535),
            ..Set::map("affinity", client, endpoint)
        },
        Set {
            dynamic: true,
            lifetime: Lifetime::PerElement,
            size: Some(1000),
            ..Set::new("affinity-clients", [address])
        },
        Set::new("hairpin", [address, address]),
        Set { interval: true, ..Set::new("source-ranges", [address, proto, port, address]) },
        Set { interval: true, comment: Some("cluster".into()), ..Set::new("cluster-cidrs", [address]) },
        Set { size: Some(64), ..Set::map("node-ports", [proto, port], Value::Verdict) },
        Set { lifetime: Lifetime::PerElement, ..Set::new("seen", [address]) },
        Set::map("marks", [Typeof::Mark.into()], Value::Fields(vec![daddr])),
        Set::map("ranges", [port], Value::Range(vec![address])),
        Set::new("names", [Type::IFNAME.into()]),
        Set::map("numbers", [Typeof::NumgenInc(16).into()], Value::Fields(vec![daddr])),
    ]
}

fn elements(family: Family) -> Vec<(&'static str, Vec<OwnedElement>)> {
    let key = |last, port| frontend(family, last, 6, port);
    let with_index = |index: u32| [key(1, 80), index.to_ne_bytes().to_vec()].concat();
    let verdict =
        |key, verdict| OwnedElement { value: OwnedValue::Verdict(verdict), ..OwnedElement::key(key) };
    let value = |key, value| OwnedElement { value: OwnedValue::Bytes(value), ..OwnedElement::key(key) };
    let range = |from: u8, to: u8| OwnedElement {
        key_end: Some([key(1, 80), address(family, to)].concat()),
        ..OwnedElement::key([key(1, 80), address(family, from)].concat())
    };
    let mut name = b"lo".to_vec();
    name.resize(16, 0);
    vec![
        (
            "services",
            vec![
                verdict(key(1, 80), Verdict::Goto("n3".into())),
                verdict(key(2, 443), Verdict::Jump("sticky".into())),
                OwnedElement { comment: Some("no endpoints".into()), ..verdict(key(3, 53), Verdict::Drop) },
            ],
        ),
        ("endpoints", (0..3).map(|i| value(with_index(i), endpoint(family, 200 + i as u8, 8080))).collect()),
        ("hairpin", vec![OwnedElement::key([address(family, 9), address(family, 9)].concat())]),
        ("source-ranges", vec![range(16, 31), range(64, 64)]),
        (
            "cluster-cidrs",
            vec![
                OwnedElement::key(address(family, 128)),
                OwnedElement { interval_end: true, ..OwnedElement::key(address(family, 192)) },
            ],
        ),
        ("node-ports", vec![verdict(vec![17, 0, 0, 0, 0x75, 0x30, 0, 0], Verdict::Goto("hashed".into()))]),
        (
            "seen",
            vec![OwnedElement {
                timeout: Some(Duration::from_secs(600)),
                ..OwnedElement::key(address(family, 77))
            }],
        ),
        ("marks", vec![value(mark(0x4000), address(family, 5))]),
        ("ranges", vec![value(vec![0, 80], [address(family, 5), address(family, 9)].concat())]),
        ("names", vec![OwnedElement::key(name)]),
        ("numbers", vec![value(mark(3), address(family, 6))]),
    ]
}

/// From a frontend to an endpoint.
fn balancing_rules(layout: Layout) -> Vec<Rule> {
    let (frontend, index) = layout.load_frontend(R0);
    let vmap = [frontend.clone(), vec![lookup("services", R0, Some(Reg::VERDICT))]].concat();
    let numgen = Expr::Numgen { dst: index, mode: NumgenMode::Random, modulus: 3, offset: 0 };
    let balance = vec![numgen, lookup("endpoints", R0, Some(R0)), layout.dnat(R0)];
    let (client_frontend, _) = layout.load_frontend(R0.after(layout.address_len as usize));
    let sticky = vec![lookup("affinity", R0, Some(R0)), layout.dnat(R0)];
    vec![
        Rule { comment: Some("services".into()), ..rule("prerouting", vmap.clone()) },
        rule("output", vmap),
        rule("n3", [frontend.clone(), balance].concat()),
        rule("hashed", [frontend, by_client_hash(layout, index)].concat()),
        rule("sticky", [vec![layout.load_saddr(R0)], client_frontend, sticky].concat()),
        rule(
            "prerouting",
            vec![
                Expr::Fib { result: FibResult::AddrType, flags: FibFlags::DADDR, dst: R0 },
                Expr::Cmp { src: R0, op: CmpOp::Eq, value: mark(expr::addr_type::LOCAL) },
                Expr::Meta { key: MetaKey::L4Proto, dst: R0 },
                Expr::Payload { base: Header::Transport, offset: 2, len: 2, dst: R0.after(1) },
                lookup("node-ports", R0, Some(Reg::VERDICT)),
            ],
        ),
    ]
}

fn by_client_hash(layout: Layout, index: Reg) -> Vec<Expr> {
    let client = index.after(4);
    let len = layout.address_len;
    vec![
        layout.load_saddr(client),
        Expr::Hash { src: client, len, dst: index, modulus: 3, seed: Some(0x5eed), offset: 0 },
        lookup("endpoints", R0, Some(R0)),
        layout.dnat(R0),
    ]
}

/// Who may pass, and what is recorded.
fn filter_rules(layout: Layout) -> Vec<Rule> {
    let (frontend, client) = layout.load_frontend(R0);
    let unreachable = match layout.family {
        Family::V4 => Reject::Icmp(3),
        Family::V6 => Reject::Icmp(4),
    };
    let by_state = |bits: u32| {
        vec![
            Expr::Ct { key: CtKey::State, direction: None, dst: R0 },
            Expr::Bitwise { src: R0, dst: R0, mask: mark(bits), xor: mark(0) },
            Expr::Cmp { src: R0, op: CmpOp::Neq, value: mark(0) },
        ]
    };
    let ranges = vec![
        layout.load_saddr(client),
        Expr::Lookup { set: "source-ranges".into(), key: R0, dst: None, invert: true },
        Expr::Counter,
        Expr::Verdict(Verdict::Drop),
    ];
    let loopback = vec![
        Expr::Meta { key: MetaKey::Iifname, dst: R0 },
        Expr::Cmp { src: R0, op: CmpOp::Eq, value: [b"lo".to_vec(), vec![0; 14]].concat() },
        Expr::Verdict(Verdict::Return),
    ];
    let protocol = |number| {
        vec![
            Expr::Meta { key: MetaKey::L4Proto, dst: R0 },
            Expr::Cmp { src: R0, op: CmpOp::Eq, value: vec![number] },
        ]
    };
    vec![
        rule("forward", [by_state(expr::ct_state::NEW), vec![Expr::Reject(unreachable)]].concat()),
        rule("forward", [frontend, ranges].concat()),
        rule("input", loopback),
        rule("input", [protocol(6), vec![Expr::Reject(Reject::TcpReset)]].concat()),
        rule("raw", [protocol(132), vec![Expr::Notrack]].concat()),
        rule("record", [by_state(expr::ct_state::NEW), record_affinity(layout)].concat()),
        rule(
            "input",
            vec![
                layout.load_saddr(R0),
                Expr::Dynset {
                    set: "affinity-clients".into(),
                    op: DynsetOp::Add,
                    key: R0,
                    value: None,
                    timeout: Some(Duration::from_secs(60)),
                },
            ],
        ),
    ]
}

/// Client, frontend and chosen endpoint of a new flow, after its destination was rewritten.
fn record_affinity(layout: Layout) -> Vec<Expr> {
    let (src, dst) = match layout.family {
        Family::V4 => (CtKey::SrcIp, CtKey::DstIp),
        Family::V6 => (CtKey::SrcIp6, CtKey::DstIp6),
    };
    let direction = Some(Direction::Original);
    let daddr = R0.after(layout.address_len as usize);
    let protocol = daddr.after(layout.address_len as usize);
    let port = protocol.after(1);
    let value = port.after(2);
    vec![
        Expr::Ct { key: src, direction, dst: R0 },
        Expr::Ct { key: dst, direction, dst: daddr },
        Expr::Meta { key: MetaKey::L4Proto, dst: protocol },
        Expr::Ct { key: CtKey::ProtoDst, direction, dst: port },
        layout.load_daddr(value),
        Expr::Payload {
            base: Header::Transport,
            offset: 2,
            len: 2,
            dst: value.after(layout.address_len as usize),
        },
        Expr::Dynset {
            set: "affinity".into(),
            op: DynsetOp::Update,
            key: R0,
            value: Some(value),
            timeout: None,
        },
    ]
}

/// Marks and masquerading.
fn masquerading_rules(layout: Layout) -> Vec<Rule> {
    vec![
        rule(
            "mark-for-masquerade",
            vec![
                Expr::Meta { key: MetaKey::Mark, dst: R0 },
                Expr::Bitwise { src: R0, dst: R0, mask: mark(!0x4000), xor: mark(0x4000) },
                Expr::SetMark { src: R0 },
                Expr::Verdict(Verdict::Accept),
            ],
        ),
        rule(
            "postrouting",
            vec![
                Expr::Meta { key: MetaKey::Mark, dst: R0 },
                Expr::Bitwise { src: R0, dst: R0, mask: mark(0x4000), xor: mark(0) },
                Expr::Cmp { src: R0, op: CmpOp::Neq, value: mark(0) },
                Expr::Masq { flags: NatFlags::FULLY_RANDOM },
            ],
        ),
        rule(
            "postrouting",
            vec![
                Expr::Ct { key: CtKey::Status, direction: None, dst: R0 },
                Expr::Bitwise { src: R0, dst: R0, mask: mark(expr::ct_status::DST_NAT), xor: mark(0) },
                Expr::Cmp { src: R0, op: CmpOp::Neq, value: mark(0) },
                layout.load_saddr(R0),
                layout.load_daddr(R0.after(layout.address_len as usize)),
                lookup("hairpin", R0, None),
                Expr::Masq { flags: NatFlags::NONE },
            ],
        ),
    ]
}

/// Other rewriting of addresses and ports.
fn translation_rules(layout: Layout) -> Vec<Rule> {
    vec![
        rule(
            "postrouting",
            vec![
                layout.load_saddr(R0),
                lookup("cluster-cidrs", R0, None),
                Expr::Immediate { dst: R0, value: address(layout.family, 1) },
                Expr::Nat {
                    kind: NatKind::Snat,
                    family: layout.family,
                    address: Some(R0),
                    port: None,
                    flags: NatFlags::RANDOM | NatFlags::PERSISTENT,
                },
            ],
        ),
        rule(
            "output",
            vec![
                Expr::Meta { key: MetaKey::L4Proto, dst: R0 },
                Expr::Cmp { src: R0, op: CmpOp::Eq, value: vec![17] },
                Expr::Payload { base: Header::Transport, offset: 2, len: 2, dst: R0 },
                Expr::Range { src: R0, invert: true, from: vec![0, 10], to: vec![0, 20] },
                Expr::Immediate { dst: R0, value: vec![0, 53] },
                Expr::Redirect { port: Some(R0), flags: NatFlags::NONE },
            ],
        ),
        rule(
            "hashed",
            vec![
                Expr::Immediate { dst: R0, value: address(layout.family, 200) },
                Expr::Immediate { dst: R0.after(16), value: vec![0x1f, 0x90] },
                Expr::Nat {
                    kind: NatKind::Dnat,
                    family: layout.family,
                    address: Some(R0),
                    port: Some(R0.after(16)),
                    flags: NatFlags::NONE,
                },
            ],
        ),
    ]
}

/// Every expression the rules above have no use for, with registers all over. `nft list` 1.0.6 has no words for it.
fn odd_rule() -> Rule {
    rule(
        "input",
        vec![
            // A register must be written before it is read.
            Expr::Immediate { dst: R0, value: vec![7; 16] },
            Expr::Immediate { dst: Reg::word(8), value: vec![8; 16] },
            Expr::Hash { src: R0, len: 8, dst: Reg::word(5), modulus: 7, seed: None, offset: 9 },
            Expr::Numgen { dst: Reg::word(15), mode: NumgenMode::Inc, modulus: 5, offset: 2 },
            Expr::Meta { key: MetaKey::Oifname, dst: Reg::word(4) },
            Expr::Meta { key: MetaKey::Nfproto, dst: Reg::word(3) },
            Expr::Ct { key: CtKey::Src, direction: Some(Direction::Reply), dst: Reg::word(8) },
            Expr::Ct { key: CtKey::ProtoSrc, direction: Some(Direction::Reply), dst: Reg::word(7) },
            Expr::Cmp { src: Reg::word(1), op: CmpOp::Gte, value: vec![1, 2, 3, 4, 5, 6, 7] },
            Expr::Bitwise {
                src: Reg::word(8),
                dst: Reg::word(12),
                mask: vec![0xf0; 16],
                xor: vec![0x0f; 16],
            },
            Expr::Fib { result: FibResult::Oif, flags: FibFlags::SADDR | FibFlags::IIF, dst: Reg::word(2) },
            Expr::Dynset {
                set: "affinity-clients".into(),
                op: DynsetOp::Delete,
                key: R0,
                value: None,
                timeout: None,
            },
            Expr::Counter,
            Expr::Verdict(Verdict::Continue),
        ],
    )
}
