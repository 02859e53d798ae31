// SPDX-License-Identifier: Apache-2.0

//! The plan as text: goldens, the command line and bug reports read the same. Everything is sorted, so equal
//! plans print equally. A star marks a backend on this node, `=3` its weight where that is not 1; a rank is told of
//! what is served before the rest.
//!
//! ```text
//! node
//!   pod traffic    IPv4 from 10.1.0.0/24
//!   node ports     IPv4 on 192.0.2.5
//!   service cidrs  IPv4 10.96.0.0/16
//! frontends
//!   10.96.0.10:80/tcp        cluster-ip  shop/web:http
//!     any      forward  masquerade off-pods  10.1.0.5:8080* 10.1.1.7:8080
//!   nodeport:30080/tcp IPv4  node-port   shop/web:http
//!     inside   forward  masquerade off-pods  10.1.0.5:8080* 10.1.1.7:8080
//!     outside  forward  masquerade never     10.1.0.5:8080*
//! ```

use std::fmt::{self, Display, Formatter};

use crate::{
    decision::{Decision, Masquerade, NodePortScope, PodTraffic, Verdict},
    family::Family,
    plan::Plan,
    tuning::Algorithm,
    weights::DEFAULT_WEIGHT,
};

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.write_node(f)?;
        self.write_frontends(f)?;
        section(f, "cluster ips", self.cluster_ips())?;
        section(f, "local backends", self.local_backends())?;
        section(
            f,
            "health checks",
            self.health().iter().map(|(service, health)| {
                let count = |family: Family| match health.families[family] {
                    true => format!("  {family} {}", health.local_endpoints[family]),
                    false => String::new(),
                };
                format!("{service}  port {}{}{}", health.port, count(Family::V4), count(Family::V6))
            }),
        )?;
        section(
            f,
            "conflicts",
            self.conflicts()
                .map(|conflict| format!("{}  {}, not {}", conflict.frontend, conflict.owner, conflict.loser)),
        )
    }
}

impl Plan {
    fn write_node(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "node")?;
        for family in Family::BOTH {
            let pods = match self.pod_traffic(family) {
                None => "cannot be told".to_owned(),
                Some(PodTraffic::Source(net)) => format!("from {net}"),
                Some(PodTraffic::Interface(name)) => format!("on interface {name}"),
                Some(PodTraffic::InterfacePrefix(prefix)) => format!("on interfaces {prefix}*"),
            };
            writeln!(f, "  pod traffic    {family} {pods}")?;
        }
        for family in Family::BOTH {
            let scope = match (self.node_ports(family), self.loopback_node_ports(family)) {
                (NodePortScope::All, false) => "on all addresses but loopback".to_owned(),
                (NodePortScope::All, true) => "on all addresses".to_owned(),
                (NodePortScope::Only(set), _) if set.is_empty() => "on no address".to_owned(),
                (NodePortScope::Only(set), _) => format!("on {}", joined(set)),
            };
            writeln!(f, "  node ports     {family} {scope}")?;
        }
        for family in Family::BOTH {
            let cidrs = self.service_cidrs(family);
            let cidrs = if cidrs.is_empty() { "unknown".to_owned() } else { joined(cidrs) };
            writeln!(f, "  service cidrs  {family} {cidrs}")?;
        }
        Ok(())
    }

    fn write_frontends(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let width = self.frontends().map(|(frontend, _)| frontend.to_string().len()).max();
        let Some(width) = width else { return Ok(()) };
        writeln!(f, "frontends")?;
        for (frontend, decision) in self.frontends() {
            writeln!(f, "  {:width$}  {decision}", frontend.to_string())?;
        }
        Ok(())
    }
}

impl Display for Decision {
    /// One line for who and why, and one for each verdict.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:13}  {}", self.role.to_string(), self.service)?;
        if self.rank < 2 {
            write!(f, "  rank {}", self.rank)?;
        }
        if let Some(affinity) = self.affinity {
            write!(f, "  affinity {}s", affinity.timeout_secs)?;
        }
        if self.algorithm() != Algorithm::default() {
            write!(f, "  algorithm {}", self.algorithm())?;
        }
        match self.source_ranges.as_deref() {
            None => {}
            Some([]) => write!(f, "  for nobody")?,
            Some(nets) => write!(f, "  for {}", joined(nets))?,
        }
        if self.inside == self.outside {
            return write!(f, "\n    any      {}", self.inside);
        }
        write!(f, "\n    inside   {}\n    outside  {}", self.inside, self.outside)
    }
}

impl Display for Verdict {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let forward = match self {
            Verdict::Reject => return f.write_str("reject"),
            Verdict::Drop => return f.write_str("drop"),
            Verdict::Forward(forward) => forward,
        };
        write!(f, "forward  masquerade {:8} ", forward.masquerade.to_string())?;
        for backend in &forward.pool.backends {
            write!(f, " {backend}{}", if backend.local { "*" } else { "" })?;
            if backend.weight != DEFAULT_WEIGHT {
                write!(f, "={}", backend.weight)?;
            }
        }
        Ok(())
    }
}

impl Display for Masquerade {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Masquerade::Never => "never",
            Masquerade::OffPods => "off-pods",
            Masquerade::Always => "always",
        })
    }
}

fn section<T: Display>(f: &mut Formatter<'_>, title: &str, lines: impl Iterator<Item = T>) -> fmt::Result {
    let mut lines = lines.peekable();
    if lines.peek().is_some() {
        writeln!(f, "{title}")?;
    }
    lines.try_for_each(|line| writeln!(f, "  {line}"))
}

fn joined<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(" ")
}
