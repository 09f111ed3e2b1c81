//! Without a plan: what is reused, extended and published, and what is refused.

use kv_core::{BlockId, BlockManager, BlockState, Config, Error, Extend, SeqHandle};

use super::tools::{
    PLENTY, SAMPLED, begin, commit, computed, decoded, manager, prefill, prompt, sequence,
    settings, table, with,
};

fn extended(m: &mut BlockManager, seq: &SeqHandle, tokens: usize) -> Vec<u32> {
    match m.extend(seq.key(), tokens) {
        Ok(Extend::Extended { blocks, copies }) if copies.is_empty() => {
            blocks.into_iter().map(BlockId::get).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// A sequence of these tokens, all of them published.
fn published(m: &mut BlockManager, tokens: Vec<u32>) -> SeqHandle {
    let (len, seq) = (tokens.len(), sequence(m, tokens));
    extended(m, &seq, len);
    assert_eq!(m.publish(seq.key(), len, &[]), Ok(vec![]));
    seq
}

fn usage(m: &mut BlockManager) -> (usize, usize, usize) {
    let usage = m.usage();
    (usage.free, usage.evictable, usage.active)
}

/// Prompt, decode, end: with a call where a block ends.
#[test]
fn the_life_of_a_request() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(6));
    assert_eq!(m.reuse_cached(seq.key()), Ok(0));
    assert_eq!(extended(&mut m, &seq, 4), [0]); // a chunk
    assert_eq!(m.publish(seq.key(), 4, &[]), Ok(vec![]));
    assert_eq!(extended(&mut m, &seq, 2), [1]);
    assert_eq!(m.publish(seq.key(), 2, &[50]), Ok(vec![]));
    // The slots of tokens 6 and 7 exist: `extend` allocates nothing.
    assert_eq!(extended(&mut m, &seq, 2), [] as [u32; 0]);
    assert_eq!(m.publish(seq.key(), 2, &[51, 52]), Ok(vec![]));
    assert_eq!(extended(&mut m, &seq, 1), [2]);
    let view = m.view(seq.key()).expect("live");
    assert_eq!(view.tokens, [0, 1, 2, 3, 4, 5, 50, 51, 52]);
    assert_eq!(
        (view.num_computed_tokens, view.num_registered_blocks),
        (8, 2)
    );
    assert_eq!(m.free(seq.key()), Ok(()));
    assert_eq!(usage(&mut m), (6, 2, 0));
    let stats = m.stats();
    assert_eq!((stats.prompt_tokens, stats.computed_tokens), (6, 8));
    assert_eq!((stats.registered_blocks, stats.allocated_blocks), (2, 3));
    // The next sequence reuses the published blocks.
    let next = sequence(&mut m, prompt(6));
    assert_eq!(m.reuse_cached(next.key()), Ok(4));
    assert_eq!(table(&m, &next, 0), [Some(0)]);
    let stats = m.stats();
    assert_eq!((stats.cached_tokens, stats.hit_blocks), (4, 1));
    assert_eq!(m.view(next.key()).expect("live").num_cached_tokens, 4);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn no_room_changes_nothing() {
    let mut m = manager(3);
    let seq = sequence(&mut m, prompt(17));
    assert_eq!(extended(&mut m, &seq, 4), [0]);
    let answer = m.extend(seq.key(), 17);
    let no_room = Extend::NoRoom {
        needed: 4,
        available: 2,
    };
    assert_eq!(answer, Ok(no_room));
    assert_eq!(
        (table(&m, &seq, 0), usage(&mut m)),
        (vec![Some(0)], (2, 0, 1))
    );
    assert!(matches!(
        m.extend(seq.key(), usize::MAX),
        Ok(Extend::NoRoom { .. })
    ));
    assert_eq!(extended(&mut m, &seq, 12), [1, 2]);
    assert_eq!(extended(&mut m, &seq, 0), [] as [u32; 0]);
    assert_eq!(m.trim(seq.key(), 5), Ok(1)); // slots of a speculation that was rejected
    assert_eq!(usage(&mut m), (1, 0, 2));
}

#[test]
fn a_full_hit_computes_its_last_token() {
    let mut m = manager(8);
    let _first = published(&mut m, prompt(8));
    let seq = sequence(&mut m, prompt(8));
    assert_eq!(m.reuse_cached(seq.key()), Ok(7));
    assert_eq!(extended(&mut m, &seq, 1), [] as [u32; 0]);
    assert_eq!(m.publish(seq.key(), 1, &[9]), Ok(vec![]));
    assert_eq!(m.view(seq.key()).expect("live").num_computed_tokens, 8);
    assert_eq!(usage(&mut m), (6, 0, 2));
}

#[test]
fn equal_blocks_are_merged_when_they_are_published() {
    let mut m = manager(8);
    let pair = [0, 1].map(|_| sequence(&mut m, prompt(9)));
    pair.iter().for_each(|seq| drop(extended(&mut m, seq, 9)));
    assert_eq!(m.publish(pair[0].key(), 9, &[]), Ok(vec![]));
    let remappings = m.publish(pair[1].key(), 9, &[]).expect("at rest");
    let moved: Vec<_> = remappings
        .iter()
        .map(|it| (it.index, it.old_block.get()))
        .collect();
    assert_eq!(moved, [(0, 3), (1, 4)]);
    assert_eq!(table(&m, &pair[1], 0), [Some(0), Some(1), Some(5)]);
    assert_eq!((m.stats().merged_blocks, usage(&mut m)), (2, (4, 0, 4)));
    // A released block may be allocated at once.
    assert_eq!(extended(&mut m, &pair[0], 4), [4]);
}

#[test]
fn a_step_that_is_open_keeps_what_was_merged() {
    let mut m = manager(8);
    let other = sequence(&mut m, vec![7]);
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &other);
    let _first = published(&mut m, prompt(4));
    let second = sequence(&mut m, prompt(4));
    extended(&mut m, &second, 4);
    assert_eq!(m.publish(second.key(), 4, &[]).map(|it| it.len()), Ok(1));
    assert_eq!(m.state(2), Ok(BlockState::Pinned));
    commit(&mut m, plan.key());
    assert_eq!(m.state(2), Ok(BlockState::Free));
}

#[test]
fn plans_and_calls_without_one_share() {
    let mut m = manager(16);
    let _loose = published(&mut m, prompt(8));
    let planned = sequence(&mut m, prompt(13));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &planned);
    assert_eq!(m.view(planned.key()).expect("live").num_planned_tokens, 13);
    // Blocks that an open plan computes are not ready.
    let next = sequence(&mut m, prompt(13));
    assert_eq!(m.reuse_cached(next.key()), Ok(8));
    extended(&mut m, &next, 5);
    commit(&mut m, plan.key());
    let remappings = m.publish(next.key(), 5, &[]).expect("at rest");
    assert_eq!((remappings.len(), remappings[0].index), (1, 2));
    // Where nothing is reserved the index is asked again.
    let late = sequence(&mut m, prompt(13));
    assert_eq!(m.reuse_cached(late.key()), Ok(12));
    assert_eq!(m.reuse_cached(late.key()), Ok(0));
    // The same sequence in a plan, now.
    assert_eq!(m.publish(next.key(), 0, &[3]), Ok(vec![]));
    decoded(&mut m, &[&next]);
    assert_eq!(m.view(next.key()).expect("live").tokens[13..], [3, SAMPLED]);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn what_an_open_plan_computes_is_merged_later() {
    let mut m = manager(16);
    let planned = sequence(&mut m, prompt(8));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &planned);
    let seq = sequence(&mut m, prompt(8));
    extended(&mut m, &seq, 8);
    assert_eq!(m.publish(seq.key(), 8, &[1]), Ok(vec![]));
    assert_eq!(m.view(seq.key()).expect("live").num_registered_blocks, 0);
    commit(&mut m, plan.key());
    extended(&mut m, &seq, 1);
    assert_eq!(m.publish(seq.key(), 1, &[]).map(|it| it.len()), Ok(2));
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn a_fork_is_extended_before_it_is_written_to() {
    let mut m = manager(8);
    let parent = published(&mut m, prompt(6));
    let fork = m.fork(parent.key(), 6).expect("at rest");
    for seq in [&parent, &fork] {
        let error = Error::SharedBlock {
            sequence: seq.id(),
            block: 1,
        };
        assert_eq!(m.publish(seq.key(), 1, &[9]), Err(error));
        assert_eq!(m.view(seq.key()).expect("live").tokens.len(), 6);
    }
    let copied = Extend::Extended {
        blocks: vec![BlockId::from(3)],
        copies: vec![(BlockId::from(1), BlockId::from(2))],
    };
    assert_eq!(m.extend(fork.key(), 3), Ok(copied));
    assert_eq!(m.publish(fork.key(), 1, &[8]), Ok(vec![]));
    assert_eq!(m.publish(parent.key(), 1, &[9]), Ok(vec![])); // no other reference: in place
    assert_eq!(m.stats().copied_blocks, 1);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn a_block_that_an_open_step_is_yet_to_copy_is_not_written() {
    let mut m = manager(8);
    let parent = published(&mut m, prompt(6));
    let fork = m.fork(parent.key(), 5).expect("at rest");
    assert_eq!(m.append(parent.key(), &[9]), Ok(()));
    let plan = begin(&mut m, PLENTY);
    assert_eq!(m.decode(plan.key(), &[parent.key()], 0), Ok(vec![]));
    assert_eq!(m.copies(plan.key()).map(|copies| copies[0].0.get()), Ok(1));
    // The fork holds block 1 alone now, and token 5 in it is the parent's until the step has run.
    let refused = m.publish(fork.key(), 1, &[8]);
    assert!(matches!(refused, Err(Error::SharedBlock { block: 1, .. })));
    let answer = m.extend(fork.key(), 1).expect("at rest");
    assert!(matches!(answer, Extend::Extended { copies, .. } if copies.len() == 1));
    assert_eq!(m.publish(fork.key(), 1, &[8]), Ok(vec![]));
    commit(&mut m, plan.key());
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn windows_slide_when_tokens_are_published() {
    let mut m = with(Config {
        groups: vec![None, Some(4)],
        ..settings(16)
    });
    let seq = sequence(&mut m, prompt(12));
    assert_eq!(extended(&mut m, &seq, 12), [0, 1, 2, 3, 4, 5]);
    assert_eq!(m.publish(seq.key(), 12, &[]), Ok(vec![]));
    assert_eq!(table(&m, &seq, 1), [None, None, Some(5)]);
    let next = sequence(&mut m, prompt(13));
    assert_eq!(m.reuse_cached(next.key()), Ok(12));
    assert_eq!(table(&m, &next, 1), [None, None, Some(5)]);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn nothing_is_reused_that_must_not_be() {
    let mut m = manager(16);
    let _known = published(&mut m, prompt(12));
    let alone = m.sequence(prompt(12), b"", false).expect("tokens"); // computes everything itself
    assert_eq!(m.reuse_cached(alone.key()), Ok(0));
    let reserved = sequence(&mut m, prompt(12));
    extended(&mut m, &reserved, 2);
    assert_eq!(m.reuse_cached(reserved.key()), Ok(0));
    assert_eq!(m.publish(reserved.key(), 2, &[]), Ok(vec![]));
    assert_eq!(m.reuse_cached(reserved.key()), Ok(0)); // between blocks
    let mut off = with(Config {
        prefix_caching: false,
        ..settings(8)
    });
    let _known = published(&mut off, prompt(4));
    let seq = sequence(&mut off, prompt(4));
    assert_eq!(off.reuse_cached(seq.key()), Ok(0));
}

#[test]
fn misuse_changes_nothing() {
    let mut m = manager(8);
    let planned = sequence(&mut m, prompt(3));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &planned);
    let seq = published(&mut m, vec![5; 3]);
    let freed = computed(&mut manager(4), prompt(3));
    let gone = sequence(&mut m, prompt(3));
    assert_eq!(m.free(gone.key()), Ok(()));
    let before = (m.usage(), m.stats());
    let in_plan = Error::InPlan {
        sequence: planned.id(),
    };
    assert_eq!(m.extend(planned.key(), 1), Err(in_plan.clone()));
    assert_eq!(m.publish(planned.key(), 1, &[]), Err(in_plan.clone()));
    assert_eq!(m.reuse_cached(planned.key()), Err(in_plan));
    let error = Error::NotExtended {
        sequence: seq.id(),
        end: 5,
        slots: 4,
    };
    assert_eq!(m.publish(seq.key(), 2, &[1, 2]), Err(error));
    let error = Error::NotKnown {
        sequence: seq.id(),
        end: 4,
        known: 3,
    };
    assert_eq!(m.publish(seq.key(), 1, &[]), Err(error));
    let too_many = m.publish(seq.key(), usize::MAX, &[]);
    assert!(matches!(too_many, Err(Error::NotExtended { .. })));
    let is_gone = Error::FreedSequence {
        sequence: gone.id(),
    };
    assert_eq!(m.extend(gone.key(), 1), Err(is_gone.clone()));
    assert_eq!(m.publish(gone.key(), 0, &[]), Err(is_gone.clone()));
    assert_eq!(m.reuse_cached(gone.key()), Err(is_gone));
    let error = Error::WrongManager {
        what: "sequence",
        id: freed.id(),
    };
    assert_eq!(m.extend(freed.key(), 1), Err(error.clone()));
    assert_eq!(m.publish(freed.key(), 0, &[]), Err(error.clone()));
    assert_eq!(m.reuse_cached(freed.key()), Err(error));
    assert_eq!((m.usage(), m.stats()), before);
    assert_eq!(m.view(seq.key()).expect("live").tokens, [5; 3]);
    assert_eq!(m.check(), Ok(()));
}
