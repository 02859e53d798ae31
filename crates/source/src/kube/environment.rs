// SPDX-License-Identifier: Apache-2.0

//! What the environment says about the way to the API server. It is read by who starts us and comes here as data.
//! Proxies are chosen as Go does (golang.org/x/net/http/httpproxy), since kube-proxy is configured for that: kubeadm
//! copies these variables into its DaemonSet, and then only NO_PROXY keeps it off the company's proxy.

use std::net::IpAddr;

use http::Uri;
use ipnet::IpNet;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// For servers whose URL begins with `https`.
    pub https_proxy: Option<String>,
    /// For those that begin with `http`.
    pub http_proxy: Option<String>,
    /// Who is reached without either.
    pub no_proxy: Option<String>,
    /// Where pods find the API server: host and port.
    pub service_host: Option<String>,
    pub service_port: Option<String>,
}

impl Environment {
    /// Asks for each variable by its name.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Environment {
        let either = |upper: &str, lower: &str| {
            [upper, lower].into_iter().filter_map(&variable).find(|value| !value.is_empty())
        };
        Environment {
            https_proxy: either("HTTPS_PROXY", "https_proxy"),
            http_proxy: either("HTTP_PROXY", "http_proxy"),
            no_proxy: either("NO_PROXY", "no_proxy"),
            service_host: variable("KUBERNETES_SERVICE_HOST").filter(|value| !value.is_empty()),
            service_port: variable("KUBERNETES_SERVICE_PORT").filter(|value| !value.is_empty()),
        }
    }

    /// The proxy for a server. One that cannot be read is no proxy, as in Go.
    pub(super) fn proxy(&self, server: &Uri) -> Option<Uri> {
        let (proxy, default_port) = match server.scheme_str() {
            Some("https") => (self.https_proxy.as_deref()?, 443),
            Some("http") => (self.http_proxy.as_deref()?, 80),
            _ => return None,
        };
        let target = Target {
            host: server.host()?.trim_matches(['[', ']']).to_ascii_lowercase(),
            port: server.port_u16().unwrap_or(default_port),
        };
        if target.is_loopback() || self.exempts(&target) {
            return None;
        }
        let parsed = proxy_url(proxy);
        if parsed.is_none() {
            tracing::warn!("HTTP_PROXY or HTTPS_PROXY is no URL and is ignored");
        }
        parsed
    }

    fn exempts(&self, target: &Target) -> bool {
        let entries = self.no_proxy.as_deref().unwrap_or_default().split(',');
        entries.map(|entry| entry.trim().to_ascii_lowercase()).any(|entry| target.fits(&entry))
    }
}

/// The URL of a proxy; without a scheme it is meant as HTTP.
pub(super) fn proxy_url(text: &str) -> Option<Uri> {
    let text = text.trim();
    let text = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    text.parse::<Uri>().ok().filter(|uri| uri.host().is_some_and(|host| !host.is_empty()))
}

/// The server that is to be reached.
struct Target {
    host: String,
    port: u16,
}

impl Target {
    fn ip(&self) -> Option<IpAddr> {
        self.host.parse().ok().map(|ip: IpAddr| ip.to_canonical())
    }

    fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.ip().is_some_and(|ip| ip.is_loopback())
    }

    /// Whether an entry of NO_PROXY means this server. What is no entry means nobody.
    fn fits(&self, entry: &str) -> bool {
        if entry == "*" {
            return true;
        }
        if let Ok(range) = entry.parse::<IpNet>() {
            return self.ip().is_some_and(|ip| range.contains(&ip));
        }
        let (host, port) = split_port(entry);
        if !port.is_none_or(|port| port.is_empty() || port == self.port.to_string()) {
            return false;
        }
        if let Ok(ip) = host.parse::<IpAddr>() {
            return self.ip() == Some(ip.to_canonical());
        }
        // A name is meant with all below it; with a dot before it, only those below.
        let domain = host.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(host);
        let is_below = |domain: &str| self.host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'));
        match domain.strip_prefix('.') {
            _ if domain.is_empty() || self.ip().is_some() => false,
            Some(domain) => is_below(domain),
            None => self.host == domain || is_below(domain),
        }
    }
}

