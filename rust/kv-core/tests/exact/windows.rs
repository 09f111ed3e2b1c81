//! Layer groups with windows: which blocks are released, and when.

use std::time::{Duration, Instant};

use kv_core::{BlockManager, Config, Prefill, SeqHandle};

use super::tools::{
    PLENTY, assert_linear, begin, commit, computed, decoded, manager, prefill, prompt, sequence,
    settings, table, with,
};

/// A group that sees everything and one with a window, of blocks of four tokens.
fn windowed(num_blocks: usize, window: usize) -> Config {
    Config {
        groups: vec![None, Some(window)],
        ..settings(num_blocks)
    }
}

/// Whether there is a block in each row of the window's table.
fn kept(m: &BlockManager, seq: &SeqHandle) -> Vec<bool> {
    let rows = table(m, seq, 1);
    assert!(table(m, seq, 0).iter().all(Option::is_some));
    rows.iter().map(Option::is_some).collect()
}

#[test]
fn what_no_later_token_sees_is_given_back() {
    for (window, tokens, expected) in [
        (4, 12, vec![false, false, true]),
        (4, 11, vec![false, true, true]),
        (5, 12, vec![false, true, true]),
        (8, 13, vec![false, true, true, true]),
        (9, 12, vec![true; 3]),
    ] {
        let mut m = with(windowed(16, window));
        let seq = computed(&mut m, prompt(tokens));
        assert_eq!(kept(&m, &seq), expected, "window {window}, {tokens} tokens");
        let slid = expected.iter().filter(|&&kept| !kept).count();
        assert_eq!(m.stats().slid_blocks, slid as u64);
        assert_eq!(m.usage().evictable, slid);
    }
}

#[test]
fn a_window_slides_with_every_block() {
    let mut m = with(windowed(16, 4));
    let seq = computed(&mut m, prompt(7));
    let mut slid = 0;
    for tokens in 8..21 {
        decoded(&mut m, &[&seq]);
        let full = tokens / 4;
        slid = full - 1;
        assert_eq!(m.stats().slid_blocks, slid as u64, "{tokens} computed");
    }
    assert_eq!(slid, 4);
    m.check().expect("sound");
}

#[test]
fn windows_slide_without_a_cache() {
    let mut m = with(Config {
        prefix_caching: false,
        ..windowed(16, 4)
    });
    let seq = computed(&mut m, prompt(12));
    assert_eq!(kept(&m, &seq), [false, false, true]);
    assert_eq!((m.stats().slid_blocks, m.usage().free), (2, 12));
}

/// Blocks before the window of a match are pinned by the plan, and released with its commit.
#[test]
fn blocks_before_the_gaps_of_a_match_are_given_back() {
    let mut m = with(windowed(32, 12));
    let late = sequence(&mut m, prompt(29));
    let plan = begin(&mut m, PLENTY);
    m.prefill(plan.key(), late.key(), 8, None)
        .expect("blocks suffice");
    commit(&mut m, plan.key());
    assert_eq!(kept(&m, &late), [true; 2]);
    let first = computed(&mut m, prompt(28));
    let slid = m.stats().slid_blocks;
    let plan = begin(&mut m, PLENTY);
    let answer = Prefill::Planned {
        cached_tokens: 20,
        tokens: 1,
        samples: true,
    };
    let given = m.prefill(plan.key(), late.key(), PLENTY, None);
    assert_eq!(given, Ok(answer));
    let gone = [false, false, false, false, true, true, true, true];
    assert_eq!(kept(&m, &late), gone);
    commit(&mut m, plan.key());
    assert_eq!(kept(&m, &late), gone);
    assert_eq!(m.stats().slid_blocks, slid + 2);
    drop(first);
    m.check().expect("sound");
}

#[test]
fn a_pin_holds_what_a_later_token_sees() {
    let mut m = with(windowed(16, 4));
    let seq = computed(&mut m, prompt(12));
    let pin = m.pin(seq.key()).expect("live");
    assert_eq!((pin.num_tokens(), pin.num_blocks()), (12, 4));
    let blocks: Vec<_> = pin.blocks().map(|block| Some(block.get())).collect();
    let (all, window) = (table(&m, &seq, 0), table(&m, &seq, 1));
    assert_eq!(blocks, [all[0], all[1], all[2], window[2]]);
    drop(seq);
    assert_eq!((m.usage().pinned, m.usage().evictable), (4, 2));
    let next = sequence(&mut m, prompt(13));
    m.attach(next.key(), &pin).expect("its prefix");
    assert_eq!(kept(&m, &next), [false, false, true]);
    assert_eq!(m.preview(next.key()), Ok(0));
    assert_eq!((m.usage().active, m.usage().pinned), (4, 0));
    m.check().expect("sound");
}

