// SPDX-License-Identifier: Apache-2.0

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hashbrown::DefaultHashBuilder;
use model::Update;
use proptest::prelude::*;

use super::manifest::{self, Content, Known, Manifest, ManifestScope};
use crate::{Interner, Problem, Reason};

fn read(path: &str, text: &[u8]) -> (Manifest, Vec<Problem>) {
    let mut problems = Vec::new();
    let mut scope = ManifestScope {
        interner: &mut Interner::default(),
        node_name: "worker-1",
        hasher: &DefaultHashBuilder::default(),
        known: &Known::default(),
        report: &mut |problem| problems.push(problem),
    };
    let mut manifest = manifest::read(Path::new(path), &mut { text }, &mut scope).unwrap();
    for found in &mut manifest.found {
        if let Content::Part(_, more) | Content::Nothing(more) = &mut found.content {
            problems.append(more);
        }
    }
    manifest.found.retain(|found| !matches!(found.content, Content::Nothing(_)));
    problems.sort_by_key(|problem| problem.place.as_ref().map(|place| place.1));
    (manifest, problems)
}

fn update(manifest: &Manifest, at: usize) -> Option<&Update> {
    match &manifest.found[at].content {
        Content::Whole(update) | Content::Part(update, _) => Some(update),
        _ => None,
    }
}

fn names(manifest: &Manifest) -> Vec<String> {
    manifest.found.iter().map(|found| format!("{}:{}", found.line, found.key.describe())).collect()
}

fn places(problems: &[Problem]) -> Vec<(usize, Reason)> {
    problems
        .iter()
        .map(|problem| (problem.place.as_ref().map_or(0, |place| place.1), problem.reason))
        .collect()
}

const YAML: &str = "\
# The shop.
apiVersion: v1
kind: Service
metadata:
  name: cart
  namespace: shop
spec:
  clusterIP: 10.96.0.10
  ports:
  - port: 80
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: cart-1
  namespace: shop
  labels: {kubernetes.io/service-name: cart}
ports:
- port: 8080
endpoints:
- addresses: [10.1.0.1]
---
apiVersion: v1
kind: Node
metadata: {name: worker-1}
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.96.0.0/12]}
";

#[test]
fn all_kinds_from_yaml() {
    let (manifest, problems) = read("x.yaml", YAML.as_bytes());
    assert_eq!(
        names(&manifest),
        ["2:Service shop/cart", "12:EndpointSlice shop/cart-1", "23:Node", "27:ServiceCIDR kubernetes"]
    );
    assert_eq!((problems, manifest.complete, manifest.documents), (vec![], true, 4));
    let Some(Update::Slice(slice)) = update(&manifest, 1) else { panic!() };
    assert_eq!((slice.family, slice.endpoints.len()), (model::Family::V4, 1));
}

#[test]
fn lists_in_json_and_yaml() {
    let service = |name: &str, kind: &str| {
        format!(
            r#"{{{kind}"metadata":{{"name":"{name}"}},"spec":{{"clusterIP":"10.96.0.1","ports":[{{"port":80}}]}}}}"#
        )
    };
    let with_kind = r#""apiVersion":"v1","kind":"Service","#;
    let list = format!(
        "{{\"apiVersion\":\"v1\",\"items\":[\n{},\n{}],\n\"kind\":\"List\"}}",
        service("a", with_kind),
        service("b", with_kind)
    );
    let typed = format!("{{\"kind\":\"ServiceList\",\"items\":[{}]}}", service("c", ""));
    // As `kubectl get -o json` sorts it: the kind comes last.
    let sorted = format!("{{\"items\":[{}],\"kind\":\"ServiceList\"}}", service("d", ""));
    let text = format!("{list}\n{typed}{sorted}");
    let expected =
        ["2:Service default/a", "3:Service default/b", "5:Service default/c", "5:Service default/d"];
    let (manifest, problems) = read("x.json", text.as_bytes());
    assert_eq!((names(&manifest), problems), (expected.map(str::to_owned).to_vec(), vec![]));
    let text = format!("{list}\n---\n{typed}\n---\n{sorted}");
    let (manifest, problems) = read("x.yml", text.as_bytes());
    assert_eq!((manifest.found.len(), problems), (4, vec![]));
}

