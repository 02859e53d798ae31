// SPDX-License-Identifier: Apache-2.0

//! What went wrong with a tool, in one sentence, with what to do where that is known.

use std::{io, path::Path, time::Duration};

use super::{lock::Lock, name, run::Ended};

/// Why a tool did not do its work. The tables are as they were, or for an input with several tables, each is whole.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("there is no {tool} here: install the package iptables, version 1.8 or newer")]
    Missing { tool: String },
    #[error("{tool} could not be run: {error}")]
    Run { tool: String, error: io::Error },
    #[error("{tool} was not done after {limit:?} and was ended; the next attempt begins anew")]
    Slow { tool: String, limit: Duration },
    #[error(
        "the lock of the iptables tools, /run/xtables.lock, was not free for {waited:?}; it is held by {}",
        .holder.as_deref().unwrap_or("a process that cannot be seen from here")
    )]
    Locked { waited: Duration, holder: Option<String> },
    #[error("{tool} failed: {reason}{}{}", Tail(": ", line), Tail("; ", advice))]
    Refused {
        tool: String,
        /// The tool's own words.
        reason: String,
        /// The line of the input it stumbled over.
        line: Option<String>,
        /// What to install or load.
        advice: Option<String>,
    },
}

impl Failure {
    pub(super) fn start(tool: &Path, error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::NotFound => Failure::Missing { tool: name(tool) },
            _ => Failure::Run { tool: name(tool), error },
        }
    }
}

impl Ended {
    /// Did it do its work?
    pub(super) fn check(self, tool: &Path, input: Option<&str>) -> Result<(), Failure> {
        if self.status.success() {
            return Ok(());
        }
        if self.complaints.contains("holding the xtables lock") {
            return Err(Failure::Locked { waited: Duration::ZERO, holder: Lock::default().holder() });
        }
        let reason = match self.complaints.trim() {
            "" => self.status.to_string(),
            _ => reason(&self.complaints),
        };
        let line = input.and_then(|input| {
            let number = line_number(&self.complaints)?;
            input.lines().nth(number.checked_sub(1)?).map(str::to_owned)
        });
        let advice = advice(&self.complaints, &name(tool));
        Err(Failure::Refused { tool: name(tool), reason, line, advice })
    }
}

/// The tool's words on one line, without what it says each time.
fn reason(complaints: &str) -> String {
    let lines = complaints.lines().map(str::trim).filter(|line| {
        !line.is_empty() && !line.starts_with("Try `") && !line.starts_with("Error occurred at line")
    });
    lines.collect::<Vec<_>>().join(" ")
}

/// `line 3: RULE_APPEND failed`, `line 3 failed`, `Error occurred at line: 3`.
fn line_number(complaints: &str) -> Option<usize> {
    complaints.match_indices("line").find_map(|(at, word)| {
        let rest = complaints[at + word.len()..].trim_start_matches([':', ' ']);
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..digits].parse().ok()
    })
}

fn advice(complaints: &str, tool: &str) -> Option<String> {
    let quoted = |before: &str| {
        let rest = &complaints[complaints.find(before)? + before.len()..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        (end > 0).then(|| rest[..end].to_owned())
    };
    if let Some(name) = quoted("Couldn't load match `").or_else(|| quoted("Couldn't load target `")) {
        return Some(format!(
            "its extension {name} is missing (libxt_{name}.so): install the whole package iptables"
        ));
    }
    if let Some(name) = quoted("Extension ") {
        return Some(format!(
            "the kernel has no {name}: load it (modprobe xt_{name}), or use a kernel that has it"
        ));
    }
    if let Some(table) = quoted("can't initialize iptables table `")
        .or_else(|| quoted("can't initialize ip6tables table `"))
        .or_else(|| quoted("table `"))
    {
        let module = if tool.starts_with("ip6") { "ip6table" } else { "iptable" };
        return Some(format!("the kernel has no table {table}: load it (modprobe {module}_{table})"));
    }
    if complaints.contains("Permission denied") || complaints.contains("you must be root") {
        return Some("it needs the capabilities NET_ADMIN and NET_RAW".to_owned());
    }
    None
}

/// Something that may follow, after a separator.
struct Tail<'a>(&'static str, &'a Option<String>);

impl std::fmt::Display for Tail<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.1 {
            Some(text) => write!(f, "{}{text}", self.0),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_found_in_every_dialect() {
        for (complaints, line) in [
            (
                "iptables-nft-restore v1.8.9 (nf_tables): \nline 3: RULE_APPEND failed (Invalid argument)",
                Some(3),
            ),
            ("iptables-restore: line 14 failed", Some(14)),
            ("Couldn't load match `x':No such file\n\nError occurred at line: 7\nTry `iptables -h'", Some(7)),
            ("out of line", None),
            ("", None),
        ] {
            assert_eq!(line_number(complaints), line, "{complaints}");
        }
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        for (complaints, tool, words) in [
            (
                "iptables-restore v1.8.9 (legacy): Couldn't load match `recent':No such",
                "iptables-restore",
                "libxt_recent.so",
            ),
            ("Couldn't load target `MASQUERADE':No such", "iptables-restore", "extension MASQUERADE"),
            (
                "Warning: Extension statistic revision 0 not supported, missing kernel module?\n",
                "x",
                "modprobe xt_statistic",
            ),
            (
                "iptables v1.8.9 (legacy): can't initialize iptables table `nat': Table does not exist",
                "iptables-restore",
                "modprobe iptable_nat",
            ),
            (
                "ip6tables-restore: can't initialize ip6tables table `nat': Table does not exist",
                "ip6tables-legacy-restore",
                "modprobe ip6table_nat",
            ),
            ("Fatal: can't open lock file: Permission denied", "iptables-restore", "NET_ADMIN"),
        ] {
            let advice = advice(complaints, tool).unwrap_or_default();
            assert!(advice.contains(words), "{complaints}: {advice}");
        }
        assert_eq!(advice("line 3 failed", "iptables-restore"), None);
    }
}
