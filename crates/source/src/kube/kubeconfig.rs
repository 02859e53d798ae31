// SPDX-License-Identifier: Apache-2.0

//! A kubeconfig or a pod's service account, read as client-go reads them. `kube` knows the file's format; what its parts come to is decided here,
//! since `kube` would have the environment decide about a proxy, and by the proxy's own name instead of the server's.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use kube::{
    Config,
    config::{AuthInfo, Cluster, ExecAuthCluster, Kubeconfig},
};
use secrecy::ExposeSecret as _;

use super::{
    access::{Error, sentence},
    environment::{Environment, proxy_url},
};

/// A file, and what it was when it was read.
pub(super) type Seen = (PathBuf, Option<Stamp>);

/// What changes when a file is written or replaced, also through a symlink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    modified: SystemTime,
    len: u64,
}

impl Stamp {
    pub(super) fn of(path: &Path) -> Option<Stamp> {
        let metadata = std::fs::metadata(path).ok()?;
        Some(Stamp { modified: metadata.modified().ok()?, len: metadata.len() })
    }
}

/// Reads a kubeconfig; `master` overrides its server. Also gives the files that are read only once. Of a proxy it gives
/// the one the kubeconfig names.
pub(super) fn read(path: &Path, master: Option<&str>) -> Result<(Config, Vec<Seen>), Error> {
    let refuse = |reason: String| Error::Kubeconfig { path: path.to_owned(), reason };
    let stamp = Stamp::of(path);
    // Read it ourselves first: "permission denied" is a better sentence than what a parser makes of it.
    std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| refuse(sentence(&error)))?;
    let (mut cluster, mut user) = current(&kubeconfig, master).map_err(refuse)?;
    forget_empty(&mut cluster, &mut user);
    if let Some(master) = master {
        cluster.server = Some(master.to_owned());
    }
    let mut files = vec![(path.to_owned(), stamp)];
    let referenced = [&cluster.certificate_authority, &user.client_certificate, &user.client_key];
    files.extend(referenced.into_iter().flatten().map(|path| (path.into(), Stamp::of(Path::new(path)))));
    // Of all that is public in `kube` only this reads an authority, be it a file or in base64.
    let shown = ExecAuthCluster::try_from(&cluster).map_err(|error| refuse(sentence(&error)))?;
    let authority = shown.certificate_authority_data.as_deref().map(certificates).transpose();
    if let Some(exec) = user.exec.as_mut().filter(|exec| exec.provide_cluster_info) {
        exec.cluster = Some(shown.clone());
    }
    let url = cluster.server.as_deref().unwrap_or_default();
    // What has no scheme makes `kube` panic with the first request.
    let url = server_url(url).map_err(|reason| match master {
        Some(master) => Error::Master { url: master.to_owned(), reason },
        None => refuse(format!("its server {url:?} is not a URL such as https://10.0.0.1:6443: {reason}")),
    })?;
    let mut config = Config::new(url);
    config.root_cert = authority.map_err(refuse)?;
    config.accept_invalid_certs = cluster.insecure_skip_tls_verify.unwrap_or(false);
    config.tls_server_name = cluster.tls_server_name;
    config.auth_info = user;
    if let Some(text) = cluster.proxy_url {
        let proxy = proxy_url(&text).ok_or_else(|| refuse(format!("its proxy-url {text:?} is no URL")))?;
        config.proxy_url = Some(proxy);
    }
    Ok((config, files))
}

/// The service account of the pod we run in, by its folder. Which namespace it is of is nothing to us.
pub(super) fn in_cluster(environment: &Environment, folder: &Path) -> Result<Config, String> {
    let (Some(host), Some(port)) = (&environment.service_host, &environment.service_port) else {
        return Err("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set".into());
    };
    let url = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let mut config = Config::new(server_url(&url)?);
    let authority = folder.join("ca.crt");
    let text = std::fs::read(&authority).map_err(|error| format!("{}: {error}", authority.display()))?;
    config.root_cert = Some(certificates(&text)?);
    // From here it is read again each minute.
    config.root_cert_file = Some(authority);
    config.auth_info.token_file = Some(folder.join("token").to_string_lossy().into_owned());
    Ok(config)
}

