// SPDX-License-Identifier: Apache-2.0

//! Somebody else lays hands on our tables: it is noticed, mended, counted, and told with who did it.

use std::{
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use lab::{
    Answer, Route, Transport,
    address::{Version, address_of},
};
use netlink::nft::Nft;
use stage::eventually;

use crate::bed::{Bed, cluster_ip};

/// What somebody does with `nft`.
const DEEDS: [(&str, &str); 5] = [
    ("flush ruleset", "flush ruleset"),
    ("delete table ip portolan", "deleted table"),
    ("flush map ip portolan endpoints", "deleted elements"),
    ("flush chain ip portolan nat-prerouting", "flushed chain"),
    ("flush chain ip portolan filter-forward; delete chain ip portolan filter-forward", "deleted chain"),
];

/// Far more than the 100 ms that it should take, as the machine may be busy. What it took is printed.
const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn what_others_do_is_mended_and_told() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    let rules = bed.daemon.rules();
    for (count, (deed, what)) in (1..).zip(DEEDS) {
        // The pause after a write is over, as it is for anybody who comes at any time.
        thread::sleep(Duration::from_millis(50));
        let mut nft = Nft::open_in(bed.node()).expect("a connection");
        let before = nft.generation().expect("a generation");
        bed.command(&["nft", deed]);
        let done = Instant::now();
        // One commit is theirs; the next ones are ours.
        while nft.generation().expect("a generation") < before + 2 {
            assert!(done.elapsed() < LIMIT, "{what}: not mended within {LIMIT:?}");
            thread::sleep(Duration::from_micros(200));
        }
        let took = done.elapsed();
        eventually(&format!("{what}: all is as it was"), || {
            let now = bed.daemon.rules();
            if now == rules { Ok(()) } else { Err(format!("{now:?}")) }
        });
        println!("{what}: mending began to take force {took:?} after the command had ended");
        let counted = |name: &str| bed.daemon.metric(name);
        eventually("it is counted", || {
            match (counted("portolan_drift_total")?, counted("portolan_drift_mended_total")?) {
                (found, mended) if found == f64::from(count) && mended == f64::from(count) => Ok(()),
                other => Err(format!("{other:?} of {count}")),
            }
        });
        let said = bed.daemon.said();
        let line = said.lines().rfind(|line| line.contains("somebody else changed")).expect("it is told");
        assert!(line.contains("by=\"nft ("), "{line}");
    }
    bed.daemon.must_run();
}

/// What begins while rules are missing is not translated, and would not be later either: the kernel decides that once.
#[test]
fn what_began_while_rules_were_missing_is_served_once_they_are_back() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    let lab = Arc::clone(&bed.lab);
    let source = Version::V4.address(address_of("a2").expect("a pod"));
    let destination = (cluster_ip(10), 80).into();
    let open =
        |transport| lab.open("a2", Route { source, destination, transport }, LIMIT).expect("the lab works");
    // Outside nobody answers for a service's address, not even with a refusal, as in most networks.
    let deaf = "add table ip deaf; add chain ip deaf in { type filter hook input priority 0; policy drop; }";
    let done =
        lab.netns("outside").and_then(|outside| Ok(outside.run(|| Command::new("nft").arg(deaf).status())?));
    assert!(done.expect("entered").expect("there is nft").success());
    // As if it were very slow: nobody mends anything for a while.
    bed.daemon.freeze();
    bed.command(&["nft", "flush", "ruleset"]);
    let mut datagrams = open(Transport::Udp).expect("nobody is asked yet");
    let short = Duration::from_millis(200);
    assert_eq!(datagrams.ask(short), Answer::TimedOut);
    thread::scope(|scope| {
        let stream = scope.spawn(|| open(Transport::Tcp).expect("a SYN is sent again and again"));
        thread::sleep(short);
        assert!(!stream.is_finished(), "rules are missing");
        bed.daemon.thaw();
        eventually("the flow is served", || match datagrams.ask(short) {
            Answer::Answered(_) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        let mut stream = stream.join().expect("it connects");
        assert!(matches!(stream.ask(LIMIT), Answer::Answered(_)));
    });
}
