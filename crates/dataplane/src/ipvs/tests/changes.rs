// SPDX-License-Identifier: Apache-2.0

//! Step by step, with failures, comes to the same as at once; and a step costs what it changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use model::{DetectLocal, Family, PerFamily, Plan, TrafficPolicy};
use netlink::ipvs::{Change, Dest, DestKey, Forward, Service, ServiceKey};
use proptest::prelude::*;

use super::memory::Memory;
use crate::{
    Config, Dataplane as _, Loopback, Scope,
    iptables::tests::{
        make::{Cluster, Sketch, detectors, events, ready, sampler, sketch},
        memory::Memory as Tables,
    },
    ipvs::{
        Ipvs, Settings, holdings::asked, kernel::Machine as _, program::Program, render::Scene, sets::Set,
        text,
    },
    loopback::Localnet,
    names::{ROUTE_LOCALNET, xt},
    nftables::tests::make::{ip, node_ip},
    xtables::{Table, Tables as _, testing::namespace},
};

type Fake = Ipvs<Memory, Tables>;

fn own() -> BTreeSet<IpAddr> {
    Family::BOTH.into_iter().flat_map(|family| [node_ip(family), ip(family, "192.168.0.9")]).collect()
}

fn ipvs(memory: Memory) -> Fake {
    Ipvs::over(Memory { own: own(), ..memory }, Tables::default(), &Config::default())
}

fn program(plan: &Plan, family: Family) -> Program {
    let (settings, own) = (Settings::default(), own());
    Program::render(&Scene {
        plan,
        family,
        settings: &settings,
        own: &own,
        mark: 1 << 14,
        loopback: Loopback::Closed,
    })
}

/// Panics unless the kernel holds the plan, all of it and nothing else; what is going aside.
fn assert_holds(ipvs: &Fake, plan: &Plan) {
    let machine = &ipvs.machine;
    let programs = PerFamily::from_fn(|family| program(plan, family));
    let by_mark = |key: &ServiceKey| matches!(key, ServiceKey::Mark { .. });
    // Which number a mark has is chance; what it leads to is not.
    let mut wanted: BTreeMap<ServiceKey, (Service, BTreeMap<DestKey, u32>)> = BTreeMap::new();
    let (mut marked_wanted, mut marked_found) = (Vec::new(), Vec::new());
    for server in Family::BOTH.into_iter().flat_map(|family| programs[family].servers.values()) {
        let dests: BTreeMap<DestKey, u32> = server.dests.iter().copied().collect();
        match by_mark(&server.service.key) {
            true => marked_wanted.push(dests),
            false => drop(wanted.insert(server.service.key, (server.service.clone(), dests))),
        }
    }
    let mut found = BTreeMap::new();
    for (key, (service, dests)) in &machine.servers {
        let open: BTreeMap<DestKey, u32> =
            dests.values().filter(|dest| dest.weight > 0).map(|dest| (dest.key, dest.weight)).collect();
        match by_mark(key) {
            true => marked_found.push(open),
            false => drop(found.insert(*key, (asked(service), open))),
        }
    }
    assert_eq!(found, wanted);
    marked_wanted.sort();
    marked_found.sort();
    assert_eq!(marked_found, marked_wanted);
    for (family, set) in Family::BOTH.into_iter().flat_map(|family| Set::ALL.map(|set| (family, set))) {
        let (_, elements) = &machine.sets[&set.name(family)];
        match set {
            Set::Inside => assert_eq!(elements.len(), programs[family].sets[&set].len()),
            _ => assert_eq!(elements, &programs[family].sets[&set], "{}", set.name(family)),
        }
    }
    let addresses = Family::BOTH.into_iter().flat_map(|family| programs[family].addresses.iter().copied());
    assert_eq!(machine.bound, addresses.collect());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_way_with_failures_ends_with_the_plan(
        detector in detectors(),
        events in prop::collection::vec(events(), 1..16),
        schedule in prop::collection::vec(prop::sample::select(vec![false, false, false, true]), 0..200),
    ) {
        let mut cluster = Cluster::new(detector);
        let mut ipvs = ipvs(Memory { schedule: schedule.into(), ..Memory::default() });
        let mut is_well = ipvs.apply(&cluster.plan, Scope::All).is_ok();
        for event in events {
            let changes = cluster.update(event.updates());
            let scope = if is_well { Scope::Only(&changes) } else { Scope::All };
            is_well = ipvs.apply(&cluster.plan, scope).is_ok();
        }
        ipvs.machine.schedule.clear();
        if !is_well {
            ipvs.apply(&cluster.plan, Scope::All).unwrap();
        }
        assert_holds(&ipvs, &cluster.plan);
        let again = ipvs.apply(&cluster.plan, Scope::All).unwrap();
        prop_assert!(again.changed_nothing(), "{again:?}");
    }
}

