// SPDX-License-Identifier: Apache-2.0

//! Log lines, one for each event, to stderr: as klog writes them, or as JSON.
//!
//! ```text
//! I0801 12:00:00.500000    4711 app.rs:88] "serving" mode="nftables" families="IPv4,IPv6"
//! ```
//!
//! `-v` from 2 on shows what is of use when something is wrong (`debug!`), from 4 on every step (`trace!`);
//! libraries are quiet until 2, and tell their steps from 6 on. A message without fields stands there plainly. A warning or error that repeats is told once a minute, with a count, and no
//! single place in the program may write more than a few dozen lines in a row: a node in trouble must not
//! drown in the messages about it.

use std::{
    collections::HashMap,
    fmt::{self, Write as _},
    hash::{DefaultHasher, Hash, Hasher},
    io::Write as _,
    sync::{Arc, Mutex, OnceLock, PoisonError, RwLock},
    time::{Duration, Instant, SystemTime},
};

use serde_json::{Map, Value};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{Layer, layer::Context, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::{clock, config::Logging};

/// How long an equal line stays silent.
const SILENCE: Duration = Duration::from_secs(60);
/// How many warnings one place in the program may write in a row, and how soon it may write another.
const BURST: u32 = 30;
const REFILL: Duration = Duration::from_secs(2);
/// How many different lines are remembered.
const REMEMBERED: usize = 1024;
/// The crates of this program; all others are libraries.
const OURS: [&str; 7] = ["dataplane", "lab", "model", "netlink", "portolan", "proxy", "source"];

/// Sends all further log lines of the process to stderr; the first call begins it, each further one only
/// changes how much is told and how it looks.
pub fn init(settings: &Logging) {
    let mut first = false;
    let rules = RULES.get_or_init(|| {
        first = true;
        Arc::new(RwLock::new(Rules::new(settings)))
    });
    if first {
        let journal = Journal::new(
            Arc::clone(rules),
            Box::new(|line| {
                // There is nobody to tell that telling failed.
                let _ = std::io::stderr().lock().write_all(line.as_bytes());
            }),
        );
        let _ = tracing_subscriber::registry().with(journal).try_init();
    } else {
        *rules.write().unwrap_or_else(PoisonError::into_inner) = Rules::new(settings);
        // Each place in the program remembers whether anybody wants to hear of it.
        tracing::callsite::rebuild_interest_cache();
    }
}

/// From now on the log is as verbose as `-v` with this number makes it.
pub fn set_verbosity(level: u32) {
    if let Some(rules) = RULES.get() {
        rules.write().unwrap_or_else(PoisonError::into_inner).verbosity = level;
        tracing::callsite::rebuild_interest_cache();
    }
}

/// Of the log of the process.
static RULES: OnceLock<Arc<RwLock<Rules>>> = OnceLock::new();

type Sink = Box<dyn Fn(&str) + Send + Sync>;

struct Journal {
    rules: Arc<RwLock<Rules>>,
    limiter: Mutex<Limiter>,
    sink: Sink,
}

/// What the configuration says about the log.
struct Rules {
    json: bool,
    verbosity: u32,
    vmodule: Vec<(String, u32)>,
}

impl Rules {
    fn new(settings: &Logging) -> Rules {
        let vmodule = settings.vmodule.iter().map(|entry| (entry.file_pattern.clone(), entry.verbosity));
        Rules { json: settings.format == "json", verbosity: settings.verbosity, vmodule: vmodule.collect() }
    }

    fn allows(&self, metadata: &Metadata<'_>) -> bool {
        let needed = Journal::needed(metadata);
        if needed <= self.verbosity || self.vmodule.is_empty() {
            return needed <= self.verbosity;
        }
        let path = metadata.file().unwrap_or_default();
        let path = path.strip_suffix(".rs").unwrap_or(path);
        let named = self.vmodule.iter().find(|(pattern, _)| {
            // As in klog: a pattern with a slash is for the path, one without for the file's name alone.
            let name = if pattern.contains('/') { path } else { path.rsplit('/').next().unwrap_or(path) };
            matches(pattern.as_bytes(), name.as_bytes())
        });
        named.is_some_and(|(_, level)| needed <= *level)
    }
}

impl Journal {
    fn new(rules: Arc<RwLock<Rules>>, sink: Sink) -> Journal {
        Journal { rules, limiter: Mutex::default(), sink }
    }

    /// The verbosity a place in the program has to be logged at.
    fn needed(metadata: &Metadata<'_>) -> u32 {
        let ours = OURS.contains(&metadata.target().split("::").next().unwrap_or_default());
        match (*metadata.level(), ours) {
            (Level::ERROR | Level::WARN | Level::INFO, true) => 0,
            (Level::DEBUG, true) => 2,
            (Level::TRACE, true) => 4,
            // What a library finds bad comes back to us as an error, and is told in our words.
            (Level::ERROR | Level::WARN, false) => 2,
            (Level::INFO | Level::DEBUG, false) => 6,
            (Level::TRACE, false) => 8,
        }
    }

    fn line(&self, metadata: &Metadata<'_>, fields: &Fields, extra: &[(&str, u32)]) -> String {
        let now = SystemTime::now();
        let file = metadata.file().unwrap_or("unknown").rsplit('/').next().unwrap_or_default();
        let place = format!("{file}:{}", metadata.line().unwrap_or(0));
        if self.rules.read().unwrap_or_else(PoisonError::into_inner).json {
            let mut object = Map::new();
            object.insert("ts".into(), (clock::unix_secs(now) * 1e3).into());
            object.insert("caller".into(), place.into());
            object.insert("msg".into(), fields.message.clone().into());
            if *metadata.level() > Level::WARN {
                object.insert("v".into(), Journal::needed(metadata).into());
            }
            object.extend(fields.rest.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
            object.extend(extra.iter().map(|(name, count)| ((*name).to_owned(), (*count).into())));
            return format!("{}\n", Value::Object(object));
        }
        let letter = match *metadata.level() {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            _ => 'I',
        };
        let message = match fields.rest.is_empty() && extra.is_empty() {
            true => fields.message.replace('\n', " "),
            false => format!("{:?}", fields.message),
        };
        let mut line = format!("{letter}{} {:>7} {place}] {message}", clock::klog(now), std::process::id());
        for (name, value) in &fields.rest {
            // A JSON string is quoted and has no line breaks, as wanted here.
            let _ = write!(line, " {name}={value}");
        }
        for (name, count) in extra {
            let _ = write!(line, " {name}={count}");
        }
        line.push('\n');
        line
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        self.rules.read().unwrap_or_else(PoisonError::into_inner).allows(metadata)
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut extra = Vec::new();
        if *metadata.level() <= Level::WARN {
            let site = hash(&metadata.callsite());
            let text = hash(&(
                site,
                &fields.message,
                fields.rest.iter().map(|(n, v)| (n, v.to_string())).collect::<Vec<_>>(),
            ));
            let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
            let Some((repeated, dropped)) = limiter.admit(site, text, Instant::now()) else { return };
            extra.extend(
                [("repeated", repeated), ("dropped", dropped)].into_iter().filter(|(_, count)| *count > 0),
            );
        }
        (self.sink)(&self.line(metadata, &fields, &extra));
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// A glob with `*` and `?`.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => (0..=name.len()).any(|skip| matches(rest, &name[skip..])),
        (Some((b'?', rest)), Some((_, tail))) => matches(rest, tail),
        (Some((want, rest)), Some((have, tail))) => want == have && matches(rest, tail),
        _ => false,
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    rest: Vec<(&'static str, Value)>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.rest.push((name, value.into())),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.rest.push((field.name(), value.into()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.rest.push((field.name(), value.into()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.rest.push((field.name(), value.into()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.rest.push((field.name(), value.into()));
    }
}

/// Decides which warnings are told.
#[derive(Default)]
struct Limiter {
    lines: HashMap<u64, Line>,
    sites: HashMap<u64, Site>,
}

struct Line {
    told: Instant,
    repeated: u32,
}

struct Site {
    left: u32,
    since: Instant,
    dropped: u32,
}

impl Limiter {
    /// `None`: be silent. Else how often the same line, and how many lines of this place, were not told.
    fn admit(&mut self, site: u64, text: u64, now: Instant) -> Option<(u32, u32)> {
        if self.lines.len() >= REMEMBERED {
            self.lines.retain(|_, line| now.saturating_duration_since(line.told) < SILENCE);
            if self.lines.len() >= REMEMBERED {
                self.lines.clear();
            }
        }
        if let Some(line) = self.lines.get_mut(&text)
            && now.saturating_duration_since(line.told) < SILENCE
        {
            line.repeated = line.repeated.saturating_add(1);
            return None;
        }
        let site = self.sites.entry(site).or_insert(Site { left: BURST, since: now, dropped: 0 });
        let refills = now.saturating_duration_since(site.since).as_secs() / REFILL.as_secs();
        if refills > 0 {
            site.left = site.left.saturating_add(u32::try_from(refills).unwrap_or(BURST)).min(BURST);
            site.since = now;
        }
        if site.left == 0 {
            site.dropped = site.dropped.saturating_add(1);
            return None;
        }
        site.left -= 1;
        let line = self.lines.entry(text).or_insert(Line { told: now, repeated: 0 });
        line.told = now;
        Some((std::mem::take(&mut line.repeated), std::mem::take(&mut site.dropped)))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::VModule;

    /// What is logged meanwhile, as text and with the usual verbosity.
    pub(crate) fn told_by(events: impl FnOnce()) -> String {
        logged(&settings("text", 0), events)
    }

    fn logged(settings: &Logging, events: impl FnOnce()) -> String {
        logged_by(&Arc::new(RwLock::new(Rules::new(settings))), events)
    }

    fn logged_by(rules: &Arc<RwLock<Rules>>, events: impl FnOnce()) -> String {
        let lines = Arc::new(Mutex::new(String::new()));
        let sink = Arc::clone(&lines);
        let sink: Sink = Box::new(move |line| sink.lock().expect("one thread").push_str(line));
        let journal = Journal::new(Arc::clone(rules), sink);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(journal), events);
        std::mem::take(&mut *lines.lock().expect("one thread"))
    }

    fn settings(format: &str, verbosity: u32) -> Logging {
        Logging { format: format.into(), verbosity, ..Logging::default() }
    }

    #[test]
    fn text_lines_look_like_klog() {
        let text = logged(&settings("text", 0), || {
            tracing::info!(services = 3, name = "a\nb", mode = %"nftables", "serving");
            tracing::warn!("careful: \"x\"\nand more");
            tracing::error!("bad");
        });
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3, "one line each: {text}");
        assert!(lines[0].starts_with('I') && lines[1].starts_with('W') && lines[2].starts_with('E'));
        let (head, tail) = lines[0].split_once("] ").expect("a klog head");
        assert_eq!(tail, r#""serving" services=3 name="a\nb" mode="nftables""#);
        assert!(lines[1].ends_with("] careful: \"x\" and more"), "{}", lines[1]);
        assert!(head.contains(&format!(" {} log.rs:", std::process::id())), "{head}");
    }

    #[test]
    fn json_lines_are_json() {
        let text = logged(&settings("json", 0), || tracing::info!(count = 3, "it's \"so\""));
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(
            (value["msg"].as_str(), value["count"].as_u64(), value["v"].as_u64()),
            (Some("it's \"so\""), Some(3), Some(0))
        );
        assert!(value["ts"].as_f64().expect("a time") > 1.6e12);
    }

    #[test]
    fn verbosity_and_vmodule() {
        let all = || {
            tracing::debug!("debug");
            tracing::trace!("trace");
            tracing::info!(target: "hyper::proto", "library");
        };
        let count = |settings: &Logging| logged(settings, all).lines().count();
        assert_eq!([0, 1, 2, 3, 4, 6].map(|v| count(&settings("text", v))), [0, 0, 1, 1, 2, 3]);
        let module = |pattern: &str| Logging {
            vmodule: vec![VModule { file_pattern: pattern.into(), verbosity: 2 }],
            ..settings("text", 0)
        };
        assert_eq!(
            ["log", "l*", "?og", "*/src/log", "other", "lo"].map(|p| count(&module(p))),
            [1, 1, 1, 1, 0, 0]
        );
    }

    #[test]
    fn the_rules_can_be_changed_while_it_runs() {
        let rules = Arc::new(RwLock::new(Rules::new(&settings("text", 0))));
        let text = logged_by(&rules, || {
            let tell = |word| tracing::debug!(word, "debug");
            tell("before");
            *rules.write().expect("one thread") = Rules::new(&settings("json", 2));
            tracing::callsite::rebuild_interest_cache();
            tell("after");
        });
        let value: Value = serde_json::from_str(&text).expect("one line, of JSON");
        assert_eq!(value["word"], "after");
    }

    #[test]
    fn a_line_that_repeats_is_told_once_a_minute_with_a_count() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        assert_eq!(limiter.admit(1, 7, start), Some((0, 0)));
        assert_eq!(limiter.admit(1, 7, start + SILENCE / 2), None);
        assert_eq!(limiter.admit(1, 8, start + SILENCE / 2), Some((0, 0)), "another line");
        assert_eq!(limiter.admit(1, 7, start + SILENCE), Some((1, 0)));
        let text = logged(&settings("text", 0), || (0..5).for_each(|_| tracing::warn!("again")));
        assert_eq!(text.lines().count(), 1);
        let text = logged(&settings("text", 0), || (0..5).for_each(|_| tracing::info!("again")));
        assert_eq!(text.lines().count(), 5, "what is no trouble is not held back");
    }

    #[test]
    fn one_place_cannot_flood() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        let told = (0..1000).filter(|text| limiter.admit(1, *text, start).is_some()).count();
        assert_eq!(told, BURST as usize);
        assert_eq!(limiter.admit(2, 5000, start), Some((0, 0)), "other places are free");
        assert_eq!(limiter.admit(1, 6000, start + REFILL), Some((0, 1000 - BURST)));
        assert!(limiter.lines.len() <= REMEMBERED);
        let _ = (0..5000).map(|text| limiter.admit(text, text, start)).count();
        assert!(limiter.lines.len() <= REMEMBERED, "memory is bounded");
    }
}
