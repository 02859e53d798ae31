// SPDX-License-Identifier: Apache-2.0

//! Every name we put into a kernel. Names carry no prefix where they live in tables of our own.
//!
//! A name here is an interface: after an upgrade the new program reads what the old one wrote. A name whose
//! meaning changes must change too.

/// The table, one in family `ip` and one in `ip6`. Everything in it is ours; what others put there is removed.
pub const TABLE: &str = "portolan";

/// Tells an operator who runs `nft list ruleset` whose the table is.
pub const TABLE_COMMENT: &str = "kept by portolan: changes by others are undone";

/// A table that exists only inside one batch, which asks the kernel for each feature and is never committed.
pub const PROBE_TABLE: &str = "portolan-probe";

/// The packet mark's bit that means "masquerade", unless configured otherwise. The same as kube-proxy's, so that
/// neighbours that keep clear of one keep clear of the other.
pub const MASQUERADE_BIT: u8 = 14;

/// What the userspace mode has.
pub mod userspace {
    /// The table, one in family `ip` and one in `ip6`.
    pub const TABLE: &str = "portolan-userspace";
    /// The mark's bit that means "for the proxy". Clear of kube-proxy's (14, 15), of CNI's port mapping (13), of Cilium's
    /// (8 to 11) and of Calico's (16 and up).
    pub const MARK: u32 = 1 << 12;
    /// The routing table of what is marked, in which everything is local.
    pub const ROUTES: u32 = 20_043;
    /// Where the rule stands that leads there.
    pub const PRIORITY: u32 = 43;
    /// What routes of ours in tables of others say of who wrote them (`ip route` shows it as `proto`). Nobody else's as far
    /// as iproute2 knows.
    pub const ORIGIN: u8 = 43;
    /// What arrives: to a listener, if it is for a frontend.
    pub const STEER_PREROUTING: &str = "steer-prerouting";
    /// What this node's own processes send: marked, so that it arrives here.
    pub const STEER_OUTPUT: &str = "steer-output";
    /// To the listener for everyone.
    pub const STEER: &str = "steer";
    /// To the listener for traffic from inside, where that differs.
    pub const STEER_INSIDE: &str = "steer-inside";
    /// Marks what this node's own processes send.
    pub const STEER_OWN: &str = "steer-own";
    /// Hide from IPVS what is steered to us, and show it again: what arrives, and what this node's own processes send.
    pub const PAST_IPVS: [&str; 4] =
        ["hide-input-from-ipvs", "show-input-again", "hide-output-from-ipvs", "show-output-again"];
    /// The link that has the service addresses where we listen on them.
    pub const LINK: &str = "portolan0";
    /// The table, one in each family, by which the kernel goes on with what a mode before translated, while we listen there.
    pub const KEEP: &str = "portolan-keep";
    /// A socket in the abstract namespace, held by the process that listens on them.
    pub const LISTENS: &str = "portolan-listens";
    /// The same, held by one that has open connections and was told to end.
    pub const DRAINS: &str = "portolan-drains";
}

/// Lets a node route packets from and to 127.0.0.0/8, which node ports on loopback addresses need. Written only
/// for them, once a rule keeps strangers out, and left as it is afterwards: others may have come to rely on it.
pub const ROUTE_LOCALNET: &str = "/proc/sys/net/ipv4/conf/all/route_localnet";

