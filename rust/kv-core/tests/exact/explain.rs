//! Why a prompt is not cached: one script for each reason, and for the rules of privacy.

use kv_core::{
    BlockManager, Config, EvictedBy, Eviction, Explanation, Miss, MissReason, PastEviction,
    Prefill, Reserve, SeqHandle,
};

use super::tools::{
    PLENTY, begin, block_of, commit, computed, prefill, prompt, sequence, settings, used, with,
};

fn manager(num_blocks: usize) -> BlockManager {
    with(Config {
        explain: true,
        ..settings(num_blocks)
    })
}

fn explain(m: &mut BlockManager, tokens: &[u32]) -> Explanation {
    m.explain(tokens, b"").expect("a short namespace")
}

/// Tokens found in the pool, in flight and copied, and why not more.
fn parts(explanation: Explanation) -> ([usize; 3], Option<(usize, MissReason)>) {
    let tokens = [
        explanation.num_pool_tokens,
        explanation.num_in_flight_tokens,
        explanation.num_copied_tokens,
    ];
    let miss = explanation.miss.map(|miss| (miss.position, miss.reason));
    (tokens, miss)
}

fn evicted(by: EvictedBy, num_blocks_since: u64) -> MissReason {
    MissReason::Evicted(Some(PastEviction {
        by,
        num_blocks_since,
    }))
}

const LRU: EvictedBy = EvictedBy::Policy(Eviction::Lru);

/// A prompt of `common` tokens of `prompt`, then others up to `len`.
fn branch(common: u32, len: u32) -> Vec<u32> {
    (0..common).chain(500 + common..500 + len).collect()
}

#[test]
fn a_new_prompt() {
    let mut m = manager(16);
    let new = |position| ([position, 0, 0], Some((position, MissReason::New)));
    assert_eq!(parts(explain(&mut m, &prompt(8))), new(0));
    drop(computed(&mut m, prompt(8)));
    // Nothing in common, and a cached prefix that nothing follows.
    assert_eq!(parts(explain(&mut m, &[7; 8])), new(0));
    assert_eq!(parts(explain(&mut m, &prompt(12))), new(8));
}

#[test]
fn a_hit_has_no_reason() {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(9)));
    assert_eq!(parts(explain(&mut m, &prompt(8))), ([7, 0, 0], None));
    assert_eq!(parts(explain(&mut m, &prompt(9))), ([8, 0, 0], None));
    assert_eq!(parts(explain(&mut m, &branch(8, 11))), ([8, 0, 0], None));
}

#[test]
fn the_first_token_that_differs() {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(12)));
    let diverged = |position: usize, tokens: &[u32]| MissReason::Diverged {
        position,
        tokens: tokens.to_vec(),
    };
    let cases = [
        (1, [0, 0, 1], (0, diverged(1, &[1, 2, 3]))),
        (4, [4, 0, 0], (4, diverged(4, &[4, 5, 6, 7]))),
        (7, [4, 0, 3], (4, diverged(7, &[7]))),
        (8, [8, 0, 0], (8, diverged(8, &[8, 9, 10, 11]))),
        (9, [8, 0, 1], (8, diverged(9, &[9, 10, 11]))),
    ];
    for (common, tokens, miss) in cases {
        let answer = parts(explain(&mut m, &branch(common, 12)));
        assert_eq!(answer, (tokens, Some(miss)), "{common}");
    }
}

#[test]
fn the_nearest_of_several_is_named() {
    let mut m = manager(32);
    for common in [1, 3, 2] {
        drop(computed(&mut m, branch(common, 4)));
    }
    let miss = explain(&mut m, &prompt(4)).miss.expect("new");
    let tokens = vec![503];
    assert_eq!(
        miss.reason,
        MissReason::Diverged {
            position: 3,
            tokens
        }
    );
}