#[test]
fn a_fork_before_the_window_begins_without_blocks() {
    let mut m = with(windowed(16, 4));
    let seq = computed(&mut m, prompt(13));
    for (at, rows, computed) in [
        (13, vec![false, false, true, true], 13),
        (12, vec![false, false, true], 12),
        (11, vec![], 0),
        (8, vec![], 0),
    ] {
        let fork = m.fork(seq.key(), at).expect("within");
        assert_eq!(kept(&m, &fork), rows, "{at} tokens");
        let view = m.view(fork.key()).expect("live");
        assert_eq!(view.num_computed_tokens, computed);
    }
    m.check().expect("sound");
}

#[test]
fn a_match_needs_the_rows_of_the_window_only() {
    let mut m = with(windowed(8, 4));
    drop(computed(&mut m, prompt(12)));
    let pin = m.match_prefix(&prompt(12), b"").expect("short");
    assert_eq!((pin.num_tokens(), pin.num_blocks()), (12, 4));
    // Two rows: the window's second one is evictable and matches; one row: its first one.
    for (tokens, blocks) in [(8, 3), (4, 2)] {
        let shorter = m.match_prefix(&prompt(tokens), b"").expect("short");
        assert_eq!(shorter.num_tokens(), tokens as usize);
        assert_eq!(shorter.num_blocks(), blocks);
    }
}

/// Two open steps: a block that the later one is to compute is not registered by the earlier one.
#[test]
fn a_content_of_the_next_step_is_asked_for_again_later() {
    for rolled_back in [false, true] {
        let mut m = manager(16);
        let seq = computed(&mut m, prompt(3));
        let first = begin(&mut m, PLENTY);
        assert_eq!(m.decode(first.key(), &[seq.key()], 0), Ok(vec![]));
        let second = begin(&mut m, PLENTY);
        let tokens = m.view(seq.key()).expect("live").tokens.to_vec();
        let other = sequence(&mut m, [tokens, vec![5]].concat());
        prefill(&mut m, second.key(), &other);
        assert_eq!(commit(&mut m, first.key()), []);
        let registered = |m: &BlockManager| {
            let view = m.view(seq.key()).expect("live");
            view.num_registered_blocks
        };
        assert_eq!((registered(&m), m.stats().registered_blocks), (0, 0));
        assert_eq!(m.pin(seq.key()).expect("live").num_tokens(), 0);
        if rolled_back {
            m.rollback(second.key()).expect("the newest");
        } else {
            commit(&mut m, second.key());
        }
        let remappings = decoded(&mut m, &[&seq]);
        assert_eq!(remappings.len(), usize::from(!rolled_back));
        assert_eq!((registered(&m), m.stats().registered_blocks), (1, 1));
        assert_eq!(m.stats().merged_blocks, u64::from(!rolled_back));
        m.check().expect("sound");
    }
}

/// Two open steps: blocks that the earlier one computes without registering them, for the prefix had a block
/// then, is not preregistered by the later one when that block is gone. It is registered by its commit.
#[test]
fn a_content_of_the_step_before_is_not_announced_by_the_next() {
    for groups in [vec![Some(4)], vec![None, Some(4)], vec![None]] {
        for rolled_back in [None, Some(false), Some(true)] {
            let mut m = with(Config {
                groups: groups.clone(),
                ..settings(24)
            });
            drop(computed(&mut m, prompt(8)));
            let seq = m.sequence(prompt(12), b"", false).expect("tokens");
            for tokens in [2, 6] {
                let plan = begin(&mut m, PLENTY);
                let answer = m.prefill(plan.key(), seq.key(), tokens, None);
                assert!(matches!(answer, Ok(Prefill::Planned { .. })));
                if tokens == 2 {
                    commit(&mut m, plan.key());
                    continue;
                }
                m.evict_all();
                let next = begin(&mut m, PLENTY);
                prefill(&mut m, next.key(), &seq);
                let registered = |m: &BlockManager| {
                    let view = m.view(seq.key()).expect("live");
                    view.num_registered_blocks
                };
                assert_eq!(registered(&m), 0);
                if rolled_back == Some(true) {
                    m.rollback(next.key()).expect("the newest");
                }
                commit(&mut m, plan.key());
                m.check().expect("sound");
                assert_eq!(registered(&m), 2);
                assert_eq!(m.pin(seq.key()).expect("live").num_tokens(), 8);
                match rolled_back {
                    None => assert_eq!(commit(&mut m, next.key()), []),
                    Some(true) => {}
                    Some(false) => m.rollback(next.key()).expect("the newest"),
                }
                let expected = if rolled_back.is_none() { 3 } else { 2 };
                assert_eq!(registered(&m), expected);
                m.check().expect("sound");
            }
        }
    }
}

