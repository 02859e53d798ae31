// SPDX-License-Identifier: Apache-2.0

//! The driver of [`super::protocol`] for one kind: requests, bodies, time.

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use kube::client::Body;
use model::{Kind, Update};
use tokio::{
    sync::mpsc::Sender,
    time::{Instant, sleep, timeout},
};

use super::{
    access::{Access, Pass, sentence},
    backoff::{Backoff, Random},
    exchange::Silence,
    pages::Page,
    protocol::{Act, Ask, Next, Protocol, Trouble},
    status::Status,
    wire::{self, Format, Frames, Unreadable},
};
use crate::{
    intern::Interner,
    lower::{Lowered, Resource, Scope, describe as describe_object},
    object::Metadata,
    problem::{Problem, Problems, Reason, Subject},
};

/// Where a kind is found, and which of its objects are asked for.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Tried in order; the next when the server does not know one.
    pub(crate) paths: &'static [&'static str],
    pub(crate) label_selector: &'static str,
    pub(crate) field_selector: String,
    /// A cluster may lack the kind, or not let us see it; then there are none. Of other kinds that is never
    /// believed: a server that is still starting answers 404 too, and every service would go.
    pub(crate) may_be_absent: bool,
}

/// What all kinds share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) access: Arc<Access>,
    pub(crate) status: Arc<Status>,
    pub(crate) problems: Arc<Problems>,
    pub(crate) interner: Arc<Mutex<Interner>>,
    pub(crate) node_name: Arc<str>,
    pub(crate) out: Sender<Update>,
}

/// The receiver of updates is gone: there is nobody left to tell.
#[derive(Debug)]
pub(crate) struct Deaf;

/// How an exchange can end early.
enum Stop {
    Trouble(Trouble),
    Deaf,
}

impl From<Trouble> for Stop {
    fn from(trouble: Trouble) -> Stop {
        Stop::Trouble(trouble)
    }
}

impl From<Deaf> for Stop {
    fn from(_: Deaf) -> Stop {
        Stop::Deaf
    }
}

/// Follows one kind for ever.
pub(crate) struct Follower<R> {
    shared: Shared,
    place: Place,
    /// Which of the paths is in use.
    path: usize,
    protocol: Protocol,
    backoff: Backoff,
    /// Requests in a row that were never answered.
    unanswered: u32,
    /// Requests in a row that were refused with 403.
    forbidden: u32,
    random: Random,
    kind: PhantomData<fn() -> R>,
}

impl<R: Resource> Follower<R> {
    pub(crate) fn new(shared: Shared, place: Place) -> Follower<R> {
        let protocol = Protocol::new(shared.access.settings().json);
        let (backoff, random) = (Backoff::new(), Random::new());
        Follower {
            shared,
            place,
            path: 0,
            protocol,
            backoff,
            unanswered: 0,
            forbidden: 0,
            random,
            kind: PhantomData,
        }
    }

    /// Ends only when nobody listens any more.
    pub(crate) async fn run(mut self) {
        loop {
            let pass = self.shared.access.pass().await;
            let trouble = match self.exchange(&pass).await {
                Ok(()) => continue,
                Err(Stop::Deaf) => return,
                Err(Stop::Trouble(trouble)) => trouble,
            };
            let next = self.next(&trouble);
            self.note(&trouble, next);
            if self.is_kept_from_us() && self.tell_none().await.is_err() {
                return;
            }
            match next {
                // Whoever cuts our watch has perhaps cut those of all nodes.
                Next::Now if matches!(trouble, Trouble::Closed { .. }) => {
                    sleep(SPREAD.mul_f64(self.random.fraction())).await
                }
                Next::Now => {}
                Next::Later => sleep(self.pause(&trouble)).await,
                Next::Renew => {
                    sleep(self.pause(&trouble)).await;
                    self.shared.access.renew(pass.generation).await;
                }
                Next::Absent if self.path + 1 < self.place.paths.len() => self.path += 1,
                Next::Absent => {
                    self.path = 0;
                    if self.tell_none().await.is_err() {
                        return;
                    }
                    sleep(ABSENT_RETRY).await;
                }
            }
            if self.shared.out.is_closed() {
                return;
            }
        }
    }

