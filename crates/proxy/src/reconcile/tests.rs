// SPDX-License-Identifier: Apache-2.0

use std::{net::IpAddr, sync::Mutex};

use dataplane::{Affinity, Applied, Error};
use model::{
    Conditions, DetectLocal, Endpoint, EndpointSlice, Family, Kind, Node, NodePortAddress, PerFamily,
    Protocol, Service, ServiceKey, ServiceKind, ServicePort, SliceKey, SlicePort, SourceRanges,
    TrafficPolicy,
};

use super::{sight::NODE_PATIENCE, *};

/// What a dataplane was asked to do, and how it shall answer.
#[derive(Default)]
struct Script {
    opened: usize,
    /// One entry for each call: complete or not, and how many frontends the plan had.
    calls: Vec<(bool, usize)>,
    answers: Vec<Answer>,
    /// What the next audit finds.
    audit: Option<&'static str>,
    affinity: Vec<Affinity>,
    audits: usize,
    /// How long the next write waits for others.
    waited: Duration,
}

#[derive(Clone, Copy)]
enum Answer {
    LeaveOut,
    Fail,
    Panic,
}

struct Fake(Arc<Mutex<Script>>);

impl Dataplane for Fake {
    fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Result<Applied, Error> {
        let mut script = self.0.lock().expect("the fake does not panic with it");
        script.calls.push((matches!(scope, Scope::All), plan.frontends().count()));
        let answer = script.answers.pop();
        drop(script);
        match answer {
            None => Ok(Applied::default()),
            Some(Answer::LeaveOut) => Ok(Applied { left_out: 1, ..Applied::default() }),
            Some(Answer::Fail) => Err(Error::Several(Vec::new())),
            Some(Answer::Panic) => panic!("scripted"),
        }
    }

    fn take_lock_wait(&mut self) -> Duration {
        std::mem::take(&mut self.0.lock().expect("the fake does not panic with it").waited)
    }

    fn audit(&mut self) -> Result<Audited, Error> {
        let mut script = self.0.lock().expect("the fake does not panic with it");
        script.audits += 1;
        let drift = script.audit.take().map(str::to_owned);
        Ok(Audited { drift, more: true, affinity: script.affinity.clone(), ..Audited::default() })
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn dump(&mut self) -> Result<String, Error> {
        Ok(String::new())
    }
}

struct Bench {
    reconciler: Reconciler,
    script: Arc<Mutex<Script>>,
    swept: Arc<Mutex<Vec<FlowRule>>>,
    /// How often flows were looked for that began while rules were missing.
    missed: Arc<Mutex<usize>>,
    published: Arc<Mutex<Vec<Option<Changes>>>>,
    status: Arc<Status>,
    metrics: Arc<Metrics>,
    now: Instant,
}

fn bench(stand_in: bool) -> Bench {
    let script = Arc::new(Mutex::new(Script::default()));
    let swept = Arc::new(Mutex::new(Vec::new()));
    let families = PerFamily { v4: true, v6: false };
    let status = Arc::new(Status::new(families, Duration::from_secs(30), !stand_in));
    let metrics = Arc::new(Metrics::new(SystemTime::now()));
    let settings = Settings {
        node_name: "here".into(),
        families,
        node_ip_override: PerFamily::default(),
        detect_local: DetectLocal::ClusterCidr(PerFamily::default()),
        node_port_addresses: Box::new([NodePortAddress::Primary]),
        masquerade_all: false,
        external_ips: true,
    };
    let (published, missed) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(0)));
    let misser = Arc::clone(&missed);
    let (opener, sweeper, publisher) = (Arc::clone(&script), Arc::clone(&swept), Arc::clone(&published));
    let ports = Ports {
        open: Box::new(move || {
            opener.lock().expect("unpoisoned").opened += 1;
            Ok(Box::new(Fake(Arc::clone(&opener))))
        }),
        sweep: Box::new(move |_, look| match look {
            Look::Stale(rules) => sweeper.lock().expect("unpoisoned").extend_from_slice(rules),
            Look::Missed => *misser.lock().expect("unpoisoned") += 1,
        }),
        publish: Box::new(move |_, changes| publisher.lock().expect("unpoisoned").push(changes.cloned())),
        events: Recorder::default(),
        connections: Arc::default(),
        seat: Seat::free(),
        status: Arc::clone(&status),
        metrics: Arc::clone(&metrics),
        // Nobody sends: what it begins with stays.
        tuning: watch::channel(Tuning { settings, max_pause: Duration::from_secs(1) }).1,
    };
    let reconciler = Reconciler::new(ports, Duration::from_secs(30), stand_in).expect("the fake opens");
    Bench { reconciler, script, swept, missed, published, status, metrics, now: Instant::now() }
}

