// SPDX-License-Identifier: Apache-2.0

//! Clients that are remembered, across a table that is made anew.
//!
//! A set cannot be changed into another, so a table whose sets must be others is deleted and made in one batch: when
//! counting begins or ends, or after a release that had other sets. What packets have put there goes into the same batch,
//! with the time that is left to each. Who comes between the listing and the commit is balanced anew.

use std::time::Duration;

use model::Family;
use netlink::{
    Transport,
    nft::{Create, Element, ElementValue, Nft},
};

use super::{
    layout::Container,
    program::{Bytes, address_len},
    script::{Script, table},
    slots,
    text::keyword,
    turn::Turn,
};

impl<T: Transport> Turn<'_, T> {
    /// Commits a script. If it makes the table anew, its clients come along; they are not worth a failed commit.
    pub(super) fn commit_carrying(
        &mut self,
        family: Family,
        script: &mut Script,
    ) -> Result<(), netlink::Error> {
        if !self.known[family].replace {
            return self.commit(script);
        }
        let carried = Carried::read(self.nft, family);
        if carried.clients.is_empty() {
            return self.commit(script);
        }
        let plain = script.batch.clone();
        carried.write(family, script);
        if let Err(error) = self.commit(script) {
            script.batch = plain;
            self.commit(script)?;
            let warning = format!("the clients that session affinity remembered are forgotten: {error}");
            self.applied.warnings.push(warning);
        } else if carried.lost > 0 {
            self.applied.warnings.push(format!(
                "{} clients that session affinity remembered are forgotten: table {} {} had to be made anew, which keeps {MOST}",
                carried.lost,
                keyword(family),
                crate::names::TABLE
            ));
        }
        Ok(())
    }
}

/// Clients of one family.
#[derive(Debug)]
struct Carried {
    clients: Vec<Client>,
    /// So many were too many.
    lost: usize,
}

#[derive(Debug)]
struct Client {
    key: Bytes,
    endpoint: Bytes,
    timeout: Duration,
    left: Duration,
}

impl Carried {
    /// Those that are remembered now; none if they cannot be told, which is nothing to fail for.
    fn read<T: Transport>(nft: &mut Nft<T>, family: Family) -> Carried {
        let (mut clients, mut lost) = (Vec::new(), 0);
        let listed = nft.glance(table(family), &Container::Affinity.name(), |element| {
            let Some(client) = Client::read(family, element) else { return };
            if clients.len() < MOST {
                clients.push(client);
            } else {
                lost += 1;
            }
        });
        if listed.is_err() {
            (clients, lost) = (Vec::new(), 0);
        }
        // One that showed twice may have another endpoint by now, which the kernel would refuse.
        clients.sort_unstable_by_key(|client| client.key);
        clients.dedup_by_key(|client| client.key);
        Carried { clients, lost }
    }

    /// Adds them to what makes the table.
    fn write(&self, family: Family, script: &mut Script) {
        let set = Container::Affinity.name();
        let tag = script.frame_tag("add clients to", &set);
        let mut writer = script.batch.add_elements(tag, table(family), &set, Create::IfMissing);
        for Client { key, endpoint, timeout, left } in &self.clients {
            let (timeout, expires_in) = (Some(*timeout), Some(*left));
            writer.push(&Element { timeout, expires_in, ..Element::value(key, endpoint) });
        }
    }
}

impl Client {
    /// `None` for what is not a client, in a map that is not what ours is now, or whose time is over.
    fn read(family: Family, element: &Element<'_>) -> Option<Client> {
        let ElementValue::Bytes(value) = element.value else { return None };
        slots::pack(family, value)?;
        let key = Bytes::new(element.key).filter(|key| key.len() == 2 * address_len(family) + 8)?;
        let (timeout, left) = (element.timeout?, element.expires_in?);
        let client = Client { key, endpoint: Bytes::new(value)?, timeout, left: left.min(timeout) };
        Some(client).filter(|client| !client.left.is_zero())
    }
}

/// About 10 MB of a batch.
const MOST: usize = 100_000;
