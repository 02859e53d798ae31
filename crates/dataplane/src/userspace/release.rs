// SPDX-License-Identifier: Apache-2.0

//! Lets go of new connections, and keeps the way of open ones until their process ends.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    sync::atomic::Ordering,
};

use model::{Address, Family, Frontend, Plan, Protocol};
use netlink::{
    Transport,
    conntrack::{Conntrack, Filter, Flow, Tuple},
    nft::{Batch, Delete, Expr, Nft},
};

use super::{
    Carrier,
    bind::{Flag, delete, is_raised},
    elements::Place,
    kernel, routes,
};
use crate::{
    Error,
    leftovers::Report,
    names::userspace::{DRAINS, LINK, LISTENS, STEER, STEER_INSIDE, TABLE},
    nftables::wire,
};

/// From now on new connections are no longer steered to this process, as somebody else serves them; those that are open
/// go on. In the network namespace of this thread.
pub fn stand_back(plan: &Plan, carrier: &Carrier) -> Result<(), Error> {
    let failed = |error| Error::kernel("let go of", format!("table {TABLE}"), error);
    let mut nft = Nft::open().map_err(failed)?;
    carrier.0.farewell.store(nft.port(), Ordering::Relaxed);
    for family in Family::BOTH {
        match let_go(&mut nft, family) {
            Err(error) if !error.is_not_found() => return Err(failed(error)),
            _ => (),
        }
    }
    // An answer sent by us after that would be a flow of its own.
    carrier.end_flows();
    forget_flows(plan);
    Ok(())
}

/// The kernel looks at where a flow goes once. UDP flows that came to us must come anew, or nobody would have them.
fn forget_flows(plan: &Plan) {
    let Ok(mut conntrack) = Conntrack::open() else { return };
    for family in Family::BOTH {
        let filter = Filter::protocol(wire(family), Protocol::Udp.number());
        let mut flows: Vec<Flow> = Vec::new();
        let found = conntrack.flows(&filter, |flow| {
            let Tuple { dst, dport, .. } = flow.original;
            let service = Frontend { address: Address::Ip(dst), protocol: Protocol::Udp, port: dport };
            let node_port = Frontend { address: Address::NodePort(family), ..service };
            let is_ours = plan.decision(&service).or(plan.decision(&node_port)).is_some();
            if is_ours && flow.reply.src == dst {
                flows.push(*flow);
            }
        });
        if found.is_ok() {
            flows.iter().for_each(|flow| drop(conntrack.delete(flow)));
        }
    }
}

/// The sets are emptied: nothing is a frontend here any more.
fn let_go<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<(), netlink::Error> {
    let mut batch = Batch::new();
    for place in Place::ALL {
        batch.flush_set(0, kernel::table(family), place.name());
    }
    nft.commit(&batch)
}

/// Another mode serves here now: new connections are its own at once. The rest goes when no process holds connections
/// any more.
pub(crate) fn leave<T: Transport>(nft: &mut Nft<T>, report: &mut Report) {
    match is_raised(DRAINS) || is_raised(LISTENS) {
        true => {
            report.waits = true;
            report.kept.push(format!("link {LINK} stays, as a process listens on its addresses"));
        }
        false => match delete() {
            Ok(true) => report.removed.push(format!("link {LINK}")),
            Ok(false) => (),
            Err(error) => report.failed.push(format!("link {LINK}: {error}")),
        },
    }
    leave_steering(nft, report);
}

/// The same for the tables that steer traffic to listeners.
pub(crate) fn leave_steering<T: Transport>(nft: &mut Nft<T>, report: &mut Report) {
    for family in Family::BOTH {
        let Ok(rules) = nft.rules(kernel::table(family)) else { continue };
        if rules.is_empty() {
            continue;
        }
        let exprs = rules.iter().filter(|listed| [STEER, STEER_INSIDE].contains(&listed.rule.chain.as_str()));
        let ports: Vec<u16> = exprs.filter_map(|listed| port(&listed.rule.exprs)).collect();
        if let Err(error) = let_go(nft, family) {
            report.failed.push(format!("sets of table {} {TABLE}: {error}", wire(family)));
            continue;
        }
        if ports.iter().any(|port| is_held(family, *port)) {
            report.waits = true;
            let says = "stays, as its process still carries open connections";
            report.kept.push(format!("table {} {TABLE} {says}", wire(family)));
            continue;
        }
        let mut batch = Batch::new();
        batch.delete_table(0, kernel::table(family), Delete::Existing);
        match nft.commit(&batch) {
            Ok(()) => report.removed.push(format!("table {} {TABLE}", wire(family))),
            Err(error) if error.is_not_found() => (),
            Err(error) => report.failed.push(format!("table {} {TABLE}: {error}", wire(family))),
        }
        if let Err(error) = routes::remove(family) {
            report.failed.push(error.to_string());
        }
    }
}

/// The port a rule gives packets to.
fn port(exprs: &[Expr]) -> Option<u16> {
    exprs.iter().any(|expr| matches!(expr, Expr::Tproxy { .. })).then_some(())?;
    exprs.iter().find_map(|expr| match expr {
        Expr::Immediate { value, .. } => Some(u16::from_be_bytes(value.as_slice().try_into().ok()?)),
        _ => None,
    })
}

/// Somebody listens there.
fn is_held(family: Family, port: u16) -> bool {
    let address: SocketAddr = match family {
        Family::V4 => (Ipv4Addr::LOCALHOST, port).into(),
        Family::V6 => (Ipv6Addr::LOCALHOST, port).into(),
    };
    matches!(TcpListener::bind(address), Err(error) if error.kind() == std::io::ErrorKind::AddrInUse)
}

/// How a process that listens on the service addresses themselves gives way to the next one.
#[derive(Debug)]
pub struct Succession {
    _drains: Option<Flag>,
}

impl Succession {
    /// Others can know from now on that we are about to end. In the network namespace of this thread.
    pub fn announce(carrier: &Carrier) -> Succession {
        carrier.0.lower_flag();
        Succession { _drains: Flag::raise(DRAINS).ok() }
    }

    /// Whether another process listens where we do.
    pub fn is_there(&self) -> bool {
        is_raised(LISTENS)
    }

    /// Leaves new connections to it. Those that wait to be accepted are still ours.
    pub fn give_way(&self, carrier: &Carrier) {
        let Carrier(inner) = carrier;
        let spots: Vec<_> = inner.listeners().keys().copied().collect();
        spots.iter().for_each(|spot| inner.unlisten(spot));
        // Workers obey in order, so this returns when all of them have let in who waited: only from then on the number of
        // open connections says whether anybody is left.
        inner.running.get().iter().for_each(|running| running.relay.prune());
    }
}
