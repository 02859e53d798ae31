// SPDX-License-Identifier: Apache-2.0

//! The real API server and etcd, in a namespace of their own, shared by the subjects of one size.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::{
    ground::{CONTROL, Namespace},
    objects::{NAMESPACE, Objects},
    seed,
    store::Api,
    undo,
};

/// So many services are not written through the API server.
const MANY: usize = 20_000;

/// A running control plane; stopped and removed when dropped.
pub struct Control {
    pub namespace: Namespace,
    pub api: Api,
    folder: PathBuf,
    scripts: PathBuf,
    undo: undo::Ticket,
}

impl Control {
    /// Starts etcd and the API server with their state in `folder`; `scripts` is tools/cluster.
    pub fn start(scripts: &Path, folder: PathBuf) -> Result<Control> {
        let namespace = Namespace::new()?;
        let undo = undo::register({
            let (scripts, folder) = (scripts.to_owned(), folder.clone());
            move || down(&scripts, &folder)
        });
        let mut command = Command::new(scripts.join("up"));
        command.arg(&folder).args(["--bind-address", "0.0.0.0"]);
        let status = namespace.spawn(&mut command)?.wait()?;
        if !status.success() {
            bail!("the API server did not start");
        }
        let api = Api::open(&namespace, &folder.join("kubeconfig"))?;
        Ok(Control { namespace, api, folder, scripts: scripts.to_owned(), undo })
    }

    /// Writes all objects.
    pub fn fill(&self, objects: &Objects) -> Result<()> {
        if objects.services.len() < MANY {
            return self.api.fill(objects, crate::ground::NODE);
        }
        seed::fill(&self.folder, objects, NAMESPACE)?;
        self.api.fill_around(objects, crate::ground::NODE)
    }

    /// A kubeconfig for a subject on the node: the user kube-proxy has, by token.
    pub fn kubeconfig(&self) -> Result<PathBuf> {
        let local = fs::read_to_string(self.folder.join("token.kubeconfig"))?;
        let path = self.folder.join("node.kubeconfig");
        fs::write(&path, seen_from_node(&local)?)?;
        Ok(path)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.undo.cancel();
        down(&self.scripts, &self.folder);
    }
}

fn down(scripts: &Path, folder: &Path) {
    match Command::new(scripts.join("down")).arg(folder).status() {
        Ok(status) if status.success() => {}
        other => eprintln!("the API server could not be stopped: {other:?}"),
    }
}

/// The server's certificate names 127.0.0.1 and localhost, not the address of the link.
fn seen_from_node(kubeconfig: &str) -> Result<String> {
    let local = "server: https://127.0.0.1:";
    let (before, after) = kubeconfig.split_once(local).context("the kubeconfig has no local server")?;
    Ok(format!("{before}tls-server-name: localhost\n    server: https://{CONTROL}:{after}"))
}

/// Sends `signal` to a process we started.
pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).context("no such process")?;
    rustix::process::kill_process(pid, signal).context("sending a signal")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kubeconfig_is_turned_to_the_link() {
        let local = "clusters:\n- name: test\n  cluster:\n    server: https://127.0.0.1:20001\n    certificate-authority-data: x\n";
        let text = seen_from_node(local).unwrap();
        assert!(
            text.contains("    tls-server-name: localhost\n    server: https://192.0.2.1:20001\n"),
            "{text}"
        );
        assert!(seen_from_node("clusters: []").is_err());
    }
}
