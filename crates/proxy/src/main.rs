// SPDX-License-Identifier: Apache-2.0

//! The program. Everything is in the library beside it; see `proxy::cmd`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    proxy::cmd::run(&args)
}
