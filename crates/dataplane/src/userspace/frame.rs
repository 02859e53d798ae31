// SPDX-License-Identifier: Apache-2.0

//! The rules. README.md says which does what, and why there. Pure.

use ipnet::IpNet;
use model::{Family, NodePortScope, Plan, PodTraffic, Protocol};
use netlink::nft::{
    Chain, ChainKind, CmpOp, CtKey, Expr, Header, Hook, MetaKey, NatFlags, NatKind, Reg, Verdict,
    expr::ct_state,
};

use super::{book::Side, elements::Place, options::Ports};
use crate::{
    Loopback,
    names::{
        chain, hook,
        userspace::{MARK, PAST_IPVS, STEER, STEER_INSIDE, STEER_OUTPUT, STEER_OWN, STEER_PREROUTING},
    },
    nftables::{
        guard, lower,
        program::{Field, Rule, Statement},
        wire,
    },
};

/// A chain and its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) chain: Chain,
    pub(super) rules: Vec<Vec<Expr>>,
}

/// What the rules depend on.
pub(super) struct Around<'a> {
    pub(super) plan: &'a Plan,
    pub(super) family: Family,
    pub(super) ports: Ports,
    /// The kernel has IPVS loaded.
    pub(super) has_ipvs: bool,
    /// What becomes of loopback addresses. To serve node ports there takes nothing of the kernel.
    pub(super) loopback: Loopback,
}

/// All chains.
pub(super) fn chains(around: &Around<'_>) -> Vec<Written> {
    let regular = |name: &str, rules| Written { chain: Chain::regular(name), rules };
    let base = |name: &str, kind, hook, priority, rules| Written {
        chain: Chain::base(name, kind, hook, priority),
        rules,
    };
    let (checks, filters) = (around.checks(), around.filters());
    let mut chains = vec![
        regular(STEER, around.listeners(Side::Everyone)),
        regular(STEER_INSIDE, around.listeners(Side::Inside)),
        regular(
            STEER_OWN,
            vec![around.rule([Statement::Mark(MARK)], [mark_flow(), vec![accept()]].concat())],
        ),
    ];
    chains.extend(checks.into_iter().map(|(name, rules)| regular(name, rules)));
    chains.push(base(STEER_PREROUTING, ChainKind::Filter, Hook::Prerouting, MANGLE, around.prerouting()));
    chains.push(base(hook::NAT_PREROUTING, ChainKind::Nat, Hook::Prerouting, DSTNAT, vec![around.keep()]));
    chains.push(base(hook::NAT_OUTPUT, ChainKind::Nat, Hook::Output, DSTNAT, vec![around.keep()]));
    chains.push(base(STEER_OUTPUT, ChainKind::Route, Hook::Output, MANGLE, around.output()));
    if around.has_ipvs {
        let [hide_input, show_input, hide_output, show_output] = PAST_IPVS;
        for (name, hook, priority, sight) in [
            (hide_input, Hook::Input, SRCNAT - 2, Sight::Hidden),
            (show_input, Hook::Input, SRCNAT + 1, Sight::Plain),
            (hide_output, Hook::Output, DSTNAT + 2, Sight::Hidden),
            (show_output, Hook::Output, DSTNAT + 4, Sight::Plain),
        ] {
            chains.push(base(name, ChainKind::Filter, hook, priority, around.past_ipvs(sight)));
        }
    }
    chains.extend(
        filters.into_iter().map(|(name, hook, rules)| base(name, ChainKind::Filter, hook, FILTER, rules)),
    );
    chains
}

