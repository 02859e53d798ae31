// SPDX-License-Identifier: Apache-2.0

//! The commands that people and scripts type beside a proxy that runs, or ran: what they print, and how they end.

mod daemon;

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use daemon::{BIN, Daemon, node, privileged, until};
use netlink::Netns;
use rustix::process::Signal;
use serde_json::{Value, json};

const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web, annotations: {portolan.dev/endpoints: \
                       \"10.244.1.1:8080\"}}\nspec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}\n";

/// Exit code, stdout and stderr.
fn portolan(netns: &Netns, args: &[&str]) -> (Option<i32>, String, String) {
    let run = || Command::new(BIN).args(args).output();
    let output = netns.run(run).expect("entered").expect("it runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// A proxy of the service above, once it is in force.
fn serving(netns: &Netns, folder: &Path, more: &[&str]) -> Daemon {
    fs::write(folder.join("web.yaml"), SERVICE).expect("written");
    let source = format!("--source=file:{}", folder.display());
    let mut args =
        vec![source.as_str(), "--hostname-override=node-a", "--healthz-port=0", "--metrics-port=0"];
    args.extend(more);
    let daemon = Daemon::spawn(netns, &args);
    until("it serves", || daemon.log().contains("all services are in force"));
    daemon
}

/// In the middle of the night nobody remembers the mode.
#[test]
fn a_dump_finds_the_mode_by_itself() {
    for (mode, shows) in [
        (&["--proxy-mode=nftables"][..], "table ip portolan {"),
        (&["--proxy-mode=iptables"], "KUBE-SERVICES"),
        (&["--proxy-mode=userspace", "--userspace-drain=0s"], "table ip portolan-userspace"),
        (&["--proxy-mode=userspace", "--userspace-bind", "--userspace-drain=0s"], "link portolan0"),
    ] {
        let Some(netns) = privileged(node()) else { return };
        let (code, text, says) = portolan(&netns, &["dump"]);
        assert_eq!((code, text.as_str()), (Some(0), ""), "{says}");
        assert_eq!(says.lines().count(), 1, "{says}");
        for word in ["nftables", "iptables", "ipvs", "userspace"] {
            assert!(says.contains(word), "{word} was not looked for: {says}");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let daemon = serving(&netns, folder.path(), mode);
        let (code, text, says) = portolan(&netns, &["dump"]);
        assert_eq!((code, says.as_str()), (Some(0), ""), "{mode:?}");
        assert!(text.contains(shows) && text.contains("10.96.0.10"), "{mode:?}: {text}");
        assert_eq!(portolan(&netns, &[&["dump"], mode].concat()).1, text, "the same as with its mode named");
        daemon.signal(Signal::TERM);
        daemon.wait();
    }
}

/// One mode after another: both are told, each by its name.
#[test]
fn a_dump_tells_of_every_mode_that_is_there() {
    let Some(netns) = privileged(node()) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = serving(&netns, folder.path(), &["--proxy-mode=userspace", "--userspace-drain=0s"]);
    daemon.signal(Signal::TERM);
    daemon.wait();
    // The kernel serves in its place: rules of nftables mode, beside what is left of its own.
    let (code, text, says) = portolan(&netns, &["dump"]);
    assert_eq!((code, says.as_str()), (Some(0), ""));
    let nftables = text.find("# mode nftables\ntable ip portolan {").expect("told");
    assert!(text[nftables..].contains("10.244.1.1"), "{text}");
    assert!(text.contains("# mode userspace\ntable ip portolan-userspace"), "{text}");
    let (_, text, says) = portolan(&netns, &["dump", "--proxy-mode=iptables"]);
    assert_eq!(text, "");
    assert!(says.contains("iptables") && says.lines().count() == 1, "{says}");
}

/// A pipeline that checks manifests goes by the exit code.
#[test]
fn a_plan_with_problems_is_printed_and_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("web.yaml"), SERVICE).expect("written");
    let Some(netns) = privileged(node()) else { return };
    let path = folder.path().to_str().expect("UTF-8");
    let (code, text, says) = portolan(&netns, &["plan", path]);
    assert_eq!((code, says.as_str()), (Some(0), ""));
    for (name, wrong) in [
        ("broken.yaml", "kind: Service\nmetadata: [\n"),
        (
            "left-out.yaml",
            "apiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec: {clusterIP: nonsense, ports: [{port: 1}]}\n",
        ),
    ] {
        fs::write(folder.path().join(name), wrong).expect("written");
        let (code, all, says) = portolan(&netns, &["plan", path]);
        assert_eq!((code, all.as_str()), (Some(1), text.as_str()), "everything else is printed: {says}");
        assert!(says.contains(name), "{says}");
        fs::remove_file(folder.path().join(name)).expect("removed");
    }
    let (code, _, says) = portolan(&netns, &["plan", "/nonexistent/manifests"]);
    assert_eq!(code, Some(1));
    assert_eq!(says, "Error: cannot read /nonexistent/manifests: No such file or directory (os error 2)\n");
}

/// What could not be written was not said: a full disk is an error. Whoever stops reading has what he wanted.
#[test]
fn what_cannot_be_written_fails() {
    let Some(netns) = privileged(node()) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("web.yaml"), SERVICE).expect("written");
    let path = folder.path().to_str().expect("UTF-8");
    let daemon = serving(&netns, folder.path(), &[]);
    for args in [
        &["plan", path][..],
        &["dump"],
        &["check-node"],
        &["--help"],
        &["--version"],
        &["demo", "--seconds=3"],
    ] {
        let to = |sink: Stdio| {
            let run = || Command::new(BIN).args(args).stdin(Stdio::null()).stdout(sink).output();
            let output = netns.run(run).expect("entered").expect("it runs");
            (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
        };
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("every Linux has it");
        let (code, says) = to(full.into());
        assert_eq!(code, Some(1), "{args:?}: {says}");
        assert_eq!(
            says, "Error: cannot write the output: No space left on device (os error 28)\n",
            "{args:?}"
        );
        if args[0] == "check-node" || args[0] == "demo" {
            continue;
        }
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        assert_eq!(to(writer.into()), (Some(0), String::new()), "{args:?}");
    }
    drop(daemon);
}

#[test]
fn every_command_explains_itself_and_does_nothing() {
    let Some(netns) = privileged(node()) else { return };
    for command in ["plan", "dump", "withdraw", "check-config", "check-node", "demo"] {
        let (_, all, _) = portolan(&netns, &["help", command]);
        for args in [&[command, "--help"][..], &[command, "-h"], &[command, "--help", "--now", "x", "y"]] {
            let (code, text, says) = portolan(&netns, args);
            assert_eq!((code, says.as_str()), (Some(0), ""), "{args:?}");
            let begins = format!("Usage: portolan {command}");
            assert!(text.starts_with(&begins), "{args:?}: {text}");
            assert_eq!(text, all, "{args:?}");
        }
    }
    let (_, help, _) = portolan(&netns, &["--help"]);
    assert!(help.contains("--cluster-cidr"), "{help}");
    assert_eq!(portolan(&netns, &["help"]), (Some(0), help, String::new()));
    let (_, version, _) = portolan(&netns, &["--version"]);
    assert_eq!(portolan(&netns, &["version"]), (Some(0), version, String::new()));
}

#[test]
fn a_slip_of_the_finger_is_told_what_was_meant() {
    let Some(netns) = privileged(node()) else { return };
    for (args, says) in [
        (&["check-confg", "x"][..], "got [\"check-confg\", \"x\"] (did you mean check-config?)"),
        (&["check_node"], "got [\"check_node\"] (did you mean check-node?)"),
        (&["dum"], "got [\"dum\"] (did you mean dump?)"),
        (&["cleanup"], "got [\"cleanup\"] (did you mean --cleanup?)"),
        (&["help", "pln"], "there is no command \"pln\" (did you mean plan?)"),
        (&["-v=2", "plan", "x"], "got [\"plan\", \"x\"] (a command comes first: portolan plan)"),
        (&["extra"], "got [\"extra\"]"),
    ] {
        let (code, text, all) = portolan(&netns, args);
        assert_eq!((code, text.as_str()), (Some(1), ""), "{args:?}");
        let last = all.lines().last().unwrap_or_default();
        assert!(last.starts_with("Error: ") && last.ends_with(says), "{args:?}: {all}");
    }
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("no list: {value}"))
}

/// People get a table, scripts get JSON, and both are told the same.
#[test]
fn a_plan_in_json_agrees_with_its_text() {
    let Some(netns) = privileged(node()) else { return };
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
    let args = ["plan", examples, "--cluster-cidr=10.244.0.0/16", "--hostname-override=node-a"];
    let (_, text, _) = portolan(&netns, &args);
    let (code, json, says) = portolan(&netns, &[&args[..], &["-o", "json"]].concat());
    assert_eq!((code, says.as_str()), (Some(0), ""));
    let plan = parsed(&json);
    let mut lines = text.lines().skip_while(|line| *line != "frontends").skip(1);
    for frontend in list(&plan["frontends"]) {
        let words: Vec<&str> = lines.next().expect("as many").split_whitespace().collect();
        let name = frontend["frontend"].as_str().expect("a name");
        assert_eq!(
            words.join(" ").split(" default/").next(),
            Some(format!("{name} {}", frontend["role"].as_str().expect("a role")).as_str())
        );
        let service = format!(
            "{}:{}",
            frontend["service"].as_str().expect("one"),
            frontend["servicePort"].as_str().expect("one")
        );
        assert_eq!(words.last().copied(), Some(service.as_str()));
        let verdicts =
            if frontend["inside"] == frontend["outside"] { &["inside"][..] } else { &["inside", "outside"] };
        for side in verdicts {
            let verdict = &frontend[*side];
            let backends = list(&verdict["backends"]).iter().map(|backend| {
                let star = if backend["local"] == true { "*" } else { "" };
                format!("{}:{}{star}", backend["address"].as_str().expect("one"), backend["port"])
            });
            let masquerade = verdict["masquerade"].as_str().expect("one");
            let says = format!("forward masquerade {masquerade} {}", backends.collect::<Vec<_>>().join(" "));
            let line =
                lines.next().expect("as many").split_whitespace().skip(1).collect::<Vec<_>>().join(" ");
            assert_eq!(line, says, "{name}");
        }
    }
    assert_eq!(lines.next(), Some("cluster ips"));
    for address in list(&plan["clusterIPs"]) {
        assert_eq!(lines.next().map(str::trim), address.as_str());
    }
    assert_eq!(plan["node"][0]["podTraffic"]["source"], "10.244.0.0/16");
    assert_eq!(plan["node"][0]["nodePortAddresses"][0], "192.0.2.5");
    assert_eq!((list(&plan["problems"]).len(), list(&plan["localBackends"]).len()), (0, 1));
}

#[test]
fn a_dump_in_json_agrees_with_its_text() {
    let Some(netns) = privileged(node()) else { return };
    let empty = portolan(&netns, &["dump", "-o", "json"]);
    assert_eq!((empty.0, parsed(&empty.1)), (Some(0), json!({ "modes": [] })));
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = serving(&netns, folder.path(), &[]);
    let (_, text, _) = portolan(&netns, &["dump"]);
    let (code, json, says) = portolan(&netns, &["dump", "-o", "json"]);
    assert_eq!((code, says.as_str()), (Some(0), ""));
    let value = parsed(&json);
    let mode = &value["modes"][0];
    assert_eq!((&mode["mode"], &mode["text"]), (&json!("nftables"), &json!(text)));
    let table = &mode["tables"][0];
    assert_eq!((&table["family"], &table["table"]), (&json!("ip"), &json!("portolan")));
    let mut seen = 0;
    for set in list(&table["sets"]) {
        for element in list(&set["elements"]) {
            let key = element["key"].as_str().expect("text");
            let line = element["value"].as_str().map_or(key.to_owned(), |value| format!("{key} : {value}"));
            assert!(text.contains(&line), "{line} is not in {text}");
            seen += usize::from(line.contains("10.96.0.10 . tcp . 80") && line.contains("10.244.1.1 . 8080"));
        }
    }
    assert_eq!(seen, 1, "the endpoint is there once: {json}");
    for chain in list(&table["chains"]) {
        for line in list(&chain["rules"]).iter().chain((!chain["base"].is_null()).then_some(&chain["base"])) {
            assert!(text.contains(line.as_str().expect("text")), "{line}");
        }
    }
    drop(daemon);
}

/// What is over in a moment is not worth a warning; what lasts is.
#[test]
fn a_start_from_files_warns_of_nothing_that_passes() {
    for _ in 0..5 {
        let Some(netns) = privileged(node()) else { return };
        let folder = tempfile::tempdir().expect("a folder");
        let log = serving(&netns, folder.path(), &[]).log();
        assert!(!log.contains("waiting up to"), "{log}");
    }
    for _ in 0..5 {
        let Some(lonely) = privileged(Netns::new()) else { return };
        let folder = tempfile::tempdir().expect("a folder");
        let log = serving(&lonely, folder.path(), &[]).log();
        assert!(log.contains("this host has no address but loopback"), "{log}");
        assert!(!log.contains("waiting up to"), "{log}");
    }
}

/// The rules that it leaves for the kernel are its own doing: no drift, and nothing that another proxy left.
#[test]
fn the_end_of_the_userspace_mode_is_no_drift() {
    for _ in 0..5 {
        let Some(netns) = privileged(node()) else { return };
        let folder = tempfile::tempdir().expect("a folder");
        let daemon = serving(&netns, folder.path(), &["--proxy-mode=userspace"]);
        daemon.signal(Signal::TERM);
        let (code, log) = daemon.wait();
        assert_eq!(code, Some(0), "{log}");
        assert!(log.contains("the kernel serves new connections"), "{log}");
        assert!(!log.contains("somebody else") && !log.contains("another proxy"), "{log}");
        assert!(portolan(&netns, &["dump", "--proxy-mode=nftables"]).1.contains("10.244.1.1"), "{log}");
    }
}

#[test]
fn to_withdraw_nothing_is_said() {
    let Some(netns) = privileged(node()) else { return };
    assert_eq!(
        portolan(&netns, &["withdraw"]),
        (Some(0), "there was nothing to remove\n".to_owned(), String::new())
    );
}
