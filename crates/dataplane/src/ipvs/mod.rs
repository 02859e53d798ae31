// SPDX-License-Identifier: Apache-2.0

#![doc = include_str!("README.md")]
//!
//! # Layout of the code
//!
//! Pure: [`sets`], `marks` and [`frame`] (the rules beside the sets); [`render`] (from a decision to servers, addresses
//! and members); `holdings` (what the kernel has, and what to do about it); [`program`] (all of it) with [`sim`] and
//! `text`. Effects: `probe` asks what the kernel can do, `sysctl` sets what it must be told, `readback` reads, `chains`
//! and `turn` write, `drain` sees off real servers that go, `audit` compares; [`kernel`] is whom they talk to.

mod audit;
mod chains;
mod drain;
pub mod frame;
mod holdings;
pub mod kernel;
pub(crate) mod marks;
mod meter;
mod probe;
pub mod program;
mod readback;
pub mod render;
pub(crate) mod room;
pub mod sets;
pub mod sim;
mod sysctl;
#[cfg(test)]
mod tests;
pub mod text;
mod turn;
mod watch;

use std::{
    collections::{BTreeSet, HashMap},
    sync::PoisonError,
    time::{Duration, Instant},
};

use hashbrown::HashSet;
use ipnet::IpNet;
use model::{Changes, Decision, Family, FlowRule, Frontend, PerFamily, Plan, Scheduler};
use netlink::ipvs::{ServiceKey, Timeouts};

use self::{
    chains::{Script, Standing},
    holdings::{Holdings, Work},
    kernel::{Kernel, Machine},
    readback::{Addresses, Readback},
    render::{Item, Scene},
    turn::Site,
};
use crate::{
    Abilities, Applied, Audited, Config, Dataplane, Error, Loopback, Reading, Scope, Unsupported,
    loopback::Localnet,
    xtables::{self, Table, Tables, Xtables},
};

/// What the mode must know beyond the Plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How endpoints are chosen where a Service does not say: one of the kernel's schedulers.
    pub scheduler: String,
    /// Virtual servers of these addresses are never removed.
    pub exclude: Vec<IpNet>,
    /// Answer ARP for an address only on the link that has it.
    pub strict_arp: bool,
    /// How long idle connections are remembered; 0 leaves what is.
    pub timeouts: Timeouts,
    /// Schedulers that services ask for and this kernel turned out not to have. The node's own takes their place.
    pub absent: Vec<Scheduler>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            scheduler: "rr".to_owned(),
            exclude: Vec::new(),
            strict_arp: false,
            timeouts: Timeouts::default(),
            absent: Vec::new(),
        }
    }
}

/// Keeps virtual servers.
#[derive(Debug)]
pub struct Ipvs<M = Kernel, T = Xtables> {
    machine: M,
    tables: T,
    config: Config,
    /// What the kernel holds; `None` when that is not known, at the start and after an error.
    known: Option<PerFamily<Holdings>>,
    addresses: Addresses,
    link: u32,
    clock: drain::Clock,
    round: audit::Round,
    owners: meter::Owners,
    /// Connections are counted, and what real servers that went had counted.
    counts: bool,
    retired: Vec<Reading>,
    /// The kernel's settings are ours to set: not in tests.
    settles: bool,
    settled: sysctl::Settled,
    localnet: Localnet,
    /// What is not as it should be on this host; told once.
    doubts: Vec<String>,
    /// The audit has told of what the next complete write mends.
    told: bool,
    /// Rules that the write under way wrote.
    stood: u64,
}

/// Frontends, those first that others need.
type Order<'a> = Vec<(Frontend, &'a Decision)>;

/// So many frontends are written before the next come; those that the cluster needs to start are among the first.
const AT_ONCE: usize = 256;

impl Ipvs<Kernel, Xtables> {
    /// Finds the tools of iptables, and asks the kernel whether it has all that is needed, in the network namespace of
    /// this thread.
    pub fn open(config: &Config) -> Result<Ipvs<Kernel, Xtables>, Unsupported> {
        let xtables::Found { xtables: tools, warnings: doubts } = xtables::open(config.xtables)?;
        probe::probe(&config.ipvs, config.families, &tools)?;
        let kernel =
            Kernel::open().map_err(|error| Unsupported(format!("ipvs mode cannot work here: {error}")))?;
        let mut ipvs = Ipvs::over(kernel, tools, config);
        (ipvs.doubts, ipvs.settles, ipvs.localnet) = (doubts, true, Localnet::of_kernel());
        Ok(ipvs)
    }
}

