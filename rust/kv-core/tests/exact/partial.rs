//! Partial reuse: where a match ends inside a block, the beginning of the cached block that agrees longest is copied.

use kv_core::{BlockManager, Config, PlanKey, PoolUsage, Prefill, Remapping, SeqHandle};

use super::tools::{
    PLENTY, begin, commit, computed, manager, prefill, prompt, sequence, settings, table, with,
};

/// The first `common` tokens of a prompt, then `own` other ones.
fn apart(common: u32, own: u32) -> Vec<u32> {
    (0..common)
        .chain(500 + common..500 + common + own)
        .collect()
}

fn copies(m: &mut BlockManager, plan: PlanKey) -> Vec<(u32, u32)> {
    let copies = m.copies(plan).expect("open").iter();
    copies.map(|(from, to)| (from.get(), to.get())).collect()
}

fn planned(m: &mut BlockManager, plan: PlanKey, seq: &SeqHandle) -> (usize, usize) {
    match m.prefill(plan, seq.key(), PLENTY, None) {
        Ok(Prefill::Planned {
            cached_tokens,
            tokens,
            ..
        }) => (cached_tokens, tokens),
        other => panic!("{other:?}"),
    }
}

/// A started sequence that copies the beginning of a block, and matches no whole block.
#[test]
fn a_part_of_a_block_is_a_match_once_more() {
    let mut m = manager(16);
    let seq = sequence(&mut m, prompt(12));
    let plan = begin(&mut m, PLENTY);
    let answer = m.prefill(plan.key(), seq.key(), 4, None);
    assert!(matches!(answer, Ok(Prefill::Planned { tokens: 4, .. })));
    commit(&mut m, plan.key());
    drop(computed(&mut m, apart(6, 3)));
    let plan = begin(&mut m, PLENTY);
    assert_eq!(planned(&mut m, plan.key(), &seq), (2, 6));
    commit(&mut m, plan.key());
    assert_eq!((m.stats().rematches, m.stats().partial_tokens), (1, 2));
    m.check().expect("sound");
}

#[test]
fn computing_starts_behind_the_copied_tokens() {
    let mut m = manager(8);
    drop(computed(&mut m, prompt(12)));
    let before = m.stats();
    let seq = sequence(&mut m, apart(10, 3));
    let plan = begin(&mut m, PLENTY);
    assert_eq!(planned(&mut m, plan.key(), &seq), (10, 3));
    assert_eq!(copies(&mut m, plan.key()), [(2, 3)]);
    assert_eq!(table(&m, &seq, 0), [0, 1, 3, 4].map(Some));
    // The source is held until the step is closed, and by no sequence.
    assert_eq!((m.refs(2), m.seq_refs(2)), (Ok(1), Ok(0)));
    m.check().expect("sound");
    commit(&mut m, plan.key());
    assert_eq!(m.refs(2), Ok(0));
    let stats = m.stats();
    assert_eq!((stats.partial_hits, stats.partial_tokens), (1, 2));
    assert_eq!((stats.copied_blocks, stats.hit_blocks), (1, 2));
    assert_eq!(stats.cached_tokens, 10);
    assert_eq!(stats.computed_tokens - before.computed_tokens, 3);
    // The copy is cached like other blocks once it is full.
    assert_eq!(stats.registered_blocks - before.registered_blocks, 1);
    let view = m.view(seq.key()).expect("live");
    assert_eq!(
        (view.num_cached_tokens, view.num_registered_blocks),
        (10, 3)
    );
    let pin = m.match_prefix(&apart(10, 3), b"").expect("short");
    let blocks: Vec<u32> = pin.blocks().map(|block| block.get()).collect();
    assert_eq!(blocks, [0, 1, 3]);
    m.check().expect("sound");
}

#[test]
fn what_was_lent_is_given_back_with_the_plan() {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(12)));
    let (seq, other) = (
        sequence(&mut m, apart(10, 9)),
        sequence(&mut m, apart(9, 9)),
    );
    let (usage, queued) = (m.usage(), m.queued());
    for cancelled in [false, true] {
        let plan = begin(&mut m, PLENTY);
        assert_eq!(planned(&mut m, plan.key(), &seq), (10, 9));
        assert_eq!(planned(&mut m, plan.key(), &other), (9, 9));
        assert_eq!(copies(&mut m, plan.key()), [(2, 3), (2, 6)]);
        assert_eq!(m.refs(2), Ok(2));
        if cancelled {
            assert_eq!(m.cancel(plan.key(), seq.key()), Ok(vec![]));
            assert_eq!(copies(&mut m, plan.key()), [(2, 6)]);
            assert_eq!(table(&m, &seq, 0), []);
            m.check().expect("sound");
        }
        m.rollback(plan.key()).expect("the newest");
        m.check().expect("sound");
        assert_eq!((m.usage(), m.queued().len()), (usage, queued.len()));
        assert_eq!(m.stats().partial_hits, 0);
    }
}

