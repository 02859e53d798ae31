// SPDX-License-Identifier: Apache-2.0

//! Settings of the kernel without which virtual servers do not do what services need.

use std::{fs, io};

use super::Settings;

/// A setting and what it must be.
struct Need {
    path: &'static str,
    value: &'static str,
    /// Without it nothing works.
    required: bool,
}

const fn need(path: &'static str, value: &'static str) -> Need {
    Need { path, value, required: false }
}

/// Connections are tracked, so that they can be masqueraded.
const TRACKED: Need = Need { required: true, ..need("net/ipv4/vs/conntrack", "1") };
/// Connections to a real server that is gone end, instead of going nowhere until they time out.
const NO_DEST: Need = need("net/ipv4/vs/expire_nodest_conn", "1");
/// Clients of a real server that takes no new connections are forgotten.
const QUIESCENT: Need = need("net/ipv4/vs/expire_quiescent_template", "1");
/// A port that a client uses again is scheduled anew, and so never sent to a real server that is going. Kernels before
/// 5.9 lose a second by it: there it is off.
const REUSE: &str = "net/ipv4/vs/conn_reuse_mode";
const FORWARD: Need = need("net/ipv4/ip_forward", "1");
const STRICT_ARP: [Need; 2] =
    [need("net/ipv4/conf/all/arp_ignore", "1"), need("net/ipv4/conf/all/arp_announce", "2")];

/// Settings that are as they must be.
#[derive(Debug, Default)]
pub(super) struct Settled(Vec<(&'static str, &'static str)>);

impl Settled {
    /// One that somebody has changed since, in words.
    pub(super) fn drift(&self) -> Option<String> {
        let (path, value) =
            self.0.iter().find(|(path, value)| is_now(path).is_ok_and(|now| now != *value))?;
        Some(format!("/proc/sys/{path} is not {value} any more"))
    }
}

/// Sets what is not as it must be. The error is one sentence; what only hurts is in `warnings`.
pub(super) fn settle(settings: &Settings, warnings: &mut Vec<String>) -> Result<Settled, String> {
    let mut settled = Settled::default();
    let mut needs = vec![TRACKED, NO_DEST, QUIESCENT, FORWARD];
    needs.push(need(REUSE, if is_before_5_9() { "0" } else { "1" }));
    if settings.strict_arp {
        needs.extend(STRICT_ARP);
    }
    for Need { path, value, required } in needs {
        if let Err(error) = ensure(path, value) {
            let text = format!("/proc/sys/{path} cannot be set to {value}: {error}");
            if required {
                return Err(text);
            }
            warnings.push(text);
        } else {
            settled.0.push((path, value));
        }
    }
    Ok(settled)
}

/// Read first: in a container the file is often read-only, and the setting right.
fn ensure(path: &str, value: &str) -> io::Result<()> {
    if is_now(path)? == value {
        return Ok(());
    }
    fs::write(format!("/proc/sys/{path}"), value)
}

fn is_now(path: &str) -> io::Result<String> {
    Ok(fs::read_to_string(format!("/proc/sys/{path}"))?.trim().to_owned())
}

fn is_before_5_9() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    is_before(&release, (5, 9))
}

fn is_before(release: &str, (major, minor): (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(has_major), Some(has_minor)) => (has_major, has_minor) < (major, minor),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        assert!(is_before("5.8.0-1-cloud-amd64", (5, 9)));
        assert!(is_before("4.19.0", (5, 9)));
        for release in ["5.9.0", "5.10.0-20", "6.1.0-30-cloud-amd64", "strange", ""] {
            assert!(!is_before(release, (5, 9)), "{release}");
        }
    }
}
