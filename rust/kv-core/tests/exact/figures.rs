//! Every figure that the manager shows, with its exact value.

use kv_core::{BlockManager, BlockState, Config, PlanView, PoolUsage, Prefill, Stats};

use super::tools::{
    PLENTY, begin, commit, computed, manager, prefill, prompt, sequence, settings, table, with,
};

#[test]
fn a_usage_adds_up() {
    let usage = PoolUsage {
        free: 1,
        evictable: 2,
        active: 4,
        pinned: 8,
        loading: 16,
    };
    assert_eq!((usage.available(), usage.num_blocks()), (3, 31));
}

#[test]
fn counters_have_names_in_order() {
    let stats = Stats {
        prompt_tokens: 7,
        rolled_back_steps: 9,
        ..Stats::default()
    };
    let pairs: Vec<_> = stats.each().collect();
    assert_eq!(pairs.len(), 32);
    assert_eq!(pairs[0], ("prompt_tokens", 7));
    assert_eq!(pairs[1], ("cached_tokens", 0));
    assert_eq!(pairs[22], ("rolled_back_steps", 9));
}

#[test]
fn a_pool_shows_where_its_blocks_are() {
    let mut m = manager(8);
    let free = PoolUsage {
        free: 8,
        evictable: 0,
        active: 0,
        pinned: 0,
        loading: 0,
    };
    assert_eq!(m.usage(), free);
    drop(computed(&mut m, vec![1; 5])); // one evictable
    let pinned = computed(&mut m, vec![2; 9]);
    let pin = m.pin(pinned.key()).expect("live"); // two pinned
    drop(pinned);
    let active = computed(&mut m, vec![3; 9]); // three active
    let usage = PoolUsage {
        free: 2,
        evictable: 1,
        active: 3,
        pinned: 2,
        loading: 0,
    };
    assert_eq!((m.usage(), m.usage().available()), (usage, 3));
    let states: Vec<_> = (0..8).map(|block| m.state(block).expect("known")).collect();
    let count = |state| states.iter().filter(|&&it| it == state).count();
    let counts = [
        BlockState::Free,
        BlockState::Evictable,
        BlockState::Active,
        BlockState::Pinned,
    ]
    .map(count);
    assert_eq!(counts, [2, 1, 3, 2]);
    assert_eq!(m.preview(active.key()), Ok(3));
    drop(pin);
}

#[test]
fn a_preview_counts_what_nobody_else_holds() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(10));
    assert_eq!(m.preview(seq.key()), Ok(3));
    let _pin = m.match_prefix(&prompt(4), b"").expect("short");
    assert_eq!(m.preview(seq.key()), Ok(2));
    let fork = m.fork(seq.key(), 10).expect("within");
    assert_eq!(
        (m.preview(seq.key()), m.preview(fork.key())),
        (Ok(0), Ok(0))
    );
}

/// Tokens, computed, planned, pending, cached, registered.
fn progress(m: &BlockManager, seq: &kv_core::SeqHandle) -> [usize; 6] {
    let view = m.view(seq.key()).expect("live");
    assert_eq!(view.id, seq.id());
    [
        view.tokens.len(),
        view.num_computed_tokens,
        view.num_planned_tokens,
        view.num_pending_tokens,
        view.num_cached_tokens,
        view.num_registered_blocks,
    ]
}

#[test]
fn a_sequence_shows_how_far_it_is() {
    let mut m = manager(8);
    drop(computed(&mut m, prompt(4)));
    let seq = sequence(&mut m, prompt(11));
    assert_eq!(progress(&m, &seq), [11, 0, 0, 0, 0, 0]);
    let first = begin(&mut m, PLENTY);
    prefill(&mut m, first.key(), &seq);
    assert_eq!(progress(&m, &seq), [11, 0, 11, 1, 0, 2]);
    let second = begin(&mut m, PLENTY);
    assert_eq!(m.decode(second.key(), &[seq.key()], 0), Ok(vec![]));
    assert_eq!(progress(&m, &seq), [11, 0, 12, 2, 0, 2]);
    commit(&mut m, first.key());
    assert_eq!(progress(&m, &seq), [12, 11, 12, 1, 4, 2]);
    commit(&mut m, second.key());
    assert_eq!(progress(&m, &seq), [13, 12, 12, 0, 4, 3]);
    let fork = m.fork(seq.key(), 6).expect("within");
    assert_eq!(progress(&m, &fork), [6, 6, 6, 0, 4, 1]);
    m.reset(seq.key()).expect("in no plan");
    assert_eq!(progress(&m, &seq), [13, 0, 0, 0, 0, 0]);
    assert_eq!(table(&m, &seq, 0), []);
}

