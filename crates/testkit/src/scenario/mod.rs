// SPDX-License-Identifier: Apache-2.0

//! One behaviour, one file: objects, steps, packets and what must become of them.
//!
//! The format is described in `tests/README.md`. A scenario knows nothing of how packets are judged.

mod config;
mod packet;
#[cfg(test)]
mod tests;

use std::{
    fmt, fs,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

pub use config::Config;
pub use packet::{Entry, Expect, Line, Probe, SourceSeen, Stick, Target};

use crate::{
    image,
    txtar::{Archive, Section},
};

/// Which text of a scenario is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// As it stands in the file; IPv4 for most.
    Written,
    /// The mechanical IPv6 image of it.
    Image,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Variant::Written => "as written",
            Variant::Image => "as IPv6",
        })
    }
}

/// Why a scenario cannot be used, or a judge does not agree with it: where, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    pub file: String,
    pub line: usize,
    pub text: String,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.text)
    }
}

/// A scenario file.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: String,
    pub path: PathBuf,
    /// Read whole and only once, so that a run does not see half of an edit.
    archive: Archive,
    directives: Directives,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Directives {
    as_written_only: bool,
    /// Why real packets cannot show it, if they cannot.
    no_kernel: Option<String>,
}

/// A scenario in one variant, ready to run.
#[derive(Clone, Debug)]
pub struct Script {
    pub file: String,
    pub variant: Variant,
    pub config: Config,
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug)]
pub struct Step {
    /// The first line of the section's text.
    pub line: usize,
    pub action: Action,
}

#[derive(Clone, Debug)]
pub enum Action {
    /// Kubernetes objects, added or changed.
    Apply {
        name: String,
        yaml: String,
    },
    /// Kubernetes objects that go.
    Delete(Vec<Removal>),
    /// The extra addresses node-a has from now on.
    Addresses(Vec<IpAddr>),
    Packets(Vec<Line>),
    Wait(Duration),
    /// The plan must print as this.
    Plan {
        section: usize,
        golden: String,
    },
}

/// A line of a `delete` section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removal {
    pub kind: String,
    /// Empty for kinds without a namespace.
    pub namespace: String,
    pub name: String,
}

impl Scenario {
    /// All scenarios of a folder, by name.
    pub fn load_all(folder: &Path) -> Result<Vec<Scenario>, Complaint> {
        let io = |path: &Path, error: std::io::Error| Complaint {
            file: path.display().to_string(),
            line: 1,
            text: error.to_string(),
        };
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder).map_err(|error| io(folder, error))? {
            let path = entry.map_err(|error| io(folder, error))?.path();
            if path.extension().is_some_and(|extension| extension == "txtar") {
                paths.push(path);
            }
        }
        paths.sort();
        paths
            .iter()
            .map(|path| Scenario::parse(path, &fs::read_to_string(path).map_err(|error| io(path, error))?))
            .collect()
    }

    /// Refuses a scenario with an unknown directive, or without a comment that says what it shows.
    pub fn parse(path: &Path, text: &str) -> Result<Scenario, Complaint> {
        let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        let archive = Archive::parse(text);
        let complain = |line, text| Complaint { file: file_name(&name), line, text };
        let directives = Directives::parse(&archive.comment).map_err(|(line, text)| complain(line, text))?;
        if archive.comment.trim().is_empty() {
            return Err(complain(1, "a scenario begins with what it shows, and why it is so".to_owned()));
        }
        Ok(Scenario { name, path: path.to_owned(), archive, directives })
    }

    /// The variants in which it is to be run.
    pub fn variants(&self) -> &'static [Variant] {
        if self.directives.as_written_only {
            &[Variant::Written]
        } else {
            &[Variant::Written, Variant::Image]
        }
    }

    /// Why it is not for the kernel judge, if so.
    pub fn no_kernel(&self) -> Option<&str> {
        self.directives.no_kernel.as_deref()
    }

    /// The steps of one variant.
    pub fn script(&self, variant: Variant) -> Result<Script, Complaint> {
        let file = file_name(&self.name);
        let mut script = Script { file: file.clone(), variant, config: Config::default(), steps: Vec::new() };
        for (index, section) in self.archive.sections.iter().enumerate() {
            let section = match variant {
                Variant::Written => section.clone(),
                Variant::Image => translate(section),
            };
            script.take(index, &section).map_err(|(line, text)| Complaint {
                file: file.clone(),
                line,
                text,
            })?;
        }
        Ok(script)
    }

    /// The file with other text in some sections; for goldens.
    pub fn with_sections(&self, texts: &[(usize, String)]) -> String {
        let mut archive = self.archive.clone();
        for (section, text) in texts {
            archive.sections[*section].text.clone_from(text);
        }
        archive.render()
    }
}