impl Around<'_> {
    fn rule<const N: usize>(&self, statements: [Statement; N], then: Vec<Expr>) -> Vec<Expr> {
        self.rule_of(statements.into(), then)
    }

    fn rule_of(&self, statements: Vec<Statement>, then: Vec<Expr>) -> Vec<Expr> {
        let mut exprs = lower(self.family, &Rule(statements));
        exprs.extend(then);
        exprs
    }

    /// What arrives.
    fn prerouting(&self) -> Vec<Vec<Expr>> {
        let mut rules = Vec::new();
        rules.extend(self.loopback.is_guarded().then(|| lower(self.family, &guard(self.family))));
        rules.extend([
            // Flows that the kernel translates, of another mode or of a neighbour, go on as they began.
            self.rule([Statement::IsTranslated], vec![accept()]),
            [is_reply(), vec![accept()]].concat(),
            // Our connections and flows, also those of services that are gone meanwhile.
            [is_ours(), self.rule([Statement::Mark(MARK)], vec![accept()])].concat(),
        ]);
        if self.has_ipvs {
            rules.push([is_flow_of_others(), vec![accept()]].concat());
            // A packet that fits no connection begins none. Steered to us it would be answered with a reset, which ends the
            // connection that IPVS carries.
            rules.push([bits(CtKey::State, ct_state::INVALID, CmpOp::Neq), vec![accept()]].concat());
        }
        rules.push(self.firewall());
        let services = (Place::Services, Place::InsideServices, Vec::new());
        let node_ports = (Place::NodePorts, Place::InsideNodePorts, self.node_port_addresses());
        for (everyone, inside, conditions) in [services, node_ports] {
            for from in self.matches_inside() {
                let mut rule = vec![from];
                rule.extend(conditions.clone());
                rule.extend([contained(inside, true), Statement::Goto(STEER_INSIDE.into())]);
                rules.push(self.rule_of(rule, vec![]));
            }
            let mut rule = conditions;
            rule.extend([contained(everyone, true), Statement::Goto(STEER.into())]);
            rules.push(self.rule_of(rule, vec![]));
        }
        rules
    }

    /// Who may not connect at all.
    fn firewall(&self) -> Vec<Expr> {
        let (meant, let_in) = (contained(Place::Firewalled, true), contained(Place::SourceRanges, false));
        self.rule([Statement::IsNew, meant, let_in, Statement::Drop], vec![])
    }

    /// What this node's own processes send. Node ports need nothing: their addresses are this node's already.
    fn output(&self) -> Vec<Vec<Expr>> {
        let own = |place| self.rule([contained(place, true), Statement::Goto(STEER_OWN.into())], vec![]);
        let mut rules = vec![
            self.rule([Statement::IsTranslated], vec![accept()]),
            [is_reply(), vec![accept()]].concat(),
            [is_marked_flow(), self.rule([Statement::Mark(MARK)], vec![accept()])].concat(),
        ];
        if self.has_ipvs {
            rules.push([is_flow_of_others(), vec![accept()]].concat());
        }
        rules.extend([self.firewall(), own(Place::InsideServices), own(Place::Services)]);
        rules
    }

    /// What is steered to us is translated to where it goes anyway, that is, not at all: so nobody else translates it, be it
    /// another mode that is still there, or kube-proxy. And while there is such a chain, the kernel goes on with what others
    /// have translated.
    fn keep(&self) -> Vec<Expr> {
        let (offset, len) = match self.family {
            Family::V4 => (16, 4),
            Family::V6 => (24, 16),
        };
        let itself = vec![
            Expr::Payload { base: Header::Network, offset, len, dst: FIRST },
            Expr::Nat {
                kind: NatKind::Dnat,
                family: wire(self.family),
                address: Some(FIRST),
                port: None,
                flags: NatFlags::NONE,
            },
        ];
        self.rule([Statement::IsMarked(MARK)], itself)
    }

    /// A virtual server that waits for its last connections would take new ones too: IPVS looks at what arrives for this node
    /// and at what it sends. It looks only at protocols that it knows, so for that moment those of our flows have other
    /// numbers.
    fn past_ipvs(&self, sight: Sight) -> Vec<Vec<Expr>> {
        let offset = match self.family {
            Family::V4 => 9,
            Family::V6 => 6,
        };
        let number = |value| {
            vec![Expr::Payload { base: Header::Network, offset, len: 1, dst: FIRST }, equals(vec![value])]
        };
        let becomes = |value| {
            vec![
                Expr::Immediate { dst: FIRST, value: vec![value] },
                Expr::SetPayload { base: Header::Network, offset, len: 1, src: FIRST },
            ]
        };
        let change = |(protocol, stand_in): (Protocol, u8)| {
            let (from, to) = match sight {
                Sight::Hidden => (protocol.number(), stand_in),
                Sight::Plain => (stand_in, protocol.number()),
            };
            let ours = self.rule([Statement::IsMarked(MARK)], is_marked_flow());
            [ours, number(from), becomes(to), vec![accept()]].concat()
        };
        STAND_INS.map(change).into()
    }

    /// To the listeners of a side. New connections that find none wait for one.
    fn listeners(&self, side: Side) -> Vec<Vec<Expr>> {
        let Ports { tcp, udp } = self.ports;
        let steer = |protocol, ports: [u16; 2]| {
            let port = ports[side as usize];
            let address = match self.family {
                Family::V4 => std::net::Ipv4Addr::LOCALHOST.octets().to_vec(),
                Family::V6 => std::net::Ipv6Addr::LOCALHOST.octets().to_vec(),
            };
            let tproxy = vec![
                Expr::Immediate { dst: ADDRESS, value: address },
                Expr::Immediate { dst: PORT, value: port.to_be_bytes().to_vec() },
                Expr::Tproxy { family: wire(self.family), address: ADDRESS, port: PORT },
            ];
            [is(protocol), tproxy, self.rule([Statement::Mark(MARK)], vec![accept()])].concat()
        };
        vec![
            // From now on it is known for ours, whatever else there is.
            self.rule([Statement::IsNew], mark_flow()),
            steer(Protocol::Tcp, tcp),
            steer(Protocol::Udp, udp),
            self.rule([Statement::IsNew, Statement::Drop], vec![]),
        ]
    }

    fn filters(&self) -> Vec<(&'static str, Hook, Vec<Vec<Expr>>)> {
        let marked = || self.rule([Statement::IsMarked(MARK)], vec![accept()]);
        let jump = |to: &str| self.rule([Statement::IsNew, Statement::Jump(to.into())], vec![]);
        let pass = || vec![marked(), jump(chain::CHECK_SERVICES), jump(chain::CHECK_CLUSTER_IPS)];
        let input = vec![marked(), jump(chain::CHECK_NODE_PORTS), jump(chain::CHECK_SERVICES)];
        vec![
            (hook::FILTER_INPUT, Hook::Input, input),
            (hook::FILTER_FORWARD, Hook::Forward, pass()),
            (hook::FILTER_OUTPUT, Hook::Output, pass()),
        ]
    }

    /// Frontends without endpoints, ports that a cluster IP does not have, free addresses of the service range.
    fn checks(&self) -> Vec<(&'static str, Vec<Vec<Expr>>)> {
        let refuse = |conditions: Vec<Statement>, reject, drop| {
            let rule = |place, how| {
                let mut rule = conditions.clone();
                rule.extend([contained(place, true), how]);
                self.rule_of(rule, vec![])
            };
            vec![rule(reject, Statement::Reject), rule(drop, Statement::Drop)]
        };
        let mut cluster_ips =
            vec![self.rule([contained(Place::ClusterIps, true), Statement::Reject], vec![])];
        for net in self.plan.service_cidrs(self.family) {
            let within = Statement::Within { field: Field::Destination, net: *net, is: true };
            cluster_ips.push(self.rule([within, Statement::Drop], vec![]));
        }
        let addresses = self.node_port_addresses();
        vec![
            (chain::CHECK_NODE_PORTS, refuse(addresses, Place::RejectNodePorts, Place::DropNodePorts)),
            (chain::CHECK_SERVICES, refuse(Vec::new(), Place::RejectServices, Place::DropServices)),
            (chain::CHECK_CLUSTER_IPS, cluster_ips),
        ]
    }

    /// Everything on the loopback device is this node's own.
    fn matches_inside(&self) -> Vec<Statement> {
        let arrives = |name: &str, prefix| Statement::Arrives { on: name.into(), prefix, is: true };
        let mut inside = vec![arrives("lo", false)];
        inside.extend(self.plan.pod_traffic(self.family).and_then(|pods| match pods {
            PodTraffic::Source(net) => Some(Statement::Within { field: Field::Source, net: *net, is: true }),
            PodTraffic::Interface(name) => (!name.is_empty()).then(|| arrives(name, false)),
            PodTraffic::InterfacePrefix(name) => (!name.is_empty()).then(|| arrives(name, true)),
        }));
        inside
    }

    /// The destination serves node ports.
    fn node_port_addresses(&self) -> Vec<Statement> {
        let field = Field::Destination;
        match self.plan.node_ports(self.family) {
            NodePortScope::Only(_) => vec![contained(Place::NodePortAddresses, true)],
            NodePortScope::All if self.plan.loopback_node_ports(self.family) => {
                vec![Statement::IsLocal(field)]
            }
            NodePortScope::All => {
                let net = loopback(self.family);
                vec![Statement::IsLocal(field), Statement::Within { field, net, is: false }]
            }
        }
    }
}

