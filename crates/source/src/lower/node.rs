// SPDX-License-Identifier: Apache-2.0

use std::net::IpAddr;

use ipnet::IpNet;
use model::{Family, Kind, Node, PerFamily, Update};

use super::{Lowered, Resource, Scope, Subject, TO_BE_DELETED, ZONE, parse_cidr, parse_ip};
use crate::{
    object::{self, Metadata, NodeSpec, NodeStatus},
    problem::Reason,
};

impl Resource for object::Node {
    const KIND: Kind = Kind::Node;
    const NAME: &'static str = "Node";

    fn metadata(&self) -> Option<&Metadata> {
        self.metadata.as_ref()
    }

    fn lower(&self, scope: &mut Scope<'_>) -> Lowered {
        let nameless = Metadata::default();
        let metadata = self.metadata.as_ref().unwrap_or(&nameless);
        let mut subject = Subject { kind: Self::NAME, metadata, scope };
        if metadata.name().is_empty() {
            subject.problem("", Reason::NoName, "");
            return Lowered::Refused;
        }
        if metadata.name() != subject.scope.node_name {
            return Lowered::Ignored;
        }
        let mut taints = self.spec.iter().flat_map(|spec| &spec.taints);
        let tainted = taints.any(|taint| taint.key.as_deref() == Some(TO_BE_DELETED));
        let zone = metadata.label(ZONE).filter(|zone| !zone.is_empty());
        Lowered::Object(Update::Node(Node {
            name: subject.string(metadata.name()),
            addresses: addresses(&mut subject, self.status.as_ref()),
            pod_cidrs: pod_cidrs(&mut subject, self.spec.as_ref()),
            zone: zone.map(|zone| subject.string(zone)),
            eligible: !tainted && metadata.deletion_timestamp.is_none(),
        }))
    }

    fn gone(metadata: &Metadata, scope: &mut Scope<'_>) -> Option<Update> {
        (metadata.name() == scope.node_name).then_some(Update::NodeGone)
    }
}

/// Internal addresses before external ones; names are not looked up.
fn addresses(subject: &mut Subject<'_, '_>, status: Option<&NodeStatus>) -> PerFamily<Option<IpAddr>> {
    let mut first: PerFamily<Option<IpAddr>> = PerFamily::default();
    let written = status.map_or(&[][..], |status| &status.addresses);
    for kind in ["InternalIP", "ExternalIP"] {
        let of_kind = written.iter().enumerate().filter(|(_, entry)| entry.kind.as_deref() == Some(kind));
        for (at, entry) in of_kind {
            let text = entry.address.as_deref().unwrap_or_default();
            match parse_ip(text) {
                Some(ip) => {
                    first[Family::of(ip)].get_or_insert(ip);
                }
                None => {
                    subject.problem(format!("status.addresses[{at}].address"), Reason::BadAddress, text);
                }
            }
        }
    }
    first
}

fn pod_cidrs(subject: &mut Subject<'_, '_>, spec: Option<&NodeSpec>) -> PerFamily<Option<IpNet>> {
    let mut first: PerFamily<Option<IpNet>> = PerFamily::default();
    for (at, text) in spec.iter().flat_map(|spec| &spec.pod_cidrs).enumerate() {
        match parse_cidr(text) {
            Some(net) => {
                first[Family::of(net.addr())].get_or_insert(net);
            }
            None => subject.problem(format!("spec.podCIDRs[{at}]"), Reason::BadCidr, text),
        }
    }
    first
}