/// Host and port of `host:port`, `[v6]:port`, or either without a port. An IPv6 address has no port without brackets.
fn split_port(entry: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = entry.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return (host, rest.strip_prefix(':'));
    }
    match entry.split_once(':') {
        Some((host, port)) if !port.contains(':') => (host, Some(port)),
        _ => (entry, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(no_proxy: &str) -> Environment {
        Environment {
            https_proxy: Some("http://secure:3128".into()),
            http_proxy: Some("plain:3128".into()),
            no_proxy: Some(no_proxy.into()),
            ..Environment::default()
        }
    }

    fn chosen(no_proxy: &str, server: &str) -> Option<String> {
        environment(no_proxy).proxy(&server.parse().unwrap()).map(|uri| uri.to_string())
    }

    #[test]
    fn the_scheme_of_the_server_chooses() {
        assert_eq!(chosen("", "https://10.0.0.1:6443").unwrap(), "http://secure:3128/");
        assert_eq!(chosen("", "http://10.0.0.1:8080").unwrap(), "http://plain:3128/");
        let server = "https://10.0.0.1".parse().unwrap();
        assert_eq!(Environment::default().proxy(&server), None);
        let bad = Environment { https_proxy: Some("http://".into()), ..Environment::default() };
        assert_eq!(bad.proxy(&server), None);
    }

    #[test]
    fn loopback_is_never_behind_a_proxy() {
        for server in ["https://localhost:6443", "https://127.8.0.1", "https://[::1]:6443"] {
            assert_eq!(chosen("", server), None, "{server}");
        }
    }

    #[test]
    fn entries_mean_what_they_mean_in_go() {
        for (entry, server, is_exempt) in [
            ("*", "https://10.0.0.1", true),
            (" , , * ", "https://api.example.com", true),
            ("10.0.0.1", "https://10.0.0.1:6443", true),
            ("10.0.0.1", "https://10.0.0.11:6443", false),
            ("10.0.0.1:6443", "https://10.0.0.1:6443", true),
            ("10.0.0.1:6444", "https://10.0.0.1:6443", false),
            ("10.0.0.1:443", "https://10.0.0.1", true),
            ("10.0.0.0/8", "https://10.9.0.1:6443", true),
            ("10.0.0.0/8", "https://11.9.0.1:6443", false),
            ("10.0.0.0/99,10.0.0.1", "https://10.0.0.1", true),
            ("fd00::/16", "https://[fd00::1]:6443", true),
            ("fd00::1", "https://[fd00::1]:6443", true),
            ("[fd00::1]:6443", "https://[fd00::1]:6443", true),
            ("[fd00::1]:6444", "https://[fd00::1]:6443", false),
            ("[fd00::1", "https://[fd00::1]:6443", false),
            ("::ffff:10.0.0.1", "https://10.0.0.1", true),
            ("example.com", "https://example.com", true),
            ("Example.COM", "https://API.example.com", true),
            ("example.com", "https://notexample.com", false),
            (".example.com", "https://example.com", false),
            (".example.com", "https://api.example.com", true),
            ("*.example.com", "https://api.example.com", true),
            ("*.example.com", "https://example.com", false),
            ("example.com:6443", "https://api.example.com:6443", true),
            ("example.com:6444", "https://api.example.com:6443", false),
            (":6443", "https://api.example.com:6443", false),
            (".", "https://api.example.com", false),
            (".1", "https://10.0.0.1", false),
            ("svc,.cluster.local", "https://kubernetes.default.svc", true),
            ("10.96.0.0/12 ,\t10.0.0.1", "https://10.0.0.1", true),
        ] {
            assert_eq!(chosen(entry, server).is_none(), is_exempt, "{entry:?} for {server}");
        }
    }

    #[test]
    fn either_case_is_read_and_nothing_is_nothing() {
        let variables = [("HTTPS_PROXY", ""), ("https_proxy", "a:1"), ("NO_PROXY", "x"), ("no_proxy", "y")];
        let read = Environment::read(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        let text = |text: &str| Some(text.to_owned());
        assert_eq!((read.https_proxy, read.http_proxy, read.no_proxy), (text("a:1"), None, text("x")));
    }
}