    fn next(&mut self, trouble: &Trouble) -> Next {
        self.unanswered = match trouble {
            Trouble::Transport(_) | Trouble::Unanswered => self.unanswered + 1,
            _ => 0,
        };
        if !matches!(trouble, Trouble::Status { code: 403, .. }) {
            self.forbidden = 0;
        } else {
            // Who refuses is there. Whether to believe it is to be known soon, however long the server was away.
            if self.forbidden == 0 && self.place.may_be_absent {
                self.backoff.reset();
            }
            self.forbidden += 1;
        }
        match self.protocol.trouble(trouble) {
            Next::Absent if !self.place.may_be_absent => Next::Later,
            // Perhaps it is the client: what it knows of authorities and proxies is from when it was made.
            Next::Later if self.unanswered >= UNANSWERED => {
                self.unanswered = 0;
                Next::Renew
            }
            next => next,
        }
    }

    /// Whether a kind that a cluster may lack is kept from us, and has not been seen before: roles made for an
    /// older kube-proxy do not have it, and that must not hold up all other kinds. A server that has just been
    /// started refuses everybody for some seconds, and what it holds must not be taken for nothing.
    fn is_kept_from_us(&self) -> bool {
        self.place.may_be_absent && self.forbidden > FORBIDDEN_TRIES && !self.shared.status.of(R::KIND).listed
    }

    /// One request and all of its answer. Returns when a page has been taken in.
    async fn exchange(&mut self, pass: &Pass) -> Result<(), Stop> {
        if self.protocol.is_to_list() {
            self.protocol.meet(self.shared.access.release(pass).await.map_err(Trouble::Transport)?);
        }
        let ask = self.protocol.ask();
        let request = self.request(&ask);
        let response = self.shared.access.send(pass, request, HEAD_TIMEOUT).await;
        let response = response.map_err(|silence| match silence {
            Silence::Patience => Trouble::Unanswered,
            Silence::Transport(reason) => Trouble::Transport(reason),
        })?;
        let (head, body) = response.into_parts();
        let format = content_type(&head.headers).and_then(Format::of_content_type);
        if head.status != StatusCode::OK {
            return Err(refusal(head.status, &head.headers, format, body).await.into());
        }
        let Some(format) = format else {
            let said = content_type(&head.headers).unwrap_or("nothing").to_owned();
            return Err(Trouble::Malformed(format!("an answer of content type {said:?}")).into());
        };
        if self.protocol.accepted() {
            self.shared.status.note(R::KIND, |status| status.lists += 1);
            self.send(Update::Begin(R::KIND)).await?;
        }
        match ask {
            Ask::Page { .. } => self.take_page(format, body).await,
            Ask::Version => self.take_version(format, body).await,
            Ask::Stream | Ask::Watch { .. } => {
                self.shared.status.note(R::KIND, |status| {
                    status.watches += 1;
                    status.connected = true;
                });
                self.take_stream(format, body).await
            }
        }
    }

    async fn take_page(&mut self, format: Format, mut body: Body) -> Result<(), Stop> {
        let mut page = Page::new(format);
        while let Some(bytes) = next_bytes(&mut body, LIST_IDLE).await? {
            self.shared.status.heard(R::KIND);
            page.push(&bytes);
            drop(bytes);
            while let Some(item) = page.next()? {
                if let Some(update) = self.present(item.object(), Stage::List) {
                    self.send(update).await?;
                }
            }
        }
        let (version, token) = page.finish()?;
        if self.protocol.page(version, token) {
            self.end_list().await?;
        }
        Ok(())
    }

