// SPDX-License-Identifier: Apache-2.0

//! With as little as the daemon asks for: CAP_NET_ADMIN, and a root file system that cannot be written.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, process::Command, sync::Arc, thread};

use stage::{load::Load, manifest};

use crate::bed::{Bed, everywhere, program};

/// A program that gives everything up but CAP_NET_ADMIN and becomes ours, on a read-only root of its own. `None` without the
/// tools for it.
fn confined(bed: &Bed) -> Option<PathBuf> {
    for tool in ["setpriv", "unshare"] {
        if Command::new(tool).arg("--version").output().is_err() {
            println!("skipped: there is no {tool} here");
            return None;
        }
    }
    let text = format!(
        "#!/bin/sh\n\
         exec unshare --mount sh -c '\n\
           mount --make-rprivate / && mount -o remount,bind,ro / || exit 125\n\
           exec setpriv --bounding-set=-all,+net_admin --inh-caps=-all --no-new-privs \"$@\"\n\
         ' sh '{}' \"$@\"\n",
        program().display()
    );
    let script = bed.folder().join("confined");
    fs::write(&script, text).expect("a file can be written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");
    Some(script)
}

/// Not the nft variant instead, where nobody on a host of the legacy one would look for rules.
#[test]
fn legacy_tables_that_may_not_be_read_are_told_in_one_sentence() {
    let Some(mut bed) = Bed::build() else { return };
    let hint = ["iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"];
    if bed.try_command(&hint).is_none() {
        println!("skipped: there is no iptables-legacy here");
        return;
    }
    let Some(script) = confined(&bed) else { return };
    bed.daemon.upgrade(script);
    let flags = [&bed.flags()[..], &["--proxy-mode=iptables".to_owned()]].concat();
    let ending = bed.daemon.run_to_end(&flags).expect("it ends");
    assert!(!ending.status.success());
    let told: Vec<&str> = ending.stderr.lines().filter(|line| line.contains("CAP_NET_RAW")).collect();
    assert_eq!(told.len(), 1, "{}", ending.stderr);
    assert!(told[0].contains("legacy variant of iptables"), "{}", told[0]);
}

#[test]
fn net_admin_on_a_read_only_root_is_enough() {
    let Some(mut bed) = Bed::build() else { return };
    let Some(script) = confined(&bed) else { return };

    // What needs more is done before, once.
    let flags = [&bed.flags()[..], &["--init-only".to_owned()]].concat();
    let ending = bed.daemon.run_to_end(&flags).expect("it ends");
    assert!(ending.status.success(), "{}", ending.stderr);

    bed.daemon.upgrade(script);
    bed.start();
    let lab = Arc::clone(&bed.lab);
    thread::scope(|scope| {
        let load = Load::begin(scope, &lab, &everywhere());
        load.go_on(100);
        bed.daemon.stop();
        bed.start();
        // Writing, hearing of drift and mending it, all go on.
        bed.put(manifest::slices("web", &["a1", "a2", "b1", "b2"]));
        let rules = stage::eventually("the change is in force", || {
            let rules = bed.daemon.rules();
            let both =
                ["10.244.2.2", "fd00::af4:202"].iter().all(|ip| rules.iter().any(|rule| rule.contains(ip)));
            if both { Ok(rules) } else { Err(rules.join("\n")) }
        });
        bed.command(&["nft", "flush", "set", "ip", "portolan", "hairpin"]);
        stage::eventually("it is mended", || match bed.daemon.metric("portolan_drift_mended_total")? {
            1.0 => Ok(()),
            other => Err(format!("{other} times")),
        });
        bed.daemon.must_have_rules(&rules);
        load.go_on(100);
        load.end("CAP_NET_ADMIN alone on a read-only root");
    });
    bed.daemon.must_run();
}