/// Base chains. Each is named after its duty and its hook.
pub mod hook {
    /// Who may connect at all: by source ranges, and to loopback addresses. Before any translation, so that it sees what the client sent.
    pub const FIREWALL_PREROUTING: &str = "firewall-prerouting";
    /// The same for this node's own processes.
    pub const FIREWALL_OUTPUT: &str = "firewall-output";
    /// From a frontend to one of its endpoints, for what arrives.
    pub const NAT_PREROUTING: &str = "nat-prerouting";
    /// The same for this node's own processes.
    pub const NAT_OUTPUT: &str = "nat-output";
    /// Masquerading, decided earlier by the mark, and hairpins.
    pub const NAT_POSTROUTING: &str = "nat-postrouting";
    /// Frontends without endpoints, for what is addressed to the node.
    pub const FILTER_INPUT: &str = "filter-input";
    /// Frontends without endpoints and unknown service addresses, for what passes through.
    pub const FILTER_FORWARD: &str = "filter-forward";
    /// The same for this node's own processes.
    pub const FILTER_OUTPUT: &str = "filter-output";
    /// Remembers which endpoint a client got. After the translation, when the packet holds the endpoint, and
    /// before masquerading.
    pub const AFFINITY_POSTROUTING: &str = "affinity-postrouting";

    /// All of them, to tell ours from what others put into the table.
    pub const ALL: [&str; 9] = [
        FIREWALL_PREROUTING,
        FIREWALL_OUTPUT,
        NAT_PREROUTING,
        NAT_OUTPUT,
        NAT_POSTROUTING,
        FILTER_INPUT,
        FILTER_FORWARD,
        FILTER_OUTPUT,
        AFFINITY_POSTROUTING,
    ];
}

/// Chains that are jumped to.
pub mod chain {
    /// Marks for masquerading what does not come from a pod.
    pub const MARK_OFF_PODS: &str = "mark-off-pods";
    /// Node ports without endpoints.
    pub const CHECK_NODE_PORTS: &str = "check-node-ports";
    /// Service addresses without endpoints.
    pub const CHECK_SERVICES: &str = "check-services";
    /// Ports that no service has on a cluster IP, and addresses no service has.
    pub const CHECK_CLUSTER_IPS: &str = "check-cluster-ips";
    /// One rule for each affinity timeout in use.
    pub const RECORD_AFFINITY: &str = "record-affinity";

    /// Sends a client that is remembered to its endpoint.
    pub const RECALL_AFFINITY: &str = "recall-affinity";

    /// All that are no balancing chains, to tell ours from what others put into the table.
    pub const ALL: [&str; 6] = [
        MARK_OFF_PODS,
        CHECK_NODE_PORTS,
        CHECK_SERVICES,
        CHECK_CLUSTER_IPS,
        RECORD_AFFINITY,
        RECALL_AFFINITY,
    ];

    /// Suffix of a balancing chain that marks everything for masquerading.
    pub const MASQUERADE: &str = "-masq";
    /// Suffix of a balancing chain that marks what does not come from a pod.
    pub const MASQUERADE_OFF_PODS: &str = "-masq-off-pods";
    /// Suffix of a balancing chain that looks into the affinity map first.
    pub const STICKY: &str = "-sticky";
    /// Infix of a balancing chain that hashes the client's port too.
    pub const HASH_PORT: &str = "-port";
}

