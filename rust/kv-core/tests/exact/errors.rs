//! Errors name the wrong value.

use kv_core::Error;

/// Every variant, and what must be in its words.
fn errors() -> Vec<(Error, &'static [&'static str])> {
    use Error::*;
    vec![
        (
            OutOfRange {
                name: "block_size",
                min: 1,
                max: 65_536,
                given: 70_001,
            },
            &["block_size", "1 to 65536", "70001"],
        ),
        (UnknownPolicy("mru".into()), &["\"mru\"", "lru, 2q"]),
        (OutOfMemory { num_blocks: 77 }, &["77 blocks", "memory"]),
        (Namespace { bytes: 65_537 }, &["65536 bytes", "65537"]),
        (EmptySequence, &["at least one token"]),
        (FreedSequence { sequence: 71 }, &["sequence 71", "freed"]),
        (
            WrongManager {
                what: "plan",
                id: 72,
            },
            &["plan 72", "another BlockManager"],
        ),
        (
            PinOfAnotherManager { tokens: 73 },
            &["73 tokens", "another BlockManager"],
        ),
        (ReleasedPin, &["released"]),
        (
            PinMismatch {
                pin_tokens: 74,
                sequence_tokens: 75,
            },
            &["pin's 74 tokens", "sequence's 75"],
        ),
        (
            ForkLength {
                num_tokens: 76,
                sequence_tokens: 77,
            },
            &["1 to 77 tokens", "got 76"],
        ),
        (NotFresh { blocks: 78 }, &["holds 78"]),
        (InPlan { sequence: 79 }, &["sequence 79", "open plan"]),
        (
            NotPlanned { sequence: 80 },
            &["sequence 80", "not in this plan"],
        ),
        (
            NotDecoding {
                sequence: 81,
                uncomputed: 82,
            },
            &["sequence 81", "82 left"],
        ),
        (NothingToCompute { sequence: 83 }, &["sequence 83"]),
        (
            NotExtended {
                sequence: 60,
                end: 61,
                slots: 62,
            },
            &["sequence 60", "62 tokens", "61 cannot", "extend it"],
        ),
        (
            NotKnown {
                sequence: 63,
                end: 64,
                known: 65,
            },
            &["65 tokens of sequence 63", "64 cannot"],
        ),
        (
            SharedBlock {
                sequence: 66,
                block: 67,
            },
            &["sequence 66", "block 67", "extend it"],
        ),
        (
            UnknownGroup {
                group: 68,
                groups: 69,
            },
            &["69 layer groups", "group=68"],
        ),
        (
            TooFew {
                name: "min_rows",
                min: 58,
                given: 59,
            },
            &["min_rows", "at least 58", "got 59"],
        ),
        (PlanOpen { plan: 84 }, &["commit step 84"]),
        (
            PlanOrder {
                plan: 85,
                first: 86,
            },
            &["step 85 is out of turn", "step 86"],
        ),
        (PlanClosed { plan: 87 }, &["step 87"]),
        (
            TrimBelowComputed {
                num_tokens: 88,
                computed: 89,
            },
            &["89 tokens", "to 88"],
        ),
        (
            DraftCount {
                expected: 91,
                given: 92,
            },
            &["91", "92", "draft"],
        ),
        (
            Accepted {
                sequence: 90,
                accepted: 91,
                drafts: 92,
            },
            &["sequence 90", "92 drafts", "1 to 93", "got 91"],
        ),
        (
            SampleCount {
                expected: 94,
                given: 95,
            },
            &["samples 94", "given 95"],
        ),
        (
            BufferTooSmall {
                name: "positions",
                needed: 96,
                given: 97,
            },
            &["array positions", "holds 97", "needs 96"],
        ),
        (
            BufferTooNarrow {
                name: "input_ids",
                value: 98,
            },
            &["array input_ids", "int32", "98"],
        ),
        (Recording, &["recorded already"]),
        (
            NotNew {
                sequences: 99,
                steps: 100,
            },
            &["99 sequences", "100 steps"],
        ),
        (
            UnknownBlock {
                block: 101,
                num_blocks: 102,
            },
            &["block 101", "pool of 102"],
        ),
    ]
}

#[test]
fn an_error_names_its_values() {
    for (error, words) in errors() {
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{error:?}: {text:?} lacks {word:?}");
        }
    }
}