#[test]
fn an_eviction_says_by_what_and_how_long_ago() {
    let mut m = manager(4);
    used(&mut m, [1, 2, 3, 4]);
    used(&mut m, [5, 6]); // evict 1, then 2
    let mut reason = |name| {
        explain(&mut m, &block_of(name))
            .miss
            .map(|miss| miss.reason)
    };
    assert_eq!(reason(1), Some(evicted(LRU, 2)));
    assert_eq!(reason(2), Some(evicted(LRU, 1)));
    assert_eq!(reason(3), None);
    m.evict_all();
    let mut reason = |name| {
        explain(&mut m, &block_of(name))
            .miss
            .map(|miss| miss.reason)
    };
    assert_eq!(reason(6), Some(evicted(EvictedBy::EvictAll, 1)));
    assert_eq!(reason(3), Some(evicted(EvictedBy::EvictAll, 4)));
    // As many are remembered as the pool has blocks.
    assert_eq!(reason(2), Some(MissReason::New));
}

#[test]
fn another_policy_and_evictions_ahead_of_need() {
    let mut m = with(Config {
        explain: true,
        eviction: Eviction::TwoQueue,
        ..settings(4)
    });
    used(&mut m, [1, 2]);
    drop(m.evict(1));
    let reason = explain(&mut m, &block_of(1)).miss.map(|miss| miss.reason);
    assert_eq!(
        reason,
        Some(evicted(EvictedBy::Policy(Eviction::TwoQueue), 1))
    );
}

#[test]
fn a_block_that_lost_its_kv_before_its_descendants() {
    let mut m = with(Config {
        explain: true,
        eviction: Eviction::TwoQueue,
        ..settings(4)
    });
    super::tools::lose_the_head(&mut m);
    let miss = explain(&mut m, &prompt(8)).miss.expect("the head is gone");
    let two_queues = EvictedBy::Policy(Eviction::TwoQueue);
    assert_eq!((miss.position, miss.reason), (0, evicted(two_queues, 1)));
}

#[test]
fn evicted_and_cached_again_is_a_hit() {
    let mut m = manager(2);
    used(&mut m, [1, 2, 3, 1]);
    assert_eq!(explain(&mut m, &block_of(1)).miss, None);
    used(&mut m, [4, 5]);
    let reason = explain(&mut m, &block_of(1)).miss.map(|miss| miss.reason);
    assert_eq!(reason, Some(evicted(LRU, 1))); // the last time
}

#[test]
fn another_sequence_computes_it_in_this_step() {
    let mut m = manager(16);
    let first = sequence(&mut m, prompt(9));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &first);
    assert_eq!(parts(explain(&mut m, &prompt(9))), ([0, 8, 0], None));
    let second = sequence(&mut m, prompt(9));
    prefill(&mut m, plan.key(), &second);
    commit(&mut m, plan.key());
    let view = m.view(second.key()).expect("live");
    assert_eq!((view.num_cached_tokens, view.num_in_flight_tokens), (8, 8));
    assert_eq!((view.num_copied_tokens, view.miss), (0, None));
    assert_eq!(parts(explain(&mut m, &prompt(9))), ([8, 0, 0], None));
}

#[test]
fn another_sequence_has_not_computed_it_yet() {
    let mut m = manager(16);
    let first = sequence(&mut m, prompt(12));
    let not_yet = |position| Some((position, MissReason::NotYetComputed));
    // A sequence that waits computes nothing yet.
    let waiting = explain(&mut m, &prompt(12)).miss.map(|miss| miss.reason);
    assert_eq!(waiting, Some(MissReason::New));
    let plan = begin(&mut m, PLENTY);
    let answer = m.prefill(plan.key(), first.key(), 4, None);
    assert!(matches!(answer, Ok(Prefill::Planned { tokens: 4, .. })));
    assert_eq!(parts(explain(&mut m, &prompt(12))), ([0, 4, 0], not_yet(4)));
    commit(&mut m, plan.key());
    assert_eq!(parts(explain(&mut m, &prompt(12))), ([4, 0, 0], not_yet(4)));
    drop(first);
    let gone = explain(&mut m, &prompt(12)).miss.map(|miss| miss.reason);
    assert_eq!(gone, Some(MissReason::New));
}