/// Sets and maps.
pub mod set {
    /// Frontend with an address to its balancing chain; for traffic from outside, where inside differs.
    pub const SERVICES: &str = "services";
    /// The same for traffic from inside, only of frontends where it differs.
    pub const INSIDE_SERVICES: &str = "inside-services";
    /// Node port to its balancing chain.
    pub const NODE_PORTS: &str = "node-ports";
    /// Node port to its balancing chain for traffic from inside, where it differs.
    pub const INSIDE_NODE_PORTS: &str = "inside-node-ports";
    /// Frontend and slot to endpoint, for chains reached from [`SERVICES`].
    pub const ENDPOINTS: &str = "endpoints";
    /// The same for chains reached from [`INSIDE_SERVICES`].
    pub const INSIDE_ENDPOINTS: &str = "inside-endpoints";
    /// Node port and slot to endpoint.
    pub const NODE_PORT_ENDPOINTS: &str = "node-port-endpoints";
    /// Node port and slot to endpoint for traffic from inside, where it differs.
    pub const INSIDE_NODE_PORT_ENDPOINTS: &str = "inside-node-port-endpoints";
    /// The same four for frontends whose endpoints are chosen by a hash of the client.
    pub const HASH_ENDPOINTS: &str = "hash-endpoints";
    pub const INSIDE_HASH_ENDPOINTS: &str = "inside-hash-endpoints";
    pub const NODE_PORT_HASH_ENDPOINTS: &str = "node-port-hash-endpoints";
    pub const INSIDE_NODE_PORT_HASH_ENDPOINTS: &str = "inside-node-port-hash-endpoints";
    /// Prefix of the map of a frontend whose endpoints take turns; the frontend follows.
    pub const TURNS: &str = "turns-";
    /// The same for traffic from inside, where it differs.
    pub const INSIDE_TURNS: &str = "inside-turns-";
    /// Frontends to be answered with "port unreachable".
    pub const REJECT_SERVICES: &str = "reject-services";
    /// Frontends to be dropped.
    pub const DROP_SERVICES: &str = "drop-services";
    /// Node ports to be answered with "port unreachable".
    pub const REJECT_NODE_PORTS: &str = "reject-node-ports";
    /// Node ports to be dropped.
    pub const DROP_NODE_PORTS: &str = "drop-node-ports";
    /// Frontends with source ranges.
    pub const FIREWALLED: &str = "firewalled";
    /// Frontend and who may connect to it.
    pub const SOURCE_RANGES: &str = "source-ranges";
    /// All cluster IPs, to tell an unknown port of one from a free address.
    pub const CLUSTER_IPS: &str = "cluster-ips";
    /// Endpoints on this node, each paired with itself.
    pub const HAIRPIN: &str = "hairpin";
    /// Addresses that serve node ports, where not all do.
    pub const NODE_PORT_ADDRESSES: &str = "node-port-addresses";
    /// Client and frontend to the endpoint the client got last.
    pub const AFFINITY: &str = "affinity";
    /// Prefix of the sets of frontend and endpoint pairs that are remembered; the timeout in seconds follows.
    pub const STICKY_SERVICES: &str = "sticky-services-";
    /// The same for node ports.
    pub const STICKY_NODE_PORTS: &str = "sticky-node-ports-";
}

/// Chains of iptables. Here the names are kube-proxy's, so that scripts and neighbours find what they know, and each
/// program takes over what the other left.
pub mod xt {
    /// Made by the kubelet in mangle, with the iptables of the host.
    pub const IPTABLES_HINT: &str = "KUBE-IPTABLES-HINT";
    /// Made by the kubelet, to see when somebody flushes everything.
    pub const KUBELET_CANARY: &str = "KUBE-KUBELET-CANARY";
    /// Ours and kube-proxy's, for the same purpose. Empty; in mangle, nat and filter.
    pub const PROXY_CANARY: &str = "KUBE-PROXY-CANARY";

    /// Counters by `nfacct`, which outlive the rules: packets dropped in [`FORWARD`] because they belong to no connection.
    pub const INVALID_DROPPED: &str = "ct_state_invalid_dropped_pkts";
    /// New connections to node ports on loopback addresses.
    pub const LOOPBACK_ACCEPTED: &str = "localhost_nps_accepted_pkts";
    /// All of them.
    pub const ACCOUNTS: [&str; 2] = [INVALID_DROPPED, LOOPBACK_ACCEPTED];

    /// In nat: frontends with an address, and last of all the way to [`NODEPORTS`]. In filter: cluster IPs without
    /// endpoints.
    pub const SERVICES: &str = "KUBE-SERVICES";
    /// In nat: node ports. In filter: health-check node ports, let in.
    pub const NODEPORTS: &str = "KUBE-NODEPORTS";
    /// In filter: node ports, external IPs and load balancers without endpoints.
    pub const EXTERNAL_SERVICES: &str = "KUBE-EXTERNAL-SERVICES";
    /// In filter: what is forwarded to endpoints and back, let through.
    pub const FORWARD: &str = "KUBE-FORWARD";
    /// In filter: load balancers with source ranges; what gets here was not let in.
    pub const PROXY_FIREWALL: &str = "KUBE-PROXY-FIREWALL";
    /// In filter, shared with the kubelet: keeps strangers from loopback addresses.
    pub const FIREWALL: &str = "KUBE-FIREWALL";
    /// In nat: masquerades what is marked.
    pub const POSTROUTING: &str = "KUBE-POSTROUTING";
    /// In nat: marks for masquerading.
    pub const MARK_MASQ: &str = "KUBE-MARK-MASQ";

