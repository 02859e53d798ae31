// SPDX-License-Identifier: Apache-2.0

//! What is done to one subject, step by step.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::ValueEnum;

use crate::{
    datapath,
    figures::{Change, Churn, Cold, InForce, Outcome, Repair, Restart, Rolling},
    floor,
    ground::Ground,
    meter::{KernelMemory, settle},
    objects::{self, Objects},
    probe::{self, Timing},
    scrape,
    store::Store,
    subject::Running,
};

/// What can be measured; cold start always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Phase {
    Datapath,
    Churn,
    InForce,
    Rolling,
    Restart,
    Repair,
}

/// How much of everything.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// A start that is not done by then is given up.
    pub start_limit: Duration,
    /// Length of each churn.
    pub churn: Duration,
    pub changes_per_second: f64,
    pub timing: Timing,
    pub rolling_services: usize,
    /// How long a repair is waited for.
    pub repair_limit: Duration,
    pub connections: datapath::Effort,
}

/// One subject on its ground, with the objects it is to serve.
pub struct Trial<'a> {
    pub running: Running,
    pub ground: &'a Ground,
    pub store: Store<'a>,
    pub objects: &'a mut Objects,
    pub effort: Effort,
}

impl Trial<'_> {
    /// Does everything asked for, in the order that leaves the rules whole as long as possible.
    pub fn run(&mut self, phases: &[Phase], outcome: &mut Outcome) -> Result<()> {
        let kernel = KernelMemory::steady(Duration::from_secs(30))?;
        let cold = self.cold_start()?;
        let served = cold.all_s.is_some();
        outcome.cold = Some(cold);
        outcome.memory = self.running.resident();
        if !served {
            outcome.notes.push(format!("not all served after {:?}", self.effort.start_limit));
            return Ok(());
        }
        outcome.kernel = Some(KernelMemory::now()?.since(kernel));
        for phase in phases {
            self.running.check()?;
            match phase {
                Phase::Datapath => {
                    outcome.data_path =
                        Some(datapath::measure(self.ground, self.objects, self.effort.connections)?);
                }
                Phase::Churn => {
                    for change in [Change::Swap, Change::Resize] {
                        outcome.churn.push(self.churn(change)?);
                    }
                    if self.running.subject.is_iptables() {
                        outcome.lone_swap_cpu_ms = Some(self.lone_swaps()?);
                        outcome.floor = Some(floor::measure(&self.running)?);
                    }
                }
                Phase::InForce => {
                    for change in [Change::Swap, Change::Add, Change::Remove] {
                        outcome.in_force.extend(self.in_force(change)?);
                    }
                }
                Phase::Rolling => outcome.rolling = Some(self.rolling_update()?),
                Phase::Restart => outcome.restart = Some(self.restart()?),
                Phase::Repair => outcome.repair = Some(self.repair()?),
            }
            outcome.memory = self.running.resident().map(|now| now.and(outcome.memory));
        }
        self.running.check()
    }

    fn cold_start(&mut self) -> Result<Cold> {
        let deadline = Instant::now() + self.effort.start_limit;
        let (running, objects, client) = (&mut self.running, &*self.objects, &self.ground.client);
        let (began, served) = thread::scope(|scope| {
            // The question is asked before the program begins, so that no answer is too early to be seen.
            let asker = scope.spawn(|| client.run(|| probe::await_served(objects, deadline)));
            thread::sleep(Duration::from_millis(50));
            let began = running.start();
            let served = asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            anyhow::Ok((began?, served?))
        })?;
        self.running.check()?;
        let (cpu, idle) = settle(&self.running.group, self.effort.start_limit)?;
        let (checked, unanswered) = match served.all {
            Some(_) => client.run(|| probe::unanswered(objects, 1_000))?,
            None => (0, 0),
        };
        let seconds = |at: Instant| (at - began).as_secs_f64();
        Ok(Cold {
            cpu,
            first_s: served.first.map(seconds),
            all_s: served.all.map(seconds),
            idle_s: seconds(idle),
            checked,
            unanswered,
        })
    }

    /// Changes services one after the other at a steady rate; a prime stride spreads them over all.
    fn churn(&mut self, change: Change) -> Result<Churn> {
        let before = scrape::metrics(&self.running.node).unwrap_or_default();
        let (idle, _) = settle(&self.running.group, Duration::from_secs(15))?;
        let interval = Duration::from_secs_f64(1.0 / self.effort.changes_per_second);
        let began = Instant::now();
        let mut changes = 0;
        while began.elapsed() < self.effort.churn {
            self.change_one(changes, change)?;
            changes += 1;
            thread::sleep((began + interval * changes).saturating_duration_since(Instant::now()));
        }
        let per_second = f64::from(changes) / began.elapsed().as_secs_f64();
        let (busy, _) = settle(&self.running.group, Duration::from_secs(30))?;
        let after = scrape::metrics(&self.running.node).unwrap_or_default();
        let cpu = busy.since(idle);
        Ok(Churn {
            change,
            changes: u64::from(changes),
            per_second,
            cpu,
            cpu_ms_per_change: 1e3 * cpu.total_s() / f64::from(changes),
            reported: scrape::reported(self.running.subject.commit_metrics(), &before, &after),
        })
    }

    /// Swaps far enough apart that each is written alone; the CPU time of one, in milliseconds.
    fn lone_swaps(&mut self) -> Result<f64> {
        const SWAPS: u32 = 10;
        // Longer than any subject waits between two writes.
        const APART: Duration = Duration::from_millis(2_500);
        // What a start brings with it, such as a search for what others left, is over by then, and is no part of a swap.
        const WARM_UP: Duration = Duration::from_secs(40);
        thread::sleep(WARM_UP);
        let (idle, _) = settle(&self.running.group, Duration::from_secs(15))?;
        for turn in 0..SWAPS {
            self.change_one(turn, Change::Swap)?;
            thread::sleep(APART);
        }
        let (busy, _) = settle(&self.running.group, Duration::from_secs(30))?;
        Ok(1e3 * busy.since(idle).total_s() / f64::from(SWAPS))
    }

    fn change_one(&mut self, turn: u32, change: Change) -> Result<()> {
        let normal = self.objects.size.endpoints as usize;
        let count = self.objects.services.len();
        let entry = &mut self.objects.services[objects::concerned(turn as usize, count)];
        match change {
            Change::Swap => drop(entry.swap(turn as usize % normal)),
            _ if entry.endpoints.len() == normal => drop(entry.grow()),
            _ => drop(entry.shrink()),
        }
        self.store.write(entry)
    }

    /// Times changes of the probe while the rest of the cluster goes on changing.
    fn in_force(&mut self, change: Change) -> Result<Option<InForce>> {
        let Objects { probe, services, .. } = &mut *self.objects;
        let (store, timing, client) = (&self.store, self.effort.timing, &self.ground.client);
        let interval = Duration::from_secs_f64(1.0 / self.effort.changes_per_second);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let others = scope.spawn(|| {
                for turn in 0_usize.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let index = objects::concerned(turn, services.len());
                    let entry = &mut services[index];
                    entry.swap(0);
                    store.write(entry)?;
                    thread::sleep(interval);
                }
                anyhow::Ok(())
            });
            let timed = client.run(|| probe::time_changes(store, probe, change, timing));
            stop.store(true, Ordering::Relaxed);
            others.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            timed?
        })
    }

    /// Replaces every endpoint of some services, one endpoint a write, a few writes at once. The probe is
    /// changed last: changes of one kind are seen in the order they were made, so when it is in force, all are.
    fn rolling_update(&mut self) -> Result<Rolling> {
        const AT_ONCE: usize = 8;
        let (idle, _) = settle(&self.running.group, Duration::from_secs(15))?;
        let Objects { size, probe, services, .. } = &mut *self.objects;
        let count = self.effort.rolling_services.min(services.len());
        let began = Instant::now();
        let mut writes = 0;
        for slot in 0..size.endpoints as usize {
            let mut pending = VecDeque::new();
            for entry in &mut services[..count] {
                entry.swap(slot);
                pending.push_back(self.store.begin_write(entry)?);
                writes += 1;
                if pending.len() == AT_ONCE {
                    pending.pop_front().map(|oldest| oldest.wait()).transpose()?;
                }
            }
            // A service's next write must not overtake its last one.
            pending.into_iter().try_for_each(|write| write.wait().map(drop))?;
        }
        let last = probe.swap(0);
        self.store.write(probe)?;
        let written = began.elapsed();
        let (frontend, limit) = (probe.frontend, self.effort.start_limit);
        let seen = self.ground.client.run(|| probe::await_endpoint(frontend, last, limit))?;
        let (busy, _) = settle(&self.running.group, Duration::from_secs(30))?;
        Ok(Rolling {
            services: count as u64,
            writes,
            cpu: busy.since(idle),
            written_s: written.as_secs_f64(),
            in_force_s: seen.map(|seen| (seen - began).as_secs_f64()),
        })
    }

    fn restart(&mut self) -> Result<Restart> {
        settle(&self.running.group, Duration::from_secs(15))?;
        let steady = self.objects.services[0].frontend;
        let (stop, client) = (AtomicBool::new(false), &self.ground.client);
        let (running, store, limit) = (&mut self.running, &self.store, self.effort.start_limit);
        let probe = &mut self.objects.probe;
        thread::scope(|scope| {
            let asker = scope.spawn(|| client.run(|| probe::count_failures(steady, &stop)));
            let measured = (|| {
                running.stop()?;
                let missed = probe.swap(0);
                store.write(probe)?;
                let before = running.group.cpu()?;
                let began = running.start()?;
                let seen = client.run(|| probe::await_endpoint(probe.frontend, missed, limit))?;
                running.check()?;
                let (after, _) = settle(&running.group, limit)?;
                anyhow::Ok((after.since(before), seen.map(|seen| (seen - began).as_secs_f64())))
            })();
            stop.store(true, Ordering::Relaxed);
            let (asked, failed) = asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let (cpu, in_force_s) = measured?;
            Ok(Restart { cpu, in_force_s, asked, failed })
        })
    }

    fn repair(&mut self) -> Result<Repair> {
        settle(&self.running.group, Duration::from_secs(15))?;
        let limit = self.effort.repair_limit;
        let (running, objects, client) = (&self.running, &*self.objects, &self.ground.client);
        thread::scope(|scope| {
            let asker = scope.spawn(|| client.run(|| probe::await_outage(objects, Instant::now() + limit)));
            thread::sleep(Duration::from_millis(50));
            for command_line in running.subject.flush() {
                running.run_on_node(command_line)?;
            }
            let flushed = Instant::now();
            let outage = asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let seconds =
                |at: Instant| at.saturating_duration_since(outage.failed.unwrap_or(flushed)).as_secs_f64();
            Ok(Repair {
                outage_s: outage.served.first.map(seconds),
                all_s: outage.served.all.map(seconds),
                waited_s: limit.as_secs_f64(),
            })
        })
    }
}