impl Bench {
    fn tell(&mut self, updates: impl IntoIterator<Item = Update>) -> Option<Instant> {
        self.reconciler.take(&mut updates.into_iter().collect(), self.now);
        self.reconciler.turn(self.now)
    }

    /// Lists everything: one service with one endpoint, and this node.
    fn list(&mut self) -> Option<Instant> {
        self.tell([
            Update::HostAddresses(Box::new([[192, 0, 2, 5].into()])),
            Update::Begin(Kind::Service),
            service("a", 1),
            Update::End(Kind::Service),
            Update::Begin(Kind::EndpointSlice),
            slice("a", &[1]),
            Update::End(Kind::EndpointSlice),
            Update::Begin(Kind::Node),
            Update::Node(node(true)),
            Update::End(Kind::Node),
            Update::Begin(Kind::ServiceCidr),
            Update::End(Kind::ServiceCidr),
        ])
    }

    fn calls(&self) -> Vec<(bool, usize)> {
        self.script.lock().expect("unpoisoned").calls.clone()
    }

    fn answer(&self, answers: &[Answer]) {
        self.script.lock().expect("unpoisoned").answers = answers.iter().rev().copied().collect();
    }

    fn healthy(&self) -> bool {
        self.status.report(SystemTime::now()).healthy
    }
}

fn key(name: &str) -> ServiceKey {
    ServiceKey { namespace: "default".into(), name: name.into() }
}

fn service(name: &str, last: u8) -> Update {
    Update::Service(Service {
        key: key(name),
        created_secs: 0,
        kind: ServiceKind::ClusterIp,
        cluster_ips: PerFamily { v4: Some([10, 96, 0, last].into()), v6: None },
        ports: Box::new([ServicePort {
            name: "".into(),
            protocol: Protocol::Udp,
            port: 53,
            node_port: None,
        }]),
        external_ips: Box::default(),
        load_balancer_ips: Box::default(),
        source_ranges: SourceRanges::Any,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity_secs: None,
        tuning: None,
        weights: model::Weights::default(),
        health_check_node_port: None,
    })
}

fn slice(name: &str, endpoints: &[u8]) -> Update {
    let endpoint = |last: &u8| Endpoint {
        address: [10, 1, 0, *last].into(),
        conditions: Conditions::default(),
        node: None,
        zone: None,
        hints: None,
    };
    Update::Slice(EndpointSlice {
        key: SliceKey { namespace: "default".into(), name: format!("{name}-1").into() },
        service: key(name),
        family: Family::V4,
        ports: Box::new([SlicePort { name: "".into(), protocol: Protocol::Udp, port: 5353 }]),
        endpoints: endpoints.iter().map(endpoint).collect(),
        weight: 1,
        trigger_time_nanos: None,
    })
}

fn node(eligible: bool) -> Node {
    Node {
        name: "here".into(),
        addresses: PerFamily { v4: Some([192, 0, 2, 5].into()), v6: None },
        pod_cidrs: PerFamily::default(),
        zone: None,
        eligible,
    }
}

fn empty_lists() -> impl Iterator<Item = Update> {
    Kind::ALL.into_iter().flat_map(|kind| [Update::Begin(kind), Update::End(kind)])
}

