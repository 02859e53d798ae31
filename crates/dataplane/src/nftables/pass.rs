// SPDX-License-Identifier: Apache-2.0

//! In which order a turn goes through the Plan: all of it, or only what changed.

use std::net::IpAddr;

use model::{Changes, Family, Frontend};
use netlink::Transport;

use super::{layout::Container, render, turn::Turn};

/// So many idle chains of frontends whose endpoints took turns are left for a full turn to remove.
const IDLE_TURNS: usize = 64;

impl<T: Transport> Turn<'_, T> {
    /// Makes the tables match the whole Plan: rules first, then frontends by their rank, removals last.
    pub(super) fn everything(&mut self) {
        for family in self.families() {
            self.surround(family);
            if self.known[family].replace {
                // What serves now must not go before what comes is there.
                self.limit[family] = usize::MAX;
            }
            self.node_port_addresses(family);
        }
        let plan = self.plan;
        let families = self.settings.families;
        let is_ours = |ip: &IpAddr| families[Family::of(*ip)];
        for address in plan.local_backends().filter(is_ours) {
            self.address(Container::Hairpin, address, true);
        }
        self.frontends();
        // A cluster IP that is known before its services would be answered with a refusal meanwhile.
        for address in plan.cluster_ips().filter(is_ours) {
            self.address(Container::ClusterIps, address, true);
        }
        for family in self.families() {
            self.leftovers(family);
        }
        self.flush();
        self.tidy();
    }

    /// Makes the tables match what changed in the Plan.
    pub(super) fn changes(&mut self, changes: &Changes) {
        let families = self.settings.families;
        if changes.node_wide {
            for family in self.families() {
                self.surround(family);
                self.node_port_addresses(family);
            }
        }
        for address in changes.local_backends.iter().filter(|ip| families[Family::of(**ip)]) {
            self.address(Container::Hairpin, *address, self.plan.is_local_backend(address));
        }
        for frontend in changes.frontends.iter().filter(|frontend| families[frontend.family()]) {
            self.frontend(*frontend);
        }
        for address in changes.cluster_ips.iter().filter(|ip| families[Family::of(**ip)]) {
            self.address(Container::ClusterIps, *address, self.plan.has_cluster_ip(address));
        }
        self.flush();
        if self.families().any(|family| self.known[family].idle_turns > IDLE_TURNS) {
            self.tidy();
        }
    }

    /// The most important frontends are in force before the rest is even looked at.
    fn frontends(&mut self) {
        let families = self.settings.families;
        let all = self.plan.frontends().filter(|(frontend, _)| families[frontend.family()]);
        let mut order: Vec<(u8, Frontend)> =
            all.map(|(frontend, decision)| (decision.rank, *frontend)).collect();
        order.sort_unstable();
        for same_rank in order.chunk_by(|a, b| a.0 == b.0) {
            for (_, frontend) in same_rank {
                self.frontend(*frontend);
            }
            self.flush_early();
        }
    }

    fn node_port_addresses(&mut self, family: Family) {
        let wanted = render::node_port_addresses(self.plan, family, self.settings.loopback[family]);
        let known = self.known[family].node_port_addresses.iter().copied();
        let gone: Vec<IpAddr> = known.filter(|address| !wanted.contains(address)).collect();
        for address in wanted {
            self.address(Container::NodePortAddresses, address, true);
        }
        for address in gone {
            self.address(Container::NodePortAddresses, address, false);
        }
    }

    /// What the table holds and the Plan does not know.
    fn leftovers(&mut self, family: Family) {
        let plan = self.plan;
        let known = &self.known[family];
        let frontends = known.frontends.keys().copied();
        let mut gone: Vec<Frontend> = frontends.filter(|at| plan.decision(at).is_none()).collect();
        let cluster_ips = known.cluster_ips.iter().copied();
        let cluster_ips: Vec<IpAddr> = cluster_ips.filter(|ip| !plan.has_cluster_ip(ip)).collect();
        let hairpin = known.hairpin.iter().copied();
        let hairpin: Vec<IpAddr> = hairpin.filter(|ip| !plan.is_local_backend(ip)).collect();
        gone.sort_unstable();
        for frontend in &gone {
            self.frontend(*frontend);
        }
        self.applied.vanished.append(&mut gone);
        for address in cluster_ips {
            self.address(Container::ClusterIps, address, false);
        }
        for address in hairpin {
            self.address(Container::Hairpin, address, false);
        }
        self.strays(family);
    }
}
