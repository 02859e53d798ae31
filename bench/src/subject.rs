// SPDX-License-Identifier: Apache-2.0

//! The programs that are measured, and how each is started and stopped.

use std::{
    fmt,
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rustix::process::Signal;

use crate::{
    control,
    ground::Namespace,
    meter::{Cgroup, Resident, Watcher},
    objects::{CLUSTER_CIDR, NODE},
    scrape::METRICS_PORT,
    undo,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Subject {
    /// Portolan, nftables mode, reading a folder of manifests
    PortolanFile,
    /// Portolan, nftables mode, through the API server
    PortolanApi,
    /// Portolan, iptables mode, through the API server
    PortolanIptables,
    /// kube-proxy in nftables mode
    KubeProxyNftables,
    /// kube-proxy in iptables mode
    KubeProxyIptables,
}

/// Which `iptables` the subjects of that mode use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Tools {
    Legacy,
    Nft,
}

impl Tools {
    fn program(self) -> &'static str {
        match self {
            Tools::Legacy => "xtables-legacy-multi",
            Tools::Nft => "xtables-nft-multi",
        }
    }
}

impl Subject {
    /// Its name on the command line.
    pub fn argument(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    pub fn is_peer(self) -> bool {
        matches!(self, Subject::KubeProxyNftables | Subject::KubeProxyIptables)
    }

    pub fn is_iptables(self) -> bool {
        matches!(self, Subject::PortolanIptables | Subject::KubeProxyIptables)
    }

    pub fn needs_api(self) -> bool {
        self != Subject::PortolanFile
    }

    /// The histogram that comes nearest to "event received until committed", under the subject's own name.
    pub fn commit_metrics(self) -> &'static [&'static str] {
        match self {
            Subject::PortolanFile | Subject::PortolanApi | Subject::PortolanIptables => {
                &["portolan_programming_duration_seconds"]
            }
            Subject::KubeProxyNftables | Subject::KubeProxyIptables => {
                &["kubeproxy_sync_proxy_rules_duration_seconds"]
            }
        }
    }

    /// What somebody who flushes all rules of this subject would type.
    pub fn flush(self) -> &'static [&'static [&'static str]] {
        match self {
            Subject::PortolanIptables | Subject::KubeProxyIptables => {
                &[&["iptables", "-t", "nat", "-F"], &["iptables", "-t", "filter", "-F"]]
            }
            _ => &[&["nft", "flush", "ruleset"]],
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Subject::PortolanFile => "portolan, files",
            Subject::PortolanApi => "portolan, API",
            Subject::PortolanIptables => "portolan iptables",
            Subject::KubeProxyNftables => "kube-proxy nftables",
            Subject::KubeProxyIptables => "kube-proxy iptables",
        })
    }
}

/// Where the programs are.
#[derive(Clone, Debug)]
pub struct Programs {
    pub portolan: PathBuf,
    pub kube_proxy: Option<PathBuf>,
    /// Given to kube-proxy besides what it needs here.
    pub kube_proxy_flags: Vec<String>,
    pub iptables: Tools,
}

impl Programs {
    pub fn version(&self, subject: Subject) -> String {
        let program =
            if subject.is_peer() { self.kube_proxy.as_deref() } else { Some(self.portolan.as_path()) };
        let output = program.map(|program| Command::new(program).arg("--version").output());
        match output {
            Some(Ok(output)) if output.status.success() => {
                String::from_utf8_lossy(&output.stdout).trim().to_owned()
            }
            _ => "unknown".to_owned(),
        }
    }
}

/// What the subject reads.
#[derive(Clone, Debug)]
pub enum Origin {
    Kubeconfig(PathBuf),
    Folder(PathBuf),
}

/// A subject on its node, running or stopped; ended for good when dropped.
pub struct Running {
    pub subject: Subject,
    pub node: Namespace,
    pub group: Arc<Cgroup>,
    programs: Programs,
    origin: Origin,
    scratch: PathBuf,
    watcher: Watcher,
    child: Option<Child>,
    undo: undo::Ticket,
}

impl Running {
    /// Prepares `subject` on `node`, and does not start it yet. Its log goes to `scratch`.
    pub fn prepare(
        subject: Subject,
        programs: &Programs,
        node: &Namespace,
        origin: Origin,
        scratch: &Path,
    ) -> Result<Running> {
        // More than one may be prepared.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let group = Cgroup::new(&format!("portolan-bench-{}-{number}", std::process::id()))?;
        let group = Arc::new(group);
        let undo = undo::register({
            let group = Arc::downgrade(&group);
            move || {
                if let Some(group) = group.upgrade() {
                    group.kill();
                    group.remove();
                }
            }
        });
        let running = Running {
            subject,
            node: node.clone(),
            programs: programs.clone(),
            origin,
            scratch: scratch.to_owned(),
            watcher: Watcher::start(group.clone()),
            group,
            child: None,
            undo,
        };
        if subject.is_iptables() {
            name_tools(&running.tool_folder(), programs.iptables)?;
            // As the kubelet would: Portolan goes by it, kube-proxy by the name.
            running.run_on_node(&["iptables", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])?;
        }
        Ok(running)
    }

