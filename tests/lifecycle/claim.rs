// SPDX-License-Identifier: Apache-2.0

//! Two daemons on one node.

use std::{sync::Arc, thread};

use stage::{Daemon, eventually, load::Load};

use crate::bed::{Bed, everywhere, program};

/// As in an upgrade that starts the new before it ends the old.
#[test]
fn the_second_waits_for_the_end_of_the_first() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    let folder = bed.folder().join("second");
    std::fs::create_dir(&folder).expect("a folder");
    let mut second = Daemon::new(program().to_owned(), bed.node().try_clone().expect("a handle"), folder);
    let lab = Arc::clone(&bed.lab);
    thread::scope(|scope| {
        let load = Load::begin(scope, &lab, &everywhere());
        let rules = bed.daemon.rules();
        let flags = [
            &bed.flags()[..],
            &[
                "--healthz-bind-address=127.0.0.1:11256".into(),
                "--metrics-bind-address=127.0.0.1:11249".into(),
            ],
        ]
        .concat();
        second.start(&flags);
        eventually("the second says that it waits", || match second.said() {
            said if said.contains("another portolan keeps this node") => Ok(()),
            said => Err(said),
        });
        load.go_on(200);
        // Neither undoes what the other does, and the second does not pretend to serve.
        assert_eq!(bed.daemon.metric("portolan_drift_total").unwrap_or(0.0), 0.0);
        assert_eq!(second.get(11_256, "/healthz").expect("it answers").0, 503);
        bed.daemon.must_have_rules(&rules);

        bed.daemon.kill();
        eventually("the second serves", || match second.get(11_256, "/healthz")? {
            (200, _) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        assert!(second.said().contains("this one keeps the node now"));
        assert!(!second.said().contains("somebody else changed"), "{}", second.said());
        bed.daemon.must_have_rules(&rules);

        // And it does keep it.
        bed.command(&["nft", "flush", "set", "ip", "portolan", "cluster-ips"]);
        eventually("what was emptied is full again", || {
            let now = bed.daemon.rules();
            if now == rules { Ok(()) } else { Err("it is not".to_owned()) }
        });
        load.go_on(100);
        load.end("second daemon waits, first one killed");
    });
}

#[test]
fn cleanup_refuses_while_a_daemon_runs() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    let rules = bed.daemon.rules();
    let ending = bed.daemon.run_to_end(&["--cleanup".to_owned()]).expect("it ends");
    assert!(!ending.status.success());
    assert!(ending.stderr.contains("stop it first"), "{}", ending.stderr);
    bed.daemon.must_have_rules(&rules);

    bed.daemon.stop();
    let ending = bed.daemon.run_to_end(&["--cleanup".to_owned()]).expect("it ends");
    assert!(ending.status.success(), "{}", ending.stderr);
    assert_eq!(bed.daemon.rules(), Vec::<String>::new());
}