    /// A service port's endpoints. A hash follows, here and below.
    pub const SVC: &str = "KUBE-SVC-";
    /// Its endpoints on this node.
    pub const SVL: &str = "KUBE-SVL-";
    /// Its way from external addresses.
    pub const EXT: &str = "KUBE-EXT-";
    /// Its source ranges.
    pub const FW: &str = "KUBE-FW-";
    /// One of its endpoints.
    pub const SEP: &str = "KUBE-SEP-";

    /// Chains of kube-proxy up to 1.23 or so that have no duty any more: local policies by another name, the mark for
    /// dropping, and the userspace mode.
    pub const XLB: &str = "KUBE-XLB-";
    pub const OLD: [&str; 6] = [
        "KUBE-MARK-DROP",
        "KUBE-PORTALS-CONTAINER",
        "KUBE-PORTALS-HOST",
        "KUBE-NODEPORT-CONTAINER",
        "KUBE-NODEPORT-HOST",
        "KUBE-NODEPORT-NON-LOCAL",
    ];
    /// In nat, ipvs mode: load balancers, of which some keep the client's address.
    pub const LOAD_BALANCER: &str = "KUBE-LOAD-BALANCER";
    /// In nat, ipvs mode: node ports, the same. In filter: health-check node ports, let in.
    pub const NODE_PORT: &str = "KUBE-NODE-PORT";
    /// In filter, ipvs mode: who may connect to load balancers with source ranges.
    pub const SOURCE_RANGES: &str = "KUBE-SOURCE-RANGES-FIREWALL";
    /// In filter, ipvs mode: what service addresses do not serve is refused, not shown the node's own sockets.
    pub const IPVS_FILTER: &str = "KUBE-IPVS-FILTER";
    /// In filter, ipvs mode: free addresses of the service network.
    pub const IPVS_OUT_FILTER: &str = "KUBE-IPVS-OUT-FILTER";
    /// In mangle, ipvs mode, ours alone: traffic from inside that goes another way than traffic from outside.
    pub const INSIDE: &str = "KUBE-INSIDE";
    /// In mangle, ipvs mode, ours alone: load balancers with source ranges, for what this node sends.
    pub const OUTPUT_FIREWALL: &str = "KUBE-OUTPUT-FIREWALL";
    /// In mangle, ipvs mode, ours alone: who may connect to them.
    pub const OUTPUT_RANGES: &str = "KUBE-OUTPUT-RANGES";
    /// Chains of the ipvs mode that kube-proxy does not have.
    pub const IPVS_OWN: [&str; 3] = [INSIDE, OUTPUT_FIREWALL, OUTPUT_RANGES];
    /// Chains of the ipvs mode, kube-proxy's or ours.
    pub const IPVS: [&str; 8] = [
        LOAD_BALANCER,
        NODE_PORT,
        SOURCE_RANGES,
        IPVS_FILTER,
        IPVS_OUT_FILTER,
        INSIDE,
        OUTPUT_FIREWALL,
        OUTPUT_RANGES,
    ];
}

/// The link that has all service addresses in ipvs mode; kube-proxy's name.
pub const IPVS_LINK: &str = "kube-ipvs0";

/// Links whose addresses are those of services, and not the node's own.
pub const SERVICE_LINKS: [&str; 2] = [IPVS_LINK, userspace::LINK];