/// The node's address and zone.
fn known(bench: &Bench) -> (Option<IpAddr>, Option<String>) {
    let node = bench.reconciler.world.node();
    let zone = node.and_then(|node| node.zone.as_deref()).map(str::to_owned);
    (node.and_then(|node| node.addresses.v4), zone)
}

#[test]
fn nothing_is_programmed_before_everything_is_listed() {
    let mut bench = bench(false);
    let next = bench.tell([Update::Begin(Kind::Service), service("a", 1), Update::End(Kind::Service)]);
    assert_eq!((next, bench.calls().len(), bench.healthy()), (None, 0, false));
    assert_eq!(bench.list(), None, "all done, nothing left to wait for");
    assert_eq!(bench.calls(), [(true, 1)]);
    assert!(bench.healthy());
}

#[test]
fn a_wait_for_others_is_told_also_when_it_was_in_vain() {
    let mut bench = bench(false);
    bench.answer(&[Answer::Fail]);
    bench.script.lock().expect("unpoisoned").waited = Duration::from_secs(5);
    bench.list();
    assert!(!bench.healthy());
    let text = bench.metrics.render();
    assert!(text.contains("portolan_iptables_lock_wait_seconds_sum 5\n"), "{text}");
}

#[test]
fn a_change_is_written_at_once_and_alone() {
    let mut bench = bench(false);
    bench.list();
    bench.now += Duration::from_secs(10);
    assert_eq!(bench.tell([slice("a", &[1, 2])]), None);
    assert_eq!(bench.calls(), [(true, 1), (false, 1)]);
    // What was known already, and what concerns nobody, is no work.
    bench.tell([slice("a", &[1, 2]), slice("stranger", &[9])]);
    assert_eq!(bench.calls().len(), 2);
    assert_eq!(bench.metrics.endpoint_changes.only().value(), 4);
}

#[test]
fn under_load_changes_gather() {
    let mut bench = bench(false);
    bench.list();
    // As if a change had taken an hour: the pause is cut at a second.
    let end = bench.now;
    bench.reconciler.pacer.succeeded(Work::Part, end - Duration::from_secs(3600), end);
    for last in 2..9 {
        assert_eq!(bench.tell([service("b", last)]), Some(end + Duration::from_secs(1)));
    }
    assert_eq!(bench.calls().len(), 1);
    bench.now = end + Duration::from_secs(1);
    assert_eq!(bench.tell([]), None);
    assert_eq!(bench.calls(), [(true, 1), (false, 2)]);
}

#[test]
fn what_somebody_breaks_is_mended_without_a_pause_and_so_is_what_they_break_again() {
    let mut bench = bench(false);
    bench.list();
    for repairs in 1..3 {
        // As if the last complete write had taken an hour.
        bench.reconciler.pacer.succeeded(Work::All, bench.now - Duration::from_secs(3600), bench.now);
        bench.reconciler.complete = true;
        let later = bench.now + Duration::from_secs(1);
        assert_eq!(bench.tell([]), Some(later), "a mere suspicion can wait");
        bench.reconciler.drifted = true;
        assert_eq!(bench.tell([]), None);
        assert_eq!(bench.calls().len(), 1 + repairs);
        let missed = *bench.missed.lock().expect("unpoisoned");
        assert_eq!(missed, 1 + repairs, "connections that began meanwhile are looked for, as at the start");
        bench.reconciler.pacer.succeeded(Work::All, bench.now, bench.now);
    }
}

