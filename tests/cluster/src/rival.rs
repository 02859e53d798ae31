// SPDX-License-Identifier: Apache-2.0

//! The real kube-proxy, on node-a.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use netlink::Netns;

use crate::{PATIENCE, manifest, print_end, wait_for};

/// How kube-proxy works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Nftables,
    /// By the nft variant of iptables.
    IptablesNft,
    /// By the legacy variant.
    IptablesLegacy,
    /// On a kernel that has IPVS, with the nft variant of iptables.
    Ipvs,
}

impl Way {
    fn mode(self) -> &'static str {
        match self {
            Way::Nftables => "nftables",
            Way::IptablesNft | Way::IptablesLegacy => "iptables",
            Way::Ipvs => "ipvs",
        }
    }

    /// The program that stands behind all names of iptables.
    fn tool(self) -> &'static str {
        match self {
            Way::Nftables | Way::IptablesNft | Way::Ipvs => "xtables-nft-multi",
            Way::IptablesLegacy => "xtables-legacy-multi",
        }
    }

    /// Prints what kube-proxy writes, on node-a: the command.
    pub fn listing(self) -> &'static [&'static str] {
        match self {
            Way::Nftables => &["nft", "list", "tables"],
            Way::IptablesNft => &["iptables-nft-save"],
            Way::IptablesLegacy => &["iptables-legacy-save"],
            Way::Ipvs => &["ipvsadm", "-Sn"],
        }
    }

    /// A word in [`Way::listing`] that shows that kube-proxy's rules are there.
    pub fn trace(self) -> &'static str {
        match self {
            Way::Nftables => "kube-proxy",
            Way::IptablesNft | Way::IptablesLegacy => "KUBE-SERVICES",
            Way::Ipvs => "10.96.0.10:80",
        }
    }
}

/// kube-proxy; killed when dropped, and its rules stay.
pub struct Rival {
    child: Child,
    log: PathBuf,
}

impl Rival {
    /// Starts it. `folder` is for its log and its tools.
    pub fn start(tools: &Path, netns: &Netns, way: Way, kubeconfig: &Path, folder: &Path) -> Rival {
        let bin = folder.join(format!("{way:?}"));
        if !bin.exists() {
            fs::create_dir(&bin).expect("a folder");
            for name in ["iptables", "ip6tables"] {
                for suffix in ["", "-save", "-restore"] {
                    let tool = Path::new("/usr/sbin").join(way.tool());
                    symlink(tool, bin.join(format!("{name}{suffix}"))).expect("a link");
                }
            }
        }
        let log = folder.join("kube-proxy.log");
        let file = fs::File::options().create(true).append(true).open(&log).expect("a log file");
        let mut command = Command::new(tools.join("kube-proxy"));
        command.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", bin.display()));
        command.arg(format!("--kubeconfig={}", kubeconfig.display()));
        command.arg(format!("--proxy-mode={}", way.mode()));
        command.arg(format!("--cluster-cidr={}", manifest::CLUSTER_RANGES));
        // Unless told otherwise it removes whatever virtual servers it does not know.
        command.args((way == Way::Ipvs).then_some("--ipvs-exclude-cidrs=203.0.113.64/26"));
        command.args(["--hostname-override=node-a", "--conntrack-max-per-core=0", "--v=2"]);
        command.args(["--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s"]);
        command.args(["--healthz-bind-address=127.0.0.1:12256", "--metrics-bind-address=127.0.0.1:12249"]);
        command.stdin(Stdio::null()).stdout(file.try_clone().expect("a handle")).stderr(file);
        let child = netns.run(|| command.spawn()).expect("node-a").expect("kube-proxy can be run");
        Rival { child, log }
    }

    /// Waits until `is_so`, which its rules bring about.
    #[track_caller]
    pub fn until(&mut self, what: &str, is_so: impl FnMut() -> Result<(), String>) {
        let mut is_so = is_so;
        let outcome = wait_for(PATIENCE, || {
            let ended = self.child.try_wait().expect("it is ours");
            assert!(ended.is_none(), "kube-proxy ended: {ended:?}");
            is_so()
        });
        if let Err(last) = outcome {
            panic!("{what}: {last}");
        }
    }

    /// Ends it, as a kill does; what it wrote stays.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            print_end("kube-proxy", &self.log, 20);
        }
    }
}
