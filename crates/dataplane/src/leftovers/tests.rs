// SPDX-License-Identifier: Apache-2.0

//! Before the kernel, in a namespace for each test, with the tools where they are installed.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream},
    process::{Command, Stdio},
    time::Duration,
};

use netlink::{
    Errno, Netns, Protocol, Socket,
    conntrack::{Conntrack, Filter},
    fake::{Fault, Faulty},
};

use super::*;
use crate::userspace::Carrier;

/// What kube-proxy of several ages leaves, and between it what is the kubelet's and what is others'.
const TABLES: &str = "\
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*nat
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-MARK-DROP - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-XLB-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-PORTALS-HOST - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MINE - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A PREROUTING -s 192.0.2.1/32 -j MINE
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"handle ClusterIPs\" -j KUBE-PORTALS-HOST
-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
-A POSTROUTING -s 192.0.2.0/24 -j MASQUERADE
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-AAAAAAAAAAAAAAAA
-A KUBE-SEP-AAAAAAAAAAAAAAAA -s 192.0.2.9/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -m tcp -j DNAT --to-destination 192.0.2.9:6443
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-POSTROUTING -j MASQUERADE
-A MINE -j ACCEPT
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A INPUT -j KUBE-IPVS-FILTER
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD
-A FORWARD -s 192.0.2.2/32 -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FIREWALL -d 127.0.0.0/8 -j DROP
COMMIT
";

/// What must be left of it.
const REST: &str = "\
*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A FORWARD -s 192.0.2.2/32 -j DROP
-A KUBE-FIREWALL -d 127.0.0.0/8 -j DROP
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
*nat
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MINE - [0:0]
:MINE - [0:0]
-A PREROUTING -s 192.0.2.1/32 -j MINE
-A POSTROUTING -s 192.0.2.0/24 -j MASQUERADE
-A MINE -j ACCEPT
";

/// Runs in a namespace of its own; `None` where that is not allowed.
fn alone<R: Send>(test: impl FnOnce() -> R + Send) -> Option<R> {
    match Netns::new() {
        Ok(netns) => {
            netns.run(crate::loopback::close).expect("it can be entered");
            Some(netns.run(test).expect("it can be entered"))
        }
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "network namespaces need root: {error}");
            println!("skipped: network namespaces need root");
            None
        }
    }
}

/// Runs a tool; `None` where it is not installed.
fn tool(words: &[&str], input: &str) -> Option<String> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            println!("skipped: {}: {error}", words[0]);
            return None;
        }
    };
    child.stdin.take().expect("it is piped").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {complaint}");
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What a tool shows, without comments, built-in chains and commits; tables in order of their names.
fn shown(save: &str) -> Option<String> {
    let text = tool(&[save], "")?;
    let mut tables: Vec<String> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && *line != "COMMIT") {
        if line.starts_with('*') {
            tables.push(String::new());
        }
        let is_built_in = line.starts_with(':') && !line.contains(" - ");
        if let Some(table) = tables.last_mut().filter(|_| !is_built_in) {
            table.push_str(&format!("{line}\n"));
        }
    }
    tables.sort();
    Some(tables.concat())
}

fn check(variant: &str, family: &str) {
    let (save, restore) = (format!("{family}-{variant}-save"), format!("{family}-{variant}-restore"));
    let as_v6 = |text: &str| match family {
        "ip6tables" => text
            .replace("192.0.2.0/24", "2001:db8::/64")
            .replace("192.0.2.9:6443", "[2001:db8::9]:6443")
            .replace("192.0.2.", "2001:db8::")
            .replace("10.96.0.1/32", "fd00::1/128")
            .replace("127.0.0.0/8", "::1/128")
            .replace("/32", "/128"),
        _ => text.to_owned(),
    };
    alone(|| {
        tool(&[&restore], &as_v6(TABLES))?;
        let report = remove(Some(Mode::Nftables), None);
        assert_eq!(report.failed, Vec::<String>::new());
        assert_eq!(report.kept, Vec::<String>::new());
        assert_eq!(report.removed.len(), 3, "{report:?}");
        assert_eq!(shown(&save)?, as_v6(REST));
        // Nothing more to do.
        assert_eq!(remove(None, None), Report::default());
        Some(())
    });
}

