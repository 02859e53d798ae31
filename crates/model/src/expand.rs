// SPDX-License-Identifier: Apache-2.0

//! A service's frontends, and what becomes of packets to each.

use std::{collections::BTreeSet, net::IpAddr, num::NonZeroU32, sync::Arc};

use hashbrown::HashSet;
use ipnet::IpNet;

use crate::{
    claims::Claim,
    decision::{
        Address, Affinity, Backend, Decision, Forward, Frontend, HealthCheck, Masquerade, Pool, Reach, Role,
        Verdict,
    },
    family::{Family, PerFamily, Protocol},
    select::{Candidate, Selection, Uses, merge, select},
    service::{Service, ServiceKind, ServicePort, ServicePortName, SourceRanges, TrafficPolicy},
    slice::Slice,
    vantage::{Vantage, disjoint},
    world::World,
};

/// What a service asks of this node. A service that is not proxied asks nothing.
#[derive(Debug, Default)]
pub(crate) struct Expansion {
    pub(crate) claims: Vec<(Frontend, Claim)>,
    pub(crate) cluster_ips: Vec<IpAddr>,
    /// Addresses of reachable backends on this node, sorted, without duplicates.
    pub(crate) local_backends: Vec<IpAddr>,
    pub(crate) health: Option<HealthCheck>,
}

pub(crate) fn expand(service: &Service, world: &World, vantage: &Vantage) -> Expansion {
    let slices = world.slices(&service.key);
    let families = PerFamily::from_fn(|family| {
        world.settings().families[family]
            && service.kind != ServiceKind::ExternalName
            && service.cluster_ips[family].is_some()
    });
    let mut expansion = Expansion { health: health(service, world, families), ..Expansion::default() };
    for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
        expansion.cluster_ips.extend(service.cluster_ips[family]);
        let scene = Scene { service, world, vantage, family };
        for port in distinct_ports(&service.ports) {
            scene.expand_port(port, slices, &mut expansion);
        }
    }
    expansion.local_backends.sort_unstable();
    expansion.local_backends.dedup();
    expansion
}

/// One service in one family, seen from here.
struct Scene<'a> {
    service: &'a Service,
    world: &'a World,
    vantage: &'a Vantage,
    family: Family,
}

