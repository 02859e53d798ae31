// SPDX-License-Identifier: Apache-2.0

//! The proxies, each a process with two workers and the same settings: no logs, no idle timeouts that matter, splice where
//! it is to be had.

use std::{
    collections::HashMap,
    fs,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ::relay::{Arrival, Directory, Listen, Refusal, Relay, Service, ServiceSettings, Settings, Transport};
use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::load::Endpoint;

/// Connections beyond the idle ones that a proxy may have.
const SLACK: usize = 32;
/// Descriptors that connections leave free.
pub(super) const SPARE: usize = 300;

/// One of those that are compared.
pub(super) struct Subject {
    pub(super) name: String,
    pub(super) bulk: SocketAddr,
    pub(super) short: SocketAddr,
    /// `None`: straight to the endpoint.
    pub(super) child: Option<Child>,
    _files: Option<TempDir>,
}

impl Subject {
    /// Processor time of the process and those it started, in seconds.
    pub(super) fn cpu(&self) -> Result<f64> {
        let Some(child) = &self.child else { return Ok(0.0) };
        family(child.id()).into_iter().map(cpu).sum()
    }

    /// Resident memory of the same, without what they share counted twice.
    pub(super) fn resident_mib(&self) -> Result<f64> {
        let Some(child) = &self.child else { return Ok(0.0) };
        let mut kib = 0;
        for process in family(child.id()) {
            let rollup =
                fs::read_to_string(format!("/proc/{process}/smaps_rollup")).context("reading memory")?;
            let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
            kib += line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(kib as f64 / 1024.0)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            for process in family(child.id()).into_iter().rev() {
                let _ = Command::new("kill").arg(process.to_string()).stderr(Stdio::null()).status();
            }
            let _ = child.wait();
        }
    }
}

/// Processor time of a process, in seconds.
pub(super) fn cpu(process: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).context("reading processor time")?;
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let ticks: u64 = [11, 12].iter().filter_map(|at| fields.get(*at)?.parse::<u64>().ok()).sum();
    Ok(ticks as f64 / 100.0)
}

/// A process and its children.
fn family(parent: u32) -> Vec<u32> {
    let mut family = vec![parent];
    let path = format!("/proc/{parent}/task/{parent}/children");
    let children = fs::read_to_string(path).unwrap_or_default();
    family.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    family
}

/// All that are here; for one that is not, a line says so.
/// They listen on this address.
pub(super) fn start_all((ip, endpoint): (IpAddr, &Endpoint), connections: usize) -> Result<Vec<Subject>> {
    let direct = Subject {
        name: "direct".to_owned(),
        bulk: endpoint.bulk,
        short: endpoint.short,
        child: None,
        _files: None,
    };
    let mut subjects = vec![direct, portolan((ip, endpoint), connections)?];
    for start in [haproxy, nginx] {
        match start((ip, endpoint), connections) {
            Ok(subject) => subjects.push(subject),
            Err(error) => eprintln!("skipped: {error:#}"),
        }
    }
    Ok(subjects)
}

fn portolan((ip, endpoint): (IpAddr, &Endpoint), connections: usize) -> Result<Subject> {
    let ports = free_ports(ip)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("relay-serve").arg(format!("--connections={}", connections + SLACK));
    command.arg(format!("{}={}", ports[0], endpoint.bulk)).arg(format!("{}={}", ports[1], endpoint.short));
    launch("portolan", command, ports, None)
}

fn haproxy((ip, endpoint): (IpAddr, &Endpoint), connections: usize) -> Result<Subject> {
    let ports = free_ports(ip)?;
    let files = TempDir::new()?;
    let most = connections + SLACK;
    let mut text = format!(
        "global\n  nbthread 2\n  maxconn {most}\n  maxpipes 32\n  tune.pipesize 262144\n\
         defaults\n  mode tcp\n  maxconn {most}\n  option splice-auto\n  option tcp-smart-accept\n  timeout connect 5s\n  \
         timeout client 1h\n  timeout server 1h\n",
    );
    for (name, port, to) in [("bulk", ports[0], endpoint.bulk), ("short", ports[1], endpoint.short)] {
        text.push_str(&format!("listen {name}\n  bind {port}\n  server one {to}\n"));
    }
    let path = files.path().join("haproxy.cfg");
    fs::write(&path, text)?;
    let mut command = Command::new("haproxy");
    command.arg("-db").arg("-q").arg("-f").arg(path);
    let version = version("haproxy", "-v", "HAProxy version ");
    launch(&format!("HAProxy {version}"), command, ports, Some(files))
}

