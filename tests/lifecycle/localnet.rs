// SPDX-License-Identifier: Apache-2.0

//! What listens only on 127.0.0.1 of a node is for that node. The setting that node ports on loopback need
//! (`route_localnet`) opens it to the neighbours (CVE-2020-8558): whoever has set it, nobody gets in.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use lab::{Answer, Flow, Route, Transport};
use stage::{eventually, manifest};

use crate::{
    bed::{Bed, NODE_PORT},
    ipvs,
};

const LOOPBACK: &str = "--nodeport-addresses=primary,localhost";
const PRIMARY: &str = "--nodeport-addresses=primary";
const SETTING: &str = "net.ipv4.conf.all.route_localnet";
/// As long as a packet between two namespaces may take, and some more.
const PATIENCE: Duration = Duration::from_millis(300);

/// A server on 127.0.0.1 of node-a, and a neighbour on the same cable who sends what is for 127.0.0.1 to node-a.
struct Secret {
    tcp: TcpListener,
    udp: UdpSocket,
}

impl Secret {
    fn keep(bed: &Bed) -> Secret {
        let neighbour = bed.lab.netns("client").expect("it is in the lab");
        let prepare = || {
            for words in
                [&["ip", "address", "del", "127.0.0.1/8", "dev", "lo"][..], &["sysctl", "-qw", &setting(1)]]
            {
                let done = std::process::Command::new(words[0]).args(&words[1..]).status();
                assert!(done.is_ok_and(|status| status.success()), "{words:?}");
            }
        };
        neighbour.run(prepare).expect("it can be entered");
        let listen = || -> std::io::Result<Secret> {
            let (tcp, udp) = (TcpListener::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
            udp.set_read_timeout(Some(PATIENCE))?;
            Ok(Secret { tcp, udp })
        };
        bed.node().run(listen).expect("node-a can be entered").expect("there are free ports")
    }

    /// By whom it is reached, of TCP and UDP.
    fn is_reached(&self, bed: &Bed) -> Vec<&'static str> {
        let neighbour = bed.lab.netns("client").expect("it is in the lab");
        let [tcp, udp] =
            [self.tcp.local_addr(), self.udp.local_addr()].map(|address| address.expect("it is bound"));
        let send = || {
            let socket = UdpSocket::bind("203.0.113.1:0").expect("its own address");
            // Refused where the way is closed and somebody says so.
            let _ = socket.send_to(b"let me in", udp);
            TcpStream::connect_timeout(&tcp, PATIENCE).is_ok()
        };
        let mut by = Vec::new();
        by.extend(neighbour.run(send).expect("it can be entered").then_some("tcp"));
        by.extend(self.udp.recv(&mut [0; 16]).is_ok().then_some("udp"));
        by
    }

    #[track_caller]
    fn is_kept(&self, bed: &Bed, when: &str) {
        assert_eq!(self.is_reached(bed), [""; 0], "{when}: a neighbour reaches what is on 127.0.0.1");
    }

    /// The neighbour does reach it where nobody guards it: else nothing is proved.
    #[track_caller]
    fn is_open(&self, bed: &Bed) {
        set(bed, 1);
        assert_eq!(self.is_reached(bed), ["tcp", "udp"], "without anybody's rules");
    }
}

fn setting(value: u8) -> String {
    format!("{SETTING}={value}")
}

fn set(bed: &Bed, value: u8) {
    bed.command(&["sysctl", "-qw", &setting(value)]);
}

fn is_set(bed: &Bed) -> bool {
    bed.command(&["sysctl", "-n", SETTING]).trim() == "1"
}

/// A process of the node reaches the node port on 127.0.0.1.
fn is_served(bed: &Bed, mode: &str) {
    for transport in [Transport::Tcp, Transport::Udp] {
        eventually("it answers", || {
            let source = Ipv4Addr::LOCALHOST.into();
            let route = Route { source, destination: SocketAddr::new(source, NODE_PORT), transport };
            let patience = Duration::from_secs(2);
            let ask = || Flow::open(route, patience).map_or_else(|no| no, |mut flow| flow.ask(patience));
            match bed.node().run(ask).expect("node-a can be entered") {
                Answer::Answered(_) => Ok(()),
                other => Err(format!("{mode}, {transport:?}: {other:?}")),
            }
        });
    }
}

