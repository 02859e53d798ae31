// SPDX-License-Identifier: Apache-2.0

//! A process of its own, because it runs out of descriptors.

use std::{
    io::Read,
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use relay::{Arrival, Directory, Listen, Refusal, Relay, Service, ServiceSettings, Settings, Transport};

const PATIENCE: Duration = Duration::from_secs(30);

struct One(Arc<Service>);

impl Directory for One {
    fn find(&self, _: &Arrival) -> Result<Arc<Service>, Refusal> {
        Ok(Arc::clone(&self.0))
    }
}

/// Says a byte to each. In a process of its own: of those that run out here it would lack one to answer with, and somebody
/// would wait for it.
fn endpoint() -> (Python, SocketAddr) {
    let mut python = Python::run(
        "import resource, socket\n\
         soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n\
         resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n\
         listener = socket.create_server(('127.0.0.1', 0), backlog=4096)\n\
         print(listener.getsockname()[1], flush=True)\n\
         kept = []\n\
         while True:\n\
        \x20   kept.append(listener.accept()[0])\n\
        \x20   kept[-1].sendall(b'!')\n",
    );
    let port = u16::try_from(python.first_line()[0]).expect("a port");
    (python, SocketAddr::from(([127, 0, 0, 1], port)))
}

/// The clients are in a process of their own, or their descriptors would run out first.
fn clients(to: SocketAddr, count: usize, then: &str) -> Python {
    let script = format!(
        "import socket, sys, resource, time\n\
         soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n\
         resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n\
         kept, refused = [], 0\n\
         for i in range({count}):\n\
        \x20   try:\n\
        \x20       s = socket.create_connection(('{}', {}), 30)\n\
        \x20       assert s.recv(1) == b'!'\n\
        \x20       kept.append(s)\n\
        \x20   except (ConnectionError, AssertionError):\n\
        \x20       refused += 1\n\
         print(len(kept), refused, flush=True)\n\
         {then}\n",
        to.ip(),
        to.port()
    );
    Python::run(&script)
}

/// Ends with the test, however that ends.
struct Python(Child);

impl Python {
    fn run(script: &str) -> Python {
        let mut command = Command::new("python3");
        command.arg("-c").arg(script).stdin(Stdio::null()).stdout(Stdio::piped());
        Python(command.spawn().expect("python3 is there"))
    }

    fn first_line(&mut self) -> Vec<usize> {
        let mut text = Vec::new();
        let out = self.0.stdout.as_mut().expect("it is piped");
        let mut byte = [0];
        while out.read(&mut byte).is_ok_and(|len| len == 1) && byte != *b"\n" {
            text.push(byte[0]);
        }
        let text = String::from_utf8(text).expect("text");
        text.split_whitespace().map(|word| word.parse().expect("a number")).collect()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn many_connections_are_carried_and_too_many_refused() {
    let limit = relay::relay::descriptors(20_000);
    // Each takes two descriptors of this process.
    let wanted = (limit / 4).min(4_000);
    let service = Arc::new(Service::new("test"));
    let (_python, endpoint) = endpoint();
    service.update(ServiceSettings { connections: Some(1 << 30), ..Default::default() }, &[(endpoint, 1)]);
    // The endpoint never closes anything.
    let half_closed = Duration::from_millis(500);
    let settings = Settings { connections: usize::MAX, half_closed, ..Settings::default() };
    let relay = Relay::start(settings, Arc::new(One(Arc::clone(&service)))).expect("a relay");
    let address = "127.0.0.1:0".parse().expect("an address");
    let bound = relay.listen(Listen::at(Transport::Tcp, address)).expect("a listener");

    let before = resident_kib();
    let mut child = clients(bound.address, wanted, "time.sleep(600)");
    assert_eq!(child.first_line(), [wanted, 0]);
    until("all are open", || relay.counters().open_connections.value() == wanted);
    let each = (resident_kib() - before) as f64 / wanted as f64;
    println!("{wanted} idle connections: {each:.2} KiB each");
    // 6 KiB are far more than anything here should take.
    assert!(each < 6.0, "{each} KiB for an idle connection");
    assert!(relay.counters().pipes.value() <= 2 * 64, "idle connections hold no pipes");

    // Now let descriptors run out.
    let taken = std::fs::read_dir("/proc/self/fd").expect("a directory").count() as u64;
    rustix_limit(taken + 30);
    let mut more = clients(bound.address, 200, "sys.exit(0)");
    let said = more.first_line();
    drop(more);
    assert_eq!(said.iter().sum::<usize>(), 200, "nobody waits for nothing: {said:?}");
    assert!(said[1] > 100, "{said:?}");
    assert!(relay.counters().refused(Refusal::Descriptors) > 0);
    rustix_limit(limit as u64);
    // And they come back: everything goes on.
    let mut stream = TcpStream::connect(bound.address).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.read_exact(&mut [0]).expect("served again");
    drop((child, stream));
    until("all are closed", || service.open.value() == 0);
    assert_eq!(relay.counters().open_connections.value(), 0);
}

/// Only the soft limit, so that it can be raised again.
fn rustix_limit(soft: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(soft), maximum: hard }).expect("a lower limit");
}

fn resident_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
}
