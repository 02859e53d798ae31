// SPDX-License-Identifier: Apache-2.0

//! Credentials from a program (client.authentication.k8s.io): what is asked of it in its environment, its answer on
//! standard output, and an end to waiting for it. docs/why.md says why this is not left to `kube`.

use std::{
    os::unix::process::CommandExt as _,
    process::{Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, SystemTime},
};

use http::HeaderValue;
use kube::config::{ExecConfig, ExecInteractiveMode};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use serde_json::json;

use super::access::bearer;
use crate::lower::time::parse_nanos;

/// What a plugin gave.
#[derive(Debug)]
pub(super) struct Credential {
    /// The value of the Authorization header.
    pub(super) token: Option<HeaderValue>,
    /// Certificate and key, in PEM.
    pub(super) certificate: Option<(String, String)>,
    /// When neither is good any more.
    pub(super) expires: Option<SystemTime>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    api_version: Option<String>,
    status: Option<Status>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    expiration_timestamp: Option<String>,
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

/// Runs a plugin and waits for it, but not longer than `patience`. The error is what it did wrong.
pub(super) fn run(plugin: &ExecConfig, patience: Duration) -> Result<Credential, String> {
    // Nobody sits before a daemon.
    if plugin.interactive_mode == Some(ExecInteractiveMode::Always) {
        return Err("it wants to talk to somebody at a terminal".into());
    }
    let command = plugin.command.as_deref().filter(|command| !command.is_empty());
    let output = output_of(plugin, command.ok_or("it has no command")?, patience)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said: String = said.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect();
        return Err(format!("it ended with {}: {said}", output.status));
    }
    // Go's decoder takes YAML too, and so some plugins write it.
    let answer: Answer =
        serde_saphyr::from_slice(&output.stdout).map_err(|_| "it printed no ExecCredential".to_owned())?;
    if plugin.api_version.is_some() && answer.api_version != plugin.api_version {
        let version = answer.api_version.unwrap_or_default();
        return Err(format!("it answered in version {version:?}, which the kubeconfig does not ask for"));
    }
    answer.status.ok_or("its answer has no status".to_owned())?.credential()
}

