// SPDX-License-Identifier: Apache-2.0

//! Credentials that expire and are replaced.

use std::{env, fs, process::Command, thread, time::Duration};

use model::Kind;
use serde_json::json;
use testkit::apiserver::{ApiServer, Credential, Login};

use crate::{
    follow::Following,
    objects::{addresses, server, slice},
};

/// Makes what the source has worthless.
fn expire(server: &ApiServer, login: Login) {
    match login {
        Login::Certificate => server.rotate_certificate(),
        _ => {
            server.rotate_token();
        }
    }
}

#[test]
fn replaced_credentials_are_taken_up() {
    for login in [Login::Token, Login::TokenFile, Login::Certificate, Login::Exec] {
        let server = server(20);
        let following = Following::start_with(&server, login, false);
        following.converge(&server);
        let by_certificate =
            server.requests().iter().any(|request| request.credential == Credential::Certificate);
        assert_eq!(by_certificate, login == Login::Certificate);
        following.begin();

        expire(&server, login);
        server.forget_requests();
        server.put(slice("svc0001-x", &addresses(41, 3)));
        following.converge(&server);
        assert_eq!(server.requests().len(), 0, "{login:?}: watches under way go on");

        server.cut_connections();
        server.put(slice("svc0002-x", &addresses(42, 3)));
        server.delete(Kind::EndpointSlice, "shop", "svc0003-x");
        following.pass(Duration::from_secs(60));
        let requests = server.requests();
        assert!(requests.iter().all(|request| request.status == 401), "{login:?}");
        assert!((4..=60).contains(&requests.len()), "{login:?}: {} requests in a minute", requests.len());
        assert_eq!(following.removed(), [""; 0], "{login:?}");

        server.kubeconfig(following.dir.path(), login);
        following.converge(&server);
        assert_eq!(following.removed(), ["EndpointSlice shop/svc0003-x"], "{login:?}");
        assert!(Kind::ALL.iter().all(|kind| following.ends(*kind) == 1), "{login:?}: no list was needed");
    }
}

#[test]
fn credentials_replaced_in_time_are_never_missed() {
    for login in [Login::TokenFile, Login::Certificate] {
        let server = server(20);
        let following = Following::start_with(&server, login, false);
        following.converge(&server);
        for round in 0..3 {
            expire(&server, login);
            match login {
                Login::Certificate => server.write_certificate(following.dir.path()),
                _ => server.write_token(following.dir.path()),
            }
            server.forget_requests();
            server.cut_connections();
            server.put(slice("svc0001-x", &addresses(round, 3 + round)));
            following.converge(&server);
            if login == Login::Certificate {
                assert!(server.requests().iter().all(|request| request.status == 200), "round {round}");
            }
        }
    }
}

/// Some plugins say when a token ends only of those that do.
#[test]
fn a_plugin_may_leave_out_the_expiry_later() {
    let server = server(5);
    let following = Following::start_with(&server, Login::Exec, false);
    following.converge(&server);
    let credential = json!({
        "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
        "status": {"token": server.rotate_token(), "expirationTimestamp": "2001-01-01T00:00:00Z"},
    });
    fs::write(following.dir.path().join("credential.json"), credential.to_string())
        .expect("it can be written");
    server.cut_connections();
    server.put(slice("svc0001-x", &addresses(41, 3)));
    following.converge(&server);
    server.rotate_token();
    server.write_token(following.dir.path());
    server.cut_connections();
    server.put(slice("svc0002-x", &addresses(42, 3)));
    following.converge(&server);
}

/// Whatever is wrong with a client that finds no way, a new one may do better.
#[test]
fn a_client_without_connection_is_made_anew() {
    let server = server(5);
    let following = Following::start_with(&server, Login::Exec, false);
    following.converge(&server);
    let (dir, runs) = (following.dir.path(), following.dir.path().join("runs"));
    let kubeconfig = fs::read_to_string(dir.join("kubeconfig")).expect("it was written");
    let script = format!("echo run >> {}; cat {}", runs.display(), dir.join("credential.json").display());
    let mut config: serde_json::Value = serde_json::from_str(&kubeconfig).expect("it is JSON");
    config["users"][0]["user"]["exec"]["command"] = json!("sh");
    config["users"][0]["user"]["exec"]["args"] = json!(["-c", script]);
    fs::write(dir.join("kubeconfig"), config.to_string()).expect("it can be written");
    server.cut_connections();
    let count = || fs::read_to_string(&runs).unwrap_or_default().lines().count();
    server.put(slice("svc0001-x", &addresses(41, 3)));
    following.wait_until("the plugin was asked", || count() >= 1);
    following.converge(&server);
    thread::sleep(Duration::from_millis(500));
    let before = count();
    server.go_down();
    following.wait_until("the plugin was asked again", || count() > before);
    following.pass(Duration::from_secs(60));
    assert!(count() < before + 10, "{} times in a minute", count());
    server.come_up();
    following.converge(&server);
}

/// Only who starts the source reads the environment, and a server on loopback is never behind a proxy.
#[test]
fn the_environment_of_the_process_is_nothing_to_the_source() {
    const NAME: &str = "credentials::the_environment_of_the_process_is_nothing_to_the_source";
    if env::var_os("HTTPS_PROXY").is_none() {
        let mut again = Command::new(env::current_exe().expect("this test has a file"));
        // Nobody listens on that port, and the entry without an end is no reason to stop.
        again.args(["--exact", NAME]).env("HTTPS_PROXY", "http://127.0.0.1:1").env("NO_PROXY", "a,,[::1");
        assert!(again.status().expect("it starts").success());
        return;
    }
    let server = server(3);
    Following::start(&server).converge(&server);
}
