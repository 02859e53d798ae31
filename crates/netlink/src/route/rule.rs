// SPDX-License-Identifier: Apache-2.0

//! Rules that send marked packets to a routing table of their own.

use super::Route;
use crate::{
    Family,
    attr::{NLM_F_CREATE, NLM_F_EXCL, Writer},
    error::Error,
    socket::Transport,
};

const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FR_ACT_TO_TBL: u8 = 1;

/// Packets with this mark are routed by this table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkRule {
    /// IPv4 or IPv6.
    pub family: Family,
    /// In which order among rules; lower is earlier.
    pub priority: u32,
    /// What the bits of `mask` must be.
    pub mark: u32,
    /// The bits that are looked at; others do not matter.
    pub mask: u32,
    /// The table.
    pub table: u32,
}

impl MarkRule {
    fn write(&self, w: &mut Writer) {
        w.raw(&[self.family.number(), 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL]);
        w.raw(&0_u32.to_ne_bytes());
        w.ne32(FRA_PRIORITY, self.priority);
        w.ne32(FRA_FWMARK, self.mark);
        w.ne32(FRA_FWMASK, self.mask);
        w.ne32(FRA_TABLE, self.table);
    }
}

impl<T: Transport> Route<T> {
    /// Adds a rule.
    pub fn add_rule(&mut self, rule: &MarkRule) -> Result<(), Error> {
        self.change("add a rule", RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, |w| rule.write(w))
    }

    /// Deletes a rule.
    pub fn delete_rule(&mut self, rule: &MarkRule) -> Result<(), Error> {
        self.change("delete a rule", RTM_DELRULE, 0, |w| rule.write(w))
    }
}
