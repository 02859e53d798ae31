// SPDX-License-Identifier: Apache-2.0

//! Whatever is done to files, what has been told in the end is what a fresh start would tell.

use std::{
    collections::BTreeMap, fs, io::Write, os::unix::fs::symlink, path::Path, sync::Arc, time::Duration,
};

use model::Update;
use proptest::prelude::*;
use tokio::{sync::mpsc, time::Instant};

use super::*;

/// One thing that can be done to the files of a folder.
#[derive(Clone, Debug)]
enum Operation {
    /// Truncated and written in one go.
    Write(usize, Text),
    /// Written in two goes, some time apart, the file open all the while.
    WriteSlowly(usize, Text),
    /// A draft, renamed into place.
    Save(usize, Text),
    /// The old one moved away first, as some editors do.
    Backup(usize, Text),
    Append(usize, Text),
    Remove(usize),
    Rename(usize, usize),
    HardLink(usize, usize),
    /// The name becomes a link to another file.
    Link(usize, usize),
    /// All mounted files are swapped by turning one link.
    Swap(Text),
    /// The folder is moved away and another one put in its place.
    ReplaceFolder(usize, Text),
    Wait(u64),
}

/// Which services a file has, and the last number of their addresses.
type Text = Vec<(u8, u8)>;

const NAMES: [&str; 4] = ["a.yaml", "b.yaml", "c.json", "d.yml"];
/// Comes from `..data`.
const MOUNTED: &str = "m.yaml";

fn text_of(name: &str, services: &Text) -> String {
    let service = |(name, last): &(u8, u8)| {
        format!(
            r#"{{"kind": "Service", "metadata": {{"name": "s{name}"}}, "spec": {{"clusterIP": "10.0.0.{last}", "ports": [{{"port": 80}}]}}}}"#
        )
    };
    let separator = if name.ends_with("json") { "\n" } else { "\n---\n" };
    // A file without objects takes nothing back, so each has one that matters to nobody.
    let other = r#"{"kind": "ConfigMap", "metadata": {"name": "x"}}"#.to_owned();
    services.iter().map(service).chain([other]).map(|text| text + separator).collect()
}

impl Operation {
    async fn perform(&self, folder: &Path) {
        let path = |at: &usize| folder.join(NAMES[*at]);
        let text = |at: &usize, services: &Text| text_of(NAMES[*at], services);
        // Not everything can be done at any time; what cannot is not done.
        let _ = match self {
            Operation::Write(at, services) => fs::write(path(at), text(at, services)),
            Operation::WriteSlowly(at, services) => {
                let text = text(at, services);
                let (first, second) =
                    text.split_at(text.find("\n---\n").map_or(text.len() / 2, |cut| cut + 5));
                let Ok(mut file) = fs::File::create(path(at)) else { return };
                file.write_all(first.as_bytes()).unwrap();
                tokio::time::sleep(Duration::from_secs(7)).await;
                file.write_all(second.as_bytes())
            }
            Operation::Save(at, services) => fs::write(folder.join("draft"), text(at, services))
                .and_then(|()| fs::rename(folder.join("draft"), path(at))),
            Operation::Backup(at, services) => {
                let _ = fs::rename(path(at), folder.join("backup~"));
                fs::write(path(at), text(at, services))
            }
            Operation::Append(at, services) => fs::OpenOptions::new()
                .append(true)
                .open(path(at))
                .and_then(|mut file| file.write_all(text(at, services).as_bytes())),
            Operation::Remove(at) => fs::remove_file(path(at)),
            // Only where the text stays right: YAML has something between two objects that JSON has not.
            Operation::Rename(from, to) | Operation::HardLink(from, to) | Operation::Link(from, to)
                if [from, to].into_iter().any(|at| NAMES[*at].ends_with("json")) =>
            {
                Ok(())
            }
            Operation::Rename(from, to) => fs::rename(path(from), path(to)),
            Operation::HardLink(from, to) => fs::hard_link(path(from), path(to)),
            Operation::Link(from, to) if from != to => {
                let _ = fs::remove_file(path(to));
                symlink(NAMES[*from], path(to))
            }
            Operation::Link(..) => Ok(()),
            Operation::Swap(services) => swap(folder, services),
            Operation::ReplaceFolder(at, services) => {
                let away = folder.with_extension("away");
                let _ = fs::remove_dir_all(&away);
                fs::rename(folder, &away).unwrap();
                fs::create_dir(folder).unwrap();
                fs::write(path(at), text(at, services))
            }
            Operation::Wait(millis) => {
                tokio::time::sleep(Duration::from_millis(*millis)).await;
                Ok(())
            }
        };
    }
}

