// SPDX-License-Identifier: Apache-2.0

use super::*;

fn open(settings: Settings) -> Result<Access, Error> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(Access::open(settings))
}

fn refusal(kubeconfig: &Path) -> String {
    let settings = Settings { kubeconfig: Some(kubeconfig.to_owned()), ..Settings::default() };
    open(settings).err().expect("it is refused").to_string()
}

#[test]
fn bad_kubeconfigs_are_told_in_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    assert!(refusal(&path).contains("No such file"), "{}", refusal(&path));
    for (text, expected) in [
        ("{", "kubeconfig"),
        ("current-context: nowhere", "nowhere"),
        (
            "current-context: a\ncontexts: [{name: a, context: {cluster: gone, user: u}}]\nusers: [{name: u, user: {}}]",
            "gone",
        ),
        (
            "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\nclusters: [{name: c, cluster: {server: \"https://127.0.0.1:1\", certificate-authority-data: bm90IGEgY2VydGlmaWNhdGU=}}]\nusers: [{name: u, user: {}}]",
            "holds no PEM certificate",
        ),
    ] {
        std::fs::write(&path, text).unwrap();
        let sentence = refusal(&path);
        assert!(sentence.contains(expected) && !sentence.contains('\n'), "{sentence}");
        assert!(sentence.contains(&path.display().to_string()), "{sentence}");
    }
}

fn kubeconfig(user: &str) -> String {
    format!(
        "current-context: a\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n\
         clusters: [{{name: c, cluster: {{server: \"http://127.0.0.1:1\"}}}}]\n\
         users: [{{name: u, user: {{{user}}}}}]\n"
    )
}

#[test]
fn credentials_that_cannot_be_sent_are_told_in_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    for (user, expected) in [
        ("token: \"two\\nlines\"", "one line of text"),
        ("tokenFile: missing", "missing"),
        ("client-certificate: missing, client-key: missing", "missing"),
        ("client-certificate-data: bm8=, client-key-data: bm8=", "client"),
        (
            "exec: {apiVersion: client.authentication.k8s.io/v1, command: /does/not/exist, interactiveMode: Never}",
            "plugin /does/not/exist",
        ),
    ] {
        std::fs::write(&path, kubeconfig(user)).unwrap();
        let sentence = refusal(&path);
        assert!(sentence.contains(expected) && !sentence.contains('\n'), "{user}: {sentence}");
    }
}

#[test]
fn a_token_file_is_read_for_each_request_and_may_go() {
    let folder = tempfile::tempdir().unwrap();
    let (path, token) = (folder.path().join("kubeconfig"), folder.path().join("token"));
    std::fs::write(&path, kubeconfig("tokenFile: token")).unwrap();
    std::fs::write(&token, "one\n").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let settings = Settings { kubeconfig: Some(path), ..Settings::default() };
        let access = Access::open(settings).await.unwrap();
        let sent = async || access.pass().await.authorization.unwrap();
        assert_eq!(sent().await, "Bearer one");
        std::fs::write(&token, "two").unwrap();
        assert_eq!(sent().await, "Bearer two");
        std::fs::write(&token, "").unwrap();
        assert_eq!(sent().await, "Bearer two", "half-written");
        std::fs::remove_file(&token).unwrap();
        assert_eq!(sent().await, "Bearer two");
    });
}

