// SPDX-License-Identifier: Apache-2.0

//! A service: its endpoints, and which of them a client gets.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{
    balance,
    clock::{self, Millis, millis},
    counters::{Counter, Counters, Level},
    endpoint::Endpoint,
    lru::Lru,
    settings::{Algorithm, ServiceSettings, Settings},
};

/// See the module. Shared by all workers; it stays the same while its endpoints come and go.
#[derive(Debug)]
pub struct Service {
    name: Box<str>,
    roster: RwLock<Arc<Roster>>,
    cursor: AtomicUsize,
    remembered: Mutex<Lru<IpAddr, Remembered>>,
    /// Endpoints that left and may still have flows.
    left: Mutex<Vec<Weak<Endpoint>>>,
    /// Connections or flows now.
    pub open: Level,
    /// Bytes from clients to endpoints.
    pub sent_bytes: Counter,
    /// Bytes from endpoints to clients.
    pub received_bytes: Counter,
    /// Clients turned away, whatever the reason.
    pub refused: Counter,
    /// Connections that were given to another endpoint.
    pub retries: Counter,
}

/// The endpoints at one moment.
#[derive(Debug, Default)]
pub struct Roster {
    /// What holds for all of them.
    pub settings: ServiceSettings,
    /// In the order they were given.
    pub members: Box<[Member]>,
    /// See [`balance::schedule`].
    schedule: Box<[u32]>,
}

/// An endpoint in its service.
#[derive(Clone, Debug)]
pub struct Member {
    /// The endpoint.
    pub endpoint: Arc<Endpoint>,
    /// How many connections it gets, compared with others; 0: no new ones.
    pub weight: u32,
}

impl Member {
    pub(crate) fn new(address: SocketAddr, weight: u32) -> Member {
        Member { endpoint: Arc::new(Endpoint::new(address)), weight }
    }
}

#[derive(Debug)]
struct Remembered {
    endpoint: Arc<Endpoint>,
    until: Millis,
}

/// What a choice depends on beside the service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking<'a> {
    pub(crate) client: IpAddr,
    /// Endpoints that failed this client a moment ago.
    pub(crate) tried: &'a [SocketAddr],
    pub(crate) now: Millis,
    /// Clients remembered at most.
    pub(crate) remembered: usize,
}

impl Service {
    /// A service without endpoints.
    pub fn new(name: impl Into<Box<str>>) -> Service {
        Service {
            name: name.into(),
            roster: RwLock::default(),
            // Not every process begins with the same endpoint.
            cursor: AtomicUsize::new(balance::random() as usize >> 1),
            remembered: Mutex::new(Lru::new()),
            left: Mutex::default(),
            open: Level::default(),
            sent_bytes: Counter::default(),
            received_bytes: Counter::default(),
            refused: Counter::default(),
            retries: Counter::default(),
        }
    }

    /// What it is called, for people and metrics.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives it these endpoints, each with its weight, from now on. One that was there before keeps what is known of
    /// it; one that is not among them keeps its connections for a while.
    pub fn update(&self, settings: ServiceSettings, endpoints: &[(SocketAddr, u32)]) {
        self.replace(settings, endpoints, None);
    }

    /// The same, but of those that are not among them only these are no more: UDP flows to others go on.
    pub fn update_gently(
        &self,
        settings: ServiceSettings,
        endpoints: &[(SocketAddr, u32)],
        void: &[SocketAddr],
    ) {
        self.replace(settings, endpoints, Some(void));
    }

    fn replace(
        &self,
        settings: ServiceSettings,
        endpoints: &[(SocketAddr, u32)],
        void: Option<&[SocketAddr]>,
    ) {
        let now = clock::now();
        let mut roster = self.roster.write().unwrap_or_else(PoisonError::into_inner);
        // By address: a service may have ten thousand.
        let known: HashMap<SocketAddr, &Member> =
            roster.members.iter().map(|member| (member.endpoint.address, member)).collect();
        let stays: HashSet<SocketAddr> = endpoints.iter().map(|(address, _)| *address).collect();
        let members: Box<[Member]> = endpoints
            .iter()
            .map(|(address, weight)| match known.get(address) {
                Some(member) => Member { endpoint: Arc::clone(&member.endpoint), weight: *weight },
                None => Member::new(*address, *weight),
            })
            .collect();
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        for member in &roster.members {
            if !stays.contains(&member.endpoint.address) {
                member.endpoint.leave(now);
                left.push(Arc::downgrade(&member.endpoint));
            }
        }
        left.retain(|endpoint| {
            let Some(endpoint) = endpoint.upgrade() else { return false };
            let is_void = void.is_none_or(|void| void.contains(&endpoint.address));
            if is_void {
                endpoint.make_void();
            }
            !is_void
        });
        drop(left);
        let checks = settings.check.is_some();
        let weights: Vec<u32> = members.iter().map(|member| member.weight).collect();
        if !checks {
            members.iter().for_each(|member| member.endpoint.set_healthy(true));
        }
        *roster = Arc::new(Roster { settings, members, schedule: balance::schedule(&weights) });
        drop(roster);
        self.table().retain(|remembered| !remembered.endpoint.is_gone());
    }

