// SPDX-License-Identifier: Apache-2.0

//! The same flags, the same cluster, the same questions, to kube-proxy and to us: names, types and labels of metrics,
//! flags, the resulting configuration, and HTTP answers. What differs on purpose is in `differences.txt` with its
//! reason; a difference that is not there fails, and so does a line there that no longer holds.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::Path,
};

use serde_json::{Value, json};
use stage::{Daemon, Stage, eventually, manifest};

/// Everything that is compared: what it is about, and its name, to its value.
type Traits = BTreeMap<(&'static str, String), String>;

#[test]
fn only_listed_differences_from_kube_proxy() {
    let Some(mut stage) = Stage::build() else { return };
    let Some(mut kube_proxy) = stage.kube_proxy() else { return };
    let mut web = manifest::service("web", 10);
    web["spec"]["type"] = json!("LoadBalancer");
    web["spec"]["externalTrafficPolicy"] = json!("Local");
    web["spec"]["healthCheckNodePort"] = json!(32001);
    stage.apply(&[web]);
    stage.apply(&manifest::slices("web", &["a1"]));

    let theirs = traits(&stage, &mut kube_proxy, "kube-proxy");
    let mut portolan = std::mem::replace(&mut stage.daemon, kube_proxy);
    let ours = traits(&stage, &mut portolan, "portolan");
    drop(portolan);

    let found = differences(&theirs, &ours);
    let listed = listed();
    let unlisted: Vec<String> = found
        .iter()
        .filter(|found| !listed.iter().any(|line| line.covers(found)))
        .map(ToString::to_string)
        .collect();
    let stale: Vec<String> = listed
        .iter()
        .filter(|line| !found.iter().any(|found| line.covers(found)))
        .map(|line| line.text.clone())
        .collect();
    assert!(
        unlisted.is_empty() && stale.is_empty(),
        "differences that are not in differences.txt:\n{}\n\nlines there that no longer hold:\n{}",
        unlisted.join("\n"),
        stale.join("\n")
    );
    let events = stage.control.kubectl(&["get", "events.events.k8s.io", "-o", "json"], None);
    let events: Value = serde_json::from_str(&events).expect("JSON");
    let starts: Vec<&Value> = events["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|event| event["reason"] == "Starting")
        .collect();
    assert_eq!(starts.len(), 2, "each of the two tells the API of its start: {starts:?}");
    for field in ["regarding", "reportingController", "action", "type", "note"] {
        assert_eq!(starts[0][field], starts[1][field], "{field}");
    }
    println!("compared {} traits, {} intended differences", theirs.len() + ours.len(), found.len());
}

/// Starts a proxy, changes something under it, asks it all there is to ask, and stops it.
fn traits(stage: &Stage, daemon: &mut Daemon, name: &str) -> Traits {
    let mut traits = Traits::new();
    for mode in ["nftables", "iptables"] {
        written_config(stage, daemon, mode, &mut traits);
    }
    let kubeconfig = stage.control.by_token();
    let flags = [
        &format!("--kubeconfig={}", kubeconfig.display()),
        "--proxy-mode=nftables",
        "--nodeport-addresses=0.0.0.0/0,::/0",
        // These are not a namespace's own.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0s",
        "--conntrack-tcp-timeout-close-wait=0s",
    ];
    daemon.start(&flags.map(str::to_owned));
    eventually(&format!("{name} is healthy"), || match daemon.get(10256, "/healthz") {
        Ok((200, body)) => Ok(body),
        other => Err(format!("{other:?}")),
    });
    eventually(&format!("{name} opens the health-check node port"), || match daemon.get(32001, "/") {
        Ok((200, body)) => Ok(body),
        other => Err(format!("{other:?}")),
    });
    // An endpoint goes and another comes, so that there is something to be counted.
    let synced = || {
        let text = daemon.get(10249, "/metrics").map(|(_, text)| text).unwrap_or_default();
        let count = "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"}";
        text.lines().find_map(|line| line.strip_prefix(count)?.trim().parse::<f64>().ok()).unwrap_or(0.0)
    };
    // The health-check node port tells how many of them are on this node, and so what has been followed.
    for (pods, here) in [(["a1", "a2"], 2), (["a1", "b1"], 1)] {
        stage.apply(&stamped(&manifest::slices("web", &pods)));
        let counted = format!("\"localEndpoints\": {here},");
        eventually(&format!("{name} follows the change"), || match daemon.get(32001, "/") {
            Ok((200, body)) if body.contains(&counted) => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }
    eventually(&format!("{name} tells how long it took"), || match synced() {
        count if count > 0.0 => Ok(()),
        _ => Err("nothing was programmed".to_owned()),
    });
    let _ = daemon.get(10256, "/livez");
    http(daemon, &mut traits);
    flags_of(daemon, &mut traits);
    metrics(&daemon.get(10249, "/metrics").expect("it answers").1, &mut traits);
    stage.apply(&manifest::slices("web", &["a1"]));
    daemon.stop();
    traits
}

/// The time of the change is how programming latency is measured.
fn stamped(slices: &[Value]) -> Vec<Value> {
    let output = std::process::Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%S.%NZ"]).output();
    let now = String::from_utf8(output.expect("`date` can be run").stdout).expect("text");
    let stamp = |slice: &Value| {
        let mut slice = slice.clone();
        slice["metadata"]["annotations"] =
            json!({"endpoints.kubernetes.io/last-change-trigger-time": now.trim()});
        slice
    };
    slices.iter().map(stamp).collect()
}

/// Names with types, labels and the bounds of buckets.
fn metrics(text: &str, traits: &mut Traits) {
    let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut bounds: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_once('{').unwrap_or((line.split(' ').next().unwrap_or_default(), ""));
        let labels = labels.entry(name).or_default();
        let pairs = rest.rsplit_once('}').map_or("", |(pairs, _)| pairs);
        labels.extend(pairs.split("\",").filter_map(|pair| Some(pair.split_once("=\"")?.0)));
        let bound = pairs.split_once("le=\"").and_then(|(_, rest)| Some(rest.split_once('"')?.0));
        let bounds = bounds.entry(name).or_default();
        bounds.extend(bound.filter(|bound| !bounds.contains(bound)));
    }
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').expect("a name and a type");
        let of_series = if kind == "histogram" { format!("{name}_bucket") } else { name.to_owned() };
        let labels: Vec<&str> = labels.get(of_series.as_str()).into_iter().flatten().copied().collect();
        let bounds = bounds.get(of_series.as_str()).map(|bounds| bounds.join(" ")).unwrap_or_default();
        traits.insert(("metric", name.to_owned()), format!("{kind} {} {bounds}", labels.join(",")));
    }
}

fn flags_of(daemon: &Daemon, traits: &mut Traits) {
    let (_, text) = daemon.get(10249, "/flagz").expect("it answers");
    let lines = text.lines().skip_while(|line| !line.starts_with("bind-address"));
    for line in lines {
        // The character between name and value is drawn anew at each start of kube-proxy.
        let end = line.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(line.len());
        let value = line[end..].trim_start_matches([' ', ':', '=', '|', '-', '>', '\t']);
        let value = if line.starts_with("kubeconfig") { "" } else { value.trim() };
        traits.insert(("flag", line[..end].to_owned()), value.to_owned());
    }
}

fn written_config(stage: &Stage, daemon: &Daemon, mode: &'static str, traits: &mut Traits) {
    let path = stage.state().join("written.yaml");
    let flags = [format!("--write-config-to={}", path.display()), format!("--proxy-mode={mode}")];
    let ending = daemon.run_to_end(&flags).expect("it writes and ends");
    assert!(ending.status.success(), "{}", ending.stderr);
    let text = fs::read_to_string(&path).expect("it was written");
    let config: Value = serde_saphyr::from_str(&text).expect("YAML");
    let section = if mode == "nftables" { "config-nftables" } else { "config-iptables" };
    flatten(section, String::new(), &config, traits);
}

fn flatten(section: &'static str, path: String, value: &Value, traits: &mut Traits) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(section, path, value, traits);
            }
        }
        value => {
            // 5 and 5.0 are one number.
            let text = value.as_f64().map_or_else(|| value.to_string(), |number| number.to_string());
            traits.insert((section, path), text);
        }
    }
}

