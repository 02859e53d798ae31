// SPDX-License-Identifier: Apache-2.0

//! What docs/semantics.md promises and what scenarios prove are the same list.

use std::{collections::BTreeSet, fs};

use portolan_tests::{root, scenarios};
use testkit::scenario::Scenario;

#[test]
fn every_promise_has_its_scenario_and_every_scenario_its_promise() {
    let text = fs::read_to_string(root().join("docs/semantics.md")).expect("docs/semantics.md can be read");
    let linked: BTreeSet<String> = text
        .split("](../tests/scenarios/")
        .skip(1)
        .filter_map(|rest| rest.split_once(".txtar)"))
        .map(|(name, _)| name.to_owned())
        .collect();
    let present: BTreeSet<String> = Scenario::load_all(&scenarios())
        .expect("scenarios can be read")
        .into_iter()
        .map(|scenario| scenario.name)
        .collect();
    let without_promise: Vec<_> = present.difference(&linked).collect();
    let without_scenario: Vec<_> = linked.difference(&present).collect();
    assert!(without_promise.is_empty(), "not linked in docs/semantics.md: {without_promise:?}");
    assert!(without_scenario.is_empty(), "linked in docs/semantics.md, but not there: {without_scenario:?}");
}
