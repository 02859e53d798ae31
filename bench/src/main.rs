// SPDX-License-Identifier: Apache-2.0

#![forbid(unsafe_code)]

use std::{fs, net::IpAddr, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use bench::{
    objects::{Objects, Size},
    report, run,
    store::Files,
};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Measures Portolan, and kube-proxy beside it")]
struct Arguments {
    #[command(subcommand)]
    command: What,
}

#[derive(Subcommand)]
enum What {
    /// Measure, print a table, and keep the results
    #[command(args_override_self = true)]
    Run(Box<run::Options>),
    /// Print the table of a run that was kept
    Show {
        /// The folder of the run
        folder: PathBuf,
    },
    /// Compare builds of Portolan side by side: the processor time that a change takes
    Duel(bench::duel::Options),
    /// Measure the relay of the userspace mode beside HAProxy and nginx
    Relay(bench::relay::Options),
    /// Be the relay that is measured
    #[command(hide = true)]
    RelayServe {
        /// Connections at once
        #[arg(long, default_value_t = 10_000)]
        connections: u32,
        /// Each is LISTEN=ENDPOINT
        pairs: Vec<String>,
    },
    /// Be the endpoint of that
    #[command(hide = true)]
    RelayEndpoint {
        /// Where to listen
        ip: IpAddr,
    },
    /// Write the manifests of one size into a folder
    Objects {
        #[arg(long, default_value = "100x10")]
        size: Size,
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    match perform(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("portolan-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(what: What) -> Result<()> {
    match what {
        What::Run(options) => run::run(&options),
        What::Show { folder } => {
            let path = folder.join(run::RESULTS);
            let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            print!("{}", report::text(&serde_json::from_str(&text)?));
            Ok(())
        }
        What::Duel(options) => bench::duel::run(&options),
        What::Relay(options) => bench::relay::run(&options),
        What::RelayServe { connections, pairs } => bench::relay::serve(&pairs, connections),
        What::RelayEndpoint { ip } => bench::relay::endpoint(ip),
        What::Objects { size, folder } => Files::new(&folder)?.fill(&Objects::new(size)),
    }
}
