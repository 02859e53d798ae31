// SPDX-License-Identifier: Apache-2.0

//! The thread that sweeps.

use std::{
    io,
    net::IpAddr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
};

use hashbrown::HashSet;
use model::{Family, FlowRule, NodePortScope, PerFamily, Plan};
use netlink::{conntrack::Conntrack, route::Route};

use super::{Stale, Swept, sweep};

/// Sweeps in a thread of its own. What is asked for while it works is put together and done next, so the queue
/// never holds more than one rule for each frontend.
#[derive(Debug)]
pub struct Sweeper {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Queue {
    pending: Mutex<Pending>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Pending {
    stale: Stale,
    scope: PerFamily<Option<NodePortScope>>,
    is_closed: bool,
}

impl Sweeper {
    /// Starts in the network namespace of the calling thread. `report` is told of every sweep, in the sweeper's
    /// thread.
    pub fn start(report: impl FnMut(Result<Swept, netlink::Error>) + Send + 'static) -> io::Result<Sweeper> {
        let conntrack = Conntrack::open().map_err(io::Error::other)?;
        let route = Route::open().map_err(io::Error::other)?;
        let queue = Arc::new(Queue::default());
        let worker = Worker { queue: queue.clone(), conntrack, route };
        let thread = thread::Builder::new().name("conntrack".into()).spawn(move || worker.run(report))?;
        Ok(Sweeper { queue, thread: Some(thread) })
    }

    /// Has the flows looked at that a change made stale. To be called once the change is in force.
    pub fn add(&self, plan: &Plan, rules: &[FlowRule]) {
        if !rules.is_empty() {
            self.ask(plan, |stale| rules.iter().for_each(|rule| stale.add(rule.clone())));
        }
    }

    /// Has the flows looked at that may have begun while nothing of the plan was in force, as it is now.
    pub fn add_missed(&self, plan: &Plan) {
        let forwarded = plan.frontends().filter(|(_, decision)| decision.forwards());
        self.ask(plan, |stale| stale.add_missed(forwarded.map(|(frontend, _)| *frontend)));
    }

    fn ask(&self, plan: &Plan, add: impl FnOnce(&mut Stale)) {
        let mut pending = self.queue.lock();
        add(&mut pending.stale);
        pending.scope = PerFamily::from_fn(|family| Some(plan.node_ports(family).clone()));
        self.queue.news.notify_one();
    }
}

impl Drop for Sweeper {
    /// Waits until what was asked for is done.
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.news.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

impl Queue {
    /// What is in it is whole at any time, also after a panic.
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next work; `None` when there is none and none will come.
    fn next(&self) -> Option<(Stale, PerFamily<Option<NodePortScope>>)> {
        let mut pending = self.lock();
        while pending.stale.is_empty() {
            if pending.is_closed {
                return None;
            }
            pending = self.news.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
        Some((std::mem::take(&mut pending.stale), pending.scope.clone()))
    }
}

struct Worker {
    queue: Arc<Queue>,
    conntrack: Conntrack,
    route: Route,
}

impl Worker {
    fn run(mut self, mut report: impl FnMut(Result<Swept, netlink::Error>)) {
        let mut attempts = 0;
        while let Some((stale, scope)) = self.queue.next() {
            let outcome = self.sweep(&stale, &scope);
            attempts = if outcome.is_err() { attempts + 1 } else { 0 };
            if (1..ATTEMPTS).contains(&attempts) {
                self.queue.lock().stale.add_older(stale);
            } else {
                attempts = 0;
            }
            report(outcome);
        }
    }

    fn sweep(
        &mut self,
        stale: &Stale,
        scope: &PerFamily<Option<NodePortScope>>,
    ) -> Result<Swept, netlink::Error> {
        let mut host = HashSet::new();
        if stale.has_node_ports() {
            host.extend(self.route.addresses()?.into_iter().map(|address| address.address));
        }
        let serves = |address: IpAddr| match &scope[Family::of(address)] {
            Some(NodePortScope::Only(addresses)) => addresses.contains(&address),
            Some(NodePortScope::All) => host.contains(&address),
            None => false,
        };
        sweep(&mut self.conntrack, stale, &serves)
    }
}

/// Times the same is tried. Flows that are left would be found by the next change of the frontend at the latest.
const ATTEMPTS: u32 = 3;
