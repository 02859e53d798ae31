// SPDX-License-Identifier: Apache-2.0

//! The `process_*` series every exporter has, read from /proc when they are asked for.

use std::{
    fs,
    time::{Duration, SystemTime},
};

use super::registry::About;
use crate::clock;

/// The kernel's unit of CPU time in /proc; fixed at 100 on every architecture we build for.
const TICKS_PER_SEC: f64 = 100.0;

const fn about(name: &'static str, kind: &'static str, help: &'static str) -> About {
    About { name, kind, labels: &[], help }
}

type Find = fn() -> Option<f64>;

/// What there is to tell of a process, and how to find it.
const PROCESS: [(About, Find); 8] = [
    (
        about("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."),
        cpu_secs,
    ),
    (about("process_max_fds", "gauge", "Maximum number of open file descriptors."), || {
        limit("Max open files")
    }),
    (
        about(
            "process_network_receive_bytes_total",
            "counter",
            "Bytes received in the network namespace of the process.",
        ),
        || network(0),
    ),
    (
        about(
            "process_network_transmit_bytes_total",
            "counter",
            "Bytes sent in the network namespace of the process.",
        ),
        || network(8),
    ),
    (about("process_open_fds", "gauge", "Number of open file descriptors."), || {
        fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as f64)
    }),
    (about("process_resident_memory_bytes", "gauge", "Resident memory size in bytes."), || kib("VmRSS:")),
    (about("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."), || kib("VmSize:")),
    (
        about("process_virtual_memory_max_bytes", "gauge", "Maximum amount of virtual memory in bytes."),
        || limit("Max address space"),
    ),
];

const START: About =
    about("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.");

/// Writes what can be read; what cannot be is left out.
pub(super) fn render(out: &mut String, started: SystemTime) {
    for (about, read) in &PROCESS {
        about.write(out, read().map(|value| (Vec::new(), value)));
    }
    START.write(out, [(Vec::new(), clock::unix_secs(started))]);
}

/// The names that [`render`] writes.
pub(super) fn names() -> impl Iterator<Item = About> {
    PROCESS.into_iter().map(|(about, _)| about).chain([START])
}

fn kib(key: &str) -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix(" kB")?.parse::<f64>().ok().map(|kib| kib * 1024.0)
}

fn limit(name: &str) -> Option<f64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let soft = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    match soft {
        // As other exporters write it: all bits set.
        "unlimited" => Some(u64::MAX as f64),
        soft => soft.parse().ok(),
    }
}

/// The sum over all devices of one column of /proc/net/dev.
fn network(column: usize) -> Option<f64> {
    let devices = fs::read_to_string("/proc/self/net/dev").ok()?;
    let bytes = |line: &str| line.split_once(':')?.1.split_whitespace().nth(column)?.parse::<f64>().ok();
    Some(devices.lines().filter_map(bytes).sum())
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