/// Status code and content type of everything that is served.
fn http(daemon: &Daemon, traits: &mut Traits) {
    for (port, paths) in [
        (10256, &["/healthz", "/livez", "/readyz", "/", "/metrics"][..]),
        (
            10249,
            &[
                "/metrics",
                "/metrics/slis",
                "/healthz",
                "/healthz/ping",
                "/healthz?verbose",
                "/proxyMode",
                "/configz",
                "/statusz",
                "/flagz",
                "/livez",
                "/readyz",
                "/",
                "/debug/pprof/",
                "/debug/flags/v",
            ],
        ),
        (32001, &["/", "/any"]),
    ] {
        for path in paths {
            let (code, headers, _) = daemon.ask(port, path).expect("it answers");
            let shown: Vec<String> = headers
                .iter()
                .filter(|(name, _)| {
                    !["date", "content-length", "connection", "process-start-time-unix"]
                        .contains(&name.as_str())
                })
                .map(|(name, value)| format!("{name}: {value}"))
                .collect();
            traits.insert(("http", format!("{port}{path}")), format!("{code} {}", shown.join(", ")));
        }
    }
    let fields = |path| {
        let (_, body) = daemon.get(10256, path).expect("it answers");
        let value: Value = serde_json::from_str(&body).expect("JSON");
        value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>().join(",")
    };
    for path in ["/healthz", "/livez"] {
        traits.insert(("fields", path.to_owned()), fields(path));
    }
    let (_, body) = daemon.get(32001, "/").expect("it answers");
    traits.insert(("body", "health-check node port".to_owned()), body);
}

