// SPDX-License-Identifier: Apache-2.0

use super::*;

fn present(version: &str) -> Heading {
    Heading::Present { version: version.into() }
}

fn bookmark(version: &str, ends_list: bool) -> Heading {
    Heading::Bookmark { version: version.into(), ends_list }
}

const LONG: Duration = Duration::from_secs(300);

fn status(code: u16) -> Trouble {
    Trouble::Status { code, message: String::new(), retry_after: None, in_stream: false }
}

/// Listed by a stream, up to this version.
fn watching(version: &str) -> Protocol {
    let mut protocol = Protocol::new(false);
    assert!(protocol.accepted());
    assert_eq!(protocol.event(bookmark(version, true)), Ok(Act::EndList));
    assert_eq!(protocol.ask(), Ask::Watch { version: version.into() });
    protocol
}

#[test]
fn a_streamed_list_ends_with_its_bookmark_and_becomes_a_watch() {
    let mut protocol = Protocol::new(false);
    assert_eq!(protocol.ask(), Ask::Stream);
    assert!(protocol.accepted());
    assert_eq!(protocol.event(present("7")), Ok(Act::Apply));
    assert_eq!(protocol.event(present("3")), Ok(Act::Apply), "a list comes in no order");
    assert_eq!(protocol.event(bookmark("7", false)), Ok(Act::Nothing));
    assert_eq!(protocol.event(bookmark("9", true)), Ok(Act::EndList));
    assert_eq!(protocol.event(present("10")), Ok(Act::Apply));
    assert_eq!(protocol.ask(), Ask::Watch { version: "10".into() });
    assert!(!protocol.accepted(), "a watch is no list");
}

#[test]
fn a_list_that_breaks_off_starts_anew() {
    let mut protocol = Protocol::new(false);
    protocol.accepted();
    protocol.event(present("7")).unwrap();
    assert_eq!(protocol.trouble(&Trouble::Closed { lived: Duration::from_secs(60) }), Next::Later);
    assert_eq!(protocol.ask(), Ask::Stream);
    assert!(protocol.accepted());
}

#[test]
fn a_watch_goes_on_where_it_was() {
    for trouble in [
        Trouble::Closed { lived: Duration::from_secs(300) },
        Trouble::Idle,
        Trouble::Transport("reset".into()),
        Trouble::Malformed("garbage".into()),
        status(500),
        status(429),
        status(403),
    ] {
        let mut protocol = watching("41");
        protocol.event(present("42")).unwrap();
        protocol.trouble(&trouble);
        assert_eq!(protocol.ask(), Ask::Watch { version: "42".into() }, "{trouble:?}");
    }
}

#[test]
fn a_watch_that_ends_at_once_is_not_repeated_at_once() {
    let mut protocol = watching("1");
    assert_eq!(protocol.trouble(&Trouble::Closed { lived: Duration::ZERO }), Next::Later);
    assert_eq!(protocol.trouble(&Trouble::Closed { lived: SHORT_WATCH }), Next::Now);
}

#[test]
fn a_request_without_any_answer_is_a_failure() {
    let mut protocol = watching("1");
    assert_eq!(protocol.trouble(&Trouble::Idle), Next::Now);
    assert_eq!(protocol.trouble(&Trouble::Unanswered), Next::Later);
    assert_eq!(protocol.ask(), Ask::Watch { version: "1".into() });
}

#[test]
fn watches_without_a_word_lead_to_a_look_at_the_version() {
    let quiet = |protocol: &mut Protocol| {
        protocol.accepted();
        assert_eq!(protocol.trouble(&Trouble::Idle), Next::Now);
    };
    let mut protocol = watching("50");
    assert_eq!(protocol.trouble(&Trouble::Closed { lived: LONG }), Next::Now, "the list was heard");
    quiet(&mut protocol);
    assert_eq!(protocol.ask(), Ask::Watch { version: "50".into() });
    protocol.accepted();
    protocol.event(bookmark("51", false)).unwrap();
    protocol.trouble(&Trouble::Idle);
    quiet(&mut protocol);
    assert_eq!(protocol.ask(), Ask::Watch { version: "51".into() }, "something was heard in between");
    quiet(&mut protocol);
    assert_eq!(protocol.ask(), Ask::Version);
    assert_eq!(protocol.trouble(&status(500)), Next::Later);
    assert_eq!(protocol.ask(), Ask::Watch { version: "51".into() }, "it must not keep us from watching");
    for (version, back) in [("51", None), ("90", None), ("odd", None), ("49", Some("51".to_owned()))] {
        quiet(&mut protocol);
        quiet(&mut protocol);
        assert_eq!(protocol.ask(), Ask::Version);
        assert_eq!(protocol.at_version(version), back);
        assert_eq!(protocol.is_to_list(), back.is_some());
    }
}

#[test]
fn a_list_may_be_older_than_what_was_known() {
    let mut protocol = watching("50");
    protocol.trouble(&status(410));
    protocol.accepted();
    assert_eq!(protocol.event(bookmark("7", true)), Ok(Act::EndList));
    assert_eq!(protocol.event(present("8")), Ok(Act::Apply));
    assert_eq!(protocol.ask(), Ask::Watch { version: "8".into() });
}

#[test]
fn what_is_too_old_is_listed_again() {
    let mut protocol = watching("1");
    assert_eq!(protocol.trouble(&status(410)), Next::Later);
    assert_eq!(protocol.ask(), Ask::Stream);
}

#[test]
fn events_in_the_wrong_order_are_not_believed() {
    let mut protocol = watching("5");
    protocol.event(present("9")).unwrap();
    let trouble = protocol.event(present("8")).unwrap_err();
    assert_eq!(trouble, Trouble::OutOfOrder { version: "8".into(), after: "9".into() });
    assert_eq!(protocol.trouble(&trouble), Next::Later);
    assert_eq!(protocol.ask(), Ask::Stream);
}

