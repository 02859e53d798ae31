// SPDX-License-Identifier: Apache-2.0

//! A manifest file to updates: documents, lists, what the API server would fill in, and endpoints by annotation.

use std::{
    hash::BuildHasher,
    io::{self, BufRead},
    path::Path,
};

use hashbrown::DefaultHashBuilder;
use model::{ServiceKey, SliceKey, Update};

use super::{
    endpoints::{self, ENDPOINTS},
    header::Header,
    keys, place,
    plain::{self, Conversion},
    spelling, yaml,
};
use crate::{
    intern::Interner,
    lower::{self, Lowered, Resource, Scope},
    object::{self, Metadata},
    problem::{Problem, Reason},
    split::{Piece, Splitter},
};

/// What tells objects apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum ObjectKey {
    Service(ServiceKey),
    Slice(SliceKey),
    Node,
    ServiceCidr(std::sync::Arc<str>),
}

impl ObjectKey {
    fn of(update: &Update) -> Option<ObjectKey> {
        Some(match update {
            Update::Service(service) => ObjectKey::Service(service.key.clone()),
            Update::Slice(slice) => ObjectKey::Slice(slice.key.clone()),
            Update::Node(_) => ObjectKey::Node,
            Update::ServiceCidr { name, .. } => ObjectKey::ServiceCidr(name.clone()),
            _ => return None,
        })
    }

    /// What to say when the object has gone.
    pub(super) fn gone(self) -> Update {
        match self {
            ObjectKey::Service(key) => Update::ServiceGone(key),
            ObjectKey::Slice(key) => Update::SliceGone(key),
            ObjectKey::Node => Update::NodeGone,
            ObjectKey::ServiceCidr(name) => Update::ServiceCidrGone(name),
        }
    }

    /// As people write it.
    pub(super) fn describe(&self) -> String {
        match self {
            ObjectKey::Service(key) => format!("Service {key}"),
            ObjectKey::Slice(key) => format!("EndpointSlice {key}"),
            ObjectKey::Node => "Node".to_owned(),
            ObjectKey::ServiceCidr(name) => format!("ServiceCIDR {name}"),
        }
    }
}

/// One object found in a file.
#[derive(Debug)]
pub(super) struct Found {
    pub key: ObjectKey,
    pub content: Content,
    /// Of the text it came from: equal text, equal object.
    pub hash: u64,
    pub line: usize,
}

/// What a document says of an object.
#[derive(Debug)]
pub(super) enum Content {
    /// The same as before: it is one of those that are [`Known`].
    Same,
    Whole(Update),
    /// Something was left out, or is doubtful. The problems are with the first object of the document.
    Part(Update, Vec<Problem>),
    /// It cannot be used.
    Nothing(Vec<Problem>),
}

/// All that a file says.
#[derive(Debug, Default)]
pub(super) struct Manifest {
    pub found: Vec<Found>,
    /// False if something in the file could not be used. Then what is missing may only seem to be.
    pub complete: bool,
    /// Documents and list items of any kind.
    pub documents: usize,
}

/// Documents whose objects are served and with which nothing is wrong, by the hashes of their texts. Who finds one again
/// need not read it.
#[derive(Debug, Default)]
pub(super) struct Known(Vec<(u64, ObjectKey)>);

impl Known {
    fn objects(&self, hash: u64) -> &[(u64, ObjectKey)] {
        let begin = self.0.partition_point(|(known, _)| *known < hash);
        let end = self.0.partition_point(|(known, _)| *known <= hash);
        &self.0[begin..end]
    }
}

impl FromIterator<(u64, ObjectKey)> for Known {
    fn from_iter<I: IntoIterator<Item = (u64, ObjectKey)>>(objects: I) -> Known {
        let mut objects: Vec<_> = objects.into_iter().collect();
        // Stable: objects of one document stay in their order.
        objects.sort_by_key(|(hash, _)| *hash);
        Known(objects)
    }
}

/// Reads a manifest. Errors are those of the reader; whatever is wrong with the content becomes a problem.
pub(super) fn read(
    path: &Path,
    reader: &mut dyn BufRead,
    scope: &mut ManifestScope<'_>,
) -> io::Result<Manifest> {
    let mut parser =
        ManifestParser { path, scope, manifest: Manifest { complete: true, ..Manifest::default() } };
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
        parser.json(reader)?;
    } else {
        parser.yaml(reader)?;
    }
    Ok(parser.manifest)
}

