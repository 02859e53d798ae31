// SPDX-License-Identifier: Apache-2.0

//! Waiting for a future or a point in time, on a thread that has nothing else to do.
//!
//! A runtime of tokio does the same, but with a timer wheel, a driver and a scheduler, all of which have to come from memory
//! again with each change: a tenth of what the loop touches. Nothing that the loop waits for needs a runtime.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::Instant,
};

/// Wakes the thread that made it, which must be the one that waits.
pub(super) struct Sleeper(Waker);

struct Alarm(Thread);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

impl Sleeper {
    pub(super) fn new() -> Sleeper {
        Sleeper(Arc::new(Alarm(thread::current())).into())
    }

    /// What the future comes to; `None` if that is not known when `due` has come.
    pub(super) fn wait<F: Future>(&self, mut future: Pin<&mut F>, due: Instant) -> Option<F::Output> {
        let mut context = Context::from_waker(&self.0);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return Some(output);
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            // Returns at once if the future has woken us since it was asked, and now and then for no reason.
            thread::park_timeout(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, time::Duration};

    use tokio::sync::{Notify, mpsc};

    use super::*;

    #[test]
    fn what_comes_ends_the_wait() {
        let (sender, mut receiver) = mpsc::channel(1);
        let giver = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            sender.blocking_send(7)
        });
        let later = Instant::now() + Duration::from_secs(60);
        assert_eq!(Sleeper::new().wait(pin!(receiver.recv()), later), Some(Some(7)));
        assert!(Instant::now() < later, "nobody was woken: it was only found at the end");
        assert!(giver.join().is_ok_and(|sent| sent.is_ok()));
        assert_eq!(Sleeper::new().wait(pin!(receiver.recv()), later), Some(None), "nobody is left to send");
    }

    #[test]
    fn so_does_the_time() {
        let (never, began) = (Notify::new(), Instant::now());
        let due = began + Duration::from_millis(20);
        assert_eq!(Sleeper::new().wait(pin!(never.notified()), due), None);
        assert!(Instant::now() >= due);
        assert_eq!(
            Sleeper::new().wait(pin!(never.notified()), began),
            None,
            "what is past is not waited for"
        );
    }

    #[test]
    fn what_is_there_counts_even_when_it_is_late() {
        let rung = Notify::new();
        rung.notify_one();
        assert_eq!(Sleeper::new().wait(pin!(rung.notified()), Instant::now()), Some(()));
    }

    #[test]
    fn a_call_for_no_reason_does_not_end_the_wait() {
        let sleeper = Sleeper::new();
        sleeper.0.wake_by_ref();
        let due = Instant::now() + Duration::from_millis(20);
        assert_eq!(sleeper.wait(pin!(Notify::new().notified()), due), None);
        assert!(Instant::now() >= due);
    }
}
