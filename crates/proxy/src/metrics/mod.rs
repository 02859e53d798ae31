// SPDX-License-Identifier: Apache-2.0

//! What the program counts. The names with `kubeproxy_` are kube-proxy's, with its types, labels and buckets,
//! so that existing dashboards and alerts go on working; those with `portolan_` are ours.

mod accounts;
mod outside;
mod process;
mod registry;
mod relayed;

use std::time::SystemTime;

use model::Family as IpFamily;

use self::registry::Render;
pub use self::{
    accounts::Accounted,
    outside::{Outside, features, requests},
    process::start_time,
    registry::{About, Counter, Family, Gauge, Histogram},
};

/// Declares the metrics, in the order they are written out: by name.
macro_rules! metrics {
    ($($field:ident: $type:ident = $name:literal $help:literal [$($label:literal),*] $make:expr;)*) => {
        /// See the module.
        pub struct Metrics {
            started: SystemTime,
            $(#[doc = $help] pub $field: Family<$type>,)*
        }

        impl Metrics {
            /// Nothing counted yet. `started` is when the process was.
            pub fn new(started: SystemTime) -> Metrics {
                Metrics { started, $($field: Family::new($name, $help, &[$($label),*], $make),)* }
            }

            fn all(&self) -> Vec<&dyn Render> {
                vec![$(&self.$field),*]
            }
        }
    };
}

metrics! {
    stale_flows: Counter = "kubeproxy_conntrack_reconciler_deleted_entries_total"
        "[ALPHA] Tracked flows removed because their endpoint went away." ["ip_family"] Counter::default;
    sweep: Histogram = "kubeproxy_conntrack_reconciler_sync_duration_seconds"
        "[ALPHA] From a change in force to the removal of the flows it made stale." ["ip_family"] sync_buckets;
    network_programming: Histogram = "kubeproxy_network_programming_duration_seconds"
        "[ALPHA] From the change of a pod or service to its commit in the kernel." ["ip_family"] programming_buckets;
    healthz: Counter = "kubeproxy_proxy_healthz_total"
        "[ALPHA] Answers of /healthz by status code." ["code"] Counter::default;
    livez: Counter = "kubeproxy_proxy_livez_total"
        "[ALPHA] Answers of /livez by status code." ["code"] Counter::default;
    sync_full: Histogram = "kubeproxy_sync_full_proxy_rules_duration_seconds"
        "[ALPHA] Time of a write of everything to the kernel." ["ip_family"] sync_buckets;
    sync_partial: Histogram = "kubeproxy_sync_partial_proxy_rules_duration_seconds"
        "[ALPHA] Time of a write of what changed to the kernel." ["ip_family"] sync_buckets;
    sync: Histogram = "kubeproxy_sync_proxy_rules_duration_seconds"
        "[ALPHA] Time of a write to the kernel." ["ip_family"] sync_buckets;
    endpoint_changes_pending: Gauge = "kubeproxy_sync_proxy_rules_endpoint_changes_pending"
        "[ALPHA] EndpointSlice changes received and not yet in the kernel." [] Gauge::default;
    endpoint_changes: Counter = "kubeproxy_sync_proxy_rules_endpoint_changes_total"
        "[ALPHA] EndpointSlice changes received." [] Counter::default;
    iptables_last: Gauge = "kubeproxy_sync_proxy_rules_iptables_last"
        "[ALPHA] Rules of iptables written by the last write." ["ip_family", "table"] Gauge::default;
    iptables_partial_failures: Counter = "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total"
        "[ALPHA] Writes of what changed to iptables that failed; everything was compared instead." ["ip_family"] Counter::default;
    iptables_failures: Counter = "kubeproxy_sync_proxy_rules_iptables_restore_failures_total"
        "[ALPHA] Writes to iptables that failed." ["ip_family"] Counter::default;
    iptables_total: Gauge = "kubeproxy_sync_proxy_rules_iptables_total"
        "[ALPHA] Rules of iptables that are ours, without those in built-in chains." ["ip_family", "table"] Gauge::default;
    last_queued: Gauge = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"
        "[ALPHA] When a write to the kernel was last asked for." ["ip_family"] Gauge::default;
    last_synced: Gauge = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
        "[ALPHA] When the kernel was last written successfully." ["ip_family"] Gauge::default;
    nftables_failures: Counter = "kubeproxy_sync_proxy_rules_nftables_sync_failures_total"
        "[ALPHA] Writes to nftables that failed." ["ip_family"] Counter::default;
    no_local_endpoints: Gauge = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
        "[ALPHA] Service ports with a Local traffic policy and endpoints, but none on this node."
        ["ip_family", "traffic_policy"] Gauge::default;
    service_changes_pending: Gauge = "kubeproxy_sync_proxy_rules_service_changes_pending"
        "[ALPHA] Service changes received and not yet in the kernel." [] Gauge::default;
    service_changes: Counter = "kubeproxy_sync_proxy_rules_service_changes_total"
        "[ALPHA] Service changes received." [] Counter::default;
    features: Gauge = "kubernetes_feature_enabled"
        "[BETA] Whether a feature gate is on." ["name", "stage"] Gauge::default;
    affinity_clients: Gauge = "portolan_affinity_clients"
        "Clients that session affinity remembers in the kernel, nftables mode." ["ip_family"] Gauge::default;
    affinity_limit: Gauge = "portolan_affinity_limit"
        "Clients that can be remembered; further ones are not, nftables mode." ["ip_family"] Gauge::default;
    build: Gauge = "portolan_build_info"
        "The version that runs; always 1." ["version"] Gauge::default;
    conflicts: Counter = "portolan_conflicts_total"
        "Frontends that two services claim; the older service keeps them." [] Counter::default;
    drift_mended: Counter = "portolan_drift_mended_total"
        "Complete writes that put right what others had changed." [] Counter::default;
    drift: Counter = "portolan_drift_total"
        "Changes by others to what is ours in the kernel; each is undone." [] Counter::default;
    events: Counter = "portolan_events_total"
        "Kubernetes Events by what became of them." ["outcome"] Counter::default;
    frontends: Gauge = "portolan_frontends"
        "Addresses and ports that are served." [] Gauge::default;
    check_failures: Counter = "portolan_health_check_listen_failures_total"
        "Health-check node ports that could not be opened." ["ip_family"] Counter::default;
    check_listeners: Gauge = "portolan_health_check_listeners"
        "Health-check node ports that are open, by address." ["ip_family"] Gauge::default;
    lock_wait: Histogram = "portolan_iptables_lock_wait_seconds"
        "Waits for the lock that the users of iptables share." [] sync_buckets;
    split: Counter = "portolan_iptables_split_total"
        "Times that chains of a proxy were found in the tables of the iptables variant that is not in use." [] Counter::default;
    fallback: Gauge = "portolan_mode_fallback"
        "Another mode is in force than was asked for; always 1." ["in_force", "wanted"] Gauge::default;
    panics: Counter = "portolan_panics_total"
        "Bugs that were caught and survived." [] Counter::default;
    programming: Histogram = "portolan_programming_duration_seconds"
        "From the receipt of a change to its commit in the kernel." [] fine_buckets;
    api_latency: Histogram = "rest_client_request_duration_seconds"
        "[ALPHA] From a request to the API server to the head of its answer." ["host", "verb"] api_buckets;
    api_requests: Counter = "rest_client_requests_total"
        "[ALPHA] Requests to the API server by status code; <error> without an answer."
        ["code", "host", "method"] Counter::default;
}

impl Metrics {
    /// All of it, in the text form that Prometheus reads.
    pub fn render(&self) -> String {
        let mut out = String::new();
        self.all().iter().for_each(|family| family.render(&mut out));
        process::render(&mut out, self.started);
        out
    }

    /// Every name there is, also those without a series yet, sorted.
    pub fn catalogue(&self) -> Vec<About> {
        let mut all: Vec<About> = self.all().iter().map(|family| family.about()).collect();
        all.extend(process::names());
        all.extend(outside::names());
        all.extend(accounts::names());
        all.sort();
        all
    }
}

/// The label value for a family.
pub fn ip_family(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "IPv4",
        IpFamily::V6 => "IPv6",
    }
}

