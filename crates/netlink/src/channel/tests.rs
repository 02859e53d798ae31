// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::fake::Recorder;

const QUESTION: u16 = 0x77;

/// A message of the kernel.
fn message(kind: u16, flags: u16, seq: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((16 + body.len() as u32).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(seq.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    bytes
}

fn done(code: i32) -> Vec<u8> {
    message(NLMSG_DONE, 0, 1, &code.to_ne_bytes())
}

/// Asks once; what was visited, and the outcome.
fn ask(answers: Vec<Result<Vec<u8>, Error>>) -> (Vec<Vec<u8>>, Result<(), Error>) {
    let mut recorder = Recorder::new();
    recorder.answer_next(answers);
    let mut channel = Channel::new(recorder);
    let mut seen = Vec::new();
    let outcome = channel.exchange(
        "ask",
        (QUESTION, 0),
        |_| {},
        |message| {
            seen.push(message.body.to_vec());
            Ok(())
        },
    );
    (seen, outcome)
}

#[test]
fn a_listing_in_many_parts() {
    let first = [message(QUESTION, 2, 1, b"one!"), message(QUESTION, 2, 1, b"two!")].concat();
    let second = [message(QUESTION, 2, 1, b"three"), vec![0; 3], done(0)].concat();
    let (seen, outcome) = ask(vec![Ok(first), Ok(second)]);
    assert_eq!(outcome, Ok(()));
    assert_eq!(seen, [&b"one!"[..], b"two!", b"three"]);
}

#[test]
fn answers_to_others_are_passed_over() {
    let (seen, outcome) = ask(vec![
        Ok(message(QUESTION, 0, 99, b"old!")),
        Ok(message(NLMSG_DONE, 0, 0, &0i32.to_ne_bytes())),
        Ok(message(NLMSG_NOOP, 0, 1, b"")),
        Ok(message(QUESTION, 0, 1, b"ours")),
        Ok(done(0)),
    ]);
    assert_eq!((seen, outcome), (vec![b"ours".to_vec()], Ok(())));
}

#[test]
fn ends_that_are_none() {
    let interrupted = message(QUESTION, NLM_F_DUMP_INTR, 1, b"part");
    assert_eq!(ask(vec![Ok(interrupted), Ok(done(0))]).1, Err(Error::Interrupted));
    let interrupted_end = message(NLMSG_DONE, NLM_F_DUMP_INTR, 1, &0i32.to_ne_bytes());
    assert_eq!(ask(vec![Ok(interrupted_end)]).1, Err(Error::Interrupted));
    assert_eq!(ask(vec![Ok(message(NLMSG_OVERRUN, 0, 1, b""))]).1, Err(Error::Overrun));
    assert_eq!(ask(vec![Err(Error::Overrun)]).1, Err(Error::Overrun));
    assert_eq!(ask(vec![]).1, Err(Error::Timeout(PATIENCE)));
    let failed = ask(vec![Ok(done(-12))]).1.expect_err("an error at the end of a listing");
    assert_eq!(failed.errno(), Some(Errno::NOMEM));
    for broken in [vec![1], done(-5000), message(NLMSG_ERROR, 0, 1, &[1, 2]), done(0)[..15].to_vec()] {
        assert!(matches!(ask(vec![Ok(broken)]).1, Err(Error::Malformed(_))));
    }
}

/// An error with the kernel's words.
fn explained(flags: u16, echoed: &[u8]) -> Vec<u8> {
    let mut body = (-22i32).to_ne_bytes().to_vec();
    body.extend((16 + echoed.len() as u32).to_ne_bytes());
    body.extend([0; 12]);
    if flags & NLM_F_CAPPED == 0 {
        body.extend(echoed);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let mut words = Writer::new();
    words.str(NLMSGERR_ATTR_MSG, "no such thing");
    words.ne32(NLMSGERR_ATTR_OFFS, 40);
    body.extend(words.bytes());
    message(NLMSG_ERROR, flags | NLM_F_ACK_TLVS, 1, &body)
}

#[test]
fn the_kernels_words_are_kept() {
    for flags in [0, NLM_F_CAPPED] {
        let error = ask(vec![Ok(explained(flags, b"12345"))]).1.expect_err("refused");
        assert_eq!(
            error,
            Error::Kernel {
                op: Op::Request("ask"),
                errno: Errno::INVAL,
                extack: Some("no such thing".into()),
                offset: Some(40),
                element: None,
            }
        );
        assert_eq!(error.to_string(), "ask: Invalid argument (os error 22): no such thing");
    }
}

#[test]
fn a_later_request_is_not_answered_by_an_earlier_answer() {
    let mut recorder = Recorder::new();
    recorder.answer_next([
        Ok(message(QUESTION, 0, 1, b"stop")),
        Ok(message(QUESTION, 0, 2, b"late")),
        Ok(done(0)),
    ]);
    recorder.answer_next([Ok(message(NLMSG_DONE, 0, 2, &0i32.to_ne_bytes()))]);
    let mut channel = Channel::new(recorder);
    let stopped = channel.exchange("ask", (QUESTION, 0), |_| {}, |_| Err(Error::Interrupted));
    assert_eq!(stopped, Err(Error::Interrupted));
    channel
        .exchange("ask", (QUESTION, 0), |_| {}, |message| panic!("{message:?}"))
        .expect("an answer of its own");
}