#[test]
fn after_an_error_everything_is_written_again() {
    let mut bench = bench(false);
    bench.list();
    bench.now += Duration::from_secs(10);
    bench.answer(&[Answer::Fail, Answer::Fail]);
    let next = bench.tell([service("b", 2), slice("a", &[2])]).expect("a retry is due");
    assert!(next > bench.now && !bench.healthy());
    assert_eq!(bench.metrics.nftables_failures.with(&["IPv4"]).value(), 1);
    assert!(
        bench.swept.lock().expect("unpoisoned").iter().all(|rule| rule.gone.is_none()),
        "not before it is in force"
    );
    // A change in between does not shorten the wait.
    assert_eq!(bench.tell([service("c", 3)]), Some(next));
    assert_eq!(bench.calls().len(), 2);
    bench.now = next;
    bench.now = bench.tell([]).expect("the second failure");
    assert_eq!(bench.tell([]), None);
    assert_eq!(bench.calls()[1..], [(false, 2), (true, 3), (true, 3)]);
    assert!(bench.healthy());
    let swept = bench.swept.lock().expect("unpoisoned");
    assert!(swept.iter().any(|rule| rule.gone.as_ref().is_some_and(|gone| gone.len() == 1)), "{swept:?}");
}

#[test]
fn what_is_in_force_is_published_with_its_changes_and_after_an_error_whole() {
    let mut bench = bench(false);
    bench.list();
    bench.now += Duration::from_secs(5);
    bench.tell([slice("a", &[1, 2])]);
    bench.answer(&[Answer::Fail]);
    bench.now += Duration::from_secs(5);
    bench.tell([slice("a", &[1])]);
    bench.now += Duration::from_secs(60);
    bench.tell([]);
    let published = bench.published.lock().expect("unpoisoned");
    let frontends: Vec<_> =
        published.iter().map(|changes| changes.as_ref().map(|changes| changes.frontends.len())).collect();
    assert_eq!(frontends, [None, Some(1), None], "a failed write publishes nothing");
}

#[test]
fn only_what_happened_since_the_start_is_measured() {
    let mut bench = bench(false);
    let at = |update: Update, time: Option<SystemTime>| {
        let Update::Slice(slice) = update else { panic!("a slice") };
        let nanos =
            time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map(|since| since.as_nanos() as i64);
        Update::Slice(EndpointSlice { trigger_time_nanos: nanos, ..slice })
    };
    let measured = |bench: &Bench| {
        let text = bench.metrics.render();
        let count = "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"} ";
        text.lines().find_map(|line| line.strip_prefix(count)?.parse::<u64>().ok()).unwrap_or(0)
    };
    bench.list();
    // A slice that was there long before us, and is told only now.
    bench.now += Duration::from_secs(5);
    bench.tell([at(slice("a", &[1, 2]), Some(SystemTime::now() - Duration::from_secs(3600)))]);
    assert_eq!(measured(&bench), 0);
    bench.now += Duration::from_secs(5);
    bench.tell([at(slice("a", &[1, 3]), Some(SystemTime::now()))]);
    assert_eq!(measured(&bench), 1);
    // A time that is told again is no new change.
    bench.now += Duration::from_secs(5);
    bench.tell([at(slice("a", &[1]), None)]);
    assert_eq!(measured(&bench), 1);
}

#[test]
fn what_the_kernel_refused_is_tried_again_with_everything() {
    let mut bench = bench(false);
    bench.answer(&[Answer::LeaveOut]);
    let again = bench.list().expect("it is not done with");
    assert!(again >= bench.now + LEFT_OUT, "not at once: it would be refused again");
    assert!(bench.healthy(), "all others are served");
    assert_eq!(bench.tell([service("b", 2)]), Some(again), "a change meanwhile is written alone");
    bench.now = again;
    assert_eq!(bench.tell([]), None, "now it was taken");
    assert_eq!(bench.calls(), [(true, 1), (false, 2), (true, 2)]);
}

#[test]
fn a_panic_is_survived_with_a_new_plan_and_dataplane() {
    let mut bench = bench(false);
    bench.list();
    bench.now += Duration::from_secs(10);
    bench.answer(&[Answer::Panic]);
    let next = bench.tell([service("b", 2)]).expect("a retry is due");
    assert!(!bench.healthy());
    assert_eq!(bench.metrics.panics.only().value(), 1);
    bench.now = next + Duration::from_secs(1);
    assert_eq!(bench.tell([]), None);
    assert_eq!(bench.calls()[1..], [(false, 2), (true, 2)]);
    assert_eq!(bench.script.lock().expect("unpoisoned").opened, 2);
    assert!(bench.healthy());
}

