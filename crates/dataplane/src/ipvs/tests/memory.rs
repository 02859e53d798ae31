// SPDX-License-Identifier: Apache-2.0

//! A kernel without a kernel: as strict as the real one, counts what it is asked, and fails on schedule.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
};

use netlink::{
    Error, Family,
    error::Op,
    ipset::{Element, Held, Spec},
    ipvs::{
        Change, Counters, Dest, DestKey, HeldDest, HeldService, Refusal, Service, ServiceKey, Timeouts, flags,
    },
    route::Address,
};

use crate::ipvs::kernel::Machine;

pub(super) const LINK: u32 = 7;
const OTHER: u32 = 2;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    pub(super) servers: BTreeMap<ServiceKey, (Service, BTreeMap<DestKey, Dest>)>,
    pub(super) sets: BTreeMap<String, (Spec, BTreeSet<Element>)>,
    pub(super) bound: BTreeSet<IpAddr>,
    pub(super) own: BTreeSet<IpAddr>,
    /// Open connections of real servers.
    pub(super) busy: BTreeMap<(ServiceKey, DestKey), u32>,
    /// Whether the next change fails.
    pub(super) schedule: VecDeque<bool>,
    /// Messages that change something, and those that only ask.
    pub(super) written: usize,
    pub(super) asked: usize,
    pub(super) news: bool,
    /// Schedulers that it has not.
    pub(super) lacks: Vec<&'static str>,
    /// Whom it takes for no real server.
    pub(super) refuses: Option<IpAddr>,
}

fn refused(errno: i32) -> Error {
    let errno = netlink::Errno::from_raw_os_error(errno);
    Error::Kernel { op: Op::Request("as asked"), errno, extack: None, offset: None, element: None }
}

const ENOENT: i32 = 2;
const EEXIST: i32 = 17;
const ESRCH: i32 = 3;
const EINVAL: i32 = 22;
/// `IPSET_ERR_HASH_FULL`
const FULL: i32 = 4352;

impl Memory {
    fn write(&mut self) -> Result<(), Error> {
        self.written += 1;
        match self.schedule.pop_front() {
            Some(true) => Err(refused(ENOENT)),
            _ => Ok(()),
        }
    }

    fn one(&mut self, change: &Change) -> Result<(), Error> {
        self.write()?;
        match change {
            Change::AddService(Service { scheduler, .. }) | Change::SetService(Service { scheduler, .. })
                if self.lacks.contains(&&**scheduler) =>
            {
                return Err(refused(ENOENT));
            }
            Change::AddService(service) => {
                if self.servers.contains_key(&service.key) {
                    return Err(refused(EEXIST));
                }
                let held = Service { flags: service.flags | flags::HASHED, ..service.clone() };
                self.servers.insert(service.key, (held, BTreeMap::new()));
            }
            Change::SetService(service) => {
                let (held, _) = self.servers.get_mut(&service.key).ok_or_else(|| refused(ESRCH))?;
                *held = Service { flags: service.flags | flags::HASHED, ..service.clone() };
            }
            Change::RemoveService(key) => drop(self.servers.remove(key).ok_or_else(|| refused(ESRCH))?),
            Change::AddDest(_, dest) if self.refuses == Some(dest.key.address) => {
                return Err(refused(EINVAL));
            }
            Change::AddDest(key, dest) => {
                let (_, dests) = self.servers.get_mut(key).ok_or_else(|| refused(ESRCH))?;
                if dests.insert(dest.key, *dest).is_some() {
                    return Err(refused(EEXIST));
                }
            }
            Change::SetDest(key, dest) => {
                let (_, dests) = self.servers.get_mut(key).ok_or_else(|| refused(ESRCH))?;
                *dests.get_mut(&dest.key).ok_or_else(|| refused(ENOENT))? = *dest;
            }
            Change::RemoveDest(key, dest) => {
                let (_, dests) = self.servers.get_mut(key).ok_or_else(|| refused(ESRCH))?;
                dests.remove(dest).ok_or_else(|| refused(ENOENT))?;
            }
        }
        Ok(())
    }
}

/// Without the mark: the kernel finds an element by its place.
fn place(element: &Element) -> Element {
    match *element {
        Element::Marked { address, protocol, port, .. } => Element::Address { address, protocol, port },
        other => other,
    }
}

