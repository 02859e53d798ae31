// SPDX-License-Identifier: Apache-2.0

//! What must be undone when the run is interrupted: servers and subjects outlive a Ctrl-C otherwise.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use anyhow::Result;
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

type Step = Box<dyn Fn() + Send>;

static STEPS: Mutex<Vec<(u64, Step)>> = Mutex::new(Vec::new());
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Stands for a registered step.
#[derive(Debug)]
pub struct Ticket(u64);

impl Ticket {
    /// The step is no longer needed.
    pub fn cancel(&self) {
        STEPS.lock().unwrap_or_else(PoisonError::into_inner).retain(|(id, _)| *id != self.0);
    }
}

/// Has `step` run when the process is interrupted before the ticket is cancelled.
pub fn register(step: impl Fn() + Send + 'static) -> Ticket {
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    STEPS.lock().unwrap_or_else(PoisonError::into_inner).push((id, Box::new(step)));
    Ticket(id)
}

/// A folder that goes with its handle, and when the process is interrupted.
pub fn scratch() -> Result<(TempDir, Ticket)> {
    let folder = TempDir::with_prefix("portolan-bench-")?;
    let path = folder.path().to_owned();
    // Nothing more can be done about it on the way out.
    Ok((folder, register(move || drop(std::fs::remove_dir_all(&path)))))
}

/// Waits for SIGINT and SIGTERM on a thread of its own; then undoes everything, the latest first, and ends.
pub fn on_interrupt() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        });
        eprintln!("interrupted: cleaning up");
        for (_, step) in STEPS.lock().unwrap_or_else(PoisonError::into_inner).drain(..).rev() {
            step();
        }
        std::process::exit(130);
    });
    Ok(())
}