#[test]
fn a_proxy_of_the_kubeconfig_comes_before_those_of_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let text = |more: &str| {
        format!(
            "current-context: a\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: \"https://10.0.0.1:6443\"{more}}}}}]\n"
        )
    };
    let environment = Environment {
        https_proxy: Some("env:3128".into()),
        no_proxy: Some("10.0.0.2,10.0.0.3".into()),
        ..Environment::default()
    };
    for (more, master, expected) in [
        ("", None, Some("http://env:3128/")),
        ("", Some("https://10.0.0.2:6443"), None),
        (", proxy-url: \"\"", None, Some("http://env:3128/")),
        (", proxy-url: \"http://own:8080\"", None, Some("http://own:8080/")),
        (", proxy-url: \"http://own:8080\"", Some("10.0.0.2"), Some("http://own:8080/")),
    ] {
        std::fs::write(&path, text(more)).unwrap();
        let settings = Settings {
            kubeconfig: Some(path.clone()),
            master: master.map(str::to_owned),
            environment: environment.clone(),
            ..Settings::default()
        };
        let proxy = configure(&settings).unwrap().0.proxy_url.map(|uri| uri.to_string());
        assert_eq!(proxy.as_deref(), expected, "{more} {master:?}");
    }
    let settings = Settings { master: Some("https://10.0.0.3".into()), environment, ..Settings::default() };
    assert_eq!(configure(&settings).unwrap().0.proxy_url, None);
}

#[test]
fn a_replaced_file_makes_a_new_client() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let text = |port: u16| {
        format!(
            "current-context: a\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: \"http://127.0.0.1:{port}\"}}}}]\n\
             users: [{{name: u, user: {{}}}}]\n"
        )
    };
    std::fs::write(&path, text(80)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let settings = Settings { kubeconfig: Some(path.clone()), ..Settings::default() };
        let access = Access::open(settings).await.unwrap();
        assert_eq!(access.pass().await.generation, 0);
        std::fs::write(&path, text(8080)).unwrap();
        assert_eq!(access.pass().await.generation, 1);
        assert_eq!(access.pass().await.generation, 1);
        std::fs::write(&path, "half").unwrap();
        assert_eq!(access.pass().await.generation, 1, "a half-written file changes nothing");
    });
}

/// A kubeconfig whose plugin is this shell script, in a folder of its own.
fn with_plugin(script: &str) -> (tempfile::TempDir, Settings) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let exec = serde_json::json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", script.replace("FOLDER", &folder.path().display().to_string())],
        "interactiveMode": "Never",
    });
    std::fs::write(&path, kubeconfig(&format!("exec: {exec}"))).unwrap();
    (folder, Settings { kubeconfig: Some(path), ..Settings::default() })
}

#[test]
fn a_plugin_that_hangs_is_told_by_its_name() {
    let begun = std::time::Instant::now();
    let (_folder, settings) = with_plugin("sleep 15 & wait");
    let sentence = open(settings).err().expect("it is refused").to_string();
    assert!(sentence.contains("plugin sh") && sentence.contains("answer"), "{sentence}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn of_several_who_need_a_plugin_one_runs_it() {
    let answer = r#"{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "x"}}"#;
    for end in ["true", "test ! -e FOLDER/fails"] {
        let (folder, settings) =
            with_plugin(&format!("echo run >> FOLDER/runs; sleep 0.2; echo '{answer}'; {end}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let access = Access::open(settings).await.unwrap();
            std::fs::write(folder.path().join("fails"), "").unwrap();
            tokio::join!(access.renew(0), access.renew(0), access.renew(0), access.renew(0));
        });
        let runs = std::fs::read_to_string(folder.path().join("runs")).unwrap().lines().count();
        assert_eq!(runs, 2, "at the start, and once more");
    }
}

/// What is sent for this user: the header we add, or that a token is left to the client.
fn authorization(user: &str) -> Result<Option<String>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    std::fs::write(&path, kubeconfig(user)).unwrap();
    std::fs::write(folder.path().join("token"), "from-file\n").unwrap();
    let settings = Settings { kubeconfig: Some(path), ..Settings::default() };
    let access = open(settings).map_err(|error| error.to_string())?;
    let held = access.held();
    Ok(held.token.map(|token| token.to_str().unwrap().to_owned()))
}

#[test]
fn a_token_file_comes_before_a_token() {
    let sent = |text: &str| Ok(Some(format!("Bearer {text}")));
    assert_eq!(authorization("token: own, tokenFile: token"), sent("from-file"));
    assert_eq!(authorization("token: own, tokenFile: missing"), sent("own"));
    assert_eq!(authorization("token: \"\", tokenFile: token"), sent("from-file"));
}