#[test]
fn a_pin_ends_before_the_row_that_an_open_step_computes() {
    for groups in [vec![None; 2], vec![None; 3]] {
        let config = Config {
            groups,
            ..settings(24)
        };
        let width = config.groups.len();
        let mut m = with(config);
        let seq = sequence(&mut m, prompt(12));
        let first = begin(&mut m, 8);
        prefill(&mut m, first.key(), &seq);
        commit(&mut m, first.key());
        let open = begin(&mut m, PLENTY);
        prefill(&mut m, open.key(), &seq);
        let pin = m.pin(seq.key()).expect("live");
        assert_eq!((pin.num_tokens(), pin.num_blocks()), (8, 2 * width));
    }
}

/// The last row is what an open step computes: the pin ends before it.
#[test]
fn a_pin_ends_before_what_is_not_there_yet() {
    let mut m = with(windowed(16, 8));
    let seq = sequence(&mut m, prompt(16));
    let first = begin(&mut m, PLENTY);
    m.prefill(first.key(), seq.key(), 8, None)
        .expect("blocks suffice");
    commit(&mut m, first.key());
    let second = begin(&mut m, PLENTY);
    m.prefill(second.key(), seq.key(), 4, None)
        .expect("blocks suffice");
    let pin = m.pin(seq.key()).expect("live");
    assert_eq!((pin.num_tokens(), pin.num_blocks()), (8, 4));
    commit(&mut m, second.key());
    let pin = m.pin(seq.key()).expect("live");
    assert_eq!((pin.num_tokens(), pin.num_blocks()), (12, 5));
}

/// What is left of a match in flight without its last row has gaps at its end: that is no prefix.
#[test]
fn a_pin_does_not_end_in_a_gap() {
    for groups in [vec![Some(4)], vec![None, Some(4)], vec![Some(5), None]] {
        let mut m = with(Config {
            groups,
            ..settings(24)
        });
        let first = sequence(&mut m, prompt(16));
        let second = sequence(&mut m, prompt(17));
        let plan = begin(&mut m, PLENTY);
        m.prefill(plan.key(), first.key(), 8, None)
            .expect("blocks suffice");
        commit(&mut m, plan.key());
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), &first);
        prefill(&mut m, plan.key(), &second);
        let registered = m.view(second.key()).expect("live").num_registered_blocks;
        assert_eq!(registered, 4);
        let pin = m.pin(second.key()).expect("live");
        assert_eq!((pin.num_tokens(), pin.num_blocks()), (0, 0));
        m.rollback(plan.key()).expect("the newest");
        let third = sequence(&mut m, prompt(17));
        m.attach(third.key(), &pin).expect("nothing");
        m.check().expect("sound");
    }
}

/// Of a cached block that one group has lost, the open step computes that one: a pin ends
/// before it, though later rows are there.
#[test]
fn a_pin_ends_before_the_first_block_that_is_not_there_yet() {
    let mut m = with(windowed(16, 4));
    drop(computed(&mut m, prompt(12)));
    m.drain_deferred();
    let shorter = sequence(&mut m, prompt(4));
    // The window's first rows are evictable; the rest is held.
    let held = m.match_prefix(&prompt(12), b"").expect("short");
    assert_eq!((held.num_tokens(), held.num_blocks()), (12, 4));
    m.evict_all();
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &shorter);
    let reader = m.sequence(prompt(12), b"", false).expect("tokens");
    prefill(&mut m, plan.key(), &reader);
    for seq in [&shorter, &reader] {
        let pin = m.pin(seq.key()).expect("live");
        assert_eq!((pin.num_tokens(), pin.num_blocks()), (0, 0));
    }
    m.check().expect("sound");
}

#[test]
fn a_fork_at_the_end_keeps_what_its_parent_has() {
    let mut m = with(windowed(24, 8));
    let parent = computed(&mut m, prompt(24));
    let fork = m.fork(parent.key(), 24).expect("its own length");
    assert_eq!(m.view(fork.key()).expect("live").num_computed_tokens, 24);
    assert_eq!(table(&m, &fork, 1), table(&m, &parent, 1));
}

/// A fork whose next token would see what has slid out computes its tokens again.
#[test]
fn a_fork_that_ends_within_the_gaps_has_nothing() {
    let mut m = with(windowed(16, 4));
    let seq = computed(&mut m, prompt(12));
    assert_eq!(kept(&m, &seq), [false, false, true]);
    for (tokens, has) in [(3, 0), (4, 0), (5, 0), (8, 0), (12, 12)] {
        let fork = m.fork(seq.key(), tokens).expect("it has so many");
        let view = m.view(fork.key()).expect("live");
        assert_eq!(view.num_computed_tokens, has, "{tokens} tokens");
        m.check().expect("sound");
    }
}