#[test]
fn a_plan_shows_what_is_in_it() {
    let mut m = manager(16);
    let (a, b) = (computed(&mut m, vec![1]), computed(&mut m, vec![2]));
    let c = sequence(&mut m, vec![3; 20]);
    let plan = begin(&mut m, 20);
    let shows = |m: &BlockManager, [tokens, sequences, samples, left]: [usize; 4]| {
        let view = PlanView {
            num_tokens: tokens,
            num_sequences: sequences,
            num_samples: samples,
            budget_left: left,
        };
        assert_eq!(m.plan_view(plan.key()), Ok(view));
    };
    shows(&m, [0, 0, 0, 20]);
    assert_eq!(m.decode(plan.key(), &[a.key()], 0), Ok(vec![]));
    shows(&m, [1, 1, 1, 19]);
    m.speculate(plan.key(), b.key(), &[5, 6]).expect("ready");
    shows(&m, [4, 2, 4, 16]);
    let part = Prefill::Planned {
        cached_tokens: 0,
        tokens: 16,
        samples: false,
    };
    assert_eq!(m.prefill(plan.key(), c.key(), PLENTY, None), Ok(part));
    shows(&m, [20, 3, 4, 0]);
    assert_eq!(m.cancel(plan.key(), b.key()), Ok(vec![]));
    shows(&m, [17, 2, 1, 3]);
    assert_eq!(m.copies(plan.key()), Ok(&[][..]));
}

#[test]
fn a_copy_is_shown_from_source_to_destination() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(6));
    let fork = m.fork(seq.key(), 6).expect("within");
    m.append(fork.key(), &[77]).expect("in no plan");
    let source = table(&m, &seq, 0)[1];
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &fork);
    let copies = m.copies(plan.key()).expect("open").to_vec();
    let copy = table(&m, &fork, 0)[1];
    assert_ne!(source, copy);
    let ids: Vec<_> = copies
        .iter()
        .map(|(from, to)| (Some(from.get()), Some(to.get())))
        .collect();
    assert_eq!(ids, [(source, copy)]);
    // The plan holds the source, whatever becomes of its sequence.
    let source = source.expect("a block");
    assert_eq!((m.refs(source), m.seq_refs(source)), (Ok(2), Ok(1)));
    m.reset(seq.key()).expect("in no plan");
    assert_eq!((m.refs(source), m.seq_refs(source)), (Ok(1), Ok(0)));
    commit(&mut m, plan.key());
    assert_eq!(m.state(source), Ok(BlockState::Free));
}

#[test]
fn contents_are_counted_with_their_namespaces() {
    let mut m = manager(8);
    assert_eq!((m.num_prefixes(), m.cached_hashes().len()), (0, 0));
    let first = computed(&mut m, prompt(10));
    assert_eq!((m.num_prefixes(), m.cached_hashes().len()), (3, 2));
    let other = m.sequence(vec![1], b"tenant", true).expect("tokens");
    assert_eq!((m.num_prefixes(), m.cached_hashes().len()), (4, 2));
    drop((first, other));
    m.drain_deferred();
    assert_eq!((m.num_prefixes(), m.cached_hashes().len()), (3, 2));
    m.evict_all();
    assert_eq!((m.num_prefixes(), m.cached_hashes().len()), (0, 0));
}

#[test]
fn every_group_has_blocks_of_its_own() {
    let mut m = with(Config {
        groups: vec![None; 3],
        ..settings(40)
    });
    let seq = computed(&mut m, prompt(40));
    let mut blocks: Vec<_> = (0..3).flat_map(|group| table(&m, &seq, group)).collect();
    blocks.sort_unstable();
    assert_eq!(blocks, (0..30).map(Some).collect::<Vec<_>>());
    drop(seq);
    let pin = m.match_prefix(&prompt(40), b"").expect("short");
    assert_eq!((pin.num_tokens(), pin.num_blocks()), (40, 30));
    m.check().expect("sound");
}

#[test]
fn settings_are_shown() {
    let m = with(Config {
        groups: vec![None, Some(8)],
        hash_bits: 127,
        ..settings(5)
    });
    let config = m.config();
    assert_eq!((config.num_blocks, config.block_size), (5, 4));
    assert_eq!(config.groups, [None, Some(8)]);
    assert_eq!((config.hash_bits, config.hash_seed), (127, Some(1)));
    assert!(config.events && config.prefix_caching && config.in_flight_sharing);
    assert_eq!(m.hasher().seed(), 1);
    // The most rows of both groups: all 25 of the one, window and step of the other.
    for (max_tokens, blocks) in [
        (1, 25 + 3),
        (2, 25 + 4),
        (5, 25 + 4),
        (6, 25 + 5),
        (200, 50),
    ] {
        assert_eq!(
            m.blocks_for(100, max_tokens),
            blocks,
            "{max_tokens} tokens in a step"
        );
    }
}
