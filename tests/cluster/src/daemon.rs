// SPDX-License-Identifier: Apache-2.0

//! The program under test, on node-a.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use netlink::Netns;
use rustix::process::{Pid, Signal, kill_process};

use crate::{PATIENCE, eventually, manifest, print_end, wait_for};

/// A daemon that runs or does not; killed when dropped. Its log is printed when a test fails.
pub struct Daemon {
    program: PathBuf,
    netns: Netns,
    folder: PathBuf,
    child: Option<Child>,
}

/// How a run ended, and what it said.
#[derive(Debug)]
pub struct Ending {
    pub status: ExitStatus,
    pub stderr: String,
}

impl Daemon {
    /// A daemon that does not run yet. Its log goes into the folder.
    pub fn new(program: PathBuf, netns: Netns, folder: PathBuf) -> Daemon {
        Daemon { program, netns, folder, child: None }
    }

    /// The next start runs this program, as after an upgrade.
    pub fn upgrade(&mut self, program: PathBuf) {
        self.program = program;
    }

    /// The program it runs.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// What it has logged so far, in all its runs.
    pub fn said(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Waits until a daemon that was just started has programmed everything.
    #[track_caller]
    pub fn must_serve(&mut self) {
        eventually("the daemon serves", || {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "the daemon ended: {ended:?}");
            match self.get(10_256, "/healthz")? {
                (200, _) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    /// The value of a metric without labels.
    pub fn metric(&self, name: &str) -> Result<f64, String> {
        let (_, body) = self.get(10_249, "/metrics")?;
        let line = body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).ok_or_else(|| format!("there is no {name}"))
    }

    /// Starts it with these flags besides those that every node needs.
    pub fn start(&mut self, flags: &[String]) {
        assert!(self.child.is_none(), "it runs already");
        let log = fs::File::options().create(true).append(true).open(self.log()).expect("a log file");
        let mut command = self.command(flags);
        command.stdout(log.try_clone().expect("a handle")).stderr(log);
        self.child =
            Some(self.netns.run(|| command.spawn()).expect("node-a").expect("the daemon can be run"));
    }

    /// Runs it with flags it is expected to end with, and returns what it said; `None` when it goes on and on.
    pub fn run_to_end(&self, flags: &[String]) -> Option<Ending> {
        let said = self.folder.join("ending.log");
        let mut command = self.command(flags);
        command.stdout(Stdio::null()).stderr(fs::File::create(&said).expect("a log file"));
        let mut child = self.netns.run(|| command.spawn()).expect("node-a").expect("the daemon can be run");
        let ended = wait_for(PATIENCE / 3, || match child.try_wait() {
            Ok(Some(status)) => Ok(status),
            other => Err(format!("{other:?}")),
        });
        let status = ended.map_err(|_| child.kill().and_then(|()| child.wait())).ok()?;
        let stderr = String::from_utf8_lossy(&fs::read(said).expect("the log file")).into_owned();
        Some(Ending { status, stderr })
    }

    /// Ends it without a word of warning.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("it is ours");
        child.wait().expect("it can be waited for");
    }

    /// Asks it to end, and waits until it has.
    pub fn stop(&mut self) {
        self.signal(Signal::TERM);
        let mut child = self.child.take().expect("it runs");
        eventually("the daemon ends on SIGTERM", || match child.try_wait() {
            Ok(Some(_)) => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }

    /// Holds it still, as a machine that is out of memory or time would.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Fails the test when the daemon has ended by itself.
    #[track_caller]
    pub fn must_run(&mut self) {
        let ended = self.child.as_mut().expect("it was started").try_wait().expect("it is ours");
        assert!(ended.is_none(), "the daemon ended: {ended:?}");
    }

    /// The status code and body of a GET on node-a's loopback.
    pub fn get(&self, port: u16, path: &str) -> Result<(u16, String), String> {
        self.ask(port, path).map(|(code, _, body)| (code, body))
    }

    /// The same with the headers, in order of their names, which are in lower case.
    pub fn ask(&self, port: u16, path: &str) -> Result<(u16, BTreeMap<String, String>, String), String> {
        let fetch = || {
            let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
            connection.set_read_timeout(Some(Duration::from_secs(5)))?;
            write!(connection, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
            let mut answer = String::new();
            connection.read_to_string(&mut answer)?;
            std::io::Result::Ok(answer)
        };
        let answer =
            self.netns.run(fetch).map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or("an answer without a head")?;
        let code =
            head.split(' ').nth(1).and_then(|word| word.parse().ok()).ok_or("an answer without a code")?;
        let headers = head.lines().skip(1).filter_map(|line| line.split_once(':'));
        let headers = headers.map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()));
        Ok((code, headers.collect(), body.to_owned()))
    }

    /// What the kernel holds, without what traffic and time change in it.
    pub fn rules(&self) -> Vec<String> {
        let output = self.netns.run(|| Command::new("nft").args(["list", "ruleset"]).output());
        let output = output.expect("node-a").expect("nft can be run");
        assert!(output.status.success(), "nft: {}", String::from_utf8_lossy(&output.stderr));
        settled_lines(&String::from_utf8_lossy(&output.stdout))
    }

    /// The kernel must hold exactly this; says what is gone and what is new.
    #[track_caller]
    pub fn must_have_rules(&self, wanted: &[String]) {
        let rules = self.rules();
        let gone: Vec<&String> = wanted.iter().filter(|line| !rules.contains(line)).collect();
        let new: Vec<&String> = rules.iter().filter(|line| !wanted.contains(line)).collect();
        assert!(gone.is_empty() && new.is_empty(), "rules are gone: {gone:#?}, and new: {new:#?}");
        assert_eq!(rules.len(), wanted.len(), "a rule is there more or less often");
    }

    fn command(&self, flags: &[String]) -> Command {
        let mut command = Command::new(&self.program);
        command.stdin(Stdio::null()).arg(format!("--cluster-cidr={}", manifest::CLUSTER_RANGES));
        command.args(["--hostname-override=node-a", "--healthz-bind-address=127.0.0.1:10256"]);
        command.args(["--metrics-bind-address=127.0.0.1:10249", "--v=2"]).args(flags);
        command
    }

    fn signal(&self, signal: Signal) {
        let pid =
            self.child.as_ref().and_then(|child| Pid::from_raw(child.id().cast_signed())).expect("it runs");
        kill_process(pid, signal).expect("it is ours");
    }

    fn log(&self) -> PathBuf {
        self.folder.join("daemon.log")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            print_end("the daemon", &self.log(), 60);
        }
    }
}

/// Elements may be listed in any order, and several on a line: one element a line, sorted, without counters and
/// times.
fn settled_lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text
        .replace("elements = {", "\n")
        .split(['\n', ','])
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let mut kept = Vec::new();
            let mut rest = words.as_slice();
            while let [word, after @ ..] = rest {
                rest = match *word {
                    // `counter packets 1 bytes 2` and `expires 3s`.
                    "packets" | "bytes" | "expires" => after.get(1..).unwrap_or_default(),
                    "}" => after,
                    _ => {
                        kept.push(*word);
                        after
                    }
                };
            }
            kept.join(" ")
        })
        .filter(|line| !line.is_empty())
        .collect();
    lines.sort();
    lines
}

#[cfg(test)]
mod tests {
    use super::settled_lines;

    #[test]
    fn order_counters_and_times_do_not_matter() {
        let one = "map m {\n  elements = { 10.0.0.1 counter packets 1 bytes 60 : 10.0.0.2,\n 10.0.0.3 : 10.0.0.4 }\n}";
        let two =
            "map m {\n  elements = { 10.0.0.3 : 10.0.0.4, 10.0.0.1 counter packets 7 bytes 9 : 10.0.0.2 }\n}";
        assert_eq!(settled_lines(one), settled_lines(two));
        assert_ne!(settled_lines(one), settled_lines(&one.replace("10.0.0.4", "10.0.0.5")));
    }
}