/// How a packet looks to IPVS.
#[derive(Clone, Copy)]
enum Sight {
    Hidden,
    Plain,
}

fn loopback(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::new_assert([127, 0, 0, 0].into(), 8),
        Family::V6 => IpNet::new_assert(std::net::Ipv6Addr::LOCALHOST.into(), 128),
    }
}

fn contained(place: Place, is: bool) -> Statement {
    Statement::Contained { key: place.key(), set: place.name().into(), is }
}

fn accept() -> Expr {
    Expr::Verdict(Verdict::Accept)
}

fn equals(value: Vec<u8>) -> Expr {
    Expr::Cmp { src: FIRST, op: CmpOp::Eq, value }
}

/// `meta l4proto tcp`
fn is(protocol: Protocol) -> Vec<Expr> {
    vec![Expr::Meta { key: MetaKey::L4Proto, dst: FIRST }, equals(vec![protocol.number()])]
}

/// `ct direction reply`
fn is_reply() -> Vec<Expr> {
    vec![Expr::Ct { key: CtKey::Direction, direction: None, dst: FIRST }, equals(vec![1])]
}

/// `socket transparent 1`
fn is_ours() -> Vec<Expr> {
    vec![Expr::TransparentSocket { dst: FIRST }, equals(vec![1])]
}

