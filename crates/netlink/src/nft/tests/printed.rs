// SPDX-License-Identifier: Apache-2.0

//! `nft list ruleset` prints what we write, readably, and does not crash on it.

use std::{process::Command, time::Duration};

use super::gallery;
use crate::{
    Family, Netns,
    nft::{Field, Lifetime, Nft, Set, TableRef, Type, Typeof, Value},
    testing::scratch_netns,
};

/// What `nft` prints in a namespace; `None`, with a printed line, where it is not installed. Under `CI` it must be.
fn nft_list(netns: &Netns, test: &str) -> Option<String> {
    let output = netns.run(|| Command::new("nft").args(["list", "ruleset"]).output()).expect("a namespace");
    match output {
        Ok(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "nft: {}: {errors}{text}", output.status);
            assert_eq!(errors, "", "nft has something to complain about");
            Some(text.into_owned())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && std::env::var_os("CI").is_none() => {
            println!("skipped {test}: nft is not installed");
            None
        }
        Err(error) => panic!("nft: {error}"),
    }
}

fn check(family: Family, lines: &[&str]) {
    let test = "nft prints the gallery";
    let Some(netns) = scratch_netns(test) else { return };
    let mut nft = Nft::open_in(&netns).expect("a socket");
    nft.commit(&gallery::printable(family).batch()).expect("commit");
    let Some(text) = nft_list(&netns, test) else { return };
    let mut rest = text.as_str();
    for line in lines {
        match rest.find(line) {
            Some(position) => rest = &rest[position + line.len()..],
            None => panic!("not printed, or not in order: {line}\n{text}"),
        }
    }
}

#[test]
fn nft_prints_ip() {
    check(
        Family::V4,
        &[
            "table ip gallery {",
            "10.96.0.1 . tcp . 80 : goto n3",
            "typeof ip daddr . meta l4proto . th dport . numgen random mod 65536 : ip daddr . th dport\n",
            "10.96.0.1 . tcp . 80 . 2 counter packets 0 bytes 0 : 10.96.0.202 . 8080",
            "typeof ip saddr . ip daddr . meta l4proto . th dport : ip daddr . th dport\n",
            "timeout 3h\n",
            "10.96.0.1 . tcp . 80 . 10.96.0.16/28",
            "elements = { 10.96.0.128/26 }",
            "80 : 10.96.0.5-10.96.0.9",
            "dnat ip to ip daddr . meta l4proto . th dport . numgen random mod 3 map @endpoints\n",
            "dnat ip to ip daddr . meta l4proto . th dport . jhash ip saddr mod 3 seed 0x5eed map @endpoints\n",
            "dnat ip to ip saddr . ip daddr . meta l4proto . th dport map @affinity\n",
            "ip daddr . meta l4proto . th dport vmap @services comment \"services\"\n",
            "fib daddr type local meta l4proto . th dport vmap @node-ports\n",
            "masquerade fully-random\n",
            "ct status dnat ip saddr . ip daddr @hairpin masquerade\n",
            "iifname \"lo\" return\n",
            "reject with tcp reset\n",
            "ct state new update @affinity { ct original ip saddr . ct original ip daddr . meta l4proto . \
         ct original proto-dst : ip daddr . th dport }\n",
            "ip daddr . meta l4proto . th dport . ip saddr != @source-ranges counter packets 0 bytes 0 drop\n",
        ],
    );
}

#[test]
fn nft_prints_ip6() {
    check(
        Family::V6,
        &[
            "table ip6 gallery {",
            "typeof ip6 daddr . meta l4proto . th dport . numgen random mod 65536 : ip6 daddr . th dport\n",
            "fd00:60::1 . tcp . 80 . 2 counter packets 0 bytes 0 : fd00:60::ca . 8080",
            "elements = { fd00:60::80/122 }",
            "dnat ip6 to ip6 daddr . meta l4proto . th dport . numgen random mod 3 map @endpoints\n",
            "dnat ip6 to ip6 daddr . meta l4proto . th dport . jhash ip6 saddr mod 3 seed 0x5eed map @endpoints\n",
            "dnat ip6 to ip6 saddr . ip6 daddr . meta l4proto . th dport map @affinity\n",
            "ct state new update @affinity { ct original ip6 saddr . ct original ip6 daddr . meta l4proto . \
         ct original proto-dst : ip6 daddr . th dport }\n",
        ],
    );
}

/// The other way round: what `nft` writes for a set reads as what we would write.
#[test]
fn sets_made_by_nft_read_as_ours() {
    let test = "sets_made_by_nft_read_as_ours";
    let Some(netns) = scratch_netns(test) else { return };
    let text = "table ip t { \
        map endpoints { typeof ip daddr . meta l4proto . th dport . numgen random mod 65536 : ip daddr . th dport; }; \
        set cidrs { type ipv4_addr; flags interval; comment \"cluster\"; }; \
        map marks { typeof meta mark : ip saddr; flags timeout; timeout 5m; counter; }; \
        }";
    let status = netns.run(|| Command::new("nft").arg(text).status()).expect("a namespace");
    match status {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && std::env::var_os("CI").is_none() => {
            return println!("skipped {test}: nft is not installed");
        }
        status => assert!(status.expect("nft").success()),
    }
    let daddr = Field::Of(Typeof::Daddr(Family::V4));
    let dport = Field::Of(Typeof::Dport);
    let indexed = [daddr, Typeof::L4Proto.into(), dport, Typeof::NumgenRandom(65536).into()];
    let ours = [
        Set::map("endpoints", indexed, Value::Fields(vec![daddr, dport])),
        Set {
            interval: true,
            comment: Some("cluster".into()),
            ..Set::new("cidrs", [Type::IPV4_ADDR.into()])
        },
        Set {
            lifetime: Lifetime::Default(Duration::from_secs(300)),
            counter: true,
            ..Set::map("marks", [Typeof::Mark.into()], Value::Fields(vec![Typeof::Saddr(Family::V4).into()]))
        },
    ];
    let mut nft = Nft::open_in(&netns).expect("a socket");
    let sets = nft.sets(TableRef { family: Family::V4, name: "t" }).expect("sets");
    assert_eq!(sets.into_iter().map(|listed| listed.object).collect::<Vec<_>>(), ours);
}
