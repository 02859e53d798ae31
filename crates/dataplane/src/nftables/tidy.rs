// SPDX-License-Identifier: Apache-2.0

//! Removes chains and sets that nothing needs any more, and those that are not ours.
//!
//! Chains, rules and maps hold on to each other, and the kernel deletes nothing that something holds on to. So what is not
//! ours goes in steps, each in a batch of its own: first the chains that packets come through, which do the harm, then
//! what is held on to by the step before.

use model::Family;
use netlink::{Errno, Transport};

use super::{
    diff, frame,
    script::Script,
    turn::{Chunk, Framed, Turn},
};
use crate::Error;

impl<T: Transport> Turn<'_, T> {
    /// See the module. When all that is in use is in force.
    pub(super) fn tidy(&mut self) {
        for family in self.families() {
            if let Err(error) = self.tidy_family(family) {
                self.failed[family] = Some(error);
            }
        }
    }

    fn tidy_family(&mut self, family: Family) -> Result<(), Error> {
        let foreign = std::mem::take(&mut self.known[family].foreign);
        let (hooks, chains): (Vec<_>, Vec<_>) = foreign.chains.iter().partition(|chain| chain.base.is_some());
        let [hooks, chains] =
            [hooks, chains].map(|of| of.iter().map(|chain| chain.name.as_str()).collect::<Vec<_>>());
        let sets: Vec<&str> = foreign.sets.iter().map(|set| set.name.as_str()).collect();
        self.step(family, |script| script.remove_objects(&hooks, &[]))?;
        let mut held = Vec::new();
        held.extend(self.step_if_free(family, |script| script.empty_chains(&chains))?);
        held.extend(self.step_if_free(family, |script| script.remove_objects(&[], &sets))?);
        self.remove_idle(family)?;
        held.extend(self.step_if_free(family, |script| script.remove_objects(&chains, &[]))?);
        self.applied.warnings.extend(
            held.into_iter().map(|error| {
                format!("what others put into our table stays for now, without effect: {error}")
            }),
        );
        Ok(())
    }

    fn step(&mut self, family: Family, fill: impl FnOnce(&mut Script)) -> Result<(), Error> {
        let mut script = Script::new(family);
        fill(&mut script);
        self.commit(&script).map_err(|error| script.explain(error, &Chunk::default(), self.plan))
    }

    /// The error, where something holds on to what is to be deleted.
    fn step_if_free(
        &mut self,
        family: Family,
        fill: impl FnOnce(&mut Script),
    ) -> Result<Option<Error>, Error> {
        match self.step(family, fill) {
            Err(Error::Kernel { source, act, object }) if source.errno() == Some(Errno::BUSY) => {
                Ok(Some(Error::Kernel { act, object, source }))
            }
            outcome => outcome.map(|()| None),
        }
    }

    /// Removes chains and sets of ours that no frontend needs any more.
    ///
    /// Kernels before 6.2 hold on to a chain for a moment after the last element that pointed to it is gone. Then
    /// nothing is removed, and the next full turn tries again: an idle chain does no harm.
    fn remove_idle(&mut self, family: Family) -> Result<(), Error> {
        self.known[family].idle_turns = 0;
        let holdings = &self.known[family];
        let Some(around) = holdings.around.clone() else { return Ok(()) };
        let in_use = holdings.in_use();
        let frame = frame::frame(&around, &in_use);
        let delta = diff::frame(&holdings.frame, &frame);
        let mut script = Script::new(family);
        script.begin_frame(holdings, &delta);
        script.end_frame(&delta);
        match self.commit(&script) {
            Err(error) if error.errno() == Some(Errno::BUSY) => Ok(()),
            Err(error) => Err(script.explain(error, &Chunk::default(), self.plan)),
            Ok(()) => {
                self.acknowledge(family, Chunk::default(), Some(Framed { around, in_use, frame }));
                Ok(())
            }
        }
    }
}