#[test]
fn a_transfer_is_to_fill_it() {
    let mut m = manager(16);
    let seq = sequence(&mut m, prompt(9));
    let Ok(Reserve::Reserved(transfer)) = m.reserve(seq.key(), 8) else {
        panic!("blocks are free");
    };
    let loading = Some((0, MissReason::Loading));
    assert_eq!(parts(explain(&mut m, &prompt(9))), ([0; 3], loading));
    m.complete(transfer.key(), 2).expect("open");
    assert_eq!(parts(explain(&mut m, &prompt(9))), ([8, 0, 0], None));
}

#[test]
fn the_cache_is_not_read() {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(8)));
    let reader = m.sequence(prompt(8), b"", false).expect("tokens");
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &reader);
    let disabled = Miss {
        position: 0,
        reason: MissReason::ReadsDisabled,
    };
    assert_eq!(m.view(reader.key()).expect("live").miss, Some(&disabled));
    let mut m = with(Config {
        explain: true,
        prefix_caching: false,
        ..settings(16)
    });
    assert_eq!(explain(&mut m, &prompt(8)).miss, Some(disabled));
}

#[test]
fn a_prompt_below_one_block() {
    let mut m = manager(16);
    let short = Some((0, MissReason::BelowOneBlock));
    assert_eq!(parts(explain(&mut m, &prompt(3))), ([0; 3], short.clone()));
    drop(computed(&mut m, prompt(4)));
    assert_eq!(parts(explain(&mut m, &prompt(3))), ([0, 0, 2], short));
    assert_eq!(parts(explain(&mut m, &[])).0, [0; 3]);
}

fn miss_of(m: &BlockManager, seq: &SeqHandle) -> Option<Miss> {
    m.view(seq.key()).expect("live").miss.cloned()
}

#[test]
fn a_prefill_records_why_it_computes() {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(12)));
    let expected = explain(&mut m, &branch(9, 12));
    let seq = computed(&mut m, branch(9, 12));
    assert_eq!(miss_of(&m, &seq), expected.miss);
    let view = m.view(seq.key()).expect("live");
    assert_eq!((view.num_cached_tokens, view.num_copied_tokens), (9, 1));
    // Its own later steps do not change that, and a hit has none.
    super::tools::decoded(&mut m, &[&seq]);
    assert_eq!(miss_of(&m, &seq), expected.miss);
    let hit = computed(&mut m, prompt(12));
    assert_eq!(miss_of(&m, &hit), None);
}

#[test]
fn off_it_records_nothing_and_answers_without_evictions() {
    let mut m = with(settings(2));
    used(&mut m, [1, 2, 3]);
    let seq = sequence(&mut m, block_of(9));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    assert_eq!(miss_of(&m, &seq), None);
    m.rollback(plan.key()).expect("the newest");
    let reason = explain(&mut m, &block_of(1)).miss.map(|miss| miss.reason);
    assert_eq!(reason, Some(MissReason::New));
}

/// An explanation reads: no block becomes more recently used, no block is held.
#[test]
fn asking_changes_nothing() {
    let mut m = manager(8);
    used(&mut m, [1, 2, 3]);
    let before = (m.usage(), m.queued(), m.snapshot());
    for name in 0..5 {
        explain(&mut m, &block_of(name));
    }
    assert_eq!((m.usage(), m.queued(), m.snapshot()), before);
    m.check().expect("sound");
}

#[test]
fn a_namespace_that_is_too_long() {
    let mut m = manager(8);
    assert!(m.explain(&prompt(4), &vec![0; 65_537]).is_err());
}

