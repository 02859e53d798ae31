// SPDX-License-Identifier: Apache-2.0

//! How full the kernel's memory of clients is: shown as metrics, and told before further clients are not remembered.

use dataplane::Affinity;
use model::PerFamily;

use crate::metrics::{Metrics, ip_family};

/// What was last told, by family.
#[derive(Debug, Default)]
pub(super) struct Fullness(PerFamily<Level>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    #[default]
    Roomy,
    /// 90 % and more.
    Nearly,
    Full,
}

impl Fullness {
    /// Sets the metrics, and warns once at each level.
    pub(super) fn tell(&mut self, all: &[Affinity], metrics: &Metrics) {
        for affinity in all {
            metrics.affinity_clients.of(affinity.family).set(affinity.clients.into());
            metrics.affinity_limit.of(affinity.family).set(affinity.limit.into());
            if let Some(warning) = self.warning(affinity) {
                tracing::warn!("{warning}");
            }
        }
    }

    fn warning(&mut self, affinity: &Affinity) -> Option<String> {
        let Affinity { family, clients, limit } = *affinity;
        let share = f64::from(clients) / f64::from(limit.max(1));
        let told = self.0[family];
        let level = match share {
            1.0.. => Level::Full,
            0.9.. => Level::Nearly,
            // What goes back and forth is not told each time.
            0.8.. => told,
            _ => Level::Roomy,
        };
        self.0[family] = level;
        if level <= told {
            return None;
        }
        let family = ip_family(family);
        Some(match level {
            Level::Full => format!(
                "session affinity remembers {clients} {family} clients, which is the limit: further ones are balanced \
                 anew with each connection"
            ),
            _ => format!("session affinity remembers {clients} {family} clients of at most {limit}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use model::Family;

    use super::*;

    #[test]
    fn each_level_is_told_once() {
        let mut fullness = Fullness::default();
        let mut told = |clients, family| fullness.warning(&Affinity { family, clients, limit: 1_000 });
        assert_eq!(told(899, Family::V4), None);
        assert!(
            told(900, Family::V4).is_some_and(|words| words.contains("900 IPv4 clients of at most 1000"))
        );
        assert_eq!(told(950, Family::V4), None, "told already");
        assert_eq!(told(850, Family::V4), None);
        assert_eq!(told(901, Family::V4), None, "back and forth");
        assert!(told(1_000, Family::V4).is_some_and(|words| words.contains("which is the limit")));
        assert!(told(1_000, Family::V6).is_some(), "each family for itself");
        assert_eq!(told(100, Family::V4), None);
        assert!(told(1_000, Family::V4).is_some(), "full again");
    }
}