/// One difference.
struct Found {
    sign: char,
    section: &'static str,
    name: String,
    values: String,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} | ({})", self.sign, self.section, self.name, self.values)
    }
}

fn differences(theirs: &Traits, ours: &Traits) -> Vec<Found> {
    let keys: BTreeSet<_> = theirs.keys().chain(ours.keys()).collect();
    let compare = |key: &&(&'static str, String)| {
        let (sign, values) = match (theirs.get(*key), ours.get(*key)) {
            (Some(theirs), None) => ('-', theirs.clone()),
            (None, Some(ours)) => ('+', ours.clone()),
            (Some(theirs), Some(ours)) if theirs != ours => ('~', format!("{theirs:?} here {ours:?}")),
            _ => return None,
        };
        Some(Found { sign, section: key.0, name: key.1.clone(), values })
    };
    keys.iter().filter_map(compare).collect()
}

/// A line of the file: sign, section, name (may end with `*`), reason.
struct Listed {
    sign: char,
    section: String,
    name: String,
    text: String,
}

impl Listed {
    fn covers(&self, found: &Found) -> bool {
        let is_named = match self.name.strip_suffix('*') {
            Some(prefix) => found.name.starts_with(prefix),
            None => found.name == self.name,
        };
        self.sign == found.sign && self.section == found.section && is_named
    }
}

fn listed() -> Vec<Listed> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("differences.txt");
    let text = fs::read_to_string(path).expect("the list is there");
    let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (what, reason) = line.split_once(" | ").expect("a reason behind ` | `");
            assert!(!reason.trim().is_empty(), "no reason: {line}");
            let mut words = what.trim().splitn(3, ' ');
            let (sign, section, name) = (words.next(), words.next(), words.next());
            let name = name.unwrap_or_else(|| panic!("not `sign section name | reason`: {line}"));
            Listed {
                sign: sign.and_then(|sign| sign.chars().next()).expect("a sign"),
                section: section.expect("a section").to_owned(),
                name: name.to_owned(),
                text: line.to_owned(),
            }
        })
        .collect()
}
