// SPDX-License-Identifier: Apache-2.0

//! A child process with input, output and a time limit.

use std::{
    io::{self, BufRead as _, BufReader, Read, Write as _},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use super::{Failure, name};

/// What to run.
pub(super) struct Job<'a> {
    pub(super) tool: &'a Path,
    pub(super) args: &'a [&'a str],
    pub(super) input: Option<&'a str>,
    /// Takes this for the lock; `None` for the one that all tools of the node share.
    pub(super) lock: Option<&'a str>,
    pub(super) limit: Duration,
}

/// How it ended.
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    pub(super) complaints: String,
}

/// So much of what a tool complains is kept.
const COMPLAINTS: u64 = 16 * 1024;

impl Job<'_> {
    /// Runs it to its end, and passes each line of its output on. `started` is called with its number before it gets
    /// any input. A tool that hangs is killed when its time is over.
    pub(super) fn run(
        &self,
        each_line: &mut dyn FnMut(&str),
        started: impl FnOnce(u32),
    ) -> Result<Ended, Failure> {
        let failed = |error| Failure::Run { tool: name(self.tool), error };
        let mut child = Command::new(self.tool)
            .args(self.args)
            .envs(self.lock.map(|path| ("XTABLES_LOCKFILE", path)))
            .stdin(if self.input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::start(self.tool, error))?;
        started(child.id());
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let child = Mutex::new(child);
        let (done, over) = mpsc::channel::<()>();
        let (output, complaints, killed) = thread::scope(|scope| {
            let writer = stdin.zip(self.input).map(|(mut stdin, input)| {
                // A tool that ends early says why, so that a broken pipe is no news.
                scope.spawn(move || drop(stdin.write_all(input.as_bytes())))
            });
            let complaints = scope.spawn(move || read_some(stderr));
            let (child, limit) = (&child, self.limit);
            let watchdog = scope.spawn(move || {
                let late = over.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
                late && lock(child).kill().is_ok()
            });
            let output = stdout.map_or(Ok(()), |stdout| read_lines(stdout, each_line));
            let complaints = complaints.join().unwrap_or_default();
            drop(done);
            drop(writer.map(thread::ScopedJoinHandle::join));
            (output, complaints, watchdog.join().unwrap_or_default())
        });
        let status = lock(&child).wait().map_err(failed)?;
        if killed {
            return Err(Failure::Slow { tool: name(self.tool), limit: self.limit });
        }
        output.map_err(failed)?;
        Ok(Ended { status, complaints })
    }
}

fn lock(child: &Mutex<Child>) -> std::sync::MutexGuard<'_, Child> {
    child.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read_lines(stdout: impl Read, each_line: &mut dyn FnMut(&str)) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(64 * 1024, stdout);
    let mut line = Vec::new();
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        // A comment may hold any byte; nothing that is ours does.
        each_line(String::from_utf8_lossy(&line).trim_end_matches('\n'));
    }
}

fn read_some(stderr: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut stderr) = stderr {
        let _ = stderr.by_ref().take(COMPLAINTS).read_to_end(&mut bytes);
        // The rest is read away, so that the tool does not wait for a reader.
        let _ = io::copy(&mut stderr, &mut io::sink());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
