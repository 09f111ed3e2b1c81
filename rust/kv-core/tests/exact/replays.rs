//! Replay: the last cached tokens are computed again, and not written again.

use kv_core::{BlockManager, Config, Error, Prefill, PrefillRequest, SeqHandle};

use super::arrays::{Arrays, IDS, POSITIONS, SLOTS, STARTS, Sizes};
use super::tools::{
    PLENTY, begin, commit, computed, manager, prompt, sequence, settings, table, with,
};

/// A sequence of which eight tokens are cached and four are its own, or so many.
fn eight_and(own: u32) -> (BlockManager, SeqHandle) {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(8)));
    let seq = sequence(&mut m, prompt(8 + own));
    (m, seq)
}

fn again(replay: usize) -> PrefillRequest {
    PrefillRequest {
        max_tokens: PLENTY,
        spare_blocks: None,
        replay,
    }
}

fn planned(cached_tokens: usize, tokens: usize, samples: bool) -> Result<Prefill, Error> {
    Ok(Prefill::Planned {
        cached_tokens,
        tokens,
        samples,
    })
}

#[test]
fn computing_begins_before_the_end_of_the_hit() {
    for replay in 0..=8 {
        let (mut m, seq) = eight_and(4);
        let plan = begin(&mut m, PLENTY);
        let answer = m.prefill_again(plan.key(), seq.key(), again(replay));
        assert_eq!(answer, planned(8 - replay, 4 + replay, true));
        let view = m.plan_view(plan.key()).expect("open");
        assert_eq!(view.budget_left, PLENTY - 4 - replay);
        let arrays = Arrays::new(Sizes::exactly(4 + replay, 1, 3, 1));
        assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
        let (first, count) = (8 - replay as i64, 4 + replay as i64);
        assert_eq!(arrays.values(IDS), (first..12).collect::<Vec<_>>());
        assert_eq!(arrays.values(POSITIONS), (first..12).collect::<Vec<_>>());
        let slots = std::iter::repeat_n(-1, replay).chain(8..12);
        assert_eq!(arrays.values(SLOTS), slots.collect::<Vec<_>>());
        assert_eq!(arrays.values(STARTS), [0, count]);
        m.check().expect("sound");
        commit(&mut m, plan.key());
        m.check().expect("sound");
        let stats = m.stats();
        assert_eq!(stats.cached_tokens, 8 - replay as u64);
        assert_eq!((stats.hit_blocks, stats.rematches), (2, 0));
        assert_eq!(m.view(seq.key()).expect("live").num_computed_tokens, 12);
    }
}

#[test]
fn no_more_is_replayed_than_was_found() {
    for replay in [8, 9, usize::MAX] {
        let (mut m, seq) = eight_and(4);
        let fresh = sequence(&mut m, vec![77; 5]);
        let plan = begin(&mut m, PLENTY);
        let answer = m.prefill_again(plan.key(), seq.key(), again(replay));
        assert_eq!(answer, planned(0, 12, true));
        let answer = m.prefill_again(plan.key(), fresh.key(), again(replay));
        assert_eq!(answer, planned(0, 5, true));
        let arrays = Arrays::new(Sizes::exactly(17, 2, 3, 2));
        assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
        let unwritten = |slots: &[i64]| slots.iter().filter(|&&slot| slot == -1).count();
        assert_eq!(unwritten(&arrays.values(SLOTS)[..17]), 8);
        commit(&mut m, plan.key());
        m.check().expect("sound");
    }
}

/// A full hit computes its last token in any case.
#[test]
fn a_full_hit_is_a_replay_of_one() {
    for (replay, tokens) in [(0, 1), (1, 1), (2, 2), (8, 8)] {
        let (mut m, seq) = eight_and(0);
        let plan = begin(&mut m, PLENTY);
        let free = m.usage().free;
        let answer = m.prefill_again(plan.key(), seq.key(), again(replay));
        assert_eq!(answer, planned(8 - tokens, tokens, true));
        assert_eq!(m.usage().free, free);
        let arrays = Arrays::new(Sizes::exactly(tokens, 1, 2, 1));
        assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
        assert_eq!(arrays.values(SLOTS), vec![-1; tokens]);
        m.check().expect("sound");
        m.rollback(plan.key()).expect("the newest");
        assert_eq!((table(&m, &seq, 0), m.usage().active), (vec![], 0));
    }
}

/// Tokens are replayed in one step; a chunk ends on a block boundary if that is after them.
#[test]
fn a_replay_is_whole_or_not_at_all() {
    for (budget, expected) in [
        (2, Ok(Prefill::NoBudget)),
        (3, planned(5, 3, false)),
        (6, planned(5, 3, false)),
        (7, planned(5, 7, false)),
        (9, planned(5, 7, false)),
        (12, planned(5, 12, true)),
    ] {
        let (mut m, seq) = eight_and(9);
        let plan = begin(&mut m, budget);
        let answer = m.prefill_again(plan.key(), seq.key(), again(3));
        assert_eq!(answer, expected, "{budget} tokens");
        m.check().expect("sound");
        commit(&mut m, plan.key());
        m.check().expect("sound");
    }
}

