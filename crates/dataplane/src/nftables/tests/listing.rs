// SPDX-License-Identifier: Apache-2.0

//! What `nft list` says about our tables: it must print them, readably, and nothing it says may surprise us.

use std::process::Command;

use model::{Family, NodePortScope, PlanBuilder};

use super::{
    kernel::in_namespace,
    make::{drafts, sample, sampler, wishes},
};
use crate::{
    Dataplane, Loopback, Scope,
    nftables::{render, text::keyword},
};

/// What the tool prints for our table; `None` with a printed line where it is not installed.
fn nft_list(family: Family) -> Option<String> {
    let output = Command::new("nft").args(["list", "table", keyword(family), crate::names::TABLE]).output();
    match output {
        Ok(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "nft list: {} {errors}", output.status);
            Some(String::from_utf8(output.stdout).unwrap())
        }
        Err(error) => {
            println!("skipped: no nft: {error}");
            assert!(std::env::var_os("CI").is_none(), "nft must be installed");
            None
        }
    }
}

/// Elements in order and one to a line, since the tool has an order and a layout of its own. Chains and sets in
/// order, too.
fn normal(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    for block in text.replace("\t", " ").split("\n\n") {
        let block = block.trim().trim_end_matches("\n}").trim();
        let words = block.split_whitespace().collect::<Vec<_>>().join(" ");
        let words = match words.split_once("elements = { ") {
            None => words,
            Some((head, rest)) => {
                let (elements, tail) = rest.rsplit_once(" } }").unwrap();
                let mut elements: Vec<&str> = elements.split(", ").collect();
                elements.sort_unstable();
                format!("{head}elements = {{ {}{tail}", elements.join(", "))
            }
        };
        blocks.push(words.trim_end_matches(" }").to_owned());
    }
    blocks.sort();
    blocks
}

#[test]
fn nft_prints_our_tables_as_we_do() {
    for plan in [sampler().plan(), wishes().plan()] {
        in_namespace("nft_prints_our_tables_as_we_do", || {
            let mut nftables = super::kernel::open();
            nftables.apply(&plan, Scope::All).unwrap();
            let dump = nftables.dump().unwrap();
            for family in Family::BOTH {
                let rendered = render::program(&plan, family, 0x4000, Loopback::Closed).to_string();
                assert!(normal(&dump).len() > 30);
                let Some(listed) = nft_list(family) else { return };
                assert_eq!(normal(&listed), normal(&rendered), "{listed}");
            }
        });
    }
}

#[test]
fn our_dump_is_what_the_kernel_holds() {
    in_namespace("our_dump_is_what_the_kernel_holds", || {
        let plan = sampler().plan();
        let mut nftables = super::kernel::open();
        assert_eq!(nftables.dump().unwrap(), "");
        nftables.apply(&plan, Scope::All).unwrap();
        let rendered: String = Family::BOTH
            .map(|family| render::program(&plan, family, 0x4000, Loopback::Closed).to_string())
            .concat();
        assert_eq!(normal(&nftables.dump().unwrap()), normal(&rendered));
    });
}

#[test]
fn nft_prints_what_loopback_node_ports_need() {
    in_namespace("nft_prints_what_loopback_node_ports_need", || {
        let builder = PlanBuilder::new().node_ports(Family::V4, NodePortScope::All);
        let plan = builder.loopback_node_ports(Family::V4).build();
        super::kernel::open().apply(&plan, Scope::All).unwrap();
        let rendered = render::program(&plan, Family::V4, 0x4000, Loopback::Served).to_string();
        assert!(rendered.contains("iifname != \"lo\" ip daddr 127.0.0.0/8 drop"), "{rendered}");
        let Some(listed) = nft_list(Family::V4) else { return };
        assert_eq!(normal(&listed), normal(&rendered), "{listed}");
    });
}

/// Of any plan: nft 1.0.6 aborts on some tables that the kernel accepts.
#[test]
fn nft_prints_any_table() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for _ in 0..10 {
        let plan = sample(&drafts(), &mut runner).plan();
        in_namespace("nft_prints_any_table", || {
            super::kernel::open().apply(&plan, Scope::All).unwrap();
            for family in Family::BOTH {
                let rendered = render::program(&plan, family, 0x4000, Loopback::Closed).to_string();
                let Some(listed) = nft_list(family) else { return };
                assert_eq!(normal(&listed), normal(&rendered), "{listed}");
            }
        });
    }
}

/// The tables of the sampler and of wishes, for people to read. `UPDATE=1` rewrites them.
#[test]
fn the_golden_table() {
    for (family, name, plan) in [
        (Family::V4, "sampler.ip.nft", sampler().plan()),
        (Family::V6, "sampler.ip6.nft", sampler().plan()),
        (Family::V4, "wishes.ip.nft", wishes().plan()),
        (Family::V6, "wishes.ip6.nft", wishes().plan()),
    ] {
        let rendered = render::program(&plan, family, 0x4000, Loopback::Closed).to_string();
        let path = format!("{}/src/nftables/tests/{name}", env!("CARGO_MANIFEST_DIR"));
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, &rendered).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), rendered, "UPDATE=1 rewrites {name}");
    }
}
