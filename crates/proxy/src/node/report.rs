// SPDX-License-Identifier: Apache-2.0

//! [`Finding`]s for those who read logs, those who read tables, and programs.

use serde_json::json;

use super::{
    facts::Facts,
    judge::{Finding, Rank, judge},
};
use crate::{
    config::{Config, check::Checked, own::PortRange},
    table::columns,
};

/// One line for each, the worst first.
pub fn log(findings: &[Finding]) {
    for Finding { rank, name, says, remedy } in findings {
        match rank {
            Rank::Breaks | Rank::Risk => tracing::warn!(%rank, name, remedy, "on this node {says}"),
            Rank::Note => tracing::info!(%rank, name, remedy, "on this node {says}"),
        }
    }
}

/// A table with the remedy below each.
pub fn text(findings: &[Finding]) -> String {
    if findings.is_empty() {
        return "Nothing on this node gets in the way.\n".to_owned();
    }
    let row = |Finding { rank, name, says, remedy }: &Finding| {
        [
            [rank.to_string(), (*name).to_owned(), says.clone()],
            [String::new(), String::new(), format!("-> {remedy}")],
        ]
    };
    let rows: Vec<[String; 3]> = findings.iter().flat_map(row).collect();
    columns(["RANK", "NAME", "FINDING"], &rows)
}

/// An object, so that there is room for more.
pub fn json(findings: &[Finding]) -> String {
    format!("{:#}\n", json!({ "findings": findings }))
}

/// Looks at this node, in the network namespace of this thread.
pub fn findings(config: &Config, checked: &Checked, node_ports: PortRange) -> Vec<Finding> {
    judge(&Facts::gather(config, checked), node_ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_for_people_and_for_programs() {
        let found =
            Finding { rank: Rank::Risk, name: "x-y", says: "it is so".into(), remedy: "Do this.".into() };
        assert_eq!(
            text(std::slice::from_ref(&found)),
            "RANK  NAME  FINDING\nrisk  x-y   it is so\n            -> Do this.\n"
        );
        let value: serde_json::Value = serde_json::from_str(&json(&[found])).expect("JSON");
        assert_eq!(value["findings"][0]["rank"], "risk");
        assert_eq!(value["findings"][0]["remedy"], "Do this.");
        assert!(text(&[]).starts_with("Nothing"));
    }
}