/// Where it was set before, by whomever, and where it is for us to set.
fn a_neighbour_does_not_reach_loopback(mut bed: Bed, mode: &str) {
    let secret = Secret::keep(&bed);
    let flag = format!("--proxy-mode={mode}");
    let needs_it = ["nftables", "iptables"].contains(&mode);
    secret.is_open(&bed);
    bed.start_with(&[PRIMARY, &flag]);
    secret.is_kept(&bed, &format!("{mode}, set by somebody else"));
    bed.daemon.stop();

    set(&bed, 0);
    bed.start_with(&[LOOPBACK, &flag]);
    is_served(&bed, mode);
    secret.is_kept(&bed, &format!("{mode}, node ports on loopback"));
    assert_eq!(is_set(&bed), needs_it, "{mode}: set only where the kernel translates by it");
    bed.daemon.stop();

    bed.start_with(&[PRIMARY, &flag]);
    secret.is_kept(&bed, &format!("{mode}, no longer on loopback"));
    bed.daemon.stop();

    set(&bed, 1);
    bed.start_with(&[LOOPBACK, &flag]);
    is_served(&bed, mode);
    secret.is_kept(&bed, &format!("{mode}, set before"));
    for pods in [&["a3"][..], &["a1", "a2", "b1"]] {
        bed.put(manifest::slices("web", pods));
        is_served(&bed, mode);
        secret.is_kept(&bed, &format!("{mode}, after a change"));
    }
}

#[test]
fn in_nftables_mode() {
    let Some(bed) = Bed::build() else { return };
    a_neighbour_does_not_reach_loopback(bed, "nftables");
}

#[test]
fn in_iptables_mode() {
    let Some(bed) = Bed::build() else { return };
    a_neighbour_does_not_reach_loopback(bed, "iptables");
}

#[test]
fn in_userspace_mode() {
    let Some(bed) = Bed::build() else { return };
    a_neighbour_does_not_reach_loopback(bed, "userspace");
}

#[test]
fn in_ipvs_mode() {
    let Some(bed) = ipvs::build() else { return };
    a_neighbour_does_not_reach_loopback(bed, "ipvs");
}

#[test]
fn switched_off_in_iptables_mode_it_is_not_set() {
    let Some(mut bed) = Bed::build() else { return };
    let secret = Secret::keep(&bed);
    secret.is_open(&bed);
    set(&bed, 0);
    bed.start_with(&[LOOPBACK, "--proxy-mode=iptables", "--iptables-localhost-nodeports=false"]);
    secret.is_kept(&bed, "localhostNodePorts: false");
    assert!(!is_set(&bed));
}

/// Nothing is programmed as long as the API server is away, so nothing would guard it.
#[test]
fn it_is_not_set_before_it_is_guarded() {
    for mode in ["nftables", "iptables"] {
        let Some(mut bed) = Bed::build() else { return };
        let secret = Secret::keep(&bed);
        set(&bed, 0);
        bed.server.go_down();
        let flags = [bed.flags(), vec![LOOPBACK.to_owned(), format!("--proxy-mode={mode}")]].concat();
        bed.daemon.start(&flags);
        eventually("it is on its way", || bed.daemon.get(10_249, "/metrics").map(drop));
        thread::sleep(Duration::from_secs(1));
        assert!(!is_set(&bed), "{mode}");
        secret.is_kept(&bed, mode);
        bed.daemon.kill();
    }
}

/// For a proxy that may not write it; and only for a mode that needs it.
#[test]
fn it_can_be_set_beforehand() {
    for (mode, needs_it) in [("nftables", true), ("iptables", true), ("userspace", false)] {
        let Some(bed) = Bed::build() else { return };
        set(&bed, 0);
        // The limit of tracked connections can be set for the whole machine only, which this is not about.
        let no_limit = "--conntrack-max-per-core=0";
        let flags = ["--init-only", LOOPBACK, no_limit, &format!("--proxy-mode={mode}")].map(str::to_owned);
        let ending = bed.daemon.run_to_end(&flags).expect("it ends");
        assert_eq!((ending.status.success(), is_set(&bed)), (true, needs_it), "{mode}: {}", ending.stderr);
    }
}

/// The guard goes with the rest; that it was one is said.
#[test]
fn whoever_removes_the_guard_says_so() {
    for words in [&["--cleanup"][..], &["withdraw", "--now"]] {
        for set_now in [1, 0] {
            let Some(mut bed) = Bed::build() else { return };
            bed.start_with(&[LOOPBACK]);
            bed.daemon.stop();
            set(&bed, set_now);
            let program = bed.daemon.program().to_string_lossy().into_owned();
            let output = bed.try_command(&[&[&*program][..], words].concat()).expect("it can be run");
            assert!(output.status.success(), "{output:?}");
            let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            let is_told = said.concat().contains(&format!("sysctl -w {}", setting(0)));
            assert_eq!((is_told, is_set(&bed)), (set_now == 1, set_now == 1), "{words:?}: {said:?}");
        }
    }
}
