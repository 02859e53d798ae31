// SPDX-License-Identifier: Apache-2.0

//! The relay of the userspace mode beside HAProxy in TCP mode, nginx stream, and no proxy at all, in one run.
//!
//! Everything is in one network namespace, on loopback, or as on a node: client, proxy and endpoint in one each, with a cable
//! between. The client is this process; endpoint and proxies are processes of their own, each proxy with two workers. The
//! rounds are interleaved, so that a busy moment of the machine hits all alike.

mod load;
mod subjects;

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;

use self::{
    load::{Endpoint, bulk, idle, short},
    subjects::{Subject, start_all},
};
use crate::{
    ground::{Ground, NODE_TO_CLIENT, Namespace, SINK},
    machine::Machine,
};

const CONGESTION: &str = "ipv4/tcp_congestion_control";

/// What to measure.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Rounds; the median is shown
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Connections at once, for bulk and for short ones
    #[arg(long, default_value_t = 4)]
    streams: usize,
    /// Idle connections
    #[arg(long, default_value_t = 10_000)]
    idle: usize,
    /// Client, proxy and endpoint in network namespaces of their own, as on a node; else all on one loopback
    #[arg(long)]
    routed: bool,
    /// With --routed: cables that carry so many gigabits a second, as a node has them; else as many as the processors can
    #[arg(long, requires = "routed")]
    link_gbit: Option<u32>,
    /// Congestion control of everybody, such as `reno`; else that of the machine. One that paces, as `bbr`, costs much
    #[arg(long)]
    congestion: Option<String>,
    /// Keep the table in this file too
    #[arg(long)]
    keep: Option<PathBuf>,
}

/// What was measured of one subject.
#[derive(Debug, Default)]
struct Figures {
    gigabytes_per_second: Vec<f64>,
    cpu_per_gigabyte: Vec<f64>,
    ends_per_gigabyte: Vec<f64>,
    connections_per_second: Vec<f64>,
    cpu_per_thousand: Vec<f64>,
    idle_mib: Option<f64>,
}

/// Where everybody is.
struct Places {
    client: Namespace,
    node: Namespace,
    endpoint: Namespace,
    /// Where proxies listen.
    node_ip: IpAddr,
    endpoint_ip: IpAddr,
}

impl Places {
    fn on_loopback() -> Result<Places> {
        let one = Namespace::new()?;
        let ip = Ipv4Addr::LOCALHOST.into();
        Ok(Places { client: one.clone(), node: one.clone(), endpoint: one, node_ip: ip, endpoint_ip: ip })
    }

    fn routed(link_gbit: Option<u32>) -> Result<Places> {
        let ground = Ground::new(None)?;
        link_gbit.map_or(Ok(()), |gbit| ground.limit(gbit))?;
        let (client, node, endpoint) = (ground.client.clone(), ground.node.clone(), ground.sink.clone());
        Ok(Places { client, node, endpoint, node_ip: NODE_TO_CLIENT.into(), endpoint_ip: SINK.into() })
    }

    fn all(&self) -> [&Namespace; 3] {
        [&self.client, &self.node, &self.endpoint]
    }

    /// Short connections use up the ports of one address quickly.
    fn have_many_ports(&self) -> Result<()> {
        for namespace in [&self.client, &self.node] {
            namespace.sysctl("ipv4/ip_local_port_range", "1024 65535")?;
            namespace.sysctl("ipv4/tcp_tw_reuse", "1")?;
        }
        Ok(())
    }
}

/// Measures, and prints a table.
pub fn run(options: &Options) -> Result<()> {
    let descriptors = ::relay::relay::descriptors(1 << 20);
    let places = if options.routed { Places::routed(options.link_gbit)? } else { Places::on_loopback()? };
    places.have_many_ports()?;
    if let Some(congestion) = &options.congestion {
        places.all().into_iter().try_for_each(|place| place.sysctl(CONGESTION, congestion))?;
    }
    let text = places.node.run(|| measure(options, &places, descriptors))??;
    print!("{text}");
    match &options.keep {
        Some(path) => fs::write(path, text).with_context(|| format!("writing {}", path.display())),
        None => Ok(()),
    }
}

/// So many connections at most that a proxy has descriptors for both ends.
fn possible(idle: usize, descriptors: usize) -> usize {
    idle.min(descriptors.saturating_sub(subjects::SPARE) / 2)
}

