// SPDX-License-Identifier: Apache-2.0

//! Every scenario before the kernel: real packets, in namespaces of its own. Needs root.

#[path = "netns/change.rs"]
mod change;
#[path = "netns/schedule.rs"]
mod schedule;

use std::{
    env, fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use dataplane::{Mode, xtables};
use portolan_tests::{LIES, is_asked_for, lies, lies_about_sources, scenarios};
use testkit::{
    judge::{Flavour, Judge, Kernel},
    run::{Goldens, run},
    scenario::{Complaint, Scenario, Variant},
};

/// Every dataplane goes through every scenario, with each variant of its tools.
const MODES: [Dataplane; 7] = [
    (Mode::Nftables, Flavour::Plain),
    (Mode::Iptables, Flavour::Tools(xtables::Variant::Nft)),
    (Mode::Iptables, Flavour::Tools(xtables::Variant::Legacy)),
    (Mode::Ipvs, Flavour::Tools(xtables::Variant::Nft)),
    (Mode::Ipvs, Flavour::Tools(xtables::Variant::Legacy)),
    (Mode::Userspace, Flavour::Plain),
    (Mode::Userspace, Flavour::Bind),
];

/// Those that are asked for (`MODE` is the beginning of a name, or several with commas between), and that this kernel
/// has. Where IPVS must be there, it must.
fn modes() -> Vec<Dataplane> {
    let asked = env::var("MODE").unwrap_or_default();
    let has_ipvs = env::var_os("PORTOLAN_HAS_IPVS").is_some() || netlink::ipvs::Ipvs::open().is_ok();
    if !has_ipvs {
        eprintln!("skipped the ipvs mode: this kernel has no IPVS; `make test-vm` runs it on one that does");
    }
    let is_asked = |(mode, tools): &Dataplane| {
        let name = format!("{mode:?}{tools}").to_lowercase();
        asked.split(',').any(|part| name.starts_with(part)) && (has_ipvs || *mode != Mode::Ipvs)
    };
    MODES.into_iter().filter(is_asked).collect()
}

type Dataplane = (Mode, Flavour);

/// Scenarios wait more than they work, so there may be more of them than processors.
const AT_ONCE: usize = 6;

#[test]
fn the_kernel_agrees_with_every_scenario() {
    if !can_build_a_lab() {
        return;
    }
    let scenarios = Scenario::load_all(&scenarios()).expect("scenarios can be read");
    let modes = modes();
    let jobs: Vec<(&Scenario, Variant, Dataplane)> = scenarios
        .iter()
        .filter(|scenario| is_asked_for(&scenario.name) && scenario.no_kernel().is_none())
        .flat_map(|scenario| scenario.variants().iter().map(move |variant| (scenario, *variant)))
        .flat_map(|(scenario, variant)| modes.iter().map(move |mode| (scenario, variant, *mode)))
        .enumerate()
        .filter(|(index, _)| is_part_asked_for(*index))
        .map(|(_, job)| job)
        .collect();
    let began = Instant::now();
    let complaints = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(jobs.len()) {
            scope.spawn(|| {
                while let Some((scenario, variant, mode)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = judge(scenario, *variant, *mode);
                    complaints.lock().expect("nobody panics while he adds one").extend(found);
                }
            });
        }
    });
    println!("{} scenarios, each mode and family counted, in {:.0?}", jobs.len(), began.elapsed());
    let mut complaints: Vec<String> =
        complaints.into_inner().expect("all threads are done").iter().map(ToString::to_string).collect();
    complaints.sort();
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

/// `PART=2/5`: every fifth, from the second on, where all would take too long.
fn is_part_asked_for(index: usize) -> bool {
    let Ok(part) = env::var("PART") else { return true };
    let (which, of) = part.split_once('/').expect("PART is written as in 2/5");
    let [which, of] = [which, of].map(|number| number.parse::<usize>().expect("PART is written as in 2/5"));
    index % of == which % of
}

fn judge(scenario: &Scenario, variant: Variant, (mode, tools): Dataplane) -> Vec<Complaint> {
    match Kernel::new(mode, tools) {
        Ok(kernel) => run(scenario, variant, &mut [Box::new(kernel) as Box<dyn Judge>], Goldens::Compare),
        Err(text) => vec![Complaint { file: scenario.name.clone(), line: 1, text }],
    }
}

#[test]
fn the_kernel_sees_through_lies() {
    if !can_build_a_lab() {
        return;
    }
    let scenario = Scenario::parse(Path::new("lies.txtar"), LIES).expect("the lies are well formed");
    for (variant, mode) in [
        (Variant::Written, MODES[0]),
        (Variant::Image, MODES[0]),
        (Variant::Written, MODES[1]),
        (Variant::Image, MODES[2]),
        (Variant::Written, MODES[3]),
        (Variant::Image, MODES[4]),
        (Variant::Written, MODES[5]),
    ]
    .into_iter()
    .filter(|(_, mode)| modes().contains(mode))
    {
        let complaints = judge(&scenario, variant, mode);
        let lines: Vec<usize> = complaints.iter().map(|complaint| complaint.line).collect();
        // In userspace mode every endpoint sees the node, whatever a line says.
        let unseen = if mode.0 == Mode::Userspace { lies_about_sources() } else { Vec::new() };
        let expected: Vec<usize> = lies().into_iter().filter(|line| !unseen.contains(line)).collect();
        assert_eq!(lines, expected, "{mode:?}, {variant}: {complaints:#?}");
    }
}

/// Only the lack of privileges is an excuse, and not where a CI promises them.
fn can_build_a_lab() -> bool {
    match Kernel::new(Mode::None, Flavour::Plain) {
        Ok(_) => true,
        Err(reason) => {
            let is_root = fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
            assert!(!is_root && env::var_os("CI").is_none(), "no lab can be built: {reason}");
            eprintln!("skipped: no lab can be built: {reason}");
            false
        }
    }
}