/// A pin that is taken while a match is planned covers no gap, and neither does what is made of it.
#[test]
fn a_pin_inside_a_plan_has_no_gap() {
    for (groups, block_size, factor) in [(vec![Some(2)], 1, 1), (vec![None, Some(64)], 16, 32)] {
        let mut m = BlockManager::new(Config {
            groups: groups.clone(),
            hash_seed: Some(1),
            ..Config::new(256, block_size)
        })
        .expect("valid");
        let tokens: Vec<u32> = (0..6 * factor).collect();
        let early = [&tokens[..], &[9_999; 3]].concat();
        let early = sequence(&mut m, early);
        let plan = begin(&mut m, PLENTY);
        let first = m.prefill(plan.key(), early.key(), 2 * factor as usize, None);
        first.expect("blocks suffice");
        commit(&mut m, plan.key());
        drop(computed(&mut m, tokens.clone()));
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), &early);
        let pin = m.pin(early.key()).expect("live");
        assert_eq!(pin.num_tokens(), 6 * factor as usize);
        m.check().expect("no gap");
        commit(&mut m, plan.key());
        let other = sequence(&mut m, [&tokens[..], &[7_777]].concat());
        m.attach(other.key(), &pin).expect("its prefix");
        m.check().expect("no gap");
        let held: usize = (0..groups.len())
            .map(|group| table(&m, &other, group).iter().flatten().count())
            .sum();
        assert!(held <= m.blocks_for(6 * factor as usize, 1));
        for tokens in 1..=6 * factor as usize {
            let fork = m.fork(other.key(), tokens).expect("it has so many");
            for group in 0..groups.len() {
                let held = table(&m, &fork, group);
                let first = held.iter().position(Option::is_some).unwrap_or(held.len());
                assert!(
                    held[first..].iter().all(Option::is_some),
                    "{tokens}: {held:?}"
                );
            }
            m.check().expect("no gap");
        }
    }
}

/// A match whose window leaves out what the sequence has: a rollback brings it back.
#[test]
fn what_a_match_puts_out_of_sight_comes_back() {
    let mut m = with(windowed(32, 4));
    let late = sequence(&mut m, prompt(29));
    let plan = begin(&mut m, PLENTY);
    m.prefill(plan.key(), late.key(), 8, None)
        .expect("blocks suffice");
    commit(&mut m, plan.key());
    drop(computed(&mut m, prompt(28)));
    let before = [table(&m, &late, 0), table(&m, &late, 1)];
    let usage = m.usage();
    for cancel in [false, true] {
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), &late);
        assert_ne!([table(&m, &late, 0), table(&m, &late, 1)], before);
        m.check().expect("sound");
        if cancel {
            m.cancel(plan.key(), late.key()).expect("planned");
        }
        m.rollback(plan.key()).expect("open");
        assert_eq!([table(&m, &late, 0), table(&m, &late, 1)], before);
        assert_eq!(m.usage(), usage);
        m.check().expect("sound");
    }
}

/// A prompt of so many blocks is computed again, of which nothing is left but what was made under its end; how
/// long that takes.
fn computed_again(blocks: u32) -> Duration {
    let config = Config {
        groups: vec![Some(8)],
        ..settings(2 * blocks as usize + 16)
    };
    let (mut m, budget) = (with(config), 8 * blocks as usize);
    let tokens = |own: u32| -> Vec<u32> { (0..4 * blocks).chain([own; 12]).collect() };
    let prefilled = |m: &mut BlockManager, tokens: Vec<u32>| {
        let seq = sequence(m, tokens);
        let plan = begin(m, budget);
        let start = Instant::now();
        let answer = m.prefill(plan.key(), seq.key(), budget, None);
        let took = start.elapsed();
        assert!(matches!(answer, Ok(Prefill::Planned { .. })), "{answer:?}");
        commit(m, plan.key());
        (seq, answer.expect("planned"), took)
    };
    drop(prefilled(&mut m, tokens(7_000_001)));
    let (child, ..) = prefilled(&mut m, tokens(7_000_002));
    assert!(m.evict_all() >= blocks as usize);
    let (_, answer, took) = prefilled(&mut m, tokens(7_000_003));
    let Prefill::Planned { cached_tokens, .. } = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(cached_tokens, 0);
    m.check().expect("sound");
    drop(child);
    took
}

/// What is known of an evicted prefix because a child keeps it costs each block of a later prefill the same.
#[test]
fn a_prefix_that_a_child_keeps_is_computed_again_in_linear_time() {
    assert_linear(computed_again, 2_048);
}
