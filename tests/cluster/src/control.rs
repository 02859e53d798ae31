// SPDX-License-Identifier: Apache-2.0

//! The real API server and etcd on node-a, and kubectl beside them.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use netlink::Netns;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{eventually, manifest, print_end};

/// A control plane that ends with its handle.
pub struct Control {
    tools: PathBuf,
    folder: PathBuf,
    netns: Netns,
    /// How the API server was started, while it is stopped.
    stopped: Option<Vec<String>>,
}

impl Control {
    pub(crate) fn start(tools: &Path, folder: PathBuf, netns: Netns) -> Control {
        let control = Control { tools: tools.to_owned(), folder, netns, stopped: None };
        let mut up = Command::new(scripts().join("up"));
        up.arg(&control.folder).args(["--service-cluster-ip-range", manifest::SERVICE_RANGES]);
        up.env("PORTOLAN_CLUSTER_TOOLS", tools);
        let status =
            control.netns.run(|| up.status()).expect("node-a can be entered").expect("`up` can be run");
        assert!(status.success(), "the API server did not start");
        control
    }

    /// The administrator, by client certificate.
    pub fn by_certificate(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    /// kube-proxy's own user, by a token inside the file.
    pub fn by_token(&self) -> PathBuf {
        self.folder.join("token.kubeconfig")
    }

    /// Runs kubectl as administrator, which must succeed; returns what it printed.
    #[track_caller]
    pub fn kubectl(&self, arguments: &[&str], input: Option<&str>) -> String {
        let output = self.try_kubectl(arguments, input);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "kubectl {}: {errors}", arguments.join(" "));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Creates one object, its status included, which `apply` leaves out.
    #[track_caller]
    pub fn create(&self, object: &Value) {
        self.kubectl(&["create", "-f", "-"], Some(&object.to_string()));
    }

    /// Runs kubectl as administrator, whatever becomes of it.
    pub fn try_kubectl(&self, arguments: &[&str], input: Option<&str>) -> Output {
        let mut command = Command::new(self.tools.join("kubectl"));
        command
            .arg("--kubeconfig")
            .arg(self.by_certificate())
            .args(["--request-timeout", "30s"])
            .args(arguments);
        command.env("KUBECACHEDIR", self.folder.join("cache"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            self.netns.run(|| command.spawn()).expect("node-a can be entered").expect("kubectl can be run");
        let mut stdin = child.stdin.take().expect("it is piped");
        // kubectl may have ended already, with an error that is shown.
        let _ = stdin.write_all(input.unwrap_or_default().as_bytes());
        drop(stdin);
        child.wait_with_output().expect("kubectl can be waited for")
    }

    /// Runs a line of a document, in which `kubectl` is the administrator's, in the root of the repository.
    #[track_caller]
    pub fn shell(&self, line: &str) {
        let kubectl = r#"kubectl() { "$KUBECTL" --kubeconfig "$ADMINISTRATOR" --request-timeout 30s "$@"; }"#;
        let mut command = Command::new("bash");
        command.args(["-euc", &format!("{kubectl}\n{line}")]);
        command.env("KUBECTL", self.tools.join("kubectl")).env("ADMINISTRATOR", self.by_certificate());
        command.env("KUBECACHEDIR", self.folder.join("cache")).current_dir(scripts().join("../.."));
        let output = self.netns.run(|| command.output()).expect("node-a").expect("bash can be run");
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Waits until the API server grants all of these, verb and resource. It follows roles and bindings by a watch of
    /// its own: what `kubectl apply` has just written may not count yet.
    #[track_caller]
    pub fn until_granted(&self, account: &str, rights: &[(&str, &str)]) {
        let account = format!("--as={account}");
        for (verb, resource) in rights {
            eventually(&format!("{account} may {verb} {resource}"), || {
                let asked = self.try_kubectl(&["auth", "can-i", verb, resource, "-A", &account], None);
                if asked.status.success() {
                    Ok(())
                } else {
                    Err(String::from_utf8_lossy(&[asked.stdout, asked.stderr].concat()).into_owned())
                }
            });
        }
    }

    /// Kills the API server, as a crash would; etcd stays.
    pub fn stop(&mut self) {
        let pid = self.api_server();
        let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).expect("the API server runs");
        let words = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        self.stopped = Some(words.filter(|word| !word.is_empty()).collect());
        kill_process(pid, Signal::KILL).expect("the API server is ours");
        eventually("the API server ends", || match is_running(pid) {
            true => Err("it still runs".to_owned()),
            false => Ok(()),
        });
    }

    /// Starts the API server again as it was, and waits until it serves.
    pub fn resume(&mut self) {
        let words = self.stopped.take().expect("it was stopped before");
        let mut child = self.spawn(&words);
        eventually("the API server serves again", || {
            // The last threads of the old one may still hold its port: then the new one ends at once.
            if !matches!(child.try_wait(), Ok(None)) {
                child = self.spawn(&words);
            }
            let output = self.try_kubectl(&["get", "--raw", "/readyz"], None);
            if output.status.success() {
                Ok(())
            } else {
                Err(String::from_utf8_lossy(&output.stderr).into_owned())
            }
        });
    }

    fn spawn(&self, words: &[String]) -> Child {
        let log =
            fs::File::options().append(true).open(self.folder.join("kube-apiserver.log")).expect("its log");
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).current_dir(&self.folder).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a handle")).stderr(log);
        let child =
            self.netns.run(|| command.spawn()).expect("node-a can be entered").expect("it ran before");
        self.remember(child.id());
        child
    }

    /// Adds a process to those that `down` ends: name, number, and time of start.
    fn remember(&self, pid: u32) {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it was started just now");
        let (_, after_name) = stat.rsplit_once(") ").expect("a name in parentheses");
        let started = after_name.split(' ').nth(19).expect("the time of start");
        let mut pids = fs::File::options().append(true).open(self.folder.join("pids")).expect("`up` made it");
        writeln!(pids, "kube-apiserver {pid} {started}").expect("a line can be added");
    }

    fn api_server(&self) -> Pid {
        let pids = fs::read_to_string(self.folder.join("pids")).expect("`up` made it");
        let last = pids.lines().rfind(|line| line.starts_with("kube-apiserver ")).expect("it was started");
        let pid = last.split(' ').nth(1).and_then(|word| word.parse().ok()).and_then(Pid::from_raw);
        pid.expect("a number of a process")
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if std::thread::panicking() {
            print_end("the API server", &self.folder.join("kube-apiserver.log"), 10);
        }
        if let Err(error) = Command::new(scripts().join("down")).arg(&self.folder).status() {
            eprintln!("the API server could not be stopped: {error}");
        }
    }
}

/// A process that nobody waits for is over, too.
fn is_running(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, after_name)| !after_name.starts_with('Z'))
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/cluster")
}
