// SPDX-License-Identifier: Apache-2.0

//! The `process_*` series every exporter has, read from /proc when they are asked for.

use std::{
    fs,
    time::{Duration, SystemTime},
};

use super::registry::head;
use crate::clock;

/// The kernel's unit of CPU time in /proc; fixed at 100 on every architecture we build for.
const TICKS_PER_SEC: f64 = 100.0;

/// Writes what can be read; what cannot be is left out.
pub(super) fn render(out: &mut String, started: SystemTime) {
    let mut write = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        if let Some(value) = value {
            head(out, name, help, kind);
            out.push_str(&format!("{name} {value}\n"));
        }
    };
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim_start_matches(':').trim().strip_suffix(" kB")?.parse::<f64>().ok().map(|kib| kib * 1024.0)
    };
    let files = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as f64);
    write(
        "process_cpu_seconds_total",
        "counter",
        "Total user and system CPU time spent in seconds.",
        cpu_secs(),
    );
    write("process_open_fds", "gauge", "Number of open file descriptors.", files);
    write("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", kib("VmRSS"));
    write("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", kib("VmSize"));
    let started = Some(clock::unix_secs(started));
    write(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
        started,
    );
}

fn cpu_secs() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the command in parentheses and may hold spaces: count from behind it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / TICKS_PER_SEC)
}

/// When this process started, as the kernel says; now, if it does not.
pub fn start_time() -> SystemTime {
    let now = SystemTime::now();
    let read = || {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        let ticks: f64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
        let uptime = fs::read_to_string("/proc/uptime").ok()?;
        let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
        Duration::try_from_secs_f64(uptime - ticks / TICKS_PER_SEC).ok()
    };
    read().and_then(|age| now.checked_sub(age)).unwrap_or(now)
}