    async fn take_version(&mut self, format: Format, mut body: Body) -> Result<(), Stop> {
        let mut page = Page::new(format);
        while let Some(bytes) = next_bytes(&mut body, LIST_IDLE).await? {
            page.push(&bytes);
            while page.next()?.is_some() {}
        }
        let (version, _) = page.finish()?;
        if let Some(last) = self.protocol.at_version(&version) {
            tracing::warn!(
                "the API server went back from version {last} to {version}, as after a restored backup: listing {} again",
                name(R::KIND)
            );
            sleep(SPREAD.mul_f64(self.random.fraction())).await;
        }
        Ok(())
    }

    async fn take_stream(&mut self, format: Format, mut body: Body) -> Result<(), Stop> {
        let opened = Instant::now();
        let mut frames = Frames::new(format);
        let mut stage =
            if matches!(self.protocol.ask(), Ask::Watch { .. }) { Stage::Watch } else { Stage::List };
        loop {
            let patience = if stage == Stage::List { LIST_IDLE } else { IDLE };
            let bytes = match next_bytes(&mut body, patience).await {
                Ok(Some(bytes)) => bytes,
                ended => return Err(self.ended(ended.err(), stage, opened.elapsed()).into()),
            };
            // Less proves little: a server can list, send an event, and lose us again.
            if stage == Stage::Watch && opened.elapsed() >= STEADY {
                self.backoff.reset();
            }
            frames.push(&bytes);
            drop(bytes);
            while let Some(event) = frames.next()? {
                let update = match self.protocol.event(event.heading)? {
                    // Also while a list is streamed an object can change into one that is nothing to us.
                    Act::Apply => self.present(format.object(event.object), Stage::Watch),
                    Act::Remove => self.gone(format.object(event.object)),
                    Act::Nothing => None,
                    Act::EndList => {
                        self.end_list().await?;
                        stage = Stage::Watch;
                        None
                    }
                };
                if let Some(update) = update {
                    self.send(update).await?;
                }
                self.shared.status.heard(R::KIND);
            }
        }
    }

    /// How a stream ended. Whoever ends a watch that has lived for a while, it is in order: load balancers cut those on
    /// which nothing is said, and must not make us slow.
    fn ended(&mut self, trouble: Option<Trouble>, stage: Stage, lived: Duration) -> Trouble {
        let is_steady = stage == Stage::Watch && lived >= STEADY;
        if is_steady {
            self.backoff.reset();
        }
        match trouble {
            None => Trouble::Closed { lived },
            Some(Trouble::Transport(reason)) if is_steady => {
                tracing::debug!("{}: {reason}", name(R::KIND));
                Trouble::Closed { lived }
            }
            Some(trouble) => trouble,
        }
    }

    async fn end_list(&mut self) -> Result<(), Deaf> {
        self.send(Update::End(R::KIND)).await?;
        self.shared.status.note(R::KIND, |status| status.listed = true);
        tracing::debug!("listed {}", name(R::KIND));
        Ok(())
    }

    /// The server does not have the kind at all, so there are no objects of it.
    async fn tell_none(&mut self) -> Result<(), Deaf> {
        self.send(Update::Begin(R::KIND)).await?;
        self.end_list().await
    }

    /// What an object that is there says. In a list, one that says nothing is simply not mentioned.
    fn present(&self, object: Result<R, Unreadable>, stage: Stage) -> Option<Update> {
        let object = object.map_err(|unreadable| self.undecodable(&unreadable)).ok()?;
        let nameless = Metadata::default();
        let metadata = object.metadata().unwrap_or(&nameless);
        self.scoped(metadata, |scope| match object.lower(scope) {
            Lowered::Object(update) => Some(update),
            Lowered::Ignored | Lowered::Refused if stage == Stage::List => None,
            Lowered::Ignored | Lowered::Refused => R::gone(metadata, scope),
        })
    }

    fn gone(&self, object: Result<R, Unreadable>) -> Option<Update> {
        let metadata = match object {
            Ok(object) => object.metadata().cloned().unwrap_or_default(),
            // Its name is all that matters now.
            Err(unreadable) => *unreadable.metadata,
        };
        self.scoped(&metadata, |scope| R::gone(&metadata, scope))
    }