impl<M: Machine, T: Tables> Ipvs<M, T> {
    /// Works on any kernel, and takes for granted that it can do what we need.
    pub fn over(machine: M, tables: T, config: &Config) -> Ipvs<M, T> {
        Ipvs {
            machine,
            tables,
            config: config.clone(),
            known: None,
            addresses: Addresses::default(),
            link: 0,
            clock: drain::Clock::default(),
            round: audit::Round::default(),
            owners: meter::Owners::default(),
            counts: false,
            retired: Vec::new(),
            settles: false,
            settled: sysctl::Settled::default(),
            localnet: Localnet::default(),
            doubts: Vec::new(),
            told: false,
            stood: 0,
        }
    }

    /// Where work is done.
    fn at<R>(&mut self, family: Family, work: impl FnOnce(&mut Site<'_>) -> R) -> R {
        let exclude = self.config.ipvs.exclude.clone();
        let spared = |key: &ServiceKey| is_excluded(&exclude, key);
        let mut gone = Vec::new();
        let mut site = Site {
            machine: &mut self.machine,
            family,
            link: self.link,
            spared: &spared,
            retired: self.counts.then_some(&mut gone),
            absent: Vec::new(),
        };
        let done = work(&mut site);
        let absent = std::mem::take(&mut site.absent);
        let news = absent.into_iter().filter(|it| !self.config.ipvs.absent.contains(it)).collect::<Vec<_>>();
        self.config.ipvs.absent.extend(news);
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let reading = |(key, endpoint, connections)| {
            Some(Reading { frontend: *owners.get(&key)?, endpoint, connections })
        };
        self.retired.extend(gone.into_iter().filter_map(reading));
        done
    }

    /// The same for what a change was about.
    fn follow(&mut self, known: &PerFamily<Holdings>, changes: &Changes) {
        if !self.counts {
            return;
        }
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        for frontend in &changes.frontends {
            let keys = known[frontend.family()].servers_of(frontend);
            owners.extend(keys.iter().map(|key| (*key, *frontend)));
        }
        let is_there = |key: &ServiceKey| Family::BOTH.iter().any(|f| known[*f].servers.contains_key(key));
        if owners.len() > 2 * known.v4.servers.len() + 2 * known.v6.servers.len() + 64 {
            owners.retain(|key, _| is_there(key));
        }
    }

    /// Tells the meter whose virtual servers are, if there are few enough to count.
    fn publish(&mut self, known: &PerFamily<Holdings>) {
        let dests: usize =
            Family::BOTH.iter().flat_map(|f| known[*f].servers.values()).map(|s| s.dests.len()).sum();
        self.counts = dests <= self.config.counted_endpoints;
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        owners.clear();
        if self.counts {
            owners.extend(Family::BOTH.iter().flat_map(|family| known[*family].owners()));
        }
    }

    fn families(&self) -> impl Iterator<Item = Family> + use<M, T> {
        let served = self.config.families;
        Family::BOTH.into_iter().filter(move |family| served[*family])
    }

    fn mark(&self) -> u32 {
        1 << (self.config.masquerade_bit % 32)
    }

    /// What has to be in order before anything else: settings, timeouts, the link.
    fn prepare(&mut self, plan: &Plan, applied: &mut Applied) -> Result<(), Error> {
        if self.settles {
            self.settled =
                sysctl::settle(&self.config.ipvs, &mut applied.warnings).map_err(Error::Setting)?;
            let timeouts = self.config.ipvs.timeouts;
            if timeouts != Timeouts::default()
                && let Err(error) = self.machine.set_timeouts(timeouts)
            {
                applied.warnings.push(format!("the timeouts of IPVS stay what they are: {error}"));
            }
        }
        for family in self.families().filter(|family| plan.loopback_node_ports(*family)) {
            applied.warnings.push(format!(
                "node ports are not served on {family} loopback addresses: IPVS does not send from them"
            ));
        }
        let failed = |error| Error::kernel("make", crate::names::IPVS_LINK, error);
        self.link = self.machine.link().map_err(failed)?;
        // What comes between is looked at again; what is read now is not news.
        self.machine.has_news(self.link).map_err(failed)?;
        self.addresses = Addresses::read(&mut self.machine, self.link)
            .map_err(|error| Error::kernel("list", "the addresses of this node", error))?;
        Ok(())
    }

    /// See `everything`; once more where it turns out that the kernel has not a scheduler that a service asks for.
    fn complete(&mut self, plan: &Plan, family: Family, applied: &mut Applied) -> Result<Holdings, Error> {
        loop {
            let lacked = self.config.ipvs.absent.len();
            let outcome = self.everything(plan, family, applied);
            let Settings { absent, scheduler: own, .. } = &self.config.ipvs;
            if outcome.is_ok() || absent.len() == lacked {
                return outcome;
            }
            let say = |name: &Scheduler| format!("this kernel has not ip_vs_{name}; {own} serves instead");
            applied.warnings.extend(absent[lacked..].iter().map(say));
        }
    }

    /// Reads what the kernel holds of a family, and writes what is missing.
    fn everything(&mut self, plan: &Plan, family: Family, applied: &mut Applied) -> Result<Holdings, Error> {
        let addresses = self.addresses.clone();
        let settings = self.config.ipvs.clone();
        let (mark, loopback) = (self.mark(), self.localnet.guard(family));
        let scene = Scene { plan, family, settings: &settings, own: &addresses.own, mark, loopback };
        let (found, order) = self.read(&scene, applied)?;
        let standing =
            Standing::read(&mut self.tables, family).map_err(|failure| Error::tool("read", failure))?;
        // Rules that serve by other means go only when ours can.
        if !standing.serves_otherwise {
            self.stand(&scene, &standing, applied)?;
        }
        let holdings = self.fill(&scene, found, &order, applied)?;
        if standing.serves_otherwise {
            self.stand(&scene, &standing, applied)?;
        }
        Ok(holdings)
    }

    /// What is there; and all frontends, those first that others need.
    fn read<'a>(&mut self, scene: &Scene<'a>, applied: &mut Applied) -> Result<(Readback, Order<'a>), Error> {
        let failed = |error| Error::kernel("read", "sets and virtual servers", error);
        let mut found = readback::items(&mut self.machine, &self.addresses, scene.family).map_err(failed)?;
        let mut order: Vec<(Frontend, &Decision)> = scene
            .plan
            .frontends()
            .filter(|(f, _)| f.family() == scene.family)
            .map(|(f, d)| (*f, d))
            .collect();
        order.sort_by_key(|(_, decision)| decision.rank);
        let (mut wanted, mut needs) = (HashSet::new(), room::Needs::default());
        let block =
            |(frontend, decision): &(Frontend, &Decision)| render::block(scene, frontend, decision, None);
        for block in order.iter().map(block) {
            needs.count(&block, &found);
            wanted.extend(block.servers.into_iter().map(|server| server.service.key));
        }
        let blocks = || order.iter().map(block).collect();
        applied.batches += room::make(&mut self.machine, scene.family, &found, &needs, blocks)
            .map_err(|error| Error::kernel("make", "sets", error))?;
        let all = self.machine.servers().map_err(failed)?;
        let of_family = (&*all, scene.family);
        readback::servers(&mut self.machine, &mut found, &self.addresses, of_family, &wanted)
            .map_err(failed)?;
        Ok((found, order))
    }

