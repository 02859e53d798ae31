// SPDX-License-Identifier: Apache-2.0

//! The commands. Without one, the proxy runs: `portolan --kubeconfig ...` is what stands in a manifest.

pub mod check_config;
pub mod check_node;
pub mod cleanup;
pub mod demo;
pub mod dump;
mod output;
pub mod plan;
pub mod serve;
pub mod withdraw;

use std::{
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
};

use crate::{
    config::{Config, check::Checked},
    flags::{self, Options, parse::nearest, table},
    log,
    reload::Origin,
};

/// A command beside the proxy itself.
struct Command {
    name: &'static str,
    run: fn(&[String]) -> ExitCode,
    help: fn() -> String,
}

const COMMANDS: [Command; 6] = [
    Command { name: "plan", run: plan::run, help: plan::help },
    Command { name: "dump", run: dump::run, help: dump::help },
    Command { name: "check-config", run: check_config::run, help: check_config::help },
    Command { name: "check-node", run: check_node::run, help: check_node::help },
    Command { name: "withdraw", run: withdraw::run, help: withdraw::help },
    Command { name: "demo", run: demo::run, help: demo::help },
];

/// Runs what the command line asks for.
pub fn run(args: &[String]) -> ExitCode {
    let Some((name, rest)) = args.split_first() else { return daemon(args) };
    match (COMMANDS.iter().find(|command| command.name == name), name.as_str()) {
        // Before anything else is read: whoever asks what it does does not want it done.
        (Some(command), _) if asks_for_help(rest) => print(&(command.help)()),
        (Some(command), _) => (command.run)(rest),
        (None, "help") => help(rest),
        (None, "version") if rest.is_empty() => print_version("true"),
        _ => daemon(args),
    }
}

fn asks_for_help(args: &[String]) -> bool {
    args.iter().take_while(|word| *word != "--").any(|word| word == "--help" || word == "-h")
}

/// Of a command, or of the proxy.
fn help(args: &[String]) -> ExitCode {
    let Some(name) = args.first() else { return print(&flags::help()) };
    match COMMANDS.iter().find(|command| command.name == name) {
        Some(command) => print(&(command.help)()),
        None => usage_error(&format!("there is no command {name:?}{}", meant(name))),
    }
}

/// What somebody meant who wrote a word where a command or a flag stands, as far as that can be told.
fn meant(word: &str) -> String {
    let plain = word.replace('_', "-");
    if table::FLAGS.iter().any(|flag| flag.name == plain) {
        return format!(" (did you mean --{plain}?)");
    }
    if word == plain && COMMANDS.iter().any(|command| command.name == word) {
        return format!(" (a command comes first: portolan {word})");
    }
    let names = COMMANDS.iter().map(|command| command.name);
    nearest(names, &plain).map_or_else(String::new, |name| format!(" (did you mean {name}?)"))
}

/// The proxy and what kube-proxy's flags make of it.
fn daemon(args: &[String]) -> ExitCode {
    let (options, positional) = match Options::parse(args) {
        Ok(parsed) => parsed,
        Err(error) => return usage_error(&error),
    };
    if options.help {
        return print(&flags::help());
    }
    if let Some(version) = &options.version {
        return print_version(version);
    }
    if positional.iter().any(|word| !word.is_empty()) {
        let meant = positional.first().map(|word| meant(word)).unwrap_or_default();
        return usage_error(&format!("\"portolan\" does not take any arguments, got {positional:?}{meant}"));
    }
    let origin = Origin::of(options.clone());
    let (options, checked) = match prepare(options) {
        Ok(prepared) => prepared,
        Err(error) => return fail(&error),
    };
    let outcome = if let Some(path) = &options.write_config_to {
        write_config(&options.config, path)
    } else if options.cleanup {
        cleanup::run()
    } else {
        serve::run(origin, options, checked)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Completes the options with the configuration file, starts the log, and checks everything.
fn prepare(mut options: Options) -> Result<(Options, Checked), String> {
    for advice in options.deprecations() {
        eprintln!("{advice}");
    }
    let notices = options.complete().inspect_err(|_| log::init(&options.config.logging))?;
    log::init(&options.config.logging);
    if let Some(file) = &options.config_file {
        for notice in notices {
            tracing::warn!("{}: {notice}", file.display());
        }
    }
    if options.config.logging.verbosity >= 1 {
        for (name, value) in options.listing() {
            tracing::info!("FLAG: --{name}={value:?}");
        }
    }
    let checked = options.checked()?;
    for gate in options.config.feature_gates.iter().flat_map(crate::config::gates::outdated) {
        tracing::warn!(gate = gate.name, stage = gate.stage, "this feature gate will go away");
    }
    Ok((options, checked))
}

fn write_config(config: &Config, path: &Path) -> Result<(), String> {
    let failed = |error: String| format!("cannot write the configuration to {}: {error}", path.display());
    let text = serde_saphyr::to_string(config).map_err(|error| failed(error.to_string()))?;
    std::fs::write(path, text).map_err(|error| failed(error.to_string()))?;
    tracing::info!(path = %path.display(), "wrote the configuration");
    Ok(())
}

fn print_version(asked: &str) -> ExitCode {
    let version = env!("CARGO_PKG_VERSION");
    if asked == "raw" {
        print(&format!("portolan {version} ({}-{})\n", std::env::consts::OS, std::env::consts::ARCH))
    } else {
        print(&format!("Portolan v{version}\n"))
    }
}

/// To stdout; says what is in the way of it.
#[must_use = "what could not be written was not said"]
fn print(text: &str) -> ExitCode {
    match write(text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => say(&error),
    }
}

/// To stdout. Whoever reads it may stop reading; that is no error. Anything else is one sentence.
fn write(text: &str) -> Result<(), String> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("cannot write the output: {error}"))
        }
        _ => Ok(()),
    }
}

/// A command line that cannot be read: where to look it up, and what is wrong.
fn usage_error(error: &str) -> ExitCode {
    eprintln!("See 'portolan --help' for the flags.\nError: {error}");
    ExitCode::FAILURE
}

/// Something that went wrong once the log is there.
fn fail(error: &str) -> ExitCode {
    tracing::error!("{error}");
    ExitCode::FAILURE
}

/// The same for commands that are typed by people and have no log.
fn say(error: &str) -> ExitCode {
    eprintln!("Error: {error}");
    ExitCode::FAILURE
}
