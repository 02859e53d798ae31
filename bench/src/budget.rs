// SPDX-License-Identifier: Apache-2.0

//! What Portolan may cost. A budget is checked where its size was measured, for Portolan's own subjects.

use crate::{
    figures::{Change, Outcome, Run},
    objects::Size,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Met,
    Missed,
}

/// One budget and what came of it.
#[derive(Clone, Debug)]
pub struct Line {
    pub what: String,
    pub measured: String,
    pub budget: String,
    pub verdict: Verdict,
}

const LARGE: Size = Size { services: 10_000, endpoints: 10 };
const WIDE: Size = Size { services: 45_000, endpoints: 1 };
/// The same measurement twice differs by about this much on a quiet machine of two cores.
const NOISE: f64 = 0.05;

/// At most this much of something, at one size.
struct Limit {
    size: Size,
    what: &'static str,
    unit: &'static str,
    most: f64,
    measured: fn(&Outcome) -> Option<f64>,
}

const LIMITS: &[Limit] = &[
    Limit { size: LARGE, what: "cold start, CPU", unit: "s", most: 1.5, measured: cold_cpu },
    Limit {
        size: LARGE,
        what: "cold start, first service answered",
        unit: "s",
        most: 0.3,
        measured: |o| Some(o.cold.as_ref()?.first_s.unwrap_or(f64::INFINITY)),
    },
    Limit {
        size: LARGE,
        what: "restart over its own rules, CPU",
        unit: "s",
        most: 1.5,
        measured: |o| Some(o.restart.as_ref()?.cpu.total_s()),
    },
    Limit {
        size: LARGE,
        what: "CPU per swap",
        unit: "ms",
        most: 0.3,
        measured: |o| per_change(o, Change::Swap),
    },
    Limit {
        size: LARGE,
        what: "CPU per resize",
        unit: "ms",
        most: 0.3,
        measured: |o| per_change(o, Change::Resize),
    },
    Limit {
        size: LARGE,
        what: "write to in force, p50",
        unit: "ms",
        most: 3.0,
        measured: |o| o.in_force.iter().map(|timed| timed.from_write.p50_ms).reduce(f64::max),
    },
    Limit {
        size: LARGE,
        what: "write to in force, p99",
        unit: "ms",
        most: 10.0,
        measured: |o| o.in_force.iter().map(|timed| timed.from_write.p99_ms).reduce(f64::max),
    },
    Limit {
        size: LARGE,
        what: "peak resident memory, tree",
        unit: "MiB",
        most: 40.0,
        measured: |o| Some(o.memory?.tree_peak_kib as f64 / 1024.0),
    },
    Limit {
        size: LARGE,
        what: "kernel memory, slab",
        unit: "MiB",
        most: 20.0,
        measured: |o| Some(o.kernel?.unreclaimable_kib as f64 / 1024.0),
    },
    Limit { size: WIDE, what: "cold start, CPU", unit: "s", most: 5.0, measured: cold_cpu },
    Limit {
        size: WIDE,
        what: "cold start, all answered",
        unit: "s",
        most: 5.0,
        measured: |o| Some(o.cold.as_ref()?.all_s.unwrap_or(f64::INFINITY)),
    },
    Limit {
        size: LARGE,
        what: "outage after a flush",
        unit: "s",
        most: 0.1,
        measured: |o| Some(o.repair.as_ref()?.outage_s.unwrap_or(f64::INFINITY)),
    },
];

/// All budgets that this run can judge.
pub fn check(run: &Run) -> Vec<Line> {
    let mut lines = Vec::new();
    for outcome in ours(run) {
        for limit in LIMITS.iter().filter(|limit| limit.size == outcome.size) {
            let Some(measured) = (limit.measured)(outcome) else { continue };
            lines.push(Line {
                what: format!("{}, {}: {}", outcome.size, outcome.subject, limit.what),
                measured: format!("{measured:.3} {}", limit.unit),
                budget: format!("<= {} {}", limit.most, limit.unit),
                verdict: verdict(measured <= limit.most),
            });
        }
        lines.extend(flat(run, outcome));
        lines.extend(beside_peer(run, outcome));
    }
    lines
}

/// Connections through a service may not become slower with the number of services. What is compared is the
/// share of the straight path's rate, which the same minute gave.
fn flat(run: &Run, outcome: &Outcome) -> Option<Line> {
    let few = run
        .outcomes
        .iter()
        .find(|o| o.subject == outcome.subject && o.size.services <= 100 && share(o).is_some())?;
    if outcome.size != LARGE {
        return None;
    }
    let (many, few) = (share(outcome)?, share(few)?);
    Some(Line {
        what: format!("{}, {}: rate by service, as a share of straight", outcome.size, outcome.subject),
        measured: format!("{many:.3}"),
        budget: format!("as with few services, {few:.3}, less 5 % for noise"),
        verdict: verdict(many >= few * (1.0 - NOISE)),
    })
}

/// And never slower than kube-proxy's nftables mode in the same run.
fn beside_peer(run: &Run, outcome: &Outcome) -> Option<Line> {
    let peer = run.outcomes.iter().find(|o| o.size == outcome.size && o.subject == "kube-proxy nftables")?;
    let (ours, theirs) = (share(outcome)?, share(peer)?);
    Some(Line {
        what: format!("{}, {}: rate by service, beside kube-proxy nftables", outcome.size, outcome.subject),
        measured: format!("{ours:.3}"),
        budget: format!(">= {theirs:.3}, less 5 % for noise"),
        verdict: verdict(ours >= theirs * (1.0 - NOISE)),
    })
}

fn ours(run: &Run) -> impl Iterator<Item = &Outcome> {
    run.outcomes.iter().filter(|outcome| outcome.subject.starts_with("portolan,"))
}

fn share(outcome: &Outcome) -> Option<f64> {
    let path = outcome.data_path.as_ref()?;
    (path.straight.per_second > 0.0).then(|| path.service.per_second / path.straight.per_second)
}

fn cold_cpu(outcome: &Outcome) -> Option<f64> {
    let cold = outcome.cold.as_ref()?;
    // A start that never came to its end has no figure worth comparing.
    Some(if cold.all_s.is_some() { cold.cpu.total_s() } else { f64::INFINITY })
}

fn per_change(outcome: &Outcome, change: Change) -> Option<f64> {
    outcome.churn.iter().find(|churn| churn.change == change).map(|churn| churn.cpu_ms_per_change)
}

fn verdict(met: bool) -> Verdict {
    if met { Verdict::Met } else { Verdict::Missed }
}
