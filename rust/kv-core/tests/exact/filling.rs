//! What is written into a step's arrays, cell by cell.

use kv_core::{
    BlockManager, Config, Error, IntArray, PlanHandle, Prefill, SeqHandle, SharedI32, SharedI64,
    StepArrays, TableRows,
};

use super::arrays::{Arrays, IDS, LEFT, LENS, LOGITS, POSITIONS, SLOTS, STARTS, Sizes, TABLES};
use super::tools::{
    PLENTY, SAMPLED, begin, commit, computed, manager, prefill, prompt, sequence, settings, table,
    with,
};

/// A step of two prompts: six and three tokens, in blocks 0, 1 and 2.
fn two_prompts(m: &mut BlockManager) -> (PlanHandle, [SeqHandle; 2]) {
    let seqs = [vec![10, 11, 12, 13, 14, 15], vec![20, 21, 22]].map(|tokens| sequence(m, tokens));
    let plan = begin(m, PLENTY);
    seqs.iter().for_each(|seq| prefill(m, plan.key(), seq));
    (plan, seqs)
}

#[test]
fn arrays_that_are_exactly_large_enough() {
    let mut m = manager(8);
    let (plan, _seqs) = two_prompts(&mut m);
    let arrays = Arrays::new(Sizes::exactly(9, 2, 2, 2));
    assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
    assert_eq!(arrays.values(IDS), [10, 11, 12, 13, 14, 15, 20, 21, 22]);
    assert_eq!(arrays.values(POSITIONS), [0, 1, 2, 3, 4, 5, 0, 1, 2]);
    assert_eq!(arrays.values(SLOTS), [0, 1, 2, 3, 4, 5, 8, 9, 10]);
    assert_eq!(arrays.values(STARTS), [0, 6, 9]);
    assert_eq!(arrays.values(LENS), [6, 3]);
    assert_eq!(arrays.values(TABLES), [0, 1, 2, LEFT]);
    assert_eq!(arrays.values(LOGITS), [5, 8]);
}

#[test]
fn an_array_that_is_too_small_is_named_and_nothing_is_written() {
    let mut m = manager(8);
    let (plan, _seqs) = two_prompts(&mut m);
    let exact = Sizes::exactly(9, 2, 2, 2);
    for (sizes, name, needed, given) in [
        (Sizes { tokens: 8, ..exact }, "input_ids", 9, 8),
        (Sizes { slots: 8, ..exact }, "slot_mapping", 9, 8),
        (Sizes { starts: 2, ..exact }, "query_start_loc", 3, 2),
        (
            Sizes {
                sequences: 1,
                ..exact
            },
            "seq_lens",
            2,
            1,
        ),
        (Sizes { rows: 1, ..exact }, "block_tables (rows)", 2, 1),
        (
            Sizes {
                columns: 1,
                ..exact
            },
            "block_tables (columns)",
            2,
            1,
        ),
        (
            Sizes {
                samples: 1,
                ..exact
            },
            "logits_indices",
            2,
            1,
        ),
    ] {
        let arrays = Arrays::new(sizes);
        let error = Error::BufferTooSmall {
            name,
            needed,
            given,
        };
        assert_eq!(arrays.fill(&m, plan.key()), Err(error));
        assert!(arrays.untouched(), "{name}");
    }
    let arrays = Arrays::new(exact);
    let few = [0; 8].map(SharedI64::new);
    let views = StepArrays {
        positions: IntArray::I64(&few),
        ..arrays.views()
    };
    let error = Error::BufferTooSmall {
        name: "positions",
        needed: 9,
        given: 8,
    };
    let answer = m.fill(plan.key(), &views, &mut TableRows::default());
    assert_eq!(answer, Err(error));
    assert!(arrays.untouched());
}

#[test]
fn every_group_has_its_part() {
    let groups = || Config {
        groups: vec![None, None],
        ..settings(16)
    };
    let mut m = with(groups());
    let (plan, seqs) = two_prompts(&mut m);
    let sizes = Sizes {
        groups: 2,
        slots: 11,
        rows: 3,
        columns: 5,
        ..Sizes::exactly(9, 2, 2, 2)
    };
    let arrays = Arrays::new(sizes);
    assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
    for group in 0..2 {
        let tables = seqs.each_ref().map(|seq| table(&m, seq, group));
        let [first, second] = tables.map(|blocks| {
            let ids = blocks.into_iter().flatten().map(i64::from);
            ids.collect::<Vec<_>>()
        });
        let slots = [0, 1, 2, 3].map(|offset| first[0] * 4 + offset);
        let slots = [&slots[..], &[first[1] * 4, first[1] * 4 + 1]].concat();
        let slots = [slots, [0, 1, 2].map(|at| second[0] * 4 + at).to_vec()].concat();
        let written = &arrays.values(SLOTS)[group * 11..][..11];
        assert_eq!(written, [slots, vec![LEFT; 2]].concat());
        let left = vec![LEFT; 3];
        let rows = [&first[..], &left, &second, &left, &[LEFT], &[LEFT; 5]].concat();
        assert_eq!(arrays.values(TABLES)[group * 15..][..15], rows);
    }
    // Arrays for one group do not do.
    let one = Arrays::new(Sizes { groups: 1, ..sizes });
    let slots = StepArrays {
        slot_mapping: one.views().slot_mapping,
        ..arrays.views()
    };
    let tables = StepArrays {
        block_tables: one.views().block_tables,
        ..arrays.views()
    };
    for (views, name) in [
        (slots, "slot_mapping (groups)"),
        (tables, "block_tables (groups)"),
    ] {
        let error = Error::BufferTooSmall {
            name,
            needed: 2,
            given: 1,
        };
        let answer = m.fill(plan.key(), &views, &mut TableRows::default());
        assert_eq!(answer, Err(error));
    }
}