    /// Starts the program and returns when it was started, not when it serves.
    pub fn start(&mut self) -> Result<Instant> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let mut command = Command::new("sh");
        // Into the group before the program begins, so that not one instruction of it is missed.
        command.args(["-c", r#"echo $$ >"$0" && exec "$@""#]).arg(self.group.door());
        command.arg(self.program()?).args(self.arguments());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let path = std::env::var("PATH").unwrap_or_default();
        if self.subject.is_iptables() {
            command.env("PATH", format!("{}:{path}", self.tool_folder().display()));
            command.env("XTABLES_LOCKFILE", self.scratch.join("xtables.lock"));
        }
        let began = Instant::now();
        self.child = Some(self.node.spawn(&mut command)?);
        Ok(began)
    }

    /// Asks the program to stop, and insists after ten seconds.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        control::signal(child.id(), Signal::TERM)?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if child.try_wait()?.is_some() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(5));
        }
        child.kill()?;
        child.wait()?;
        bail!("{} did not stop when asked to", self.subject)
    }

    /// Fails when the program has ended by itself, with the end of its log.
    pub fn check(&mut self) -> Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        let Some(status) = child.try_wait()? else { return Ok(()) };
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        bail!("{} ended ({status}):\n{}", self.subject, lines[lines.len().saturating_sub(8)..].join("\n"))
    }

    pub fn resident(&self) -> Option<Resident> {
        self.child.as_ref().map(|child| self.watcher.resident(child.id()))
    }

    /// Runs a program inside the node, with the same `iptables` the subject uses.
    pub fn run_on_node(&self, command_line: &[&str]) -> Result<()> {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", self.tool_folder().display());
        // By the shell, which looks for the program in this path and not in ours.
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$@""#, "sh"]).args(command_line);
        command.env("PATH", path);
        command.env("XTABLES_LOCKFILE", self.scratch.join("xtables.lock"));
        let status = self.node.spawn(&mut command)?.wait()?;
        if !status.success() {
            bail!("{} failed on the node: {status}", command_line.join(" "));
        }
        Ok(())
    }

    pub fn log(&self) -> PathBuf {
        self.scratch.join("subject.log")
    }

    /// Where files may be written for it.
    pub(crate) fn scratch(&self) -> &Path {
        &self.scratch
    }

    fn tool_folder(&self) -> PathBuf {
        self.scratch.join("tools")
    }

    fn program(&self) -> Result<&Path> {
        match self.subject.is_peer() {
            true => self.programs.kube_proxy.as_deref().context("there is no kube-proxy"),
            false => Ok(&self.programs.portolan),
        }
    }

    fn arguments(&self) -> Vec<String> {
        let mode = if self.subject.is_iptables() { "iptables" } else { "nftables" };
        let mut arguments = vec![
            format!("--proxy-mode={mode}"),
            format!("--hostname-override={NODE}"),
            format!("--cluster-cidr={CLUSTER_CIDR}"),
            format!("--metrics-bind-address=127.0.0.1:{METRICS_PORT}"),
            "--healthz-bind-address=127.0.0.1:10256".to_owned(),
        ];
        arguments.push(match &self.origin {
            Origin::Kubeconfig(path) => format!("--kubeconfig={}", path.display()),
            Origin::Folder(path) => format!("--source=file:{}", path.display()),
        });
        if self.subject.is_peer() {
            // The limit belongs to the whole machine: a network namespace may not set it.
            let flags = ["max-per-core", "tcp-timeout-established", "tcp-timeout-close-wait"];
            arguments.extend(flags.map(|flag| format!("--conntrack-{flag}=0")));
            arguments.extend(self.programs.kube_proxy_flags.iter().cloned());
        }
        arguments
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.undo.cancel();
        self.group.kill();
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }
}

/// `iptables` may mean either variant; names of our own make it the one that is asked for, where that is installed.
fn name_tools(folder: &Path, tools: Tools) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let Some(program) = find_program(tools.program()) else { return Ok(()) };
    for family in ["iptables", "ip6tables"] {
        for suffix in ["", "-save", "-restore"] {
            let name = folder.join(format!("{family}{suffix}"));
            if !name.exists() {
                std::os::unix::fs::symlink(&program, name)?;
            }
        }
    }
    Ok(())
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|candidate| candidate.is_file())
}