impl Scene<'_> {
    fn expand_port(&self, port: &ServicePort, slices: &[Slice], expansion: &mut Expansion) {
        let place = (self.family, &*port.name, port.protocol);
        let weigh = |slice: &Slice, record| slice.weight(record, &self.service.weights, self.world.places());
        let candidates = merge(slices, place, self.vantage.zone.as_deref(), weigh);
        let selection = select(&candidates, self.uses(port));
        let local = selection.reachable.iter().filter(|backend| backend.local);
        expansion.local_backends.extend(local.map(|backend| backend.address));

        let serving = serving(&candidates, port.protocol);
        let paths = self.paths(selection);
        let name = Arc::new(ServicePortName {
            service: self.service.key.clone(),
            port: port.name.clone(),
            protocol: port.protocol,
        });
        let rank = rank(self.service);
        let affinity = affinity(self.service);
        let claims = &mut expansion.claims;
        let mut claimed = HashSet::new();
        for (role, address, number) in self.addresses(port) {
            let frontend = Frontend { address, protocol: port.protocol, port: number };
            if !claimed.insert(frontend) {
                continue;
            }
            let [inside, outside] = match role {
                Role::ClusterIp => [&paths.internal, &paths.internal],
                Role::ExternalIp | Role::LoadBalancer | Role::NodePort => {
                    [&paths.external_inside, &paths.external_outside]
                }
            };
            let decision = Decision {
                service: name.clone(),
                role,
                inside: inside.clone(),
                outside: outside.clone(),
                affinity,
                tuning: self.service.tuning.clone(),
                source_ranges: self.source_ranges(role, address),
                reach: self.reach(role),
                rank,
            };
            let created_secs = self.service.created_secs;
            claims.push((frontend, Claim { decision, created_secs, serving: serving.clone() }));
        }
    }

    fn reach(&self, role: Role) -> Reach {
        let policy = match role {
            Role::ClusterIp => self.service.internal_policy,
            Role::ExternalIp | Role::LoadBalancer | Role::NodePort => external_policy(self.service),
        };
        match policy {
            TrafficPolicy::Cluster => Reach::Cluster,
            TrafficPolicy::Local => Reach::Node,
        }
    }

    /// Where packets for a port go to, in the order in which the roles win when they share an address.
    fn addresses(&self, port: &ServicePort) -> impl Iterator<Item = (Role, Address, u16)> {
        let is_ours = |ip: &&IpAddr| Family::of(**ip) == self.family;
        let serves_external_ips = self.world.settings().external_ips;
        let external = self.service.external_ips.iter().filter(move |_| serves_external_ips);
        let number = port.port;
        let at = move |role| move |ip: &IpAddr| (role, Address::Ip(*ip), number);
        let node_port = port.node_port.filter(|number| *number != 0);

        let cluster = self.service.cluster_ips[self.family].as_ref().into_iter().map(at(Role::ClusterIp));
        let load_balancer = self.service.load_balancer_ips.iter().filter(is_ours);
        cluster
            .chain(load_balancer.map(at(Role::LoadBalancer)))
            .chain(external.filter(is_ours).map(at(Role::ExternalIp)))
            .chain(node_port.map(|number| (Role::NodePort, Address::NodePort(self.family), number)))
    }

    fn uses(&self, port: &ServicePort) -> Uses {
        let is_ours = |ip: &IpAddr| Family::of(*ip) == self.family;
        let is_external = port.node_port.is_some_and(|number| number != 0)
            || self.service.load_balancer_ips.iter().any(is_ours)
            || self.service.external_ips.iter().any(is_ours);
        let keeps_inside = self.service.internal_policy == TrafficPolicy::Local;
        let keeps_outside = external_policy(self.service) == TrafficPolicy::Local;
        Uses { cluster: !keeps_inside || is_external, local: keeps_inside || (keeps_outside && is_external) }
    }

    /// The verdicts for traffic to the cluster IP and to external addresses, by policy.
    fn paths(&self, selection: Selection) -> Paths {
        let has_any = selection.has_any;
        let tells_pods = self.vantage.pod_traffic[self.family].is_some();
        let cluster = pool(selection.cluster);
        let local = match (&cluster, selection.local) {
            (Some(cluster), local) if *cluster.backends == *local => Some(cluster.clone()),
            (_, local) => pool(local),
        };
        // Nothing usable anywhere is refused; something usable, but not for this traffic, is kept silent, so
        // that a client tries again elsewhere instead of giving up.
        let to = |pool: &Option<Arc<Pool>>, masquerade| match pool {
            _ if !has_any => Verdict::Reject,
            Some(pool) => Verdict::Forward(Forward { pool: pool.clone(), masquerade }),
            None => Verdict::Drop,
        };

        let internal_masquerade = match (self.world.settings().masquerade_all, tells_pods) {
            (true, _) => Masquerade::Always,
            (false, true) => Masquerade::OffPods,
            (false, false) => Masquerade::Never,
        };
        let internal = match self.service.internal_policy {
            TrafficPolicy::Cluster => to(&cluster, internal_masquerade),
            TrafficPolicy::Local => to(&local, internal_masquerade),
        };
        let (external_inside, external_outside) = match external_policy(self.service) {
            TrafficPolicy::Cluster => {
                let any = to(&cluster, Masquerade::Always);
                (any.clone(), any)
            }
            TrafficPolicy::Local => {
                // Pods and processes of this node take the short way to all endpoints. Where pods cannot be
                // told, only the processes are inside, and no pod's address is at stake.
                let inside = if tells_pods { Masquerade::OffPods } else { Masquerade::Always };
                (to(&cluster, inside), to(&local, Masquerade::Never))
            }
        };
        Paths { internal, external_inside, external_outside }
    }

    /// Ranges restrict the addresses of load balancers, and nothing else.
    fn source_ranges(&self, role: Role, address: Address) -> Option<Arc<[IpNet]>> {
        let (Role::LoadBalancer, Address::Ip(vip), SourceRanges::Only(written)) =
            (role, address, &self.service.source_ranges)
        else {
            return None;
        };
        let mut nets: Vec<IpNet> =
            written.nets.iter().copied().filter(|net| Family::of(net.addr()) == self.family).collect();
        // Ranges of the other family only do not restrict this one; ranges of which none could be read do.
        if nets.is_empty() && !written.nets.is_empty() && !written.unread[self.family] {
            return None;
        }
        // A node that has the load balancer's address on an interface of its own connects from it.
        let is_admitted = |ip: IpAddr| nets.iter().any(|net| net.contains(&ip));
        if self.vantage.node_ips[self.family].is_some_and(is_admitted) {
            nets.push(IpNet::from(vip));
        }
        let nets = disjoint(&nets);
        let is_everyone = nets.iter().any(|net| net.prefix_len() == 0);
        (!is_everyone).then(|| nets.into())
    }
}

