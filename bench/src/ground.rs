// SPDX-License-Identifier: Apache-2.0

//! The network a subject is measured in: four namespaces without names, gone with the last handle to them.
//!
//! ```text
//!   control 192.0.2.1 ---- 192.0.2.2 node 10.255.255.1 ---- 10.255.255.2 client
//!   (API server, etcd)          (the subject)  10.255.254.1 ---- 10.255.254.2 sink
//!                                                        (answers for every endpoint)
//! ```
//!
//! The node sends what it has no better route for to the sink, and the sink refuses connections to service
//! addresses: an unserved service costs a prober a fraction of a millisecond, not a timeout. (A route that is
//! unreachable would answer once a second only.)

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    process::{Child, Command},
    sync::Arc,
};

use anyhow::{Context, Result};
use netlink::{
    Netns,
    route::{LinkKind, Route, RouteKind, RouteSpec},
};

use crate::objects::{ENDPOINTS, SERVICES};

/// The API server's address, as the node sees it.
pub const CONTROL: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The node's InternalIP.
pub const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// The node's address on the client's cable.
pub const NODE_TO_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 2);
const NODE_TO_SINK: Ipv4Addr = Ipv4Addr::new(10, 255, 254, 1);
/// The sink's own address.
pub const SINK: Ipv4Addr = Ipv4Addr::new(10, 255, 254, 2);

/// A network namespace; gone with its last handle and process.
#[derive(Clone, Debug)]
pub struct Namespace(Arc<Netns>);

impl Namespace {
    /// A new one with its loopback up.
    pub fn new() -> Result<Namespace> {
        let namespace =
            Namespace(Arc::new(Netns::new().context("making a network namespace (root is needed)")?));
        let mut route = namespace.route()?;
        let loopback = route.link_index("lo")?;
        route.set_up(loopback, true)?;
        Ok(namespace)
    }

    /// Runs `work` on a thread inside; what it starts, threads and programs, stays inside.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.0.run(work).context("entering a network namespace")
    }

    /// Starts a program inside.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        let program = command.get_program().to_string_lossy().into_owned();
        self.run(|| command.spawn())?.with_context(|| format!("starting {program}"))
    }

    /// Writes a setting below /proc/sys/net of this namespace.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/{name}");
        self.run(|| fs::write(&path, value))?.with_context(|| format!("writing {value} to {path}"))
    }

    /// A link sends no more than so many gigabits a second from now on.
    fn limit(&self, link: &str, gbit: u32) -> Result<()> {
        let rate = format!("{gbit}gbit");
        // Room for a few of the largest segments, so that they need not be cut.
        let bucket = ["tbf", "rate", &rate, "burst", "1mb", "latency", "5ms"];
        let mut command = Command::new("tc");
        command.args(["qdisc", "replace", "dev", link, "root"]).args(bucket);
        let status = self.run(|| command.status())?.context("running tc, of the package iproute2")?;
        anyhow::ensure!(status.success(), "tc cannot limit {link}");
        Ok(())
    }

    fn route(&self) -> Result<Route> {
        Ok(Route::open_in(&self.0)?)
    }

    /// A cable to `other`, with both ends up and an address on each.
    fn link(
        &self,
        (name, address): Plug<'_>,
        other: &Namespace,
        (other_name, other_address): Plug<'_>,
    ) -> Result<()> {
        let kind = LinkKind::Veth { peer: other_name, netns: Some(&other.0) };
        self.route()?.add_link(name, kind).with_context(|| format!("adding the link {name}"))?;
        for (namespace, name, address) in [(self, name, address), (other, other_name, other_address)] {
            let mut route = namespace.route()?;
            let index = route.link_index(name)?;
            route.set_up(index, true)?;
            route.add_address(index, address.into(), 24)?;
        }
        Ok(())
    }

    fn default_route(&self, gateway: Ipv4Addr) -> Result<()> {
        let everywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Ok(self.route()?.add_route(&RouteSpec::to(everywhere, 0).via(gateway.into()))?)
    }

    /// Every address of a network is this namespace's own.
    fn own(&self, (network, bits): (Ipv4Addr, u8)) -> Result<()> {
        let mut route = self.route()?;
        let loopback = route.link_index("lo")?;
        let spec = RouteSpec { kind: RouteKind::Local, ..RouteSpec::to(network.into(), bits).dev(loopback) };
        Ok(route.add_route(&spec)?)
    }
}

/// One end of a cable: its name and address.
type Plug<'a> = (&'a str, Ipv4Addr);

/// The namespaces of one subject.
pub struct Ground {
    pub node: Namespace,
    pub client: Namespace,
    pub sink: Namespace,
    uplink: Option<Namespace>,
}

impl Ground {
    /// New namespaces, linked to `control` where there is one.
    pub fn new(control: Option<&Namespace>) -> Result<Ground> {
        let (node, client, sink) = (Namespace::new()?, Namespace::new()?, Namespace::new()?);
        let ground = Ground { node, client, sink, uplink: control.cloned() };
        let Ground { node, client, sink, .. } = &ground;
        node.sysctl("ipv4/ip_forward", "1")?;
        // A rule that rejects is to be answered as often as it is asked.
        node.sysctl("ipv4/icmp_ratelimit", "0")?;
        node.link(("client", NODE_TO_CLIENT), client, ("eth0", CLIENT))?;
        node.link(("sink", NODE_TO_SINK), sink, ("eth0", SINK))?;
        node.default_route(SINK)?;
        client.default_route(NODE_TO_CLIENT)?;
        client.sysctl("ipv4/ip_local_port_range", "1024 65535")?;
        sink.default_route(NODE_TO_SINK)?;
        sink.own(ENDPOINTS)?;
        sink.own(SERVICES)?;
        if let Some(control) = control {
            control.link((UPLINK, CONTROL), node, ("control", NODE))?;
        }
        Ok(ground)
    }

    /// The cables of client and sink carry no more than so many gigabits a second, each way.
    pub fn limit(&self, gbit: u32) -> Result<()> {
        let Ground { node, client, sink, .. } = self;
        [(node, "client"), (client, "eth0"), (node, "sink"), (sink, "eth0")]
            .into_iter()
            .try_for_each(|(namespace, link)| namespace.limit(link, gbit))
    }
}

impl Drop for Ground {
    /// The kernel takes namespaces apart later; the next subject's link has the same name and addresses.
    fn drop(&mut self) {
        if let Some(mut route) = self.uplink.as_ref().and_then(|control| control.route().ok()) {
            // Absent when the ground was not finished.
            let _ = route.link_index(UPLINK).and_then(|index| route.delete_link(index));
        }
    }
}

const UPLINK: &str = "node";
