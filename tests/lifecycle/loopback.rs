// SPDX-License-Identifier: Apache-2.0

//! Node ports on the node's own loopback addresses, of both families and protocols, in every mode. What the kernel cannot
//! translate (::1 anywhere, 127.0.0.1 in ipvs mode or where `route_localnet` may not be set) a relay in the process serves.

use std::{fs, net::SocketAddr, os::unix::fs::PermissionsExt, time::Duration};

use lab::{Answer, Flow, Route, Transport};
use stage::{eventually, manifest};

use crate::{
    bed::{Bed, NODE_PORT, program},
    ipvs,
};

const LOOPBACK: &str = "--nodeport-addresses=primary,localhost";

fn ask(bed: &Bed, address: &str, transport: Transport) -> Answer {
    let source = address.parse().expect("an address");
    let route = Route { source, destination: SocketAddr::new(source, NODE_PORT), transport };
    let patience = Duration::from_secs(2);
    let answer = bed.node().run(|| match Flow::open(route, patience) {
        Ok(mut flow) => flow.ask(patience),
        Err(answer) => answer,
    });
    answer.expect("node-a can be entered")
}

/// All of them, and with other endpoints when these change.
fn is_served(bed: &Bed, mode: &str) {
    for pods in [&["a1", "a2", "b1"][..], &["a3"]] {
        bed.put(manifest::slices("web", pods));
        for address in ["127.0.0.1", "::1"] {
            for transport in [Transport::Tcp, Transport::Udp] {
                eventually("it answers", || match ask(bed, address, transport) {
                    Answer::Answered(reply) if pods.contains(&reply.by.as_str()) => Ok(()),
                    other => Err(format!("{mode}, {address}, {transport:?}, {pods:?}: {other:?}")),
                });
            }
        }
    }
}

#[test]
fn node_ports_are_served_on_loopback() {
    for mode in ["nftables", "iptables", "userspace"] {
        let Some(mut bed) = Bed::build() else { return };
        if bed.try_command(&[mode, "--version"]).is_none() && mode == "iptables" {
            println!("skipped iptables mode: there is no iptables here");
            continue;
        }
        bed.start_with(&[LOOPBACK, &format!("--proxy-mode={mode}")]);
        is_served(&bed, mode);
    }
}

#[test]
fn node_ports_are_served_on_loopback_in_ipvs_mode() {
    let Some(mut bed) = ipvs::build() else { return };
    bed.start_with(&[LOOPBACK, "--proxy-mode=ipvs"]);
    is_served(&bed, "ipvs");
}

/// Where `/proc/sys` cannot be written, as in most containers, 127.0.0.1 is served all the same.
#[test]
fn node_ports_are_served_on_loopback_without_the_sysctl() {
    for mode in ["nftables", "iptables"] {
        let Some(mut bed) = Bed::build() else { return };
        let script = bed.folder().join("confined");
        let text = format!(
            "#!/bin/sh\nexec unshare --mount sh -c 'mount --make-rprivate / && mount -o bind /proc/sys /proc/sys && \
             mount -o remount,bind,ro /proc/sys && exec \"$@\"' sh '{}' \"$@\"\n",
            program().display()
        );
        fs::write(&script, text).expect("a file can be written");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");
        bed.command(&["sysctl", "-qw", "net.ipv4.conf.all.route_localnet=0"]);
        bed.daemon.upgrade(script);
        bed.start_with(&[LOOPBACK, &format!("--proxy-mode={mode}")]);
        is_served(&bed, mode);
        assert_eq!(bed.command(&["sysctl", "-n", "net.ipv4.conf.all.route_localnet"]).trim(), "0");
    }
}