#[test]
fn chains_of_iptables_nft_go_and_nothing_else() {
    check("nft", "iptables");
    check("nft", "ip6tables");
}

#[test]
fn chains_of_iptables_legacy_go_and_nothing_else() {
    check("legacy", "iptables");
    check("legacy", "ip6tables");
}

/// The CNI plugin portmap can be told to mark by kube-proxy's chain.
#[test]
fn what_others_use_stays_and_is_named() {
    for variant in ["nft", "legacy"] {
        alone(|| {
            let with_user = TABLES.replace("-A MINE -j ACCEPT", "-A MINE -j KUBE-MARK-MASQ");
            tool(&[&format!("iptables-{variant}-restore")], &with_user)?;
            let report = remove(Some(Mode::Nftables), None);
            assert_eq!(report.failed, Vec::<String>::new());
            let kept = report.kept.join("\n");
            assert!(kept.contains("KUBE-MARK-MASQ") && kept.contains("MINE uses it"), "{kept}");
            let rules = shown(&format!("iptables-{variant}-save"))?;
            for rest in
                ["-A MINE -j KUBE-MARK-MASQ", "-A KUBE-POSTROUTING -j MASQUERADE", "-j KUBE-POSTROUTING"]
            {
                assert!(rules.contains(rest), "{rest} is gone from\n{rules}");
            }
            assert!(!rules.contains("KUBE-SVC-"), "{rules}");
            Some(())
        });
    }
}

#[test]
fn tables_of_nftables_modes_go() {
    let tables = "add table ip kube-proxy; add chain ip kube-proxy c; add table ip6 kube-proxy; add table ip portolan; \
                  add table inet kube-proxy; add table ip mine";
    alone(|| {
        tool(&["nft", tables], "")?;
        let report = remove(Some(Mode::Nftables), None);
        assert_eq!(report.removed, ["table ip kube-proxy", "table ip6 kube-proxy"]);
        assert_eq!(
            tool(&["nft", "list tables"], "")?,
            "table ip portolan\ntable inet kube-proxy\ntable ip mine\n"
        );
        let report = remove(None, None);
        assert_eq!(report.removed, ["table ip portolan"]);
        assert_eq!(tool(&["nft", "list tables"], "")?, "table inet kube-proxy\ntable ip mine\n");
        Some(())
    });
}

/// Nobody listens any more where the rules of the userspace mode send traffic; still they stay until kube-proxy serves.
#[test]
fn what_the_userspace_mode_left_is_withdrawn_once_another_serves() {
    alone(|| {
        netlink::route::Route::open().and_then(|mut route| route.set_up(1, true)).expect("loopback goes up");
        let mut dataplane =
            crate::open(Mode::Userspace, &crate::Config::default()).expect("it can be opened");
        dataplane.apply(&model::Plan::new(), crate::Scope::All).expect("an empty plan");
        drop(dataplane);
        let report = withdraw(When::Relieved);
        assert_eq!((report.removed.len(), report.failed.len()), (0, 2), "{report:?}");
        let report = withdraw(When::Now);
        assert_eq!(report.removed, [format!("table ip {USERSPACE}"), format!("table ip6 {USERSPACE}")]);
        assert_eq!(tool(&["nft", "list tables"], "")?, "");
        assert_eq!(withdraw(When::Relieved).failed, Vec::<String>::new(), "nothing is left");
        Some(())
    });
}

