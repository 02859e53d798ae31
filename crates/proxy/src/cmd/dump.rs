// SPDX-License-Identifier: Apache-2.0

//! `portolan dump`: what the kernel holds.

use std::process::ExitCode;

use super::{print, say, usage_error};
use crate::{app, flags::Options, host};

/// Prints the dataplane's own words.
pub fn run(args: &[String]) -> ExitCode {
    let options = match Options::parse(args) {
        Ok((options, positional)) if positional.is_empty() => options,
        Ok((_, positional)) => return usage_error(&format!("dump takes no arguments, got {positional:?}")),
        Err(error) => return usage_error(&error),
    };
    match dump(options) {
        Ok(text) => {
            print(&text);
            ExitCode::SUCCESS
        }
        Err(error) => say(&error),
    }
}

fn dump(mut options: Options) -> Result<String, String> {
    options.complete()?;
    let checked = options.checked()?;
    let mut dataplane = app::open(&checked, host::families())?;
    dataplane.dump().map_err(|error| error.to_string())
}