    /// Writes what is missing, in parts, and then removes what is too much.
    fn fill(
        &mut self,
        scene: &Scene<'_>,
        found: Readback,
        order: &[(Frontend, &Decision)],
        applied: &mut Applied,
    ) -> Result<Holdings, Error> {
        let is_split = |at: &Frontend| scene.plan.decision(at).is_some_and(render::is_split);
        let marks = readback::marks(&found.items, scene.mark, is_split);
        let mut holdings = Holdings::found(found.servers, marks);
        let mut work = Work::default();
        for item in render::common(scene) {
            holdings.hold(item, &mut work);
            holdings.common.push(item);
        }
        for (key, check) in scene.plan.health() {
            if let Some(item) = render::health(check, scene.family) {
                holdings.hold(item, &mut work);
                holdings.health.insert(key.clone(), item);
            }
        }
        for part in order.chunks(AT_ONCE) {
            for (frontend, decision) in part {
                let block = block(scene, frontend, decision, &mut holdings, applied);
                holdings.replace(*frontend, Some(block), None, &mut work);
            }
            let mut ready = std::mem::take(&mut work);
            ready.add.retain(|item| !found.items.contains(item));
            self.carry_out(scene.family, ready, &mut holdings, applied)?;
        }
        work.add.retain(|item| !found.items.contains(item));
        let mut doomed: Vec<ServiceKey> =
            holdings.servers.keys().copied().filter(|key| !holdings.is_wanted(key)).collect();
        doomed.sort_unstable();
        work.doomed = doomed.into_iter().map(|key| (key, readback::needs(key, &found.items))).collect();
        let mut extra: Vec<Item> = found.items.iter().filter(|item| !holdings.has(item)).copied().collect();
        extra.sort_unstable();
        work.remove = extra;
        self.carry_out(scene.family, work, &mut holdings, applied)?;
        Ok(holdings)
    }

