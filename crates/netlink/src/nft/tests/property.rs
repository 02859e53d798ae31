// SPDX-License-Identifier: Apache-2.0

//! decode(encode(x)) == x, for anything we can write; and no decoder minds what it is given.

use std::time::Duration;

use proptest::{collection::vec, option, prelude::*, sample::select};

use super::gallery::{self, OwnedElement, OwnedValue};
use crate::{
    Family,
    codec::{Message, Reader},
    fuzzing::fuzz_decode,
    nft::{decode, *},
};

const TABLE: TableRef<'static> = TableRef { family: Family::V6, name: "table" };

fn name() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9_./-]{0,40}"
}

fn comment() -> impl Strategy<Value = Option<String>> {
    option::of("[a-zäß→ .]{0,60}")
}

fn reg() -> impl Strategy<Value = Reg> {
    (0u8..16).prop_map(Reg::word)
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 1..=16)
}

fn two_of_a_length() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    (1usize..=16).prop_flat_map(|len| (vec(any::<u8>(), len), vec(any::<u8>(), len)))
}

/// What survives the kernel's and our own rounding: whole milliseconds, and not 0, which means none.
fn millis() -> impl Strategy<Value = Duration> {
    (1u64..1 << 50).prop_map(Duration::from_millis)
}

fn family() -> impl Strategy<Value = Family> {
    select(vec![Family::V4, Family::V6])
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        select(vec![Verdict::Accept, Verdict::Drop, Verdict::Continue, Verdict::Break, Verdict::Return]),
        name().prop_map(Verdict::Jump),
        name().prop_map(Verdict::Goto),
        (2i32..100).prop_map(Verdict::Other),
    ]
}

fn meta_key() -> impl Strategy<Value = MetaKey> {
    select(vec![
        MetaKey::Mark,
        MetaKey::Iif,
        MetaKey::Oif,
        MetaKey::Iifname,
        MetaKey::Oifname,
        MetaKey::Nfproto,
        MetaKey::L4Proto,
    ])
}

fn ct_key() -> impl Strategy<Value = CtKey> {
    select(vec![
        CtKey::State,
        CtKey::Direction,
        CtKey::Status,
        CtKey::Mark,
        CtKey::Src,
        CtKey::Dst,
        CtKey::Protocol,
        CtKey::ProtoSrc,
        CtKey::ProtoDst,
        CtKey::SrcIp,
        CtKey::DstIp,
        CtKey::SrcIp6,
        CtKey::DstIp6,
    ])
}

fn nat_flags() -> impl Strategy<Value = NatFlags> {
    let all = [NatFlags::NONE, NatFlags::RANDOM, NatFlags::PERSISTENT, NatFlags::FULLY_RANDOM];
    vec(select(all.to_vec()), 0..3).prop_map(|flags| flags.into_iter().fold(NatFlags::NONE, |a, b| a | b))
}

fn loading() -> impl Strategy<Value = Expr> {
    let header = select(vec![Header::Link, Header::Network, Header::Transport]);
    let direction = option::of(select(vec![Direction::Original, Direction::Reply]));
    let result = select(vec![FibResult::Oif, FibResult::Oifname, FibResult::AddrType]);
    let flags =
        select(vec![FibFlags::SADDR, FibFlags::DADDR | FibFlags::IIF, FibFlags::OIF | FibFlags::MARK]);
    prop_oneof![
        (header, any::<u32>(), any::<u32>(), reg()).prop_map(|(base, offset, len, dst)| Expr::Payload {
            base,
            offset,
            len,
            dst
        }),
        (meta_key(), reg()).prop_map(|(key, dst)| Expr::Meta { key, dst }),
        reg().prop_map(|src| Expr::SetMark { src }),
        (ct_key(), direction, reg()).prop_map(|(key, direction, dst)| Expr::Ct { key, direction, dst }),
        (result, flags, reg()).prop_map(|(result, flags, dst)| Expr::Fib { result, flags, dst }),
        (reg(), bytes()).prop_map(|(dst, value)| Expr::Immediate { dst, value }),
        (reg(), any::<bool>(), any::<u32>(), any::<u32>()).prop_map(|(dst, random, modulus, offset)| {
            let mode = if random { NumgenMode::Random } else { NumgenMode::Inc };
            Expr::Numgen { dst, mode, modulus, offset }
        }),
        (reg(), any::<u32>(), reg(), any::<u32>(), option::of(any::<u32>()), any::<u32>()).prop_map(
            |(src, len, dst, modulus, seed, offset)| Expr::Hash { src, len, dst, modulus, seed, offset }
        ),
        (reg(), reg(), two_of_a_length()).prop_map(|(src, dst, (mask, xor))| Expr::Bitwise {
            src,
            dst,
            mask,
            xor
        }),
    ]
}