impl Machine for Memory {
    fn servers(&mut self) -> Result<Vec<HeldService>, Error> {
        self.asked += 1;
        let held = |(service, _): &(Service, _)| HeldService {
            service: service.clone(),
            counters: Counters::default(),
        };
        Ok(self.servers.values().map(held).collect())
    }

    fn dests(&mut self, key: ServiceKey) -> Result<Vec<HeldDest>, Error> {
        self.asked += 1;
        let Some((_, dests)) = self.servers.get(&key) else { return Ok(Vec::new()) };
        let held = |dest: &Dest| HeldDest {
            dest: *dest,
            counters: Counters::default(),
            active: self.busy.get(&(key, dest.key)).copied().unwrap_or(0),
            inactive: 0,
            persistent: 0,
        };
        Ok(dests.values().map(held).collect())
    }

    fn change(&mut self, changes: &[Change]) -> Result<Vec<Refusal>, Error> {
        let mut refusals = Vec::new();
        for (index, change) in changes.iter().enumerate() {
            if let Err(error) = self.one(change) {
                refusals.push(Refusal { index, error });
            }
        }
        Ok(refusals)
    }

    fn set_timeouts(&mut self, _: Timeouts) -> Result<(), Error> {
        Ok(())
    }

    fn set(&mut self, name: &str) -> Result<Option<Held>, Error> {
        self.asked += 1;
        Ok(self.sets.get(name).map(|(spec, elements)| Held {
            name: name.to_owned(),
            kind: Some(spec.kind),
            family: Some(spec.family),
            max_elements: spec.max_elements,
            references: 0,
            elements: elements.iter().copied().collect(),
        }))
    }

    fn create(&mut self, spec: &Spec) -> Result<(), Error> {
        self.write()?;
        match self.sets.insert(spec.name.clone(), (spec.clone(), BTreeSet::new())) {
            None => Ok(()),
            Some(_) => Err(refused(EEXIST)),
        }
    }

    fn destroy(&mut self, set: &str) -> Result<(), Error> {
        self.write()?;
        self.sets.remove(set);
        Ok(())
    }

    fn swap(&mut self, one: &str, other: &str) -> Result<(), Error> {
        self.write()?;
        let [(mut first, held), (mut second, others)] =
            [one, other].map(|name| self.sets.remove(name).expect("it is there"));
        std::mem::swap(&mut first.name, &mut second.name);
        self.sets.extend([(first.name.clone(), (first, held)), (second.name.clone(), (second, others))]);
        Ok(())
    }

    fn add(&mut self, set: &str, _: Family, elements: &[Element]) -> Result<(), Error> {
        self.write()?;
        let (spec, held) = self.sets.get_mut(set).ok_or_else(|| refused(ENOENT))?;
        for element in elements {
            held.retain(|old| place(old) != place(element));
            let is_bounded = spec.kind != netlink::ipset::SetKind::BitmapPort;
            if is_bounded && held.len() >= spec.max_elements as usize {
                return Err(refused(FULL));
            }
            held.insert(*element);
        }
        Ok(())
    }

    fn remove(&mut self, set: &str, _: Family, elements: &[Element]) -> Result<(), Error> {
        self.write()?;
        let (_, held) = self.sets.get_mut(set).ok_or_else(|| refused(ENOENT))?;
        held.retain(|old| !elements.iter().any(|element| place(element) == place(old)));
        Ok(())
    }

    fn find_link(&mut self) -> Result<Option<u32>, Error> {
        Ok(Some(LINK))
    }

    fn link(&mut self) -> Result<u32, Error> {
        Ok(LINK)
    }

    fn addresses(&mut self) -> Result<Vec<Address>, Error> {
        self.asked += 1;
        let of = |link| move |ip: &IpAddr| Address { link, address: *ip, prefix_len: 32, scope: 0, flags: 0 };
        Ok(self.bound.iter().map(of(LINK)).chain(self.own.iter().map(of(OTHER))).collect())
    }

    fn bind(&mut self, _: u32, address: IpAddr) -> Result<(), Error> {
        self.write()?;
        self.bound.insert(address);
        Ok(())
    }

    fn unbind(&mut self, _: u32, address: IpAddr) -> Result<(), Error> {
        self.write()?;
        self.bound.remove(&address);
        Ok(())
    }

    fn has_news(&mut self, _: u32) -> Result<bool, Error> {
        Ok(std::mem::take(&mut self.news))
    }
}
