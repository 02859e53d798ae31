// SPDX-License-Identifier: Apache-2.0

//! Active checks: asks endpoints whether they live, in threads of their own.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use hashbrown::HashMap;

use crate::{
    clock::{self, Millis, millis},
    endpoint::Endpoint,
    proxy_protocol,
    service::{Member, Service},
    settings::{Check, CheckKind, ServiceSettings},
};

/// So many endpoints are asked at once.
const ASKERS: usize = 8;
/// How often it is looked whom to ask.
const TICK: Duration = Duration::from_millis(100);

/// See the module. Threads begin with the first service, and end when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    watched: Arc<Mutex<Vec<Weak<Service>>>>,
    stop: Arc<AtomicBool>,
    started: OnceLock<()>,
}

impl Checker {
    pub(crate) fn watch(&self, service: &Arc<Service>) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|known| known.strong_count() > 0);
        if !watched.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(service))) {
            watched.push(Arc::downgrade(service));
        }
        drop(watched);
        self.started.get_or_init(|| {
            let (watched, stop) = (Arc::clone(&self.watched), Arc::clone(&self.stop));
            // Without a thread nothing is checked, and every endpoint is taken for healthy.
            let _ = thread::Builder::new().name("relay-check".to_owned()).spawn(move || run(&watched, &stop));
        });
    }
}

impl Drop for Checker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// What is known of an endpoint.
#[derive(Debug, Default)]
struct Record {
    due: Millis,
    /// Answers in a row that speak against what is believed now.
    against: u32,
    under_way: bool,
    seen: Millis,
}

/// Whom to ask, and how.
#[derive(Debug)]
struct Question {
    endpoint: Arc<Endpoint>,
    check: Check,
    /// The endpoint expects to be told who its client is, before anything else.
    proxy_protocol: bool,
}

fn run(watched: &Mutex<Vec<Weak<Service>>>, stop: &AtomicBool) {
    let (questions, inbox) = mpsc::channel::<Question>();
    let (report, answers) = mpsc::channel::<(Question, bool)>();
    let inbox = Arc::new(Mutex::new(inbox));
    for _ in 0..ASKERS {
        let (inbox, report) = (Arc::clone(&inbox), report.clone());
        let ask = move || {
            loop {
                let question = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(question) = question else { return };
                let lives = question.ask().unwrap_or(false);
                if report.send((question, lives)).is_err() {
                    return;
                }
            }
        };
        let _ = thread::Builder::new().name("relay-ask".to_owned()).spawn(ask);
    }
    let mut records: HashMap<*const Endpoint, Record> = HashMap::new();
    while !stop.load(Ordering::Relaxed) {
        let now = clock::now();
        for (Question { endpoint, check, .. }, lives) in answers.try_iter() {
            if let Some(record) = records.get_mut(&Arc::as_ptr(&endpoint)) {
                record.under_way = false;
                record.hear(&endpoint, &check, lives);
            }
        }
        for question in all(watched) {
            let record = records.entry(Arc::as_ptr(&question.endpoint)).or_default();
            record.seen = now;
            if !record.under_way && record.due <= now {
                record.under_way = true;
                record.due = now + millis(question.check.interval);
                let _ = questions.send(question);
            }
        }
        records.retain(|_, record| record.seen == now || record.under_way);
        thread::sleep(TICK);
    }
}

fn all(watched: &Mutex<Vec<Weak<Service>>>) -> Vec<Question> {
    let services: Vec<Arc<Service>> =
        watched.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect();
    let of = |service: &Arc<Service>| {
        let roster = service.roster();
        let ServiceSettings { check, proxy_protocol, .. } = &roster.settings;
        let question = |check: &Check, member: &Member| Question {
            endpoint: Arc::clone(&member.endpoint),
            check: check.clone(),
            proxy_protocol: *proxy_protocol,
        };
        let questions =
            |check| roster.members.iter().map(|member| question(check, member)).collect::<Vec<_>>();
        check.as_ref().map(questions).unwrap_or_default()
    };
    services.iter().flat_map(of).collect()
}

impl Record {
    fn hear(&mut self, endpoint: &Endpoint, check: &Check, lives: bool) {
        if lives == endpoint.is_healthy() {
            self.against = 0;
            return;
        }
        self.against += 1;
        if self.against >= check.threshold.max(1) {
            self.against = 0;
            endpoint.set_healthy(lives);
        }
    }
}

impl Question {
    fn ask(&self) -> io::Result<bool> {
        let (address, Check { kind, timeout, .. }) = (self.endpoint.address, &self.check);
        let timeout = (*timeout).max(Duration::from_millis(1));
        let mut stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        if self.proxy_protocol {
            stream.write_all(&proxy_protocol::LOCAL)?;
        }
        let CheckKind::Http(path) = kind else { return Ok(true) };
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: portolan\r\nConnection: close\r\n\r\n"
        )?;
        let mut start = [0; 12];
        stream.read_exact(&mut start)?;
        // `HTTP/1.1 200`
        let status = std::str::from_utf8(&start[9..12]).ok().and_then(|text| text.parse::<u16>().ok());
        Ok(start.starts_with(b"HTTP/1.") && status.is_some_and(|status| (200..400).contains(&status)))
    }
}
