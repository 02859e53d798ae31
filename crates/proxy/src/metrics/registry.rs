// SPDX-License-Identifier: Apache-2.0

//! Counters, gauges and histograms, and their text form (Prometheus exposition format 0.0.4).
//!
//! Written out here rather than taken from a library: the names, labels and the order of first appearance are
//! a contract with dashboards, and the libraries at hand speak OpenMetrics, which renames counters.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use model::Family as IpFamily;

use super::ip_family;

/// All series of one name. A series appears once it is first used.
pub struct Family<M> {
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    make: fn() -> M,
    series: Mutex<BTreeMap<Vec<String>, Arc<M>>>,
    /// Series that the loop uses with every change, once they have been found: on the way to one by its labels lie half a
    /// dozen pieces of memory, none of which is in the processor's cache when a change comes.
    at_hand: [OnceLock<Arc<M>>; 2],
}

impl<M> Family<M> {
    pub(super) fn new(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        make: fn() -> M,
    ) -> Family<M> {
        Family { name, help, labels, make, series: Mutex::default(), at_hand: Default::default() }
    }

    /// The series with these label values, in the order the labels were declared.
    pub fn with(&self, values: &[&str]) -> Arc<M> {
        debug_assert_eq!(values.len(), self.labels.len(), "{}", self.name);
        let mut series = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        let key: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        Arc::clone(series.entry(key).or_insert_with(|| Arc::new((self.make)())))
    }

    /// The only series of a name without labels.
    pub fn only(&self) -> &M {
        self.at_hand[0].get_or_init(|| self.with(&[]))
    }

    /// The series of a family, of a name with no other label.
    pub fn of(&self, family: IpFamily) -> &M {
        self.at_hand[family as usize].get_or_init(|| self.with(&[ip_family(family)]))
    }
}

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct About {
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

impl About {
    /// Writes series that somebody else counts: label values, and the value. Without any there is nothing.
    pub fn write(&self, out: &mut String, samples: impl IntoIterator<Item = (Vec<String>, f64)>) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_some() {
            head(out, self.name, self.help, self.kind);
        }
        for (values, value) in samples {
            line(out, self.name, "", &pairs(self.labels, &values), value);
        }
    }
}

/// What [`super::Metrics`] writes out.
pub(super) trait Render {
    fn about(&self) -> About;
    fn render(&self, out: &mut String);
}

impl<M: Sample> Render for Family<M> {
    fn about(&self) -> About {
        About { name: self.name, kind: M::TYPE, labels: self.labels, help: self.help }
    }

    fn render(&self, out: &mut String) {
        let series = self.series.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if series.is_empty() {
            return;
        }
        let Family { name, help, labels, .. } = self;
        head(out, name, help, M::TYPE);
        for (values, metric) in series {
            metric.sample(out, name, &pairs(labels, &values));
        }
    }
}

/// The two lines before a name's samples.
fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn pairs(labels: &[&str], values: &[String]) -> String {
    let pairs = labels.iter().zip(values).map(|(label, value)| format!("{label}=\"{}\"", escape(value)));
    pairs.collect::<Vec<_>>().join(",")
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// One kind of metric.
pub(super) trait Sample {
    const TYPE: &'static str;
    fn sample(&self, out: &mut String, name: &str, labels: &str);
}

/// Only ever grows.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Grows by so many.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    /// What it has grown to.
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Sample for Counter {
    const TYPE: &'static str = "counter";

    fn sample(&self, out: &mut String, name: &str, labels: &str) {
        line(out, name, "", labels, self.value());
    }
}

/// Goes up and down.
#[derive(Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Becomes this.
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }

    /// What it is.
    pub fn value(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

impl Sample for Gauge {
    const TYPE: &'static str = "gauge";

    fn sample(&self, out: &mut String, name: &str, labels: &str) {
        line(out, name, "", labels, self.value());
    }
}

/// How many observations were at most each of some bounds.
pub struct Histogram {
    bounds: Vec<f64>,
    /// One for each bound, and one for what is above all.
    counts: Vec<AtomicU64>,
    sum: Mutex<f64>,
}

impl Histogram {
    pub(super) fn new(bounds: Vec<f64>) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum: Mutex::new(0.0) }
    }

    /// Counts one observation.
    pub fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Relaxed);
        *self.sum.lock().unwrap_or_else(PoisonError::into_inner) += value;
    }
}

impl Sample for Histogram {
    const TYPE: &'static str = "histogram";

    fn sample(&self, out: &mut String, name: &str, labels: &str) {
        let comma = if labels.is_empty() { "" } else { "," };
        let mut total = 0;
        for (index, count) in self.counts.iter().enumerate() {
            total += count.load(Relaxed);
            let bound = self.bounds.get(index).map_or("+Inf".to_owned(), f64::to_string);
            line(out, name, "_bucket", &format!("{labels}{comma}le=\"{bound}\""), total);
        }
        line(out, name, "_sum", labels, *self.sum.lock().unwrap_or_else(PoisonError::into_inner));
        line(out, name, "_count", labels, total);
    }
}

fn line(out: &mut String, name: &str, suffix: &str, labels: &str, value: impl std::fmt::Display) {
    let _ = match labels {
        "" => writeln!(out, "{name}{suffix} {value}"),
        labels => writeln!(out, "{name}{suffix}{{{labels}}} {value}"),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_form() {
        let mut out = String::new();
        let counter = Family::new("c_total", "Counts.", &["code"], Counter::default);
        counter.render(&mut out);
        assert_eq!(out, "", "nothing before the first use");
        counter.with(&["5\"0\\3"]).add(2);
        counter.with(&["200"]).add(1);
        counter.render(&mut out);
        assert_eq!(
            out,
            "# HELP c_total Counts.\n# TYPE c_total counter\nc_total{code=\"200\"} 1\nc_total{code=\"5\\\"0\\\\3\"} 2\n"
        );

        out.clear();
        let gauge = Family::new("g", "Goes.", &[], Gauge::default);
        gauge.with(&[]).set(1.5);
        gauge.render(&mut out);
        assert_eq!(out, "# HELP g Goes.\n# TYPE g gauge\ng 1.5\n");
        assert_eq!(gauge.only().value(), 1.5, "what is at hand is the series of that name");

        let gauge = Family::new("f", "Is of a family.", &["ip_family"], Gauge::default);
        for (family, value) in [(IpFamily::V4, 4.0), (IpFamily::V6, 6.0)] {
            gauge.of(family).set(value);
            assert_eq!(gauge.with(&[ip_family(family)]).value(), value);
        }

        out.clear();
        let histogram = Family::new("h", "Spreads.", &["f"], || Histogram::new(vec![0.5, 2.0]));
        [0.5, 1.0, 7.0].iter().for_each(|value| histogram.with(&["x"]).observe(*value));
        histogram.render(&mut out);
        assert_eq!(
            out,
            "# HELP h Spreads.\n# TYPE h histogram\nh_bucket{f=\"x\",le=\"0.5\"} 1\nh_bucket{f=\"x\",le=\"2\"} 2\n\
             h_bucket{f=\"x\",le=\"+Inf\"} 3\nh_sum{f=\"x\"} 8.5\nh_count{f=\"x\"} 3\n"
        );
    }
}
