// SPDX-License-Identifier: Apache-2.0

//! A cluster with our tables on node-a, and a plan that can be changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroU32,
    sync::Arc,
    time::Duration,
};

use dataplane::{Applied, Config, Dataplane, Scope, nftables::Nftables};
use lab::{
    Answer, Lab, Layout, Reply, Route, Transport,
    address::{NODE_A, PODS_A, SERVICE_CIDR, Version, address_of},
};
use model::{
    Address, Affinity, Backend, Changes, Decision, Family, Forward, Frontend, Masquerade, NodePortScope,
    Plan, PlanBuilder, PodTraffic, Pool, Protocol, Reach, Role, ServiceKey, ServicePortName, Verdict,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// For what must not be answered.
pub(crate) const IMPATIENCE: Duration = Duration::from_millis(300);

pub(crate) struct Stage {
    pub(crate) lab: Lab,
    pub(crate) version: Version,
    pub(crate) nftables: Nftables,
    pub(crate) frontends: BTreeMap<Frontend, Decision>,
    pub(crate) scope: NodePortScope,
    pub(crate) loopback: bool,
}

/// Runs a test in a cluster of its own, in either family; skips it, with a printed line, where that is not
/// allowed. Under `CI` it must be allowed.
pub(crate) fn on_stage(test: &str, play: impl Fn(&mut Stage)) {
    for version in [Version::V4, Version::V6] {
        let lab = match Lab::build(Layout::default()) {
            Ok(lab) => lab,
            Err(error) if std::env::var_os("CI").is_none() => {
                println!("skipped {test}: no lab: {error}");
                return;
            }
            Err(error) => panic!("{test}: no lab: {error}"),
        };
        let open = || Nftables::open(&Config::default()).unwrap();
        let nftables = lab.netns("node-a").unwrap().run(open).unwrap();
        let scope = NodePortScope::All;
        let mut stage = Stage { lab, version, nftables, frontends: BTreeMap::new(), scope, loopback: false };
        stage.serve();
        play(&mut stage);
    }
}

impl Stage {
    /// Every pod, and node-a itself, answers on port 8080.
    fn serve(&mut self) {
        for name in ["a1", "a2", "a3", "b1", "b2", "node-a"] {
            for transport in [Transport::Tcp, Transport::Udp, Transport::Sctp] {
                let at = SocketAddr::new(self.address(name), 8080);
                self.lab.respond(name, transport, at).unwrap();
            }
        }
    }

    pub(crate) fn family(&self) -> Family {
        if self.version == Version::V4 { Family::V4 } else { Family::V6 }
    }

    /// The address of somebody by name, or of an IPv4 address, in this version.
    pub(crate) fn address(&self, name: &str) -> IpAddr {
        let v4 = address_of(name).unwrap_or_else(|| name.parse::<Ipv4Addr>().unwrap());
        self.version.address(v4)
    }

    pub(crate) fn at(&self, address: &str, protocol: Protocol, port: u16) -> Frontend {
        Frontend { address: Address::Ip(self.address(address)), protocol, port }
    }

    pub(crate) fn node_port(&self, protocol: Protocol, port: u16) -> Frontend {
        Frontend { address: Address::NodePort(self.family()), protocol, port }
    }

    pub(crate) fn forward(&self, names: &[&str], masquerade: Masquerade) -> Verdict {
        let backend = |name: &&str| Backend {
            address: self.address(name),
            port: 8080,
            local: name.starts_with('a') || *name == "node-a",
            weight: 1,
        };
        let mut backends: Vec<Backend> = names.iter().map(backend).collect();
        backends.sort();
        Verdict::Forward(Forward { pool: Arc::new(Pool { backends: backends.into() }), masquerade })
    }

    pub(crate) fn plan(&self) -> Plan {
        let net = |range: lab::address::Range| {
            let address = self.version.address(range.base);
            ipnet::IpNet::new(address, self.version.prefix(range.bits)).unwrap()
        };
        let mut builder = PlanBuilder::new()
            .pod_traffic(self.family(), PodTraffic::Source(net(PODS_A)))
            .service_cidr(net(SERVICE_CIDR))
            .node_ports(self.family(), self.scope.clone());
        if self.loopback {
            builder = builder.loopback_node_ports(self.family());
        }
        let frontends = self.frontends.clone().into_iter();
        frontends.fold(builder, |builder, (frontend, decision)| builder.frontend(frontend, decision)).build()
    }

    /// Makes a change and puts it into force.
    pub(crate) fn set(&mut self, frontend: Frontend, decision: Decision) -> Applied {
        let before = self.plan();
        self.frontends.insert(frontend, decision);
        let after = self.plan();
        let ips = |plan: &Plan| plan.cluster_ips().collect::<BTreeSet<IpAddr>>();
        let locals = |plan: &Plan| plan.local_backends().collect::<BTreeSet<IpAddr>>();
        let changes = Changes {
            frontends: vec![frontend],
            cluster_ips: (&ips(&before) ^ &ips(&after)).into_iter().collect(),
            local_backends: (&locals(&before) ^ &locals(&after)).into_iter().collect(),
            ..Changes::default()
        };
        self.apply(&after, Scope::Only(&changes))
    }

    pub(crate) fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Applied {
        let node = self.lab.netns("node-a").unwrap();
        let nftables = &mut self.nftables;
        node.run(|| nftables.apply(plan, scope).unwrap()).unwrap()
    }

    pub(crate) fn route(&self, from: &str, to: &str, port: u16, transport: Transport) -> Route {
        let source = self.address(if from == "node-a" { "192.168.0.1" } else { from });
        Route { source, destination: SocketAddr::new(self.address(to), port), transport }
    }

    /// Opens a connection and asks who is there.
    pub(crate) fn ask(&self, from: &str, to: &str, port: u16, transport: Transport) -> Answer {
        self.lab.ask(from, self.route(from, to, port, transport), PATIENCE).unwrap()
    }

    pub(crate) fn reply(&self, from: &str, to: &str, port: u16, transport: Transport) -> Reply {
        match self.ask(from, to, port, transport) {
            Answer::Answered(reply) => reply,
            other => panic!("{from} to {to}:{port} {transport:?}: {other:?}\n{}", self.describe()),
        }
    }

    /// Asks, and wants no answer at all.
    pub(crate) fn assert_silence(&self, from: &str, to: &str, port: u16, transport: Transport) {
        let answer = self.lab.ask(from, self.route(from, to, port, transport), IMPATIENCE).unwrap();
        assert_eq!(answer, Answer::TimedOut, "{from} to {to}:{port}");
    }

    /// Who answered how often.
    pub(crate) fn tally(&self, from: &str, to: &str, port: u16, asked: u32) -> BTreeMap<String, u32> {
        let mut tally = BTreeMap::new();
        for _ in 0..asked {
            *tally.entry(self.reply(from, to, port, Transport::Tcp).by).or_default() += 1;
        }
        tally
    }

    fn describe(&self) -> String {
        let node = self.lab.netns("node-a").unwrap();
        node.run(|| Nftables::open(&Config::default()).unwrap().dump().unwrap()).unwrap()
    }
}

pub(crate) fn decision(inside: Verdict, outside: Verdict) -> Decision {
    let service = ServiceKey { namespace: "default".into(), name: "web".into() };
    let service = ServicePortName { service, port: "http".into(), protocol: Protocol::Tcp };
    Decision {
        service: Arc::new(service),
        role: Role::ClusterIp,
        inside,
        outside,
        affinity: None,
        tuning: None,
        source_ranges: None,
        reach: Reach::Cluster,
        rank: 2,
    }
}

pub(crate) fn same(verdict: Verdict) -> Decision {
    decision(verdict.clone(), verdict)
}

pub(crate) fn sticky(secs: u32, decision: Decision) -> Decision {
    Decision { affinity: NonZeroU32::new(secs).map(|timeout_secs| Affinity { timeout_secs }), ..decision }
}

/// node-a's own address, as pods and clients see it.
pub(crate) fn is_node_a(stage: &Stage, address: IpAddr) -> bool {
    address == stage.version.address(NODE_A) || stage.lab.owner(address) == "node-a"
}