#[test]
fn what_is_there_already_is_not_written() {
    let mut m = manager(8);
    drop(computed(&mut m, prompt(8)));
    let seqs = [8, 9].map(|len| sequence(&mut m, prompt(len)));
    let plan = begin(&mut m, PLENTY);
    seqs.iter().for_each(|seq| prefill(&mut m, plan.key(), seq));
    let arrays = Arrays::new(Sizes::exactly(2, 2, 3, 2));
    assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
    assert_eq!(arrays.values(IDS), [7, 8]);
    assert_eq!(arrays.values(POSITIONS), [7, 8]);
    let last = i64::from(table(&m, &seqs[1], 0)[2].expect("a block"));
    assert_eq!(arrays.values(SLOTS), [-1, last * 4]);
    assert_eq!(arrays.values(LENS), [8, 9]);
}

#[test]
fn drafts_have_a_row_each() {
    let mut m = manager(8);
    let [first, second] = [5, 6].map(|token| sequence(&mut m, vec![token]));
    let plan = begin(&mut m, PLENTY);
    let answer = m.speculate(plan.key(), first.key(), &[50, 51, 52]);
    let planned = Prefill::Planned {
        cached_tokens: 0,
        tokens: 4,
        samples: true,
    };
    assert_eq!(answer, Ok(planned));
    assert_eq!(m.decode(plan.key(), &[second.key()], 0), Ok(vec![]));
    let arrays = Arrays::new(Sizes::exactly(5, 2, 1, 5));
    assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
    assert_eq!(arrays.values(IDS), [5, 50, 51, 52, 6]);
    assert_eq!(arrays.values(POSITIONS), [0, 1, 2, 3, 0]);
    assert_eq!(arrays.values(LOGITS), [0, 1, 2, 3, 4]);
    assert_eq!(arrays.values(LENS), [4, 1]);
}

#[test]
fn a_chunk_that_samples_nothing_has_no_row() {
    let mut m = manager(8);
    let [part, whole] = [9, 2].map(|len| sequence(&mut m, prompt(len)));
    let plan = begin(&mut m, 6);
    prefill(&mut m, plan.key(), &part);
    prefill(&mut m, plan.key(), &whole);
    let arrays = Arrays::new(Sizes::exactly(6, 2, 1, 1));
    assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
    assert_eq!(arrays.values(LOGITS), [5]);
    assert_eq!(arrays.values(LENS), [4, 2]);
}

/// Three decodes on top of a step that is open, then without the first of them.
#[test]
fn a_pending_token_names_the_row_that_gives_it() {
    let mut m = manager(16);
    let seqs = [1, 2, 3].map(|token| computed(&mut m, vec![token]));
    let keys = seqs.each_ref().map(SeqHandle::key);
    let first = begin(&mut m, PLENTY);
    assert_eq!(m.speculate(first.key(), keys[0], &[60]).map(|_| ()), Ok(()));
    assert_eq!(m.decode(first.key(), &keys[1..], 0), Ok(vec![]));
    let second = begin(&mut m, PLENTY);
    assert_eq!(m.decode(second.key(), &keys[1..], 0), Ok(vec![]));
    let arrays = Arrays::new(Sizes {
        tokens: 3,
        ..Sizes::exactly(2, 2, 1, 2)
    });
    assert_eq!(arrays.fill(&m, second.key()), Ok(()));
    assert_eq!(arrays.values(IDS), [-3, -4, LEFT]);
    assert_eq!(arrays.values(POSITIONS), [2, 2, LEFT]);
    assert_eq!(arrays.values(LENS), [3, 3]);
    // A step that is rolled back leaves the rows of the one before it.
    m.rollback(second.key()).expect("the newest");
    let second = begin(&mut m, PLENTY);
    assert_eq!(m.decode(second.key(), &keys[1..], 0), Ok(vec![]));
    assert_eq!(arrays.fill(&m, second.key()), Ok(()));
    assert_eq!(arrays.values(IDS), [-3, -4, LEFT]);
    // Rows move up when one goes.
    m.rollback(second.key()).expect("the newest");
    assert_eq!(m.cancel(first.key(), keys[0]), Ok(vec![]));
    let second = begin(&mut m, PLENTY);
    assert_eq!(m.decode(second.key(), &keys[1..], 0), Ok(vec![]));
    assert_eq!(arrays.fill(&m, second.key()), Ok(()));
    assert_eq!(arrays.values(IDS), [-1, -2, LEFT]);
    // Once the first step is committed they are known.
    commit(&mut m, first.key());
    assert_eq!(arrays.fill(&m, second.key()), Ok(()));
    let sampled = i64::from(SAMPLED);
    assert_eq!(arrays.values(IDS), [sampled, sampled, LEFT]);
}

