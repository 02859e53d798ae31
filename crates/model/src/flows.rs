// SPDX-License-Identifier: Apache-2.0

//! Which tracked flows a change makes stale.
//!
//! The kernel keeps sending an established flow where it first went. A TCP connection to an endpoint that is gone
//! ends by itself; a UDP client (or an SCTP one that retransmits) keeps its flow alive for ever by sending into
//! the void. So where endpoints of such a frontend went, the flows to them must go, and no others: an endpoint
//! that is terminating but still serves keeps its flows.

use std::cmp::Ordering;

use crate::{
    claims::Claim,
    decision::{Backend, FlowRule, Frontend, Verdict},
    family::Protocol,
};

/// What to do about the flows to a frontend that was this and is that. At the first sight after a start nobody
/// knows what the kernel was told before, so everything that does not serve is stale.
pub(crate) fn stale(
    frontend: Frontend,
    was: Option<&Claim>,
    is: Option<&Claim>,
    is_first: bool,
) -> Option<FlowRule> {
    if frontend.protocol == Protocol::Tcp {
        return None;
    }
    let serving = is.and_then(|claim| claim.serving.clone()).unwrap_or_default();
    let untranslated = gains_a_pool(was, is);
    let gone = if is_first {
        None
    } else {
        let served = was.and_then(|claim| claim.serving.as_deref()).unwrap_or_default();
        Some(missing(served, &serving))
    };
    let concerns_any = gone.as_ref().is_none_or(|gone| !gone.is_empty()) || untranslated;
    concerns_any.then_some(FlowRule { frontend, serving, gone, untranslated })
}

impl FlowRule {
    /// For a frontend that is gone, and of which nobody knows where it led: whatever went there is stale.
    pub fn vanished(frontend: Frontend) -> Option<FlowRule> {
        let rule = FlowRule { frontend, serving: Default::default(), gone: None, untranslated: false };
        (frontend.protocol != Protocol::Tcp).then_some(rule)
    }
}

/// Traffic of one side at least went untranslated, if it went at all, and is now forwarded.
fn gains_a_pool(was: Option<&Claim>, is: Option<&Claim>) -> bool {
    let forwards = |claim: Option<&Claim>| {
        let decision = claim.map(|claim| &claim.decision);
        [decision.map(|decision| &decision.inside), decision.map(|decision| &decision.outside)]
            .map(|verdict| matches!(verdict, Some(Verdict::Forward(_))))
    };
    forwards(was).into_iter().zip(forwards(is)).any(|(was, is)| is && !was)
}

/// Those of the first that are not in the second; both are sorted by address and port.
fn missing(before: &[Backend], now: &[Backend]) -> Box<[Backend]> {
    let order = |a: &Backend, b: &Backend| -> Ordering { (a.address, a.port).cmp(&(b.address, b.port)) };
    before.iter().copied().filter(|old| now.binary_search_by(|new| order(new, old)).is_err()).collect()
}