fn measure(options: &Options, places: &Places, descriptors: usize) -> Result<String> {
    let options = &Options { idle: possible(options.idle, descriptors), ..options.clone() };
    let endpoint = Endpoint::start(places)?;
    let subjects = start_all((places.node_ip, &endpoint), options.idle)?;
    let mut figures: Vec<Figures> = subjects.iter().map(|_| Figures::default()).collect();
    let time = Duration::from_secs(options.seconds);
    for round in 1..=options.rounds {
        for (subject, figures) in subjects.iter().zip(&mut figures) {
            eprintln!("round {round}: {}", subject.name);
            let (before, ends_before) = (subject.cpu()?, cpu_of_ends(&endpoint)?);
            let bytes = bulk(places, subject.bulk, options.streams, time)?;
            let gigabytes = bytes as f64 / 1e9;
            figures.ends_per_gigabyte.push((cpu_of_ends(&endpoint)? - ends_before) / gigabytes);
            figures.gigabytes_per_second.push(gigabytes / time.as_secs_f64());
            figures.cpu_per_gigabyte.push((subject.cpu()? - before) / gigabytes);
            let before = subject.cpu()?;
            let count = short(places, subject.short, options.streams, time)?;
            figures.connections_per_second.push(count as f64 / time.as_secs_f64());
            figures.cpu_per_thousand.push((subject.cpu()? - before) / (count as f64 / 1e3));
        }
    }
    for (subject, figures) in subjects.iter().zip(&mut figures).filter(|(subject, _)| subject.child.is_some())
    {
        eprintln!("{} idle connections: {}", options.idle, subject.name);
        let kept = places.client.run(|| idle(subject.short, options.idle))??;
        std::thread::sleep(Duration::from_secs(2));
        figures.idle_mib = Some(subject.resident_mib()?);
        drop(kept);
    }
    let congestion = fs::read_to_string(format!("/proc/sys/net/{CONGESTION}")).unwrap_or_default();
    Ok(table((options, congestion.trim()), &subjects, &figures))
}

/// Processor time of client and endpoint, in seconds.
fn cpu_of_ends(endpoint: &Endpoint) -> Result<f64> {
    Ok(subjects::cpu(std::process::id())? + subjects::cpu(endpoint.process())?)
}

fn table((options, congestion): (&Options, &str), subjects: &[Subject], figures: &[Figures]) -> String {
    let machine = Machine::this();
    let cables = options.link_gbit.map_or(String::new(), |gbit| format!(", cables of {gbit} Gbit/s"));
    let mut text = format!(
        "Relay, {}{cables}, {congestion}: {} rounds of {} s, {} streams; {} cores, {}, Linux {}, load {:.1}\n\n",
        if options.routed { "client, proxy and endpoint in a namespace each" } else { "all on one loopback" },
        options.rounds,
        options.seconds,
        options.streams,
        machine.cores,
        machine.processor,
        machine.kernel,
        machine.load.one_minute
    );
    let idle = format!("{} idle, resident MiB", options.idle);
    let _ = writeln!(
        text,
        "{:<24}{:>10}{:>14}{:>18}{:>16}{:>20}{:>28}",
        "", "GB/s", "CPU s/GB", "ends' CPU s/GB", "connections/s", "CPU s/1,000 conn.", idle
    );
    for (subject, figures) in subjects.iter().zip(figures) {
        let is_proxy = subject.child.is_some();
        let only_proxy = |value: f64| if is_proxy { format!("{value:.3}") } else { "-".to_owned() };
        let _ = writeln!(
            text,
            "{:<24}{:>10.2}{:>14}{:>18.3}{:>16.0}{:>20}{:>28}",
            subject.name,
            median(&figures.gigabytes_per_second),
            only_proxy(median(&figures.cpu_per_gigabyte)),
            median(&figures.ends_per_gigabyte),
            median(&figures.connections_per_second),
            only_proxy(median(&figures.cpu_per_thousand)),
            figures.idle_mib.map_or("-".to_owned(), |mib| format!("{mib:.1}")),
        );
    }
    text
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What `portolan-bench relay-endpoint` does: sends and answers, until it is ended.
pub fn endpoint(ip: IpAddr) -> Result<()> {
    load::serve(ip)
}

/// What `portolan-bench relay-serve` does: carries connections from two addresses to two, until it is ended.
pub fn serve(pairs: &[String], connections: u32) -> Result<()> {
    subjects::serve(pairs, connections)
}