#[test]
fn an_event_that_comes_twice_is_taken_twice() {
    let mut protocol = watching("5");
    assert_eq!(protocol.event(present("9")), Ok(Act::Apply));
    assert_eq!(protocol.event(present("9")), Ok(Act::Apply));
}

#[test]
fn a_server_that_cannot_stream_lists_is_asked_for_pages() {
    for trouble in [
        status(400),
        status(422),
        Trouble::Status { code: 500, message: String::new(), retry_after: None, in_stream: true },
    ] {
        let mut protocol = Protocol::new(false);
        protocol.accepted();
        protocol.trouble(&trouble);
        assert_eq!(protocol.ask(), Ask::Page { token: None, whole: false }, "{trouble:?}");
        assert!(protocol.accepted());
        assert!(!protocol.page("8".into(), Some("next".into())));
        assert_eq!(protocol.ask(), Ask::Page { token: Some("next".into()), whole: false });
        assert!(!protocol.accepted(), "the second page begins no list");
        assert!(protocol.page("8".into(), None));
        assert_eq!(protocol.ask(), Ask::Watch { version: "8".into() });
    }
}

#[test]
fn a_streamed_list_that_comes_to_nothing_is_asked_for_in_pages() {
    for trouble in
        [Trouble::Idle, Trouble::Unanswered, Trouble::Closed { lived: LONG }, Trouble::Malformed("x".into())]
    {
        let mut protocol = Protocol::new(false);
        protocol.accepted();
        assert_eq!(protocol.trouble(&trouble), Next::Later);
        assert_eq!(protocol.ask(), Ask::Stream, "once is no proof");
        // A server that is not there says nothing about what it can do.
        protocol.trouble(&Trouble::Transport("refused".into()));
        assert_eq!(protocol.ask(), Ask::Stream);
        protocol.trouble(&trouble);
        assert_eq!(protocol.ask(), Ask::Page { token: None, whole: false }, "{trouble:?}");
    }
}

#[test]
fn a_list_in_one_piece_where_the_server_is_good_at_it() {
    let release = |minor| Some(Release { major: 1, minor });
    for (met, at_once) in [(None, false), (release(32), false), (release(33), true), (release(40), true)] {
        let mut protocol = Protocol::new(false);
        assert!(protocol.is_to_list());
        protocol.meet(met);
        assert_eq!(protocol.ask() == Ask::Page { token: None, whole: true }, at_once, "{met:?}");
    }
    let mut protocol = Protocol::new(false);
    protocol.meet(release(33));
    assert!(protocol.accepted());
    assert!(protocol.page("8".into(), None));
    assert!(!protocol.is_to_list());
    assert_eq!(protocol.ask(), Ask::Watch { version: "8".into() });
}

#[test]
fn a_list_in_one_piece_that_breaks_off_is_streamed_and_then_tried_again() {
    let whole = Ask::Page { token: None, whole: true };
    let broken = Trouble::Transport("reset".into());
    let mut protocol = Protocol::new(false);
    protocol.meet(Some(SENDS_OBJECT_BY_OBJECT));
    // A server that is not there says nothing about what it can do.
    for _ in 0..5 {
        assert_eq!(protocol.trouble(&broken), Next::Later);
    }
    for _ in 0..LOST_LISTS {
        assert_eq!(protocol.ask(), whole);
        protocol.accepted();
        assert_eq!(protocol.trouble(&broken), Next::Later);
    }
    for _ in 0..OTHER_LISTS {
        assert_eq!(protocol.ask(), Ask::Stream);
        protocol.accepted();
        assert_eq!(protocol.event(bookmark("9", true)), Ok(Act::EndList));
        protocol.trouble(&status(410));
    }
    assert_eq!(protocol.ask(), whole);
}

#[test]
fn an_event_that_can_never_be_read_leads_to_a_list() {
    let mut protocol = watching("5");
    let trouble = Trouble::Malformed("garbage".into());
    for round in 1..STUCK {
        protocol.trouble(&trouble);
        assert_eq!(protocol.ask(), Ask::Watch { version: "5".into() }, "after {round}");
    }
    protocol.event(present("6")).unwrap();
    for _ in 1..STUCK {
        protocol.trouble(&trouble);
    }
    assert_eq!(protocol.ask(), Ask::Watch { version: "6".into() }, "it had gone on in between");
    assert_eq!(protocol.trouble(&trouble), Next::Later);
    assert_eq!(protocol.ask(), Ask::Stream);
}

#[test]
fn an_expired_page_token_asks_for_everything_at_once() {
    let mut protocol = Protocol::new(false);
    protocol.trouble(&status(400));
    protocol.accepted();
    protocol.page("8".into(), Some("next".into()));
    assert_eq!(protocol.trouble(&status(410)), Next::Later);
    assert_eq!(protocol.ask(), Ask::Page { token: None, whole: true });
    assert!(protocol.accepted(), "and begins a new list");
}

#[test]
fn a_server_without_protobuf_is_asked_for_json() {
    let mut protocol = Protocol::new(false);
    assert_eq!(protocol.trouble(&status(406)), Next::Now);
    assert!(protocol.json());
    assert_eq!(protocol.trouble(&status(406)), Next::Later, "but only once");
}

#[test]
fn credentials_are_renewed_and_absent_kinds_told() {
    let mut protocol = Protocol::new(false);
    assert_eq!(protocol.trouble(&status(401)), Next::Renew);
    assert_eq!(protocol.trouble(&status(404)), Next::Absent);
    assert_eq!(watching("1").trouble(&status(404)), Next::Later);
}
