// SPDX-License-Identifier: Apache-2.0

//! The rule and the route that make what is steered to us this node's own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use model::Family;
use netlink::{
    Transport,
    route::{LOCAL_TABLE, ListedRoute, MAIN_TABLE, MarkRule, Route, RouteKind, RouteSpec},
};

use crate::{
    Error,
    ipvs::marks::NUMBERS,
    names::{
        IPVS_LINK,
        userspace::{MARK, ORIGIN, PRIORITY, ROUTES},
    },
    nftables::wire,
};

/// What is told by the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marked {
    /// Our bit, whatever else there is.
    Anyhow,
    /// Our bit, but not what ipvs mode marks, which has that bit as well: as long as its chains are there, the kernel looks by
    /// the mark for the way to an endpoint, and would not find out of the node. It needs no rule either, since the link of
    /// that mode has all addresses.
    NotForIpvs,
}

/// Makes what is marked this node's own.
pub(super) fn add(family: Family) -> Result<(), Error> {
    let failed =
        |error| Error::kernel("add", format!("the routes of what is marked, {}", wire(family)), error);
    let mut route = Route::open().map_err(failed)?;
    add_over(&mut route, family).map_err(failed)
}

/// Removes rule and route; nothing where there is none.
pub(super) fn remove(family: Family) -> Result<(), Error> {
    let failed =
        |error| Error::kernel("delete", format!("the routes of what is marked, {}", wire(family)), error);
    let mut route = Route::open().map_err(failed)?;
    for marked in [Marked::Anyhow, Marked::NotForIpvs] {
        is_gone(route.delete_rule(&rule(family, marked))).map_err(failed)?;
    }
    is_gone(route.delete_route(&everything(family))).map_err(failed)?;
    remove_stand_ins(&mut route, family).map_err(failed)
}

/// Nothing is marked for IPVS any more, as the chains of that mode have gone. Nothing happens where nothing
/// is steered.
pub(crate) fn widen(family: Family) -> Result<(), Error> {
    let failed =
        |error| Error::kernel("change", format!("the rule of what is marked, {}", wire(family)), error);
    let mut route = Route::open().map_err(failed)?;
    if !route.routes(wire(family), ROUTES).map_err(failed)?.iter().any(is_everything) {
        return Ok(());
    }
    is_there(route.add_rule(&rule(family, Marked::Anyhow))).map_err(failed)?;
    is_gone(route.delete_rule(&rule(family, Marked::NotForIpvs))).map_err(failed)
}

fn add_over<T: Transport>(route: &mut Route<T>, family: Family) -> Result<(), netlink::Error> {
    let lo = route.link_index("lo")?;
    let marked = match route.link_index(IPVS_LINK) {
        Ok(_) => Marked::NotForIpvs,
        Err(_) => Marked::Anyhow,
    };
    // The route comes last, and says that all before it was done.
    let was_done = route.routes(wire(family), ROUTES)?.iter().any(is_everything);
    if was_done || family == Family::V6 {
        is_there(route.add_rule(&rule(family, marked)))?;
    } else {
        add_first_rule(route, lo, marked)?;
    }
    is_there(route.add_route(&everything(family).dev(lo)))
}

/// The kernel keeps the node's own IPv4 addresses in one tree with the main table, until there is a rule beside those that it
/// begins with. When the first one comes, it takes them out of that tree before it begins to look at the other: for a moment,
/// longer the more addresses there are, the node does not know itself (read in `fib4_rule_configure`, seen on Linux 6.18).
/// What arrives then is sent on, and if it belongs to a connection that is masqueraded, the kernel forgets the connection. So
/// the main table knows the addresses as well, until the rule is there. IPv6 has two trees from the beginning.
fn add_first_rule<T: Transport>(route: &mut Route<T>, lo: u32, marked: Marked) -> Result<(), netlink::Error> {
    let own = route.routes(wire(Family::V4), LOCAL_TABLE)?;
    let outcome = own
        .iter()
        .filter(|listed| listed.kind == Some(RouteKind::Local))
        .try_for_each(|listed| is_there(route.add_route(&stand_in(listed).dev(lo))))
        .and_then(|()| is_there(route.add_rule(&rule(Family::V4, marked))));
    outcome.and(remove_stand_ins(route, Family::V4))
}

/// Also those of a process that came no further.
fn remove_stand_ins<T: Transport>(route: &mut Route<T>, family: Family) -> Result<(), netlink::Error> {
    let ours: Vec<ListedRoute> =
        route.routes(wire(family), MAIN_TABLE)?.into_iter().filter(|it| it.origin == ORIGIN).collect();
    ours.iter().try_for_each(|listed| is_gone(route.delete_route(&stand_in(listed))))
}

fn stand_in(listed: &ListedRoute) -> RouteSpec {
    let (address, prefix_len) = listed.destination;
    RouteSpec {
        kind: RouteKind::Local,
        table: Some(MAIN_TABLE),
        origin: ORIGIN,
        ..RouteSpec::to(address, prefix_len)
    }
}

fn everything(family: Family) -> RouteSpec {
    let any: IpAddr = match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    RouteSpec { kind: RouteKind::Local, table: Some(ROUTES), ..RouteSpec::to(any, 0) }
}

fn is_everything(listed: &ListedRoute) -> bool {
    listed.kind == Some(RouteKind::Local) && listed.destination.1 == 0
}

fn rule(family: Family, marked: Marked) -> MarkRule {
    let mask = match marked {
        Marked::Anyhow => MARK,
        Marked::NotForIpvs => MARK | NUMBERS,
    };
    MarkRule { family: wire(family), priority: PRIORITY, mark: MARK, mask, table: ROUTES }
}

