// SPDX-License-Identifier: Apache-2.0

//! Runs a scenario before judges.

use std::fs;

use model::{Changes, Service, Update};

use crate::{
    judge::Judge,
    objects::Objects,
    pace::slowness,
    scenario::{Action, Complaint, Scenario, Script, Step, Variant},
    world::{Cluster, host_addresses},
};

/// What to do when a plan does not print as its golden.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goldens {
    Compare,
    /// Write the file anew.
    Update,
}

/// Runs one variant, and returns every complaint of every judge.
pub fn run(
    scenario: &Scenario,
    variant: Variant,
    judges: &mut [Box<dyn Judge>],
    goldens: Goldens,
) -> Vec<Complaint> {
    let script = match scenario.script(variant) {
        Ok(script) => script,
        Err(complaint) => return vec![complaint],
    };
    let (cluster, changes) = Cluster::new(&script.config);
    let objects = Objects::new(&script.config.settings.node_name);
    let mut run = Run {
        scenario,
        script: &script,
        judges,
        goldens,
        cluster,
        objects,
        new_goldens: Vec::new(),
        complaints: Vec::new(),
    };
    run.tell(0, &changes);
    for step in &script.steps {
        run.step(step);
    }
    run.finish();
    run.complaints
}

struct Run<'a> {
    scenario: &'a Scenario,
    script: &'a Script,
    judges: &'a mut [Box<dyn Judge>],
    goldens: Goldens,
    cluster: Cluster,
    objects: Objects,
    /// Plans to be written into sections.
    new_goldens: Vec<(usize, String)>,
    complaints: Vec<Complaint>,
}

impl Run<'_> {
    fn step(&mut self, step: &Step) {
        match &step.action {
            Action::Apply { yaml, .. } => match self.objects.apply(yaml) {
                Ok(updates) => self.update(step.line, updates),
                Err(reason) => self.complain(step.line, reason),
            },
            Action::Delete(removals) => {
                let updates: Result<Vec<Update>, String> =
                    removals.iter().map(|removal| self.objects.remove(removal)).collect();
                match updates {
                    Ok(updates) => self.update(step.line, updates),
                    Err(reason) => self.complain(step.line, reason),
                }
            }
            Action::Addresses(extra) => {
                self.each_judge(step.line, |judge| judge.readdress(extra));
                self.update(step.line, vec![Update::HostAddresses(host_addresses(extra))]);
            }
            Action::Packets(lines) => {
                for line in lines {
                    let plan = self.cluster.plan();
                    for judge in self.judges.iter_mut() {
                        if let Err(reason) = judge.judge(plan, line) {
                            let text = format!("{} {reason}, not: {}", judge.name(), line.text);
                            self.complaints.push(self.script.complaint(line.number, text));
                        }
                    }
                }
            }
            Action::Wait(time) => {
                let time = *time * slowness();
                self.judges.iter_mut().for_each(|judge| judge.wait(time));
            }
            Action::Plan { section, golden } => self.compare(step.line, *section, golden),
        }
    }

    fn update(&mut self, line: usize, mut updates: Vec<Update>) {
        self.stretch(&mut updates);
        self.each_judge(line, |judge| judge.observe(&updates));
        let changes = self.cluster.apply(updates);
        self.tell(line, &changes);
    }

    /// Where a scenario waits for time to pass, what shall pass is as much longer as the machine is slower.
    fn stretch(&self, updates: &mut [Update]) {
        const LONGEST_SECS: u32 = 86_400;
        if !self.script.steps.iter().any(|step| matches!(step.action, Action::Wait(_))) {
            return;
        }
        for update in updates {
            if let Update::Service(Service { affinity_secs: Some(secs), .. }) = update {
                *secs = secs.saturating_mul(slowness()).min(LONGEST_SECS);
            }
        }
    }

    fn tell(&mut self, line: usize, changes: &Changes) {
        let plan = self.cluster.plan();
        for judge in self.judges.iter_mut() {
            if let Err(reason) = judge.changed(plan, changes) {
                let text = format!("{}: {reason}", judge.name());
                self.complaints.push(self.script.complaint(line, text));
            }
        }
    }

    fn each_judge(&mut self, line: usize, mut work: impl FnMut(&mut dyn Judge) -> Result<(), String>) {
        for judge in self.judges.iter_mut() {
            if let Err(reason) = work(judge.as_mut()) {
                let text = format!("{}: {reason}", judge.name());
                self.complaints.push(self.script.complaint(line, text));
            }
        }
    }

    fn compare(&mut self, line: usize, section: usize, golden: &str) {
        let plan = self.cluster.plan().to_string();
        if self.script.variant != Variant::Written || plan == golden {
            return;
        }
        if self.goldens == Goldens::Update {
            self.new_goldens.push((section, plan));
            return;
        }
        self.complain(line, format!("the plan is another one (UPDATE=1 writes it here):\n{plan}"));
    }

    fn finish(&mut self) {
        let line = self.script.steps.last().map_or(1, |step| step.line);
        let (plan, scratch) = (self.cluster.plan().to_string(), self.cluster.plan_from_scratch().to_string());
        if plan != scratch {
            self.complain(
                line,
                format!("the plan kept incrementally:\n{plan}\nis not the one made at once:\n{scratch}"),
            );
        }
        if !self.new_goldens.is_empty() {
            let text = self.scenario.with_sections(&self.new_goldens);
            fs::write(&self.scenario.path, text)
                .unwrap_or_else(|error| self.complain(line, error.to_string()));
        }
        for judge in self.judges.iter_mut() {
            if let Err(reason) = judge.finish(self.cluster.plan()) {
                let text = format!("{} at the end: {reason}", judge.name());
                self.complaints.push(self.script.complaint(line, text));
            }
        }
    }

    fn complain(&mut self, line: usize, text: String) {
        self.complaints.push(self.script.complaint(line, text));
    }
}
