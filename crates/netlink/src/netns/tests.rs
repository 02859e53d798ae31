// SPDX-License-Identifier: Apache-2.0

use std::{
    net::TcpListener,
    os::{fd::AsFd, linux::fs::MetadataExt},
};

use super::*;
use crate::testing::scratch_netns;

/// What tells one namespace from another.
fn inode(netns: &Netns) -> u64 {
    let file = File::from(netns.as_fd().try_clone_to_owned().expect("a descriptor"));
    file.metadata().expect("metadata").st_ino()
}

#[test]
fn a_new_namespace_is_another_one() {
    let Some(netns) = scratch_netns("a_new_namespace_is_another_one") else { return };
    let here = Netns::current().expect("this namespace");
    assert_ne!(inode(&netns), inode(&here));
    let inside = netns.run(Netns::current).expect("entered").expect("current");
    assert_eq!(inode(&inside), inode(&netns));
    assert_eq!(inode(&netns.try_clone().expect("clone")), inode(&netns));
    // The caller has not moved.
    assert_eq!(inode(&Netns::current().expect("this namespace")), inode(&here));
}

#[test]
fn two_namespaces_do_not_share_ports() {
    let (Some(one), Some(two)) = (scratch_netns("two namespaces"), scratch_netns("two namespaces")) else {
        return;
    };
    let listen = || TcpListener::bind("0.0.0.0:4711");
    let first = one.run(listen).expect("entered").expect("free");
    let second = two.run(listen).expect("entered").expect("free in the other");
    drop((first, second));
}

#[test]
fn a_panic_inside_reaches_the_caller() {
    let Some(netns) = scratch_netns("a_panic_inside_reaches_the_caller") else { return };
    let caught = panic::catch_unwind(|| netns.run(|| panic!("inside")));
    let message = caught.expect_err("a panic").downcast::<&str>().expect("its message");
    assert_eq!(*message, "inside");
}

#[test]
fn a_missing_path_is_an_error() {
    let error = Netns::open("/proc/self/ns/nonesuch").expect_err("no such namespace");
    assert!(error.is_not_found(), "{error}");
}