fn is_there(outcome: Result<(), netlink::Error>) -> Result<(), netlink::Error> {
    match outcome {
        Err(error) if !error.already_exists() => Err(error),
        _ => Ok(()),
    }
}

fn is_gone(outcome: Result<(), netlink::Error>) -> Result<(), netlink::Error> {
    match outcome {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        net::UdpSocket,
        sync::atomic::{AtomicBool, AtomicU64, Ordering},
        thread,
    };

    use netlink::{Netns, route::LinkKind};

    use super::*;

    /// A network namespace of its own, with some addresses; `None` without the privilege.
    fn node() -> Option<(Netns, Vec<IpAddr>)> {
        let netns = match Netns::new() {
            Ok(netns) => netns,
            Err(error) => {
                assert!(env::var_os("CI").is_none(), "no network namespace: {error}");
                println!("skipped: no network namespace: {error}");
                return None;
            }
        };
        let mut route = Route::open_in(&netns).expect("a socket");
        let lo = route.link_index("lo").expect("lo");
        route.set_up(lo, true).expect("up");
        let addresses: Vec<IpAddr> = (0..20).map(|host| IpAddr::from([10, 96, 0, host])).collect();
        for address in &addresses {
            route.add_address(lo, *address, 32).expect("an address");
        }
        Some((netns, addresses))
    }

    /// How often the node did not know an address of its own while `event` happened.
    fn misses_during(
        netns: &Netns,
        addresses: &[IpAddr],
        event: impl FnOnce(&mut Route) -> Result<(), netlink::Error>,
    ) -> u64 {
        let (ended, misses, asked) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                // Whoever connects asks for a route, and there is none but to the node itself. (To ask by netlink would not do:
                // it waits until the rule is there.)
                let client = netns.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)));
                let client = client.expect("entered").expect("a socket");
                while !ended.load(Ordering::Relaxed) {
                    for address in addresses {
                        let is_lost = client.connect((*address, 9)).is_err();
                        misses.fetch_add(u64::from(is_lost), Ordering::Relaxed);
                        asked.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            while asked.load(Ordering::Relaxed) < 100 {
                thread::yield_now();
            }
            let outcome = event(&mut Route::open_in(netns).expect("a socket"));
            let all = asked.load(Ordering::Relaxed) + 100;
            while asked.load(Ordering::Relaxed) < all {
                thread::yield_now();
            }
            ended.store(true, Ordering::Relaxed);
            outcome.expect("it is written");
        });
        misses.into_inner()
    }

    #[test]
    fn the_node_knows_itself_while_the_first_rule_comes() {
        // The kernel adds a first rule once in the life of a namespace. Without what stands in, most of these see a miss.
        for _ in 0..20 {
            let Some((netns, addresses)) = node() else { return };
            assert_eq!(misses_during(&netns, &addresses, |route| add_over(route, Family::V4)), 0);
        }
    }

    #[test]
    fn what_ipvs_mode_marks_is_left_alone_while_it_is_there() {
        let Some((netns, _)) = node() else { return };
        let mut route = Route::open_in(&netns).expect("a socket");
        let has = |marked| {
            let mut route = Route::open_in(&netns).expect("a socket");
            let rule = rule(Family::V4, marked);
            let is_there = route.add_rule(&rule).is_err_and(|error| error.already_exists());
            if !is_there {
                route.delete_rule(&rule).expect("it was just added");
            }
            is_there
        };
        let both = || [has(Marked::Anyhow), has(Marked::NotForIpvs)];
        route.add_link(IPVS_LINK, LinkKind::Bridge).expect("a link");
        for _ in 0..2 {
            add_over(&mut route, Family::V4).expect("it is written");
            assert_eq!(both(), [false, true]);
        }
        netns.run(|| remove(Family::V4)).expect("entered").expect("removed");
        assert_eq!(both(), [false, false]);
        add_over(&mut route, Family::V4).expect("it is written");
        assert_eq!(both(), [false, true]);
        for _ in 0..2 {
            netns.run(|| widen(Family::V4)).expect("entered").expect("it is written");
            assert_eq!(both(), [true, false]);
        }
        netns.run(|| remove(Family::V4)).expect("entered").expect("removed");
        netns.run(|| widen(Family::V4)).expect("entered").expect("nothing is there");
        assert_eq!(both(), [false, false]);
    }

    #[test]
    fn what_stood_in_goes() {
        let Some((netns, addresses)) = node() else { return };
        let mut route = Route::open_in(&netns).expect("a socket");
        let held = |route: &mut Route, table| route.routes(wire(Family::V4), table).expect("a listing");
        add_over(&mut route, Family::V4).expect("it is written");
        assert!(held(&mut route, MAIN_TABLE).is_empty());
        assert!(held(&mut route, ROUTES).iter().any(is_everything));
        // A second time there is nothing to do; and what a process left that ended in between goes.
        add_over(&mut route, Family::V4).expect("it is there");
        let lo = route.link_index("lo").expect("lo");
        let left = RouteSpec { origin: ORIGIN, table: Some(MAIN_TABLE), ..everything(Family::V4) };
        let left = RouteSpec { destination: (addresses[7], 32), ..left };
        route.add_route(&left.dev(lo)).expect("a route");
        route.delete_route(&everything(Family::V4)).expect("it was there");
        add_over(&mut route, Family::V4).expect("it is there");
        assert!(held(&mut route, MAIN_TABLE).is_empty());
        netns.run(|| remove(Family::V4)).expect("entered").expect("removed");
        assert!(held(&mut route, ROUTES).is_empty());
    }
}
