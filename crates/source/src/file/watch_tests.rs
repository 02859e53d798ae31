// SPDX-License-Identifier: Apache-2.0

//! The file source as a whole, on real files.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use model::{Kind, Update};
use tokio::{
    sync::mpsc::{self, Receiver},
    task::JoinHandle,
    time::timeout,
};

use super::*;

struct Bench {
    folder: tempfile::TempDir,
    updates: Receiver<Update>,
    problems: Arc<Problems>,
    gone: usize,
    /// Services and their addresses, as the updates have it.
    services: BTreeMap<String, String>,
    listed: Vec<Kind>,
    task: JoinHandle<()>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Bench {
    /// Follows `target` in a folder prepared by `prepare`.
    fn start(target: &str, prepare: impl FnOnce(&Path)) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        prepare(folder.path());
        let (sender, updates) = mpsc::channel(64);
        let problems = Arc::new(Problems::new());
        let target = folder.path().join(target);
        let task = tokio::spawn(run(target, "worker-1".into(), problems.clone(), sender));
        Bench { folder, updates, problems, gone: 0, services: BTreeMap::new(), listed: Vec::new(), task }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// As careful programs save: a new file, renamed into place.
    fn save(&self, name: &str, text: &str) {
        fs::write(self.path("draft"), text).unwrap();
        fs::rename(self.path("draft"), self.path(name)).unwrap();
    }

    fn apply(&mut self, update: Update) {
        match update {
            Update::Service(service) => {
                let address = service.cluster_ips.v4.unwrap().to_string();
                self.services.insert(service.key.name.to_string(), address);
            }
            Update::ServiceGone(key) => {
                self.gone += 1;
                assert!(self.services.remove(&*key.name).is_some(), "{key} gone twice");
            }
            Update::End(kind) => self.listed.push(kind),
            Update::Begin(kind) => assert!(!self.listed.contains(&kind)),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until exactly these services are served, and then makes sure that it stays so.
    async fn expect(&mut self, services: &[(&str, &str)]) {
        let wanted: BTreeMap<_, _> =
            services.iter().map(|(name, address)| (name.to_string(), address.to_string())).collect();
        let reached = timeout(Duration::from_secs(30), async {
            while self.services != wanted || self.listed.is_empty() {
                let update = self.updates.recv().await.expect("the source goes on");
                self.apply(update);
            }
        });
        assert!(
            reached.await.is_ok(),
            "have {:?}, want {wanted:?}; {:?}",
            self.services,
            self.problems.recent()
        );
        self.expect_nothing(Duration::from_millis(100)).await;
        assert_eq!(self.services, wanted);
    }

    /// Nothing but the rest of a list may come.
    async fn expect_nothing(&mut self, during: Duration) {
        while let Ok(update) = timeout(during, self.updates.recv()).await {
            let update = update.expect("the source goes on");
            assert!(matches!(update, Update::End(_)), "{update:?}");
            self.apply(update);
        }
    }
}

fn service(name: &str, address: &str) -> String {
    with_port(name, address, 80)
}

fn with_port(name: &str, address: &str, port: u32) -> String {
    let spec = format!("{{clusterIP: {address}, ports: [{{port: {port}}}]}}");
    format!("---\nkind: Service\nmetadata: {{name: {name}}}\nspec: {spec}\n")
}

#[tokio::test]
async fn a_folder_is_told_whole_and_then_by_differences() {
    let mut bench = Bench::start("", |folder| {
        fs::write(folder.join("a.yaml"), service("a", "10.0.0.1")).unwrap();
        fs::write(folder.join("b.yaml"), service("b", "10.0.0.2") + &service("c", "10.0.0.3")).unwrap();
        fs::write(folder.join("notes.txt"), service("x", "10.0.0.9")).unwrap();
    });
    bench.expect(&[("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")]).await;
    assert_eq!(bench.listed, Kind::ALL);
    // Written in place.
    fs::write(bench.path("b.yaml"), service("c", "10.0.0.4")).unwrap();
    bench.expect(&[("a", "10.0.0.1"), ("c", "10.0.0.4")]).await;
    // Renamed into place, and a new file.
    bench.save("a.yaml", &service("a", "10.0.0.5"));
    bench.save(
        "d.json",
        r#"{"kind":"Service","metadata":{"name":"d"},"spec":{"clusterIP":"10.0.0.6","ports":[{"port":80}]}}"#,
    );
    bench.expect(&[("a", "10.0.0.5"), ("c", "10.0.0.4"), ("d", "10.0.0.6")]).await;
    fs::remove_file(bench.path("a.yaml")).unwrap();
    bench.expect(&[("c", "10.0.0.4"), ("d", "10.0.0.6")]).await;
}

#[tokio::test]
async fn an_empty_folder_is_listed() {
    let mut bench = Bench::start("", |_| ());
    bench.expect(&[]).await;
    assert_eq!(bench.listed, Kind::ALL);
}

#[tokio::test]
async fn a_folder_in_which_nothing_counts_is_said_to_be_so() {
    let mut bench = Bench::start("", |folder| {
        fs::write(folder.join("web.conf"), service("a", "10.0.0.1")).unwrap();
        fs::write(folder.join(".hidden"), "").unwrap();
    });
    bench.expect(&[]).await;
    let said = |bench: &Bench| bench.problems.recent().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(bench.problems.count(Reason::NoManifests), 1);
    assert!(said(&bench)[0].ends_with("\"web.conf\"; nothing is served from it"), "{:?}", said(&bench));
    bench.save("x.yaml", &service("a", "10.0.0.1"));
    bench.expect(&[("a", "10.0.0.1")]).await;
    assert_eq!(said(&bench).len(), 1);
    let mut hidden = Bench::start("", |folder| fs::write(folder.join(".hidden"), "").unwrap());
    hidden.expect(&[]).await;
    assert_eq!(said(&hidden), [""; 0]);
}

#[tokio::test]
async fn a_half_written_file_removes_nothing() {
    let (a, b) = (service("a", "10.0.0.1"), service("b", "10.0.0.2"));
    let whole = a.clone() + &b;
    let mut bench = Bench::start("", |folder| fs::write(folder.join("x.yaml"), &whole).unwrap());
    bench.expect(&[("a", "10.0.0.1"), ("b", "10.0.0.2")]).await;
    let mut file = fs::File::create(bench.path("x.yaml")).unwrap();
    bench.expect_nothing(Duration::from_millis(300)).await;
    file.write_all(a.as_bytes()).unwrap();
    // Another file's change makes it look; this one is still open.
    fs::write(bench.path("y.yaml"), service("y", "10.0.0.9")).unwrap();
    bench.expect(&[("a", "10.0.0.1"), ("b", "10.0.0.2"), ("y", "10.0.0.9")]).await;
    // Longer than any poll takes.
    bench.expect_nothing(Duration::from_secs(6)).await;
    file.write_all(service("c", "10.0.0.3").as_bytes()).unwrap();
    drop(file);
    bench.expect(&[("a", "10.0.0.1"), ("c", "10.0.0.3"), ("y", "10.0.0.9")]).await;
}

#[tokio::test]
async fn a_file_that_has_become_bad_or_empty_removes_nothing() {
    let (a, b) = (service("a", "10.0.0.1"), service("b", "10.0.0.2"));
    let mut bench = Bench::start("", |folder| fs::write(folder.join("x.yaml"), a.clone() + &b).unwrap());
    bench.expect(&[("a", "10.0.0.1"), ("b", "10.0.0.2")]).await;
    fs::write(bench.path("x.yaml"), "---\nkind: [").unwrap();
    bench.expect_nothing(Duration::from_millis(300)).await;
    fs::write(bench.path("x.yaml"), "").unwrap();
    bench.expect_nothing(Duration::from_millis(300)).await;
    let counts = [Reason::Kept, Reason::Emptied].map(|reason| bench.problems.count(reason));
    assert_eq!(counts, [1, 1]);
    fs::write(bench.path("x.yaml"), service("b", "10.0.0.3") + "---\nkind: Service\n").unwrap();
    bench.expect(&[("a", "10.0.0.1"), ("b", "10.0.0.3")]).await;
    fs::write(bench.path("x.yaml"), &b).unwrap();
    bench.expect(&[("b", "10.0.0.2")]).await;
}

#[tokio::test]
async fn what_goes_wrong_a_second_time_is_said_a_second_time() {
    let text = |address: &str| with_port("a", "10.0.0.1", 80000) + &service("b", address);
    let mut bench = Bench::start("", |folder| fs::write(folder.join("x.yaml"), text("10.0.1.1")).unwrap());
    bench.expect(&[("a", "10.0.0.1"), ("b", "10.0.1.1")]).await;
    let logged = |bench: &Bench| {
        let recent = bench.problems.recent();
        recent.iter().filter(|problem| problem.reason == Reason::BadPort).count()
    };
    assert_eq!(logged(&bench), 1);
    bench.save("x.yaml", &text("10.0.1.2"));
    bench.expect(&[("a", "10.0.0.1"), ("b", "10.0.1.2")]).await;
    assert_eq!((logged(&bench), bench.problems.count(Reason::BadPort)), (1, 2), "it is still the same");
    bench.save("x.yaml", &service("a", "10.0.0.2"));
    bench.expect(&[("a", "10.0.0.2")]).await;
    bench.save("x.yaml", &text("10.0.1.3"));
    bench.expect(&[("a", "10.0.0.2"), ("b", "10.0.1.3")]).await;
    assert_eq!(logged(&bench), 2);
    fs::remove_file(bench.path("x.yaml")).unwrap();
    bench.expect(&[]).await;
    bench.save("x.yaml", &text("10.0.1.3"));
    bench.expect(&[("a", "10.0.0.1"), ("b", "10.0.1.3")]).await;
    assert_eq!(logged(&bench), 3);
}

#[tokio::test]
async fn an_editor_that_moves_the_old_file_away_first() {
    let mut bench =
        Bench::start("", |folder| fs::write(folder.join("x.yaml"), service("a", "10.0.0.1")).unwrap());
    bench.expect(&[("a", "10.0.0.1")]).await;
    fs::rename(bench.path("x.yaml"), bench.path("x.yaml~")).unwrap();
    bench.expect_nothing(Duration::from_millis(40)).await;
    fs::write(bench.path("x.yaml"), service("a", "10.0.0.2")).unwrap();
    bench.expect(&[("a", "10.0.0.2")]).await;
    assert_eq!(bench.gone, 0);
}

#[tokio::test]
async fn a_config_map_is_swapped_as_a_whole() {
    let version = |folder: &Path, version: &str, text: String| {
        fs::create_dir(folder.join(version)).unwrap();
        fs::write(folder.join(version).join("x.yaml"), text).unwrap();
        symlink(version, folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    };
    let prepare = |folder: &Path| {
        version(folder, "..1", service("a", "10.0.0.1"));
        symlink("..data/x.yaml", folder.join("x.yaml")).unwrap();
    };
    // Once as a folder, once as the file in it.
    for target in ["", "x.yaml"] {
        let mut bench = Bench::start(target, prepare);
        bench.expect(&[("a", "10.0.0.1")]).await;
        version(bench.folder.path(), "..2", service("a", "10.0.0.2") + &service("b", "10.0.0.3"));
        fs::remove_dir_all(bench.path("..1")).unwrap();
        bench.expect(&[("a", "10.0.0.2"), ("b", "10.0.0.3")]).await;
    }
}

#[tokio::test]
async fn what_comes_later_and_goes_meanwhile() {
    for (target, file) in [("manifests", "manifests/x.yaml"), ("deep/manifests", "deep/manifests/x.yaml")] {
        let mut bench = Bench::start(target, |_| ());
        bench.expect_nothing(Duration::from_millis(200)).await;
        assert!(bench.listed.is_empty(), "nothing is known, so nothing may be listed");
        assert_eq!(bench.problems.count(Reason::Away), 1);
        fs::create_dir_all(bench.path(target)).unwrap();
        fs::write(bench.path(file), service("a", "10.0.0.1")).unwrap();
        bench.expect(&[("a", "10.0.0.1")]).await;
        // The folder goes as a whole, as when a volume is away.
        fs::rename(bench.path(target), bench.path("away")).unwrap();
        bench.expect_nothing(Duration::from_millis(1500)).await;
        let away = |problem: &&Problem| problem.reason == Reason::Away;
        assert_eq!(bench.problems.recent().iter().filter(away).count(), 2, "each time is said");
        fs::create_dir(bench.path(target)).unwrap();
        fs::write(bench.path(file), service("b", "10.0.0.2")).unwrap();
        bench.expect(&[("b", "10.0.0.2")]).await;
    }
}

#[tokio::test]
async fn a_single_file() {
    let mut bench = Bench::start("x.yaml", |_| ());
    bench.expect_nothing(Duration::from_millis(200)).await;
    assert!(bench.listed.is_empty());
    bench.save("x.yaml", &service("a", "10.0.0.1"));
    bench.save("y.yaml", &service("y", "10.0.0.9"));
    bench.expect(&[("a", "10.0.0.1")]).await;
    bench.save("x.yaml", &service("a", "10.0.0.2"));
    bench.expect(&[("a", "10.0.0.2")]).await;
    fs::remove_file(bench.path("x.yaml")).unwrap();
    bench.expect(&[]).await;
}

#[tokio::test]
async fn a_link_to_elsewhere_is_followed() {
    let elsewhere = tempfile::tempdir().unwrap();
    let real = elsewhere.path().join("real.yaml");
    fs::write(&real, service("a", "10.0.0.1")).unwrap();
    let mut bench = Bench::start("", |folder| symlink(&real, folder.join("x.yaml")).unwrap());
    bench.expect(&[("a", "10.0.0.1")]).await;
    // Nobody tells of it: the regular look has to find it.
    fs::write(&real, service("a", "10.0.0.2")).unwrap();
    bench.expect(&[("a", "10.0.0.2")]).await;
}

#[tokio::test]
async fn an_object_in_two_files_changes_hands() {
    let mut bench = Bench::start("", |folder| {
        fs::write(folder.join("a.yaml"), service("s", "10.0.0.1")).unwrap();
        fs::write(folder.join("b.yaml"), service("s", "10.0.0.2")).unwrap();
    });
    bench.expect(&[("s", "10.0.0.1")]).await;
    assert_eq!(bench.problems.count(Reason::DuplicateObject), 1);
    fs::remove_file(bench.path("a.yaml")).unwrap();
    bench.expect(&[("s", "10.0.0.2")]).await;
}

#[tokio::test]
async fn many_changes_in_a_row_end_in_the_last_one() {
    let mut bench = Bench::start("", |_| ());
    for n in 0..200 {
        let text = service("a", &format!("10.0.1.{n}")) + &service(&format!("b{n}"), "10.0.0.2");
        if n % 2 == 0 {
            fs::write(bench.path("x.yaml"), text).unwrap();
        } else {
            bench.save("x.yaml", &text);
        }
    }
    bench.expect(&[("a", "10.0.1.199"), ("b199", "10.0.0.2")]).await;
}

#[test]
fn files_can_be_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let problems = Arc::new(Problems::new());
    fs::write(folder.path().join("x.yaml"), service("a", "10.0.0.1") + "---\nkind: [\n").unwrap();
    for target in [folder.path().to_owned(), folder.path().join("x.yaml")] {
        let updates = load(&target, "worker-1", &problems).unwrap();
        assert_eq!(updates.len(), 9, "{updates:?}");
        assert!(matches!((&updates[0], &updates[4]), (Update::Begin(_), Update::Service(_))));
    }
    assert_eq!(problems.count(Reason::BadSyntax), 2);
    assert!(load(&folder.path().join("missing.yaml"), "worker-1", &problems).is_err());
    assert!(load(&folder.path().join("missing"), "worker-1", &problems).is_err());
}

#[tokio::test]
async fn it_ends_when_nobody_listens() {
    let mut bench = Bench::start("", |_| ());
    bench.expect(&[]).await;
    bench.updates.close();
    bench.save("x.yaml", &service("a", "10.0.0.1"));
    let ended = timeout(Duration::from_secs(30), &mut bench.task).await;
    assert!(matches!(ended, Ok(Ok(()))));
}
