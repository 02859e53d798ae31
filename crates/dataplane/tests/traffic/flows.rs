// SPDX-License-Identifier: Apache-2.0

//! Flows of protocols without connections, when their endpoint goes or comes.

use std::sync::{Arc, mpsc};

use dataplane::conntrack::{Sweeper, Swept};
use lab::{Answer, Flow, Transport};
use model::{Backend, Changes, FlowRule, Frontend, Masquerade, NodePortScope, Protocol, Verdict};

use crate::stage::{IMPATIENCE, PATIENCE, Stage, on_stage, same};

const VIP: &str = "10.96.0.10";
const OTHER: &str = "10.96.0.11";

fn backends(verdict: &Verdict) -> Box<[Backend]> {
    match verdict {
        Verdict::Forward(forward) => forward.pool.backends.clone(),
        Verdict::Reject | Verdict::Drop => Box::default(),
    }
}

/// Sweeps as after a change of one frontend from one verdict to the other.
fn sweep(stage: &Stage, frontend: Frontend, was: &Verdict, is: &Verdict) -> Swept {
    let (was, serving) = (backends(was), backends(is));
    let gone: Box<[Backend]> = was.iter().copied().filter(|backend| !serving.contains(backend)).collect();
    let untranslated = was.is_empty() && !serving.is_empty();
    let rule = FlowRule { frontend, serving: Arc::from(serving), gone: Some(gone), untranslated };
    let changes = Changes { flows: vec![rule], ..Changes::default() };
    let (tell, told) = mpsc::channel();
    let node = stage.lab.netns("node-a").unwrap();
    let sweeper = node.run(move || Sweeper::start(move |swept| tell.send(swept).unwrap()).unwrap()).unwrap();
    sweeper.add(&stage.plan(), &changes.flows);
    let swept = told.recv_timeout(PATIENCE).unwrap().unwrap();
    drop(sweeper);
    assert!(told.recv().is_err(), "one request, one sweep");
    swept
}

fn flow(stage: &Stage, to: &str, port: u16, transport: Transport) -> Flow {
    let route = stage.route("client", to, port, transport);
    stage.lab.netns("client").unwrap().run(|| Flow::open(route, PATIENCE).unwrap()).unwrap()
}

fn by(answer: Answer) -> String {
    match answer {
        Answer::Answered(reply) => reply.by,
        other => panic!("{other:?}"),
    }
}

#[test]
fn flows_leave_an_endpoint_that_is_gone_and_no_others_do() {
    on_stage("flows_leave_an_endpoint_that_is_gone_and_no_others_do", |stage| {
        for (protocol, transport) in [(Protocol::Udp, Transport::Udp), (Protocol::Sctp, Transport::Sctp)] {
            let at = [
                (stage.at(VIP, protocol, 53), VIP, 53),
                (stage.node_port(protocol, 30_053), "192.168.0.1", 30_053),
            ];
            let other = stage.at(OTHER, protocol, 53);
            for (frontend, to, port) in at {
                let (was, is) =
                    (stage.forward(&["b1"], Masquerade::Always), stage.forward(&["b2"], Masquerade::Always));
                stage.set(frontend, same(was.clone()));
                stage.set(other, same(was.clone()));
                let mut moving = flow(stage, to, port, transport);
                let mut staying = flow(stage, OTHER, 53, transport);
                assert_eq!(by(moving.ask(PATIENCE)), "b1");
                assert_eq!(by(staying.ask(PATIENCE)), "b1");
                stage.set(frontend, same(is.clone()));
                assert_eq!(by(moving.ask(PATIENCE)), "b1", "the kernel keeps it there");
                assert_eq!(sweep(stage, frontend, &was, &is).deleted, 1);
                if transport == Transport::Udp {
                    assert_eq!(by(moving.ask(PATIENCE)), "b2");
                }
                assert_eq!(by(staying.ask(PATIENCE)), "b1");
                assert_eq!(sweep(stage, frontend, &was, &is).deleted, 0);
            }
        }
    });
}

#[test]
fn flows_from_before_the_first_endpoint_are_found() {
    on_stage("flows_from_before_the_first_endpoint_are_found", |stage| {
        // Nobody knows the address yet: the packets go to the outside, where nobody answers either.
        let frontend = stage.at("192.0.2.53", Protocol::Udp, 53);
        let plan = stage.plan();
        stage.apply(&plan, dataplane::Scope::All);
        let mut early = flow(stage, "192.0.2.53", 53, Transport::Udp);
        assert!(!matches!(early.ask(IMPATIENCE), Answer::Answered(_)));
        let is = stage.forward(&["b1"], Masquerade::Always);
        stage.set(frontend, same(is.clone()));
        assert_eq!(sweep(stage, frontend, &Verdict::Reject, &is).deleted, 1);
        assert_eq!(by(early.ask(PATIENCE)), "b1");
    });
}

#[test]
fn a_port_of_another_node_is_not_a_node_port() {
    on_stage("a_port_of_another_node_is_not_a_node_port", |stage| {
        stage.scope = NodePortScope::All;
        let frontend = stage.node_port(Protocol::Udp, 8080);
        let is = stage.forward(&["b1"], Masquerade::Always);
        let plan = stage.plan();
        stage.apply(&plan, dataplane::Scope::All);
        // To a pod, by way of node-a, on a port that is a node port there.
        let mut passing = flow(stage, "b2", 8080, Transport::Udp);
        assert_eq!(by(passing.ask(PATIENCE)), "b2");
        stage.set(frontend, same(is.clone()));
        assert_eq!(sweep(stage, frontend, &Verdict::Reject, &is).deleted, 0);
        assert_eq!(by(passing.ask(PATIENCE)), "b2");
    });
}
