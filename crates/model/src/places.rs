// SPDX-License-Identifier: Apache-2.0

//! Where endpoints run: node and zone, each pair kept once, so that an endpoint needs two bytes for it.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::endpoint::Endpoint;

/// A node and its zone, as far as they were told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) node: Option<Arc<str>>,
    pub(crate) zone: Option<Arc<str>>,
}

/// Places by number. Those that no endpoint has any more are dropped when the table has doubled, so that a cluster
/// whose nodes come and go for years does not run out of numbers.
#[derive(Debug)]
pub(crate) struct Places {
    numbers: HashMap<Place, u16>,
    /// The place of each number; `None` is free. Number 0 is nowhere.
    places: Vec<Option<Place>>,
    free: Vec<u16>,
    sweep_at: usize,
}

impl Places {
    pub(crate) const NOWHERE: u16 = 0;

    /// The number of the place where an endpoint runs. Beyond 65,535 places it is nowhere: weights by node and zone
    /// do not reach such an endpoint.
    pub(crate) fn number(&mut self, endpoint: &Endpoint) -> u16 {
        if endpoint.node.is_none() && endpoint.zone.is_none() {
            return Places::NOWHERE;
        }
        let place = Place { node: endpoint.node.clone(), zone: endpoint.zone.clone() };
        if let Some(number) = self.numbers.get(&place) {
            return *number;
        }
        let number = match self.free.pop() {
            Some(number) => number,
            None => match u16::try_from(self.places.len()) {
                Ok(number) => {
                    self.places.push(None);
                    number
                }
                Err(_) => return Places::NOWHERE,
            },
        };
        self.places[usize::from(number)] = Some(place.clone());
        self.numbers.insert(place, number);
        number
    }

    pub(crate) fn at(&self, number: u16) -> Option<&Place> {
        self.places.get(usize::from(number))?.as_ref()
    }

    /// There are twice as many as after the last sweep.
    pub(crate) fn should_sweep(&self) -> bool {
        self.numbers.len() >= self.sweep_at
    }

    /// Drops all that are not among these.
    pub(crate) fn sweep(&mut self, used: impl Iterator<Item = u16>) {
        let mut is_used = vec![false; self.places.len()];
        for number in used {
            if let Some(is_used) = is_used.get_mut(usize::from(number)) {
                *is_used = true;
            }
        }
        for (number, place) in self.places.iter_mut().enumerate() {
            if !is_used[number]
                && let Some(place) = place.take()
                && let Some(number) = self.numbers.remove(&place)
            {
                self.free.push(number);
            }
        }
        self.sweep_at = (self.numbers.len() * 2).max(SMALLEST_SWEEP);
    }
}

impl Default for Places {
    fn default() -> Places {
        Places { numbers: HashMap::new(), places: vec![None], free: Vec::new(), sweep_at: SMALLEST_SWEEP }
    }
}

const SMALLEST_SWEEP: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Conditions;

    fn on(node: &str) -> Endpoint {
        Endpoint {
            address: [10, 0, 0, 1].into(),
            conditions: Conditions::default(),
            node: Some(node.into()),
            zone: None,
            hints: None,
        }
    }

    #[test]
    fn numbers_stay_while_they_are_used_and_are_given_again_after() {
        let mut places = Places::default();
        let kept = places.number(&on("kept"));
        assert_eq!(places.number(&on("kept")), kept);
        assert_ne!(kept, Places::NOWHERE);
        for n in 0..300_000 {
            if places.should_sweep() {
                places.sweep([kept].into_iter());
            }
            assert_ne!(places.number(&on(&format!("node-{n}"))), Places::NOWHERE);
        }
        assert!(places.places.len() <= SMALLEST_SWEEP + 1, "{}", places.places.len());
        assert_eq!(places.at(kept).and_then(|place| place.node.as_deref()), Some("kept"));
    }

    #[test]
    fn without_numbers_left_an_endpoint_is_nowhere() {
        let mut places = Places::default();
        for n in 1..=65_535 {
            assert_eq!(places.number(&on(&format!("node-{n}"))), n);
        }
        assert_eq!(places.number(&on("one more")), Places::NOWHERE);
        assert!(places.at(Places::NOWHERE).is_none());
    }
}
