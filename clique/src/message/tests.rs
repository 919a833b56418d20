use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::text::printable;

/// A text for people, as it comes out of a message.
fn shown() -> impl Strategy<Value = String> {
    ".{0,40}".prop_map(|text: String| printable(&text))
}

fn pairs() -> impl Strategy<Value = Vec<(String, String)>> {
    vec((shown(), ".{0,40}".prop_map(String::from)), 0..9)
}

fn uses() -> impl Strategy<Value = Use> {
    prop_oneof![
        (0..DataType::ALL.len(), 0..ReduceOp::ALL.len())
            .prop_map(|(t, op)| Use::AllReduce { data_type: DataType::ALL[t], op: ReduceOp::ALL[op] }),
        Just(Use::AllGather),
        any::<(u32, u32)>().prop_map(|(from, to)| Use::Peers { from, to }),
    ]
}

fn hello() -> impl Strategy<Value = Hello> {
    let numbers = any::<(u32, u32, bool, u64)>();
    let config = (
        option::of(any::<u32>()),
        option::of(any::<u32>()),
        option::of(".{0,20}"),
        option::of(any::<bool>()),
    );
    let lists = (vec((any::<u32>(), shown()), 0..9), vec(uses(), 0..9), pairs(), pairs());
    (numbers, shown(), shown(), config, lists).prop_map(|(numbers, process, library, config, lists)| Hello {
        size: numbers.0,
        process,
        library,
        library_version: numbers.1,
        several_ids: numbers.2,
        config: CommConfig {
            min_ctas: config.0,
            max_ctas: config.1,
            cga_cluster_size: config.0,
            net_name: config.2,
            split_share: config.3,
        },
        large_bytes: numbers.3,
        locals: lists.0.into_iter().map(|(rank, uuid)| Local { rank, uuid }).collect(),
        uses: lists.1,
        environment: lists.2,
        hardware: lists.3,
    })
}

fn note() -> impl Strategy<Value = Note> {
    let place = (0..Phase::ALL.len(), option::of(any::<u32>()), option::of(any::<i32>()));
    (place, shown(), shown(), vec(any::<u32>(), 0..MAX_MISSING)).prop_map(
        |(place, process, cause, missing)| {
            let (phase, rank, status) = place;
            Note { phase: Phase::ALL[phase], rank, process, status: status.map(Status), cause, missing }
        },
    )
}

/// Decodes as every kind. Nothing panics, and an error names the peer.
fn decode_all(bytes: &[u8]) -> Result<(), TestCaseError> {
    let results = [
        Hello::decode(bytes, "node:7").map(drop),
        IdMessage::decode(bytes, "node:7").map(drop),
        Note::decode(bytes, "node:7").map(drop),
        SplitMessage::decode(bytes, "node:7").map(drop),
    ];
    for error in results.into_iter().filter_map(Result::err) {
        prop_assert!(matches!(&error, CliqueError::Foreign { peer, .. } if peer == "node:7"), "{error}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn messages_come_back(hello in hello(), note in note(), key: u64, split in vec((any::<u32>(), option::of(any::<u32>()), any::<i32>()), 0..20)) {
        prop_assert_eq!(Hello::decode(&hello.encode().unwrap(), "x").unwrap(), hello);
        prop_assert_eq!(Note::decode(&note.encode(), "x").unwrap(), note);
        let ids = IdMessage { key, ids: vec![(3, [key as u8; ID_BYTES]), (4, [1; ID_BYTES])] };
        prop_assert_eq!(IdMessage::decode(&ids.encode().unwrap(), "x").unwrap(), ids);
        let split = SplitMessage(split);
        prop_assert_eq!(SplitMessage::decode(&split.encode().unwrap(), "x").unwrap(), split);
    }

    /// Every message that ends too early, or goes on, is refused.
    #[test]
    fn truncated_and_longer(hello in hello(), note in note(), cut in any::<prop::sample::Index>(), more in vec(any::<u8>(), 1..9)) {
        for (bytes, is_hello) in [(hello.encode().unwrap(), true), (note.encode(), false)] {
            let refused = |bytes: &[u8]| if is_hello {
                Hello::decode(bytes, "x").is_err()
            } else {
                Note::decode(bytes, "x").is_err()
            };
            prop_assert!(refused(&bytes[..cut.index(bytes.len())]));
            prop_assert!(refused(&[&bytes[..], &more].concat()));
        }
    }

    #[test]
    fn garbage(bytes in vec(any::<u8>(), 0..300)) {
        decode_all(&bytes)?;
        // With a head that is right, so that it gets further.
        for kind in [HELLO, IDS, NOTE, SPLIT] {
            let mut writer = begin(kind);
            writer.raw(&bytes);
            decode_all(&writer.0)?;
        }
    }

    /// One byte that is wrong anywhere: refused, or another message, never a panic.
    #[test]
    fn flipped(hello in hello(), at in any::<prop::sample::Index>(), by in 1u8..) {
        let mut bytes = hello.encode().unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= by;
        decode_all(&bytes)?;
        if let Ok(other) = Hello::decode(&bytes, "x") {
            prop_assert_ne!(other, hello);
        }
    }
}

#[test]
fn what_is_wrong_is_named() {
    let note = Note {
        phase: Phase::Barrier,
        rank: Some(1),
        process: "node:1".to_owned(),
        status: None,
        cause: "x".repeat(5000),
        missing: vec![1; 500],
    };
    let bytes = note.encode();
    let seen = Note::decode(&bytes, "x").unwrap();
    assert_eq!((seen.cause.len(), seen.missing.len()), (1024, MAX_MISSING), "bounded");
    let says = |change: fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        Note::decode(&bytes, "node:2").unwrap_err().to_string()
    };
    type Change = fn(&mut Vec<u8>);
    let cases: [(Change, &str); 7] = [
        (|bytes| bytes[0] = 0, "head of a message: expected [50, 57, 43, 51], seen [00, 57, 43, 51]"),
        (|bytes| bytes[4] = 2, "version of a message: expected 1, seen 2"),
        (|bytes| bytes[6] = 1, "kind of a message: expected 3, seen 1"),
        (|bytes| bytes[7] = 9, "phase: expected below 7, seen 9"),
        (|bytes| bytes[8] = 2, "rank: expected 0 or 1, seen 2"),
        (|bytes| bytes.truncate(3), "message: expected 4 bytes, seen 3 bytes"),
        (|bytes| bytes.push(0), "end of a message: expected no more bytes, seen 1 bytes"),
    ];
    for (change, expected) in cases {
        assert_eq!(says(change), format!("node:2 sent a wrong {expected}"));
    }
    let error = Note::decode(&vec![0; MAX_MESSAGE_BYTES + 1], "x").unwrap_err().to_string();
    assert!(error.contains("length of a message"), "{error}");
}

#[test]
fn what_a_peer_says_cannot_write_over_the_error_that_quotes_it() {
    let note = Note {
        phase: Phase::Barrier,
        rank: None,
        process: "node\x1b]0;title\x07:1".to_owned(),
        status: None,
        cause: "line\nline\r\x1b[2J".to_owned(),
        missing: Vec::new(),
    };
    let note = Note::decode(&note.encode(), "x").unwrap();
    assert_eq!(note.to_string(), "node\\u{1b}]0;title\\u{7}:1 in barrier: line\\nline\\r\\u{1b}[2J");
}

#[test]
fn a_message_that_is_too_long_is_refused_where_it_is_made() {
    let split = SplitMessage(vec![(0, Some(1), 2); 10_000]);
    let error = split.encode().unwrap_err();
    assert!(matches!(error, CliqueError::Config { .. }), "{error}");
}