/// 1 ms doubled fourteen times.
fn sync_buckets() -> Histogram {
    Histogram::new((0..15).map(|power| 0.001 * f64::from(1 << power)).collect())
}

/// From 50 us to 13 s: our changes are too fast for the buckets above.
fn fine_buckets() -> Histogram {
    Histogram::new((0..19).map(|power| 0.000_05 * f64::from(1 << power)).collect())
}

/// As client-go has them.
fn api_buckets() -> Histogram {
    Histogram::new(vec![0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0])
}

/// As kube-proxy has them: its library puts a 0 before buckets that are put together.
fn programming_buckets() -> Histogram {
    let mut bounds = vec![0.0, 0.25, 0.5];
    bounds.extend((1..60).map(f64::from));
    bounds.extend((60..120).step_by(5).map(f64::from));
    bounds.extend((120..=300).step_by(30).map(f64::from));
    Histogram::new(bounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kube_proxys_names_types_and_buckets() {
        let metrics = Metrics::new(SystemTime::now());
        metrics.sync.with(&["IPv4"]).observe(0.003);
        metrics.network_programming.with(&["IPv4"]).observe(500.0);
        metrics.no_local_endpoints.with(&["IPv4", "internal"]).set(2.0);
        metrics.service_changes.only().add(3);
        let text = metrics.render();
        for line in [
            "# HELP kubeproxy_sync_proxy_rules_duration_seconds [ALPHA] Time of a write to the kernel.",
            "# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.002\"} 0",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.004\"} 1",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"16.384\"} 1",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"59\"} 0",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"115\"} 0",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"300\"} 0",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"+Inf\"} 1",
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"internal\"} 2",
            "# TYPE kubeproxy_sync_proxy_rules_service_changes_total counter",
            "kubeproxy_sync_proxy_rules_service_changes_total 3",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
        let buckets =
            |name: &str| text.lines().filter(|line| line.starts_with(&format!("{name}_bucket"))).count();
        assert_eq!(buckets("kubeproxy_sync_proxy_rules_duration_seconds"), 16);
        assert_eq!(buckets("kubeproxy_network_programming_duration_seconds"), 3 + 59 + 12 + 7 + 1);
        assert!(!text.contains("kubeproxy_proxy_healthz_total"), "not used yet");
    }

    #[test]
    fn no_name_is_taken_twice() {
        let names: Vec<_> =
            Metrics::new(SystemTime::now()).catalogue().iter().map(|about| about.name).collect();
        let mut once = names.clone();
        once.dedup();
        assert_eq!(names, once);
    }

    /// docs/metrics.md lists exactly what there is. `UPDATE=1` writes its table anew.
    #[test]
    fn the_documentation_lists_every_metric() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let text = std::fs::read_to_string(path).expect("the page is there");
        let (head, rest) = text.split_once(TABLE_HEAD).expect("the page has the table");
        let (_, tail) = rest.split_once("\n\n").expect("something follows the table");
        let row = |about: &About| {
            let labels = about.labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
            // How stable kube-proxy calls a name is for its own page.
            let help = about.help.strip_prefix("[ALPHA] ").or(about.help.strip_prefix("[BETA] "));
            format!("\n| `{}` | {} | {labels} | {} |", about.name, about.kind, help.unwrap_or(about.help))
        };
        let rows: String = Metrics::new(SystemTime::now()).catalogue().iter().map(row).collect();
        let wanted = format!("{head}{TABLE_HEAD}{rows}\n\n{tail}");
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(path, wanted).expect("the page can be written");
        } else {
            assert!(text == wanted, "docs/metrics.md is out of date: UPDATE=1 writes its table anew");
        }
    }

    const TABLE_HEAD: &str = "| name | type | labels | meaning |\n|---|---|---|---|";

    #[test]
    fn the_process_is_described() {
        let text = Metrics::new(start_time()).render();
        for name in
            ["cpu_seconds_total", "max_fds", "open_fds", "resident_memory_bytes", "start_time_seconds"]
        {
            let line = text.lines().find(|line| line.starts_with(&format!("process_{name} ")));
            let value: f64 = line.and_then(|line| line.split(' ').nth(1)).expect(name).parse().expect(name);
            assert!(value.is_finite() && (value > 0.0 || name == "cpu_seconds_total"), "{name} {value}");
        }
    }
}
