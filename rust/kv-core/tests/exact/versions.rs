//! A new version of the weights: nothing that was computed before serves what comes after.

use kv_core::{
    Config, Error, Event, EvictedBy, Extend, MissReason, PastEviction, Prefill, Reserve,
    StateConfig,
};

use super::tools::{
    PLENTY, SAMPLED, begin, commit, computed, decoded, manager, prefill, prompt, sequence,
    settings, table, with,
};

fn weights_in_use<T>(plans: usize, transfers: usize) -> Result<T, Error> {
    Err(Error::WeightsInUse { plans, transfers })
}

#[test]
fn a_cached_prompt_is_computed_again() {
    let mut m = manager(8);
    drop(computed(&mut m, prompt(12)));
    assert_eq!(m.usage().evictable, 3);
    m.take_events();
    assert_eq!(m.advance_weights_version(), Ok(1));
    assert_eq!(m.weights_version(), 1);
    assert_eq!((m.usage().free, m.num_prefixes()), (8, 0));
    let cleared = Event::Cleared { weights_version: 1 };
    assert_eq!(m.take_events(), [cleared]);
    let again = sequence(&mut m, prompt(12));
    let plan = begin(&mut m, PLENTY);
    let answer = m.prefill(plan.key(), again.key(), PLENTY, None);
    let planned = Prefill::Planned {
        cached_tokens: 0,
        tokens: 12,
        samples: true,
    };
    assert_eq!(answer, Ok(planned));
    commit(&mut m, plan.key());
    let view = m.view(again.key()).expect("live");
    assert_eq!((view.num_registered_blocks, view.weights_version), (3, 1));
    assert!(!view.is_private);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn it_waits_for_steps_and_transfers() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(8));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    assert_eq!(m.advance_weights_version(), weights_in_use(1, 0));
    let next = begin(&mut m, PLENTY);
    assert_eq!(m.advance_weights_version(), weights_in_use(2, 0));
    drop(next);
    let elsewhere = sequence(&mut m, vec![7; 8]);
    let Ok(Reserve::Reserved(transfer)) = m.reserve(elsewhere.key(), 8) else {
        panic!("the pool has room");
    };
    assert_eq!(m.advance_weights_version(), weights_in_use(1, 1));
    let error = Error::WeightsInUse {
        plans: 1,
        transfers: 2,
    };
    assert_eq!(
        error.to_string(),
        "the weights cannot change while 1 plan and 2 transfers are open; end them first"
    );
    commit(&mut m, plan.key());
    assert_eq!(m.abandon(transfer.key()), Ok(()));
    assert_eq!(m.advance_weights_version(), weights_in_use(0, 1)); // it may still write
    assert_eq!((m.weights_version(), m.num_prefixes()), (0, 3));
    drop(transfer);
    assert_eq!(m.advance_weights_version(), Ok(1));
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn a_live_sequence_goes_on_and_caches_nothing() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(7));
    let before = table(&m, &seq, 0);
    assert_eq!(m.advance_weights_version(), Ok(1));
    m.take_events();
    let view = m.view(seq.key()).expect("live");
    assert!(view.is_private);
    assert_eq!((view.weights_version, view.num_registered_blocks), (0, 0));
    for _ in 0..6 {
        assert_eq!(decoded(&mut m, &[&seq]), []);
        assert_eq!(m.check(), Ok(()));
    }
    assert_eq!(table(&m, &seq, 0)[..2], before);
    assert_eq!((m.take_events(), m.num_prefixes()), (vec![], 1)); // its namespace
    // A new sequence of the same tokens computes them, and is not merged.
    let other = computed(&mut m, prompt(7));
    assert_ne!(table(&m, &other, 0)[0], before[0]);
    let pin = m.pin(seq.key()).expect("live");
    assert_eq!(pin.num_tokens(), 0);
    drop((seq, pin));
    assert_eq!(m.usage().evictable, 0);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn a_preempted_sequence_registers_again() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(8));
    assert_eq!(m.advance_weights_version(), Ok(1));
    assert_eq!(m.reset(seq.key()), Ok(()));
    let view = m.view(seq.key()).expect("live");
    assert_eq!((view.weights_version, view.is_private), (1, false));
    assert_eq!(m.usage().free, 8);
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    commit(&mut m, plan.key());
    assert_eq!(m.view(seq.key()).expect("live").num_registered_blocks, 2);
    assert_eq!(
        m.match_prefix(&prompt(8), b"").expect("short").num_tokens(),
        8
    );
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn forks_go_on_over_the_same_blocks() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(6));
    assert_eq!(m.advance_weights_version(), Ok(1));
    let fork = m.fork(seq.key(), 6).expect("at rest");
    assert!(m.view(fork.key()).expect("live").is_private);
    assert_eq!(table(&m, &fork, 0), table(&m, &seq, 0));
    // Both append one token: the first to write copies the partial block.
    m.append(fork.key(), &[5]).expect("at rest");
    decoded(&mut m, &[&seq, &fork]);
    let (own, other) = (table(&m, &seq, 0), table(&m, &fork, 0));
    assert_eq!(own[0], other[0]);
    assert_ne!(own[1], other[1]);
    decoded(&mut m, &[&seq, &fork]);
    decoded(&mut m, &[&seq, &fork]);
    assert_eq!(m.stats().copied_blocks, 1);
    assert_eq!((m.stats().registered_blocks, m.num_prefixes()), (1, 1));
    assert_eq!(m.check(), Ok(()));
}

