// SPDX-License-Identifier: Apache-2.0

//! One request, answered.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::{
    HeaderMap, Method, Response, StatusCode,
    body::{Body, Frame, Incoming, SizeHint},
    header,
};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_rustls::rustls::pki_types::CertificateDer;

use super::{
    event,
    log::{Credential, Request, parse_query},
    mischief::{Mischief, Verb},
    pump::Pump,
    refusal::Refusal,
    resource::Target,
    selector::Selector,
    shared::Shared,
    store::ListOptions,
    watch::Watch,
    wire::Encoding,
};

/// Answers a request; an error ends the connection instead.
pub(super) async fn answer(
    shared: Arc<Shared>,
    request: hyper::Request<Incoming>,
    certificate: Option<&CertificateDer<'static>>,
) -> Result<Response<Answer>, HungUp> {
    let asked = read(&request, certificate.is_some());
    let place = shared.note(asked.clone());
    let result = match event::namespace(&asked.path).filter(|_| request.method() == Method::POST) {
        Some(namespace) if shared.admits(&asked.credential, certificate) => {
            let body = request.into_body().collect().await.map_err(|_| HungUp)?.to_bytes();
            Ok(match event::take(&shared, namespace, &body) {
                Ok(event) => {
                    let body = event.to_string().into();
                    whole(StatusCode::CREATED, Encoding::Json.content_type(), body)
                }
                Err(refusal) => refuse(Encoding::Json, &refusal),
            })
        }
        _ => respond(&shared, &asked, request.method(), certificate).await,
    };
    if let Ok(response) = &result {
        shared.note_status(place, response.status().as_u16());
    }
    result
}

async fn respond(
    shared: &Arc<Shared>,
    asked: &Request,
    method: &Method,
    certificate: Option<&CertificateDer<'static>>,
) -> Result<Response<Answer>, HungUp> {
    let Some(encoding) = Encoding::negotiate(&asked.accept, shared.speaks_protobuf()) else {
        return Ok(refuse(Encoding::Json, &Refusal::new(406)));
    };
    if !shared.admits(&asked.credential, certificate) {
        return Ok(refuse(encoding, &Refusal::new(401)));
    }
    if asked.path == "/version" && shared.minor() != 0 {
        let body = json!({"major": "1", "minor": shared.minor().to_string()}).to_string();
        return Ok(whole(StatusCode::OK, Encoding::Json.content_type(), body.into()));
    }
    let (Some(target), &Method::GET) = (Target::parse(&asked.path), method) else {
        return Ok(refuse(encoding, &Refusal::new(404)));
    };
    let mischief = shared.script().next(target.resource.kind, asked.verb);
    let mischief = match mischief {
        Some(Mischief::Refuse(refusal)) => return Ok(refuse(encoding, &refusal)),
        Some(Mischief::Silence) => return std::future::pending().await,
        Some(Mischief::HangUp) => return Err(HungUp),
        Some(Mischief::Empty) => return Ok(whole(StatusCode::OK, encoding.content_type(), Bytes::new())),
        Some(Mischief::Page) => {
            let page = "<html><body>Please log in to the network</body></html>";
            return Ok(whole(StatusCode::OK, "text/html", page.into()));
        }
        other => other,
    };
    Ok(match serve(shared, asked, target, encoding, mischief) {
        Ok(response) => response,
        Err(refusal) => refuse(encoding, &refusal),
    })
}

fn serve(
    shared: &Arc<Shared>,
    asked: &Request,
    target: Target<'_>,
    encoding: Encoding,
    mischief: Option<Mischief>,
) -> Result<Response<Answer>, Refusal> {
    let selector = Selector::parse(target, asked.param("labelSelector"), asked.param("fieldSelector"))
        .map_err(|why| Refusal::bad_request(&why))?;
    let label = match (&mischief, asked.verb) {
        (Some(Mischief::Mislabel(label)), _) => label,
        (_, Verb::Watch | Verb::WatchList) => encoding.watch_content_type(),
        _ => encoding.content_type(),
    };
    let body = match asked.verb {
        Verb::Read => {
            let object = shared.store().object(target.resource.kind, target.namespace, target.name);
            let object = object.ok_or_else(|| Refusal::new(404))?;
            encoding.object(target.resource, &object)
        }
        Verb::List => {
            let list = shared.store().list(target.resource.kind, &selector, list_options(asked)?)?;
            let items: Vec<&Value> = list.items.iter().map(AsRef::as_ref).collect();
            encoding.list(target.resource, &list.metadata, &items)
        }
        Verb::Watch | Verb::WatchList => {
            let watch = Watch::new(target.resource, selector, asked)?;
            return Ok(streamed(label, |out| watch.run(shared.clone(), Pump::new(out, encoding, mischief))));
        }
    };
    Ok(match mischief {
        None | Some(Mischief::Mislabel(_)) => whole(StatusCode::OK, label, body),
        mischief => streamed(label, |out| async move {
            // How a list breaks is up to the pump; that the client is gone then concerns nobody.
            let _ = Pump::new(out, encoding, mischief).send_list(body).await;
        }),
    })
}