/// Without IPVS in this kernel: the link, the sets, and the rules that use them.
#[test]
fn what_the_ipvs_mode_leaves_goes() {
    alone(|| {
        let setup = [
            "ipset create KUBE-CLUSTER-IP hash:ip,port",
            "ipset create KUBE-6-LOAD-BALANCER-SOURCE-CID hash:ip,port,net family inet6",
            "ipset create mine hash:ip",
            "iptables-nft -t nat -N KUBE-SERVICES",
            "iptables-nft -t nat -N KUBE-MARK-MASQ",
            "iptables-nft -t nat -A PREROUTING -j KUBE-SERVICES",
            "iptables-nft -t nat -A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ",
        ];
        for line in setup {
            tool(&line.split(' ').collect::<Vec<_>>(), "")?;
        }
        // Not every kernel has links of this kind.
        let mut route = netlink::route::Route::open().expect("a socket");
        let linked = route.add_link("kube-ipvs0", netlink::route::LinkKind::Dummy).is_ok();
        let report = remove(Some(Mode::Nftables), None);
        assert_eq!((report.failed.clone(), report.kept.clone()), (Vec::new(), Vec::new()));
        assert!(report.removed.contains(&"2 sets".to_owned()), "{report:?}");
        assert_eq!(report.removed.contains(&"link kube-ipvs0".to_owned()), linked, "{report:?}");
        assert!(route.link("kube-ipvs0").is_err());
        assert_eq!(tool(&["ipset", "list", "-name"], "")?, "mine\n");
        Some(())
    });
}

/// In a kernel with IPVS, as the virtual machine's (`make test-vm`).
#[test]
fn virtual_servers_of_kube_proxy_go_and_those_of_others_stay() {
    use netlink::{
        ipset::{Element, Ipset, SetKind, Spec},
        ipvs::{Change, Ipvs, Service, ServiceKey},
        route::{LinkKind, Route},
    };
    alone(|| {
        let Ok(mut ipvs) = Ipvs::open() else { return println!("skipped: this kernel has no IPVS") };
        let mut route = Route::open().expect("a socket");
        route.add_link("kube-ipvs0", LinkKind::Dummy).expect("a kernel with IPVS has such links");
        let device = route.link_index("kube-ipvs0").expect("it was just made");
        let loopback = route.link_index("lo").expect("everybody has one");
        let ip = |text: &str| text.parse().expect("an address");
        for (link, address, prefix) in
            [(device, ip("10.96.0.1"), 32), (device, ip("fd00::1"), 128), (loopback, ip("192.0.2.1"), 32)]
        {
            route.add_address(link, address, prefix).expect("an address");
        }
        let mut sets = Ipset::open().expect("a socket");
        let set = Spec {
            name: "KUBE-NODE-PORT-TCP".to_owned(),
            kind: SetKind::BitmapPort,
            family: netlink::Family::V4,
            max_elements: 0,
        };
        sets.create(&set).expect("a set");
        sets.add(&set.name, set.family, &[Element::Port(30_080)]).expect("a port");
        let servers = [
            ("10.96.0.1", 443),
            ("fd00::1", 53),
            ("192.0.2.1", 30_080),
            ("192.0.2.1", 80),
            ("198.51.100.1", 30_080),
        ];
        let changes = servers.map(|(address, port)| {
            let key = ServiceKey::At { protocol: 6, address: ip(address), port };
            Change::AddService(Service { key, scheduler: "rr".to_owned(), flags: 0, timeout: 0 })
        });
        assert!(ipvs.apply(&changes).expect("IPVS answers").is_empty(), "all are taken");

        let report = remove(Some(Mode::Nftables), None);
        assert_eq!((report.failed.clone(), report.kept.clone()), (Vec::new(), Vec::new()));
        assert_eq!(report.removed, ["3 virtual servers of IPVS", "link kube-ipvs0", "1 sets"]);
        let left = ipvs.services().expect("a list");
        let mut left: Vec<_> = left.iter().map(|held| held.service.key).collect();
        left.sort();
        let at = |address, port| ServiceKey::At { protocol: 6, address: ip(address), port };
        assert_eq!(left, [at("192.0.2.1", 80), at("198.51.100.1", 30_080)]);
        assert_eq!(remove(None, None), Report::default(), "nothing more to do");
    });
}