fn deciding() -> impl Strategy<Value = Expr> {
    let op = select(vec![CmpOp::Eq, CmpOp::Neq, CmpOp::Lt, CmpOp::Lte, CmpOp::Gt, CmpOp::Gte]);
    let dst = option::of(prop_oneof![reg(), Just(Reg::VERDICT)]);
    let dynset_op = select(vec![DynsetOp::Add, DynsetOp::Update, DynsetOp::Delete]);
    let kind = select(vec![NatKind::Snat, NatKind::Dnat]);
    prop_oneof![
        (reg(), op, bytes()).prop_map(|(src, op, value)| Expr::Cmp { src, op, value }),
        (reg(), any::<bool>(), two_of_a_length()).prop_map(|(src, invert, (from, to))| Expr::Range {
            src,
            invert,
            from,
            to
        }),
        (name(), reg(), dst, any::<bool>()).prop_map(|(set, key, dst, invert)| Expr::Lookup {
            set,
            key,
            dst,
            invert
        }),
        verdict().prop_map(Expr::Verdict),
        (kind, family(), option::of(reg()), option::of(reg()), nat_flags()).prop_map(
            |(kind, family, address, port, flags)| Expr::Nat { kind, family, address, port, flags }
        ),
        nat_flags().prop_map(|flags| Expr::Masq { flags }),
        (option::of(reg()), nat_flags()).prop_map(|(port, flags)| Expr::Redirect { port, flags }),
        prop_oneof![
            any::<u8>().prop_map(Reject::Icmp),
            any::<u8>().prop_map(Reject::Icmpx),
            Just(Reject::TcpReset)
        ]
        .prop_map(Expr::Reject),
        (name(), dynset_op, reg(), option::of(reg()), option::of(millis()))
            .prop_map(|(set, op, key, value, timeout)| Expr::Dynset { set, op, key, value, timeout }),
        Just(Expr::Counter),
        Just(Expr::Notrack),
    ]
}

fn rule() -> impl Strategy<Value = Rule> {
    (name(), vec(prop_oneof![loading(), deciding()], 0..12), comment())
        .prop_map(|(chain, exprs, comment)| Rule { chain, exprs, comment })
}

fn chain() -> impl Strategy<Value = Chain> {
    let kind = select(vec![ChainKind::Filter, ChainKind::Nat, ChainKind::Route]);
    let hook = select(vec![
        Hook::Prerouting,
        Hook::Input,
        Hook::Forward,
        Hook::Output,
        Hook::Postrouting,
        Hook::Other(9),
    ]);
    let policy = select(vec![Policy::Accept, Policy::Drop]);
    let base = (kind, hook, any::<i32>(), policy).prop_map(|(kind, hook, priority, policy)| Base {
        kind,
        hook,
        priority,
        policy,
    });
    (name(), option::of(base), comment()).prop_map(|(name, base, comment)| Chain { name, base, comment })
}

/// Plain types or expressions, not both.
fn fields(max: usize) -> impl Strategy<Value = Vec<Field>> {
    let plain = select(vec![
        Type::IPV4_ADDR,
        Type::IPV6_ADDR,
        Type::INET_PROTO,
        Type::INET_SERVICE,
        Type::MARK,
        Type::IFNAME,
        Type::INTEGER,
    ]);
    let typeofs = prop_oneof![
        family().prop_map(Typeof::Saddr),
        family().prop_map(Typeof::Daddr),
        select(vec![
            Typeof::L4Proto,
            Typeof::Mark,
            Typeof::Iifname,
            Typeof::Oifname,
            Typeof::Sport,
            Typeof::Dport
        ]),
        any::<u32>().prop_map(Typeof::NumgenRandom),
        any::<u32>().prop_map(Typeof::NumgenInc),
    ];
    prop_oneof![vec(plain.prop_map(Field::Plain), 1..=max), vec(typeofs.prop_map(Field::Of), 1..=max)]
}

