// SPDX-License-Identifier: Apache-2.0

//! The proxy itself, until a signal.

use crate::{
    app::{self, Proxy, Setup},
    config::{Config, check::Checked},
    flags::Options,
    host,
    live::{self, Occasion},
    reload::Origin,
};

/// Returns when a signal asks for it, with everything left in the kernel; or with the reason it cannot go on.
/// `origin` is the command line alone, to be read again with the files when they change.
pub fn run(origin: Origin, options: Options, checked: Checked) -> Result<(), String> {
    panics_are_logged();
    host::adjust_oom_score(options.config.oom_score_adj.unwrap_or_default());
    if options.init_only {
        return init(&options.config, &checked);
    }
    let flags = options.listing();
    let Options { config, source, master, .. } = options.clone();
    let proxy = Proxy::start(Setup { config, checked, source, master, flags, netns: None })?;
    proxy.follow(origin, options);
    proxy.wait()
}

/// What needs full privileges. Here a refusal is an error: it is all there is to do.
fn init(config: &Config, checked: &Checked) -> Result<(), String> {
    app::open(checked, host::families())?;
    let refused: Vec<String> =
        live::settle(config, checked, Occasion::Beforehand).iter().map(ToString::to_string).collect();
    if !refused.is_empty() {
        return Err(format!("this node is not prepared: {}", refused.join("; ")));
    }
    tracing::info!("this node is prepared; from now on CAP_NET_ADMIN is enough");
    Ok(())
}

/// A panic on any thread becomes one log line; the threads that must not end catch theirs.
fn panics_are_logged() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("no message");
        tracing::error!(place, text, "panic");
    }));
}