    /// What is found to be wrong with the object is all that is wrong with it.
    fn scoped<T>(&self, metadata: &Metadata, act: impl FnOnce(&mut Scope<'_>) -> T) -> T {
        let mut found = Vec::new();
        let mut interner = self.shared.interner.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scope = Scope {
            interner: &mut interner,
            node_name: &self.shared.node_name,
            report: &mut |problem| found.push(problem),
        };
        let result = act(&mut scope);
        self.settle(metadata, found);
        result
    }

    fn undecodable(&self, unreadable: &Unreadable) {
        let object = describe_object(R::NAME, &unreadable.metadata);
        let problem = Problem::new(object, "", Reason::Undecodable, &unreadable.error);
        self.settle(&unreadable.metadata, vec![problem]);
    }

    fn settle(&self, metadata: &Metadata, found: Vec<Problem>) {
        self.shared.problems.settle(|| Subject::Object(describe_object(R::NAME, metadata)), found);
    }

    async fn send(&self, update: Update) -> Result<(), Deaf> {
        self.shared.out.send(update).await.map_err(|_| Deaf)
    }

    fn request(&mut self, ask: &Ask) -> Request<Body> {
        let mut query = Query::new(self.place.paths[self.path]);
        query.add("labelSelector", self.place.label_selector);
        query.add("fieldSelector", &self.place.field_selector);
        let is_watch = !matches!(ask, Ask::Page { .. } | Ask::Version);
        if is_watch {
            let seconds = 300 + (self.random.fraction() * 300.0) as u32;
            query.add("watch", "1");
            query.add("allowWatchBookmarks", "true");
            query.add("timeoutSeconds", &seconds.to_string());
        }
        match ask {
            Ask::Stream => {
                query.add("sendInitialEvents", "true");
                query.add("resourceVersionMatch", "NotOlderThan");
            }
            Ask::Page { token, whole } => {
                if !whole {
                    query.add("limit", PAGE);
                }
                query.add("continue", token.as_deref().unwrap_or_default());
            }
            Ask::Watch { version } => query.add("resourceVersion", version),
            Ask::Version => query.add("limit", "1"),
        }
        let accept = match (self.protocol.json(), is_watch) {
            (true, _) => "application/json",
            (false, true) => "application/vnd.kubernetes.protobuf;stream=watch",
            (false, false) => "application/vnd.kubernetes.protobuf",
        };
        Request::get(query.0)
            .header(header::ACCEPT, accept)
            .header(header::USER_AGENT, &self.shared.access.settings().user_agent)
            .body(Body::empty())
            .expect("path and query are ASCII, and the user agent was checked when the settings were made")
    }

    fn note(&self, trouble: &Trouble, next: Next) {
        let is_routine = next == Next::Now || next == Next::Absent;
        self.shared.status.note(R::KIND, |status| {
            status.connected = false;
            if !is_routine {
                status.failures += 1;
                status.last_error = Some(describe(trouble));
            }
        });
        if is_routine {
            tracing::debug!("{}: {}", name(R::KIND), describe(trouble));
        } else {
            tracing::warn!("cannot follow {}: {}; trying again", name(R::KIND), describe(trouble));
        }
    }

    fn pause(&mut self, trouble: &Trouble) -> Duration {
        let wait = self.backoff.wait();
        match trouble {
            Trouble::Status { retry_after: Some(after), .. } => wait.max(*after),
            _ => wait,
        }
    }
}

/// Whether an object is told of by a list or by a watch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    List,
    Watch,
}

/// A path with its query.
struct Query(String);

impl Query {
    fn new(path: &str) -> Query {
        Query(path.to_owned())
    }