#[test]
fn chains_of_the_other_variant_go_and_ours_stay() {
    for own in Variant::BOTH {
        alone(|| {
            for variant in Variant::BOTH {
                tool(&[&format!("iptables-{variant}-restore")], TABLES)?;
            }
            let before = shown(&format!("iptables-{own}-save"))?;
            let report = unite(own);
            assert_eq!((&report.failed, &report.kept), (&Vec::new(), &Vec::new()));
            assert_eq!(report.removed.len(), 3, "{report:?}");
            assert_eq!(shown(&format!("iptables-{own}-save"))?, before, "{own}");
            let rest = shown(&format!("iptables-{}-save", own.other()))?;
            assert!(!rest.contains("KUBE-SERVICES") && !rest.contains("KUBE-SVC-"), "{rest}");
            assert!(rest.contains("KUBE-IPTABLES-HINT") && rest.contains("-j MINE"), "{rest}");
            assert_eq!(unite(own), Report::default(), "nothing more to do");
            Some(())
        });
    }
}

fn tables() -> Option<String> {
    tool(&["nft", "list tables"], "")
}

#[test]
fn without_another_mode_nothing_is_kept() {
    alone(|| {
        let mut keep = Keep::new(Carrier::default());
        // Not for a moment either.
        let generation = || Nft::open().and_then(|mut nft| nft.generation()).expect("a number");
        let mut look = || {
            let before = generation();
            let report = remove(Some(Mode::Userspace), Some(&mut keep));
            assert_eq!((report, generation()), (Report::default(), before));
        };
        look();
        tool(&["nft", "add table ip mine"], "")?;
        look();
        assert_eq!(tables()?, "table ip mine\n");
        Some(())
    });
}

/// As long as something goes, a connection may just have begun; in the next look the table goes.
#[test]
fn what_keeps_connections_goes_when_there_are_none() {
    for family in Family::BOTH.map(wire) {
        alone(|| {
            tool(&["nft", &format!("add table {family} portolan")], "")?;
            let mut keep = Keep::new(Carrier::default());
            let report = remove(Some(Mode::Userspace), Some(&mut keep));
            assert_eq!(report.removed, [format!("table {family} portolan")]);
            assert!(report.waits && report.kept.len() == 1 && report.failed.is_empty(), "{report:?}");
            let chain = format!("list chain {family} {KEEP} nat-prerouting");
            let written = tool(&["nft", &chain], "")?;
            let base = "type nat hook prerouting priority dstnat; policy accept;";
            assert!(written.contains(base) && written.contains("ct status dnat accept"), "{written}");
            let report = remove(Some(Mode::Userspace), Some(&mut keep));
            assert_eq!(report.removed, [format!("table {family} {KEEP}")]);
            assert!(!report.waits && report.kept.is_empty(), "{report:?}");
            assert_eq!(remove(Some(Mode::Userspace), Some(&mut keep)), Report::default());
            assert_eq!(tables()?, "");
            Some(())
        });
    }
}

/// A chain that stays for good is no reason to write a table at every look, and to tell of it.
#[test]
fn chains_of_iptables_are_kept_for_once() {
    for variant in Variant::BOTH {
        alone(|| {
            let with_user = TABLES.replace("-A MINE -j ACCEPT", "-A MINE -j KUBE-MARK-MASQ");
            tool(&[&format!("iptables-{variant}-restore")], &with_user)?;
            let kept = format!("table ip {KEEP}");
            let mut keep = Keep::new(Carrier::default());
            let report = remove(Some(Mode::Userspace), Some(&mut keep));
            assert!(report.waits && tables()?.contains(&kept), "{report:?}");
            let report = remove(Some(Mode::Userspace), Some(&mut keep));
            assert!(!report.waits && report.removed == [kept.clone()], "{report:?}");
            let report = remove(Some(Mode::Userspace), Some(&mut keep));
            assert!(!report.waits && report.removed.is_empty() && !report.kept.is_empty(), "{report:?}");
            assert!(!tables()?.contains(&kept));
            Some(())
        });
    }
}