#[test]
fn who_does_not_want_it_gets_none() {
    let cases = [
        (false, true, true),
        (true, false, true),
        (true, true, false),
    ];
    for (partial_reuse, prefix_caching, read_cache) in cases {
        let mut m = with(Config {
            partial_reuse,
            prefix_caching,
            ..settings(16)
        });
        drop(computed(&mut m, prompt(12)));
        let seq = m.sequence(apart(10, 3), b"", read_cache).expect("tokens");
        let plan = begin(&mut m, PLENTY);
        let whole = if prefix_caching && read_cache { 8 } else { 0 };
        assert_eq!(planned(&mut m, plan.key(), &seq), (whole, 13 - whole));
        assert_eq!(copies(&mut m, plan.key()), []);
        commit(&mut m, plan.key());
        assert_eq!(m.stats().partial_hits, 0);
    }
    // Nothing is copied across namespaces.
    let mut m = manager(16);
    drop(computed(&mut m, prompt(12)));
    let seq = m.sequence(apart(10, 3), b"tenant", true).expect("tokens");
    let plan = begin(&mut m, PLENTY);
    assert_eq!(planned(&mut m, plan.key(), &seq), (0, 13));
}

#[test]
fn an_eighth_of_a_block_is_the_least() {
    for (block_size, common, source) in [
        (16, 1, 0),
        (16, 2, 2),
        (17, 2, 0),
        (17, 3, 3),
        (8, 1, 1),
        (7, 1, 1),
        (3, 0, 0),
        (16, 15, 15),
        (1, 1, 0),
    ] {
        let mut m = with(Config {
            block_size,
            ..settings(80)
        });
        drop(computed(&mut m, prompt(32)));
        let whole = common as usize / block_size * block_size;
        let seq = sequence(&mut m, apart(common, 32));
        let plan = begin(&mut m, PLENTY);
        let (cached, _) = planned(&mut m, plan.key(), &seq);
        assert_eq!(cached - whole, source, "{common} of {block_size}");
    }
}

/// Its logits are what the step is for.
#[test]
fn the_last_token_is_computed() {
    for (len, cached) in [(9, 8), (10, 9), (11, 10), (12, 11)] {
        let mut m = manager(16);
        drop(computed(&mut m, prompt(16)));
        let seq = sequence(&mut m, prompt(len));
        let plan = begin(&mut m, PLENTY);
        assert_eq!(planned(&mut m, plan.key(), &seq), (cached, 1));
        let source = usize::from(len == 10 || len == 11);
        assert_eq!(copies(&mut m, plan.key()).len(), source, "{len} tokens");
        commit(&mut m, plan.key());
        m.check().expect("sound");
    }
}

/// Copies are carried out before the step, what it computes is not there then.
#[test]
fn a_content_that_is_computed_now_is_not_lent() {
    let mut m = manager(16);
    let (first, second) = (sequence(&mut m, prompt(12)), sequence(&mut m, apart(10, 3)));
    let older = begin(&mut m, PLENTY);
    prefill(&mut m, older.key(), &first);
    let newer = begin(&mut m, PLENTY);
    assert_eq!(planned(&mut m, newer.key(), &second), (8, 5));
    m.rollback(newer.key()).expect("the newest");
    commit(&mut m, older.key());
    let plan = begin(&mut m, PLENTY);
    assert_eq!(planned(&mut m, plan.key(), &second), (10, 3));
    assert_eq!(copies(&mut m, plan.key()), [(2, 3)]);
}

/// An evictable source needs another block: without one, the tokens are computed.
#[test]
fn nobody_waits_for_the_sake_of_a_copy() {
    for (num_blocks, cached, source) in [(5, 10, 1), (4, 8, 0)] {
        let mut m = manager(num_blocks);
        drop(computed(&mut m, prompt(12)));
        m.drain_deferred();
        let seq = sequence(&mut m, apart(10, 3));
        for reserve in [None, Some(0)] {
            let plan = begin(&mut m, PLENTY);
            let answer = m.prefill(plan.key(), seq.key(), PLENTY, reserve);
            let expected = Prefill::Planned {
                cached_tokens: cached,
                tokens: 13 - cached,
                samples: true,
            };
            assert_eq!(answer, Ok(expected), "{num_blocks} blocks");
            assert_eq!(copies(&mut m, plan.key()).len(), source);
            m.check().expect("sound");
            m.rollback(plan.key()).expect("the newest");
            m.evict_all();
            drop(computed(&mut m, prompt(12)));
            m.drain_deferred();
        }
    }
    // What is missing is said without it.
    let mut m = manager(4);
    drop(computed(&mut m, prompt(12)));
    m.drain_deferred();
    let seq = sequence(&mut m, apart(10, 7));
    let plan = begin(&mut m, PLENTY);
    let (usage, expected) = (
        m.usage(),
        Prefill::NoRoom {
            needed: 5,
            available: 4,
        },
    );
    let answer = m.prefill(plan.key(), seq.key(), PLENTY, None);
    assert_eq!((answer, m.usage()), (Ok(expected), usage));
    assert_eq!(copies(&mut m, plan.key()), []);
    let plan_view = m.plan_view(plan.key()).expect("open");
    assert_eq!(plan_view.budget_left, PLENTY);
}

