// SPDX-License-Identifier: Apache-2.0

//! The API server goes away and comes back; so does the daemon. Traffic does not notice.

use std::thread;

use lab::address::Version;
use stage::{Stage, Steady, Target, eventually, manifest};

fn targets(host: u16) -> Vec<Target> {
    Version::BOTH
        .iter()
        .flat_map(|version| Target::both("a1", manifest::cluster_ip(*version, host), 80))
        .collect()
}

/// Questions that must go well before the next step: some rounds of all askers.
const ROUNDS: u64 = 80;

#[test]
fn nothing_known_nothing_changed() {
    let Some(mut stage) = Stage::build() else { return };
    let web = targets(10);
    stage.apply(&[manifest::service("web", 10)]);
    stage.apply(&manifest::slices("web", &["a2", "b1"]));
    let kubeconfig = stage.control.by_token();
    stage.start_daemon(&kubeconfig);
    web.iter().for_each(|target| target.expect(&stage.lab, &["a2", "b1"]));

    let Stage { daemon, control, lab, .. } = &mut stage;
    let flags = [format!("--kubeconfig={}", kubeconfig.display())];
    thread::scope(|scope| {
        let steady = Steady::begin(scope, lab, &web);
        steady.go_on(ROUNDS);
        let rules = daemon.rules();

        // The API server goes: the daemon keeps what it knows.
        control.stop();
        steady.go_on(ROUNDS);
        daemon.must_run();
        daemon.must_have_rules(&rules);

        // The daemon crashes, and starts while nobody can tell it anything: it touches nothing.
        daemon.kill();
        steady.go_on(ROUNDS);
        daemon.start(&flags);
        steady.go_on(10 * ROUNDS);
        daemon.must_run();
        daemon.must_have_rules(&rules);

        // The API server is back, with what it had: nothing to change.
        control.resume();
        eventually("the daemon is healthy again", || match daemon.get(10_256, "/healthz")? {
            (200, _) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        steady.go_on(ROUNDS);
        daemon.must_have_rules(&rules);

        // A stop in good order leaves everything, too.
        daemon.stop();
        steady.go_on(ROUNDS);
        daemon.must_have_rules(&rules);
        daemon.start(&flags);
        steady.go_on(ROUNDS);
        steady.end();
    });

    // And changes arrive again.
    stage.apply(&manifest::slices("web", &["b2"]));
    web.iter().for_each(|target| target.expect(&stage.lab, &["b2"]));
    stage.daemon.must_run();
}

/// What happens while the daemon cannot look is not lost: it comes back with a version the API server no longer
/// knows (410 Gone), lists anew, and finds what came, what changed and what went.
#[test]
fn what_was_missed_is_made_up_for() {
    let Some(mut stage) = Stage::build() else { return };
    for (name, host) in [("stays", 10), ("changes", 11), ("goes", 12)] {
        stage.apply(&[manifest::service(name, host)]);
        stage.apply(&manifest::slices(name, &["a2"]));
    }
    stage.start_daemon(&stage.control.by_certificate());
    for host in [10, 11, 12] {
        targets(host).iter().for_each(|target| target.expect(&stage.lab, &["a2"]));
    }

    let (stays, Stage { daemon, control, lab, .. }) = (targets(10), &mut stage);
    thread::scope(|scope| {
        let steady = Steady::begin(scope, lab, &stays);
        daemon.freeze();
        let applying = |objects: &[_]| {
            control.kubectl(&["apply", "--server-side", "-f", "-"], Some(&manifest::list(objects)));
        };
        applying(&manifest::slices("changes", &["b1", "b2"]));
        applying(&[manifest::service("comes", 13)]);
        applying(&manifest::slices("comes", &["a3"]));
        control.kubectl(&["delete", "service", "goes"], None);
        // A new API server remembers nothing from before its start: the daemon's version is too old for it.
        control.stop();
        control.resume();
        daemon.thaw();
        steady.go_on(ROUNDS);
        targets(11).iter().for_each(|target| target.expect(lab, &["b1", "b2"]));
        targets(13).iter().for_each(|target| target.expect(lab, &["a3"]));
        targets(12).iter().for_each(|target| target.expect_gone(lab));
        daemon.must_run();
        steady.end();
    });

    stage.apply(&manifest::slices("stays", &["b1"]));
    stays.iter().for_each(|target| target.expect(&stage.lab, &["b1"]));
}
