// SPDX-License-Identifier: Apache-2.0

//! Measures a dataplane alone, in a network namespace of its own:
//!
//!     cargo run --release -p portolan-dataplane --example load -- [nftables|nft|legacy|ipvs] 10000 10 [counted]
//!
//! `nft` and `legacy` are the iptables mode with that variant of the tools, whose CPU time is not in the figures; `ipvs`
//! runs where the kernel has it (`tests/vm/bench`). It loads so many services with so many endpoints (and counts connections up to so many of them), restarts, and then changes endpoints of one service at a time.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::{Applied, Config, Dataplane, Mode, Scope, xtables::Variant};
use model::{
    Address, Backend, Changes, Decision, Family, Forward, Frontend, Masquerade, NodePortScope, Plan,
    PlanBuilder, PodTraffic, Pool, Protocol, Reach, Role, ServiceKey, ServicePortName, Verdict,
};

fn main() {
    let mut args = std::env::args().skip(1).peekable();
    let (mode, xtables) = match args.next_if(|arg| arg.parse::<u32>().is_err()).as_deref() {
        None | Some("nftables") => (Mode::Nftables, None),
        Some("nft") => (Mode::Iptables, Some(Variant::Nft)),
        Some("legacy") => (Mode::Iptables, Some(Variant::Legacy)),
        Some("ipvs") => (Mode::Ipvs, None),
        Some(other) => panic!("{other} is none of nftables, nft, legacy and ipvs"),
    };
    let mut args = args.map(|arg| arg.parse().expect("a number"));
    let services: u32 = args.next().unwrap_or(10_000);
    let endpoints: u32 = args.next().unwrap_or(10);
    let netns = netlink::Netns::new().expect("a network namespace (run as root)");
    let counted: u32 = args.next().unwrap_or(0);
    let config = Config { counted_endpoints: counted as usize, xtables, ..Config::default() };
    netns.run(|| measure(services, endpoints, (mode, &config))).expect("entering the namespace");
}

fn measure(services: u32, endpoints: u32, (mode, config): (Mode, &Config)) {
    // Without it a network namespace has no routes at all, and IPVS takes no address for that of a machine.
    let mut route = netlink::route::Route::open().expect("a connection");
    let lo = route.link_index("lo").expect("there is one");
    route.set_up(lo, true).expect("up");
    println!("{services} services x {endpoints} endpoints");
    let plan = plan(services, endpoints, &|_| endpoints);
    println!("  (plan built; resident {} KiB)", memory("VmRSS"));
    let open = || dataplane::open(mode, config).expect("the dataplane");
    // A change by the tools takes as long as a thousand by netlink.
    let rounds = |many: usize| if mode == Mode::Iptables { 20 } else { many };

    let mut dataplane = open();
    timed("cold load", 1, |_| dataplane.apply(&plan, Scope::All).expect("load"));
    println!("  (peak resident {} KiB)", memory("VmHWM"));
    let mut dataplane = open();
    timed("restart: read and compare", 1, |_| dataplane.apply(&plan, Scope::All).expect("read"));
    println!("  (peak resident {} KiB)", memory("VmHWM"));
    if config.xtables == Some(Variant::Legacy) {
        read_legacy();
    }

    if let Some(mut meter) = dataplane.meter().expect("a meter") {
        timed("read what was counted", 10, |_| {
            meter.read().expect("readable");
            Applied::default()
        });
    }
    changes(&mut *dataplane, &plan, (services, endpoints), &rounds);
    if mode == Mode::Ipvs {
        audit(&mut *dataplane);
    }
}

/// What it costs to look for changes by others, once a second as the program does.
fn audit(dataplane: &mut dyn Dataplane) {
    const SECONDS: u32 = 60;
    let (before, start) = (cpu(), Instant::now());
    let mut most = Duration::ZERO;
    for second in 1..=SECONDS {
        let began = cpu();
        let audited = dataplane.audit().expect("it can be read");
        assert_eq!(audited.drift, None);
        most = most.max(cpu() - began);
        std::thread::sleep(Duration::from_secs(second.into()).saturating_sub(start.elapsed()));
    }
    let spent = cpu() - before;
    let share = 100.0 * spent.as_secs_f64() / start.elapsed().as_secs_f64();
    println!(
        "  look for changes by others                 cpu {spent:.1?} in {SECONDS} s, {share:.2} % ({most:.1?} at once)"
    );
}

/// What the watch of the legacy variant does to see an edit.
fn read_legacy() {
    let tables = netlink::legacy::Tables::open(netlink::Family::V4).expect("a socket");
    let shape = tables.shape("nat").expect("its shape");
    println!("  (table nat: {} entries, {} KiB)", shape.entries, shape.size / 1024);
    timed("read the rules of nat, and their digest", 20, |_| {
        let mut seen = 0;
        let entries = tables.read("nat").expect("its rules");
        entries.each_chain(|name| name.starts_with("KUBE-"), |_, rules| seen += rules.len());
        assert!(seen > 0);
        Applied::default()
    });
}