#[test]
fn a_restart_changes_nothing() {
    let cluster = sampler();
    let mut first = ipvs(Memory::default());
    first.apply(&cluster.plan, Scope::All).unwrap();
    assert_holds(&first, &cluster.plan);
    let written = first.machine.written;
    let mut second = Ipvs::over(first.machine, first.tables, &Config::default());
    assert!(second.apply(&cluster.plan, Scope::All).unwrap().changed_nothing());
    assert_eq!(second.machine.written, written);
}

/// The chain is the kubelet's too, and what it has there stays.
#[test]
fn loopback_is_guarded_while_the_kernel_would_route_it() {
    let Some(netns) = namespace() else { return };
    let set = |value| netns.run(move || std::fs::write(ROUTE_LOCALNET, value)).unwrap().unwrap();
    let cluster = sampler();
    let mut ipvs = ipvs(Memory::default());
    ipvs.localnet = Localnet::of_kernel();
    let kubelet = "*filter\n:KUBE-FIREWALL - [0:0]\n-A KUBE-FIREWALL -d 192.0.2.1/32 -j DROP\nCOMMIT\n";
    ipvs.tables.restore(Family::V4, kubelet).unwrap();
    let count = |ipvs: &Fake, family, chain| {
        let rules = ipvs.tables.rules(family, Table::Filter, chain).cloned().unwrap_or_default();
        rules.into_iter().filter(|rule| chain == xt::FIREWALL || rule.contains(xt::FIREWALL)).count()
    };
    for (value, guard) in [("0", 0), ("1", 1), ("1", 1)] {
        set(value);
        netns.run(|| ipvs.apply(&cluster.plan, Scope::All)).unwrap().unwrap();
        let held = ["INPUT", "OUTPUT", xt::FIREWALL].map(|chain| count(&ipvs, Family::V4, chain));
        assert_eq!(held, [guard, guard, guard + 1], "{value}");
        assert_eq!(count(&ipvs, Family::V6, "INPUT"), 0, "the kernel never routes ::1");
        let again = netns.run(|| ipvs.apply(&cluster.plan, Scope::All)).unwrap().unwrap();
        assert!(again.changed_nothing(), "{again:?}");
    }
}

/// Whatever the size of the cluster and of the service.
#[test]
fn one_endpoint_is_one_message_for_each_address() {
    for (services, endpoints) in [(1u8, 4u8), (40, 4), (5, 60)] {
        let mut cluster = Cluster::new(DetectLocal::NodeCidr);
        let hosts: Vec<u8> = (101..101 + endpoints).collect();
        let each = (1..=services).flat_map(|number| {
            let service = sketch(number);
            [vec![service.service()], service.slices(&ready(&hosts))].concat()
        });
        cluster.update(each);
        let mut ipvs = ipvs(Memory::default());
        ipvs.apply(&cluster.plan, Scope::All).unwrap();
        (ipvs.machine.written, ipvs.machine.asked) = (0, 0);
        let more: Vec<u8> = (101..=101 + endpoints).collect();
        let changes = cluster.update(sketch(1).slices(&ready(&more)));
        ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
        assert_eq!((ipvs.machine.written, ipvs.machine.asked), (2, 0), "one for each family");
        let changes = cluster.update(sketch(1).slices(&ready(&hosts)));
        ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
        assert_eq!((ipvs.machine.written, ipvs.machine.asked), (4, 0));
        assert_holds(&ipvs, &cluster.plan);
    }
}

fn server(address: &str) -> Service {
    let key = ServiceKey::At { protocol: 6, address: address.parse().unwrap(), port: 80 };
    Service { key, scheduler: "wlc".to_owned(), flags: 0, timeout: 0 }
}

