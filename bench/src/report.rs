// SPDX-License-Identifier: Apache-2.0

//! A run as people read it: one table for each size, with the budgets beside the figures.

use std::fmt::Write;

use crate::{
    budget::{self, Verdict},
    figures::{Change, Churn, Cost, Outcome, Quantiles, Run},
    objects::Size,
};

/// The whole run as text.
pub fn text(run: &Run) -> String {
    let machine = &run.machine;
    let mut text = format!(
        "Portolan benchmark, {}\n{} cores, {}, {} MiB, Linux {}; load at the start {:.2} {:.2} {:.2}\n",
        run.date,
        machine.cores,
        machine.processor,
        machine.memory_mib,
        machine.kernel,
        machine.load.one_minute,
        machine.load.five_minutes,
        machine.load.fifteen_minutes,
    );
    let _ = writeln!(text, "arguments: {}", run.arguments.join(" "));
    for size in sizes(run) {
        let outcomes: Vec<&Outcome> = run.outcomes.iter().filter(|outcome| outcome.size == size).collect();
        text.push_str(&table(size, &outcomes));
    }
    text.push_str(&budgets(run));
    for outcome in &run.outcomes {
        for note in &outcome.notes {
            let _ = writeln!(text, "note: {} at {}: {note}", outcome.subject, outcome.size);
        }
    }
    text
}

fn sizes(run: &Run) -> Vec<Size> {
    let mut sizes = Vec::new();
    for outcome in &run.outcomes {
        if !sizes.contains(&outcome.size) {
            sizes.push(outcome.size);
        }
    }
    sizes
}

type Cell = fn(&Outcome) -> Option<String>;

const ROWS: &[(&str, Cell)] = &[
    ("load before, 1 min", |o| Some(format!("{:.2}", o.load_before.one_minute))),
    ("cold start: CPU (user + system), s", |o| {
        let cpu = o.cold.as_ref()?.cpu;
        Some(format!("{:.2} ({:.2} + {:.2})", cpu.total_s(), cpu.user_s, cpu.system_s))
    }),
    ("cold start: first answered, s", |o| seconds(o.cold.as_ref()?.first_s)),
    ("cold start: all answered, s", |o| seconds(o.cold.as_ref()?.all_s)),
    ("services asked afterwards, unanswered", |o| {
        let cold = o.cold.as_ref()?;
        Some(format!("{}, {}", cold.checked, cold.unanswered))
    }),
    ("restart: CPU, s", |o| Some(format!("{:.2}", o.restart.as_ref()?.cpu.total_s()))),
    ("restart: missed change in force, s", |o| seconds(o.restart.as_ref()?.in_force_s)),
    ("restart: connections asked, failed", |o| {
        let restart = o.restart.as_ref()?;
        Some(format!("{}, {}", restart.asked, restart.failed))
    }),
    ("swap: CPU per change, ms", |o| Some(format!("{:.3}", churn(o, Change::Swap)?.cpu_ms_per_change))),
    ("resize: CPU per change, ms", |o| Some(format!("{:.3}", churn(o, Change::Resize)?.cpu_ms_per_change))),
    ("one swap alone: CPU, ms", |o| Some(format!("{:.3}", o.lone_swap_cpu_ms?))),
    ("the tool alone, one swap: CPU / wall, ms", |o| Some(cost(o.floor?.swap))),
    ("one iptables-restore of nothing: CPU, ms", |o| Some(format!("{:.3}", o.tool_floor_ms?))),
    ("the tool alone, nothing: CPU / wall, ms", |o| Some(cost(o.floor?.nothing))),
    ("swap: as reported, p50 / p99, ms", |o| reported(o, Change::Swap)),
    ("resize: as reported, p50 / p99, ms", |o| reported(o, Change::Resize)),
    ("swap: write to in force, p50 / p99, ms", |o| in_force(o, Change::Swap)),
    ("add: write to in force, p50 / p99, ms", |o| in_force(o, Change::Add)),
    ("remove: write to in force, p50 / p99, ms", |o| in_force(o, Change::Remove)),
    ("swap: answer to in force, p50 / p99, ms", |o| {
        Some(times(&o.in_force.iter().find(|timed| timed.change == Change::Swap)?.from_answer))
    }),
    ("rolling update: services, writes", |o| {
        let rolling = o.rolling.as_ref()?;
        Some(format!("{}, {}", rolling.services, rolling.writes))
    }),
    ("rolling update: CPU, s", |o| Some(format!("{:.3}", o.rolling.as_ref()?.cpu.total_s()))),
    ("rolling update: written, s", |o| Some(format!("{:.2}", o.rolling.as_ref()?.written_s))),
    ("rolling update: in force, s", |o| seconds(o.rolling.as_ref()?.in_force_s)),
    ("peak resident, process / tree, MiB", |o| {
        let memory = o.memory?;
        let mib = |kib: u64| kib as f64 / 1024.0;
        Some(format!("{:.1} / {:.1}", mib(memory.process_peak_kib), mib(memory.tree_peak_kib)))
    }),
    ("kernel: unreclaimable slab + per-CPU, MiB", |o| {
        let kernel = o.kernel?;
        let mib = |kib: i64| kib as f64 / 1024.0;
        Some(format!("{:.1} + {:.1}", mib(kernel.unreclaimable_kib), mib(kernel.percpu_kib)))
    }),
    ("connections/s, service / straight", |o| {
        let path = o.data_path.as_ref()?;
        Some(format!("{:.0} / {:.0}", path.service.per_second, path.straight.per_second))
    }),
    ("request by service, p50 / p99, ms", |o| Some(times(&o.data_path.as_ref()?.service.latency))),
    ("request straight, p50 / p99, ms", |o| Some(times(&o.data_path.as_ref()?.straight.latency))),
    ("after a flush: outage, s", |o| {
        let repair = o.repair.as_ref()?;
        seconds(repair.outage_s)
            .filter(|_| repair.outage_s.is_some())
            .or(Some(format!("> {}", repair.waited_s)))
    }),
    ("after a flush: all answered, s", |o| {
        let repair = o.repair.as_ref()?;
        seconds(repair.all_s).filter(|_| repair.all_s.is_some()).or(Some(format!("> {}", repair.waited_s)))
    }),
];