/// The verdicts of one service port.
struct Paths {
    internal: Verdict,
    external_inside: Verdict,
    external_outside: Verdict,
}

fn pool(backends: Vec<Backend>) -> Option<Arc<Pool>> {
    (!backends.is_empty()).then(|| Arc::new(Pool { backends: backends.into() }))
}

/// A port whose name and protocol occur again later is not served: the last one counts.
fn distinct_ports(ports: &[ServicePort]) -> impl Iterator<Item = &ServicePort> {
    ports.iter().enumerate().filter_map(|(at, port)| {
        let comes_again =
            ports[at + 1..].iter().any(|later| later.name == port.name && later.protocol == port.protocol);
        (!comes_again).then_some(port)
    })
}

/// The external policy that holds: Local needs a way in from outside that the type allows.
fn external_policy(service: &Service) -> TrafficPolicy {
    match service.kind {
        ServiceKind::LoadBalancer | ServiceKind::NodePort => service.external_policy,
        ServiceKind::ClusterIp if !service.external_ips.is_empty() => service.external_policy,
        ServiceKind::ClusterIp | ServiceKind::ExternalName => TrafficPolicy::Cluster,
    }
}

/// The API asks for a timeout of one second at least; 0 and nothing both mean its default of three hours.
fn affinity(service: &Service) -> Option<Affinity> {
    const DEFAULT_SECS: NonZeroU32 = NonZeroU32::new(10_800).expect("10,800 is not 0");
    let written = service.affinity_secs?;
    Some(Affinity { timeout_secs: NonZeroU32::new(written).unwrap_or(DEFAULT_SECS) })
}

/// Flows of protocols without connections go on as long as their endpoint serves, whatever the policies say.
fn serving(candidates: &[Candidate], protocol: Protocol) -> Option<Arc<[Backend]>> {
    let is_tracked = protocol != Protocol::Tcp;
    is_tracked.then(|| candidates.iter().filter(|c| c.serving).map(|c| c.backend).collect())
}

/// What the rest of the cluster needs to start is served first: the API server, then the cluster DNS. That is
/// `kube-dns` or `coredns` in `kube-system`, or whatever there has a port 53 named `dns` or `dns-tcp`.
fn rank(service: &Service) -> u8 {
    let is_dns_port = |port: &ServicePort| port.port == 53 && matches!(&*port.name, "dns" | "dns-tcp");
    match (&*service.key.namespace, &*service.key.name) {
        ("default", "kubernetes") => 0,
        ("kube-system", "kube-dns" | "coredns") => 1,
        ("kube-system", _) if service.ports.iter().any(is_dns_port) => 1,
        _ => 2,
    }
}

/// Only a load balancer that must find the nodes with local endpoints asks for it.
/// An endpoint that gets no new connections is none it should find.
fn health(service: &Service, world: &World, families: PerFamily<bool>) -> Option<HealthCheck> {
    let is_asked = service.kind == ServiceKind::LoadBalancer
        && service.external_policy == TrafficPolicy::Local
        && (families.v4 || families.v6);
    let port = service.health_check_node_port.filter(|port| is_asked && *port != 0)?;
    let slices = world.slices(&service.key);
    let weigh = |slice: &Slice, record| slice.weight(record, &service.weights, world.places());
    let local_endpoints = PerFamily::from_fn(|family| {
        let of_family = slices.iter().filter(|slice| families[family] && slice.family == family);
        // Every port that slices have, be it none of the service's, as kube-proxy counts.
        let ports: BTreeSet<(&str, Protocol)> =
            of_family.flat_map(|slice| &slice.ports).map(|port| (&*port.name, port.protocol)).collect();
        let candidates = ports
            .into_iter()
            .flat_map(|(name, protocol)| merge(slices, (family, name, protocol), None, weigh));
        let local_ready = candidates.filter(|candidate| candidate.ready && candidate.backend.local);
        let addresses: BTreeSet<IpAddr> = local_ready.map(|candidate| candidate.backend.address).collect();
        u32::try_from(addresses.len()).unwrap_or(u32::MAX)
    });
    Some(HealthCheck { port, local_endpoints, families })
}
