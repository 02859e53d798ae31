// SPDX-License-Identifier: Apache-2.0

//! The network a subject is measured in: four namespaces without names, gone with the last handle to them.
//!
//! ```text
//!   control 192.0.2.1 ---- 192.0.2.2 node 10.255.255.1 ---- 10.255.255.2 client
//!   (API server, etcd)          (the subject)  10.255.254.1 ---- 10.255.254.2 sink
//!                                                        (answers for every endpoint)
//! ```
//!
//! The node sends what it has no better route for to the sink, and the sink refuses connections to service
//! addresses: an unserved service costs a prober a fraction of a millisecond, not a timeout. (A route that is
//! unreachable would answer once a second only.)

use std::{
    fs::{self, File},
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd},
    process::{Child, Command},
    sync::Arc,
    thread,
};

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use crate::objects::{ENDPOINTS, SERVICES};

/// The API server's address, as the node sees it.
pub const CONTROL: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The node's InternalIP.
pub const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// A network namespace held by a file handle.
#[derive(Clone, Debug)]
pub struct Namespace(Arc<File>);

impl Namespace {
    /// A new one with its loopback up.
    pub fn new() -> Result<Namespace> {
        let file = thread::spawn(|| {
            #[expect(deprecated, reason = "replaced by netlink::netns")]
            rustix::thread::unshare(UnshareFlags::NEWNET)?;
            File::open("/proc/thread-self/ns/net")
        })
        .join()
        .expect("the thread only makes system calls")
        .context("making a network namespace (root is needed)")?;
        let namespace = Namespace(Arc::new(file));
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Moves the calling thread here, for good.
    pub fn enter(&self) -> Result<()> {
        rustix::thread::move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))
            .context("entering a network namespace")
    }

    /// Runs `work` on a thread inside; what it starts, threads and programs, stays inside.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        thread::scope(|scope| {
            let inside = scope.spawn(|| self.enter().map(|()| work()));
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Starts a program inside.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        let program = command.get_program().to_string_lossy().into_owned();
        self.run(|| command.spawn())?.with_context(|| format!("starting {program}"))
    }

    /// Writes a setting below /proc/sys/net of this namespace.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/{name}");
        self.run(|| fs::write(&path, value))?.with_context(|| format!("writing {value} to {path}"))
    }

    fn ip(&self, arguments: &str) -> Result<()> {
        let output = self.run(|| Command::new("ip").args(arguments.split_whitespace()).output())?;
        let output = output.context("running ip")?;
        if !output.status.success() {
            bail!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    fn link(&self, name: &str, other: &Namespace, other_name: &str) -> Result<()> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.0.as_raw_fd());
        self.ip(&format!("link add {name} type veth peer name {other_name} netns {path}"))?;
        self.ip(&format!("link set {name} up"))?;
        other.ip(&format!("link set {other_name} up"))
    }
}

/// The namespaces of one subject.
pub struct Ground {
    pub node: Namespace,
    pub client: Namespace,
    pub sink: Namespace,
    uplink: Option<Namespace>,
}

impl Ground {
    /// New namespaces, linked to `control` where there is one.
    pub fn new(control: Option<&Namespace>) -> Result<Ground> {
        let (node, client, sink) = (Namespace::new()?, Namespace::new()?, Namespace::new()?);
        let ground = Ground { node, client, sink, uplink: control.cloned() };
        let Ground { node, client, sink, .. } = &ground;
        node.sysctl("ipv4/ip_forward", "1")?;
        // A rule that rejects is to be answered as often as it is asked.
        node.sysctl("ipv4/icmp_ratelimit", "0")?;
        node.link("client", client, "eth0")?;
        node.link("sink", sink, "eth0")?;
        node.ip("address add 10.255.255.1/24 dev client")?;
        node.ip("address add 10.255.254.1/24 dev sink")?;
        node.ip("route add default via 10.255.254.2")?;
        client.ip("address add 10.255.255.2/24 dev eth0")?;
        client.ip("route add default via 10.255.255.1")?;
        client.sysctl("ipv4/ip_local_port_range", "1024 65535")?;
        sink.ip("address add 10.255.254.2/24 dev eth0")?;
        sink.ip("route add default via 10.255.254.1")?;
        for (network, bits) in [ENDPOINTS, SERVICES] {
            sink.ip(&format!("route add local {network}/{bits} dev lo"))?;
        }
        if let Some(control) = control {
            control.link("node", node, "control")?;
            control.ip(&format!("address add {CONTROL}/30 dev node"))?;
            node.ip(&format!("address add {NODE}/30 dev control"))?;
        }
        Ok(ground)
    }
}

impl Drop for Ground {
    /// The kernel takes namespaces apart later; the next subject's link has the same name and addresses.
    fn drop(&mut self) {
        if let Some(control) = &self.uplink {
            // Absent when the ground was not finished.
            let _ = control.ip("link delete node");
        }
    }
}