/// A chunk ends on a boundary, and its budget is that of what it computes.
#[test]
fn chunks_and_budgets_count_what_is_computed() {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(12)));
    let seq = sequence(&mut m, apart(10, 20));
    let plan = begin(&mut m, 7);
    let answer = m.prefill(plan.key(), seq.key(), 7, None);
    let expected = Prefill::Planned {
        cached_tokens: 10,
        tokens: 6,
        samples: false,
    };
    assert_eq!(answer, Ok(expected));
    assert_eq!(m.plan_view(plan.key()).expect("open").budget_left, 1);
    commit(&mut m, plan.key());
    let plan = begin(&mut m, 0);
    let answer = m.prefill(plan.key(), seq.key(), 7, None);
    assert_eq!(answer, Ok(Prefill::NoBudget));
}

#[test]
fn copies_that_turn_out_equal_are_merged() {
    let mut m = with(Config {
        in_flight_sharing: false,
        ..settings(16)
    });
    drop(computed(&mut m, prompt(12)));
    let pair = [(); 2].map(|()| sequence(&mut m, apart(10, 3)));
    let plan = begin(&mut m, PLENTY);
    for seq in &pair {
        assert_eq!(planned(&mut m, plan.key(), seq), (10, 3));
    }
    assert_eq!(copies(&mut m, plan.key()), [(2, 3), (2, 5)]);
    let remappings = commit(&mut m, plan.key());
    let expected = Remapping {
        sequence: pair[1].id(),
        group: 0,
        index: 2,
        old_block: 5.into(),
        new_block: 3.into(),
    };
    assert_eq!(remappings, [expected]);
    m.check().expect("sound");
    assert_eq!(m.usage().free, 16 - 3 - 3);
}

/// Slots reserved past the boundary are what is copied to.
#[test]
fn a_reserved_block_is_copied_to() {
    let mut m = manager(16);
    let seq = computed(&mut m, prompt(3));
    let plan = begin(&mut m, PLENTY);
    assert_eq!(m.decode(plan.key(), &[seq.key()], 4), Ok(vec![]));
    commit(&mut m, plan.key());
    let [first, reserved] = table(&m, &seq, 0)[..] else {
        panic!("a row ahead");
    };
    m.append(seq.key(), &[1, 2, 3]).expect("in no plan");
    let mut tokens = m.view(seq.key()).expect("live").tokens.to_vec();
    tokens[6] = 77;
    drop(computed(&mut m, [&tokens[..], &[78]].concat()));
    let usage = m.usage();
    let plan = begin(&mut m, PLENTY);
    assert_eq!(planned(&mut m, plan.key(), &seq), (2, 2));
    assert_eq!(table(&m, &seq, 0), [first, reserved]);
    assert_eq!(copies(&mut m, plan.key()), [(2, reserved.expect("held"))]);
    m.check().expect("sound");
    m.rollback(plan.key()).expect("the newest");
    assert_eq!(table(&m, &seq, 0), [first, reserved]);
    assert_eq!(m.usage(), usage);
}

/// A block is copied in every layer group, or in none.
#[test]
fn every_layer_group_lends() {
    let mut m = with(Config {
        groups: vec![None, Some(8)],
        ..settings(32)
    });
    let first = computed(&mut m, prompt(20));
    let held = [table(&m, &first, 0), table(&m, &first, 1)];
    assert_eq!(held[1][..3], [None; 3]);
    let seq = sequence(&mut m, apart(18, 3));
    let plan = begin(&mut m, PLENTY);
    assert_eq!(planned(&mut m, plan.key(), &seq), (18, 3));
    let mine = [table(&m, &seq, 0), table(&m, &seq, 1)];
    let pairs = [0, 1].map(|group| {
        let (source, copy) = (held[group][4], mine[group][4]);
        (source.expect("held"), copy.expect("held"))
    });
    assert_eq!(copies(&mut m, plan.key()), pairs);
    m.check().expect("sound");
    commit(&mut m, plan.key());
    m.check().expect("sound");
    assert_eq!(m.stats().partial_hits, 1);
    assert_eq!(m.stats().copied_blocks, 2);
}

/// Prompts that differ in their first token share nothing.
#[test]
fn the_usage_is_whole_at_the_end() {
    let mut m = manager(16);
    for _ in 0..3 {
        for common in [0, 2, 5, 11] {
            drop(computed(&mut m, apart(common, 12 - common)));
        }
    }
    m.evict_all();
    let all_free = PoolUsage {
        free: 16,
        evictable: 0,
        active: 0,
        pinned: 0,
        loading: 0,
    };
    assert_eq!(m.usage(), all_free);
    m.check().expect("sound");
}