    fn carry_out(
        &mut self,
        family: Family,
        work: Work,
        holdings: &mut Holdings,
        applied: &mut Applied,
    ) -> Result<(), Error> {
        self.at(family, |site| site.carry_out(work, holdings, applied))
    }

    fn stand(&mut self, scene: &Scene<'_>, standing: &Standing, applied: &mut Applied) -> Result<(), Error> {
        let script = Script::to(standing, scene);
        if script.is_empty() {
            return Ok(());
        }
        let outcome = self.tables.restore(scene.family, &script.input());
        outcome.map_err(|failure| Error::tool("change", failure))?;
        applied.batches += 1;
        applied.added += script.rules;
        self.stood += script.rules;
        applied.chains += script.chains;
        Ok(())
    }

    /// Whether whoever asked for a complete write, which did this, knew for certain what there was to mend.
    fn was_told(&self, applied: &Applied) -> bool {
        let only_rules = applied.added == self.stood && applied.removed == 0;
        applied.changed_nothing() || self.told || (only_rules && self.tables.is_sure())
    }

    /// Sees off those that go, and compares a part of the rest.
    fn look(&mut self, now: Instant) -> Result<Audited, Error> {
        let Some(mut known) = self.known.take() else { return Ok(Audited::default()) };
        let mut clock = std::mem::take(&mut self.clock);
        let seen_off = self.families().try_for_each(|family| {
            let holdings = &mut known[family];
            self.at(family, |site| clock.step(site, holdings, now))
        });
        self.clock = clock;
        let drift = match seen_off {
            // Nobody knows how far it came, so nothing is known any more; everything is read and written again.
            Err(error) => Some(format!("real servers on their way out: {error}")),
            Ok(()) => {
                let wanted = audit::Wanted { known: &known, families: self.config.families, link: self.link };
                let drift = self.round.step(&mut self.machine, &wanted, now);
                // Whatever could not be read, nothing was changed.
                self.known = Some(known);
                drift.map_err(|error| Error::kernel("compare", "virtual servers", error))?
            }
        };
        let drift = drift.or_else(|| self.settled.drift());
        self.told |= drift.is_some();
        // Nobody else tells, so it is looked again soon; the round has its own pauses.
        Ok(Audited { drift, more: true, retired: std::mem::take(&mut self.retired), ..Audited::default() })
    }

    /// What a change comes to. The cost grows with the change.
    fn change(
        &mut self,
        plan: &Plan,
        changes: &Changes,
        (family, holdings): (Family, &mut Holdings),
        applied: &mut Applied,
    ) -> Result<(), Error> {
        let own = self.addresses.own.clone();
        let settings = self.config.ipvs.clone();
        // No rule is written.
        let (mark, loopback) = (self.mark(), Loopback::default());
        let scene = Scene { plan, family, settings: &settings, own: &own, mark, loopback };
        let flows: HashMap<Frontend, &FlowRule> =
            changes.flows.iter().map(|rule| (rule.frontend, rule)).collect();
        let mut touched: BTreeSet<Frontend> =
            changes.frontends.iter().copied().filter(|frontend| frontend.family() == family).collect();
        touched.extend(flows.keys().filter(|frontend| frontend.family() == family));
        let beside: Vec<Frontend> =
            touched.iter().filter_map(|f| holdings::neighbours(f, |ip| own.contains(ip))).collect();
        touched.extend(beside);
        let mut work = Work::default();
        for frontend in touched {
            let decision = plan.decision(&frontend);
            let is_split = decision.is_some_and(render::is_split);
            let block = decision.map(|decision| block(&scene, &frontend, decision, holdings, applied));
            holdings.replace(frontend, block, flows.get(&frontend).copied(), &mut work);
            if !is_split {
                holdings.marks.release(&frontend);
            }
        }
        for key in &changes.health {
            let check = plan.health().get(key).and_then(|check| render::health(check, family));
            let old = holdings.health.remove(key);
            if let Some(item) = check {
                holdings.hold(item, &mut work);
                holdings.health.insert(key.clone(), item);
            }
            old.iter().for_each(|item| holdings.release(item, &mut work));
        }
        self.carry_out(family, work, holdings, applied)
    }
}