/// The cluster and the user of the current context. As with client-go, a user who is not there is nobody, and with a
/// server from elsewhere neither context nor cluster are needed.
fn current(kubeconfig: &Kubeconfig, master: Option<&str>) -> Result<(Cluster, AuthInfo), String> {
    let Some(name) = kubeconfig.current_context.as_deref().filter(|name| !name.is_empty()) else {
        return master.map(|_| Default::default()).ok_or("it has no current-context".into());
    };
    let context = kubeconfig.contexts.iter().find(|named| named.name == name);
    let context = context.and_then(|named| named.context.as_ref());
    let context = context.ok_or_else(|| format!("it has no context {name:?}"))?;
    let cluster = kubeconfig.clusters.iter().find(|named| named.name == context.cluster);
    let cluster = cluster.and_then(|named| named.cluster.clone()).or(master.map(|_| Cluster::default()));
    let cluster = cluster.ok_or_else(|| format!("it has no cluster {:?}", context.cluster))?;
    let user = kubeconfig.auth_infos.iter().find(|named| Some(&named.name) == context.user.as_ref());
    Ok((cluster, user.and_then(|named| named.auth_info.clone()).unwrap_or_default()))
}

/// As in client-go, an empty text is as good as none.
fn forget_empty(cluster: &mut Cluster, user: &mut AuthInfo) {
    for text in [
        &mut cluster.server,
        &mut cluster.certificate_authority_data,
        &mut cluster.tls_server_name,
        &mut cluster.proxy_url,
        &mut user.username,
        &mut user.client_certificate_data,
        &mut user.impersonate,
        &mut user.impersonate_uid,
    ] {
        text.take_if(|text| text.is_empty());
    }
    for secret in [&mut user.password, &mut user.token, &mut user.client_key_data] {
        secret.take_if(|secret| secret.expose_secret().is_empty());
    }
    for path in [
        &mut cluster.certificate_authority,
        &mut user.client_certificate,
        &mut user.client_key,
        &mut user.token_file,
    ] {
        // `kube` has put the folder of the kubeconfig before it.
        path.take_if(|path| path.is_empty() || path.ends_with('/'));
    }
}

/// The certificates of a PEM file.
fn certificates(text: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let sections = pem::parse_many(text).map_err(|error| sentence(&error))?;
    let found = sections.into_iter().filter(|section| section.tag() == "CERTIFICATE");
    let found: Vec<_> = found.map(pem::Pem::into_contents).collect();
    // An empty list of authorities would trust nobody, for ever, and say so only of the server's certificate.
    if found.is_empty() {
        return Err("its certificate authority holds no PEM certificate".into());
    }
    Ok(found)
}

/// Where a server is. A host without scheme is meant as HTTPS.
pub(super) fn server_url(url: &str) -> Result<http::Uri, String> {
    let text = if url.contains("://") { url.to_owned() } else { format!("https://{url}") };
    let uri: http::Uri = text.parse().map_err(|error: http::uri::InvalidUri| error.to_string())?;
    match uri.scheme_str() {
        Some("http" | "https") if uri.host().is_some_and(|host| !host.is_empty()) => Ok(uri),
        _ => Err("it has no host or an unknown scheme".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_needs_no_namespace() {
        let folder = tempfile::tempdir().unwrap();
        let variables = |host: &str| Environment {
            service_host: Some(host.into()),
            service_port: Some("443".into()),
            ..Environment::default()
        };
        assert!(in_cluster(&variables("10.96.0.1"), folder.path()).unwrap_err().contains("ca.crt"));
        let authority = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        std::fs::write(folder.path().join("ca.crt"), authority).unwrap();
        for (host, url) in [("10.96.0.1", "https://10.96.0.1:443/"), ("fd00::1", "https://[fd00::1]:443/")] {
            let config = in_cluster(&variables(host), folder.path()).unwrap();
            assert_eq!(config.cluster_url.to_string(), url);
            assert!(config.auth_info.token_file.unwrap().ends_with("/token"));
        }
        assert!(in_cluster(&Environment::default(), folder.path()).unwrap_err().contains("SERVICE_HOST"));
    }

    #[test]
    fn a_server_may_be_named_without_scheme() {
        assert_eq!(server_url("10.0.0.1:6443").unwrap().to_string(), "https://10.0.0.1:6443/");
        assert_eq!(server_url("http://localhost:8080").unwrap().port_u16(), Some(8080));
        assert!(server_url("ftp://x").is_err());
        assert!(server_url("").is_err());
    }
}
