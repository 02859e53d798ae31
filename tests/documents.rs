// SPDX-License-Identifier: Apache-2.0

//! What documents and manifests say is so: links lead somewhere, flags and metrics exist.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use portolan_tests::root;
use proxy::{flags, metrics::Metrics};

/// Flags of other programs, and of commands of ours. Each is accepted only on a line that names its program.
const FOREIGN_FLAGS: [(&str, &[&str]); 16] = [
    (
        "kubectl",
        &[
            "--as",
            "--dry-run",
            "--field-selector",
            "--field-manager",
            "--force-conflicts",
            "--ignore-not-found",
            "--patch",
            "--prefix",
            "--previous",
            "--server-side",
            "--tail",
            "--timeout",
            "--type",
            "--wait",
        ],
    ),
    ("helm", &["--namespace", "--set"]),
    ("ipvsadm", &["--stats"]),
    ("kube-router", &["--cleanup-config", "--run-service-proxy"]),
    ("check-config", &["--output", "--running", "--strict"]),
    ("docker", &["--target"]),
    ("kubeadm", &["--skip-phases"]),
    ("k3s", &["--disable-kube-proxy"]),
    ("aws", &["--addon-name", "--cluster-name", "--preserve"]),
    ("systemctl", &["--now"]),
    ("nft", &["--handle"]),
    ("cargo", &["--example", "--all-targets", "--bin", "--locked", "--package", "--release", "--target"]),
    ("apt-get", &["--no-install-recommends", "--yes"]),
    ("COPY", &["--from"]),
    ("RUN", &["--mount"]),
    ("kube-apiserver", &["--service-node-port-range"]),
];

/// Documents that speak of the program as it is for its users.
fn documents() -> Vec<(PathBuf, String)> {
    let is_document = |path: &Path| {
        let name = path.to_string_lossy();
        (name.starts_with("docs/") || name.starts_with("deploy/") || name == "README.md")
            && !name.ends_with(".json")
    };
    tracked().into_iter().filter(|path| is_document(path)).map(|path| (path.clone(), read(&path))).collect()
}

/// Every file of the tree, without what a build makes.
fn tracked() -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output();
    match listed {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.lines().map(PathBuf::from).filter(|path| root().join(path).is_file()).collect()
        }
        // A source archive has no repository.
        _ => {
            let mut all = Vec::new();
            ["docs", "deploy", "crates", "bench", "tests", "tools"]
                .iter()
                .for_each(|top| walk(Path::new(top), &mut all));
            let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
            all.extend(top.iter().map(PathBuf::from));
            all
        }
    }
}

fn walk(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root().join(folder)).into_iter().flatten().flatten() {
        let path = folder.join(entry.file_name());
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => walk(&path, all),
            _ => all.push(path),
        }
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The anchors GitHub gives the headings of a document.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// Targets of `[text](target)`, outside of code.
fn links(text: &str) -> Vec<String> {
    let mut in_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code || line.starts_with("    ") {
            continue;
        }
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        found.extend(targets.map(|(target, _)| target.to_owned()));
    }
    found
}

#[test]
fn every_relative_link_resolves() {
    let mut broken = Vec::new();
    let mut checked = 0;
    for path in tracked().iter().filter(|path| path.extension().is_some_and(|end| end == "md")) {
        let text = read(path);
        for link in links(&text).iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            checked += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => path.clone(),
                file => path.parent().unwrap_or(Path::new("")).join(file),
            };
            if !root().join(&target).exists() {
                broken.push(format!("{}: {link} is not there", path.display()));
            } else if !anchor.is_empty() && !anchors(&read(&target)).contains(anchor) {
                broken.push(format!("{}: {link} has no such heading", path.display()));
            }
        }
    }
    assert!(checked > 20, "only {checked} links were found: does this test still see them?");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn every_runbook_is_a_heading() {
    let operating = anchors(&read(Path::new("docs/operating.md")));
    let rules = read(Path::new("deploy/monitoring/alerts.yaml"));
    let runbooks: Vec<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("runbook: docs/operating.md#")).collect();
    assert!(!runbooks.is_empty());
    for runbook in runbooks {
        assert!(operating.contains(runbook), "docs/operating.md has no heading for {runbook}");
    }
}

/// Lines, with those that end in a backslash joined.
fn commands(text: &str) -> Vec<String> {
    text.replace("\\\n", " ").lines().map(str::to_owned).collect()
}

