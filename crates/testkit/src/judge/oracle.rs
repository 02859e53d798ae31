// SPDX-License-Identifier: Apache-2.0

//! The first judge: the plan itself.

use std::net::IpAddr;

use model::{Changes, Plan};

use super::{Host, Judge, compare};
use crate::scenario::{Entry, Line};

/// Asks `Plan::decide`. Flows that go on are beyond it: the plan speaks of new connections.
#[derive(Debug, Default)]
pub struct Oracle {
    host: Host,
}

impl Judge for Oracle {
    fn name(&self) -> String {
        "oracle".to_owned()
    }

    fn readdress(&mut self, extra: &[IpAddr]) -> Result<(), String> {
        self.host.readdress(extra);
        Ok(())
    }

    fn changed(&mut self, _plan: &Plan, _changes: &Changes) -> Result<(), String> {
        Ok(())
    }

    fn judge(&mut self, plan: &Plan, line: &Line) -> Result<(), String> {
        let Entry::Probe(probe) = &line.entry else { return Ok(()) };
        self.host.packets(probe).try_for_each(|packet| compare(probe, plan, &plan.decide(&packet)))
    }

    fn finish(&mut self, _plan: &Plan) -> Result<(), String> {
        Ok(())
    }
}