/// What reading a manifest needs besides the text.
pub(super) struct ManifestScope<'a> {
    pub interner: &'a mut Interner,
    pub node_name: &'a str,
    pub hasher: &'a DefaultHashBuilder,
    pub known: &'a Known,
    pub report: &'a mut dyn FnMut(Problem),
}

/// The JSON of an object, and the hash of the text that it stands for.
type Hashed<'t> = (&'t [u8], u64);

struct ManifestParser<'a, 'b> {
    path: &'a Path,
    scope: &'a mut ManifestScope<'b>,
    manifest: Manifest,
}

impl ManifestParser<'_, '_> {
    fn json(&mut self, reader: &mut dyn BufRead) -> io::Result<()> {
        let mut splitter = Splitter::new(MAX_OBJECT);
        let mut list = List::default();
        let mut chunk = vec![0; CHUNK];
        loop {
            let length = reader.read(&mut chunk)?;
            if length == 0 {
                break;
            }
            splitter.push(&chunk[..length]);
            if !self.pieces(&mut splitter, &mut list, 0) {
                return Ok(());
            }
        }
        if let Err(error) = splitter.finish() {
            self.bad("", Reason::BadSyntax, error.kind, error.line);
        }
        Ok(())
    }

    fn yaml(&mut self, reader: &mut dyn BufRead) -> io::Result<()> {
        let mut documents = yaml::Documents::new(reader);
        let mut json = String::new();
        while let Some((first, text)) = documents.next()? {
            let hash = self.scope.hasher.hash_one(text);
            if self.is_known(hash, first) {
                continue;
            }
            json.clear();
            let converted = match std::str::from_utf8(text) {
                Ok(text) => match plain::to_json(text, &mut json) {
                    Conversion::Object { has_items: false } => {
                        self.converted(first + leading_lines(&json), json.trim_start().as_bytes(), hash);
                        continue;
                    }
                    Conversion::Object { has_items: true } => Ok(()),
                    Conversion::NotPlain => yaml::to_json(text, &mut json),
                },
                Err(error) => {
                    let line = 1 + text[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
                    Err(yaml::YamlError { line, reason: "not UTF-8".into() })
                }
            };
            if let Err(error) = converted {
                self.bad("", Reason::BadSyntax, error.reason, first + error.line - 1);
                continue;
            }
            let mut splitter = Splitter::new(usize::MAX);
            splitter.push(json.as_bytes());
            self.pieces(&mut splitter, &mut List::default(), first - 1);
        }
        Ok(())
    }

    /// Takes all pieces there are; false if nothing more can come. `offset` is added to line numbers.
    fn pieces(&mut self, splitter: &mut Splitter, list: &mut List, offset: usize) -> bool {
        loop {
            match splitter.next() {
                Ok(None) => return true,
                Ok(Some(Piece::Item { line, text })) => list.add(self, line + offset, text),
                Ok(Some(Piece::Object { line, text })) => {
                    let list = std::mem::take(list);
                    self.object_or_list(list, line + offset, text);
                }
                Err(error) => {
                    self.bad("", Reason::BadSyntax, error.kind, error.line + offset);
                    return false;
                }
            }
        }
    }

    /// Takes the objects of a document that is as it was before, if it is.
    fn is_known(&mut self, hash: u64, line: usize) -> bool {
        let objects = self.scope.known.objects(hash).iter();
        let found = objects.map(|(_, key)| Found { key: key.clone(), content: Content::Same, hash, line });
        let before = self.manifest.found.len();
        self.manifest.found.extend(found);
        let is_known = self.manifest.found.len() > before;
        self.manifest.documents += usize::from(is_known);
        is_known
    }

    /// An object whose text was made here, and is no list. `hash` is of the text that it was made from.
    fn converted(&mut self, line: usize, text: &[u8], hash: u64) {
        match Header::begin(text) {
            Ok(header) if header.is_list() => self.check_list(line, text, &header),
            Ok(header) => self.document(line, (text, hash), &header, None),
            Err(error) => self.bad("", Reason::BadSyntax, plain_message(&error), line + error.line() - 1),
        }
    }

    fn object_or_list(&mut self, list: List, line: usize, text: &[u8]) {
        let header = match Header::read(text) {
            Ok(header) => header,
            Err(error) => {
                return self.bad("", Reason::BadSyntax, plain_message(&error), line + error.line() - 1);
            }
        };
        let kind = header.kind.as_deref().unwrap_or_default();
        let Some(item_kind) = kind.strip_suffix("List") else {
            return self.document(line, self.hashed(text), &header, None);
        };
        for (line, text) in list.nameless {
            self.item(line, &text, item_kind);
        }
        self.check_list(line, text, &header);
    }

    /// A list of what is read here, without the key: forgotten, or misspelled.
    fn check_list(&mut self, line: usize, text: &[u8], header: &Header) {
        let kind = header.kind.as_deref().unwrap_or_default();
        let is_ours =
            kind.strip_suffix("List").is_some_and(|items| items.is_empty() || KINDS.contains(&items));
        if is_ours && !place::find(text, "items").is_there {
            self.bad(kind, Reason::Undecodable, "the field items is missing", line);
        }
    }

    /// An element of a list. In a `ServiceList` it need not say that it is a Service.
    fn item(&mut self, line: usize, text: &[u8], item_kind: &str) {
        match Header::read(text) {
            Ok(header) => self.document(line, self.hashed(text), &header, Some(item_kind)),
            Err(error) => self.bad("", Reason::BadSyntax, plain_message(&error), line + error.line() - 1),
        }
    }

    fn hashed<'t>(&self, text: &'t [u8]) -> Hashed<'t> {
        (text, self.scope.hasher.hash_one(text))
    }

    fn document(&mut self, line: usize, text: Hashed<'_>, header: &Header, default_kind: Option<&str>) {
        self.manifest.documents += 1;
        let kind = header.kind.as_deref().or(default_kind).unwrap_or_default();
        match (kind, group(header.api_version.as_deref().unwrap_or_default())) {
            ("Service", "") => self.lower::<object::Service>(line, text, header),
            ("EndpointSlice", "" | "discovery.k8s.io") => {
                self.lower::<object::EndpointSlice>(line, text, header);
            }
            ("Node", "") => self.lower::<object::Node>(line, text, header),
            ("ServiceCIDR", "" | "networking.k8s.io") => {
                self.lower::<object::ServiceCidr>(line, text, header);
            }
            ("", _) => self.bad("", Reason::Undecodable, "the field kind is missing", line),
            (kind, group) => match misspelled(kind, group) {
                Some(meant) => {
                    let line = line + place::find(text.0, "kind").line;
                    self.bad(describe(kind, header), Reason::MisspelledKind, meant, line);
                }
                None => self.note(kind, header, Reason::UnknownKind, line),
            },
        }
    }

    fn lower<R: Defaults>(&mut self, line: usize, (text, hash): Hashed<'_>, header: &Header) {
        let (mut object, slips) = match keys::read::<R>(text) {
            Ok(read) => read,
            Err(error) => {
                let (name, message) = (describe(R::NAME, header), plain_message(&error));
                let mut problem = Problem::new(name, "", Reason::Undecodable, message);
                problem.place = Some((self.path.to_owned(), line + error.line() - 1));
                return self.refuse::<R>(&metadata(header), vec![problem], (hash, line));
            }
        };
        object.fill_in();
        let nameless = Metadata::default();
        let named = object.metadata().unwrap_or(&nameless);
        let slip = |slip: &keys::Slip| {
            Problem::new(lower::describe(R::NAME, named), slip.path.clone(), Reason::UnknownKey, slip.meant)
        };
        let mut problems: Vec<Problem> = slips.iter().map(slip).collect();
        // What was said under such a key, a namespace say, may be what another object would have been.
        self.manifest.complete &= slips.is_empty();
        let (lowered, extra) = self.lower_checked(&object, text, &mut problems);
        for problem in &mut problems {
            problem.place = Some((self.path.to_owned(), line + line_of(text, &problem.field)));
        }
        let update = match lowered {
            Lowered::Object(update) => update,
            Lowered::Refused => return self.refuse::<R>(named, problems, (hash, line)),
            Lowered::Ignored => {
                problems.into_iter().for_each(&mut *self.scope.report);
                if R::NAME == "Node" {
                    self.note(R::NAME, header, Reason::OtherNode, line);
                }
                return;
            }
        };
        let is_sound = problems.is_empty();
        for update in std::iter::once(update).chain(extra.into_iter().map(Update::Slice)) {
            let Some(key) = ObjectKey::of(&update) else { continue };
            let content = match is_sound {
                true => Content::Whole(update),
                false => Content::Part(update, std::mem::take(&mut problems)),
            };
            self.manifest.found.push(Found { key, content, hash, line });
        }
    }

    /// The object in the model's words, and the slices it brings, if it is one that the API server would have taken.
    fn lower_checked<R: Defaults>(
        &mut self,
        object: &R,
        text: &[u8],
        problems: &mut Vec<Problem>,
    ) -> (Lowered, Vec<model::EndpointSlice>) {
        if let Some(problem) = object.refuse() {
            problems.push(problem);
            return (Lowered::Refused, Vec::new());
        }
        let mut report = |problem| problems.push(problem);
        let mut scope =
            Scope { interner: self.scope.interner, node_name: self.scope.node_name, report: &mut report };
        let lowered = object.lower(&mut scope);
        if lowered == Lowered::Ignored {
            return (lowered, Vec::new());
        }
        if let Some((field, reason)) = object.missing(text) {
            let name = object.metadata().map_or_else(String::new, |named| lower::describe(R::NAME, named));
            problems.push(Problem::new(name, field, reason, ""));
            return (Lowered::Refused, Vec::new());
        }
        let extra = match &lowered {
            Lowered::Object(update) => object.more(update, &mut scope),
            _ => Vec::new(),
        };
        (lowered, extra)
    }

    /// An object that cannot be used. If it can be told which, a version that could be stays.
    fn refuse<R: Resource>(
        &mut self,
        metadata: &Metadata,
        problems: Vec<Problem>,
        (hash, line): (u64, usize),
    ) {
        self.manifest.complete = false;
        match self.key::<R>(metadata) {
            Some(key) => {
                self.manifest.found.push(Found { key, content: Content::Nothing(problems), hash, line });
            }
            None => problems.into_iter().for_each(&mut *self.scope.report),
        }
    }

    fn key<R: Resource>(&self, metadata: &Metadata) -> Option<ObjectKey> {
        let name = Some(metadata.name()).filter(|name| !name.is_empty())?;
        let namespace = Some(metadata.namespace()).filter(|namespace| !namespace.is_empty());
        let namespace = namespace.unwrap_or(DEFAULT_NAMESPACE).into();
        Some(match R::KIND {
            model::Kind::Service => ObjectKey::Service(ServiceKey { namespace, name: name.into() }),
            model::Kind::EndpointSlice => ObjectKey::Slice(SliceKey { namespace, name: name.into() }),
            model::Kind::Node if name != self.scope.node_name => return None,
            model::Kind::Node => ObjectKey::Node,
            model::Kind::ServiceCidr => ObjectKey::ServiceCidr(name.into()),
        })
    }

    fn bad(&mut self, object: impl Into<String>, reason: Reason, value: impl std::fmt::Display, line: usize) {
        self.manifest.complete = false;
        let mut problem = Problem::new(object, "", reason, value);
        problem.place = Some((self.path.to_owned(), line));
        (self.scope.report)(problem);
    }

    /// Something that is none of our business, and no fault.
    fn note(&mut self, kind: &str, header: &Header, reason: Reason, line: usize) {
        let mut problem = Problem::new(describe(kind, header), "", reason, "");
        problem.place = Some((self.path.to_owned(), line));
        (self.scope.report)(problem);
    }
}

