// SPDX-License-Identifier: Apache-2.0

//! Counters that rules of iptables with `-m nfacct` count with, and that outlive the rules.

use crate::{
    Errno,
    attr::{NLM_F_ACK, NLM_F_CREATE, Writer},
    channel::Channel,
    codec::{Message, Reader, each_attr},
    error::Error,
    socket::{Protocol, Socket, Transport},
};

/// `NFNL_SUBSYS_ACCT` above the number of a message.
const NEW: u16 = 7 << 8;
const GET: u16 = (7 << 8) + 1;
/// `NFACCT_NAME`, which has at most 31 bytes, and `NFACCT_PKTS`.
const NAME: u16 = 1;
const PACKETS: u16 = 2;

/// A connection to them.
#[derive(Debug)]
pub struct Accounts<T = Socket> {
    channel: Channel<T>,
}

impl Accounts<Socket> {
    /// Connects in the network namespace of this thread.
    pub fn open() -> Result<Accounts<Socket>, Error> {
        Ok(Accounts::over(Socket::open(Protocol::Netfilter)?))
    }
}

impl<T: Transport> Accounts<T> {
    /// A connection over any transport.
    pub fn over(transport: T) -> Accounts<T> {
        Accounts { channel: Channel::new(transport) }
    }

    /// Makes a counter. One that is there goes on counting.
    pub fn ensure(&mut self, name: &str) -> Result<(), Error> {
        let flags = NLM_F_ACK | NLM_F_CREATE;
        let made = self.channel.exchange("make a counter", (NEW, flags), |w| fill(w, name), |_| Ok(()));
        match made {
            // That is how the kernel says that it is there.
            Err(Error::Kernel { errno: Errno::BUSY | Errno::EXIST, .. }) => Ok(()),
            made => made,
        }
    }

    /// How many packets it has counted; `None` if it is not there.
    pub fn packets(&mut self, name: &str) -> Result<Option<u64>, Error> {
        let mut packets = None;
        let asked = self.channel.exchange(
            "read a counter",
            (GET, NLM_F_ACK),
            |w| fill(w, name),
            |message| {
                packets = read(message)?;
                Ok(())
            },
        );
        match asked {
            Err(error) if error.is_not_found() => Ok(None),
            asked => asked.map(|()| packets),
        }
    }
}

fn fill(w: &mut Writer, name: &str) {
    // Of no family.
    w.raw(&[0; 4]);
    w.str(NAME, name);
}

/// What a message says was counted.
pub(crate) fn read(message: &Message<'_>) -> Result<Option<u64>, Error> {
    let mut body = Reader::new(message.body);
    let _head: [u8; 4] = body.array()?;
    let mut packets = None;
    each_attr(body.rest(), |attr| {
        if attr.kind == PACKETS {
            packets = Some(attr.be64()?);
        }
        Ok(())
    })?;
    Ok(packets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Netns;

    #[test]
    fn a_counter_is_made_once_and_read() {
        let Ok(netns) = Netns::new() else {
            assert!(std::env::var_os("CI").is_none(), "no namespace");
            eprintln!("skipped: no namespace");
            return;
        };
        netns
            .run(|| {
                let mut accounts = Accounts::open().unwrap();
                match accounts.ensure("probe_pkts") {
                    Err(Error::Kernel { errno: Errno::INVAL | Errno::OPNOTSUPP, .. }) => {
                        eprintln!("skipped: this kernel has no nfnetlink_acct");
                        return;
                    }
                    made => made.unwrap(),
                }
                accounts.ensure("probe_pkts").unwrap();
                assert_eq!(accounts.packets("probe_pkts").unwrap(), Some(0));
                assert_eq!(accounts.packets("no_such_counter").unwrap(), None);
            })
            .unwrap();
    }
}