/// `ct KEY & BITS`, compared with 0.
fn bits(key: CtKey, bits: u32, op: CmpOp) -> Vec<Expr> {
    let mask = bits.to_ne_bytes().to_vec();
    vec![
        Expr::Ct { key, direction: None, dst: FIRST },
        Expr::Bitwise { src: FIRST, dst: FIRST, mask, xor: vec![0; 4] },
        Expr::Cmp { src: FIRST, op, value: vec![0; 4] },
    ]
}

/// `ct mark & BIT != 0`
fn is_marked_flow() -> Vec<Expr> {
    bits(CtKey::Mark, MARK, CmpOp::Neq)
}

/// `ct state established,related ct mark & BIT == 0`: IPVS carries it, and nothing else in its tracking entry says so.
fn is_flow_of_others() -> Vec<Expr> {
    let known = ct_state::ESTABLISHED | ct_state::RELATED;
    [bits(CtKey::State, known, CmpOp::Neq), bits(CtKey::Mark, MARK, CmpOp::Eq)].concat()
}

/// `ct mark set ct mark | BIT`
fn mark_flow() -> Vec<Expr> {
    let (mask, xor) = ((!MARK).to_ne_bytes().to_vec(), MARK.to_ne_bytes().to_vec());
    vec![
        Expr::Ct { key: CtKey::Mark, direction: None, dst: FIRST },
        Expr::Bitwise { src: FIRST, dst: FIRST, mask, xor },
        Expr::SetCtMark { src: FIRST },
    ]
}

const FIRST: Reg = Reg::word(0);
const ADDRESS: Reg = Reg::word(0);
const PORT: Reg = Reg::word(4);

/// `mangle`: after connection tracking, before any translation.
const MANGLE: i32 = -150;
/// Just before `dstnat`, where everybody translates.
const DSTNAT: i32 = -101;
/// `srcnat`; IPVS looks at what arrives two and one before it, and two and three after [`DSTNAT`] at what is sent (seen in
/// Linux 6.1).
const SRCNAT: i32 = 100;
const FILTER: i32 = 0;
/// Numbers that RFC 3692 keeps for experiments; no packet leaves with one.
const STAND_INS: [(Protocol, u8); 2] = [(Protocol::Tcp, 253), (Protocol::Udp, 254)];