    /// Adds a parameter unless it is empty.
    fn add(&mut self, key: &str, value: &str) {
        if value.is_empty() {
            return;
        }
        self.0.push(if self.0.contains('?') { '&' } else { '?' });
        self.0.push_str(key);
        self.0.push('=');
        for byte in value.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    self.0.push(byte.into())
                }
                _ => self.0.push_str(&format!("%{byte:02X}")),
            }
        }
    }
}

/// Objects of a kind, for people.
fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Service => "Services",
        Kind::EndpointSlice => "EndpointSlices",
        Kind::Node => "this Node",
        Kind::ServiceCidr => "ServiceCIDRs",
    }
}

fn describe(trouble: &Trouble) -> String {
    match trouble {
        Trouble::Closed { .. } => "the API server closed the connection".into(),
        Trouble::Idle => "the API server has said nothing for too long".into(),
        Trouble::Unanswered => "no answer from the API server in time".into(),
        Trouble::Transport(error) => format!("no connection to the API server: {error}"),
        Trouble::Malformed(what) => format!("the API server sent {what}"),
        Trouble::OutOfOrder { version, after } => {
            format!("the API server sent version {version} after {after}")
        }
        Trouble::Status { code: code @ (401 | 403), message, .. } => {
            format!("the API server refuses us ({code}): {message}")
        }
        Trouble::Status { code, message, .. } => format!("the API server answered {code}: {message}"),
    }
}

async fn refusal(status: StatusCode, headers: &HeaderMap, format: Option<Format>, body: Body) -> Trouble {
    // What an error says is worth a moment, not more.
    let body = match timeout(HEAD_TIMEOUT, collect(body, MAX_ERROR)).await {
        Ok(Ok(body)) => body,
        _ => Bytes::new(),
    };
    let retry_after =
        headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    Trouble::Status {
        code: status.as_u16(),
        message: wire::error_message(format, &body),
        retry_after: retry_after.map(|seconds| Duration::from_secs(seconds).min(LONGEST_RETRY_AFTER)),
        in_stream: false,
    }
}

/// A body in one piece, or the beginning of it.
pub(super) async fn collect(mut body: Body, limit: usize) -> Result<Bytes, Trouble> {
    let mut whole = BytesMut::new();
    while whole.len() < limit
        && let Some(bytes) = next_bytes(&mut body, LIST_IDLE).await?
    {
        whole.extend_from_slice(&bytes);
    }
    Ok(whole.freeze())
}

/// What comes next of a body; nothing at its end.
async fn next_bytes(body: &mut Body, patience: Duration) -> Result<Option<Bytes>, Trouble> {
    loop {
        match timeout(patience, body.frame()).await.map_err(|_| Trouble::Idle)? {
            None => return Ok(None),
            Some(Err(error)) => return Err(Trouble::Transport(sentence(&error))),
            // Anything but data is a trailer, which we did not ask for.
            Some(Ok(frame)) => {
                if let Ok(bytes) = frame.into_data() {
                    return Ok(Some(bytes));
                }
            }
        }
    }
}

fn content_type(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::CONTENT_TYPE)?.to_str().ok()
}

/// The server has begun to answer by then, or is not going to.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// What is in a list comes without a break.
const LIST_IDLE: Duration = Duration::from_secs(30);
/// A server sends a bookmark each minute. After a longer silence the watch is opened again from where it was,
/// which costs a server that was merely quiet one request.
const IDLE: Duration = Duration::from_secs(150);
/// Requests without an answer until a new client is made.
const UNANSWERED: u32 = 6;
/// Refusals until they are believed; five or six seconds.
const FORBIDDEN_TRIES: u32 = 5;
/// A server that does not know a kind may learn it by an upgrade.
const ABSENT_RETRY: Duration = Duration::from_secs(600);
/// All is well again once a watch has lived so long.
const STEADY: Duration = Duration::from_secs(10);
/// Over so much time the nodes of a cluster spread what they all do at once.
const SPREAD: Duration = Duration::from_millis(250);
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(60);
const PAGE: &str = "500";
const MAX_ERROR: usize = 64 << 10;

#[cfg(test)]
mod tests;
