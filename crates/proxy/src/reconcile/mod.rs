// SPDX-License-Identifier: Apache-2.0

//! The loop: takes what sources tell, and makes the kernel follow. One thread, nothing shared.
//!
//! ```text
//!   updates -> World -> (all kinds listed once?) -> Plan -> (anything different?) -> Dataplane -> kernel
//! ```
//!
//! An error, or a panic, is told, shows in the health, and is tried again with everything; it never ends the
//! loop, and it never removes what is in the kernel.

mod fullness;
mod rounds;
mod sight;
mod tell;
mod wait;

use std::{
    any::Any,
    hash::{BuildHasher as _, Hasher as _},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use dataplane::{Audited, Dataplane, Drift, Mode, Scope, TableRules};
use model::{Changes, Dirty, FlowRule, Plan, Settings, Update, World};
use tokio::sync::{Notify, mpsc::Receiver, watch};

use self::{fullness::Fullness, rounds::Rounds, sight::Sight, wait::Sleeper};
use crate::{
    claim::Seat,
    clock,
    connections::Connections,
    drift::{self, Bell},
    events::Recorder,
    metrics::{Metrics, ip_family},
    pace::{Pacer, Work},
    status::Status,
    systemd::Systemd,
    takeover::{self, Successor, Takeover},
    tally::Tally,
    wishes::Unmet,
};

/// With nothing to do, the loop still comes round so often.
const IDLE: Duration = Duration::from_secs(60);
/// What the kernel refused of a complete write is tried again so often.
const LEFT_OUT: Duration = Duration::from_secs(60);
/// How many updates are taken before the loop looks whether something is due.
const BATCH: usize = 4096;

/// Makes a dataplane: at the start, and again after a panic has left one in an unknown state.
pub type Open = Box<dyn FnMut() -> Result<Box<dyn Dataplane>, String> + Send>;
/// Has flows looked at that may be stale; must not block.
pub type Sweep = Box<dyn FnMut(&Plan, Look<'_>) + Send>;
/// Tells what is in force now: what became different, or, with `None`, everything; must not block.
pub type Publish = Box<dyn FnMut(&Plan, Option<&Changes>) + Send>;

/// What the loop needs from others.
pub struct Ports {
    pub open: Open,
    pub sweep: Sweep,
    pub publish: Publish,
    pub events: Recorder,
    pub connections: Arc<Connections>,
    /// The right to write to this kernel. Until it is ours everything is got ready, and nothing written.
    pub seat: Seat,
    pub status: Arc<Status>,
    pub metrics: Arc<Metrics>,
    /// What the configuration decides, whenever it changes.
    pub tuning: watch::Receiver<Tuning>,
}

/// Which flows are to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look<'a> {
    /// Those that a change has made stale.
    Stale(&'a [FlowRule]),
    /// Those that may have begun while nothing, or not all, was in force.
    Missed,
}

/// Makes others serve a plan, as this process ends. The error is one sentence.
pub type Relief = Box<dyn FnOnce(&Plan) -> Result<(), String> + Send>;

/// What can be changed while the loop runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    pub settings: Settings,
    pub max_pause: Duration,
}

/// See the module. [`Reconciler::take`] and [`Reconciler::turn`] are the loop's two halves.
pub struct Reconciler {
    world: World,
    plan: Plan,
    ports: Ports,
    dataplane: Option<Box<dyn Dataplane>>,
    /// Rings when somebody else changed what the dataplane holds. Listens from the first write on: notices of a whole
    /// load, which nobody needs, are a tenth of its cost.
    drift: Option<Arc<Bell>>,
    /// Somebody else changed something, and it is not mended yet.
    drifted: bool,
    rounds: Rounds,
    fullness: Fullness,
    pacer: Pacer,
    /// The next write has to be complete: the first one, and after an error.
    complete: bool,
    /// The plan is empty and has to look at the whole world.
    blank: bool,
    /// When to write everything once more, as the kernel refused a part of the last complete write.
    again: Option<Instant>,
    /// Programmed at least once.
    serving: bool,
    sight: Sight,
    started: SystemTime,
    tally: Tally,
    unmet: Unmet,
    /// Is told of every round.
    systemd: Arc<Systemd>,
    succession: Succession,
    mode: Mode,
    /// Has somebody else serve when this process ends.
    relief: Option<Relief>,
    /// What waits for a successful write.
    waiting: Waiting,
}

/// What another proxy left.
enum Succession {
    /// Is none of our business.
    None,
    /// Goes once all is in force.
    Ahead(Mode),
    /// Goes.
    Begun(Takeover),
}

#[derive(Default)]
struct Waiting {
    since: Option<Instant>,
    slices: u64,
    flows: Vec<FlowRule>,
    trigger_times_nanos: Vec<i64>,
}

impl Reconciler {
    /// Opens the dataplane. `from_files`: the source may have no Node object; then the host's own addresses do.
    pub fn new(mut ports: Ports, max_backoff: Duration, from_files: bool) -> Result<Reconciler, String> {
        let dataplane = (ports.open)()?;
        match dataplane.meter() {
            Ok(Some(meter)) => ports.connections.attach(meter),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "connections are not told in metrics"),
        }
        let Tuning { settings, max_pause } = ports.tuning.borrow_and_update().clone();
        Ok(Reconciler {
            world: World::new(settings),
            plan: Plan::new(),
            ports,
            dataplane: Some(dataplane),
            drift: None,
            drifted: false,
            rounds: Rounds::new(Instant::now()),
            fullness: Fullness::default(),
            pacer: Pacer::new(max_pause, max_backoff),
            complete: true,
            blank: true,
            again: None,
            serving: false,
            sight: Sight::new(from_files),
            started: SystemTime::now(),
            tally: Tally::default(),
            unmet: Unmet::default(),
            systemd: Arc::default(),
            succession: Succession::None,
            mode: Mode::Nftables,
            relief: None,
            waiting: Waiting::default(),
        })
    }

    /// Has every round told to systemd, whose watchdog is so fed while the loop lives.
    pub fn watched_by(self, systemd: Arc<Systemd>) -> Reconciler {
        Reconciler { systemd, ..self }
    }

    /// Has this called with the plan in force when the loop is told to end.
    pub fn relieved_by(self, relief: Option<Relief>) -> Reconciler {
        Reconciler { relief, ..self }
    }

    fn farewell(&mut self) {
        let Some(relief) = self.relief.take().filter(|_| self.serving && self.ports.seat.is_ours()) else {
            return;
        };
        // It would take the rules that come now for what another proxy left.
        if let Succession::Begun(takeover) = std::mem::replace(&mut self.succession, Succession::None) {
            takeover.end();
        }
        match relief(&self.plan) {
            Ok(()) => tracing::info!("the kernel serves new connections until a new process does"),
            Err(error) => tracing::error!(%error, "new connections are not served until a new process does"),
        }
    }

    /// Removes, once all is in force, what is no part of this mode.
    pub fn taking_over(self, mode: Mode) -> Reconciler {
        let mut reconciler = Reconciler { succession: Succession::Ahead(mode), mode, ..self };
        if mode == Mode::Iptables {
            reconciler.pacer.pause_evenly();
        }
        reconciler
    }

    /// Runs until it is told to stop, or all senders are gone.
    pub fn run(mut self, mut updates: Receiver<Update>, stop: &Notify) {
        let sleeper = Sleeper::new();
        let mut batch = Vec::new();
        let mut next: Option<Instant> = None;
        let mut tuning = self.ports.tuning.clone();
        loop {
            let due = next.unwrap_or_else(|| Instant::now() + IDLE);
            let due = self.tell_systemd().map_or(due, |feeding| due.min(feeding));
            let (drift, seat) = (self.drift.clone().unwrap_or_default(), self.ports.seat.clone());
            let news = async {
                tokio::select! {
                    // Without a lot being drawn. Updates come last: however many there are, they keep nobody else away.
                    biased;
                    () = stop.notified() => false,
                    () = drift.rings.notified() => {
                        self.complete = true;
                        self.drifted |= drift.take_certain();
                        true
                    }
                    () = seat.taken() => true,
                    Ok(()) = tuning.changed() => {
                        self.retune(tuning.borrow_and_update().clone());
                        true
                    }
                    received = updates.recv_many(&mut batch, BATCH) => received > 0,
                }
            };
            let going_on = sleeper.wait(pin!(news), due).unwrap_or(true);
            if !going_on {
                self.farewell();
                return;
            }
            self.take(&mut batch, Instant::now());
            next = self.turn(Instant::now());
            next = next.into_iter().chain(self.audit(Instant::now())).min();
        }
    }

    /// With nothing else to do, looks at a part of what the kernel holds. Returns when to call again.
    fn audit(&mut self, now: Instant) -> Option<Instant> {
        if !self.serving || self.complete || !self.world.dirty().is_empty() {
            return None;
        }
        let due = self.rounds.next(now);
        if due > now {
            return Some(due);
        }
        self.rounds.stepped(now, false);
        let dataplane = self.dataplane.as_mut()?;
        let audited = catch_unwind(AssertUnwindSafe(|| dataplane.audit()));
        if let Ok(Ok(audited)) = &audited {
            self.ports.connections.retire(&audited.retired);
            self.fullness.tell(&audited.affinity, &self.ports.metrics);
        }
        match audited {
            Ok(Ok(Audited { drift: Some(what), .. })) => {
                let drift = Drift { what, by: None, suspected: false };
                drift::tell(&drift, &self.ports.metrics, &self.ports.events);
                (self.complete, self.drifted) = (true, true);
                // And is looked at again soon: whoever did it may do more.
                return self.turn(now).into_iter().chain([self.rounds.next(now)]).min();
            }
            Ok(Ok(Audited { more, .. })) => self.rounds.stepped(now, more),
            // Others write meanwhile, or the kernel is short of memory: it is tried again.
            Ok(Err(error)) => tracing::debug!(%error, "cannot look at what the kernel holds"),
            Err(panic) => self.survive(&*panic, now),
        }
        Some(self.rounds.next(now))
    }

    /// Goes on with other settings: what they change in the kernel is written with the next turn.
    pub fn retune(&mut self, Tuning { settings, max_pause }: Tuning) {
        self.pacer.set_max_pause(max_pause);
        self.world.retune(settings);
    }

    /// Takes updates in. An update that panics is dropped, and hurts no other.
    pub fn take(&mut self, updates: &mut Vec<Update>, now: Instant) {
        for update in updates.drain(..) {
            self.note(&update, now);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.world.apply(update))) {
                self.survive(&*panic, now);
            }
        }
        self.stand_in();
        self.ports.status.node(self.world.node().map(|node| node.eligible));
        if !self.world.dirty().is_empty() && self.waiting.since.is_none() {
            self.waiting.since = Some(now);
        }
    }

    fn stand_in(&mut self) {
        if let Some(update) = self.sight.stand_in(&self.world) {
            self.world.apply(update);
        }
    }

    fn note(&mut self, update: &Update, now: Instant) {
        self.sight.note(update, &self.world, now);
        let metrics = &self.ports.metrics;
        match update {
            Update::Service(_) | Update::ServiceGone(_) => {
                metrics.service_changes.only().add(self.ports.status.served().count() as u64);
            }
            Update::Slice(_) | Update::SliceGone(_) => {
                metrics.endpoint_changes.only().add(1);
                self.waiting.slices += 1;
            }
            _ => {}
        }
    }

    /// Writes to the kernel if there is something to write and it is time. Returns when to call again at the
    /// latest; `None` if only an update can bring work.
    pub fn turn(&mut self, now: Instant) -> Option<Instant> {
        if !self.world.is_complete() || !self.ports.seat.is_ours() {
            return None;
        }
        if !self.serving
            && let Some(until) = self.sight.wait(&self.world, now)
        {
            return Some(until);
        }
        // The wait may just have ended in vain.
        self.stand_in();
        self.complete |= self.again.is_some_and(|again| again <= now);
        if !self.complete && self.world.dirty().is_empty() {
            return self.again;
        }
        let work = self.work();
        let due = self.pacer.due(work, now);
        self.queue();
        if due > now {
            return Some(due);
        }
        let stopwatch = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.sync(stopwatch)));
        let end = now + stopwatch.elapsed();
        match outcome {
            Ok(Ok(left_out)) => {
                self.rounds.wrote(end);
                if work != Work::Part
                    && self.dataplane.as_ref().is_some_and(|dataplane| dataplane.is_untold())
                {
                    self.rounds.hurry(end);
                }
                self.pacer.succeeded(work, now, end);
                if work != Work::Part {
                    self.again = (left_out > 0).then(|| end + LEFT_OUT);
                }
            }
            Ok(Err(error)) => self.fail(error, end),
            Err(panic) => self.survive(&*panic, end),
        }
        if self.complete { Some(self.pacer.due(self.work(), end)) } else { self.again }
    }

    fn work(&self) -> Work {
        match self.complete {
            true if self.drifted => Work::Repair,
            true => Work::All,
            false => Work::Part,
        }
    }

    /// Says how it goes; returns when to say so again at the latest.
    fn tell_systemd(&self) -> Option<Instant> {
        if !self.systemd.listens() {
            return None;
        }
        self.systemd.status(&match self.ports.status.report(SystemTime::now()).failure {
            Some(failure) => format!("cannot program the kernel: {failure}"),
            None if self.serving => "all services are in force".to_owned(),
            None if !self.ports.seat.is_ours() => {
                "waiting until another portolan on this node ends".to_owned()
            }
            None => "waiting for a complete view of the cluster".to_owned(),
        });
        self.systemd.round(Instant::now(), self.serving)
    }

    fn queue(&self) {
        let now = SystemTime::now();
        self.ports.status.queued(now);
        let metrics = &self.ports.metrics;
        for family in self.ports.status.served() {
            metrics.last_queued.of(family).set(clock::unix_secs(now));
        }
        metrics.service_changes_pending.only().set(self.world.dirty().services.len() as f64);
        metrics.endpoint_changes_pending.only().set(self.waiting.slices as f64);
    }

    /// How much the kernel refused.
    fn sync(&mut self, start: Instant) -> Result<usize, String> {
        let mut dirty = self.world.take_dirty();
        if std::mem::take(&mut self.blank) {
            dirty = Dirty { trigger_times_nanos: dirty.trigger_times_nanos, ..self.world.everything() };
        }
        let mut changes = self.plan.update(&self.world, dirty);
        let nothing = changes.is_empty() && !self.complete;
        self.waiting.flows.append(&mut changes.flows);
        self.waiting.trigger_times_nanos.append(&mut changes.trigger_times_nanos);
        self.tell_conflicts(&changes);
        if nothing {
            self.succeed(&changes);
            return Ok(0);
        }
        let dataplane = match &mut self.dataplane {
            Some(dataplane) => dataplane,
            none => {
                self.drift = None;
                none.insert((self.ports.open)()?)
            }
        };
        let scope = if self.complete { Scope::All } else { Scope::Only(&changes) };
        let outcome = dataplane.apply(&self.plan, scope);
        // Also when it was in vain: then it is what one wants to know.
        let waited = dataplane.take_lock_wait();
        if !waited.is_zero() {
            self.ports.metrics.lock_wait.only().observe(waited.as_secs_f64());
        }
        let applied = outcome.map_err(|error| error.to_string())?;
        self.waiting.flows.extend(applied.vanished.iter().copied().filter_map(FlowRule::vanished));
        self.ports.connections.retire(&applied.retired);
        for warning in &applied.warnings {
            tracing::warn!("{warning}");
        }
        let metrics = &self.ports.metrics;
        for family in applied.fallbacks.iter() {
            metrics.iptables_partial_failures.of(*family).add(1);
        }
        for TableRules { family, table, total, written } in &applied.tables {
            let labels = [ip_family(*family), table.name()];
            metrics.iptables_total.with(&labels).set(*total as f64);
            metrics.iptables_last.with(&labels).set(*written as f64);
        }
        if applied.mended && changes.is_empty() {
            let what = "rules that were not as we had left them".to_owned();
            drift::tell(&Drift { what, by: None, suspected: false }, metrics, &self.ports.events);
            self.drifted = true;
        }
        self.observe(start, &changes);
        self.tell_unmet(&changes);
        self.succeed(&changes);
        Ok(applied.left_out)
    }

    /// Measures a write that went well.
    fn observe(&mut self, start: Instant, changes: &Changes) {
        let took = start.elapsed();
        let metrics = &self.ports.metrics;
        let by_scope = if self.complete { &metrics.sync_full } else { &metrics.sync_partial };
        for family in self.ports.status.served() {
            metrics.sync.of(family).observe(took.as_secs_f64());
            by_scope.of(family).observe(took.as_secs_f64());
        }
        if self.serving
            && let Some(since) = self.waiting.since
        {
            metrics.programming.only().observe(since.elapsed().as_secs_f64());
        }
        if self.complete {
            self.tally.rebuild(&self.plan);
        } else {
            self.tally.update(&self.plan, changes);
        }
        self.tally.publish(metrics, self.ports.status.served());
        let (frontends, failures) = (self.plan.frontend_count(), self.pacer.failures());
        metrics.frontends.only().set(frontends as f64);
        if !self.serving {
            let services = self.world.services().count();
            tracing::info!(services, frontends, ?took, "all services are in force");
        } else if failures > 0 {
            tracing::info!(failures, frontends, ?took, "programming works again, all services are in force");
        } else {
            tracing::debug!(changed = changes.frontends.len(), ?took, "programmed");
        }
    }

    fn succeed(&mut self, changes: &Changes) {
        let now = SystemTime::now();
        let metrics = &self.ports.metrics;
        self.ports.status.programmed(now);
        for family in self.ports.status.served() {
            metrics.last_synced.of(family).set(clock::unix_secs(now));
        }
        metrics.service_changes_pending.only().set(0.0);
        metrics.endpoint_changes_pending.only().set(0.0);
        let waiting = std::mem::take(&mut self.waiting);
        self.trigger_times(&waiting.trigger_times_nanos, changes, now);
        let told = (!self.complete).then_some(changes);
        self.ports.connections.follow(&self.plan, told);
        (self.ports.publish)(&self.plan, told);
        if !waiting.flows.is_empty() {
            (self.ports.sweep)(&self.plan, Look::Stale(&waiting.flows));
        }
        if self.drifted || !self.serving {
            (self.ports.sweep)(&self.plan, Look::Missed);
        }
        self.complete = false;
        self.serving = true;
        if let (None, Some(dataplane)) = (&self.drift, &self.dataplane) {
            self.drift = Some(drift::watch(&**dataplane, &self.ports.metrics, &self.ports.events));
        }
        if std::mem::take(&mut self.drifted) {
            self.ports.metrics.drift_mended.only().add(1);
        }
        if let Succession::Ahead(mode) = self.succession {
            let variant = self.dataplane.as_ref().and_then(|dataplane| dataplane.variant());
            let keep = self.dataplane.as_ref().and_then(|dataplane| dataplane.keep());
            let (metrics, events) = (Arc::clone(&self.ports.metrics), self.ports.events.clone());
            let successor = Successor { mode, variant, keep, metrics, events };
            self.succession = Succession::Begun(takeover::begin(successor));
        }
    }

    /// From the change in the cluster to the kernel. What happened before our start was not ours to be fast with.
    fn trigger_times(&self, nanos: &[i64], changes: &Changes, now: SystemTime) {
        let since_1970 = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let times = nanos.iter().filter_map(|nanos| u64::try_from(*nanos).ok()).map(Duration::from_nanos);
        for time in times.filter(|time| *time > since_1970(self.started)) {
            let took = since_1970(now).saturating_sub(time);
            for family in self.ports.status.served() {
                if changes.frontends.iter().any(|frontend| frontend.family() == family) {
                    self.ports.metrics.network_programming.of(family).observe(took.as_secs_f64());
                }
            }
        }
    }

    fn fail(&mut self, error: String, end: Instant) {
        self.complete = true;
        for family in self.ports.status.served() {
            let metrics = &self.ports.metrics;
            let failures = match self.mode {
                Mode::Iptables | Mode::Ipvs => &metrics.iptables_failures,
                Mode::Nftables | Mode::Userspace | Mode::None => &metrics.nftables_failures,
            };
            failures.of(family).add(1);
        }
        let retry_in = self.pacer.failed(end, chance());
        tracing::error!(%error, "cannot program the kernel, trying again");
        tracing::debug!(?retry_in, failures = self.pacer.failures(), "next attempt");
        self.ports.status.failed(SystemTime::now(), error);
    }

    /// After a panic nothing is trusted but the world: plan and dataplane are made anew.
    fn survive(&mut self, panic: &(dyn Any + Send), end: Instant) {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        tracing::error!(panic = text, "this is a bug, please report it; starting over with everything known");
        self.ports.metrics.panics.only().add(1);
        self.plan = Plan::new();
        self.dataplane = None;
        self.blank = true;
        self.complete = true;
        self.pacer.failed(end, chance());
        self.ports.status.failed(SystemTime::now(), format!("a bug: {text}"));
    }
}

/// A number from 0 to 1 that is another one each time, without a generator to carry around.
fn chance() -> f64 {
    let random = std::hash::RandomState::new().build_hasher().finish();
    (random >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests;
