//! Recordings: how operations and answers read in words, and what a replay may take.

#[path = "../../kv-core/tests/model/recording.rs"]
mod recording;
#[path = "../../kv-core/tests/exact/tools.rs"]
#[allow(dead_code)] // not all of them are used here
mod tools;

use std::error::Error as _;
use std::io::{self, Read};

use kv_core::{
    Answer, BlockId, Call, Config, Error, Extend, PoolUsage, Prefill, Remapping, StateConfig,
};
use kv_trace::{Divergence, Limits, Record, TraceError, replay, replay_within};
use recording::Recording;

use tools::{PLENTY, begin, commit, computed, prefill, prompt, sequence, settings, with};

fn divergence(call: Call, recorded: Answer) -> Divergence {
    Divergence {
        operation: 3,
        call,
        recorded,
        obtained: Err(Error::EmptySequence),
    }
}

#[test]
fn operations_as_text() {
    let calls = [
        (
            Call::Sequence {
                tokens: vec![1, 2],
                namespace: (*b"a\xff").into(),
                read_cache: false,
            },
            r#"sequence(tokens=[1, 2], namespace="a\\xff", read_cache=false)"#,
        ),
        (
            Call::Decode {
                plan: 7,
                sequences: (1..10).collect(),
                lookahead: 3,
            },
            "decode(plan=7, sequences=[1, 2, 3, 4, 5, 6, 7, 8, ... 9 in all], lookahead=3)",
        ),
        (
            Call::Prefill {
                plan: 7,
                sequence: 8,
                max_tokens: 9,
                spare_blocks: None,
                replay: 2,
            },
            "prefill(plan=7, sequence=8, max_tokens=9, spare_blocks=none, replay=2)",
        ),
        (
            Call::Commit {
                plan: 7,
                tokens: vec![5],
                counts: vec![],
            },
            "commit(plan=7, tokens=[5], counts=[])",
        ),
        (Call::EvictAll {}, "evict_all()"),
        (Call::AdvanceWeightsVersion {}, "advance_weights_version()"),
        (
            Call::WantSnapshots {
                sequence: 1,
                positions: vec![4, 8],
            },
            "want_snapshots(sequence=1, positions=[4, 8])",
        ),
        (
            Call::ReuseCached { sequence: 1 },
            "reuse_cached(sequence=1)",
        ),
        (
            Call::Publish {
                sequence: 1,
                num_tokens: 2,
                tokens: vec![3],
            },
            "publish(sequence=1, num_tokens=2, tokens=[3])",
        ),
        (
            Call::Complete {
                transfer: 1,
                num_blocks: 2,
            },
            "complete(transfer=1, num_blocks=2)",
        ),
    ];
    for (call, text) in calls {
        assert_eq!(divergence(call, Answer::Done).call_text(), text);
    }
}

#[test]
fn answers_as_text() {
    let remapping = Remapping {
        sequence: 1,
        group: 2,
        index: 3,
        old_block: BlockId::from(4),
        new_block: BlockId::from(5),
    };
    let planned = |samples| {
        Answer::Prefill(Prefill::Planned {
            cached_tokens: 4,
            tokens: 5,
            samples,
        })
    };
    let no_room = Prefill::NoRoom {
        needed: 6,
        available: 7,
    };
    let usage = PoolUsage {
        free: 1,
        evictable: 2,
        active: 3,
        pinned: 4,
        loading: 5,
    };
    let answers = [
        (Answer::Done, "done"),
        (Answer::Number(12), "12"),
        (Answer::Numbers(vec![1, 2]), "[1, 2]"),
        (
            planned(true),
            "planned, 4 tokens cached, 5 to compute, samples",
        ),
        (
            planned(false),
            "planned, 4 tokens cached, 5 to compute, does not sample",
        ),
        (
            Answer::Prefill(no_room),
            "no room, 6 blocks needed, 7 available",
        ),
        (Answer::Prefill(Prefill::NoBudget), "no budget"),
        (
            Answer::Prefill(Prefill::Computing),
            "an open step computes it",
        ),
        (
            Answer::Prefill(Prefill::Loading { transfer: 3 }),
            "transfer 3 loads",
        ),
        (
            Answer::Remappings(vec![remapping]),
            "remappings [sequence 1 group 2 entry 3 from block 4 to 5]",
        ),
        (
            Answer::Extend(Extend::Extended {
                blocks: vec![BlockId::from(1)],
                copies: vec![(BlockId::from(2), BlockId::from(3))],
            }),
            "blocks [1], copies [[2, 3]]",
        ),
        (
            Answer::Extend(Extend::NoRoom {
                needed: 8,
                available: 9,
            }),
            "no room, 8 blocks needed, 9 available",
        ),
        (
            Answer::PoolUsage(usage),
            "1 blocks free, 2 evictable, 3 active, 4 pinned, 5 loading",
        ),
    ];
    for (answer, text) in answers {
        let divergence = divergence(Call::Reset { sequence: 1 }, answer);
        assert_eq!(divergence.recorded_text(), text);
    }
}

