//! The counters of scripted runs, value by value.

use kv_core::{Config, Error, Eviction, Prefill, Stats};

use super::tools::{
    CLEARED, PLENTY, begin, block_of, commit, computed, decoded, lose_the_head, manager, prefill,
    prompt, sequence, settings, used, with,
};

#[test]
fn a_prompt_and_its_tokens() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(10));
    let mut expected = Stats {
        prompt_tokens: 10,
        computed_tokens: 10,
        allocated_blocks: 3,
        registered_blocks: 2,
        hashed_blocks: 3,
        committed_steps: 1,
        ..Stats::default()
    };
    assert_eq!(m.stats(), expected);
    decoded(&mut m, &[&seq]);
    expected.computed_tokens += 1;
    expected.committed_steps += 1;
    assert_eq!(m.stats(), expected);
    decoded(&mut m, &[&seq]); // the third block is full now
    expected.computed_tokens += 1;
    expected.committed_steps += 1;
    expected.registered_blocks += 1;
    expected.hashed_blocks += 1;
    assert_eq!(m.stats(), expected);
}

#[test]
fn a_hit_in_chunks() {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(9)));
    let before = m.stats();
    let seq = sequence(&mut m, prompt(15));
    for max_tokens in [4, PLENTY] {
        let plan = begin(&mut m, PLENTY);
        let answer = m.prefill(plan.key(), seq.key(), max_tokens, None);
        assert!(matches!(answer, Ok(Prefill::Planned { .. })));
        commit(&mut m, plan.key());
    }
    let expected = Stats {
        prompt_tokens: before.prompt_tokens + 15,
        cached_tokens: 8,
        computed_tokens: before.computed_tokens + 7,
        hit_blocks: 2,
        allocated_blocks: before.allocated_blocks + 2,
        registered_blocks: before.registered_blocks + 1,
        hashed_blocks: before.hashed_blocks + 1,
        committed_steps: before.committed_steps + 2,
        ..before
    };
    assert_eq!(m.stats(), expected);
    assert_eq!(m.view(seq.key()).expect("live").num_cached_tokens, 8);
}

#[test]
fn a_prefix_in_flight() {
    let mut m = manager(16);
    let seqs = [(); 3].map(|()| sequence(&mut m, prompt(9)));
    let plan = begin(&mut m, PLENTY);
    seqs.iter().for_each(|seq| prefill(&mut m, plan.key(), seq));
    commit(&mut m, plan.key());
    let expected = Stats {
        prompt_tokens: 27,
        cached_tokens: 16,
        computed_tokens: 11,
        hit_blocks: 4,
        in_flight_blocks: 4,
        allocated_blocks: 5,
        registered_blocks: 2,
        hashed_blocks: 3,
        committed_steps: 1,
        ..Stats::default()
    };
    assert_eq!(m.stats(), expected);
}

#[test]
fn a_prefix_whose_head_was_lost() {
    let mut m = with(Config {
        eviction: Eviction::TwoQueue,
        ..settings(4)
    });
    lose_the_head(&mut m);
    let before = m.stats();
    assert_eq!((before.evicted_blocks, before.rolled_back_steps), (1, 1));
    drop(computed(&mut m, prompt(8)));
    let expected = Stats {
        prompt_tokens: before.prompt_tokens + 8,
        computed_tokens: before.computed_tokens + 8,
        already_cached_blocks: 1,
        allocated_blocks: before.allocated_blocks + 1,
        registered_blocks: before.registered_blocks + 1,
        committed_steps: before.committed_steps + 1,
        hashed_blocks: m.stats().hashed_blocks,
        ..before
    };
    assert_eq!(m.stats(), expected);
}

#[test]
fn drafts() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(3));
    let before = m.stats();
    let mut expected = Stats { ..before };
    for (accepted, drafts) in [(&[7, 8, 5][..], [7, 8, 9]), (&[4], [1, 2, 3])] {
        let plan = begin(&mut m, PLENTY);
        m.speculate(plan.key(), seq.key(), &drafts).expect("ready");
        let counts = [accepted.len()];
        let remappings = m.commit_accepted(plan.key(), accepted, &counts);
        assert_eq!(remappings, Ok(vec![]));
        expected.computed_tokens += 4;
        expected.draft_tokens += 3;
        expected.accepted_draft_tokens += accepted.len() as u64 - 1;
        expected.committed_steps += 1;
        let tokens = m.view(seq.key()).expect("live").tokens;
        assert!(tokens.ends_with(accepted));
    }
    // 0 1 2 s 7 8 5 4: seven of them computed, in blocks 0 and 1; the first is full.
    let view = m.view(seq.key()).expect("live");
    assert_eq!((view.tokens.len(), view.num_computed_tokens), (8, 7));
    expected.allocated_blocks = 3;
    expected.registered_blocks = 1;
    expected.hashed_blocks = 2;
    assert_eq!(m.stats(), expected);
}