#[test]
fn servers_of_others_are_not_touched() {
    let foreign = [server("198.18.0.1"), server("192.168.0.9")];
    let mut memory = Memory::default();
    memory.change(&foreign.clone().map(Change::AddService)).unwrap();
    let by_mark = ServiceKey::Mark { family: netlink::Family::V4, mark: 1 };
    memory.change(&[Change::AddService(Service { key: by_mark, ..server("198.18.0.1") })]).unwrap();
    // Left behind by somebody of our trade.
    let stale = server("10.96.0.99");
    memory.change(&[Change::AddService(stale.clone())]).unwrap();
    memory.bound.insert("10.96.0.99".parse().unwrap());
    let mut ipvs = ipvs(memory);
    let mut cluster = sampler();
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    let changes = cluster.update([]);
    ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    for key in foreign.map(|service| service.key).into_iter().chain([by_mark]) {
        assert_eq!(ipvs.machine.servers[&key].0.scheduler, "wlc");
    }
    assert!(!ipvs.machine.servers.contains_key(&stale.key), "it was ours to remove");
    assert!(!ipvs.machine.bound.contains(&"10.96.0.99".parse().unwrap()));
}

#[test]
fn excluded_servers_are_never_removed() {
    let stale = server("10.96.0.99");
    let mut memory = Memory { own: own(), ..Memory::default() };
    memory.change(&[Change::AddService(stale.clone())]).unwrap();
    memory.bound.insert("10.96.0.99".parse().unwrap());
    let settings = Settings { exclude: vec!["10.96.0.99/32".parse().unwrap()], ..Settings::default() };
    let config = Config { ipvs: settings, ..Config::default() };
    let mut ipvs = Ipvs::over(memory, Tables::default(), &config);
    ipvs.apply(&sampler().plan, Scope::All).unwrap();
    assert!(ipvs.machine.servers.contains_key(&stale.key));
}

fn vip(number: u8) -> ServiceKey {
    ServiceKey::At { protocol: 6, address: ip(Family::V4, &format!("10.96.0.{number}")), port: 80 }
}

fn dest(host: u8) -> DestKey {
    let net = u8::from(host >= 100);
    DestKey { address: ip(Family::V4, &format!("10.244.{net}.{host}")), port: 8080 }
}

#[test]
fn a_real_server_goes_when_its_connections_have_ended() {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let web = sketch(1);
    cluster.update([vec![web.service()], web.slices(&ready(&[101, 102]))].concat());
    let mut ipvs = ipvs(Memory::default());
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    ipvs.machine.busy.insert((vip(1), dest(102)), 3);
    let changes = cluster.update(web.slices(&ready(&[101])));
    ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    let weight = |ipvs: &Fake, host| ipvs.machine.servers[&vip(1)].1.get(&dest(host)).map(|dest| dest.weight);
    assert_eq!((weight(&ipvs, 101), weight(&ipvs, 102)), (Some(1), Some(0)));
    assert!(ipvs.audit().unwrap().more);
    assert_eq!(weight(&ipvs, 102), Some(0), "it has connections");
    // A new process knows nothing of it, but finds it.
    let mut ipvs = Ipvs::over(ipvs.machine, ipvs.tables, &Config::default());
    assert!(ipvs.apply(&cluster.plan, Scope::All).unwrap().changed_nothing());
    ipvs.machine.busy.clear();
    ipvs.audit().unwrap();
    assert_eq!(weight(&ipvs, 102), None);
    // It comes back as if it had never been gone.
    let changes = cluster.update(web.slices(&ready(&[101, 102])));
    ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    assert_eq!(weight(&ipvs, 102), Some(1));
    assert_holds(&ipvs, &cluster.plan);
}

#[test]
fn weights_that_somebody_left_do_not_survive_a_start() {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let web = sketch(1);
    cluster.update([vec![web.service()], web.slices(&ready(&[101, 102]))].concat());
    let mut first = ipvs(Memory::default());
    first.apply(&cluster.plan, Scope::All).unwrap();
    let quiet = Dest { key: dest(102), weight: 0, forward: Forward::Nat };
    first.machine.change(&[Change::SetDest(vip(1), quiet)]).unwrap();
    let mut second = Ipvs::over(first.machine, first.tables, &Config::default());
    assert_eq!(second.apply(&cluster.plan, Scope::All).unwrap().added, 1);
    assert_holds(&second, &cluster.plan);
}

