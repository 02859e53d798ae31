// SPDX-License-Identifier: Apache-2.0

//! The choice of a variant as a table; the tools themselves in namespaces of their own, which needs root.

use std::{env, fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use super::{
    find::{Evidence, choose, doubts},
    testing::with_each,
    *,
};

const HINT: Evidence = Evidence { hint: true, kubelet: false, proxy: false, rules: 0 };
const CANARY: Evidence = Evidence { hint: false, kubelet: true, proxy: false, rules: 9 };
const PROXY: Evidence = Evidence { hint: false, kubelet: false, proxy: true, rules: 5 };
const FULL: Evidence = Evidence { hint: false, kubelet: false, proxy: false, rules: 7 };
const EMPTY: Evidence = Evidence { hint: false, kubelet: false, proxy: false, rules: 0 };

#[test]
fn the_kubelets_hint_decides_then_canaries_then_rules() {
    let with = |nft, legacy| [(Variant::Nft, nft), (Variant::Legacy, legacy)];
    for (nft, legacy, plain, expected) in [
        (HINT, CANARY, Some(Variant::Legacy), Variant::Nft),
        (CANARY, HINT, Some(Variant::Nft), Variant::Legacy),
        (FULL, CANARY, Some(Variant::Nft), Variant::Legacy),
        (FULL, PROXY, Some(Variant::Nft), Variant::Legacy),
        (EMPTY, FULL, Some(Variant::Nft), Variant::Legacy),
        (EMPTY, EMPTY, Some(Variant::Legacy), Variant::Legacy),
        (HINT, HINT, Some(Variant::Legacy), Variant::Legacy),
        (EMPTY, EMPTY, None, Variant::Nft),
    ] {
        assert_eq!(choose(&with(nft, legacy), plain), Some(expected), "{nft:?} {legacy:?} {plain:?}");
    }
    assert_eq!(choose(&[(Variant::Legacy, EMPTY)], Some(Variant::Nft)), Some(Variant::Legacy));
    assert_eq!(choose(&[], Some(Variant::Nft)), None);
}

#[test]
fn rules_in_both_variants_are_told() {
    let evidence = [(Variant::Nft, HINT), (Variant::Legacy, Evidence { kubelet: true, ..PROXY })];
    let warnings = doubts(Variant::Nft, &evidence);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings.iter().all(|warning| warning.contains("legacy tables")), "{warnings:?}");
    assert!(doubts(Variant::Legacy, &evidence)[0].contains("nft tables"));
    assert!(doubts(Variant::Nft, &[(Variant::Nft, HINT), (Variant::Legacy, FULL)]).is_empty());
}

#[test]
fn tools_that_are_not_there_are_named() {
    let error = find(&["/nowhere"]).unwrap_err().to_string();
    assert!(error.contains("iptables-restore") && error.contains("install"), "{error}");
    let error = find_variant(&["/nowhere"], Variant::Legacy).unwrap_err().to_string();
    assert!(error.contains("iptables-legacy-restore"), "{error}");
}

/// Tools that are shell scripts.
struct Pretended(PathBuf);

impl Pretended {
    fn new(name: &str, script: &str) -> Pretended {
        let folder = env::temp_dir().join(format!("portolan-tools-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for prefix in ["iptables", "ip6tables"] {
            for suffix in ["save", "restore"] {
                let path = folder.join(format!("{prefix}-nft-{suffix}"));
                fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            }
        }
        Pretended(folder)
    }

    fn xtables(&self) -> Xtables {
        find_variant(&[self.0.to_str().unwrap()], Variant::Nft).unwrap()
    }

    /// A script cannot be run while a process that another test has just forked still holds it open for writing.
    fn run<R>(&self, mut work: impl FnMut(Xtables) -> Result<R, Failure>) -> Result<R, Failure> {
        loop {
            match work(self.xtables()) {
                Err(Failure::Run { error, .. }) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                }
                done => return done,
            }
        }
    }
}

