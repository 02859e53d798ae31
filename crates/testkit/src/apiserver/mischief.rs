// SPDX-License-Identifier: Apache-2.0

//! How the server misbehaves, and to whom.

use std::time::Duration;

use model::Kind;

use super::refusal::Refusal;

/// What goes wrong with one request.
#[derive(Clone, Debug)]
pub enum Mischief {
    /// Refused with a Status.
    Refuse(Refusal),
    /// Read, and never answered.
    Silence,
    /// The connection ends instead of an answer.
    HangUp,
    /// 200 and not one byte.
    Empty,
    /// 200 and a web page, as a proxy in between would send it.
    Page,
    /// The right answer, labelled as something else.
    Mislabel(&'static str),
    /// So many bytes at a time, with a pause after each.
    Drip { bytes: usize, pause: Duration },
    /// Every event twice, one after the other. No change to a list.
    Twice,
    /// Each two events in the wrong order, of whatever objects; never across a bookmark. An event that stays
    /// alone for a moment is sent as it is. No change to a list.
    Swap,
    /// A watch breaks after that many events (bookmarks count), a list in the middle of its body.
    Break { after: usize, with: Fault },
}

/// How a stream breaks.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connection goes, without any end of the stream.
    Cut,
    /// The stream ends properly, too early.
    End,
    /// Not one byte any more, but the connection stays.
    Stall,
    /// Half an event, then a proper end of the stream.
    Truncate,
    /// A frame that is well-formed outside and noise inside, then silence. A list: noise, then the end.
    Garbage,
    /// A frame without end: in protobuf its length is 2 GiB, in JSON its line goes on and on.
    Oversize,
    /// An ERROR event with this Status, then the end. A list ends early.
    Error(Refusal),
}

/// Which requests a mischief is meant for.
#[derive(Clone, Copy, Debug)]
pub struct When {
    kind: Option<Kind>,
    verbs: &'static [Verb],
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// One object.
    Read,
    List,
    /// A watch that begins after a known version.
    Watch,
    /// A watch with `sendInitialEvents=true`.
    WatchList,
}

impl When {
    pub const ANY: When = When { kind: None, verbs: &[Verb::Read, Verb::List, Verb::Watch, Verb::WatchList] };
    /// A list, or a page of one; not a WatchList.
    pub const LIST: When = When { kind: None, verbs: &[Verb::List] };
    /// A watch that is not a WatchList.
    pub const WATCH: When = When { kind: None, verbs: &[Verb::Watch] };
    pub const WATCH_LIST: When = When { kind: None, verbs: &[Verb::WatchList] };
    /// Both sorts of list.
    pub const ANY_LIST: When = When { kind: None, verbs: &[Verb::List, Verb::WatchList] };
    /// Both sorts of watch.
    pub const STREAM: When = When { kind: None, verbs: &[Verb::Watch, Verb::WatchList] };

    /// Only for this kind of object.
    #[must_use]
    pub fn of(self, kind: Kind) -> When {
        When { kind: Some(kind), ..self }
    }

    fn fits(self, kind: Kind, verb: Verb) -> bool {
        self.kind.is_none_or(|wanted| wanted == kind) && self.verbs.contains(&verb)
    }
}

/// What has been ordered and not yet happened.
#[derive(Default)]
pub(super) struct Script(Vec<Line>);

struct Line {
    when: When,
    times: usize,
    mischief: Mischief,
}

impl Script {
    pub(super) fn add(&mut self, when: When, times: usize, mischief: Mischief) {
        self.0.push(Line { when, times, mischief });
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The first that fits a request; it has happened then.
    pub(super) fn next(&mut self, kind: Kind, verb: Verb) -> Option<Mischief> {
        let line = self.0.iter_mut().find(|line| line.times > 0 && line.when.fits(kind, verb))?;
        if line.times != usize::MAX {
            line.times -= 1;
        }
        Some(line.mischief.clone())
    }

    /// How often something is still to happen; what happens always is not counted.
    pub(super) fn left(&self) -> usize {
        self.0.iter().map(|line| line.times).filter(|times| *times != usize::MAX).sum()
    }
}
