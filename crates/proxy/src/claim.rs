// SPDX-License-Identifier: Apache-2.0

//! One Portolan for each network namespace. Two of them would undo each other's work for ever.
//!
//! The claim is a listening socket with a name in the abstract namespace, which every network namespace has for
//! itself. It needs no file and no writable folder, the kernel takes it back however the process ends, and whoever
//! wants it next connects to it and sleeps until that happens: an upgrade that starts the new before it stops the old
//! loses no time.
//!
//! Nothing is said over the socket. Any process of the namespace could take the name, so a holder that is neither root
//! nor of our own user is not believed.

use std::{
    fmt, io,
    io::Read,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use netlink::Peer;
use tokio::sync::Notify;

/// The name of the socket; `ss -xl` shows it as `@portolan`.
const NAME: &[u8] = b"portolan";
/// The wait before the name is tried again after something unexpected.
const AGAIN: Duration = Duration::from_millis(100);

/// The right to write; given back when dropped.
#[derive(Debug)]
pub struct Claim {
    /// `None` where sockets are not to be had, or the name is held by somebody who may not have it.
    _listener: Option<UnixListener>,
}

/// Who has it.
#[derive(Debug)]
pub struct Holder {
    /// Ends with him.
    stream: UnixStream,
    /// As far as he is visible from here: not from another container.
    pid: Option<u32>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("in another container"),
        }
    }
}

impl Holder {
    /// Blocks until he has ended.
    fn wait(mut self) {
        // He never says anything, so whatever comes is the end.
        let _ = self.stream.read(&mut [0]);
    }
}

impl Claim {
    /// Takes it in the network namespace of this thread, unless somebody has it.
    pub fn stake() -> Result<Claim, Holder> {
        loop {
            let problem = match address().and_then(|address| UnixListener::bind_addr(&address)) {
                Ok(listener) => return Ok(Claim { _listener: Some(listener) }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => match holder() {
                    Ok(Ok(holder)) => return Err(holder),
                    Ok(Err(stranger)) => stranger,
                    // He has just ended.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                    Err(error) => error.to_string(),
                },
                Err(error) => error.to_string(),
            };
            tracing::warn!(problem, "cannot make sure that this is the only portolan on this node; going on");
            return Ok(Claim { _listener: None });
        }
    }
}

/// Whether anybody has it who may, in the network namespace of this thread.
pub fn is_held() -> bool {
    matches!(holder(), Ok(Ok(_)))
}

fn address() -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(NAME)
}

/// Who holds the name; in words if it is nobody who may.
fn holder() -> io::Result<Result<Holder, String>> {
    let stream = UnixStream::connect_addr(&address()?)?;
    let peer = Peer::of(&stream).map_err(io::Error::other)?;
    if !peer.is_believed() {
        return Ok(Err(format!("user {} holds the name @portolan", peer.uid)));
    }
    Ok(Ok(Holder { stream, pid: peer.pid }))
}

/// A claim that may still be somebody else's.
#[derive(Clone, Debug, Default)]
pub struct Seat {
    claim: Arc<OnceLock<Claim>>,
    bell: Arc<Notify>,
}

impl Seat {
    /// Takes the claim now, or as soon as its holder ends. In the network namespace of this thread.
    pub fn take() -> Seat {
        let seat = Seat::default();
        match Claim::stake() {
            Ok(claim) => seat.sit(claim),
            Err(holder) => {
                tracing::warn!(%holder, "another portolan keeps this node; waiting until it ends");
                let waiting = seat.clone();
                let thread = thread::Builder::new().name("claim".to_owned());
                if let Err(error) = thread.spawn(move || waiting.succeed(holder)) {
                    tracing::error!(%error, "cannot wait for its end; start portolan again when it has ended");
                }
            }
        }
        seat
    }

    /// A seat that nobody disputes.
    #[cfg(test)]
    pub(crate) fn free() -> Seat {
        let seat = Seat::default();
        seat.sit(Claim { _listener: None });
        seat
    }

    /// Whether we may write.
    pub fn is_ours(&self) -> bool {
        self.claim.get().is_some()
    }

    /// Resolves when it becomes ours; never if it was from the beginning.
    pub async fn taken(&self) {
        self.bell.notified().await;
    }

    fn succeed(&self, holder: Holder) {
        let mut holder = Some(holder);
        while !self.is_ours() {
            match holder.take() {
                Some(holder) => holder.wait(),
                None => thread::sleep(AGAIN),
            }
            match Claim::stake() {
                Ok(claim) => {
                    tracing::info!("the other portolan has ended; this one keeps the node now");
                    self.sit(claim);
                    self.bell.notify_one();
                }
                // Somebody was faster, and may be a third.
                Err(next) => holder = Some(next),
            }
        }
    }

    fn sit(&self, claim: Claim) {
        // Only one thread ever comes here.
        let _ = self.claim.set(claim);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use netlink::Netns;

    use super::*;

    /// Runs in a namespace of its own, as the name is one for each; not without root.
    fn alone(test: impl FnOnce() + Send) {
        match Netns::new() {
            Ok(netns) => netns.run(test).expect("it can be entered"),
            Err(error) => {
                assert!(std::env::var_os("CI").is_none(), "network namespaces need root: {error}");
                println!("skipped: network namespaces need root");
            }
        }
    }

    #[test]
    fn there_is_one_holder_and_he_is_known() {
        alone(|| {
            let claim = Claim::stake().expect("nobody has it");
            let holder = Claim::stake().expect_err("somebody has it");
            assert_eq!(holder.pid, Some(std::process::id()));
            drop(claim);
            holder.wait();
            Claim::stake().expect("nobody has it any more");
        });
    }

    #[test]
    fn each_namespace_has_its_own() {
        alone(|| {
            let _here = Claim::stake().expect("nobody has it here");
            alone(|| drop(Claim::stake().expect("nobody has it there")));
        });
    }

    #[test]
    fn whoever_waits_gets_it_in_the_end() {
        alone(|| {
            let first = Claim::stake().expect("nobody has it");
            let (second, third) = (Seat::take(), Seat::take());
            assert!(!second.is_ours() && !third.is_ours());
            drop(first);
            let deadline = Instant::now() + Duration::from_secs(10);
            while !second.is_ours() && !third.is_ours() {
                assert!(Instant::now() < deadline, "nobody got it");
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(20));
            assert!(second.is_ours() != third.is_ours(), "both have it");
        });
    }
}