    /// Takes all endpoints away.
    pub fn close(&self) {
        let settings = self.roster().settings.clone();
        self.update(settings, &[]);
    }

    /// The endpoints now.
    pub fn roster(&self) -> Arc<Roster> {
        Arc::clone(&self.roster.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The endpoint for a client; `None` if none is left that was not tried.
    pub(crate) fn pick(&self, asking: Asking<'_>) -> Option<Arc<Endpoint>> {
        let roster = self.roster();
        let affinity = roster.settings.affinity;
        if affinity.is_some()
            && let Some(endpoint) = self.recall(&asking, affinity)
        {
            return Some(endpoint);
        }
        let Asking { client, tried, now, .. } = asking;
        let untried = |member: &Member| !tried.contains(&member.endpoint.address);
        let endpoint = self
            .choose(&roster, client, |member| untried(member) && member.endpoint.is_usable(now))
            // Better a doubtful endpoint than none.
            .or_else(|| {
                self.choose(&roster, client, |member| untried(member) && member.endpoint.is_healthy())
            })
            .or_else(|| self.choose(&roster, client, untried))?;
        if let Some(time) = affinity {
            self.remember(&asking, &endpoint, time);
        }
        Some(endpoint)
    }

    fn choose(&self, roster: &Roster, client: IpAddr, ok: impl Fn(&Member) -> bool) -> Option<Arc<Endpoint>> {
        let Roster { settings, members, schedule } = roster;
        if schedule.is_empty() {
            return None;
        }
        let turn = |at: usize| &members[schedule[at % schedule.len()] as usize];
        let from =
            |start: usize| (0..schedule.len()).map(|at| turn(start.wrapping_add(at))).find(|it| ok(it));
        let next = || self.cursor.fetch_add(1, Ordering::Relaxed);
        let member = match settings.algorithm {
            Algorithm::RoundRobin => from(next()),
            Algorithm::LeastConnections => balance::least(members, next(), ok),
            Algorithm::Random => from(balance::random() as usize >> 1),
            Algorithm::SourceHash => balance::hashed(members, client, ok),
            Algorithm::RandomOfTwo => {
                let draw = || from(balance::random() as usize >> 1);
                let drawn: Vec<Member> = [draw(), draw()].into_iter().flatten().cloned().collect();
                return balance::least(&drawn, 0, |_| true).map(|member| Arc::clone(&member.endpoint));
            }
        };
        member.map(|member| Arc::clone(&member.endpoint))
    }

    fn recall(&self, asking: &Asking<'_>, affinity: Option<Duration>) -> Option<Arc<Endpoint>> {
        let mut table = self.table();
        let remembered = table.touch(&asking.client)?;
        let Remembered { endpoint, until } = remembered;
        let is_good = *until > asking.now
            && !endpoint.is_gone()
            && endpoint.is_usable(asking.now)
            && !asking.tried.contains(&endpoint.address);
        if !is_good {
            table.remove(&asking.client);
            return None;
        }
        *until = asking.now + millis(affinity?);
        Some(Arc::clone(endpoint))
    }

    fn remember(&self, asking: &Asking<'_>, endpoint: &Arc<Endpoint>, time: Duration) {
        let mut table = self.table();
        while table.len() >= asking.remembered.max(1)
            && let Some(oldest) = table.oldest().map(|(client, _)| *client)
        {
            table.remove(&oldest);
        }
        let until = asking.now + millis(time);
        table.insert(asking.client, Remembered { endpoint: Arc::clone(endpoint), until });
    }

    fn table(&self) -> MutexGuard<'_, Lru<IpAddr, Remembered>> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Clients remembered now.
    pub fn remembered(&self) -> usize {
        self.table().len()
    }

    /// An endpoint could not be reached: it is set aside, unless too few would be left, and the client is no longer
    /// bound to it.
    pub(crate) fn failed(&self, endpoint: &Arc<Endpoint>, client: IpAddr, around: (&Settings, &Counters)) {
        let (settings, counters) = around;
        let now = clock::now();
        let time = endpoint.failed(settings);
        counters.failed_attempts.add(1);
        let mut table = self.table();
        if table.peek(&client).is_some_and(|remembered| Arc::ptr_eq(&remembered.endpoint, endpoint)) {
            table.remove(&client);
        }
        drop(table);
        let roster = self.roster();
        let others = roster.members.iter().filter(|member| !Arc::ptr_eq(&member.endpoint, endpoint));
        let usable = others.filter(|member| member.weight > 0 && member.endpoint.is_usable(now)).count();
        if usable >= (roster.members.len() / 2).max(1) && endpoint.eject(now, time) {
            counters.ejections.add(1);
        }
    }

    /// One connection or flow more, unless the service has as many as it may.
    pub(crate) fn enter(&self, total: usize) -> bool {
        let limit = self.roster().settings.connections.map_or(Settings::share(total), |limit| limit as usize);
        self.open.enter(limit)
    }
}