#[test]
fn others_remove_what_keeps_connections_at_once() {
    let removals: [fn() -> Report; 5] = [
        || remove(Some(Mode::Nftables), None),
        || remove(Some(Mode::Userspace), None),
        || remove(None, None),
        || withdraw(When::Now),
        remove_kept,
    ];
    for removal in removals {
        alone(|| {
            tool(&["nft", "add table ip portolan"], "")?;
            remove(Some(Mode::Userspace), Some(&mut Keep::new(Carrier::default())));
            assert_eq!(withdraw(When::Relieved).failed.len(), 1, "nobody else translates");
            let report = removal();
            assert_eq!((report.removed, report.failed), (vec![format!("table ip {KEEP}")], Vec::new()));
            assert_eq!(tables()?, "");
            Some(())
        });
    }
}

/// Rules that are out of date would do more harm than the end of the connections they had translated.
#[test]
fn what_cannot_be_kept_goes_and_is_told() {
    alone(|| {
        for family in Family::BOTH.map(wire) {
            tool(&["nft", &format!("add table {family} portolan; add table {family} kube-proxy")], "")?;
        }
        // The first batch is that of IPv4.
        let mut batches = 0;
        let refuse_first = move |request: netlink::fake::Request| {
            batches += usize::from(request.is_batch);
            (request.is_batch && batches == 1).then_some(Fault::Refused(Errno::OPNOTSUPP))
        };
        let socket = Socket::open(Protocol::Netfilter).expect("a socket");
        let mut keep = Keep::new(Carrier::default());
        let nft = Ok(Nft::over(Faulty::new(socket, refuse_first)));
        let report = remove_over(nft, Some(Mode::Userspace), Some(&mut keep));
        let [told] = &report.harmed[..] else { panic!("{report:?}") };
        let begins = "connections over IPv4 that another mode or proxy had translated may end with its rules, as table ip \
                      portolan-keep cannot be written: ";
        assert!(told.starts_with(begins) && told.contains("not supported"), "{told}");
        assert_eq!((report.removed.len(), report.kept.len(), report.failed.len()), (4, 1, 0), "{report:?}");
        assert_eq!(tables()?, format!("table ip6 {KEEP}\n"));
        // And never again.
        assert_eq!(remove(Some(Mode::Userspace), Some(&mut keep)).harmed, Vec::<String>::new());
        assert_eq!(remove(Some(Mode::Userspace), Some(&mut keep)), Report::default());
        Some(())
    });
}

/// The same for chains that only tools can remove, where there is not even a socket.
#[test]
fn without_a_socket_what_cannot_be_kept_is_told() {
    alone(|| {
        tool(&["iptables-legacy-restore"], TABLES)?;
        let none: Result<Nft<Socket>, _> = Err(netlink::Error::Malformed("no socket"));
        let mut keep = Keep::new(Carrier::default());
        let report = remove_over(none, Some(Mode::Userspace), Some(&mut keep));
        assert!(
            matches!(&report.harmed[..], [told] if told.contains("IPv4") && told.contains("no socket")),
            "{report:?}"
        );
        assert_eq!(shown("iptables-legacy-save")?, REST);
        Some(())
    });
}