fn set() -> impl Strategy<Value = Set> {
    let value = prop_oneof![
        Just(Value::Verdict),
        fields(2).prop_map(Value::Fields),
        fields(1).prop_map(Value::Range)
    ];
    let lifetime = prop_oneof![
        Just(Lifetime::Forever),
        Just(Lifetime::PerElement),
        millis().prop_map(Lifetime::Default)
    ];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), lifetime);
    (name(), fields(4), option::of(value), flags, option::of(any::<u32>()), option::of("[a-z ]{0,20}"))
        .prop_map(|(name, key, value, (interval, dynamic, counter, lifetime), size, comment)| Set {
            name,
            key,
            value,
            interval,
            dynamic,
            lifetime,
            counter,
            size,
            comment,
        })
}

fn element() -> impl Strategy<Value = OwnedElement> {
    let value = prop_oneof![
        Just(OwnedValue::None),
        vec(any::<u8>(), 1..64).prop_map(OwnedValue::Bytes),
        verdict().prop_map(OwnedValue::Verdict)
    ];
    let key = vec(any::<u8>(), 0..64);
    (key, option::of(vec(any::<u8>(), 1..64)), any::<bool>(), value, option::of(millis()), comment())
        .prop_map(|(key, key_end, interval_end, value, timeout, comment)| OwnedElement {
            key,
            key_end,
            interval_end,
            value,
            timeout,
            comment,
        })
}

/// The attributes of the only message in a batch.
fn attrs(batch: &Batch) -> Vec<u8> {
    assert_eq!(batch.unencodable(), None);
    let mut reader = Reader::new(batch.bytes());
    Message::next(&mut reader).expect("well-formed").expect("a begin");
    let message = Message::next(&mut reader).expect("well-formed").expect("a message");
    decode::Generic::read(&message).expect("a header").attrs.to_vec()
}

proptest! {
    #[test]
    fn rules_come_back(rule in rule()) {
        let mut batch = Batch::new();
        batch.add_rule(1, TABLE, &rule);
        let attrs = attrs(&batch);
        let found = decode::rule(&attrs).expect("a rule");
        prop_assert_eq!(found.table, TABLE.name);
        let counters = rule.exprs.iter().filter(|expr| **expr == Expr::Counter).count();
        prop_assert_eq!(found.object.counters.len(), counters);
        prop_assert_eq!(found.object.rule, rule);
    }

    #[test]
    fn chains_come_back(chain in chain()) {
        let mut batch = Batch::new();
        batch.add_chain(1, TABLE, &chain, Create::Exclusive);
        let attrs = attrs(&batch);
        prop_assert_eq!(decode::chain(&attrs).expect("a chain").object.object, chain);
    }

    #[test]
    fn tables_come_back(family in family(), name in name(), flags: [bool; 2], comment in comment()) {
        let [dormant, owned] = flags;
        let table = Table { family, name, dormant, owned, comment };
        let mut batch = Batch::new();
        batch.add_table(1, &table, Create::Exclusive);
        prop_assert_eq!(decode::table(family, &attrs(&batch)).expect("a table").object, table);
    }

    #[test]
    fn sets_come_back(set in set()) {
        let mut batch = Batch::new();
        batch.add_set(1, TABLE, &set, Create::Exclusive);
        let attrs = attrs(&batch);
        prop_assert_eq!(decode::set(&attrs).expect("a set").object.object, set);
    }

    #[test]
    fn elements_come_back(elements in vec(element(), 1..8)) {
        let mut batch = Batch::new();
        batch.add_elements(1, TABLE, "set", Create::Exclusive).extend(elements.iter().map(OwnedElement::borrow));
        let attrs = attrs(&batch);
        let mut found = Vec::new();
        let place = decode::elements(&attrs, |element| found.push(OwnedElement::from(element))).expect("elements");
        prop_assert_eq!((place.table, place.object), (TABLE.name, "set"));
        prop_assert_eq!(found, elements);
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in vec(any::<u8>(), 0..400)) {
        fuzz_decode(&bytes);
    }

    /// Nearly right is where decoders break: a real batch, with some bytes changed and its end cut off.
    #[test]
    fn mutated_messages_do_no_harm(
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in any::<prop::sample::Index>(),
    ) {
        let batch = gallery::complete(Family::V6).batch();
        let mut bytes = batch.bytes().to_vec();
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        bytes.truncate(cut.index(bytes.len()).max(bytes.len() / 2));
        fuzz_decode(&bytes);
    }
}