/// The items of a list whose own kind is not known yet, because it stands after them.
#[derive(Default)]
struct List {
    nameless: Vec<(usize, Box<[u8]>)>,
}

impl List {
    fn add(&mut self, parser: &mut ManifestParser<'_, '_>, line: usize, text: &[u8]) {
        match Header::read(text) {
            Ok(header) if header.kind.is_some() => {
                parser.document(line, parser.hashed(text), &header, None);
            }
            _ => self.nameless.push((line, text.into())),
        }
    }
}

/// How many lines there are before the object begins.
fn leading_lines(json: &str) -> usize {
    json.bytes().take_while(|byte| *byte == b'\n').count()
}

fn describe(kind: &str, header: &Header) -> String {
    lower::describe(kind, &metadata(header))
}

fn metadata(header: &Header) -> Metadata {
    let metadata = header.metadata.as_ref();
    Metadata {
        name: metadata.and_then(|metadata| metadata.name.clone()),
        namespace: metadata.and_then(|metadata| metadata.namespace.clone()),
        ..Metadata::default()
    }
}

/// The line of a field (from 0). Of cluster IPs one field is filled in from the other, and only one may be written.
fn line_of(text: &[u8], field: &str) -> usize {
    let found = place::find(text, field);
    match field {
        _ if found.is_there => found.line,
        "spec.clusterIP" => place::find(text, "spec.clusterIPs").line,
        _ if field.starts_with("spec.clusterIPs") => place::find(text, "spec.clusterIP").line,
        _ => found.line,
    }
}