fn cost(cost: Cost) -> String {
    format!("{:.2} / {:.2}", cost.cpu_ms, cost.wall_ms)
}

fn table(size: Size, outcomes: &[&Outcome]) -> String {
    const LABEL: usize = 44;
    const COLUMN: usize = 24;
    let mut text = format!("\n{} services x {} endpoints\n{:LABEL$}", size.services, size.endpoints, "");
    for outcome in outcomes {
        let _ = write!(text, "{:>COLUMN$}", outcome.subject);
    }
    text.push('\n');
    for (label, cell) in ROWS {
        let cells: Vec<Option<String>> = outcomes.iter().map(|outcome| cell(outcome)).collect();
        if cells.iter().all(Option::is_none) {
            continue;
        }
        let _ = write!(text, "{label:LABEL$}");
        for cell in cells {
            let _ = write!(text, "{:>COLUMN$}", cell.as_deref().unwrap_or("-"));
        }
        text.push('\n');
    }
    text
}

fn budgets(run: &Run) -> String {
    let mut text = String::new();
    for line in budget::check(run) {
        let verdict = match line.verdict {
            Verdict::Met => "met",
            Verdict::Missed => "MISSED",
        };
        let _ = writeln!(text, "{verdict:8}{}: {} (budget {})", line.what, line.measured, line.budget);
    }
    match text.is_empty() {
        true => "\nno budget is set for what was measured\n".to_owned(),
        false => format!("\nbudgets\n{text}"),
    }
}

fn churn(outcome: &Outcome, change: Change) -> Option<&Churn> {
    outcome.churn.iter().find(|churn| churn.change == change)
}

fn reported(outcome: &Outcome, change: Change) -> Option<String> {
    Some(times(&churn(outcome, change)?.reported.as_ref()?.times))
}

fn in_force(outcome: &Outcome, change: Change) -> Option<String> {
    let timed = outcome.in_force.iter().find(|timed| timed.change == change)?;
    let missed = if timed.missed > 0 { format!(", {} missed", timed.missed) } else { String::new() };
    Some(format!("{}{missed}", times(&timed.from_write)))
}

fn times(quantiles: &Quantiles) -> String {
    let digits = if quantiles.p99_ms < 100.0 { 2 } else { 0 };
    format!("{:.digits$} / {:.digits$}", quantiles.p50_ms, quantiles.p99_ms)
}

fn seconds(value: Option<f64>) -> Option<String> {
    Some(value.map_or_else(|| "never".to_owned(), |value| format!("{value:.3}")))
}