/// The chains of the other way kept what was translated before it, so that they too are not to go without.
#[test]
fn listeners_take_the_place_of_what_steers() {
    alone(|| {
        netlink::route::Route::open().and_then(|mut route| route.set_up(1, true)).expect("loopback goes up");
        let mut steering = crate::open(Mode::Userspace, &crate::Config::default()).expect("it can be opened");
        steering.apply(&model::Plan::new(), crate::Scope::All).expect("an empty plan");
        let mut keep = Keep::new(Carrier::default());
        let report = remove(Some(Mode::Userspace), Some(&mut keep));
        assert_eq!((report.removed.len(), report.kept.len(), report.waits), (0, 2, true), "{report:?}");
        drop(steering);
        let report = remove(Some(Mode::Userspace), Some(&mut keep));
        assert_eq!(report.removed, [format!("table ip {USERSPACE}"), format!("table ip6 {USERSPACE}")]);
        assert_eq!(tables()?, format!("table ip {KEEP}\ntable ip6 {KEEP}\n"));
        Some(())
    });
}

/// In one namespace: what is sent to port 80 of a service goes to port 8080 of the node.
#[test]
fn an_open_connection_stays_translated_until_it_ends() {
    let service: IpAddr = "10.96.0.10".parse().expect("an address");
    alone(|| {
        let mut route = netlink::route::Route::open().expect("a socket");
        route.set_up(1, true).expect("loopback goes up");
        route.add_address(1, service, 32).expect("an address");
        let rules = "add table ip portolan; add chain ip portolan out { type nat hook output priority -100; }; \
                     add rule ip portolan out tcp dport { 80, 81 } redirect to :8080";
        tool(&["nft", rules], "")?;
        let listener = TcpListener::bind("0.0.0.0:8080").expect("the port is free");
        let mut talk = Talk::begin(&listener, (service, 80));
        // Of somebody else, to whom it would be wrong to wait.
        let _other = Talk::begin(&listener, (Ipv4Addr::LOCALHOST.into(), 81));
        // Of whoever came to the listener itself.
        let _straight = Talk::begin(&listener, (service, 8080));
        let carrier = Carrier::default();
        carrier.pretend(&[service]);
        let mut keep = Keep::new(carrier.clone());
        for look in 0..3 {
            let report = remove(Some(Mode::Userspace), Some(&mut keep));
            assert!(report.waits && report.removed.is_empty() == (look > 0), "{look}: {report:?}");
            talk.go_on();
            // Gone meanwhile, or restarted and known anew.
            if look == 0 {
                carrier.pretend(&[]);
            } else {
                carrier.pretend(&[service]);
                keep = Keep::new(carrier.clone());
            }
        }
        talk.forget();
        let report = remove(Some(Mode::Userspace), Some(&mut keep));
        assert_eq!((report.removed, report.waits), (vec![format!("table ip {KEEP}")], false));
        Some(())
    });
}

/// The two ends of a connection.
struct Talk(TcpStream, TcpStream, u16);

impl Talk {
    fn begin(listener: &TcpListener, to: (IpAddr, u16)) -> Talk {
        let client = TcpStream::connect(to).expect("it is translated");
        let (server, _) = listener.accept().expect("it arrives");
        for end in [&client, &server] {
            end.set_read_timeout(Some(Duration::from_secs(5))).expect("a time");
        }
        Talk(client, server, to.1)
    }

    fn go_on(&mut self) {
        let Talk(client, server, _) = self;
        client.write_all(b"?").and_then(|()| server.read_exact(&mut [0])).expect("it is asked");
        server.write_all(b"!").and_then(|()| client.read_exact(&mut [0])).expect("it is answered");
    }

    /// The kernel would do so minutes after the end.
    fn forget(self) {
        let mut conntrack = Conntrack::open().expect("a socket");
        let mut found = Vec::new();
        let mut filter = Filter::protocol(netlink::Family::V4, 6);
        filter.original.dport = Some(self.2);
        conntrack.flows(&filter, |flow| found.push(*flow)).expect("a list");
        assert!(found.iter().all(|flow| conntrack.delete(flow).is_ok()) && found.len() == 1, "{found:?}");
    }
}