#[test]
fn each_sequence_accepts_its_own_count() {
    let mut m = manager(8);
    let seqs = [1, 2, 3].map(|token| computed(&mut m, vec![token]));
    let plan = begin(&mut m, PLENTY);
    for seq in &seqs {
        m.speculate(plan.key(), seq.key(), &[10, 11])
            .expect("ready");
    }
    let tokens = [10, 5, 6, 10, 11, 7];
    let remappings = m.commit_accepted(plan.key(), &tokens, &[2, 1, 3]);
    assert_eq!(remappings, Ok(vec![]));
    let tail = |seq: usize| m.view(seqs[seq].key()).expect("live").tokens[2..].to_vec();
    assert_eq!(
        [tail(0), tail(1), tail(2)],
        [&tokens[..2], &[6], &tokens[3..]]
    );
    assert_eq!(
        (m.stats().draft_tokens, m.stats().accepted_draft_tokens),
        (6, 3)
    );
}

#[test]
fn what_is_accepted_are_the_drafts_and_one_more() {
    let mut m = manager(8);
    let seq = computed(&mut m, vec![1]);
    let plan = begin(&mut m, PLENTY);
    m.speculate(plan.key(), seq.key(), &[10, 11])
        .expect("ready");
    for tokens in [&[][..], &[11, 10], &[10, 12, 5], &[10, 11, 5, 6]] {
        let error = Error::Accepted {
            sequence: seq.id(),
            accepted: tokens.len(),
            drafts: 2,
        };
        let answer = m.commit_accepted(plan.key(), tokens, &[tokens.len()]);
        assert_eq!(answer, Err(error));
    }
    let wrong = |expected, given| Err(Error::SampleCount { expected, given });
    let answer = m.commit_accepted(plan.key(), &[10, 11], &[1]);
    assert_eq!(answer, wrong(1, 2));
    let answer = m.commit_accepted(plan.key(), &[10, 11], &[1, 1]);
    assert_eq!(answer, wrong(1, 2));
    assert_eq!(m.commit(plan.key(), &[]), wrong(1, 0));
    let answer = m.commit_accepted(plan.key(), &[10, 11, 5], &[3]);
    assert_eq!(answer, Ok(vec![]));
}

#[test]
fn late_merges_and_copies() {
    let mut m = manager(8);
    let (a, b) = (computed(&mut m, prompt(3)), computed(&mut m, prompt(3)));
    let before = m.stats();
    let remappings = decoded(&mut m, &[&a, &b]); // both complete the same block
    assert_eq!(remappings.len(), 1);
    assert_eq!((remappings[0].sequence, remappings[0].group), (b.id(), 0));
    assert_eq!(remappings[0].index, 0);
    let mut expected = Stats {
        computed_tokens: before.computed_tokens + 2,
        registered_blocks: 1,
        merged_blocks: 1,
        hashed_blocks: before.hashed_blocks + 2,
        committed_steps: before.committed_steps + 1,
        ..before
    };
    assert_eq!(m.stats(), expected);
    decoded(&mut m, &[&a]);
    let fork = m.fork(a.key(), 5).expect("within");
    m.append(fork.key(), &[77]).expect("in no plan");
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &fork);
    commit(&mut m, plan.key());
    expected.prompt_tokens += 1;
    expected.computed_tokens += 2;
    expected.allocated_blocks += 2; // the second block of `a`, and its copy
    expected.copied_blocks += 1;
    expected.committed_steps += 2;
    assert_eq!(m.stats(), expected);
}

/// A sequence that does not read the cache computes what is evictable there: its block takes over.
#[test]
fn contents_taken_over() {
    let mut m = with(Config {
        in_flight_sharing: false,
        ..settings(8)
    });
    used(&mut m, [1]);
    let before = m.stats();
    let again = m.sequence(block_of(1), b"", false).expect("tokens");
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &again);
    assert_eq!(commit(&mut m, plan.key()), []);
    let expected = Stats {
        prompt_tokens: 8,
        computed_tokens: 8,
        allocated_blocks: 2,
        taken_over_blocks: 1,
        hashed_blocks: m.stats().hashed_blocks,
        committed_steps: 2,
        ..before
    };
    assert_eq!(m.stats(), expected);
    assert_eq!((m.usage().free, m.usage().active), (7, 1));
}

