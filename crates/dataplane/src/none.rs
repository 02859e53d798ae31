// SPDX-License-Identifier: Apache-2.0

//! Does nothing, and does it well: for dry runs.

use model::Plan;

use crate::{Applied, Dataplane, Error, Scope};

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct None;

impl Dataplane for None {
    fn apply(&mut self, _: &Plan, _: Scope<'_>) -> Result<Applied, Error> {
        Ok(Applied::default())
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn dump(&mut self) -> Result<String, Error> {
        Ok(String::new())
    }
}
