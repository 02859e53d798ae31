// SPDX-License-Identifier: Apache-2.0

//! Every scenario before the judges that need no kernel: the plan, and the rendered program.

use std::path::Path;

use dataplane::Mode;
use portolan_tests::{LIES, is_asked_for, lies, scenarios};
use testkit::{
    judge::{Judge, Oracle, Simulator},
    run::{Goldens, run},
    scenario::{Scenario, Variant},
};

fn judges() -> Vec<Box<dyn Judge>> {
    vec![
        Box::new(Oracle::default()),
        Box::new(Simulator::new(Mode::Nftables)),
        Box::new(Simulator::new(Mode::Iptables)),
        Box::new(Simulator::new(Mode::Ipvs)),
    ]
}

#[test]
fn plan_and_program_agree_with_every_scenario() {
    let goldens = if std::env::var_os("UPDATE").is_some() { Goldens::Update } else { Goldens::Compare };
    let mut complaints = Vec::new();
    for scenario in Scenario::load_all(&scenarios()).expect("scenarios can be read") {
        for variant in scenario.variants().iter().filter(|_| is_asked_for(&scenario.name)) {
            let mut judges = judges();
            complaints.extend(run(&scenario, *variant, &mut judges, goldens));
        }
    }
    let text: Vec<String> = complaints.iter().map(ToString::to_string).collect();
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), text.join("\n"));
}

#[test]
fn plan_and_program_see_through_lies() {
    let scenario = Scenario::parse(Path::new("lies.txtar"), LIES).expect("the lies are well formed");
    for variant in [Variant::Written, Variant::Image] {
        for judge in judges() {
            let name = judge.name();
            let complaints = run(&scenario, variant, &mut [judge], Goldens::Compare);
            let lines: Vec<usize> = complaints.iter().map(|complaint| complaint.line).collect();
            assert_eq!(lines, lies(), "{name}, {variant}");
        }
    }
}