#[test]
fn a_divergence_as_text() {
    let fork = Call::Fork {
        sequence: 1,
        num_tokens: 2,
    };
    let mut divergence = divergence(fork, Answer::Number(2));
    let refused = "refused, a sequence needs at least one token, got none";
    assert_eq!(divergence.obtained_text(), refused);
    let text =
        format!("operation 3, fork(sequence=1, num_tokens=2): recorded 2; obtained {refused}");
    assert_eq!(divergence.to_string(), text);
    divergence.obtained = Ok(Answer::Number(4));
    assert_eq!(divergence.obtained_text(), "4");
}

/// A recording of one prompt in these settings.
fn recorded(config: Config) -> Vec<u8> {
    let recording = Recording::default();
    let mut m = with(config);
    m.record(recording.clone()).expect("new");
    let seq = sequence(&mut m, prompt(6));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    commit(&mut m, plan.key());
    m.stop_recording().expect("memory takes everything");
    recording.bytes()
}

#[test]
fn a_pool_of_exactly_as_many_blocks_as_are_allowed() {
    let bytes = recorded(settings(9));
    let within = |num_blocks, tokens| {
        let limits = Limits {
            num_blocks,
            tokens,
            ..Limits::default()
        };
        replay_within(&bytes[..], limits)
    };
    assert!(within(9, 36).expect("allowed").complete);
    for (num_blocks, tokens, refused) in [(8, 36, (9, 8)), (9, 35, (36, 35))] {
        let error = within(num_blocks, tokens).expect_err("too large");
        let TraceError::Limit { found, limit, .. } = error else {
            panic!("{error}");
        };
        assert_eq!((found, limit), refused);
    }
    let Limits {
        num_blocks,
        tokens,
        operation,
    } = Limits::default();
    assert_eq!((num_blocks, tokens, operation), (1 << 24, 1 << 28, 1 << 26));
}

#[test]
fn settings_come_back() {
    for (prefix_caching, in_flight_sharing, events) in [
        (true, false, true),
        (false, true, false),
        (true, true, true),
    ] {
        let config = Config {
            groups: vec![Some(1), None, Some(7)],
            state: Some(StateConfig::new(2)),
            prefix_caching,
            in_flight_sharing,
            events,
            hash_bits: 5,
            ..settings(9)
        };
        let report = replay(&recorded(config)[..]).expect("whole");
        let back = &report.config;
        assert_eq!(
            (back.prefix_caching, back.in_flight_sharing, back.events),
            (prefix_caching, in_flight_sharing, events)
        );
        assert_eq!(back.groups, [Some(1), None, Some(7)]);
        assert_eq!(back.state, Some(StateConfig::new(2)));
        assert_eq!((back.num_blocks, back.block_size), (9, 4));
        assert_eq!((back.hash_bits, back.hash_seed), (5, Some(1)));
        assert_eq!(
            report.operations,
            [
                ("sequence", 1),
                ("begin_step", 1),
                ("prefill", 1),
                ("commit", 1)
            ]
        );
        assert_eq!((report.divergence, report.check), (None, Ok(())));
    }
}

#[test]
fn a_manager_with_a_past_is_not_recorded() {
    let mut m = with(settings(9));
    assert_eq!(m.check_recordable(), Ok(()));
    drop(begin(&mut m, 1));
    drop([(); 2].map(|()| sequence(&mut m, prompt(1))));
    let error = Error::NotNew {
        sequences: 2,
        steps: 1,
    };
    assert_eq!(m.check_recordable(), Err(error.clone()));
    assert_eq!(m.record(Recording::default()), Err(error));
}

/// During a recording, the manager releases a pin's blocks; an empty pin is not recorded.
#[test]
fn pins_are_recorded_until_they_go() {
    let recording = Recording::default();
    let mut m = with(settings(9));
    m.record(recording.clone()).expect("new");
    drop(computed(&mut m, prompt(6)));
    let nothing = m.match_prefix(&[5; 4], b"").expect("short");
    let pins = [(); 2].map(|()| m.match_prefix(&prompt(6), b"").expect("short"));
    assert_eq!(m.usage().pinned, 1);
    drop((nothing, pins));
    assert_eq!((m.usage().pinned, m.usage().evictable), (0, 1));
    m.check().expect("sound");
    m.stop_recording().expect("memory takes everything");
    let report = replay(&recording.bytes()[..]).expect("whole");
    assert_eq!((report.divergence, report.check), (None, Ok(())));
    assert!(report.operations.contains(&("match_prefix", 3)));
    assert!(report.operations.contains(&("drop_pin", 2)));
}

/// A file on a disk that goes after some bytes.
struct Gone<'a>(&'a [u8]);

impl Read for Gone<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.0.read(into)? {
            0 => Err(io::Error::other("the disk is gone")),
            read => Ok(read),
        }
    }
}

#[test]
fn a_file_that_cannot_be_read_is_not_a_cut_one() {
    let bytes = recorded(settings(9));
    for len in [0, 4, 9, 12, bytes.len()] {
        let error = replay(Gone(&bytes[..len])).expect_err("unreadable");
        assert!(matches!(error, TraceError::Io(_)), "{error}");
        let source = error.source().map(ToString::to_string);
        assert_eq!(source, Some("the disk is gone".into()));
    }
}