fn swap(folder: &Path, services: &Text) -> io::Result<()> {
    let version = (0..).map(|n| folder.join(format!("..{n}"))).find(|path| !path.exists()).unwrap();
    fs::create_dir(&version)?;
    fs::write(version.join(MOUNTED), text_of(MOUNTED, services))?;
    symlink(version.file_name().unwrap(), folder.join("..data_tmp"))?;
    fs::rename(folder.join("..data_tmp"), folder.join("..data"))?;
    let _ = symlink(Path::new("..data").join(MOUNTED), folder.join(MOUNTED));
    Ok(())
}

fn operation() -> impl Strategy<Value = Operation> {
    let text = || prop::collection::vec((0_u8..5, 1_u8..9), 0..4);
    let file = || 0..NAMES.len();
    prop_oneof![
        3 => (file(), text()).prop_map(|(at, text)| Operation::Write(at, text)),
        1 => (file(), text()).prop_map(|(at, text)| Operation::WriteSlowly(at, text)),
        3 => (file(), text()).prop_map(|(at, text)| Operation::Save(at, text)),
        1 => (file(), text()).prop_map(|(at, text)| Operation::Backup(at, text)),
        1 => (file(), text()).prop_map(|(at, text)| Operation::Append(at, text)),
        2 => file().prop_map(Operation::Remove),
        1 => (file(), file()).prop_map(|(from, to)| Operation::Rename(from, to)),
        1 => (file(), file()).prop_map(|(from, to)| Operation::HardLink(from, to)),
        1 => (file(), file()).prop_map(|(from, to)| Operation::Link(from, to)),
        1 => text().prop_map(Operation::Swap),
        1 => (file(), text()).prop_map(|(at, text)| Operation::ReplaceFolder(at, text)),
        3 => prop_oneof![Just(0), Just(1), Just(600), Just(5000)].prop_map(Operation::Wait),
    ]
}

/// Services and their addresses.
type Told = BTreeMap<String, String>;

fn apply(told: &mut Told, update: Update) {
    match update {
        Update::Service(service) => {
            told.insert(service.key.to_string(), format!("{:?}", service.cluster_ips));
        }
        Update::ServiceGone(key) => assert!(told.remove(&key.to_string()).is_some(), "{key} gone twice"),
        Update::Begin(_) | Update::End(_) => {}
        other => panic!("{other:?}"),
    }
}

/// Time passes only while nothing happens, so hours cost nothing.
async fn follow(operations: &[Operation]) -> (Told, Told) {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("manifests");
    fs::create_dir(&folder).unwrap();
    let problems = Arc::new(Problems::new());
    let (sender, mut updates) = mpsc::channel(64);
    let task = tokio::spawn(run(folder.clone(), "worker-1".into(), problems.clone(), sender));
    let mut told = Told::new();
    for operation in operations {
        operation.perform(&folder).await;
        while let Ok(update) = updates.try_recv() {
            apply(&mut told, update);
        }
    }
    let until = Instant::now() + Duration::from_secs(300);
    while let Ok(Some(update)) = tokio::time::timeout_at(until, updates.recv()).await {
        apply(&mut told, update);
    }
    task.abort();
    let mut fresh = Told::new();
    load(&folder, "worker-1", &problems).unwrap().into_iter().for_each(|update| apply(&mut fresh, update));
    (told, fresh)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_sequence_ends_as_a_fresh_start(operations in prop::collection::vec(operation(), 1..14)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let (told, fresh) = runtime.block_on(follow(&operations));
        prop_assert_eq!(told, fresh);
    }
}