/// A service was deleted that still has a connection.
fn gone_while_busy() -> (Cluster, Fake) {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let web = sketch(1);
    cluster.update([vec![web.service()], web.slices(&ready(&[101]))].concat());
    let mut ipvs = ipvs(Memory::default());
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    ipvs.machine.busy.insert((vip(1), dest(101)), 1);
    let changes = cluster.update(crate::iptables::tests::make::Event::Gone(1).updates());
    ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    (cluster, ipvs)
}

#[test]
fn a_service_that_goes_keeps_its_connections() {
    let (cluster, mut ipvs) = gone_while_busy();
    let address = ip(Family::V4, "10.96.0.1");
    assert!(ipvs.machine.bound.contains(&address));
    assert_eq!(ipvs.machine.servers[&vip(1)].1[&dest(101)].weight, 0);
    assert_eq!(ipvs.machine.servers.len(), 1, "that of the other family had none");
    ipvs.machine.busy.clear();
    ipvs.audit().unwrap();
    assert_eq!((ipvs.machine.servers.len(), ipvs.machine.bound.len()), (0, 0));
    assert_holds(&ipvs, &cluster.plan);
}

#[test]
fn what_others_change_is_found_and_mended() {
    let cluster = sampler();
    let mut ipvs = ipvs(Memory::default());
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    let mut now = Instant::now();
    let mut round = |ipvs: &mut Fake| {
        (0..10).find_map(|_| {
            // As long as a pause can be, however slow this machine is.
            now += Duration::from_secs(60);
            ipvs.look(now).unwrap().drift
        })
    };
    assert_eq!(round(&mut ipvs), None);
    let harms: [&dyn Fn(&mut Memory); 6] = [
        &|memory| assert!(memory.bound.remove(&ip(Family::V4, "10.96.0.1"))),
        &|memory| {
            let dests = &mut memory.servers.get_mut(&vip(1)).unwrap().1;
            dests.get_mut(&dest(101)).unwrap().forward = Forward::Other(3);
        },
        &|memory| drop(memory.servers.remove(&vip(1))),
        &|memory| memory.servers.get_mut(&vip(1)).unwrap().0.scheduler = "sh".to_owned(),
        &|memory| memory.servers.get_mut(&vip(1)).unwrap().1.retain(|key, _| *key != dest(101)),
        &|memory| memory.sets.get_mut("KUBE-CLUSTER-IP").unwrap().1.clear(),
    ];
    for harm in harms {
        harm(&mut ipvs.machine);
        assert!(round(&mut ipvs).is_some());
        let applied = ipvs.apply(&cluster.plan, Scope::All).unwrap();
        assert!(!applied.changed_nothing() && !applied.mended, "the audit has told of it already");
        assert_holds(&ipvs, &cluster.plan);
        assert_eq!(round(&mut ipvs), None);
        // Found by a write that was made for another reason.
        harm(&mut ipvs.machine);
        assert!(ipvs.apply(&cluster.plan, Scope::All).unwrap().mended);
    }
}

/// An endless stream does not keep a real server for ever.
#[test]
fn a_real_server_goes_when_its_time_is_up() {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let web = sketch(1);
    cluster.update([vec![web.service()], web.slices(&ready(&[101, 102, 103]))].concat());
    let mut ipvs = ipvs(Memory::default());
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    ipvs.machine.busy.extend([102, 103].map(|host| ((vip(1), dest(host)), 1)));
    let going = |ipvs: &Fake| {
        let dests = &ipvs.machine.servers[&vip(1)].1;
        [102, 103].map(|host| dests.get(&dest(host)).map(|dest| dest.weight))
    };
    let changes = cluster.update(web.slices(&ready(&[101, 103])));
    ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    let start = Instant::now();
    ipvs.look(start).unwrap();
    // A minute later the other goes too: each has its own time.
    let changes = cluster.update(web.slices(&ready(&[101])));
    ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    let minutes = |count: u64| start + Duration::from_secs(60 * count);
    ipvs.look(minutes(1)).unwrap();
    ipvs.look(minutes(15) - Duration::from_secs(1)).unwrap();
    assert_eq!(going(&ipvs), [Some(0), Some(0)]);
    ipvs.look(minutes(15)).unwrap();
    assert_eq!(going(&ipvs), [None, Some(0)]);
    ipvs.look(minutes(16)).unwrap();
    assert_eq!(going(&ipvs), [None, None]);
    assert_holds(&ipvs, &cluster.plan);
}

