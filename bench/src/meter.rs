// SPDX-License-Identifier: Apache-2.0

//! What a process tree and the kernel spend: processor time, resident memory, kernel memory.
//!
//! Processor time is that of a control group the subject runs in, alone: programs it starts and that end
//! again are in it, to the microsecond. Packets the kernel handles in the subject's time slice are in it too,
//! and work the kernel does later on its own threads (freeing old rules) is not: the same for every subject.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// A control group of our own.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Cgroup {
    /// Makes one below the root of the version 2 hierarchy, or of `cpuacct` where there is none.
    pub fn new(name: &str) -> Result<Cgroup> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let (root, version) = accounting_root(&mounts)
            .context("no control group with processor time is mounted (cgroup2, or cpuacct of version 1)")?;
        let path = root.join(name);
        fs::create_dir(&path).with_context(|| format!("making the control group {}", path.display()))?;
        Ok(Cgroup { path, version })
    }

    /// The file a process writes its number to in order to be counted.
    pub fn door(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    pub fn cpu(&self) -> Result<Cpu> {
        let read = |name: &str| fs::read_to_string(self.path.join(name)).context("reading processor time");
        match self.version {
            Version::V2 => {
                let text = read("cpu.stat")?;
                let field = |name| field_of(&text, name).map(|micros| micros as f64 / 1e6);
                let (Some(user), Some(system)) = (field("user_usec"), field("system_usec")) else {
                    bail!("cpu.stat has no user_usec and system_usec");
                };
                Ok(Cpu { user_s: user, system_s: system })
            }
            Version::V1 => {
                let seconds = |name| anyhow::Ok(read(name)?.trim().parse::<u64>()? as f64 / 1e9);
                Ok(Cpu { user_s: seconds("cpuacct.usage_user")?, system_s: seconds("cpuacct.usage_sys")? })
            }
        }
    }

    fn pids(&self) -> Vec<u32> {
        fs::read_to_string(self.door())
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect()
    }

    /// Ends every process in the group, and waits until it is empty.
    pub fn kill(&self) {
        end_processes(&self.path);
    }

    /// Removes the group, which must be empty.
    pub fn remove(&self) {
        // A group whose last process is only just gone may be busy for a moment.
        for _ in 0..100 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        eprintln!("could not remove the control group {}", self.path.display());
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        self.kill();
        self.remove();
    }
}

fn end_processes(group: &Path) {
    let door = group.join("cgroup.procs");
    for _ in 0..200 {
        let pids = fs::read_to_string(&door).unwrap_or_default();
        if pids.trim().is_empty() {
            return;
        }
        for pid in
            pids.lines().filter_map(|line| line.parse().ok()).filter_map(rustix::process::Pid::from_raw)
        {
            // It may be gone already.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn accounting_root(mounts: &str) -> Option<(PathBuf, Version)> {
    let entries =
        || mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).filter(|entry| entry.len() > 3);
    let v2 = entries().find(|entry| entry[2] == "cgroup2").map(|entry| (entry[1].into(), Version::V2));
    let v1 = || {
        entries()
            .find(|entry| entry[2] == "cgroup" && entry[3].split(',').any(|option| option == "cpuacct"))
            .map(|entry| (entry[1].into(), Version::V1))
    };
    v2.or_else(v1)
}

/// Processor seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    pub user_s: f64,
    pub system_s: f64,
}

impl Cpu {
    pub fn total_s(self) -> f64 {
        self.user_s + self.system_s
    }

    pub fn since(self, earlier: Cpu) -> Cpu {
        Cpu { user_s: self.user_s - earlier.user_s, system_s: self.system_s - earlier.system_s }
    }
}

/// Resident memory of the subject.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Resident {
    /// The largest the main process ever was (VmHWM), in KiB.
    pub process_peak_kib: u64,
    /// The largest sum over the tree that sampling saw, in KiB: short-lived children may be missed.
    pub tree_peak_kib: u64,
    /// Now, in KiB.
    pub now_kib: u64,
}

impl Resident {
    /// The peaks of both; a restarted program is another process.
    pub fn and(self, earlier: Option<Resident>) -> Resident {
        let earlier = earlier.unwrap_or(self);
        Resident {
            process_peak_kib: self.process_peak_kib.max(earlier.process_peak_kib),
            tree_peak_kib: self.tree_peak_kib.max(earlier.tree_peak_kib),
            now_kib: self.now_kib,
        }
    }
}

