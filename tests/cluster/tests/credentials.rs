// SPDX-License-Identifier: Apache-2.0

//! Who the daemon is, and what it says when it cannot be anybody.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use lab::address::Version;
use stage::{Stage, Target, manifest};

fn targets(host: u16) -> Vec<Target> {
    Version::BOTH
        .iter()
        .flat_map(|version| Target::both("a1", manifest::cluster_ip(*version, host), 80))
        .collect()
}

/// A token of a service account that may do what kube-proxy may, valid as long as the Secret `name` is there.
fn token(stage: &Stage, name: &str) -> String {
    stage.control.kubectl(&["create", "secret", "generic", name], None);
    let bound = format!("--bound-object-name={name}");
    stage.control.kubectl(&["create", "token", "proxy", "--bound-object-kind=Secret", &bound], None)
}

/// kubeconfig with the token in a file of its own, as pods have it.
fn with_token_file(stage: &Stage, token_file: &Path) -> PathBuf {
    let text = fs::read_to_string(stage.control.by_token()).expect("`up` wrote it");
    let lines = text.lines().map(|line| match line.trim_start().starts_with("token:") {
        true => format!("    tokenFile: {}\n", token_file.display()),
        false => format!("{line}\n"),
    });
    let path = stage.state().join("token-file.kubeconfig");
    fs::write(&path, lines.collect::<String>()).expect("the state folder takes files");
    path
}

#[test]
fn certificates_tokens_and_token_files_are_taken() {
    let Some(mut stage) = Stage::build() else { return };
    stage.control.kubectl(&["create", "serviceaccount", "proxy"], None);
    stage.control.kubectl(
        &[
            "create",
            "clusterrolebinding",
            "proxy",
            "--clusterrole=system:node-proxier",
            "--serviceaccount=default:proxy",
        ],
        None,
    );
    let token_file = stage.state().join("token");
    fs::write(&token_file, token(&stage, "first")).unwrap();
    let by_file = with_token_file(&stage, &token_file);

    stage.apply(&[manifest::service("web", 10)]);
    let ways = [stage.control.by_certificate(), stage.control.by_token(), by_file.clone()];
    for (kubeconfig, pod) in ways.iter().zip(["a2", "b1", "b2"]) {
        stage.start_daemon(kubeconfig);
        stage.apply(&manifest::slices("web", &[pod]));
        targets(10).iter().for_each(|target| target.expect(&stage.lab, &[pod]));
        stage.daemon.stop();
    }

    // The file gets another token and the first one is worth nothing any more; a new connection needs the new.
    stage.start_daemon(&by_file);
    stage.apply(&manifest::slices("web", &["a2"]));
    targets(10).iter().for_each(|target| target.expect(&stage.lab, &["a2"]));
    fs::write(&token_file, token(&stage, "second")).unwrap();
    stage.control.kubectl(&["delete", "secret", "first"], None);
    stage.control.stop();
    stage.control.resume();
    stage.apply(&manifest::slices("web", &["b1"]));
    // A client may look at the file once a minute only.
    let patience = Duration::from_secs(180);
    targets(10).iter().for_each(|target| target.expect_within(patience, &stage.lab, &["b1"]));
}

#[test]
fn a_wrong_kubeconfig_is_named_in_one_sentence() {
    let Some(stage) = Stage::build() else { return };
    let write = |name: &str, text: &str| {
        let path = stage.state().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let good = fs::read_to_string(stage.control.by_certificate()).unwrap();
    let authority = |value: &str| {
        let lines = good.lines().map(|line| match line.split_once("certificate-authority-data: ") {
            Some((indent, _)) => format!("{indent}certificate-authority-data: {value}\n"),
            None => format!("{line}\n"),
        });
        lines.collect::<String>()
    };
    let without_key = good.lines().filter(|line| !line.contains("client-key-data"));
    let elsewhere = good.replace("current-context: test", "current-context: elsewhere");
    let token_file = fs::read_to_string(with_token_file(&stage, Path::new("/absent/token"))).unwrap();
    // Each with a word that the sentence about it must have.
    let wrong = [
        (stage.state().join("absent.kubeconfig"), "absent.kubeconfig"),
        (stage.state().to_owned(), "directory"),
        (write("garbage.kubeconfig", "\u{0}\u{1}: [\n"), "garbage.kubeconfig"),
        (write("empty.kubeconfig", ""), "empty.kubeconfig"),
        (write("context.kubeconfig", &elsewhere), "elsewhere"),
        (write("base64.kubeconfig", &authority("'not base64'")), "base64.kubeconfig"),
        (write("pem.kubeconfig", &authority("bm90IGEgY2VydGlmaWNhdGU=")), "certificate"),
        (write("key.kubeconfig", &without_key.collect::<Vec<_>>().join("\n")), "client key"),
        (write("token.kubeconfig", &token_file), "/absent/token"),
    ];
    let mut failures = Vec::new();
    for (path, word) in wrong {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match stage.daemon.run_to_end(&[format!("--kubeconfig={}", path.display())]) {
            // Errors are logged with an E in front, as kube-proxy does: one sentence, and not a page of them.
            Some(ending) if ending.status.code() == Some(1) => {
                let said: Vec<&str> = ending.stderr.lines().filter(|line| line.starts_with('E')).collect();
                if !matches!(said[..], [sentence] if sentence.contains(word)) {
                    failures.push(format!("{name}: {word} is not told in one sentence: {said:#?}"));
                }
            }
            other => failures.push(format!("{name}: {other:?}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(stage.daemon.rules().is_empty(), "nothing may be programmed");
}
