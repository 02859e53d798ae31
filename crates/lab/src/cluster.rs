// SPDX-License-Identifier: Apache-2.0

//! The cluster itself.
//!
//! ```text
//!   a1  a2  a3            b1  b2
//!    |   |   |             |   |
//!   pod-a1 ...            pod-b1 ...
//!  +-----------+         +---------+
//!  |  node-a   |---------| node-b  |      to-node-b
//!  |           |---------- node-c         to-node-c, with all its pods in one namespace
//!  +-----------+---------- client         to-client
//!        |
//!     outside                             to-outside, the default route
//! ```
//!
//! Every line is a veth pair with a host route on each side, so each packet is routed, nowhere bridged, and
//! everything that concerns node-a passes node-a, answers included.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use netlink::{
    Netns,
    route::{LinkKind, Route, RouteKind, RouteSpec},
};

use crate::{
    Error,
    address::{
        CLIENT, CLIENT2, CLIENTS, NODE_A, NODE_A_SECOND, NODE_B, NODE_C, OUTSIDE, PODS_A, PODS_B, PODS_C,
        Range, UNOWNED, Version, name_of,
    },
    flow::{self, Answer, Flow},
    respond::{Responders, Transport},
};

/// How many pods there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub pods_a: u8,
    pub pods_b: u8,
}

impl Default for Layout {
    fn default() -> Layout {
        Layout { pods_a: 3, pods_b: 2 }
    }
}

/// A cluster in namespaces that only this process can reach. All of it goes when this is dropped, and when the
/// process ends, however it ends.
#[derive(Debug)]
pub struct Lab {
    hosts: BTreeMap<String, Netns>,
    responders: Responders,
    answering: HashSet<(String, Transport, SocketAddr)>,
    extra: Vec<IpAddr>,
}

impl Lab {
    /// Builds the cluster; takes some hundredths of a second, and needs CAP_SYS_ADMIN and CAP_NET_ADMIN.
    pub fn build(layout: Layout) -> Result<Lab, Error> {
        let mut lab = Lab {
            hosts: BTreeMap::new(),
            responders: Responders::start()?,
            answering: HashSet::new(),
            extra: Vec::new(),
        };
        let pods = |letter, count| (1..=count).map(move |n| format!("{letter}{n}"));
        let others = ["node-a", "node-b", "node-c", "client", "outside"].map(str::to_owned);
        for name in others.into_iter().chain(pods('a', layout.pods_a)).chain(pods('b', layout.pods_b)) {
            let netns = Netns::new()?;
            netns.run(|| prepare(&name))??;
            lab.hosts.insert(name, netns);
        }
        lab.connect(Cable {
            router: "node-a",
            link: "to-node-b",
            host: "node-b",
            own: &[NODE_B],
            behind: &[PODS_B],
        })?;
        lab.connect(Cable {
            router: "node-a",
            link: "to-node-c",
            host: "node-c",
            own: &[NODE_C],
            behind: &[PODS_C],
        })?;
        let aliases = [Range { base: CLIENT2, bits: 32 }, CLIENTS];
        lab.connect(Cable {
            router: "node-a",
            link: "to-client",
            host: "client",
            own: &[CLIENT],
            behind: &aliases,
        })?;
        lab.connect(Cable {
            router: "node-a",
            link: "to-outside",
            host: "outside",
            own: &[OUTSIDE],
            behind: &[EVERYTHING],
        })?;
        for (router, range, count) in [("node-a", PODS_A, layout.pods_a), ("node-b", PODS_B, layout.pods_b)] {
            for n in 1..=count {
                let name = format!("{}{n}", &router[5..]);
                let link = format!("pod-{name}");
                let own = [range.nth(u32::from(n))];
                lab.connect(Cable { router, link: &link, host: &name, own: &own, behind: &[] })?;
            }
        }
        lab.answer_for("node-c", &[PODS_C])?;
        lab.answer_for("client", &aliases)?;
        lab.answer_for("outside", &UNOWNED)?;
        lab.add_second_address()?;
        Ok(lab)
    }

    /// The namespace somebody lives in: `a1`, `node-a`, `c7`, `client2`.
    pub fn netns(&self, name: &str) -> Result<&Netns, Error> {
        let host = match name {
            "client2" | "clients" => "client",
            _ if name.starts_with('c') && name != "client" => "node-c",
            _ => name,
        };
        self.hosts.get(host).ok_or_else(|| Error::Unknown(name.to_owned()))
    }

    /// Makes somebody answer on an address and port, from now on until the end of the lab. Asking again for the
    /// same is free.
    pub fn respond(&mut self, name: &str, transport: Transport, at: SocketAddr) -> Result<(), Error> {
        let key = (name.to_owned(), transport, at);
        if self.answering.contains(&key) {
            return Ok(());
        }
        let netns = self.netns(name)?.try_clone()?;
        self.responders.add(&netns, name, transport, at)?;
        self.answering.insert(key);
        Ok(())
    }

    /// Opens a flow from where `name` lives. The outer error is the machine's, the inner one the answer.
    pub fn open(
        &self,
        name: &str,
        route: flow::Route,
        patience: Duration,
    ) -> Result<Result<Flow, Answer>, Error> {
        Ok(self.netns(name)?.run(|| Flow::open(route, patience))?)
    }

    /// Opens a flow, asks once, and closes it.
    pub fn ask(&self, name: &str, route: flow::Route, patience: Duration) -> Result<Answer, Error> {
        Ok(match self.open(name, route, patience)? {
            Ok(mut flow) => flow.ask(patience),
            Err(answer) => answer,
        })
    }