fn read(request: &hyper::Request<Incoming>, certified: bool) -> Request {
    let text = |headers: &HeaderMap, name| {
        headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let query = parse_query(request.uri().query().unwrap_or_default());
    let path = request.uri().path().to_owned();
    let has =
        |name: &str, value: &[&str]| query.iter().any(|(k, v)| k == name && value.contains(&v.as_str()));
    let target = Target::parse(&path);
    let verb = if !has("watch", &["1", "true"]) {
        if target.is_some_and(|target| !target.name.is_empty()) { Verb::Read } else { Verb::List }
    } else if has("sendInitialEvents", &["1", "true"]) {
        Verb::WatchList
    } else {
        Verb::Watch
    };
    let headers = request.headers();
    let token = text(headers, header::AUTHORIZATION).strip_prefix("Bearer ").map(str::to_owned);
    Request {
        at: Instant::now(),
        kind: target.map(|target| target.resource.kind),
        verb,
        accept: text(headers, header::ACCEPT),
        user_agent: text(headers, header::USER_AGENT),
        credential: match token {
            Some(token) => Credential::Token(token),
            None if certified => Credential::Certificate,
            None => Credential::Nothing,
        },
        status: 0,
        path,
        query,
    }
}

fn list_options(asked: &Request) -> Result<ListOptions<'_>, Refusal> {
    let limit = match asked.param("limit") {
        "" => 0,
        text => text.parse().map_err(|_| Refusal::bad_request("limit is not a number"))?,
    };
    let version = asked.param("resourceVersion");
    if version.is_empty() && !asked.param("resourceVersionMatch").is_empty() {
        return Err(Refusal::bad_request(
            "resourceVersionMatch is forbidden unless resourceVersion is provided",
        ));
    }
    let exact = asked.param("resourceVersionMatch") == "Exact";
    Ok(ListOptions { version, exact, limit, token: asked.param("continue") })
}

fn refuse(encoding: Encoding, refusal: &Refusal) -> Response<Answer> {
    let code = StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = whole(code, encoding.content_type(), encoding.status(&refusal.status()));
    if let Some(secs) = refusal.retry_after_secs {
        response.headers_mut().insert(header::RETRY_AFTER, secs.into());
    }
    response
}

fn whole(code: StatusCode, content_type: &'static str, body: Bytes) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Some(body)));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

fn streamed<F>(content_type: &'static str, fill: impl FnOnce(mpsc::Sender<Piece>) -> F) -> Response<Answer>
where
    F: Future<Output = ()> + Send + 'static,
{
    let (out, pieces) = mpsc::channel(16);
    tokio::spawn(fill(out));
    let mut response = Response::new(Answer::Stream(pieces));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

/// Bytes of a stream, or its violent end.
pub(super) type Piece = Result<Bytes, HungUp>;

/// A body: known, or coming.
pub(super) enum Answer {
    Whole(Option<Bytes>),
    Stream(mpsc::Receiver<Piece>),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = HungUp;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HungUp>>> {
        match self.get_mut() {
            Answer::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Answer::Stream(pieces) => {
                pieces.poll_recv(context).map(|piece| piece.map(|piece| piece.map(Frame::data)))
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Answer::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Answer::Stream(_) => SizeHint::default(),
        }
    }
}

/// The server ends the connection on purpose.
#[derive(Clone, Copy, Debug)]
pub(super) struct HungUp;

impl fmt::Display for HungUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("hung up on purpose")
    }
}

impl std::error::Error for HungUp {}