/// Managers differ in another namespace alone. Their answers to 1,000 prompts are equal.
#[test]
fn nothing_of_another_namespace_is_told() {
    let secret = |m: &mut BlockManager, tokens: Vec<u32>, keep: bool| -> Option<SeqHandle> {
        let seq = m.sequence(tokens, b"victim", true).expect("tokens");
        let plan = begin(m, PLENTY);
        prefill(m, plan.key(), &seq);
        commit(m, plan.key());
        keep.then_some(seq)
    };
    // The victim is absent, has the attacker's own prompts, longer ones, or others; it runs or has ended.
    type Victim = Vec<(Vec<u32>, bool)>;
    let victims: Vec<Victim> = vec![
        vec![],
        vec![(prompt(12), false)],
        vec![(prompt(40), true), (branch(3, 30), false)],
        vec![(vec![7; 64], true), (branch(9, 21), false)],
    ];
    let answers = victims.into_iter().map(|victim| {
        let mut m = manager(256);
        let mut held = Vec::new();
        for (tokens, keep) in victim.clone() {
            held.push(secret(&mut m, tokens, keep));
        }
        drop(computed(&mut m, branch(6, 16)));
        if !victim.is_empty() {
            let (evicted, pin) = m.evict(1); // its oldest block
            assert_eq!((evicted.len(), pin.num_blocks()), (1, 1));
        }
        let open = m.sequence(prompt(24), b"victim", true).expect("tokens");
        let plan = begin(&mut m, PLENTY);
        if !victim.is_empty() {
            prefill(&mut m, plan.key(), &open);
        }
        let probes = (0..1_000_u32).map(|probe| match probe % 3 {
            0 => branch(probe / 3 % 13, 4 + probe % 29),
            1 => prompt(1 + probe % 41),
            _ => vec![probe % 10; 1 + probe as usize % 70],
        });
        let probes: Vec<Vec<u32>> = probes.collect();
        let mut answers: Vec<Explanation> =
            probes.iter().map(|probe| explain(&mut m, probe)).collect();
        m.rollback(plan.key()).expect("the newest");
        // And as a request of the attacker's own.
        for tokens in &probes[..50] {
            let seq = m.sequence(tokens.clone(), b"", true).expect("tokens");
            let plan = begin(&mut m, PLENTY);
            prefill(&mut m, plan.key(), &seq);
            let miss = miss_of(&m, &seq);
            answers.push(Explanation {
                miss,
                ..Explanation::default()
            });
            m.rollback(plan.key()).expect("the newest");
        }
        answers
    });
    let answers: Vec<Vec<Explanation>> = answers.collect();
    for other in &answers[1..] {
        let mut pairs = other.iter().zip(&answers[0]);
        assert_eq!(pairs.find(|(one, other)| one != other), None);
    }
    // The probes are not all alike.
    let hits = answers[0]
        .iter()
        .filter(|answer| answer.num_pool_tokens > 0);
    assert!(hits.count() > 20);
}

#[test]
fn evictions_of_another_namespace_are_not_counted() {
    let mut m = manager(8);
    used(&mut m, [1, 2]);
    let others = |m: &mut BlockManager, count: u32| {
        for name in 0..count {
            let seq = m
                .sequence(block_of(100 + name), b"victim", true)
                .expect("tokens");
            let plan = begin(m, PLENTY);
            prefill(m, plan.key(), &seq);
            commit(m, plan.key());
        }
    };
    others(&mut m, 8); // evict 1 and 2
    let answer = explain(&mut m, &block_of(1)).miss.map(|miss| miss.reason);
    assert_eq!(answer, Some(evicted(LRU, 2)));
    others(&mut m, 40); // and then their own
    let later = explain(&mut m, &block_of(1)).miss.map(|miss| miss.reason);
    assert_eq!(later, answer);
}

/// A namespace's evictions are forgotten for its own later ones, or for those of many others.
#[test]
fn the_history_is_bounded() {
    let mut m = manager(2);
    used(&mut m, [1, 2, 3]);
    for number in 0..40_u8 {
        for name in [1, 2] {
            let seq = m.sequence(block_of(name), &[number], true).expect("tokens");
            let plan = begin(&mut m, PLENTY);
            prefill(&mut m, plan.key(), &seq);
            commit(&mut m, plan.key());
        }
    }
    let mut is_known = |namespace: &[u8]| {
        let miss = m.explain(&block_of(1), namespace).expect("short").miss;
        matches!(miss.expect("gone").reason, MissReason::Evicted(Some(_)))
    };
    assert!(!is_known(b"") && !is_known(&[0]) && is_known(&[10]) && is_known(&[38]));
}