impl Drop for Pretended {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_tool_that_hangs_is_ended() {
    let tools = Pretended::new("hang", "exec sleep 60");
    let limits = Limits { run: Duration::from_millis(200), ..Limits::default() };
    let failure = tools.run(|tools| tools.within(limits).restore(Family::V4, "*nat\nCOMMIT\n")).unwrap_err();
    assert!(matches!(failure, Failure::Slow { .. }), "{failure}");
}

#[test]
fn a_tool_that_ends_before_it_has_read_everything_is_believed() {
    let tools = Pretended::new("early", "echo 'iptables-restore: line 2 failed' >&2; exit 1");
    let input = format!("*nat\n{}COMMIT\n", "-A KUBE-X -j KUBE-Y\n".repeat(100_000));
    let failure = tools.run(|mut tools| tools.restore(Family::V6, &input)).unwrap_err();
    let Failure::Refused { line, .. } = &failure else { panic!("{failure}") };
    assert_eq!(line.as_deref(), Some("-A KUBE-X -j KUBE-Y"));
}

#[test]
fn output_comes_line_by_line_and_complaints_do_not_block() {
    let tools =
        Pretended::new("talk", "for i in 1 2 3; do echo line $i $*; done; head -c 300000 /dev/zero >&2");
    let mut lines = Vec::new();
    let mut each_line = |line: &str| lines.push(line.to_owned());
    tools.run(|mut tools| tools.save(Family::V4, Table::Nat, &mut each_line)).unwrap();
    assert_eq!(lines, ["line 1 -t nat", "line 2 -t nat", "line 3 -t nat"]);
}

fn saved(xtables: &mut Xtables, family: Family, table: Table) -> Vec<String> {
    let mut lines = Vec::new();
    xtables.save(family, table, &mut |line| lines.push(line.to_owned())).unwrap();
    lines.retain(|line| !line.starts_with('#'));
    lines
}

#[test]
fn the_variant_that_holds_the_hint_is_found() {
    with_each(|variant| {
        let mut host = find_variant(&SEARCH, variant).unwrap();
        host.restore(Family::V4, "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n").unwrap();
        let found = find(&SEARCH).unwrap();
        assert_eq!(found.xtables.variant, variant);
        assert!(found.warnings.is_empty(), "{:?}", found.warnings);

        let mut other = find_variant(&SEARCH, variant.other()).unwrap();
        other.restore(Family::V6, "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n").unwrap();
        let found = find(&SEARCH).unwrap();
        assert_eq!(found.xtables.variant, variant);
        assert_eq!(found.warnings.len(), 1, "{:?}", found.warnings);
    });
}

#[test]
fn looking_creates_nothing() {
    with_each(|_| {
        find(&SEARCH).unwrap();
        let names = fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap_or_default();
        assert_eq!(names, "");
    });
}

#[test]
fn a_refused_line_is_quoted_and_changes_nothing() {
    with_each(|variant| {
        let mut xtables = find_variant(&SEARCH, variant).unwrap();
        let input = "*nat\n:KUBE-X - [0:0]\n-A KUBE-X -m nosuch -j RETURN\nCOMMIT\n";
        let failure = xtables.restore(Family::V4, input).unwrap_err();
        let Failure::Refused { line, advice, .. } = &failure else { panic!("{failure}") };
        assert_eq!(line.as_deref(), Some("-A KUBE-X -m nosuch -j RETURN"), "{failure}");
        assert!(advice.as_ref().unwrap().contains("nosuch"), "{failure}");
        let lines = saved(&mut xtables, Family::V4, Table::Nat);
        assert!(lines.iter().all(|line| !line.contains("KUBE-X")), "{lines:?}");
    });
}

#[test]
fn a_lock_that_somebody_holds_is_waited_for_and_told() {
    with_each(|variant| {
        if variant == Variant::Nft {
            // It has none.
            return;
        }
        let path = env::temp_dir().join(format!("portolan-held-{}", std::process::id()));
        let held = fs::File::create(&path).unwrap();
        held.lock().unwrap();
        let limits = Limits { lock: Duration::from_millis(300), ..Limits::default() };
        let mut xtables = find_variant(&SEARCH, variant).unwrap().within(limits).behind(path.clone());
        let failure = xtables.restore(Family::V4, "*nat\n:KUBE-X - [0:0]\nCOMMIT\n").unwrap_err();
        let words = failure.to_string();
        assert!(words.contains("/run/xtables.lock") && words.contains("held by"), "{words}");
        assert!(words.contains(&format!("({})", std::process::id())), "{words}");
        assert!(xtables.take_waited() >= Duration::from_millis(300));

        // Freed in time.
        let owner = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            held.unlock().unwrap();
        });
        let mut patient = xtables.within(Limits::default());
        patient.restore(Family::V4, "*nat\n:KUBE-X - [0:0]\nCOMMIT\n").unwrap();
        assert!(patient.take_waited() >= Duration::from_millis(50));
        assert_eq!(patient.take_waited(), Duration::ZERO, "told once");
        owner.join().unwrap();
        fs::remove_file(&path).unwrap();
    });
}