/// The kind that was meant, of those that are read, unless the document is of a group that has other kinds.
fn misspelled(kind: &str, group: &str) -> Option<&'static str> {
    let is_ours = matches!(group, "" | "discovery.k8s.io" | "networking.k8s.io") && !KINDS.contains(&kind);
    is_ours.then(|| spelling::closest(kind, KINDS)).flatten()
}

/// `discovery.k8s.io` of `discovery.k8s.io/v1`; empty for `v1`.
fn group(api_version: &str) -> &str {
    api_version.rsplit_once('/').map_or("", |(group, _)| group)
}

/// The message without its position, which is told apart.
fn plain_message(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

/// What the API server would fill in, or refuse, before anybody sees the object.
trait Defaults: Resource {
    fn fill_in(&mut self) {}

    fn refuse(&self) -> Option<Problem> {
        None
    }

    /// A field that cannot be missing, and is. `text` is the object's.
    fn missing(&self, _text: &[u8]) -> Option<(&'static str, Reason)> {
        None
    }

    /// Further slices the object brings.
    fn more(&self, _update: &Update, _scope: &mut Scope<'_>) -> Vec<model::EndpointSlice> {
        Vec::new()
    }
}

fn fill_in_namespace(metadata: &mut Option<Metadata>) {
    let metadata = metadata.get_or_insert_default();
    if metadata.namespace().is_empty() {
        metadata.namespace = Some(DEFAULT_NAMESPACE.to_owned());
    }
}

impl Defaults for object::Service {
    fn fill_in(&mut self) {
        fill_in_namespace(&mut self.metadata);
        let spec = self.spec.get_or_insert_default();
        if spec.cluster_ip().is_empty() {
            spec.cluster_ip = spec.cluster_ips.first().cloned();
        }
        if spec.cluster_ips.is_empty() {
            spec.cluster_ips.extend(spec.cluster_ip.clone());
        }
        if spec.ip_families.is_empty() && spec.cluster_ip() != "None" {
            // A place must be kept for an address that is none, or the others would move.
            let family = |text: &String| match lower::parse_ip(text).map(model::Family::of) {
                Some(family) => family.to_string(),
                None => if text.contains(':') { "IPv6" } else { "IPv4" }.to_owned(),
            };
            spec.ip_families = spec.cluster_ips.iter().map(family).collect();
        }
    }

    /// In a cluster a missing address is allocated later; from a file it never comes.
    fn refuse(&self) -> Option<Problem> {
        let spec = self.spec.as_ref()?;
        let needed = spec.cluster_ip().is_empty() && spec.kind.as_deref() != Some("ExternalName");
        let name = || lower::describe("Service", self.metadata.as_ref().unwrap_or(&Metadata::default()));
        needed.then(|| Problem::new(name(), "spec.clusterIP", Reason::NoClusterIp, ""))
    }

    /// One that is served has ports. Nobody means the other kind.
    fn missing(&self, _text: &[u8]) -> Option<(&'static str, Reason)> {
        let spec = self.spec.as_ref()?;
        spec.ports.is_empty().then_some(("spec.ports", Reason::NoServicePorts))
    }

    fn more(&self, update: &Update, scope: &mut Scope<'_>) -> Vec<model::EndpointSlice> {
        let annotation = self.metadata.as_ref().and_then(|metadata| metadata.annotation(ENDPOINTS));
        match (update, annotation) {
            (Update::Service(service), Some(annotation)) => {
                endpoints::slices(service, annotation, scope.interner, scope.report)
            }
            _ => Vec::new(),
        }
    }
}

impl Defaults for object::EndpointSlice {
    fn fill_in(&mut self) {
        fill_in_namespace(&mut self.metadata);
        if self.address_type().is_empty() {
            let mut addresses = self.endpoints.iter().flat_map(|endpoint| &endpoint.addresses);
            let family = addresses.find_map(|text| lower::parse_ip(text)).map(model::Family::of);
            self.address_type = family.map(|family| family.to_string());
        }
    }

    /// A list that is written and empty is meant, one that is not written is forgotten, or misspelled.
    fn missing(&self, text: &[u8]) -> Option<(&'static str, Reason)> {
        let lists = [("endpoints", self.endpoints.is_empty()), ("ports", self.ports.is_empty())];
        let is_missing = |(key, is_empty): &(&str, bool)| *is_empty && !place::find(text, key).is_there;
        lists.into_iter().find(is_missing).map(|(key, _)| (key, Reason::NoKey))
    }
}

impl Defaults for object::Node {}

impl Defaults for object::ServiceCidr {}

/// What is read.
const KINDS: &[&str] = &["Service", "EndpointSlice", "Node", "ServiceCIDR", "List"];
/// Where objects are that do not say where.
const DEFAULT_NAMESPACE: &str = "default";
/// The largest object accepted in a JSON file. The API server's limit is about 3 MB.
const MAX_OBJECT: usize = 64 << 20;
const CHUNK: usize = 64 << 10;
