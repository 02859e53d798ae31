// SPDX-License-Identifier: Apache-2.0

//! What people are told of a Plan: in the log, and in Events.

use dataplane::wishes::{Kind, Shortfall};
use model::{Changes, Conflict};

use super::Reconciler;
use crate::events::{Note, Regarding};

impl Reconciler {
    pub(super) fn tell_conflicts(&self, changes: &Changes) {
        self.ports.metrics.conflicts.only().add(changes.conflicts.len() as u64);
        for Conflict { frontend, owner, loser } in &changes.conflicts {
            tracing::warn!(%frontend, %owner, %loser, "two services claim one frontend; the owner keeps it");
            self.ports.events.note(Note::warning(
                "FrontendConflict",
                "ClaimFrontend",
                Regarding::Service(loser.service.clone()),
                format!(
                    "{frontend} is served for {owner}, which claims it too; {loser} does not get its traffic"
                ),
            ));
        }
    }

    /// What services ask for and this mode does not do.
    pub(super) fn tell_unmet(&mut self, changes: &Changes) {
        let Some(dataplane) = &self.dataplane else { return };
        let abilities = dataplane.abilities();
        let news = match self.complete {
            true => self.unmet.rebuild(&abilities, &self.plan),
            false => self.unmet.update(&abilities, &self.plan, changes),
        };
        let mode = self.mode;
        for (service, Shortfall { kind, sentence }) in news {
            tracing::warn!(%service, "in {mode} mode {sentence}");
            let reason = match kind {
                Kind::Protocol => "UnsupportedProtocol",
                Kind::Tuning => "UnsupportedScheduler",
            };
            self.ports.events.note(Note::warning(
                reason,
                "ScheduleConnections",
                Regarding::Service(service),
                format!("{}: in {mode} mode {sentence}", self.ports.events.node()),
            ));
        }
    }
}