/// To ask what the kernel can do, at the start, must not take as long as somebody holds the lock.
#[test]
fn nobody_is_waited_for_in_a_namespace_of_our_own() {
    with_each(|variant| {
        let held = fs::File::create("/run/xtables.lock").unwrap();
        let mut xtables = find_variant(&SEARCH, variant).unwrap().elsewhere();
        held.lock().unwrap();
        let outcome = xtables.restore(Family::V4, "*nat\n:KUBE-X - [0:0]\nCOMMIT\n");
        held.unlock().unwrap();
        outcome.unwrap();
        assert_eq!(xtables.take_waited(), Duration::ZERO);
    });
}

/// What our tool locks instead of the lock that we hold is its own: two of them never wait for each other.
#[test]
fn a_tool_that_is_to_lock_nothing_waits_for_nobody() {
    with_each(|variant| {
        let path = env::temp_dir().join(format!("portolan-no-lock-{}", std::process::id()));
        let held = fs::File::open("/dev/null").unwrap();
        let guarded = find_variant(&SEARCH, variant).unwrap().behind(path.clone());
        let elsewhere = guarded.elsewhere();
        held.lock().unwrap();
        for mut xtables in [guarded, elsewhere] {
            xtables.restore(Family::V4, "*nat\n:KUBE-X - [0:0]\nCOMMIT\n").unwrap();
            assert!(xtables.lock.is_none_or(|lock| !lock.is_left_to_tool()), "{variant}");
        }
        // The legacy variant alone has a lock.
        let _ = fs::remove_file(&path);
    });
}

/// Older tools take the lock whatever they are told.
#[test]
fn a_tool_that_locks_by_itself_is_let() {
    let folder = env::temp_dir().join(format!("portolan-old-tools-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let lock = folder.join("lock");
    let script = format!(
        "#!/bin/sh\nflock --nonblock {0} true || {{ echo 'Another app is currently holding the xtables lock' >&2; exit 4; }}\n\
         echo ran >>{0}.log\n",
        lock.display()
    );
    for prefix in ["iptables", "ip6tables"] {
        for suffix in ["save", "restore"] {
            let path = folder.join(format!("{prefix}-legacy-{suffix}"));
            fs::write(&path, &script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }
    let tools = find_variant(&[folder.to_str().unwrap()], Variant::Legacy).unwrap();
    let mut tools = tools.behind(lock.clone());
    for expected in ["ran\n", "ran\nran\n"] {
        let outcome = loop {
            match tools.restore(Family::V4, "*nat\nCOMMIT\n") {
                Err(Failure::Run { error, .. }) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                }
                outcome => break outcome,
            }
        };
        outcome.unwrap();
        assert_eq!(fs::read_to_string(format!("{}.log", lock.display())).unwrap(), expected);
    }
    assert!(tools.lock.as_ref().unwrap().is_left_to_tool());
    fs::remove_dir_all(&folder).unwrap();
}
