// SPDX-License-Identifier: Apache-2.0

//! What is measured, as it is kept in `results.json`.

use serde::{Deserialize, Serialize};

use crate::{
    machine::{Load, Machine},
    meter::{Cpu, KernelMemory, Resident},
    objects::Size,
};

/// One call of the benchmark.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub date: String,
    pub machine: Machine,
    /// What was asked for, so that the run can be repeated.
    pub arguments: Vec<String>,
    pub outcomes: Vec<Outcome>,
}

/// One subject at one size. What was not asked for, or not reached, is absent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub subject: String,
    pub version: String,
    pub size: Size,
    pub load_before: Load,
    pub cold: Option<Cold>,
    pub kernel: Option<KernelMemory>,
    pub restart: Option<Restart>,
    pub churn: Vec<Churn>,
    pub in_force: Vec<InForce>,
    pub rolling: Option<Rolling>,
    pub data_path: Option<DataPath>,
    pub repair: Option<Repair>,
    /// The CPU time of [`Floor::nothing`], in milliseconds, as older runs have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_floor_ms: Option<f64>,
    /// In the iptables mode, what its tool costs by itself.
    #[serde(default)]
    pub floor: Option<Floor>,
    /// In the iptables mode, one swap with nothing before and after it: the CPU time, in milliseconds.
    #[serde(default)]
    pub lone_swap_cpu_ms: Option<f64>,
    pub memory: Option<Resident>,
    /// What went wrong or was left out, in a sentence each.
    pub notes: Vec<String>,
}

/// One run of `iptables-restore` on the tables as they are.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Floor {
    /// That changes next to nothing.
    pub nothing: Cost,
    /// That puts one endpoint in another's place.
    pub swap: Cost,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Cost {
    pub cpu_ms: f64,
    pub wall_ms: f64,
}

/// From the start of the program on a node without rules.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cold {
    /// Until the subject is idle again.
    pub cpu: Cpu,
    /// Until `default/kubernetes` answers.
    pub first_s: Option<f64>,
    /// Until every service of the sample has answered.
    pub all_s: Option<f64>,
    /// Until the subject is idle.
    pub idle_s: f64,
    /// Services asked afterwards, and how many of them did not answer.
    pub checked: u64,
    pub unanswered: u64,
}

/// Stop, one change while nobody looks, start over the subject's own rules.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Restart {
    pub cpu: Cpu,
    /// From the start until the change that was missed is in force.
    pub in_force_s: Option<f64>,
    /// New connections tried from before the stop to the end, and how many of them failed.
    pub asked: u64,
    pub failed: u64,
}

/// How a service changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// One endpoint takes another's place.
    Swap,
    /// One endpoint more, or one less: the count changes.
    Resize,
    Add,
    Remove,
}

/// Changes at a steady rate, spread over all services.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Churn {
    pub change: Change,
    pub changes: u64,
    pub per_second: f64,
    pub cpu: Cpu,
    pub cpu_ms_per_change: f64,
    /// What the subject itself reports, under the name it reports it by.
    pub reported: Option<Reported>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reported {
    pub metric: String,
    pub times: Quantiles,
}

/// From just before the write (or the save) until a new connection follows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InForce {
    pub change: Change,
    pub from_write: Quantiles,
    /// From the store's answer to the write; below zero when the change was in force before the answer came.
    pub from_answer: Quantiles,
    pub missed: u64,
}

/// Services whose endpoints are all replaced, one by one, as fast as the store takes the writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rolling {
    pub services: u64,
    pub writes: u64,
    pub cpu: Cpu,
    /// Until the store had taken the last write.
    pub written_s: f64,
    /// Until the last write was in force.
    pub in_force_s: Option<f64>,
}

/// New connections with one request each, through service addresses and straight to the endpoints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DataPath {
    pub service: Connections,
    pub straight: Connections,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Connections {
    pub threads: usize,
    pub made: u64,
    pub failed: u64,
    /// The median of the rounds.
    pub per_second: f64,
    /// From connect to the answer.
    pub latency: Quantiles,
}

/// Somebody flushes all rules.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Repair {
    /// How long new connections failed; absent: until the end of the wait.
    pub outage_s: Option<f64>,
    /// Until every service of the sample answered again.
    pub all_s: Option<f64>,
    pub waited_s: f64,
}

/// Times in milliseconds.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Quantiles {
    pub count: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

impl Quantiles {
    /// By nearest rank; `None` of nothing.
    pub fn of(mut milliseconds: Vec<f64>) -> Option<Quantiles> {
        milliseconds.sort_by(f64::total_cmp);
        let rank =
            |percent: usize| milliseconds.get((milliseconds.len() * percent).div_ceil(100).saturating_sub(1));
        Some(Quantiles {
            count: milliseconds.len() as u64,
            p50_ms: *rank(50)?,
            p99_ms: *rank(99)?,
            max_ms: *rank(100)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let of = |range: std::ops::RangeInclusive<u32>| Quantiles::of(range.map(f64::from).collect());
        let hundred = of(1..=100).unwrap();
        assert_eq!((hundred.p50_ms, hundred.p99_ms, hundred.max_ms), (50.0, 99.0, 100.0));
        let one = of(7..=7).unwrap();
        assert_eq!((one.p50_ms, one.p99_ms, one.max_ms), (7.0, 7.0, 7.0));
        assert_eq!(Quantiles::of(vec![]), None);
    }
}