fn nginx((ip, endpoint): (IpAddr, &Endpoint), connections: usize) -> Result<Subject> {
    let ports = free_ports(ip)?;
    let files = TempDir::new()?;
    let module =
        ["/usr/lib/nginx/modules/ngx_stream_module.so", "/usr/lib64/nginx/modules/ngx_stream_module.so"]
            .into_iter()
            .find(|path| fs::metadata(path).is_ok());
    let load = module.map(|path| format!("load_module {path};\n")).unwrap_or_default();
    let mut text = format!(
        "{load}daemon off;\nworker_processes 2;\nerror_log /dev/null;\npid {0}/pid;\n\
         events {{ worker_connections {1}; }}\nstream {{\n  proxy_timeout 1h;\n  access_log off;\n  tcp_nodelay on;\n",
        files.path().display(),
        2 * (connections + SLACK)
    );
    for (port, to) in [(ports[0], endpoint.bulk), (ports[1], endpoint.short)] {
        text.push_str(&format!("  server {{ listen {port} reuseport backlog=65535; proxy_pass {to}; }}\n"));
    }
    text.push_str("}\n");
    let path = files.path().join("nginx.conf");
    fs::write(&path, text)?;
    let mut command = Command::new("nginx");
    command.arg("-c").arg(path).arg("-p").arg(files.path());
    let version = version("nginx", "-v", "nginx/");
    launch(&format!("nginx stream {version}"), command, ports, Some(files))
}

fn version(program: &str, flag: &str, before: &str) -> String {
    let Ok(output) = Command::new(program).arg(flag).output() else { return String::new() };
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let number = text.split_once(before).map_or("", |(_, rest)| rest);
    number.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect()
}

fn launch(
    name: &str,
    mut command: Command,
    ports: [SocketAddr; 2],
    files: Option<TempDir>,
) -> Result<Subject> {
    let program = command.get_program().to_string_lossy().into_owned();
    let child = command.stdin(Stdio::null()).spawn().with_context(|| format!("starting {program}"))?;
    let [bulk, short] = ports;
    let mut subject = Subject { name: name.to_owned(), bulk, short, child: Some(child), _files: files };
    let until = Instant::now() + Duration::from_secs(10);
    while TcpStream::connect(short).is_err() {
        let ended = subject.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
        if ended.is_some() || Instant::now() > until {
            bail!("{program} does not listen");
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(subject)
}

fn free_ports(ip: IpAddr) -> Result<[SocketAddr; 2]> {
    let (one, two) = (TcpListener::bind((ip, 0))?, TcpListener::bind((ip, 0))?);
    Ok([one.local_addr()?, two.local_addr()?])
}

struct Table(HashMap<SocketAddr, Arc<Service>>);

impl Directory for Table {
    fn find(&self, arrival: &Arrival) -> Result<Arc<Service>, Refusal> {
        self.0.get(&arrival.destination).cloned().ok_or(Refusal::Unknown)
    }
}

/// Each pair is `LISTEN=ENDPOINT`.
pub(super) fn serve(pairs: &[String], connections: u32) -> Result<()> {
    let mut table = HashMap::new();
    for pair in pairs {
        let (listen, endpoint) = pair.split_once('=').context("a pair is LISTEN=ENDPOINT")?;
        let service = Arc::new(Service::new(pair.as_str()));
        let settings = ServiceSettings { connections: Some(connections), ..ServiceSettings::default() };
        service.update(settings, &[(endpoint.parse()?, 1)]);
        table.insert(listen.parse::<SocketAddr>()?, service);
    }
    let addresses: Vec<SocketAddr> = table.keys().copied().collect();
    let all = connections as usize;
    let settings = Settings { workers: 2, connections: all, pipes: 32, ..Settings::default() };
    ::relay::relay::descriptors(1 << 17);
    let relay = Relay::start(settings, Arc::new(Table(table)))?;
    for address in addresses {
        relay.listen(Listen::at(Transport::Tcp, address))?;
    }
    loop {
        thread::park();
    }
}