/// The bound holds for a service that is deleted, too, with all that it needed.
#[test]
fn a_service_that_goes_is_gone_when_its_time_is_up() {
    let (_, mut ipvs) = gone_while_busy();
    let start = Instant::now();
    ipvs.look(start).unwrap();
    assert_eq!(ipvs.machine.servers.len(), 1);
    ipvs.look(start + Duration::from_secs(15 * 60)).unwrap();
    assert_eq!((ipvs.machine.servers.len(), ipvs.machine.bound.len()), (0, 0));
}

/// kube-proxy refuses sets that end elsewhere than its own.
#[test]
fn sets_are_of_the_usual_size_and_keep_what_they_hold() {
    let cluster = sampler();
    let mut first = ipvs(Memory::default());
    first.apply(&cluster.plan, Scope::All).unwrap();
    let mut memory = first.machine;
    for (wrong, name) in [(4, "KUBE-CLUSTER-IP"), (1 << 20, "KUBE-6-CLUSTER-IP")] {
        assert!(!memory.sets[name].1.is_empty());
        memory.sets.get_mut(name).unwrap().0.max_elements = wrong;
    }
    let held = memory.sets.clone();
    let mut second = Ipvs::over(memory, first.tables, &Config::default());
    second.apply(&cluster.plan, Scope::All).unwrap();
    assert_holds(&second, &cluster.plan);
    let sizes = |set: Set| Family::BOTH.map(|f| second.machine.sets[&set.name(f)].0.max_elements);
    for set in Set::ALL.into_iter().filter(|set| !Set::OWN.contains(set)) {
        assert_eq!(sizes(set), [65_536; 2], "{set:?}");
    }
    let names = |sets: &BTreeMap<String, _>| sets.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&second.machine.sets), names(&held), "the spare one is gone");
    assert!(second.apply(&cluster.plan, Scope::All).unwrap().changed_nothing());
}