/// If all hashes are equal, only the first block has one. All of them match: their tokens are compared.
#[test]
fn contents_without_a_name() {
    let mut m = with(Config {
        hash_bits: 0,
        ..settings(16)
    });
    let first = computed(&mut m, block_of(1));
    assert_eq!(m.stats().collisions, 0);
    let second = computed(&mut m, prompt(12));
    // The second block meets the name, and what follows a block without a name has none.
    assert_eq!(m.stats().collisions, 1);
    assert_eq!(m.view(second.key()).expect("live").num_registered_blocks, 3);
    assert_eq!((m.num_prefixes(), m.cached_hashes().len()), (5, 1));
    assert_eq!(m.take_events().len(), 1);
    let pin = m.match_prefix(&prompt(12), b"").expect("short");
    assert_eq!(pin.num_tokens(), 12);
    m.check().expect("sound");
    drop((first, second, pin));
    assert_eq!(m.evict_all(), 4);
    assert_eq!(m.take_events(), [CLEARED]);
    // The name is free again.
    let _again = computed(&mut m, prompt(4));
    assert_eq!((m.stats().collisions, m.take_events().len()), (1, 1));
    m.check().expect("sound");
}

/// Without events no block hashes are computed: a prompt is hashed once, to find its node.
#[test]
fn nothing_is_hashed_for_nobody() {
    let mut m = with(Config {
        events: false,
        ..settings(600)
    });
    let first = computed(&mut m, prompt(900));
    assert_eq!(m.stats().hashed_blocks, 1);
    let second = computed(&mut m, [prompt(900), vec![5; 9]].concat());
    let stats = m.stats();
    assert_eq!((stats.hashed_blocks, stats.cached_tokens), (1, 900));
    assert_eq!(m.cached_hashes().len(), 227);
    assert_eq!(m.stats().hashed_blocks, 1 + 227);
    m.check().expect("sound");
    drop((first, second));
}

/// Where prompts part, what came last is compared; another one has to be looked up by its hash.
#[test]
fn prompts_that_part_are_hashed_unless_they_follow_the_last_one() {
    let mut m = with(Config {
        events: false,
        ..settings(64)
    });
    let mut hashed = |token: u32| {
        let before = m.stats().hashed_blocks;
        let seq = computed(&mut m, [prompt(8), vec![token; 9]].concat());
        drop(seq);
        m.stats().hashed_blocks - before
    };
    assert_eq!(hashed(1), 1, "to be found");
    assert_eq!(hashed(2), 1, "to be found: nothing parts there yet");
    assert_eq!(
        hashed(3),
        3,
        "not there by its hash, nor when it is stored; to be found"
    );
    assert_eq!(hashed(3), 0, "the last one");
    assert_eq!(hashed(1), 0, "goes straight on");
    assert_eq!(hashed(2), 1, "found by its hash");
    assert_eq!(hashed(2), 0, "is the last one now");
    m.check().expect("sound");
}

#[test]
fn forks_are_not_hashed_again() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(14));
    assert_eq!(m.stats().hashed_blocks, 4);
    for at in [4, 8, 12, 13] {
        let fork = m.fork(seq.key(), at).expect("within");
        m.check().expect("sound");
        m.reset(fork.key()).expect("in no plan");
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), &fork);
        m.rollback(plan.key()).expect("the newest");
    }
    assert_eq!(m.stats().hashed_blocks, 4);
}

#[test]
fn evictions_and_windows() {
    let mut m = with(Config {
        groups: vec![None, Some(4)],
        ..settings(6)
    });
    let seq = computed(&mut m, prompt(12));
    // Of the second group the last block is left, the others are evictable.
    let mut expected = Stats {
        prompt_tokens: 12,
        computed_tokens: 12,
        allocated_blocks: 6,
        registered_blocks: 3,
        slid_blocks: 2,
        hashed_blocks: 4,
        committed_steps: 1,
        ..Stats::default()
    };
    assert_eq!((m.stats(), m.usage().evictable), (expected, 2));
    decoded(&mut m, &[&seq]); // a row more: both of these go
    expected.computed_tokens += 1;
    expected.allocated_blocks += 2;
    expected.evicted_blocks += 2;
    expected.committed_steps += 1;
    assert_eq!((m.stats(), m.usage().evictable), (expected, 0));
}

#[test]
fn without_a_cache_nothing_is_named() {
    let mut m = with(Config {
        prefix_caching: false,
        ..settings(8)
    });
    for _ in 0..2 {
        drop(computed(&mut m, prompt(8)));
    }
    let expected = Stats {
        prompt_tokens: 16,
        computed_tokens: 16,
        allocated_blocks: 4,
        committed_steps: 2,
        ..Stats::default()
    };
    assert_eq!((m.stats(), m.usage().free), (expected, 8));
}
