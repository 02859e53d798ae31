// SPDX-License-Identifier: Apache-2.0

//! A subject's own figures, from its /metrics.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{
    figures::{Quantiles, Reported},
    ground::Namespace,
};

/// Where every subject is told to serve its metrics, inside its own namespace.
pub const METRICS_PORT: u16 = 10_249;

/// The text of /metrics.
pub fn metrics(node: &Namespace) -> Result<String> {
    node.run(|| {
        let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, METRICS_PORT))?;
        connection.set_read_timeout(Some(Duration::from_secs(10)))?;
        // HTTP/1.0: the answer comes whole, not in chunks.
        connection.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\nAccept: text/plain\r\n\r\n")?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer)?;
        std::io::Result::Ok(answer)
    })?
    .context("reading /metrics")
}

/// A histogram summed over its labels: upper bounds in seconds (as ordered bits) and cumulative counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram(BTreeMap<u64, f64>);

impl Histogram {
    pub fn read(text: &str, name: &str) -> Histogram {
        let mut buckets = BTreeMap::new();
        for line in text.lines() {
            let Some(rest) = line.strip_prefix(name).and_then(|rest| rest.strip_prefix("_bucket{")) else {
                continue;
            };
            let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
            let bound =
                labels.split(',').find_map(|label| label.trim().strip_prefix("le=\"")?.strip_suffix('"'));
            let bound = match bound {
                Some("+Inf") => Some(f64::INFINITY),
                other => other.and_then(|bound| bound.parse::<f64>().ok()),
            };
            // A value may be followed by a time.
            let value = value.split(' ').next().and_then(|value| value.parse::<f64>().ok());
            if let (Some(bound), Some(value)) = (bound.filter(|bound| *bound >= 0.0), value) {
                // The bits of numbers that are not negative are ordered as the numbers are.
                *buckets.entry(bound.to_bits()).or_default() += value;
            }
        }
        Histogram(buckets)
    }

    /// What came after `earlier`.
    pub fn since(&self, earlier: &Histogram) -> Histogram {
        let count = |bound| earlier.0.get(bound).copied().unwrap_or(0.0);
        Histogram(self.0.iter().map(|(bound, value)| (*bound, value - count(bound))).collect())
    }

    /// The quantiles, interpolated inside their buckets; `None` of nothing.
    pub fn quantiles(&self) -> Option<Quantiles> {
        let count = *self.0.values().next_back().filter(|count| **count > 0.0)?;
        let at = |part: f64| 1e3 * self.below(part * count);
        Some(Quantiles { count: count as u64, p50_ms: at(0.5), p99_ms: at(0.99), max_ms: at(1.0) })
    }

    fn below(&self, wanted: f64) -> f64 {
        let (mut lower, mut counted) = (0.0, 0.0);
        for (bound, cumulative) in &self.0 {
            let bound = f64::from_bits(*bound);
            if *cumulative >= wanted {
                let inside = (wanted - counted) / (cumulative - counted).max(f64::MIN_POSITIVE);
                return if bound.is_finite() { lower + inside * (bound - lower) } else { lower };
            }
            (lower, counted) = (bound, *cumulative);
        }
        lower
    }
}

/// The first of `names` that grew between two readings of /metrics.
pub fn reported(names: &[&str], before: &str, after: &str) -> Option<Reported> {
    names.iter().find_map(|name| {
        let grown = Histogram::read(after, name).since(&Histogram::read(before, name));
        grown.quantiles().map(|times| Reported { metric: (*name).to_owned(), times })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "t_bucket{le=\"0.001\"} 5\nt_bucket{le=\"0.002\"} 5\nt_bucket{le=\"+Inf\"} 5\n";
    const AFTER: &str = "# TYPE t histogram\n\
        t_bucket{ip_family=\"IPv4\",le=\"0.001\"} 50\nt_bucket{ip_family=\"IPv4\",le=\"0.002\"} 100\n\
        t_bucket{ip_family=\"IPv4\",le=\"+Inf\"} 100\n\
        t_bucket{ip_family=\"IPv6\",le=\"0.001\"} 5\nt_bucket{ip_family=\"IPv6\",le=\"0.002\"} 5\n\
        t_bucket{ip_family=\"IPv6\",le=\"+Inf\"} 5\nt_sum 1\nt_count 105\nts_bucket{le=\"7\"} 1\n";

    #[test]
    fn quantiles_come_from_what_grew() {
        let reported = reported(&["absent", "t"], BEFORE, AFTER).unwrap();
        assert_eq!(reported.metric, "t");
        assert_eq!(reported.times.count, 100);
        assert!((reported.times.p50_ms - 1.0).abs() < 1e-9, "{:?}", reported.times);
        assert!((reported.times.p99_ms - 1.98).abs() < 1e-9, "{:?}", reported.times);
    }

    #[test]
    fn nothing_new_is_nothing() {
        assert!(reported(&["t"], AFTER, AFTER).is_none());
        assert!(Histogram::read("t_bucket{le=\"x\"} 1\nt_bucket{le=\n", "t").quantiles().is_none());
    }
}