    /// Who answers for an address if nobody translates it: its owner, or the outside.
    pub fn owner(&self, address: IpAddr) -> String {
        if self.extra.contains(&address) || address.is_loopback() {
            return "node-a".to_owned();
        }
        match name_of(address) {
            Some(name) if name == "node-a2" => "node-a".to_owned(),
            Some(name) => name,
            None => "outside".to_owned(),
        }
    }

    /// Gives node-a these addresses besides its usual ones, and takes away those it had so before.
    pub fn readdress(&mut self, extra: &[IpAddr]) -> Result<(), Error> {
        let mut route = Route::open_in(self.netns("node-a")?)?;
        let loopback = route.link_index("lo")?;
        for address in self.extra.iter().filter(|address| !extra.contains(address)) {
            route.delete_address(loopback, *address, full(*address))?;
        }
        for address in extra.iter().filter(|address| !self.extra.contains(address)) {
            route.add_address(loopback, *address, full(*address))?;
        }
        self.extra = extra.to_vec();
        Ok(())
    }

    /// A veth pair between a router and a host, and routes in both directions.
    fn connect(&mut self, cable: Cable<'_>) -> Result<(), Error> {
        let host = self.netns(cable.host)?;
        let mut near = Route::open_in(self.netns(cable.router)?)?;
        let mut far = Route::open_in(host)?;
        near.add_link(cable.link, LinkKind::Veth { peer: UPLINK, netns: Some(host) })?;
        let (near_link, far_link) = (near.link_index(cable.link)?, far.link_index(UPLINK)?);
        near.set_up(near_link, true)?;
        far.set_up(far_link, true)?;
        // The kernel adds link-local addresses when it hears that the cable is plugged in, which can be a moment
        // later; neighbours are asked for with these, and without one the first packet would wait a second.
        near.add_address(near_link, link_local(1), 64)?;
        far.add_address(far_link, link_local(2), 64)?;

        let router = if cable.router == "node-a" { NODE_A } else { NODE_B };
        for version in Version::BOTH {
            let gateway = version.address(router);
            near.add_address(near_link, gateway, full(gateway))?;
            for own in cable.own.iter().map(|v4| version.address(*v4)) {
                far.add_address(far_link, own, full(own))?;
                near.add_route(&RouteSpec::to(own, full(own)).dev(near_link))?;
            }
            for range in cable.behind {
                let first = version.address(cable.own[0]);
                near.add_route(&RouteSpec { onlink: true, ..to(*range, version).via(first).dev(near_link) })?;
            }
            far.add_route(&RouteSpec { onlink: true, ..to(EVERYTHING, version).via(gateway).dev(far_link) })?;
        }
        Ok(())
    }

    /// Makes a host take every address of these ranges for its own.
    fn answer_for(&self, name: &str, ranges: &[Range]) -> Result<(), Error> {
        let mut route = Route::open_in(self.netns(name)?)?;
        let loopback = route.link_index("lo")?;
        for (range, version) in ranges.iter().flat_map(|range| Version::BOTH.map(|version| (*range, version)))
        {
            route.add_route(&RouteSpec { kind: RouteKind::Local, ..to(range, version).dev(loopback) })?;
        }
        Ok(())
    }

    fn add_second_address(&self) -> Result<(), Error> {
        let mut route = Route::open_in(self.netns("node-a")?)?;
        let link = route.link_index("to-client")?;
        for version in Version::BOTH {
            let second = version.address(NODE_A_SECOND);
            route.add_address(link, second, full(second))?;
        }
        Ok(())
    }
}

/// A line of the picture above.
struct Cable<'a> {
    router: &'a str,
    /// The router's end.
    link: &'a str,
    host: &'a str,
    /// What the host owns.
    own: &'a [Ipv4Addr],
    /// What is reached through the host.
    behind: &'a [Range],
}

/// The host's end of every cable.
const UPLINK: &str = "eth0";
const EVERYTHING: Range = Range::new([0, 0, 0, 0], 0);

fn to(range: Range, version: Version) -> RouteSpec {
    match range.bits {
        // All addresses, not only those under the plan's prefix.
        0 => RouteSpec::to(version.address(range.base), 0),
        bits => RouteSpec::to(version.address(range.base), version.prefix(bits)),
    }
}

fn link_local(host: u16) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, host))
}

fn full(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

/// Settings of a new namespace, made by a thread inside it.
fn prepare(name: &str) -> Result<(), Error> {
    let is_router = matches!(name, "node-a" | "node-b");
    // Forwarding first: switching it resets others.
    let forward = if is_router { "1" } else { "0" };
    write("ipv4/ip_forward", forward)?;
    write("ipv6/conf/all/forwarding", forward)?;
    for scope in ["all", "default"] {
        write(&format!("ipv4/conf/{scope}/rp_filter"), "0")?;
        write(&format!("ipv4/conf/{scope}/send_redirects"), "0")?;
        write(&format!("ipv6/conf/{scope}/disable_ipv6"), "0")?;
        write(&format!("ipv6/conf/{scope}/accept_dad"), "0")?;
        write(&format!("ipv6/conf/{scope}/accept_ra"), "0")?;
    }
    // Rejections are what is tested; they must not be rationed.
    write("ipv4/icmp_ratelimit", "0")?;
    write("ipv6/icmp/ratelimit", "0")?;
    // Those who answer for whole ranges bind to addresses that IPv6 does not count as theirs.
    write("ipv4/ip_nonlocal_bind", "1")?;
    write("ipv6/ip_nonlocal_bind", "1")?;
    let mut route = Route::open()?;
    let loopback = route.link_index("lo")?;
    Ok(route.set_up(loopback, true)?)
}

fn write(setting: &str, value: &str) -> Result<(), Error> {
    // The file is that of the calling thread's namespace.
    let path = format!("/proc/sys/net/{setting}");
    fs::write(&path, value).map_err(|error| Error::Sysctl { path, error })
}
