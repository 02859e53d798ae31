// SPDX-License-Identifier: Apache-2.0

//! What chains there are, whoever made them and in whatever family: to see who else decides about packets.

use super::{
    connection::Nft,
    decode,
    encode::{self, msg},
    types::Chain,
};
use crate::{attr::NLM_F_DUMP, codec::Reader, error::Error, socket::Transport};

/// A chain and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surveyed {
    /// The family's name in nft's language; empty for one that has none.
    pub family: &'static str,
    /// The table's name.
    pub table: String,
    /// The chain.
    pub chain: Chain,
}

impl<T: Transport> Nft<T> {
    /// The chains of all tables of all families for which `keep` holds.
    pub fn survey(&mut self, keep: impl Fn(&Surveyed) -> bool) -> Result<Vec<Surveyed>, Error> {
        self.retry(|nft, _| {
            let mut found = Vec::new();
            let all = |w: &mut crate::attr::Writer| encode::genmsg(w, 0);
            nft.channel().exchange("list all chains", (msg::GETCHAIN, NLM_F_DUMP), all, |message| {
                let mut body = Reader::new(message.body);
                let [number, _, _, _] = body.array()?;
                let listed = decode::chain(body.rest())?;
                let table = listed.table.to_owned();
                let surveyed = Surveyed { family: family(number), table, chain: listed.object.object };
                if keep(&surveyed) {
                    found.push(surveyed);
                }
                Ok(())
            })?;
            Ok(found)
        })
    }
}

fn family(number: u8) -> &'static str {
    match number {
        1 => "inet",
        2 => "ip",
        3 => "arp",
        5 => "netdev",
        7 => "bridge",
        10 => "ip6",
        _ => "",
    }
}
