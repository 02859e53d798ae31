// SPDX-License-Identifier: Apache-2.0

//! `portolan dump`: what the kernel holds.

use std::process::ExitCode;

use dataplane::{Listed, ListedChain, ListedSet, Mode, leftovers};
use serde_json::{Value, json};

use super::{output::Output, print, say, usage_error};
use crate::{app, config::check::Checked, flags::Options, host};

/// Prints the dataplane's own words: of the mode that is asked for, else of every mode that has something here.
pub fn run(args: &[String]) -> ExitCode {
    let (output, rest) = match Output::split(args) {
        Ok(split) => split,
        Err(error) => return usage_error(&error),
    };
    let options = match Options::parse(&rest) {
        Ok((options, positional)) if positional.is_empty() => options,
        Ok((_, positional)) => return usage_error(&format!("dump takes no arguments, got {positional:?}")),
        Err(error) => return usage_error(&error),
    };
    let Found { parts, failed } = match dump(options, output) {
        Ok(found) => found,
        Err(error) => return say(&error),
    };
    let printed = print(&match output {
        Output::Table => text(&parts),
        Output::Json => {
            format!("{:#}\n", json!({ "modes": parts.iter().map(Part::json).collect::<Vec<_>>() }))
        }
    });
    match failed.as_slice() {
        [] => printed,
        failed => say(&failed.join("; ")),
    }
}

/// What it does.
pub fn help() -> String {
    "Usage: portolan dump [-o table|json] [--proxy-mode MODE] [flags of portolan]    (with CAP_NET_ADMIN)\n\n\
     Prints what the kernel holds of ours in this network namespace: of the mode that is named, by a flag or by --config,\n\
     else of every mode that has left something, or that there is nothing. Changes nothing, and needs no proxy that runs.\n\
     Ends with 1 if something is there that could not be read.\n"
        .to_owned()
}

/// What each mode holds, and where that could not be read.
struct Found {
    parts: Vec<Part>,
    failed: Vec<String>,
}

/// What one mode holds.
struct Part {
    mode: Mode,
    text: String,
    tables: Vec<Listed>,
}

impl Part {
    fn json(&self) -> Value {
        let set = |set: &ListedSet| {
            let element = |(key, value): &(String, Option<String>)| json!({ "key": key, "value": value });
            json!({ "name": set.name, "elements": set.elements.iter().map(element).collect::<Vec<_>>() })
        };
        let chain =
            |chain: &ListedChain| json!({ "name": chain.name, "base": chain.base, "rules": chain.rules });
        let table = |listed: &Listed| {
            json!({
                "family": listed.family,
                "table": listed.table,
                "sets": listed.sets.iter().map(set).collect::<Vec<_>>(),
                "chains": listed.chains.iter().map(chain).collect::<Vec<_>>(),
            })
        };
        json!({
            "mode": self.mode.to_string(),
            "text": self.text,
            "tables": self.tables.iter().map(table).collect::<Vec<_>>(),
        })
    }
}

/// Of several modes each has its name above it.
fn text(parts: &[Part]) -> String {
    let heading = |part: &Part| match parts.len() {
        1 => String::new(),
        _ => format!("# mode {}\n", part.mode),
    };
    parts.iter().map(|part| heading(part) + &part.text).collect()
}

fn dump(mut options: Options, output: Output) -> Result<Found, String> {
    host::privileged()?;
    options.complete()?;
    let checked = options.checked()?;
    let (asked, modes) = match options.has_mode() {
        true => (vec![checked.mode], vec![checked.mode]),
        false => (Mode::ALL.to_vec(), leftovers::present().map_err(|error| error.to_string())?),
    };
    let mut found = Found { parts: Vec::new(), failed: Vec::new() };
    for mode in modes {
        match read(&Checked { mode, ..checked.clone() }, output) {
            Ok(part) if part.text.is_empty() => {}
            Ok(part) => found.parts.push(part),
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

fn read(checked: &Checked, output: Output) -> Result<Part, String> {
    let mode = checked.mode;
    let of = |checked: &Checked| {
        let mut dataplane = app::open(checked, host::families())?;
        let text = dataplane.dump().map_err(|error| error.to_string())?;
        // To read a large table takes a while, and people do not look at this.
        let tables = match output {
            Output::Table => Ok(Vec::new()),
            Output::Json => dataplane.listed().map_err(|error| error.to_string()),
        };
        Ok(Part { mode, text, tables: tables? })
    };
    if mode != Mode::Userspace {
        return of(checked);
    }
    // It has two ways to listen, and a kernel that cannot do the one may well hold the other.
    let each = [false, true].map(|bind| {
        let mut checked = checked.clone();
        checked.userspace.bind = bind;
        of(&checked)
    });
    match each {
        [Ok(steered), Ok(bound)] => Ok(Part { text: steered.text + &bound.text, ..bound }),
        [Ok(part), Err(_)] | [Err(_), Ok(part)] if !part.text.is_empty() => Ok(part),
        [Err(reason), _] | [_, Err(reason)] => Err(reason),
    }
}
