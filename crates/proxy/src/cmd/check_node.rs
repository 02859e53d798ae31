// SPDX-License-Identifier: Apache-2.0

//! `portolan check-node`: what on this node gets in the way of Services, with what to do. Changes nothing.

use std::process::ExitCode;

use super::{output::Output, print, say, usage_error};
use crate::{
    flags::Options,
    node::{judge::Rank, report},
};

/// Ends with success unless something breaks connections.
pub fn run(args: &[String]) -> ExitCode {
    let (output, rest) = match Output::split(args) {
        Ok(split) => split,
        Err(error) => return usage_error(&error),
    };
    let mut options = match Options::parse(&rest) {
        Ok((options, positional)) if positional.is_empty() => options,
        Ok((_, words)) => return usage_error(&format!("check-node takes no arguments, got {words:?}")),
        Err(error) => return usage_error(&error),
    };
    let checked = match options.complete().and_then(|_| options.checked()) {
        Ok(checked) => checked,
        Err(error) => return say(&error),
    };
    let findings = report::findings(&options.config, &checked, options.node_port_range);
    let printed = print(&match output {
        Output::Table => report::text(&findings),
        Output::Json => report::json(&findings),
    });
    match findings.iter().any(|finding| finding.rank == Rank::Breaks) {
        true => ExitCode::FAILURE,
        false => printed,
    }
}

/// What it does.
pub fn help() -> String {
    "Usage: portolan check-node [-o table|json] [flags of portolan]\n\n\
     Prints what on this node gets in the way of Services, the worst first, and what to do about it. Changes nothing.\n\
     Ends with 1 if connections fail because of it.\n"
        .to_owned()
}
