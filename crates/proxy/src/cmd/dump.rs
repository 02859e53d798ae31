// SPDX-License-Identifier: Apache-2.0

//! `portolan dump`: what the kernel holds.

use std::process::ExitCode;

use dataplane::{Mode, leftovers};

use super::{print, say, usage_error};
use crate::{app, config::check::Checked, flags::Options, host};

/// Prints the dataplane's own words: of the mode that is asked for, else of every mode that has something here.
pub fn run(args: &[String]) -> ExitCode {
    let options = match Options::parse(args) {
        Ok((options, positional)) if positional.is_empty() => options,
        Ok((_, positional)) => return usage_error(&format!("dump takes no arguments, got {positional:?}")),
        Err(error) => return usage_error(&error),
    };
    let Found { parts, failed } = match dump(options) {
        Ok(found) => found,
        Err(error) => return say(&error),
    };
    let is_alone = parts.len() == 1;
    let heading = |mode: &Mode| if is_alone { String::new() } else { format!("# mode {mode}\n") };
    let text: String = parts.iter().map(|(mode, text)| heading(mode) + text).collect();
    let printed = print(&text);
    match failed.as_slice() {
        [] => printed,
        failed => say(&failed.join("; ")),
    }
}

/// What it does.
pub fn help() -> String {
    "Usage: portolan dump [--proxy-mode MODE] [flags of portolan]    (with CAP_NET_ADMIN)\n\n\
     Prints what the kernel holds of ours in this network namespace: of the mode that is named, by a flag or by --config,\n\
     else of every mode that has left something, or that there is nothing. Changes nothing, and needs no proxy that runs.\n\
     Ends with 1 if something is there that could not be read.\n"
        .to_owned()
}

/// What each mode holds, and where that could not be read.
struct Found {
    parts: Vec<(Mode, String)>,
    failed: Vec<String>,
}

fn dump(mut options: Options) -> Result<Found, String> {
    host::privileged()?;
    options.complete()?;
    let checked = options.checked()?;
    let (asked, modes) = match options.has_mode() {
        true => (vec![checked.mode], vec![checked.mode]),
        false => (Mode::ALL.to_vec(), leftovers::present().map_err(|error| error.to_string())?),
    };
    let mut found = Found { parts: Vec::new(), failed: Vec::new() };
    for mode in modes {
        match read(&Checked { mode, ..checked.clone() }) {
            Ok(text) if text.is_empty() => {}
            Ok(text) => found.parts.push((mode, text)),
            Err(reason) => found.failed.push(format!("cannot read what mode {mode} has here: {reason}")),
        }
    }
    if found.parts.is_empty() && found.failed.is_empty() {
        let asked: Vec<String> = asked.iter().map(Mode::to_string).collect();
        let modes = asked.join(", ");
        eprintln!("there is nothing of ours in this network namespace (looked for: {modes})");
    }
    Ok(found)
}

fn read(checked: &Checked) -> Result<String, String> {
    let of = |checked: &Checked| {
        let mut dataplane = app::open(checked, host::families())?;
        dataplane.dump().map_err(|error| error.to_string())
    };
    if checked.mode != Mode::Userspace {
        return of(checked);
    }
    // It has two ways to listen, and a kernel that cannot do the one may well hold the other.
    let each = [false, true].map(|bind| {
        let mut checked = checked.clone();
        checked.userspace.bind = bind;
        of(&checked)
    });
    match each {
        [Ok(steered), Ok(bound)] => Ok(steered + &bound),
        [Ok(text), Err(_)] | [Err(_), Ok(text)] if !text.is_empty() => Ok(text),
        [Err(reason), _] | [_, Err(reason)] => Err(reason),
    }
}