/// The last token of a full hit is computed again: its block is written now, so no one else may hold it.
#[test]
fn a_full_hit_writes_its_last_block_on_a_copy() {
    let mut m = manager(8);
    let first = computed(&mut m, prompt(8));
    let hit = sequence(&mut m, prompt(8));
    assert_eq!(m.reuse_cached(hit.key()), Ok(7));
    let pinned = m.match_prefix(&prompt(8), b"").expect("short");
    assert_eq!(m.advance_weights_version(), Ok(1));
    drop(first);
    let before = table(&m, &hit, 0);
    let plan = begin(&mut m, PLENTY);
    assert_eq!(m.decode(plan.key(), &[hit.key()], 0), Ok(vec![]));
    assert_eq!(m.copies(plan.key()).expect("open").len(), 1);
    m.commit(plan.key(), &[SAMPLED]).expect("the oldest");
    let after = table(&m, &hit, 0);
    assert_eq!(after[0], before[0]);
    assert_ne!(after[1], before[1]);
    drop(pinned);
    assert_eq!(m.usage().active, 2);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn old_pins_hold_their_blocks_and_are_attached_no_more() {
    let mut m = manager(8);
    drop(computed(&mut m, prompt(8)));
    let pin = m.match_prefix(&prompt(8), b"").expect("short");
    assert_eq!(m.advance_weights_version(), Ok(1));
    assert_eq!((m.usage().pinned, m.usage().free), (2, 6));
    let seq = sequence(&mut m, prompt(8));
    let error = Error::OldPin {
        tokens: 8,
        pin_version: 0,
        weights_version: 1,
    };
    assert_eq!(m.attach(seq.key(), &pin), Err(error.clone()));
    assert_eq!(
        error.to_string(),
        "version 0 of the weights computed this pin of 8 tokens, and they are at version 1; match the prefix again"
    );
    drop(pin);
    assert_eq!(m.usage().free, 8);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn evictions_of_earlier_weights_are_not_handed_out() {
    let mut m = with(Config {
        keep_evicted: true,
        ..settings(2)
    });
    drop(computed(&mut m, prompt(8)));
    drop(computed(&mut m, vec![7; 8])); // evicts
    assert_eq!(m.advance_weights_version(), Ok(1));
    assert_eq!(m.take_evicted(), []);
}

#[test]
fn a_miss_says_that_the_weights_have_changed() {
    let mut m = with(Config {
        explain: true,
        ..settings(8)
    });
    drop(computed(&mut m, prompt(8)));
    let goes_on = computed(&mut m, vec![7; 8]);
    assert_eq!(m.advance_weights_version(), Ok(1));
    let mut reason = |tokens: &[u32]| {
        let explanation = m.explain(tokens, b"").expect("short");
        explanation.miss.expect("nothing is cached").reason
    };
    let changed = |num_blocks_since| {
        MissReason::Evicted(Some(PastEviction {
            by: EvictedBy::WeightsChanged,
            num_blocks_since,
        }))
    };
    assert_eq!(reason(&prompt(8)), changed(4));
    assert_eq!(reason(&[7; 8]), changed(2)); // of the private sequence
    assert_eq!(reason(&[8; 8]), MissReason::New);
    drop(goes_on);
}

#[test]
fn slots_without_tokens_belong_to_the_new_weights() {
    let mut m = manager(4);
    let seq = sequence(&mut m, prompt(4));
    m.extend(seq.key(), 4).expect("at rest");
    assert_eq!(m.advance_weights_version(), Ok(1));
    assert_eq!(m.publish(seq.key(), 4, &[]), Ok(vec![]));
    assert_eq!(m.view(seq.key()).expect("live").num_registered_blocks, 1);
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn windows_of_a_private_sequence_slide() {
    let mut m = with(Config {
        groups: vec![None, Some(5)],
        ..settings(16)
    });
    let seq = computed(&mut m, prompt(7));
    assert_eq!(m.advance_weights_version(), Ok(1));
    for _ in 0..10 {
        decoded(&mut m, &[&seq]);
        assert_eq!(m.check(), Ok(()));
    }
    let held = |group| {
        let table = table(&m, &seq, group);
        table.iter().flatten().count()
    };
    assert_eq!((held(0), held(1)), (5, 3));
}

/// Snapshots are gone, and a private sequence keeps none.
#[test]
fn states_follow_the_same_rule() {
    let state = StateConfig {
        blocks: 2,
        cadence: 0,
        min_tokens: 4,
    };
    let mut m = with(Config {
        state: Some(state),
        ..settings(16)
    });
    let seq = computed(&mut m, prompt(9));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    commit(&mut m, plan.key());
    assert_eq!(m.state_usage().snapshots, 1);
    assert_eq!(m.advance_weights_version(), Ok(1));
    assert_eq!((m.state_usage().snapshots, m.state_usage().blocks), (0, 0));
    let before = m.usage().active;
    for _ in 0..12 {
        decoded(&mut m, &[&seq]);
        assert_eq!(m.check(), Ok(()));
    }
    assert_eq!(m.state_usage().snapshots, 0);
    assert_eq!(m.usage().active, before + 3);
    drop(seq);
    assert_eq!(m.usage().free, 16);
    let again = computed(&mut m, prompt(9));
    assert_eq!(m.state_usage().snapshots, 1);
    drop(again);
}

#[test]
fn blocks_registered_ahead_of_a_state_are_released() {
    let state = StateConfig {
        blocks: 1,
        cadence: 0,
        min_tokens: 100,
    };
    let mut m = with(Config {
        state: Some(state),
        ..settings(16)
    });
    drop(computed(&mut m, prompt(13)));
    // Its blocks are those of the cache, its state is computed again: up to the end of the first block.
    let seq = sequence(&mut m, prompt(13));
    let plan = begin(&mut m, 4);
    let answer = m.prefill(plan.key(), seq.key(), 4, None);
    assert!(matches!(answer, Ok(Prefill::Planned { tokens: 4, .. })));
    commit(&mut m, plan.key());
    let view = m.view(seq.key()).expect("live");
    assert_eq!(
        (view.num_computed_tokens, view.num_registered_blocks),
        (4, 3)
    );
    assert_eq!(m.advance_weights_version(), Ok(1));
    assert_eq!(table(&m, &seq, 0).len(), 1);
    // The blocks after it are new, and nothing is copied.
    let Ok(Extend::Extended { blocks, copies }) = m.extend(seq.key(), 5) else {
        panic!("the pool has room");
    };
    assert_eq!((blocks.len(), copies.len()), (2, 0));
    assert_eq!(m.check(), Ok(()));
}