#[test]
fn tokens_that_int32_holds_and_one_that_it_does_not() {
    let largest = i32::MAX as u32;
    for (tokens, wide) in [
        (vec![1, largest, 2], None),
        (vec![1, largest + 1, 2], Some(largest + 1)),
    ] {
        let mut m = manager(8);
        let seq = sequence(&mut m, tokens.clone());
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), &seq);
        let arrays = Arrays::new(Sizes::exactly(3, 1, 1, 1));
        let views = StepArrays {
            input_ids: IntArray::I32(&arrays.narrow),
            slot_mapping: IntArray::I32(&[LEFT as i32; 3].map(SharedI32::new)),
            ..arrays.views()
        };
        let answer = m.fill(plan.key(), &views, &mut TableRows::default());
        let ids: Vec<_> = arrays.narrow.iter().map(SharedI32::get).collect();
        match wide {
            None => {
                assert_eq!(answer, Ok(()));
                assert_eq!(ids, [1, i32::MAX, 2]);
            }
            Some(value) => {
                let error = Error::BufferTooNarrow {
                    name: "input_ids",
                    value: u64::from(value),
                };
                assert_eq!(answer, Err(error));
                assert_eq!(ids, [LEFT as i32; 3]);
                assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
                assert_eq!(
                    arrays.values(IDS),
                    tokens
                        .iter()
                        .map(|&token| i64::from(token))
                        .collect::<Vec<_>>()
                );
            }
        }
    }
}

#[test]
fn slots_that_int32_holds_and_those_that_it_does_not() {
    let block_size = 1 << 16;
    let wide = (1 << 31) + block_size as u64 - 1;
    for (num_blocks, wide) in [(1 << 15, None), ((1 << 15) + 1, Some(wide))] {
        let mut m = with(Config {
            block_size,
            ..settings(num_blocks)
        });
        let seq = sequence(&mut m, prompt(3));
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), &seq);
        let slots = [LEFT as i32; 3].map(SharedI32::new);
        let arrays = Arrays::new(Sizes::exactly(3, 1, 1, 1));
        let views = StepArrays {
            slot_mapping: IntArray::I32(&slots),
            ..arrays.views()
        };
        let answer = m.fill(plan.key(), &views, &mut TableRows::default());
        let slots = slots.each_ref().map(SharedI32::get);
        let name = "slot_mapping";
        match wide {
            None => assert_eq!((answer, slots), (Ok(()), [0, 1, 2])),
            Some(value) => {
                let error = Error::BufferTooNarrow { name, value };
                assert_eq!((answer, slots), (Err(error), [LEFT as i32; 3]));
            }
        }
    }
}

/// Inputs are those of the step, whatever the next one has moved elsewhere meanwhile.
#[test]
fn the_next_step_moves_nothing_of_this_one() {
    let mut m = manager(16);
    let (first, second) = {
        let first = computed(&mut m, prompt(5));
        let second = m.fork(first.key(), 6).expect("its length");
        (first, second)
    };
    let plan = begin(&mut m, PLENTY);
    let keys = [first.key(), second.key()];
    assert_eq!(m.decode(plan.key(), &keys, 0), Ok(vec![]));
    // The first one writes on a copy, so the second one writes in place: then the first one goes.
    m.cancel(plan.key(), first.key()).expect("planned");
    let values = |m: &BlockManager| {
        let arrays = Arrays::new(Sizes::exactly(1, 1, 2, 1));
        arrays.fill(m, plan.key()).expect("large enough");
        [SLOTS, TABLES].map(|array| arrays.values(array))
    };
    let before = values(&m);
    let next = begin(&mut m, PLENTY);
    assert_eq!(m.decode(next.key(), &[second.key()], 0), Ok(vec![]));
    assert_eq!(m.copies(next.key()).expect("open").len(), 1);
    assert_eq!(values(&m), before);
    commit(&mut m, plan.key());
    m.check().expect("sound");
}
