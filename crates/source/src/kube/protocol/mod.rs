// SPDX-License-Identifier: Apache-2.0

//! List and watch of one kind, as a state machine without IO: what to ask next, what an event means, what to do
//! about trouble. The driver ([`super::follow`]) has the sockets and the clock.
//!
//! ```text
//!   Start --- streamed list ---> Watching <---+
//!     |                             |         | closed, idle, 5xx ...: ask again from the last version
//!     +--- pages ... last page -----+---------+
//!     |                             |
//!     +--- list in one piece -------+
//!     ^                             |
//!     +------ 410, out of order ----+
//! ```
//!
//! A server restored from a backup grants a watch from a version it has yet to reach, and says nothing on it
//! (kubernetes#107457). We ask for bookmarks, so watches without a word lead to a look at the server's version.
//!
//! How a list is asked for depends on the server. Since 1.33 one in one piece is sent object by object from the server's
//! memory, at about half of what a streamed one costs it. Older ones put such a list together first: from them it is
//! streamed, and from those that cannot do that it comes in pages.
//!
//! A list that breaks off starts anew with another `Begin`, so nothing is removed for it. A watch resumes where
//! it was, so nothing is lost; what comes twice says the same twice, which the model takes for nothing.

use std::time::Duration;

use super::release::Release;

/// What to ask the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// A watch that begins with everything there is.
    Stream,
    /// A page of a list; the first has no token. `whole` asks for all at once.
    Page { token: Option<String>, whole: bool },
    /// What has changed since.
    Watch { version: String },
    /// At which version the server is: as little of a list as there can be.
    Version,
}

/// What an event's envelope says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Heading {
    /// Added or modified: it is so now.
    Present {
        version: String,
    },
    Gone {
        version: String,
    },
    Bookmark {
        version: String,
        ends_list: bool,
    },
}

/// What to do about an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Apply,
    Remove,
    Nothing,
    /// The initial list is complete.
    EndList,
}

/// Why an exchange ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The stream ended in an orderly way, as every watch does after a while.
    Closed { lived: Duration },
    /// On an open stream nothing was heard for too long.
    Idle,
    /// Not even the head of an answer came.
    Unanswered,
    /// The connection could not be made, or broke.
    Transport(String),
    /// Something that is not the protocol.
    Malformed(String),
    /// An event older than one before it.
    OutOfOrder { version: String, after: String },
    /// An HTTP status, or the Status of an ERROR event.
    Status { code: u16, message: String, retry_after: Option<Duration>, in_stream: bool },
}

impl Trouble {
    /// An end that came too soon for a watch whose time was up.
    fn is_early(&self) -> bool {
        matches!(self, Trouble::Closed { lived } if *lived < SHORT_WATCH)
    }
}

/// When to ask again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Now,
    /// After the backoff.
    Later,
    /// After the backoff, with credentials read anew.
    Renew,
    /// The server does not know the kind; there are none of it.
    Absent,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Protocol {
    stage: Stage,
    /// Lists to page before streaming is tried again, since the server did not stream the last one.
    page_lists: u32,
    /// A page token expired: ask for the next list in one piece, or a slow client never gets to the end.
    whole: bool,
    /// The server does not speak protobuf.
    json: bool,
    /// A list is coming: the initial events of a stream, or what is in one piece or on a first page.
    is_listing: bool,
    /// The server sends lists in one piece best.
    at_once: bool,
    /// Lists not to be asked for in one piece, since the server did not get to the end of the last ones.
    not_at_once: u32,
    /// Lists that came to nothing, one after the other, streamed or in one piece.
    lost_lists: u32,
    /// Watches that ended at something unreadable, one after the other, without an event before it.
    stuck: u32,
    /// Something was said on the watch.
    spoke: bool,
    /// Watches that ended without a word, one after the other.
    speechless: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Start,
    Paging { token: String },
    Watching { version: String },
}

impl Protocol {
    pub(crate) fn new(json: bool) -> Protocol {
        Protocol {
            stage: Stage::Start,
            page_lists: 0,
            whole: false,
            json,
            is_listing: false,
            at_once: false,
            not_at_once: 0,
            lost_lists: 0,
            stuck: 0,
            spoke: false,
            speechless: 0,
        }
    }

    pub(crate) fn json(&self) -> bool {
        self.json
    }

    /// Whether a list comes next. How to ask for it depends on the server: see [`Protocol::meet`].
    pub(crate) fn is_to_list(&self) -> bool {
        self.stage == Stage::Start
    }

    /// The server is of this release, or does not tell.
    pub(crate) fn meet(&mut self, release: Option<Release>) {
        self.at_once = release.is_some_and(|release| release >= SENDS_OBJECT_BY_OBJECT);
    }

    pub(crate) fn ask(&self) -> Ask {
        match &self.stage {
            Stage::Start if self.page_lists > 0 => Ask::Page { token: None, whole: self.whole },
            Stage::Start if self.at_once && self.not_at_once == 0 => Ask::Page { token: None, whole: true },
            Stage::Start => Ask::Stream,
            Stage::Paging { token } => Ask::Page { token: Some(token.clone()), whole: false },
            Stage::Watching { .. } if self.speechless >= SPEECHLESS => Ask::Version,
            Stage::Watching { version } => Ask::Watch { version: version.clone() },
        }
    }

    /// The server has begun to answer. Returns whether a list begins with it.
    pub(crate) fn accepted(&mut self) -> bool {
        self.is_listing = self.stage == Stage::Start;
        self.spoke = false;
        self.is_listing
    }