#[test]
fn the_first_programming_waits_for_the_node() {
    let mut bench = bench(false);
    // The API server was away for long: there was nothing to wait for.
    bench.now += NODE_PATIENCE * 2;
    let begun = bench.now;
    assert!(
        bench.tell(empty_lists()).is_some_and(|again| again < begun + NODE_PATIENCE),
        "it is told before long"
    );
    bench.now += Duration::from_secs(2);
    assert_eq!(bench.tell([]), Some(begun + NODE_PATIENCE));
    assert!(bench.calls().is_empty());
    bench.now += Duration::from_secs(20);
    assert_eq!(bench.tell(empty_lists()), Some(begun + NODE_PATIENCE), "a relist is no new beginning");
    bench.tell([Update::Node(node(true))]);
    assert_eq!(bench.calls().len(), 1, "it came");

    let mut late = self::bench(false);
    late.now = late.tell(empty_lists()).expect("it waits");
    late.now = late.tell([]).expect("and goes on waiting");
    late.tell([]);
    assert_eq!(late.calls().len(), 1, "it did not");
}

#[test]
fn for_a_node_of_which_nothing_is_known_the_host_stands_in_after_the_wait() {
    let host = |last| Update::HostAddresses(Box::new([[127, 0, 0, 1].into(), [203, 0, 113, last].into()]));
    let bare = Node { addresses: PerFamily::default(), zone: Some("a".into()), ..node(true) };
    for (told, zone, eligible) in [(None, None, false), (Some(bare), Some("a"), true)] {
        let mut bench = bench(false);
        bench.tell(empty_lists().chain([host(9)]));
        let next = bench.tell(told.map(Update::Node));
        assert_eq!(known(&bench).0, None, "a Node may still come");
        bench.now = next.expect("it waits");
        bench.now = bench.tell([]).expect("and goes on waiting");
        bench.tell([]);
        assert_eq!(known(&bench), (Some([203, 0, 113, 9].into()), zone.map(str::to_owned)));
        assert_eq!(bench.status.report(SystemTime::now()).eligible, eligible);
        bench.tell([host(10)]);
        assert_eq!(known(&bench), (Some([203, 0, 113, 10].into()), zone.map(str::to_owned)));
        assert_eq!(bench.status.report(SystemTime::now()).eligible, eligible);
        bench.tell([Update::Node(node(true))]);
        bench.tell([host(9)]);
        assert_eq!(known(&bench), (Some([192, 0, 2, 5].into()), None), "what a Node says is better");
    }
}

#[test]
fn without_node_objects_the_host_stands_in() {
    let mut bench = bench(true);
    bench.tell(empty_lists());
    assert!(bench.calls().is_empty(), "the addresses are not known yet");
    bench.tell([Update::HostAddresses(Box::new([[127, 0, 0, 1].into(), [203, 0, 113, 9].into()]))]);
    assert_eq!(bench.calls().len(), 1);
    let address = |bench: &Bench| known(bench).0;
    assert_eq!(address(&bench), Some([203, 0, 113, 9].into()));
    // A new list without a Node does not take it away; another address is followed.
    bench.tell(empty_lists());
    assert!(bench.reconciler.world.node().expect("still there").eligible);
    bench.tell([Update::HostAddresses(Box::new([[203, 0, 113, 10].into()]))]);
    assert_eq!(address(&bench), Some([203, 0, 113, 10].into()));
    // A Node object is better than the host's word.
    bench.tell([Update::Begin(Kind::Node), Update::Node(node(true)), Update::End(Kind::Node)]);
    assert_eq!(address(&bench), Some([192, 0, 2, 5].into()));
}