/// Copied tokens are cached ones: they may be replayed too.
#[test]
fn what_was_copied_is_replayed() {
    for (replay, budget, expected) in [
        (1, PLENTY, planned(9, 4, true)),
        (2, PLENTY, planned(8, 5, true)),
        (5, PLENTY, planned(5, 8, true)),
        (5, 5, planned(5, 5, false)),
        (5, 4, Ok(Prefill::NoBudget)),
        (11, PLENTY, planned(0, 13, true)),
        (11, 5, Ok(Prefill::NoBudget)),
    ] {
        let mut m = manager(16);
        drop(computed(&mut m, prompt(12)));
        let seq = sequence(&mut m, [&prompt(10)[..], &[50, 51, 52]].concat());
        let plan = begin(&mut m, budget);
        let answer = m.prefill_again(plan.key(), seq.key(), again(replay));
        assert_eq!(answer, expected, "{replay} tokens in {budget}");
        m.check().expect("sound");
        if let Ok(Prefill::Planned { tokens, .. }) = answer {
            let arrays = Arrays::new(Sizes::exactly(tokens, 1, 4, 1));
            assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
            let mine = table(&m, &seq, 0)[2].expect("held");
            let own = i64::from(mine) * 4 + 2;
            let written = (own..own + 2).take(tokens - replay.min(10));
            let slots = std::iter::repeat_n(-1, replay.min(10)).chain(written);
            let slots: Vec<i64> = slots.collect();
            assert_eq!(arrays.values(SLOTS)[..slots.len()], slots);
        }
        commit(&mut m, plan.key());
        m.check().expect("sound");
    }
}

/// Rows 0 to 2 of a prompt of 16 tokens are gone in the group with a window of 4.
fn slid() -> BlockManager {
    let mut m = with(Config {
        groups: vec![None, Some(4)],
        ..settings(9)
    });
    let seq = sequence(&mut m, prompt(16));
    for _ in 0..4 {
        let plan = begin(&mut m, PLENTY);
        let answer = m.prefill(plan.key(), seq.key(), 4, None);
        assert!(matches!(answer, Ok(Prefill::Planned { .. })));
        commit(&mut m, plan.key());
    }
    // The least recently used ones go: rows that have slid out of the window.
    let other = sequence(&mut m, vec![90; 6]);
    let plan = begin(&mut m, PLENTY);
    let answer = m.prefill(plan.key(), other.key(), PLENTY, None);
    assert!(matches!(answer, Ok(Prefill::Planned { .. })));
    m.rollback(plan.key()).expect("the newest");
    drop((seq, other));
    m.drain_deferred();
    m
}

/// The match reaches as far as the windows of what is replayed are there.
#[test]
fn replayed_tokens_find_their_windows() {
    for (replay, expected) in [
        (0, planned(16, 1, true)),
        (1, planned(15, 2, true)),
        (
            2,
            Ok(Prefill::NoRoom {
                needed: 10,
                available: 9,
            }),
        ), // nothing was found
    ] {
        let mut m = slid();
        let seq = sequence(&mut m, prompt(17));
        let plan = begin(&mut m, PLENTY);
        let answer = m.prefill_again(plan.key(), seq.key(), again(replay));
        assert_eq!(answer, expected, "{replay} tokens");
        m.check().expect("sound");
    }
}

#[test]
fn a_sequence_that_finds_more_once_it_has_begun_is_counted() {
    let mut m = manager(32);
    let seq = sequence(&mut m, prompt(20));
    let plan = begin(&mut m, PLENTY);
    let answer = m.prefill(plan.key(), seq.key(), 4, None);
    assert_eq!(answer, planned(0, 4, false));
    commit(&mut m, plan.key());
    assert_eq!(m.stats().rematches, 0);
    drop(computed(&mut m, prompt(14)));
    let before = m.stats().rematches; // it has not begun itself
    assert_eq!(before, 0);
    for undone in [true, false] {
        let plan = begin(&mut m, PLENTY);
        let answer = m.prefill(plan.key(), seq.key(), 4, None);
        assert_eq!(answer, planned(8, 4, false));
        if undone {
            m.rollback(plan.key()).expect("the newest");
        } else {
            commit(&mut m, plan.key());
        }
    }
    assert_eq!(m.stats().rematches, 1);
    let plan = begin(&mut m, PLENTY);
    let answer = m.prefill(plan.key(), seq.key(), PLENTY, None);
    assert_eq!(answer, planned(0, 4, true));
    commit(&mut m, plan.key());
    assert_eq!(m.stats().rematches, 1);
}
