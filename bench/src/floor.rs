// SPDX-License-Identifier: Apache-2.0

//! What `iptables-restore` costs by itself on the tables as they are now: nobody who works with it can cost less.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::{
    figures::{Cost, Floor},
    meter::Cgroup,
    subject::Running,
};

/// So often each input is given to the tool.
const RUNS: u32 = 20;
/// Endpoints of the service that is changed.
const ENDPOINTS: usize = 10;

/// Measures both floors, in chains of our own to which nothing leads.
pub fn measure(running: &Running) -> Result<Floor> {
    let floor = (|| {
        restore(running, 1, [&prepare(), &prepare()])?;
        let nothing = "*nat\n:BENCH-FLOOR - [0:0]\nCOMMIT\n";
        restore(running, 1, [nothing, nothing])?;
        anyhow::Ok(Floor {
            nothing: restore(running, RUNS, [nothing, nothing])?,
            swap: restore(running, RUNS, [&swap(0, 1), &swap(1, 0)])?,
        })
    })();
    let cleaned = restore(running, 1, [&clean(), "*nat\nCOMMIT\n"]);
    let floor = floor?;
    cleaned.map(|_| floor)
}

/// One endpoint takes another's place, in as few words as it can be said.
fn swap(old: usize, new: usize) -> String {
    format!(
        "*nat\n{}-R BENCH-SVC 1 {} -j BENCH-SEP-{new}\n-F BENCH-SEP-{old}\n-X BENCH-SEP-{old}\nCOMMIT\n",
        endpoint(new),
        share(0)
    )
}

fn share(place: usize) -> String {
    format!("-m statistic --mode random --probability {:.10}", 1.0 / (ENDPOINTS - place) as f64)
}

fn endpoint(number: usize) -> String {
    let (chain, address) = (format!("BENCH-SEP-{number}"), format!("10.1.2.{}", number + 1));
    format!(
        ":{chain} - [0:0]\n-A {chain} -s {address}/32 -j RETURN\n\
         -A {chain} -p tcp -m tcp -j DNAT --to-destination {address}:8080\n"
    )
}

/// A service with all endpoints but the second.
fn prepare() -> String {
    let members = || (0..=ENDPOINTS).filter(|number| *number != 1);
    let endpoints: String = members().map(endpoint).collect();
    let draw = |(place, number)| format!("-A BENCH-SVC {} -j BENCH-SEP-{number}\n", share(place));
    let draws: String = members().enumerate().map(draw).collect();
    format!("*nat\n:BENCH-SVC - [0:0]\n{endpoints}{draws}COMMIT\n")
}

fn clean() -> String {
    let chains = || ["BENCH-FLOOR", "BENCH-SVC"].into_iter().map(str::to_owned);
    let endpoints = || (0..=ENDPOINTS).map(|number| format!("BENCH-SEP-{number}"));
    let all: Vec<String> = chains().chain(endpoints()).collect();
    let declared: String = all.iter().map(|chain| format!(":{chain} - [0:0]\n")).collect();
    let removed: String = all.iter().map(|chain| format!("-X {chain}\n")).collect();
    format!("*nat\n{declared}{removed}COMMIT\n")
}

/// Gives the inputs to the tool in turns; what one run took on average.
fn restore(running: &Running, runs: u32, inputs: [&str; 2]) -> Result<Cost> {
    let group = Cgroup::new(&format!("portolan-bench-floor-{}", std::process::id()))?;
    let files: Vec<String> = inputs
        .iter()
        .enumerate()
        .map(|(number, input)| {
            let path = running.scratch().join(format!("floor-{number}"));
            std::fs::write(&path, input).context("writing an input")?;
            Ok(path.display().to_string())
        })
        .collect::<Result<_>>()?;
    let script = r#"echo $$ >"$1" && for run in $(seq "$2"); do
        if [ $((run % 2)) = 1 ]; then file=$3; else file=$4; fi
        iptables-restore -w 5 --noflush <"$file" || exit 1
        done"#;
    let door = group.door().display().to_string();
    let before = group.cpu()?;
    let began = Instant::now();
    running.run_on_node(&["sh", "-c", script, "sh", &door, &runs.to_string(), &files[0], &files[1]])?;
    let (wall, cpu) = (began.elapsed(), group.cpu()?.since(before));
    let per_run = |seconds: f64| 1e3 * seconds / f64::from(runs);
    Ok(Cost { cpu_ms: per_run(cpu.total_s()), wall_ms: per_run(wall.as_secs_f64()) })
}