/// The flags on a line: `--name`, as words of their own.
fn flags_on(line: &str) -> Vec<String> {
    let starts = line.match_indices("--").map(|(at, _)| at);
    starts
        .filter(|at| {
            let before = line[..*at].chars().next_back();
            before.is_none_or(|c| c.is_whitespace() || "`(\"'[,/=".contains(c))
        })
        .filter_map(|at| {
            let name: String =
                line[at + 2..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
            name.starts_with(|c: char| c.is_ascii_lowercase()).then(|| format!("--{name}"))
        })
        .collect()
}

#[test]
fn every_flag_exists() {
    let help = flags::help();
    // The help leaves out those that are deprecated, and has those of commands.
    let all = flags::Options::default().listing();
    let all = all.keys().map(|name| format!("--{name}"));
    let ours: BTreeSet<String> = help.lines().flat_map(flags_on).chain(all).collect();
    assert!(
        ours.contains("--config") && ours.len() > 40,
        "the flags could not be read from the help: {ours:?}"
    );
    let mut unknown = Vec::new();
    for (path, text) in documents() {
        for line in commands(&text) {
            let foreign = FOREIGN_FLAGS.iter().filter(|(program, _)| line.contains(program));
            let foreign: Vec<&str> = foreign.flat_map(|(_, flags)| flags.iter().copied()).collect();
            for flag in flags_on(&line) {
                if !ours.contains(&flag) && !foreign.contains(&flag.as_str()) {
                    unknown.push(format!("{}: {flag} in {line:?}", path.display()));
                }
            }
        }
    }
    assert!(
        unknown.is_empty(),
        "no flags of ours; if they are another program's, name it on the line and add them to FOREIGN_FLAGS:\n{}",
        unknown.join("\n")
    );
}

/// Every name that `/metrics` can have.
fn metric_names() -> BTreeSet<String> {
    let catalogue = Metrics::new(SystemTime::now()).catalogue();
    catalogue.iter().map(|about| about.name.to_owned()).collect()
}

/// Words that look like the name of a metric.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let prefixes = ["kubeproxy_", "portolan_", "process_", "rest_client_"];
    words
        .filter(|word| prefixes.iter().any(|prefix| word.starts_with(prefix)) && !word.ends_with('_'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_metric_exists() {
    let names = metric_names();
    let is_known = |word: &str| {
        let parts = ["_bucket", "_count", "_sum"].iter().filter_map(|part| word.strip_suffix(part));
        names.contains(word) || parts.into_iter().any(|family| names.contains(family))
    };
    let mut used = BTreeSet::new();
    let mut unknown = Vec::new();
    let files = tracked().into_iter().filter(|path| path.starts_with("deploy") || path.starts_with("docs"));
    for path in files {
        for word in metrics_in(&read(&path)) {
            if !is_known(&word) {
                unknown.push(format!("{}: {word}", path.display()));
            }
            used.insert(word);
        }
    }
    assert!(used.len() > 20, "only {} names were found: does this test still see them?", used.len());
    assert!(unknown.is_empty(), "no such metrics:\n{}", unknown.join("\n"));
}

/// What stands between `before` and the next character that no name has, wherever `before` stands.
fn after<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let name = |rest: &'a str| rest.split(|c| !is_name(c)).next().unwrap_or_default();
    text.match_indices(before).map(|(at, _)| name(&text[at + before.len()..])).collect()
}

/// All source code of the program.
fn code() -> String {
    let is_code = |path: &PathBuf| {
        path.starts_with("crates") && path.extension().is_some_and(|extension| extension == "rs")
    };
    tracked().into_iter().filter(is_code).map(|path| read(&path)).collect()
}

/// `nft get element ip portolan services`, `nft list set ip portolan ...`.
#[test]
fn every_set_exists() {
    let names = read(Path::new("crates/dataplane/src/names.rs"));
    let mut used = 0;
    for (path, text) in documents() {
        for command in ["get element ip portolan ", "list set ip portolan ", "list map ip portolan "] {
            for name in after(&text, command) {
                used += 1;
                let is_there = names.contains(&format!("&str = \"{name}\";"));
                assert!(is_there, "{}: {command}{name}", path.display());
            }
        }
    }
    assert!(used >= 3, "only {used} were found: does this test still see them?");
}

#[test]
fn every_event_exists() {
    let code = code();
    let mut used = BTreeSet::new();
    for (path, text) in documents() {
        for reason in ["Event `", "Event (`", "Events `"].iter().flat_map(|before| after(&text, before)) {
            assert!(code.contains(&format!("\"{reason}\"")), "{}: Event {reason}", path.display());
            used.insert(reason.to_owned());
        }
    }
    assert!(used.len() >= 3, "only {used:?} were found: does this test still see them?");
}

#[test]
fn what_is_not_there_is_noticed() {
    assert_eq!(flags_on("run `portolan --config=x` (--v 2) a--b --- --Not"), ["--config", "--v"]);
    assert_eq!(links("see [a](b.md#c) and [d](e)\n    [no](code)"), ["b.md#c", "e"]);
    assert!(anchors("## Who's there? It `is` 3 am\n").contains("whos-there-it-is-3-am"));
    assert_eq!(
        Vec::from_iter(metrics_in("rate(portolan_drift_total[5m]) portolan_*")),
        ["portolan_drift_total"]
    );
    assert!(!metric_names().contains("portolan_no_such_total"));
    assert_eq!(after("nft get x a-b '{' and get x c", "get x "), ["a-b", "c"]);
}
