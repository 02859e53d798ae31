// SPDX-License-Identifier: Apache-2.0

//! `portolan check-config`: everything wrong with a configuration file, what in it is on its way out, and what it
//! would change. Touches nothing.
//!
//! - this file: the command and what it prints
//! - [`baseline`]: what to compare with

mod baseline;

use std::{path::Path, process::ExitCode};

use serde_json::{Value, json};

use self::baseline::Baseline;
use super::{output::Output, print, say, usage_error};
use crate::{
    config::{
        Config,
        fields::{Difference, differences},
        own::{self, Own},
        review::{self, Remark, Severity},
    },
    flags::parse::{Flag, parse, usage},
    table::columns,
};

#[derive(Default)]
struct Options {
    output: Output,
    strict: bool,
    running: Option<String>,
}

const FLAGS: &[Flag<Options>] = &[
    Flag::new("output", "format", "table", "table or json.", |options: &mut Options, value| {
        options.output = Output::parse(value)?;
        Ok(())
    })
    .letter('o'),
    Flag::new(
        "running",
        "ip:port",
        "",
        "The metrics address of the proxy to compare with, if not the one in FILE.",
        |options: &mut Options, value| {
            options.running = Some(value.to_owned());
            Ok(())
        },
    ),
    Flag::boolean(
        "strict",
        "false",
        "Warnings and what is deprecated are errors.",
        |options: &mut Options, _| {
            options.strict = true;
            Ok(())
        },
    ),
    Flag::boolean("help", "false", "Print this text.", |_: &mut Options, _| Ok(())).letter('h'),
];

/// Ends with success if the program would start with this file.
pub fn run(args: &[String]) -> ExitCode {
    let mut options = Options::default();
    let positional = match parse(FLAGS, &mut options, args) {
        Ok(parsed) => parsed.positional,
        Err(error) => return usage_error(&error),
    };
    let (file, old) = match &positional[..] {
        [file] => (file, None),
        [file, old] => (file, Some(old.as_str())),
        _ => return usage_error("check-config takes a FILE, and at most one more to compare it with"),
    };
    match examine(Path::new(file), old.map(Path::new), &options) {
        Ok(report) => {
            let printed = print(&match options.output {
                Output::Table => report.text(),
                Output::Json => format!("{:#}\n", report.json()),
            });
            if report.is_good(options.strict) { printed } else { ExitCode::FAILURE }
        }
        Err(error) => say(&error),
    }
}

/// What it does.
pub fn help() -> String {
    format!(
        "Usage: portolan check-config FILE [OLD] [flags]\n\n\
         Says everything that is wrong with FILE (and with portolan.conf beside it), what in it is deprecated, and\n\
         what would change: compared with OLD, else with the proxy that runs now (ours or kube-proxy, asked at its\n\
         metrics address), else with the defaults. Ends with 1 if the proxy would not start with it.\n\nFlags:\n{}",
        usage(FLAGS)
    )
}

/// What there is to say.
struct Report {
    file: String,
    remarks: Vec<(String, Remark)>,
    /// What it was compared with, and the result, as far as the file could be understood.
    changes: Option<(Baseline, Vec<Difference>)>,
}

fn examine(file: &Path, old: Option<&Path>, options: &Options) -> Result<Report, String> {
    let text = read(file)?;
    if review::kind_of(&text).as_deref() == Some(own::KIND) {
        let remarks = label(file, review::own(&text).remarks);
        return Ok(Report { file: file.display().to_string(), remarks, changes: None });
    }
    let (own, mut remarks) = match Own::beside(file) {
        Some(path) => {
            let reviewed = review::own(&read(&path)?);
            (reviewed.read, label(&path, reviewed.remarks))
        }
        None => (None, Vec::new()),
    };
    let mode = own.as_ref().and_then(|own| own.mode.as_deref());
    let reviewed = review::config(&text, mode);
    remarks.splice(0..0, label(file, reviewed.remarks));
    let changes = match reviewed.read {
        Some(config) => Some(compare(&config, old, options)?),
        None => None,
    };
    Ok(Report { file: file.display().to_string(), remarks, changes })
}

fn compare(
    config: &Config,
    old: Option<&Path>,
    options: &Options,
) -> Result<(Baseline, Vec<Difference>), String> {
    let (baseline, was) = match (old, &options.running) {
        (Some(old), _) => baseline::file(old)?,
        (None, Some(address)) => baseline::running(address)?,
        // Nobody asked for it, so that nobody has to be told when it cannot be had.
        (None, None) => baseline::running(&config.metrics_bind_address)
            .unwrap_or_else(|_| baseline::defaults(&config.mode)),
    };
    Ok((baseline, differences(&was, config)))
}

fn label(file: &Path, remarks: Vec<Remark>) -> Vec<(String, Remark)> {
    remarks.into_iter().map(|remark| (file.display().to_string(), remark)).collect()
}

fn read(file: &Path) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))
}

impl Report {
    fn is_good(&self, strict: bool) -> bool {
        let bad = |severity| match severity {
            Severity::Error => true,
            Severity::Warning | Severity::Deprecated => strict,
            Severity::Unused => false,
        };
        !self.remarks.iter().any(|(_, remark)| bad(remark.severity))
    }

    fn text(&self) -> String {
        let verdict = if self.is_good(false) { "can be used" } else { "cannot be used" };
        let mut text = format!("{} {verdict}.\n", self.file);
        if !self.remarks.is_empty() {
            let rows: Vec<_> = self.remarks.iter().map(remark_row).collect();
            text.push_str(&format!("\n{}", columns(["WHERE", "SEVERITY", "FIELD", "REMARK"], &rows)));
        }
        let Some((baseline, changes)) = &self.changes else { return text };
        if changes.is_empty() {
            text.push_str(&format!("\nIt changes nothing compared with {baseline}.\n"));
            return text;
        }
        text.push_str(&format!("\nCompared with {baseline} it changes:\n\n"));
        let effect = |change: &Difference| match baseline {
            Baseline::Defaults => String::new(),
            _ => change.effect.to_string(),
        };
        let row = |change: &Difference| {
            [change.field.clone(), short(&change.was), short(&change.is), effect(change)]
        };
        let rows: Vec<_> = changes.iter().map(row).collect();
        let last = if *baseline == Baseline::Defaults { "" } else { "EFFECT" };
        text.push_str(&columns(["FIELD", "FROM", "TO", last], &rows));
        text
    }

    fn json(&self) -> Value {
        let remark = |(file, remark): &(String, Remark)| {
            let mut value = json!(remark);
            value["file"] = json!(file);
            value
        };
        json!({
            "file": self.file,
            "valid": self.is_good(false),
            "remarks": self.remarks.iter().map(remark).collect::<Vec<_>>(),
            "comparedWith": self.changes.as_ref().map(|(baseline, _)| baseline.to_string()),
            "changes": self.changes.as_ref().map(|(_, changes)| changes),
        })
    }
}

fn remark_row((file, remark): &(String, Remark)) -> [String; 4] {
    let name = Path::new(file).file_name().map_or(file.clone(), |name| name.to_string_lossy().into_owned());
    let place = if remark.line == 0 { name } else { format!("{name}:{}", remark.line) };
    [place, remark.severity.to_string(), remark.field.clone(), remark.says.clone()]
}

/// A value as it would stand in a file.
fn short(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if !text.is_empty() => text.clone(),
        other => other.to_string(),
    }
}
