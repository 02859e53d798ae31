// SPDX-License-Identifier: Apache-2.0

//! Which modes have something in the kernel. Asks for names alone, by netlink: no tool is needed, and nothing is loaded
//! that is not there.

use model::Family;
use netlink::{nft::Nft, route::Route};

use super::legacy;
use crate::{
    Mode,
    names::{self, userspace},
    nftables::wire,
    xtables::leftovers as chains,
};

/// Whose a chain is, by its name.
type IsOfMode = fn(&str) -> bool;

/// Chains of these modes are in tables of iptables.
const BY_CHAINS: [(Mode, IsOfMode); 2] = [(Mode::Iptables, is_iptables), (Mode::Ipvs, chains::is_ipvs)];
/// These modes have links.
const BY_LINKS: [(Mode, &str); 2] = [(Mode::Ipvs, names::IPVS_LINK), (Mode::Userspace, userspace::LINK)];

/// The modes whose rules, links or addresses are in the network namespace of this thread. In iptables and ipvs mode
/// they may be kube-proxy's: the two have the same names.
pub fn present() -> Result<Vec<Mode>, netlink::Error> {
    let mut found = Vec::new();
    // A kernel may have no nf_tables and yet hold what the legacy variant of iptables wrote.
    let asked = in_nf_tables(&mut found);
    for family in Family::BOTH {
        let legacy = BY_CHAINS.into_iter().filter(|(_, is_of_mode)| legacy::is_there(family, is_of_mode));
        found.extend(legacy.map(|(mode, _)| mode));
    }
    let mut route = Route::open()?;
    let links = BY_LINKS.into_iter().filter(|(_, link)| route.link_index(link).is_ok());
    found.extend(links.map(|(mode, _)| mode));
    if found.is_empty() {
        asked?;
    }
    Ok(Mode::ALL.into_iter().filter(|mode| found.contains(mode)).collect())
}

fn in_nf_tables(found: &mut Vec<Mode>) -> Result<(), netlink::Error> {
    let mut nft = Nft::open()?;
    for family in Family::BOTH {
        for listed in nft.tables(wire(family))? {
            match listed.object.name.as_str() {
                names::TABLE => found.push(Mode::Nftables),
                userspace::TABLE | userspace::KEEP => found.push(Mode::Userspace),
                _ => {}
            }
        }
        for (mode, is_of_mode) in BY_CHAINS {
            if !nft.tables_with_chain(wire(family), is_of_mode)?.is_empty() {
                found.push(mode);
            }
        }
    }
    Ok(())
}

/// The ipvs mode has some of the same chains, and the kubelet made some of those.
fn is_iptables(name: &str) -> bool {
    chains::is_current(name) && !crate::ipvs::frame::is_own(name)
}