#[test]
fn a_bad_document_is_named_and_the_rest_is_read() {
    let text = "\
kind: Service
metadata: {name: a}
spec:
  clusterIP: 10.96.0.1
  ports:
  - port: http
---
kind: Service
metadata: {name: b}
spec: {clusterIP: 10.96.0.2, ports: [{port: 80}]}
---
kind: Service
metadata: {name: c
spec: [
---
metadata: {name: d}
---
kind: Service
metadata: {name: e}
spec: {ports: [{port: 80}]}
---
kind: Deployment
metadata: {name: f}
---
- a list
";
    let (manifest, problems) = read("x.yaml", text.as_bytes());
    assert_eq!(names(&manifest), ["8:Service default/b"]);
    assert!(!manifest.complete);
    assert_eq!(
        places(&problems),
        [
            (6, Reason::Undecodable),
            (14, Reason::BadSyntax),
            (16, Reason::Undecodable),
            (20, Reason::NoClusterIp),
            (22, Reason::UnknownKind),
            (25, Reason::BadSyntax),
        ]
    );
    assert_eq!(problems[0].object, "Service a");
    assert_eq!(problems[0].place, Some((PathBuf::from("x.yaml"), 6)));
    let said = problems[0].to_string();
    assert!(said.starts_with("x.yaml:6: Service a: ") && said.contains("whole number"), "{said}");
    assert_eq!(problems[4].object, "Deployment f");
}

#[test]
fn bad_json_is_named_with_its_line() {
    let good = r#"{"kind":"Service","metadata":{"name":"a"},"spec":{"clusterIP":"10.96.0.1","ports":[{"port":80}]}}"#;
    for (text, found, problem) in [
        (format!("{good}\n\n{{\"kind\":"), 1, (3, Reason::BadSyntax)),
        (format!("{good}\nnonsense\n{good}"), 1, (2, Reason::BadSyntax)),
        (format!("{{\n\"kind\": \"Service\"\n\"x\": 1}}\n{good}"), 1, (3, Reason::BadSyntax)),
        (format!("[{good}]"), 0, (1, Reason::BadSyntax)),
        (
            format!(
                "{{\"kind\":\"Service\",\"metadata\":{{\"name\":\"b\"}},\n\"spec\":{{\"clusterIP\":7}}}}{good}"
            ),
            1,
            (2, Reason::Undecodable),
        ),
    ] {
        let (manifest, problems) = read("x.json", text.as_bytes());
        assert_eq!((manifest.found.len(), places(&problems)), (found, vec![problem]), "{text}");
        assert!(!manifest.complete);
    }
}

#[test]
fn what_is_ignored_is_no_fault() {
    let text = "\
kind: Service
metadata: {name: headless}
spec: {clusterIP: None}
---
kind: Service
metadata: {name: external}
spec: {type: ExternalName, externalName: example.com}
---
kind: Service
metadata: {name: other, labels: {service.kubernetes.io/service-proxy-name: cilium}}
spec: {clusterIP: 10.96.0.1}
---
kind: Node
metadata: {name: worker-2}
---
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: knative}
";
    let (manifest, problems) = read("x.yaml", text.as_bytes());
    assert_eq!((manifest.found.len(), manifest.complete), (0, true));
    assert_eq!(places(&problems), [(13, Reason::OtherNode), (16, Reason::UnknownKind)]);
}

#[test]
fn what_the_api_server_would_fill_in() {
    let text = "\
kind: Service
metadata: {name: dual}
spec: {clusterIPs: ['fd00::1', 10.96.0.1], ports: [{port: 80}]}
---
kind: Service
metadata: {name: single}
spec: {clusterIP: 10.96.0.2, ipFamilies: [IPv4], ports: [{port: 80}]}
---
kind: EndpointSlice
metadata: {name: six, labels: {kubernetes.io/service-name: dual}}
ports: [{port: 80}]
endpoints: [{addresses: ['fd00::9']}]
---
kind: Service
metadata: {name: mapped}
spec: {clusterIP: '::ffff:10.96.0.42', ports: [{port: 80}]}
";
    let (manifest, problems) = read("x.yaml", text.as_bytes());
    assert_eq!(problems, []);
    let Some(Update::Service(dual)) = update(&manifest, 0) else { panic!() };
    assert!(dual.cluster_ips.v4.is_some() && dual.cluster_ips.v6.is_some());
    let Some(Update::Service(single)) = update(&manifest, 1) else { panic!() };
    assert!(single.cluster_ips.v4.is_some());
    let Some(Update::Slice(slice)) = update(&manifest, 2) else { panic!() };
    assert_eq!(slice.family, model::Family::V6);
    assert_eq!(slice.service.to_string(), "default/dual");
    let Some(Update::Service(mapped)) = update(&manifest, 3) else { panic!() };
    assert_eq!(mapped.cluster_ips.v4, Some([10, 96, 0, 42].into()));
}

#[test]
fn a_cluster_ip_that_is_none_leaves_that_of_the_other_family() {
    let text = "{kind: Service, metadata: {name: dual}, spec: {clusterIPs: ['fd00::x', 10.96.0.1], ports: [{port: 80}]}}";
    let (manifest, problems) = read("x.yaml", text.as_bytes());
    assert_eq!(places(&problems), [(1, Reason::BadAddress)]);
    let Some(Update::Service(dual)) = update(&manifest, 0) else { panic!() };
    assert_eq!(dual.cluster_ips.v4, Some([10, 96, 0, 1].into()));
}

/// Each address looked for among all before it took 40 s and more here; with a set it takes less than one.
#[test]
fn sixty_thousand_addresses_are_read_in_no_time_and_in_order() {
    let addresses: Vec<_> = (0..60_000_u32).map(|n| IpAddr::from((n | 0xcb00_0000).to_be_bytes())).collect();
    let list = |begin: &str| {
        let twice = addresses.iter().chain(&addresses[..9]);
        twice.map(|address| format!("{begin}{address}\n")).collect::<String>()
    };
    let text = format!(
        "kind: Service\nmetadata:\n  name: many\nspec:\n  clusterIP: 10.96.0.1\n  ports: [{{port: 80}}]\n  externalIPs:\n{}\
         status:\n  loadBalancer:\n    ingress:\n{}",
        list("  - "),
        list("    - ip: ")
    );
    let begun = Instant::now();
    let (manifest, problems) = read("x.yaml", text.as_bytes());
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(problems, []);
    let Some(Update::Service(many)) = update(&manifest, 0) else { panic!() };
    assert!(*many.external_ips == *addresses && *many.load_balancer_ips == *addresses);
}

#[test]
fn a_health_check_port_of_0_is_a_fault_where_one_is_needed() {
    let faults = |kind: &str, policy: &str, port: &str| {
        let text = format!(
            "kind: Service\nmetadata: {{name: web}}\n\
             spec: {{clusterIP: 10.96.0.1, type: {kind}, externalTrafficPolicy: {policy}, ports: [{{port: 80}}]{port}}}\n"
        );
        let (manifest, problems) = read("x.yaml", text.as_bytes());
        assert_eq!(manifest.found.len(), 1, "the service is served");
        problems.iter().map(|problem| problem.reason).collect::<Vec<_>>()
    };
    let zero = ", healthCheckNodePort: 0";
    assert_eq!(faults("LoadBalancer", "Local", zero), [Reason::NoHealthCheckPort]);
    // The API server allocates one where none is written; in a file it means that nobody asks.
    assert_eq!(faults("LoadBalancer", "Local", ""), []);
    assert_eq!(faults("LoadBalancer", "Cluster", zero), []);
    assert_eq!(faults("NodePort", "Local", zero), []);
}

#[test]
fn kinds_and_lists_that_are_misspelled() {
    for (text, said) in [
        ("kind: Servce\nmetadata: {name: a}\n", Some((1, Reason::MisspelledKind))),
        (
            "metadata: {name: a}\nkind: Endpointslice\napiVersion: discovery.k8s.io/v1\n",
            Some((2, Reason::MisspelledKind)),
        ),
        ("kind: Lits\nitems:\n- kind: ConfigMap\n", Some((1, Reason::MisspelledKind))),
        ("kind: List\nitmes:\n- kind: Service\n", Some((1, Reason::Undecodable))),
        ("{\"kind\": \"ServiceList\", \"itmes\": []}", Some((1, Reason::Undecodable))),
        ("kind: ServiceList\nitems: []\n", None),
        ("kind: List\nitems: null\n", None),
        ("kind: AllowList\nspec: {}\n", None),
        ("apiVersion: example.com/v1\nkind: Services\n", None),
    ] {
        let (manifest, problems) = read("x.yaml", text.as_bytes());
        let bad = places(&problems).into_iter().find(|(_, reason)| *reason != Reason::UnknownKind);
        assert_eq!((bad, manifest.complete), (said, said.is_none()), "{text}");
    }
}

#[test]
fn endpoints_by_annotation() {
    let text = "\
kind: Service
metadata:
  name: cart
  annotations:
    portolan.dev/endpoints: |
      10.1.0.1:8080
      10.1.0.2:8080
      oops
spec:
  clusterIP: 10.96.0.1
  ports: [{port: 80}]
";
    let (manifest, problems) = read("x.yaml", text.as_bytes());
    assert_eq!(names(&manifest), ["1:Service default/cart", "1:EndpointSlice default/cart@/tcp/8080/IPv4"]);
    assert_eq!(places(&problems), [(5, Reason::BadEndpoints)]);
    assert!(manifest.complete, "a part that is left out does not spoil the file");
}

#[test]
fn a_large_service_from_a_file() {
    let mut text =
        String::from("kind: Service\nmetadata: {name: big}\nspec:\n  clusterIP: 10.96.0.1\n  ports:\n");
    for n in 1..=1000 {
        text.push_str(&format!("  - {{name: p{n}, port: {n}}}\n"));
    }
    text.push_str(
        "---\nkind: EndpointSlice\nmetadata: {name: big, labels: {kubernetes.io/service-name: big}}\n",
    );
    text.push_str("ports: [{name: p1, port: 1}]\nendpoints:\n");
    for n in 0..10_000 {
        text.push_str(&format!("- addresses: [10.1.{}.{}]\n", n / 250, n % 250));
    }
    let (manifest, problems) = read("x.yaml", text.as_bytes());
    assert_eq!(problems, []);
    let Some(Update::Service(service)) = update(&manifest, 0) else { panic!() };
    let Some(Update::Slice(slice)) = update(&manifest, 1) else { panic!() };
    assert_eq!((service.ports.len(), slice.endpoints.len()), (1000, 10_000));
}

proptest! {
    #[test]
    fn json_that_is_cut_short_is_never_complete(cut in 1_usize..1000) {
        let service = r#"{"kind":"Service","metadata":{"name":"a"},"spec":{"clusterIP":"10.96.0.1","ports":[{"port":80}]}}"#;
        let whole = format!("{{\"kind\":\"List\",\"items\":[{service},{service}]}}");
        prop_assert!(read("x.json", whole.as_bytes()).0.complete);
        let part = &whole[..cut % whole.len()];
        prop_assert!(part.is_empty() || !read("x.json", part.as_bytes()).0.complete);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        read("x.yaml", &bytes);
        read("x.json", &bytes);
    }

    #[test]
    fn no_damage_panics(
        damage in prop::collection::vec((0..YAML.len(), prop::sample::select(b"{}[]:,\"'-#&* \n\xff0".to_vec())), 0..10),
    ) {
        let mut bytes = YAML.as_bytes().to_vec();
        for (at, byte) in damage {
            bytes[at] = byte;
        }
        read("x.yaml", &bytes);
        read("x.json", &bytes);
    }
}

/// At the first look the state of files is not asked for before they are read.
#[test]
fn a_file_that_cannot_be_read_at_the_first_look_is_looked_at_once_more() {
    let folder = tempfile::tempdir().unwrap();
    let text = |name: &str| {
        format!(
            "kind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: 10.0.0.1, ports: [{{port: 80}}]}}\n"
        )
    };
    for name in ["gone", "here", "swapped"] {
        std::fs::write(folder.path().join(format!("{name}.yaml")), text(name)).unwrap();
    }
    let (problems, mut told) = (crate::Problems::new(), Vec::new());
    let mut reader = super::Reader::new(folder.path().to_owned(), "worker-1".into());
    let all = super::Notices { all: true, ..Default::default() };
    let (names, _) = reader.look_at_all(&all, tokio::time::Instant::now()).unwrap();
    assert_eq!(names.len(), 3);
    std::fs::remove_file(folder.path().join("gone.yaml")).unwrap();
    // Can be opened, and not be read.
    std::fs::remove_file(folder.path().join("swapped.yaml")).unwrap();
    std::fs::create_dir(folder.path().join("swapped.yaml")).unwrap();
    reader.read_all(names.into_iter().collect(), &problems, &mut |update| told.push(update));
    assert_eq!(problems.recent(), []);
    assert!(matches!(&told[..], [Update::Service(service)] if &*service.key.name == "here"), "{told:?}");
    assert!(reader.desk.is_settled(), "nothing is waited for");
}