impl Script {
    /// A complaint about a line of this script; says which variant was run if the line alone does not.
    pub fn complaint(&self, line: usize, text: String) -> Complaint {
        let text = match self.variant {
            Variant::Written => text,
            Variant::Image => format!("{text} ({})", self.variant),
        };
        Complaint { file: self.file.clone(), line, text }
    }

    fn take(&mut self, index: usize, section: &Section) -> Result<(), (usize, String)> {
        let (word, argument) = section.name.split_once(' ').unwrap_or((&section.name, ""));
        let at_heading = |text: String| (section.line - 1, text);
        let action = match (word, argument) {
            ("config", "") if self.steps.is_empty() => {
                self.config = Config::parse(section)?;
                return Ok(());
            }
            ("config", "") => return Err(at_heading("config comes before all steps".to_owned())),
            ("apply", name) if !name.is_empty() => {
                Action::Apply { name: name.to_owned(), yaml: section.text.clone() }
            }
            ("delete", "") => Action::Delete(lines(section).map(removal).collect::<Result<_, _>>()?),
            ("addresses", "") => Action::Addresses(lines(section).map(address).collect::<Result<_, _>>()?),
            ("packets", "") => Action::Packets(lines(section).map(Line::parse).collect::<Result<_, _>>()?),
            ("wait", text) => Action::Wait(wait(text).map_err(at_heading)?),
            ("plan", "") => Action::Plan { section: index, golden: section.text.clone() },
            _ => return Err(at_heading(format!("no such step: {}", section.name))),
        };
        self.steps.push(Step { line: section.line, action });
        Ok(())
    }
}

impl Directives {
    fn parse(comment: &str) -> Result<Directives, (usize, String)> {
        let mut directives = Directives::default();
        for (index, line) in comment.lines().enumerate() {
            match line.split_once(": ") {
                Some(("families", "as-written")) => directives.as_written_only = true,
                Some(("no-kernel", reason)) => directives.no_kernel = Some(reason.trim().to_owned()),
                Some(("families", other)) => {
                    return Err((index + 1, format!("families can only be as-written, not {other}")));
                }
                _ => {}
            }
        }
        Ok(directives)
    }
}

fn file_name(name: &str) -> String {
    format!("tests/scenarios/{name}.txtar")
}

/// Goldens are kept for the written variant only.
fn translate(section: &Section) -> Section {
    let text = match section.name.split(' ').next() {
        Some("apply") => image::of_yaml(&section.text),
        Some("packets") => image::of_packets(&section.text),
        _ => image::of_plain(&section.text),
    };
    Section { text, ..section.clone() }
}

/// The lines of a section that say something, with their number.
fn lines(section: &Section) -> impl Iterator<Item = (usize, &str)> {
    section.text.lines().enumerate().filter_map(|(index, line)| {
        let line = line.split_once('#').map_or(line, |(before, _)| before).trim();
        (!line.is_empty()).then_some((section.line + index, line))
    })
}

fn removal((number, line): (usize, &str)) -> Result<Removal, (usize, String)> {
    let (kind, name) = line
        .split_once(char::is_whitespace)
        .ok_or_else(|| (number, "a deletion is KIND NAMESPACE/NAME, or KIND NAME".to_owned()))?;
    let (namespace, name) = name.trim().split_once('/').unwrap_or(("", name.trim()));
    Ok(Removal { kind: kind.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() })
}

fn address((number, line): (usize, &str)) -> Result<IpAddr, (usize, String)> {
    line.parse().map_err(|_| (number, format!("not an address: {line}")))
}

fn wait(text: &str) -> Result<Duration, String> {
    let millis = text.strip_suffix("ms").map(str::parse);
    let seconds = text.strip_suffix('s').map(str::parse);
    match (millis, seconds) {
        (Some(Ok(millis)), _) => Ok(Duration::from_millis(millis)),
        (None, Some(Ok(seconds))) => Ok(Duration::from_secs(seconds)),
        _ => Err(format!("a wait is so many s or ms, not {text}")),
    }
}
