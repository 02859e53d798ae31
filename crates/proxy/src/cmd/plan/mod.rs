// SPDX-License-Identifier: Apache-2.0

//! `portolan plan`: what would be served, from files, offline. Touches no kernel and needs no privileges.
//!
//! - this file: the command
//! - [`json`]: the plan for programs; for people it prints itself

mod json;

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use model::{Plan, Update, World};
use source::{Problem, Problems};

use super::{output::Output, print, say, usage_error};
use crate::{
    app,
    flags::{Options, Source},
    host,
};

/// Prints the plan, and what was wrong with the files.
pub fn run(args: &[String]) -> ExitCode {
    let (output, rest) = match Output::split(args) {
        Ok(split) => split,
        Err(error) => return usage_error(&error),
    };
    let (mut options, positional) = match Options::parse(&rest) {
        Ok(parsed) => parsed,
        Err(error) => return usage_error(&error),
    };
    match &positional[..] {
        [] => {}
        [path] => options.source = Source::File(PathBuf::from(path)),
        _ => return usage_error(&format!("plan takes one file or folder, got {positional:?}")),
    }
    match plan(options) {
        Ok((plan, problems)) => {
            let printed = print(&match output {
                Output::Table => plan.to_string(),
                Output::Json => format!("{:#}\n", json::plan(&plan, &problems)),
            });
            // Whoever checks manifests by a script goes by this.
            if problems.is_empty() { printed } else { ExitCode::FAILURE }
        }
        Err(error) => say(&error),
    }
}

/// What it does.
pub fn help() -> String {
    "Usage: portolan plan PATH [-o table|json] [flags of portolan]\n\n\
     Prints what would be served from a file or folder of manifests: each frontend, and where it leads. Touches no kernel\n\
     and needs no privileges. Settings count as for the proxy: --config, --hostname-override, --cluster-cidr and so on.\n\
     Ends with 1 if a file or object had to be left out; each is named on stderr, and the rest is printed.\n"
        .to_owned()
}

/// The plan of what could be read, and what could not, which has been told.
fn plan(mut options: Options) -> Result<(Plan, Vec<Problem>), String> {
    let Source::File(path) = options.source.clone() else {
        return Err("plan works from files: name a file or folder, or --source file:PATH".to_owned());
    };
    let notices = options.complete()?;
    notices.iter().for_each(|notice| eprintln!("{notice}"));
    let checked = options.checked()?;
    let node_name = host::node_name(&options.config.hostname_override)?;
    let settings = app::settings(&options.config, &checked, Arc::clone(&node_name), host::families());
    let problems = Arc::new(Problems::new());
    let updates = source::file::load(&path, &node_name, &problems)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let problems = problems.recent();
    problems.iter().for_each(|problem| eprintln!("{problem}"));
    let mut world = World::new(settings);
    let addresses = host::addresses().unwrap_or_default();
    // A Node object that has an address has the better word, and comes after.
    world.apply(Update::Node(host::stand_in(&node_name, &addresses)));
    world.apply(Update::HostAddresses(addresses));
    updates.into_iter().for_each(|update| world.apply(update));
    Ok((Plan::from_world(&world), problems))
}
