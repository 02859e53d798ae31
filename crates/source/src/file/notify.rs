// SPDX-License-Identifier: Apache-2.0

//! The kernel's word that files have changed. Without it (too many watches in use, a file system that cannot)
//! the regular look at the folder still finds every change, only later.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
};

use futures_util::{FutureExt, StreamExt};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio::time::{Instant, timeout_at};

use super::{
    scan::{folder_of, is_manifest, looks_like_folder},
    settle::Notices,
};

pub(super) struct Notifier {
    target: PathBuf,
    events: Option<(EventStream<Vec<u8>>, Watches)>,
    /// The folder with the manifests.
    folder: PathBuf,
    /// The watches on that folder, and on the one it is in.
    inner: Option<WatchDescriptor>,
    outer: Option<WatchDescriptor>,
}

impl Notifier {
    pub(super) fn new(target: &Path) -> Notifier {
        let events = Inotify::init()
            .and_then(|inotify| inotify.into_event_stream(vec![0; 16 << 10]))
            .inspect_err(|error| tracing::warn!(%error, "no inotify; files are looked at every few seconds"))
            .ok()
            .map(|stream| {
                let watches = stream.watches();
                (stream, watches)
            });
        Notifier { target: target.to_owned(), events, folder: PathBuf::new(), inner: None, outer: None }
    }

    /// Watches the folders as they are now: they may have come, gone, or been replaced by others. True if the
    /// folder with the manifests is not the one that was watched.
    pub(super) fn arm(&mut self) -> bool {
        let Some((_, watches)) = &mut self.events else {
            return false;
        };
        let is_folder = self.target.is_dir() || (!self.target.exists() && looks_like_folder(&self.target));
        self.folder = if is_folder { self.target.clone() } else { folder_of(&self.target).to_owned() };
        let outer_folder = folder_of(&self.folder);
        let inner = add(watches, &self.folder, FILES | FOLDER);
        // In a folder like /tmp this sees a lot that is not for us, but only comings and goings.
        let outer = if outer_folder == self.folder { None } else { add(watches, outer_folder, FOLDER) };
        let is_another = self.inner != inner;
        for old in [self.inner.take(), self.outer.take()].into_iter().flatten() {
            if Some(&old) != inner.as_ref() && Some(&old) != outer.as_ref() {
                // It fails if the kernel was faster, because the folder is gone.
                let _ = watches.remove(old);
            }
        }
        (self.inner, self.outer) = (inner, outer);
        is_another
    }

    /// Whether the kernel tells of the folder with the manifests.
    pub(super) fn hears(&self) -> bool {
        self.events.is_some() && self.inner.is_some()
    }

    /// Waits for notices, and takes all there are; or until the deadline. There is no pause in which more could
    /// come: what comes while files are being read is taken together afterwards.
    pub(super) async fn wait(&mut self, deadline: Instant) -> Notices {
        let mut notices = Notices::default();
        while let Ok(event) = timeout_at(deadline, self.next()).await {
            let mut matters = self.take(event, &mut notices);
            while let Some(event) = self.next().now_or_never() {
                matters |= self.take(event, &mut notices);
            }
            if matters {
                break;
            }
        }
        notices
    }

    async fn next(&mut self) -> io::Result<EventOwned> {
        match &mut self.events {
            Some((stream, _)) => match stream.next().await {
                Some(event) => event,
                None => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

    /// True if the event matters.
    fn take(&mut self, event: io::Result<EventOwned>, notices: &mut Notices) -> bool {
        let Ok(event) = event else {
            // Cannot happen with a valid descriptor; if it does, the regular look has to do.
            self.events = None;
            return false;
        };
        if event.mask.contains(EventMask::Q_OVERFLOW) {
            notices.lost = true;
            return true;
        }
        let swapped = EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT;
        if event.mask.intersects(swapped) {
            notices.all = true;
            return true;
        }
        let Some(name) = event.name else {
            return false;
        };
        if Some(&event.wd) == self.inner.as_ref() {
            self.take_inner(name, event.mask, notices)
        } else if Some(&event.wd) == self.outer.as_ref() {
            // The folder itself has come, gone or been replaced.
            let ours = self.folder.file_name() == Some(&name) || is_swap(&name);
            notices.all |= ours;
            ours
        } else {
            false
        }
    }

    fn take_inner(&self, name: OsString, mask: EventMask, notices: &mut Notices) -> bool {
        if is_swap(&name) {
            notices.all = true;
        } else if self.target.file_name() != Some(&name) && !is_manifest(Path::new(&name)) {
            return false;
        } else if mask.contains(EventMask::MODIFY) {
            notices.write(name);
            // Nothing to do yet; but it must be known when another file's notice comes.
            return false;
        } else if mask.contains(EventMask::CREATE) {
            // A file that was created will be closed; a link will not.
            if self.folder.join(&name).is_symlink() {
                notices.settle(name);
            } else {
                notices.touch(name);
            }
        } else if mask.contains(EventMask::ATTRIB) {
            // It may have become readable.
            notices.touch(name);
        } else {
            // Closed after writing, renamed, or deleted.
            notices.settle(name);
        }
        true
    }
}

/// `..data` and its kin: mounted ConfigMaps and Secrets are replaced as a whole by turning one link.
fn is_swap(name: &OsString) -> bool {
    name.as_encoded_bytes().starts_with(b"..")
}

fn add(watches: &mut Watches, folder: &Path, mask: WatchMask) -> Option<WatchDescriptor> {
    match watches.add(folder, mask) {
        Ok(watch) => Some(watch),
        Err(error) => {
            tracing::debug!(folder = %folder.display(), %error, "cannot watch");
            None
        }
    }
}

const FOLDER: WatchMask = WatchMask::CREATE
    .union(WatchMask::DELETE)
    .union(WatchMask::MOVE)
    .union(WatchMask::DELETE_SELF)
    .union(WatchMask::MOVE_SELF)
    .union(WatchMask::ONLYDIR);
const FILES: WatchMask = WatchMask::CLOSE_WRITE.union(WatchMask::MODIFY).union(WatchMask::ATTRIB);