    /// A page has been taken in whole. Returns whether it was the last.
    pub(crate) fn page(&mut self, version: String, token: Option<String>) -> bool {
        let is_last = token.is_none();
        self.stage = match token {
            Some(token) => Stage::Paging { token },
            None => {
                self.page_lists = self.page_lists.saturating_sub(1);
                (self.whole, self.is_listing, self.lost_lists) = (false, false, 0);
                Stage::Watching { version }
            }
        };
        is_last
    }

    /// The server is at this version. Returns the one we were at, if that is later: then everything is to be listed.
    pub(crate) fn at_version(&mut self, version: &str) -> Option<String> {
        self.speechless = 0;
        match &mut self.stage {
            Stage::Watching { version: last } if is_older(version, last) => {
                let last = std::mem::take(last);
                self.stage = Stage::Start;
                Some(last)
            }
            _ => None,
        }
    }

    pub(crate) fn event(&mut self, heading: Heading) -> Result<Act, Trouble> {
        (self.spoke, self.speechless) = (true, 0);
        let (version, act) = match heading {
            Heading::Present { version } => (version, Act::Apply),
            Heading::Gone { version } => (version, Act::Remove),
            Heading::Bookmark { version, ends_list } if self.is_listing && ends_list => {
                (self.is_listing, self.lost_lists) = (false, 0);
                self.not_at_once = self.not_at_once.saturating_sub(1);
                self.stage = Stage::Watching { version };
                return Ok(Act::EndList);
            }
            Heading::Bookmark { version, .. } => (version, Act::Nothing),
        };
        if let Stage::Watching { version: last } = &mut self.stage {
            self.stuck = 0;
            if is_older(&version, last) {
                return Err(Trouble::OutOfOrder { version, after: last.clone() });
            }
            if !version.is_empty() {
                *last = version;
            }
        }
        // Before the end of a list nothing is remembered: its events come in no order, and it must be whole.
        Ok(act)
    }

    pub(crate) fn trouble(&mut self, trouble: &Trouble) -> Next {
        let was_streaming_list = self.ask() == Ask::Stream;
        let broke_off = self.is_listing && self.page_lists == 0 && !was_streaming_list;
        let is_watching = matches!(self.stage, Stage::Watching { .. });
        let is_stream = matches!(self.ask(), Ask::Watch { .. });
        if !is_stream {
            self.speechless = 0;
        }
        if !is_watching {
            self.stage = Stage::Start;
        }
        self.is_listing = false;
        if broke_off {
            // It has a time limit for lists, which a slow way makes too short. A stream has none.
            self.lost_lists += 1;
            if self.lost_lists >= LOST_LISTS {
                (self.not_at_once, self.lost_lists) = (OTHER_LISTS, 0);
            }
            return Next::Later;
        }
        match trouble {
            Trouble::Closed { .. } | Trouble::Idle if is_stream && !trouble.is_early() => {
                self.speechless += u32::from(!self.spoke);
                Next::Now
            }
            Trouble::Malformed(_) if is_watching => {
                // Perhaps one object cannot be read. In a list it spoils only itself.
                self.stuck += 1;
                if self.stuck >= STUCK {
                    (self.stage, self.stuck) = (Stage::Start, 0);
                }
                Next::Later
            }
            Trouble::Closed { .. } | Trouble::Idle | Trouble::Unanswered | Trouble::Malformed(_) => {
                // A server that takes the request for a stream and does not deliver can perhaps page.
                if was_streaming_list {
                    self.lost_lists += 1;
                    if self.lost_lists >= LOST_LISTS {
                        (self.page_lists, self.lost_lists) = (OTHER_LISTS, 0);
                    }
                }
                Next::Later
            }
            Trouble::Transport(_) => Next::Later,
            Trouble::OutOfOrder { .. } => {
                self.stage = Stage::Start;
                Next::Later
            }
            Trouble::Status { code, in_stream, .. } => {
                self.status(*code, was_streaming_list, is_watching, *in_stream)
            }
        }
    }

    fn status(&mut self, code: u16, was_streaming_list: bool, is_watching: bool, in_stream: bool) -> Next {
        match code {
            401 => Next::Renew,
            406 | 415 if !self.json => {
                self.json = true;
                Next::Now
            }
            // A server that cannot stream lists says so at once, or only once it has tried.
            400 | 422 if was_streaming_list => {
                self.page_lists = OTHER_LISTS;
                Next::Now
            }
            410 => {
                // Too old to go on from, or a page token that expired.
                self.whole = !is_watching;
                self.stage = Stage::Start;
                Next::Later
            }
            _ if was_streaming_list && in_stream => {
                self.page_lists = OTHER_LISTS;
                Next::Later
            }
            404 if !is_watching => Next::Absent,
            // The version may be from a server that has been restored from a backup since.
            400..=499 if is_watching && code != 403 && code != 429 => {
                self.stage = Stage::Start;
                Next::Later
            }
            _ => Next::Later,
        }
    }
}

/// Resource versions are opaque, except that within one kind and one server they are numbers that grow. What
/// does not look like that is believed.
fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}

/// A watch that ends sooner did not end because its time was up.
const SHORT_WATCH: Duration = Duration::from_secs(10);
/// Lists that come to nothing before another way is tried.
const LOST_LISTS: u32 = 2;
/// Watches that end at something unreadable before everything is listed anew.
const STUCK: u32 = 3;
/// Watches that end without a word before the server's version is looked at.
const SPEECHLESS: u32 = 2;
/// Lists that are asked for in another way after that.
const OTHER_LISTS: u32 = 8;
/// From this release on servers send a list as they encode it (KEP-5116), and read it from their memory (KEP-2340).
const SENDS_OBJECT_BY_OBJECT: Release = Release { major: 1, minor: 33 };

#[cfg(test)]
mod tests;
