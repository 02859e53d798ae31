// SPDX-License-Identifier: Apache-2.0

//! The source at work, in a runtime whose clock can be moved.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::sync_channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use model::{Kind, Update};
use source::{
    Problems,
    kube::{self, Access, Status},
};
use tempfile::TempDir;
use testkit::apiserver::{ApiServer, Login};
use tokio::{runtime, sync::mpsc, time};

use crate::{
    mirror::Mirror,
    objects::{NODE, View, expected},
};

/// The source, following a server; dropped, it stops.
pub(crate) struct Following {
    /// Where the kubeconfig is and what it points to.
    pub(crate) dir: TempDir,
    pub(crate) status: Arc<Status>,
    pub(crate) problems: Arc<Problems>,
    mirror: Arc<Mutex<Mirror>>,
    runtime: runtime::Handle,
    orders: Option<mpsc::UnboundedSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

type Order = (Duration, std::sync::mpsc::SyncSender<()>);

impl Following {
    pub(crate) fn start(server: &ApiServer) -> Following {
        Following::start_with(server, Login::Token, false)
    }

    pub(crate) fn start_with(server: &ApiServer, login: Login, json: bool) -> Following {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        let settings = kube::Settings {
            kubeconfig: Some(server.kubeconfig(dir.path(), login)),
            master: None,
            json,
            user_agent: "portolan/test".into(),
            environment: kube::Environment::default(),
        };
        let (status, problems) = (Arc::new(Status::default()), Arc::new(Problems::new()));
        let mirror = Arc::new(Mutex::new(Mirror::new()));
        let (orders, receiver) = mpsc::unbounded_channel();
        let runtime = runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let handle = runtime.handle().clone();
        let thread = {
            let (status, problems, mirror) = (status.clone(), problems.clone(), mirror.clone());
            thread::spawn(move || {
                runtime.block_on(async {
                    let access = Arc::new(Access::open(settings).await.expect("the kubeconfig is good"));
                    // Short, so that the source also meets a receiver that is slower than the server.
                    let (out, updates) = mpsc::channel(4);
                    tokio::select! {
                        () = kube::run(access, NODE.into(), problems, status, out) => {}
                        () = take(updates, &mirror) => {}
                        () = obey(receiver) => {}
                    }
                });
            })
        };
        Following {
            dir,
            status,
            problems,
            mirror,
            runtime: handle,
            orders: Some(orders),
            thread: Some(thread),
        }
    }

    /// For how long of its time the source has heard nothing of a kind.
    pub(crate) fn silence(&self, kind: Kind) -> Option<Duration> {
        let _its_clock = self.runtime.enter();
        self.status.of(kind).silence()
    }

    pub(crate) fn mirror(&self) -> MutexGuard<'_, Mirror> {
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn view(&self) -> View {
        self.mirror().view().clone()
    }

    /// How often a kind was listed to its end.
    pub(crate) fn ends(&self, kind: Kind) -> usize {
        self.mirror().ends.get(&kind).copied().unwrap_or_default()
    }

    /// Moves the source's clock at once. The server's goes on as ever.
    pub(crate) fn skip(&self, time: Duration) {
        let (done, is_done) = sync_channel(1);
        self.orders.as_ref().expect("there until dropped").send((time, done)).expect("the source runs");
        is_done.recv().expect("the source runs");
    }

    /// Lets so much of the source's time go by, about fifty times as fast as ours.
    pub(crate) fn pass(&self, time: Duration) {
        let step = Duration::from_millis(500).min(time);
        for _ in 0..time.as_millis().div_ceil(step.as_millis()) {
            self.skip(step);
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until something is so; the source's time goes by about twenty times as fast as ours.
    pub(crate) fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            let error = |kind| self.status.of(kind).last_error;
            let patience = Duration::from_secs(60);
            assert!(begun.elapsed() < patience, "not so: {what}; {:?}", Kind::ALL.map(error));
            self.skip(STEP);
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the source knows what the server holds, and checks that it got there properly.
    pub(crate) fn converge(&self, server: &ApiServer) {
        let begun = Instant::now();
        while self.view() != expected(server) || !self.mirror().is_complete() {
            assert!(begun.elapsed() < Duration::from_secs(60), "not converged: {}", self.differences(server));
            self.skip(STEP);
            thread::sleep(Duration::from_millis(10));
        }
        let mirror = self.mirror();
        assert_eq!(mirror.complaints, [""; 0]);
        mirror.check_world();
    }

    /// For people: what is wrong, and what the source says about it.
    fn differences(&self, server: &ApiServer) -> String {
        let (known, wanted) = (self.view(), expected(server));
        let mut text = String::new();
        for (key, said) in known.iter().filter(|(key, said)| wanted.get(*key) != Some(said)).take(9) {
            text += &format!("\n  known:  {key}: {said}");
        }
        for (key, said) in wanted.iter().filter(|(key, said)| known.get(*key) != Some(said)).take(9) {
            text += &format!("\n  wanted: {key}: {said}");
        }
        for kind in Kind::ALL {
            text += &format!("\n  {kind:?}: {:?}", self.status.of(kind));
        }
        text
    }

    /// Forgets what was removed and told so far.
    pub(crate) fn begin(&self) {
        let mut mirror = self.mirror();
        mirror.removed.clear();
        mirror.told = 0;
        mirror.take_is_dirty();
    }

    /// Lets the source see that all is well, so that the next trouble finds it without any backoff.
    pub(crate) fn settle(&self, server: &ApiServer) {
        // At first some kinds may still wait for their next try; then their watches have to live for a while.
        for _ in 0..2 {
            self.skip(Duration::from_secs(20));
            let heard = |kind| self.silence(kind).is_some_and(|silence| silence < Duration::from_secs(15));
            self.wait_until("bookmarks are heard", || {
                server.send_bookmarks();
                Kind::ALL.into_iter().all(heard)
            });
        }
    }

    /// What was removed since [`Following::begin`].
    pub(crate) fn removed(&self) -> Vec<String> {
        self.mirror().removed.clone()
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        drop(self.orders.take());
        let ended = self.thread.take().map(JoinHandle::join);
        // If the test fails already, its own message is the better one.
        if !thread::panicking() {
            assert!(matches!(ended, None | Some(Ok(()))), "the source panicked");
        }
    }
}

async fn take(mut updates: mpsc::Receiver<Update>, mirror: &Mutex<Mirror>) {
    while let Some(update) = updates.recv().await {
        mirror.lock().unwrap_or_else(PoisonError::into_inner).apply(update);
    }
}

async fn obey(mut orders: mpsc::UnboundedReceiver<Order>) {
    while let Some((duration, done)) = orders.recv().await {
        time::pause();
        time::advance(duration).await;
        time::resume();
        // A test that no longer waits has failed.
        let _ = done.send(());
    }
}

/// How far the source's clock is moved in each hundredth of a second of waiting.
const STEP: Duration = Duration::from_millis(200);
