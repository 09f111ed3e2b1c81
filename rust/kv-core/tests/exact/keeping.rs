//! Sequences of which only a beginning stays cached: an answer of which the next turn repeats a part.

use kv_core::{BlockState, Config, Error};

use super::tools::{
    begin, commit, computed, decoded, given_up, manager, prefill, prompt, removed, sequence,
    settings, used, with,
};

#[test]
fn blocks_after_the_kept_tokens_are_free_at_once() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(16));
    m.take_events();
    m.free_keeping(seq.key(), 11).expect("live");
    let usage = m.usage();
    assert_eq!((usage.free, usage.evictable), (6, 2));
    assert_eq!(
        (m.stats().discarded_blocks, m.stats().evicted_blocks),
        (2, 0)
    );
    assert_eq!(removed(&m.take_events()).len(), 2);
    let pin = m.match_prefix(&prompt(16), b"").expect("valid");
    assert_eq!(pin.num_tokens(), 8);
    assert_eq!(
        m.free_keeping(seq.key(), 0),
        Err(Error::FreedSequence { sequence: 1 })
    );
    m.check().expect("sound");
}

#[test]
fn with_all_of_its_tokens_it_leaves_all_cached_and_with_none_nothing() {
    for (kept, evictable) in [(100, 4), (16, 4), (15, 3), (3, 0), (0, 0)] {
        let mut m = manager(8);
        let seq = computed(&mut m, prompt(16));
        m.free_keeping(seq.key(), kept).expect("live");
        assert_eq!(m.usage().evictable, evictable, "{kept} tokens");
        m.check().expect("sound");
        drop(computed(&mut m, prompt(16)));
        assert_eq!(m.usage().evictable, 4);
        m.check().expect("sound");
    }
}

#[test]
fn blocks_that_others_hold_stay_cached() {
    let mut m = manager(12);
    let first = computed(&mut m, prompt(16));
    let pin = m.match_prefix(&prompt(8), b"").expect("valid");
    let same = computed(&mut m, prompt(13));
    m.free_keeping(first.key(), 0).expect("live");
    assert_eq!(m.stats().discarded_blocks, 1); // of four: the fork has three
    assert_eq!(m.usage().active, 4);
    drop(same);
    drop(pin);
    let usage = m.usage();
    assert_eq!((usage.free, usage.evictable), (9, 3));
    m.check().expect("sound");
}

#[test]
fn an_open_step_ends_first() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(15));
    let plan = begin(&mut m, 100);
    m.decode(plan.key(), &[seq.key()], 0).expect("decodes");
    m.free_keeping(seq.key(), 4).expect("live");
    assert_eq!(m.usage().active, 4);
    commit(&mut m, plan.key());
    let usage = m.usage();
    assert_eq!((usage.free, usage.evictable), (7, 1));
    m.check().expect("sound");
}

#[test]
fn what_continues_a_discarded_block_is_found_again_once_that_is_computed() {
    let mut m = manager(12);
    let first = computed(&mut m, prompt(8));
    let longer = computed(&mut m, prompt(16));
    drop(longer);
    m.drain_deferred();
    // The second block goes: the other one does not hold it any more, but two cached blocks continue it.
    m.free_keeping(first.key(), 4).expect("live");
    assert_eq!(m.usage().evictable, 3);
    let pin = m.match_prefix(&prompt(16), b"").expect("valid");
    assert_eq!(pin.num_tokens(), 4);
    drop(pin);
    drop(computed(&mut m, prompt(16)));
    let pin = m.match_prefix(&prompt(16), b"").expect("valid");
    assert_eq!(pin.num_tokens(), 16);
    m.check().expect("sound");
}

#[test]
fn discarded_blocks_are_allocated_before_any_cached_one() {
    let mut m = manager(8);
    used(&mut m, [1, 2, 3]);
    let seq = computed(&mut m, prompt(12));
    let answer = decoded(&mut m, &[&seq]);
    assert_eq!(answer, []);
    m.free_keeping(seq.key(), 4).expect("live");
    assert_eq!(given_up(&mut m, 4, &[1, 2, 3]), []);
    assert_eq!(m.state(0), Ok(BlockState::Evictable));
}

#[test]
fn a_preempted_sequence_finds_its_blocks_until_it_ends() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(16));
    m.reset(seq.key()).expect("at rest");
    assert_eq!(m.usage().evictable, 4);
    let plan = begin(&mut m, 100);
    prefill(&mut m, plan.key(), &seq);
    commit(&mut m, plan.key());
    assert_eq!(m.view(seq.key()).expect("live").num_cached_tokens, 16);
    m.free_keeping(seq.key(), 8).expect("live");
    assert_eq!(m.usage().evictable, 2);
}

#[test]
fn windows_and_several_layer_groups() {
    let mut m = with(Config {
        groups: vec![None, Some(4)],
        ..settings(16)
    });
    let seq = computed(&mut m, prompt(16));
    m.take_events();
    m.free_keeping(seq.key(), 8).expect("live");
    m.check().expect("sound");
    assert_eq!(removed(&m.take_events()).len(), 2);
    assert_eq!(m.usage().evictable, 4); // also of what the window had passed, two of each are left
    let again = sequence(&mut m, prompt(16));
    let plan = begin(&mut m, 100);
    prefill(&mut m, plan.key(), &again);
    commit(&mut m, plan.key());
    m.check().expect("sound");
}
