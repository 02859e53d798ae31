// SPDX-License-Identifier: Apache-2.0

use super::*;

const WEB: &str = "\
A service.
Why.
-- config --
detectLocal: ClusterCIDR 10.244.0.0/16  # pods anywhere
nodePortAddresses: primary, 192.168.1.0/24
-- apply web.yaml --
clusterIP: 10.96.0.10
-- packets --
# comment
a1   tcp 10.96.0.10:80 -> a1,b1:8080 nomasq

client udp 10.96.0.10:80 -> drop flow=f
-- wait 1500ms --
-- delete --
Service default/web
ServiceCIDR kubernetes
-- packets --
flow f -> reject
";

fn script(text: &str, variant: Variant) -> Result<Script, Complaint> {
    Scenario::parse(Path::new("x/web.txtar"), text)?.script(variant)
}

#[test]
fn steps_in_order() {
    let script = script(WEB, Variant::Written).unwrap();
    assert_eq!(script.steps.len(), 5);
    assert_eq!(script.config.settings.node_port_addresses.len(), 2);
    let Action::Packets(lines) = &script.steps[1].action else { panic!("{:?}", script.steps[1]) };
    assert_eq!((lines[0].number, lines[1].number), (10, 12));
    let Entry::Probe(probe) = &lines[0].entry else { panic!("{:?}", lines[0]) };
    assert_eq!(probe.destination, "10.96.0.10:80".parse().unwrap());
    assert_eq!(probe.sources, ["10.244.1.1".parse::<IpAddr>().unwrap()]);
    let Expect::Forward { to, source, .. } = &probe.expect else { panic!("{:?}", probe.expect) };
    assert_eq!(to[1], Target { name: "b1".to_owned(), port: Some(8080), share: 1 });
    assert_eq!(*source, SourceSeen::Original);
    assert!(matches!(script.steps[2].action, Action::Wait(wait) if wait == Duration::from_millis(1500)));
    let Action::Delete(removals) = &script.steps[3].action else { panic!("{:?}", script.steps[3]) };
    assert_eq!(removals[0].namespace, "default");
    assert_eq!((removals[1].kind.as_str(), removals[1].name.as_str()), ("ServiceCIDR", "kubernetes"));
}

#[test]
fn the_image_is_ipv6_throughout() {
    let script = script(WEB, Variant::Image).unwrap();
    let Action::Apply { yaml, .. } = &script.steps[0].action else { panic!("{:?}", script.steps[0]) };
    assert_eq!(yaml, "clusterIP: \"fd00::a60:a\"\n");
    let Action::Packets(lines) = &script.steps[1].action else { panic!("{:?}", script.steps[1]) };
    let Entry::Probe(probe) = &lines[0].entry else { panic!("{:?}", lines[0]) };
    assert_eq!(probe.sources, ["fd00::10.244.1.1".parse::<IpAddr>().unwrap()]);
}

#[test]
fn complaints_say_where() {
    for (line, text) in [
        (1, "\n-- packets --\n"),
        (2, "x\nfamilies: IPv4\n"),
        (2, "x\n-- dance --\n"),
        (2, "x\n-- wait long --\n"),
        (3, "x\n-- packets --\na1 tcp 10.96.0.10:80 -> a1\n"),
        (3, "x\n-- packets --\na1 tcp 10.96.0.10 -> drop\n"),
        (3, "x\n-- packets --\nz1 tcp 10.96.0.10:80 -> drop\n"),
        (3, "x\n-- packets --\na1 icmp 10.96.0.10:80 -> drop\n"),
        (3, "x\n-- packets --\na1 tcp 10.96.0.10:80 -> drop masq\n"),
        (3, "x\n-- packets --\na1 tcp 10.96.0.10:80 -> a1=much masq\n"),
        (3, "x\n-- packets --\na1 tcp 10.96.0.10:80 -> drop turns\n"),
        (3, "x\n-- packets --\na1@::1 tcp 10.96.0.10:80 -> drop\n"),
        (4, "x\n-- packets --\n\na1 tcp 10.96.0.10:80 => drop\n"),
        (3, "x\n-- config --\ncolour: green\n"),
        (3, "x\n-- delete --\nService\n"),
    ] {
        let complaint = script(text, Variant::Written).unwrap_err();
        assert_eq!((complaint.file.as_str(), complaint.line), ("tests/scenarios/web.txtar", line), "{text}");
    }
}