#[test]
fn an_empty_text_is_nothing() {
    for user in [
        "token: \"\"",
        "tokenFile: \"\"",
        "username: \"\", password: \"\"",
        "client-certificate: \"\", client-key: \"\"",
        "client-certificate-data: \"\", client-key-data: \"\"",
    ] {
        assert_eq!(authorization(user), Ok(None), "{user}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let text = "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n\
         clusters: [{name: c, cluster: {server: \"https://10.0.0.1\", certificate-authority: \"\",\n\
         certificate-authority-data: \"\", tls-server-name: \"\", proxy-url: \"\"}}]\n\
         users: [{name: u, user: {token: \"\", username: \"\", password: \"\"}}]\n";
    std::fs::write(&path, text).unwrap();
    let settings = Settings { kubeconfig: Some(path), ..Settings::default() };
    let (config, files) = configure(&settings).unwrap();
    assert_eq!((config.root_cert, config.tls_server_name, files.len()), (None, None, 1));
    let user = config.auth_info;
    assert!(user.token.is_none() && user.username.is_none() && user.password.is_none());
}

#[test]
fn a_server_without_scheme_or_sense_panics_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let open = |server: &str| {
        std::fs::write(&path, kubeconfig("").replace("http://127.0.0.1:1", server)).unwrap();
        open(Settings { kubeconfig: Some(path.clone()), ..Settings::default() })
    };
    assert_eq!(&*open("127.0.0.1:8001").unwrap().held().host, "127.0.0.1:8001");
    for server in ["", "/path", "ftp://x", "https://", "http://a b"] {
        let sentence = open(server).err().expect("it is refused").to_string();
        assert!(sentence.contains("server") && sentence.contains("kubeconfig"), "{sentence}");
    }
}

#[test]
fn master_makes_up_for_what_a_kubeconfig_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let context = "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n";
    let user = "users: [{name: u, user: {token: x}}]\n";
    for (text, has_token) in [
        (String::new(), false),
        ("current-context: \"\"\n".to_owned(), false),
        (format!("{context}{user}"), true),
        (format!("{context}{user}clusters: [{{name: c, cluster: {{}}}}]\n"), true),
    ] {
        std::fs::write(&path, &text).unwrap();
        let settings = Settings {
            kubeconfig: Some(path.clone()),
            master: Some("https://10.0.0.1".into()),
            ..Settings::default()
        };
        let (config, _) = configure(&settings).unwrap();
        assert_eq!(
            (config.cluster_url.host(), config.auth_info.token.is_some()),
            (Some("10.0.0.1"), has_token)
        );
        assert!(configure(&Settings { master: None, ..settings }).is_err(), "{text}");
    }
}

/// In an image without any.
#[test]
fn authorities_of_the_system_are_needed_only_where_they_are_used() {
    const NAME: &str = "kube::access::tests::authorities_of_the_system_are_needed_only_where_they_are_used";
    if std::env::var_os("SSL_CERT_DIR").is_none_or(|folder| folder != "/nowhere") {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", NAME]).env("SSL_CERT_FILE", "/nowhere").env("SSL_CERT_DIR", "/nowhere");
        assert!(again.status().unwrap().success());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let open = |server: &str, more: &str| {
        let text = kubeconfig("").replace("\"http://127.0.0.1:1\"", &format!("\"{server}\"{more}"));
        std::fs::write(&path, text).unwrap();
        open(Settings { kubeconfig: Some(path.clone()), ..Settings::default() })
    };
    assert!(open("http://127.0.0.1:1", "").is_ok());
    assert!(open("https://127.0.0.1:1", ", insecure-skip-tls-verify: true").is_ok());
    assert!(open("https://127.0.0.1:1", "").is_err());
}
