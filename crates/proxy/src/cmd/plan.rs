// SPDX-License-Identifier: Apache-2.0

//! `portolan plan`: what would be served, from files, offline. Touches no kernel and needs no privileges.

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use model::{Plan, Update, World};
use source::Problems;

use super::{print, say, usage_error};
use crate::{
    app,
    flags::{Options, Source},
    host,
};

/// Prints the plan, and what was wrong with the files.
pub fn run(args: &[String]) -> ExitCode {
    let (mut options, positional) = match Options::parse(args) {
        Ok(parsed) => parsed,
        Err(error) => return usage_error(&error),
    };
    match &positional[..] {
        [] => {}
        [path] => options.source = Source::File(PathBuf::from(path)),
        _ => return usage_error(&format!("plan takes one file or folder, got {positional:?}")),
    }
    match plan(options) {
        Ok(text) => {
            print(&text);
            ExitCode::SUCCESS
        }
        Err(error) => say(&error),
    }
}

fn plan(mut options: Options) -> Result<String, String> {
    let Source::File(path) = options.source.clone() else {
        return Err("plan works from files: name a file or folder, or --source file:PATH".to_owned());
    };
    let notices = options.complete()?;
    notices.iter().for_each(|notice| eprintln!("{notice}"));
    let checked = options.checked()?;
    let node_name = host::node_name(&options.config.hostname_override)?;
    let settings = app::settings(&options.config, &checked, Arc::clone(&node_name), host::families());
    let problems = Arc::new(Problems::new());
    let updates = source::file::load(&path, &node_name, &problems).map_err(|error| error.to_string())?;
    problems.recent().iter().for_each(|problem| eprintln!("{problem}"));
    let mut world = World::new(settings);
    let addresses = host::addresses().unwrap_or_default();
    // A Node object that has an address has the better word, and comes after.
    world.apply(Update::Node(host::stand_in(&node_name, &addresses)));
    world.apply(Update::HostAddresses(addresses));
    updates.into_iter().for_each(|update| world.apply(update));
    Ok(Plan::from_world(&world).to_string())
}