#[test]
fn a_dump_shows_all_that_is_ours_and_nothing_else() {
    let cluster = sampler();
    let mut ipvs = ipvs(Memory::default());
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    let foreign = server("203.0.113.77");
    ipvs.machine.change(&[Change::AddService(foreign)]).unwrap();
    let text = ipvs.dump().unwrap();
    for family in Family::BOTH {
        let program = program(&cluster.plan, family);
        let listing = text::ipvsadm(&program) + &text::ipset(&program);
        // Which number a mark has is chance.
        for line in listing.lines().filter(|line| !line.starts_with("FWM") && !line.contains("skbmark")) {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
        for ip in &program.addresses {
            assert!(text.contains(&format!("kube-ipvs0 {ip}\n")), "{ip} is not in\n{text}");
        }
    }
    assert!(text.contains("-A KUBE-SERVICES "), "{text}");
    assert!(!text.contains("203.0.113.77"), "{text}");
}

/// Changes come all the time; what somebody did is found all the same.
#[test]
fn changes_do_not_put_the_comparison_off() {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let every = (1..=200).map(sketch);
    cluster.update(every.flat_map(|it| [vec![it.service()], it.slices(&ready(&[101, 102, 103]))].concat()));
    let mut ipvs = ipvs(Memory::default());
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    ipvs.machine.servers.get_mut(&vip(200)).unwrap().1.retain(|key, _| *key != dest(101));
    let start = Instant::now();
    let found = (1..30u8).find_map(|minute| {
        let more = cluster.update(sketch(1).slices(&ready(&[101, 110 + minute])));
        ipvs.apply(&cluster.plan, Scope::Only(&more)).unwrap();
        let asked = std::mem::take(&mut ipvs.machine.asked);
        let drift = ipvs.look(start + Duration::from_secs(60 * u64::from(minute))).unwrap().drift;
        assert!(ipvs.machine.asked < asked + 250, "a step is small: {}", ipvs.machine.asked);
        drift
    });
    assert_eq!(found.as_deref(), Some("the real servers of 10.96.0.200:80/tcp have changed"));
}

/// One service asks for what this kernel has not: it is served, by the node's scheduler, and all others are too.
#[test]
fn a_scheduler_that_is_not_there_hurts_nobody() {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let odd = |scheduler| {
        let model::Update::Service(mut service) = sketch(1).service() else { panic!("a service") };
        let algorithm = model::Algorithm::of(scheduler);
        service.tuning = Some(Arc::new(model::Tuning { algorithm, ..model::Tuning::default() }));
        model::Update::Service(service)
    };
    let (lblcr, twos) = (model::Scheduler::LocalityReplication, model::Scheduler::RandomOfTwo);
    let first = [vec![odd(lblcr)], sketch(1).slices(&ready(&[101]))].concat();
    cluster.update([first, vec![sketch(2).service()], sketch(2).slices(&ready(&[102]))].concat());
    let mut ipvs = ipvs(Memory { lacks: vec!["lblcr", "twos"], ..Memory::default() });
    let scheduler = |ipvs: &Fake, number| ipvs.machine.servers[&vip(number)].0.scheduler.clone();
    let applied = ipvs.apply(&cluster.plan, Scope::All).unwrap();
    assert_eq!(applied.warnings, ["this kernel has not ip_vs_lblcr; rr serves instead"]);
    assert_eq!((scheduler(&ipvs, 1).as_str(), scheduler(&ipvs, 2).as_str()), ("rr", "rr"));
    assert!(!ipvs.abilities().schedulers.contains(&lblcr), "so that people are told");
    let changes = cluster.update([odd(twos)]);
    let applied = ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    assert!(applied.warnings.iter().any(|it| it.contains("scheduler twos")), "{:?}", applied.warnings);
    assert_eq!(ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap().warnings, [""; 0], "it is known");
    ipvs.machine.lacks.clear();
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    assert_eq!(scheduler(&ipvs, 1), "twos", "somebody has loaded it");
}

#[test]
fn an_endpoint_that_the_kernel_refuses_hurts_only_itself() {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let both = [sketch(1), sketch(2)];
    cluster.update(both.iter().flat_map(|it| [vec![it.service()], it.slices(&ready(&[101, 102]))].concat()));
    let mut ipvs = ipvs(Memory { refuses: Some(dest(101).address), ..Memory::default() });
    let applied = ipvs.apply(&cluster.plan, Scope::All).unwrap();
    let says =
        "real server 10.244.1.101:8080 of 10.96.0.2:80/tcp is left out: the kernel refuses its address";
    assert!(applied.warnings.iter().any(|it| it == says), "{:?}", applied.warnings);
    for number in [1, 2] {
        let dests: Vec<DestKey> = ipvs.machine.servers[&vip(number)].1.keys().copied().collect();
        assert_eq!(dests, [dest(102)]);
    }
    assert_eq!(ipvs.look(Instant::now()).unwrap().drift, None, "what is left out is not missed");
    let changes = cluster.update(both[0].slices(&ready(&[102, 103])));
    assert_eq!(ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap().warnings, [""; 0]);
}

/// Only UDP has packets without connections.
#[test]
fn packets_are_scheduled_one_by_one_where_it_is_asked_for() {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let model::Update::Service(mut service) = sketch(1).service() else { panic!("a service") };
    let flags = model::SchedulerFlags::ONE_PACKET;
    let algorithm = model::Algorithm { scheduler: None, flags };
    service.tuning = Some(Arc::new(model::Tuning { algorithm, ..model::Tuning::default() }));
    let mut udp = service.ports[0].clone();
    udp.protocol = model::Protocol::Udp;
    service.ports = service.ports.iter().cloned().chain([udp]).collect();
    cluster.update([model::Update::Service(service)]);
    let mut ipvs = ipvs(Memory::default());
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    let ops = |protocol| {
        let key = ServiceKey::At { protocol, address: ip(Family::V4, "10.96.0.1"), port: 80 };
        ipvs.machine.servers[&key].0.flags & netlink::ipvs::flags::ONE_PACKET != 0
    };
    assert_eq!((ops(6), ops(17)), (false, true));
}

#[test]
fn node_ports_follow_the_addresses_of_the_node() {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let web = Sketch { node_port: true, external: TrafficPolicy::Local, ..sketch(1) };
    cluster.update([vec![web.service()], web.slices(&ready(&[1, 101]))].concat());
    let mut ipvs = ipvs(Memory::default());
    ipvs.apply(&cluster.plan, Scope::All).unwrap();
    let extra = ip(Family::V4, "192.168.0.77");
    let key = ServiceKey::At { protocol: 6, address: extra, port: 30_001 };
    assert!(!ipvs.machine.servers.contains_key(&key));
    ipvs.machine.own.insert(extra);
    ipvs.machine.news = true;
    let changes = cluster.update([]);
    ipvs.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    assert!(ipvs.machine.servers.contains_key(&key));
}