/// What a frontend needs, with a number for its mark if it needs one.
fn block(
    scene: &Scene<'_>,
    frontend: &Frontend,
    decision: &Decision,
    holdings: &mut Holdings,
    applied: &mut Applied,
) -> render::Block {
    let mut number = None;
    if render::is_split(decision) {
        number = holdings.marks.number(frontend);
        if number.is_none() {
            applied.warnings.push(format!(
                "{frontend} ({}) treats traffic from inside like traffic from outside: {} frontends already \
                 differ, and there are no more marks",
                decision.service,
                marks::MOST
            ));
        }
    }
    render::block(scene, frontend, decision, number)
}

fn is_excluded(exclude: &[IpNet], key: &ServiceKey) -> bool {
    match key {
        ServiceKey::At { address, .. } => exclude.iter().any(|net| net.contains(address)),
        ServiceKey::Mark { .. } => false,
    }
}

impl<M: Machine, T: Tables> Dataplane for Ipvs<M, T> {
    fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Result<Applied, Error> {
        // Whoever leaves by `?` leaves nothing known behind.
        let known = self.known.take();
        let mut applied = Applied { warnings: std::mem::take(&mut self.doubts), ..Applied::default() };
        let has_news = known.is_none() || self.machine.has_news(self.link).unwrap_or(true);
        let changes = match scope {
            Scope::Only(changes) if !has_news && !changes.node_wide => Some(changes),
            _ => None,
        };
        let was_known = known.is_some();
        self.stood = 0;
        if matches!(scope, Scope::All) {
            // Somebody may have loaded what was missing.
            self.config.ipvs.absent.clear();
        }
        if changes.is_none() {
            self.prepare(plan, &mut applied)?;
        }
        let mut next = PerFamily::default();
        let mut known = known.unwrap_or_default();
        for family in self.families() {
            let mut holdings = std::mem::take(&mut known[family]);
            let outcome = match changes {
                Some(changes) => self.change(plan, changes, (family, &mut holdings), &mut applied),
                None => {
                    holdings = self.complete(plan, family, &mut applied)?;
                    Ok(())
                }
            };
            // Somebody may have changed what we thought to know.
            if let Err(error) = outcome {
                applied.fallbacks.push(family);
                applied.warnings.push(format!("{error}; everything is compared instead"));
                self.prepare(plan, &mut applied)?;
                holdings = self.complete(plan, family, &mut applied)?;
            }
            next[family] = holdings;
        }
        match changes {
            None => self.publish(&next),
            Some(changes) => self.follow(&next, changes),
        }
        self.known = Some(next);
        if changes.is_none() {
            self.round = audit::Round::default();
        }
        applied.retired = std::mem::take(&mut self.retired);
        applied.mended = matches!(scope, Scope::All) && was_known && !self.was_told(&applied);
        self.told = false;
        Ok(applied)
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        self.known = None;
        let report = crate::leftovers::remove_ipvs(&mut self.tables);
        match report.failed.is_empty() {
            true => Ok(()),
            false => Err(Error::Setting(report.failed.join("; "))),
        }
    }

    fn dump(&mut self) -> Result<String, Error> {
        let mut text = readback::text(&mut self.machine)
            .map_err(|error| Error::kernel("read", "sets and virtual servers", error))?;
        for family in Family::BOTH {
            for table in Table::ALL {
                let mut each_line = |line: &str| {
                    text.push_str(line);
                    text.push('\n');
                };
                self.tables
                    .save(family, table, &mut each_line)
                    .map_err(|failure| Error::tool("read", failure))?;
            }
        }
        Ok(text)
    }

    fn abilities(&self) -> Abilities {
        let schedulers = Scheduler::ALL.iter().copied();
        let absent = &self.config.ipvs.absent;
        let is_there = |it: &Scheduler| it.kernel_name().is_some() && !absent.contains(it);
        Abilities {
            schedulers: schedulers.filter(is_there).collect(),
            weights: true,
            one_packet: true,
            relay: false,
            instead: "the scheduler of the node chooses",
        }
    }

    fn audit(&mut self) -> Result<Audited, Error> {
        self.look(Instant::now())
    }

    fn take_lock_wait(&mut self) -> Duration {
        self.tables.take_waited()
    }

    fn is_untold(&self) -> bool {
        true
    }

    fn variant(&self) -> Option<xtables::Variant> {
        self.tables.variant()
    }

    fn meter(&self) -> Result<Option<Box<dyn crate::Meter>>, Error> {
        if self.config.counted_endpoints == 0 || !self.settles {
            return Ok(None);
        }
        Ok(Some(Box::new(meter::Meter::open(&self.owners)?)))
    }

    fn watch(&self) -> Result<Option<Box<dyn crate::Watch>>, Error> {
        watch::open(self.tables.watch()?)
    }
}