fn changes(
    dataplane: &mut dyn Dataplane,
    plan: &Plan,
    (services, endpoints): (u32, u32),
    rounds: &dyn Fn(usize) -> usize,
) {
    let target = services / 2;
    let changed = |count: u32| {
        self::plan(services, endpoints, &|index| if index == target { count } else { endpoints })
    };
    // A pool of `endpoints` is changed to one of other endpoints, as many, and back.
    let swapped = self::plan_with(services, endpoints, &|_| endpoints, Some(target));
    let changes = Changes { frontends: vec![frontend(target)], ..Changes::default() };
    let plans = [&swapped, plan];
    timed("swap one endpoint", rounds(1_000), |round| {
        dataplane.apply(plans[round % 2], Scope::Only(&changes)).expect("swap")
    });

    let fewer = changed(endpoints.saturating_sub(1).max(1));
    let plans = [&fewer, plan];
    timed("one endpoint less, one more", rounds(1_000), |round| {
        dataplane.apply(plans[round % 2], Scope::Only(&changes)).expect("count")
    });
    let double = changed(endpoints * 2 + 1);
    let plans = [&double, plan];
    timed("more than double, and back (other chain)", rounds(100), |round| {
        dataplane.apply(plans[round % 2], Scope::Only(&changes)).expect("class")
    });
    let more = self::plan(services + 1, endpoints, &|_| endpoints);
    let plans = [&more, plan];
    let changes = Changes {
        frontends: vec![frontend(services)],
        cluster_ips: vec![address(services)],
        ..Changes::default()
    };
    timed("one service more, one less", rounds(100), |round| {
        dataplane.apply(plans[round % 2], Scope::Only(&changes)).expect("service")
    });
    timed("nothing", rounds(1_000), |_| {
        dataplane.apply(plan, Scope::Only(&Changes::default())).expect("nothing")
    });
}

fn timed(what: &str, rounds: usize, mut work: impl FnMut(usize) -> Applied) {
    let cpu = cpu();
    let mut walls = Vec::with_capacity(rounds);
    let mut last = Applied::default();
    for round in 0..rounds {
        let start = Instant::now();
        last = work(round);
        walls.push(start.elapsed());
    }
    let spent = (self::cpu() - cpu) / rounds as u32;
    walls.sort();
    println!(
        "  {what:42} wall p50 {:>10.1?} p99 {:>10.1?}  cpu {spent:>10.1?}  ({} batches, +{} -{} elements)",
        walls[rounds / 2],
        walls[rounds * 99 / 100],
        last.batches,
        last.added,
        last.removed
    );
}

/// CPU time of this process, in the kernel and outside.
fn cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat");
    Duration::from_nanos(
        text.split_whitespace().next().and_then(|word| word.parse().ok()).expect("nanoseconds"),
    )
}

fn memory(what: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with(what)).expect("a line for it");
    line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("KiB")
}

fn plan(services: u32, endpoints: u32, count: &dyn Fn(u32) -> u32) -> Plan {
    plan_with(services, endpoints, count, None)
}

/// `swapped` is the service whose last endpoint is another.
fn plan_with(services: u32, endpoints: u32, count: &dyn Fn(u32) -> u32, swapped: Option<u32>) -> Plan {
    let pods = "10.128.0.0/24".parse().expect("a network");
    let mut builder = PlanBuilder::new()
        .node_ports(Family::V4, NodePortScope::All)
        .node_ports(Family::V6, NodePortScope::All)
        .pod_traffic(Family::V4, PodTraffic::Source(pods));
    for index in 0..services {
        let backend = |slot: u32| Backend {
            address: Ipv4Addr::from(0x0a80_0000 + (index * endpoints + slot) % 0x3f_ffff).into(),
            port: 8080,
            local: false,
            weight: 1,
        };
        let mut backends: Vec<Backend> = (0..count(index)).map(backend).collect();
        if let (true, Some(last)) = (swapped == Some(index), backends.last_mut()) {
            last.port = 9090;
        }
        backends.sort();
        backends.dedup();
        let pool = Arc::new(Pool { backends: backends.into() });
        let verdict = Verdict::Forward(Forward { pool, masquerade: Masquerade::OffPods });
        builder = builder.frontend(frontend(index), decision(index, verdict));
    }
    builder.build()
}

fn decision(index: u32, verdict: Verdict) -> Decision {
    let service = ServiceKey { namespace: "default".into(), name: format!("service-{index}").into() };
    Decision {
        service: Arc::new(ServicePortName { service, port: "http".into(), protocol: Protocol::Tcp }),
        role: Role::ClusterIp,
        inside: verdict.clone(),
        outside: verdict,
        affinity: None,
        tuning: None,
        source_ranges: None,
        reach: Reach::Cluster,
        rank: if index == 0 { 0 } else { 2 },
    }
}

fn frontend(index: u32) -> Frontend {
    Frontend { address: Address::Ip(address(index)), protocol: Protocol::Tcp, port: 80 }
}

fn address(index: u32) -> IpAddr {
    Ipv4Addr::from(0x0a60_0000 + index + 1).into()
}