fn output_of(plugin: &ExecConfig, command: &str, patience: Duration) -> Result<Output, String> {
    let mut asked = json!({
        "kind": "ExecCredential",
        "apiVersion": plugin.api_version,
        "spec": {"interactive": false},
    });
    if let Some(cluster) = &plugin.cluster {
        asked["spec"]["cluster"] = serde_json::to_value(cluster).map_err(|error| error.to_string())?;
    }
    let variables = plugin.env.iter().flatten().filter_map(|env| Some((env.get("name")?, env.get("value")?)));
    let child = Command::new(command)
        .args(plugin.args.iter().flatten())
        .envs(variables)
        .env("KUBERNETES_EXEC_INFO", asked.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // So that what it starts in turn can be ended with it.
        .process_group(0)
        .spawn();
    let child = child.map_err(|error| {
        let hint = plugin.install_hint.as_deref().unwrap_or_default();
        format!("it cannot be started: {error} {hint}").trim_end().to_owned()
    })?;
    let group = Pid::from_child(&child);
    let (tell, told) = mpsc::channel();
    // This thread also takes leave of a child that was killed.
    let waiting = thread::Builder::new().name("plugin".into());
    let waiting = waiting.spawn(move || drop(tell.send(child.wait_with_output())));
    waiting.map_err(|error| error.to_string())?;
    match told.recv_timeout(patience) {
        Ok(output) => output.map_err(|error| error.to_string()),
        Err(_) => {
            // An error is that it has just ended.
            let _ = kill_process_group(group, Signal::KILL);
            Err(format!("it gave no answer within {} s and was ended", patience.as_secs()))
        }
    }
}

impl Status {
    fn credential(self) -> Result<Credential, String> {
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let token =
            given(self.token).map(|token| bearer(&token).ok_or("its token is more than one line of text"));
        let certificate = match (given(self.client_certificate_data), given(self.client_key_data)) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err("it gave only one of certificate and key".into()),
        };
        if token.is_none() && certificate.is_none() {
            return Err("it gave neither token nor certificate".into());
        }
        let expires = given(self.expiration_timestamp).map(|text| {
            let nanos = parse_nanos(&text).ok_or_else(|| format!("its expiry {text:?} is no time"))?;
            Ok::<_, String>(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos.max(0).unsigned_abs()))
        });
        Ok(Credential { token: token.transpose()?, certificate, expires: expires.transpose()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(script: &str) -> ExecConfig {
        ExecConfig {
            api_version: Some("client.authentication.k8s.io/v1beta1".into()),
            command: Some("sh".into()),
            args: Some(vec!["-c".into(), script.into()]),
            ..ExecConfig::default()
        }
    }

    fn answer(status: &str) -> String {
        format!("echo '{{\"apiVersion\": \"client.authentication.k8s.io/v1beta1\", \"status\": {status}}}'")
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn tokens_certificates_and_their_end() {
        let all = r#"{"token": "t", "clientCertificateData": "c", "clientKeyData": "k", "expirationTimestamp": "1970-01-01T00:01:00Z"}"#;
        let credential = run(&plugin(&answer(all)), PATIENCE).unwrap();
        assert_eq!(credential.token.unwrap(), "Bearer t");
        assert_eq!(credential.certificate.unwrap(), ("c".into(), "k".into()));
        assert_eq!(credential.expires, Some(SystemTime::UNIX_EPOCH + Duration::from_secs(60)));
        let yaml = "echo 'apiVersion: client.authentication.k8s.io/v1beta1\nstatus: {token: y}'";
        assert_eq!(run(&plugin(yaml), PATIENCE).unwrap().token.unwrap(), "Bearer y");
    }

    #[test]
    fn it_is_told_who_asks() {
        let mut asking = plugin(
            r#"case $KUBERNETES_EXEC_INFO in *'"interactive":false'*) I=1;; esac
               case $KUBERNETES_EXEC_INFO in *'"server":"https://10.0.0.1"'*) C=1;; esac
               echo '{"apiVersion": "client.authentication.k8s.io/v1beta1", "status": {"token": "'$I$C$OWN'"}}'"#,
        );
        let variable = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        asking.env = Some(vec![[variable("name", "OWN"), variable("value", "own")].into()]);
        asking.cluster = Some(kube::config::ExecAuthCluster {
            server: Some("https://10.0.0.1".into()),
            ..Default::default()
        });
        assert_eq!(run(&asking, PATIENCE).unwrap().token.unwrap(), "Bearer 11own");
    }

    #[test]
    fn what_it_does_wrong_is_told() {
        for (script, expected) in [
            ("exit 3", "exit status: 3"),
            ("echo no such region >&2; exit 1", "no such region"),
            ("echo nonsense", "no ExecCredential"),
            ("true", "version"),
            (
                "echo '{\"apiVersion\": \"client.authentication.k8s.io/v1\", \"status\": {}}'",
                "authentication.k8s.io/v1",
            ),
            (&answer("null"), "no status"),
            (&answer("{}"), "neither token nor certificate"),
            (&answer("{\"token\": \"a\\u0001b\"}"), "one line"),
            (&answer("{\"clientCertificateData\": \"c\"}"), "only one"),
            (&answer("{\"token\": \"t\", \"expirationTimestamp\": \"soon\"}"), "soon"),
        ] {
            let error = run(&plugin(script), PATIENCE).unwrap_err();
            assert!(error.contains(expected), "{script}: {error}");
        }
        let terminal = ExecConfig { interactive_mode: Some(ExecInteractiveMode::Always), ..plugin("true") };
        assert!(run(&terminal, PATIENCE).unwrap_err().contains("terminal"));
        let absent = ExecConfig { command: Some("/does/not/exist".into()), ..plugin("") };
        assert!(run(&absent, PATIENCE).unwrap_err().contains("cannot be started"));
    }

    #[test]
    fn what_hangs_goes_with_all_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let script = format!("sleep 100 & echo $! > {}; wait", file.display());
        let error = run(&plugin(&script), Duration::from_secs(1)).unwrap_err();
        assert!(error.contains("within 1 s"), "{error}");
        let child = std::fs::read_to_string(&file).unwrap();
        let is_gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.trim())).unwrap_or_default();
            !stat.contains("(sleep)") || stat.contains(") Z ")
        };
        assert!((0..500).any(|_| {
            thread::sleep(Duration::from_millis(10));
            is_gone()
        }));
    }
}