/// Looks at the tree's memory every few milliseconds, until dropped.
pub struct Watcher {
    stop: Arc<AtomicBool>,
    peak_kib: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    pub fn start(group: Arc<Cgroup>) -> Watcher {
        let (stop, peak_kib) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, peak) = (stop.clone(), peak_kib.clone());
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let sum = group.pids().into_iter().map(|pid| status_kib(pid, "VmRSS:")).sum();
                peak.fetch_max(sum, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(20));
            }
        });
        Watcher { stop, peak_kib, thread: Some(thread) }
    }

    pub fn resident(&self, main: u32) -> Resident {
        let process_peak_kib = status_kib(main, "VmHWM:");
        Resident {
            process_peak_kib,
            tree_peak_kib: self.peak_kib.load(Ordering::Relaxed).max(process_peak_kib),
            now_kib: status_kib(main, "VmRSS:"),
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn status_kib(pid: u32, field: &str) -> u64 {
    fs::read_to_string(format!("/proc/{pid}/status"))
        .ok()
        .and_then(|text| field_of(&text, field))
        .unwrap_or(0)
}

/// Memory the kernel holds for itself, of the whole machine: differences count, on a quiet machine.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct KernelMemory {
    pub slab_kib: i64,
    /// The part of the slab that cannot be given back: netfilter's objects are in it, file caches are not.
    pub unreclaimable_kib: i64,
    pub percpu_kib: i64,
    pub vmalloc_kib: i64,
}

impl KernelMemory {
    pub fn now() -> Result<KernelMemory> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let field = |name| field_of(&text, name).map_or(0, |kib| kib as i64);
        Ok(KernelMemory {
            slab_kib: field("Slab:"),
            unreclaimable_kib: field("SUnreclaim:"),
            percpu_kib: field("Percpu:"),
            vmalloc_kib: field("VmallocUsed:"),
        })
    }

    /// Waits until the kernel has given back what the last subject left, and returns what it holds then.
    pub fn steady(limit: Duration) -> Result<KernelMemory> {
        const SMALL_KIB: i64 = 512;
        let deadline = Instant::now() + limit;
        let mut last = KernelMemory::now()?;
        loop {
            thread::sleep(Duration::from_secs(1));
            let now = KernelMemory::now()?;
            if now.since(last).kept_kib().abs() < SMALL_KIB || Instant::now() > deadline {
                return Ok(now);
            }
            last = now;
        }
    }

    pub fn since(self, earlier: KernelMemory) -> KernelMemory {
        KernelMemory {
            slab_kib: self.slab_kib - earlier.slab_kib,
            unreclaimable_kib: self.unreclaimable_kib - earlier.unreclaimable_kib,
            percpu_kib: self.percpu_kib - earlier.percpu_kib,
            vmalloc_kib: self.vmalloc_kib - earlier.vmalloc_kib,
        }
    }

    /// What netfilter's objects take: slab that stays, and per-processor counters.
    pub fn kept_kib(self) -> i64 {
        self.unreclaimable_kib + self.percpu_kib
    }
}

fn field_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Waits until the group has been idle for a second, and returns what it had used when that second began.
///
/// Idle: less than 3 % of one processor in each quarter of the second. After `limit` the group counts as
/// settled, busy or not.
pub fn settle(group: &Cgroup, limit: Duration) -> Result<(Cpu, Instant)> {
    const WINDOW: Duration = Duration::from_millis(250);
    const WINDOWS: usize = 4;
    let deadline = Instant::now() + limit;
    let mut quiet: Vec<(Cpu, Instant)> = vec![(group.cpu()?, Instant::now())];
    while quiet.len() <= WINDOWS && Instant::now() < deadline {
        thread::sleep(WINDOW);
        let (now, at) = (group.cpu()?, Instant::now());
        let (before, began) = quiet[quiet.len() - 1];
        if now.since(before).total_s() > 0.03 * (at - began).as_secs_f64() {
            quiet.clear();
        }
        quiet.push((now, at));
    }
    Ok(quiet[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_accounting_hierarchy_is_found() {
        let hybrid = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(accounting_root(hybrid), Some(("/sys/fs/cgroup/unified".into(), Version::V2)));
        let v1 = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n";
        assert_eq!(accounting_root(v1), Some(("/sys/fs/cgroup/cpu,cpuacct".into(), Version::V1)));
        assert_eq!(accounting_root("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn fields_are_whole_words() {
        let text = "VmRSSx: 1 kB\nVmRSS:\t  2048 kB\nSlab: 7 kB\n";
        assert_eq!(field_of(text, "VmRSS:"), Some(2048));
        assert_eq!(field_of(text, "VmHWM:"), None);
    }
}
