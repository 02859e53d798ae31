// SPDX-License-Identifier: Apache-2.0

//! With as little as the daemon asks for: CAP_NET_ADMIN, and a root file system that cannot be written.

use std::{fs, os::unix::fs::PermissionsExt, process::Command, sync::Arc, thread};

use stage::{load::Load, manifest};

use crate::bed::{Bed, everywhere, program};

/// Gives everything up but CAP_NET_ADMIN and becomes the program, on a read-only root of its own.
fn confined() -> String {
    format!(
        "#!/bin/sh\n\
         exec unshare --mount sh -c '\n\
           mount --make-rprivate / && mount -o remount,bind,ro / || exit 125\n\
           exec setpriv --bounding-set=-all,+net_admin --inh-caps=-all --no-new-privs \"$@\"\n\
         ' sh '{}' \"$@\"\n",
        program().display()
    )
}

#[test]
fn net_admin_on_a_read_only_root_is_enough() {
    let Some(mut bed) = Bed::build() else { return };
    for tool in ["setpriv", "unshare"] {
        if Command::new(tool).arg("--version").output().is_err() {
            println!("skipped: there is no {tool} here");
            return;
        }
    }
    let script = bed.folder().join("confined");
    fs::write(&script, confined()).expect("a file can be written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");

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
