// SPDX-License-Identifier: Apache-2.0

//! Where the kernel cannot do ipvs: another mode, as asked, and said aloud. What is in force is what `/proxyMode`, the
//! log and the metrics name.

use dataplane::{Mode, Unsupported};
use model::PerFamily;

use crate::{
    app,
    config::{Config, check::Checked, own},
    events::{Note, Recorder, Regarding},
    host,
    metrics::Metrics,
};

/// A mode that was asked for, and another that is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    pub wanted: Mode,
    pub taken: Mode,
    /// Why, in one sentence.
    pub reason: String,
}

impl Fallback {
    /// Says it to those who watch: a log line, an Event on the Node, and a metric.
    pub fn tell(&self, metrics: &Metrics, events: &Recorder) {
        let Fallback { wanted, taken, reason } = self;
        let text = format!("mode {taken} is in force, not {wanted}: {reason}");
        tracing::warn!("{text}");
        events.note(Note::warning("ProxyModeFallback", "StartKubeProxy", Regarding::Node, text));
        metrics.fallback.with(&[&taken.to_string(), &wanted.to_string()]).set(1.0);
    }
}

/// Finds the families that the network namespace of this thread has, and makes the configuration say the mode that can be
/// had there; `None` if it is the one that was asked for. The error is one sentence.
pub fn settle(
    config: &mut Config,
    checked: &mut Checked,
) -> Result<(PerFamily<bool>, Option<Fallback>), String> {
    let families = host::families();
    let open = |checked: &Checked| app::open(checked, families).map(drop).map_err(Unsupported);
    let fallback = choose(checked, &open)?;
    if let Some(fallback) = &fallback {
        checked.mode = fallback.taken;
        config.mode = fallback.taken.to_string();
        if fallback.taken == Mode::Nftables {
            let bit = config.nftables.masquerade_bit.and_then(|bit| u8::try_from(bit).ok());
            checked.masquerade_bit = bit.unwrap_or(checked.masquerade_bit);
        }
    }
    Ok((families, fallback))
}

fn choose(
    checked: &Checked,
    open: &dyn Fn(&Checked) -> Result<(), Unsupported>,
) -> Result<Option<Fallback>, String> {
    if checked.mode != Mode::Ipvs {
        return Ok(None);
    }
    let Err(Unsupported(reason)) = open(checked) else { return Ok(None) };
    let others = match checked.ipvs_fallback {
        own::Fallback::Iptables => &[Mode::Iptables, Mode::Nftables][..],
        own::Fallback::Nftables => &[Mode::Nftables],
        own::Fallback::None => return Err(format!("{reason} (--ipvs-fallback=none)")),
    };
    for taken in others {
        if open(&Checked { mode: *taken, ..checked.clone() }).is_ok() {
            return Ok(Some(Fallback { wanted: Mode::Ipvs, taken: *taken, reason }));
        }
    }
    Err(format!(
        "{reason}; nor can this node do {}",
        others.iter().map(Mode::to_string).collect::<Vec<_>>().join(" or ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::check;

    fn checked(fallback: own::Fallback) -> Checked {
        let mut config = Config::with_defaults();
        config.mode = "ipvs".to_owned();
        config.settle();
        Checked { ipvs_fallback: fallback, ..check::check(&config).expect("valid") }
    }

    /// What is taken on a node that can do only these.
    fn taken(fallback: own::Fallback, can: &[Mode]) -> Result<Option<Mode>, String> {
        let open = |checked: &Checked| match can.contains(&checked.mode) {
            true => Ok(()),
            false => Err(Unsupported("the kernel has not ip_vs".to_owned())),
        };
        choose(&checked(fallback), &open).map(|fallback| fallback.map(|fallback| fallback.taken))
    }

    #[test]
    fn the_first_that_can_be_had_is_taken() {
        use own::Fallback as F;
        assert_eq!(taken(F::Iptables, &[Mode::Ipvs, Mode::Iptables]), Ok(None));
        assert_eq!(taken(F::Iptables, &[Mode::Iptables, Mode::Nftables]), Ok(Some(Mode::Iptables)));
        assert_eq!(taken(F::Iptables, &[Mode::Nftables]), Ok(Some(Mode::Nftables)));
        assert_eq!(taken(F::Nftables, &[Mode::Iptables, Mode::Nftables]), Ok(Some(Mode::Nftables)));
        let refused = taken(F::None, &[Mode::Iptables, Mode::Nftables]).expect_err("none is none");
        assert!(refused.contains("ip_vs") && refused.contains("--ipvs-fallback=none"), "{refused}");
        assert!(taken(F::Nftables, &[Mode::Iptables]).expect_err("nothing left").contains("nftables"));
    }
}
