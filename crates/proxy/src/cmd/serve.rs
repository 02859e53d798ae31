// SPDX-License-Identifier: Apache-2.0

//! The proxy itself, until a signal.

use crate::{
    app::{self, Proxy, Setup},
    config::check::Checked,
    flags::Options,
    host,
};

/// Returns when a signal asks for it, with everything left in the kernel; or with the reason it cannot go on.
pub fn run(options: Options, checked: Checked) -> Result<(), String> {
    panics_are_logged();
    adjust_oom_score(options.config.oom_score_adj.unwrap_or_default());
    let Options { config, source, master, init_only, .. } = options;
    if init_only {
        app::open(&checked, host::families())?;
        tracing::info!("this node can be served; nothing else needs to be done with full privileges");
        return Ok(());
    }
    Proxy::start(Setup { config, checked, source, master, netns: None })?.wait()
}

/// A panic on any thread becomes one log line; the threads that must not end catch theirs.
fn panics_are_logged() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("no message");
        tracing::error!(place, text, "panic");
    }));
}

/// Failing to is no reason not to serve.
fn adjust_oom_score(score: i32) {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", score.to_string()) {
        tracing::warn!(score, %error, "cannot set oom_score_adj");
    }
}