#[test]
fn the_host_does_not_stand_in_for_a_node_that_was_there() {
    let mut bench = bench(true);
    bench.list();
    let pod_cidrs = PerFamily { v4: "10.1.0.0/24".parse().ok(), v6: None };
    let whole = Node { pod_cidrs, zone: Some("a".into()), ..node(true) };
    bench.tell([Update::Node(whole.clone())]);
    let host = |last| Update::HostAddresses(Box::new([[203, 0, 113, last].into()]));
    bench.tell([Update::Begin(Kind::Node), host(9)]);
    assert_eq!(bench.reconciler.world.node(), Some(&whole), "the rest of the list is under way");
    bench.tell([Update::Node(whole.clone()), Update::End(Kind::Node), Update::NodeGone]);
    assert_eq!(bench.reconciler.world.node(), Some(&Node { eligible: false, ..whole.clone() }));
    bench.tell(empty_lists().chain([host(10)]));
    assert_eq!(bench.reconciler.world.node(), Some(&Node { eligible: false, ..whole }));
}

#[test]
fn eligibility_reaches_the_status() {
    let mut bench = bench(false);
    bench.list();
    let eligible = |bench: &Bench| bench.status.report(SystemTime::now()).eligible;
    assert!(eligible(&bench));
    bench.tell([Update::Node(node(false))]);
    assert!(!eligible(&bench));
    bench.tell([Update::Node(node(true)), Update::NodeGone]);
    assert!(!eligible(&bench));
}

/// From files there may be no Node object, and in an empty network namespace no address: cluster addresses
/// are served all the same, at once.
#[test]
fn a_host_without_an_address_is_not_waited_for() {
    let mut bench = bench(true);
    bench.tell(empty_lists());
    assert!(bench.calls().is_empty(), "the host has not said yet what it has");
    bench.tell([Update::HostAddresses(Box::default())]);
    assert_eq!(bench.calls().len(), 1);
}

#[test]
fn what_the_audit_finds_is_mended_at_once_and_counted() {
    let mut bench = bench(false);
    bench.now = bench.reconciler.rounds.next(bench.now);
    assert_eq!(bench.reconciler.audit(bench.now), None, "nothing is known that could be looked at");
    bench.list();
    assert_eq!(bench.calls().len(), 1);
    let calm = bench.reconciler.audit(bench.now).expect("it waits");
    assert!(calm >= bench.now + rounds::STEP, "more may have to be written");
    assert_eq!(bench.script.lock().expect("unpoisoned").audits, 0);
    bench.now = calm;
    let due = bench.reconciler.audit(bench.now).expect("a round is under way");
    assert_eq!(due, bench.now + rounds::STEP);
    bench.reconciler.audit(bench.now);
    assert_eq!(bench.script.lock().expect("unpoisoned").audits, 1, "not before it is due");

    bench.script.lock().expect("unpoisoned").audit = Some("a rule is gone");
    bench.now = due;
    let again =
        bench.reconciler.audit(bench.now).expect("the next step does not wait for something else to happen");
    assert_eq!(again, bench.reconciler.rounds.next(bench.now));
    assert_eq!(bench.calls().last(), Some(&(true, 1)), "all is written");
    assert_eq!(bench.calls().len(), 2);
    let metrics = bench.metrics.render();
    for line in ["portolan_drift_total 1", "portolan_drift_mended_total 1"] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
}

#[test]
fn what_the_audit_says_of_affinity_is_shown() {
    let mut bench = bench(false);
    bench.list();
    let affinity = Affinity { family: Family::V6, clients: 5, limit: 1_000 };
    bench.script.lock().expect("unpoisoned").affinity = vec![affinity];
    bench.now = bench.reconciler.rounds.next(bench.now) + rounds::STEP;
    bench.reconciler.audit(bench.now);
    let metrics = bench.metrics.render();
    for name in [
        "portolan_affinity_clients{ip_family=\"IPv6\"} 5",
        "portolan_affinity_limit{ip_family=\"IPv6\"} 1000",
    ] {
        assert!(metrics.contains(name), "{name} is not in {metrics}");
    }
    assert!(!metrics.contains("portolan_affinity_clients{ip_family=\"IPv4\"}"), "nobody told");
}
