//! Handles, keys and pins: their values, and that no block in use is released.

use kv_core::{BlockManager, BlockState, Error, PoolUsage, SeqHandle};

use super::tools::{PLENTY, begin, computed, manager, prefill, prompt, sequence, table};

fn usage(m: &mut BlockManager) -> [usize; 4] {
    let PoolUsage {
        free,
        evictable,
        active,
        pinned,
        ..
    } = m.usage();
    [free, evictable, active, pinned]
}

#[test]
fn a_pin_covers_whole_blocks() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(10));
    let pin = m.match_prefix(&prompt(7), b"").expect("short");
    assert_eq!((pin.num_tokens(), pin.num_blocks()), (4, 1));
    let own = m.pin(seq.key()).expect("live");
    assert_eq!((own.num_tokens(), own.num_blocks()), (8, 2));
    let ids: Vec<_> = own.blocks().map(|block| Some(block.get())).collect();
    assert_eq!(ids, table(&m, &seq, 0)[..2]);
    let nothing = m.match_prefix(&[5, 5, 5, 5], b"").expect("short");
    assert_eq!((nothing.num_tokens(), nothing.num_blocks()), (0, 0));
    let nothing = m.match_prefix(&prompt(8), b"unused").expect("short");
    assert_eq!((nothing.num_tokens(), nothing.num_blocks()), (0, 0));
}

/// Without a recorder a pin releases its blocks itself.
#[test]
fn a_pin_lets_go_of_what_it_held_alone() {
    let mut m = manager(4);
    let seq = computed(&mut m, prompt(10));
    let pins = [(); 2].map(|()| m.pin(seq.key()).expect("live"));
    assert_eq!(usage(&mut m), [1, 0, 3, 0]);
    let first = table(&m, &seq, 0)[0].expect("a block");
    assert_eq!((m.refs(first), m.seq_refs(first)), (Ok(3), Ok(1)));
    let [one, other] = pins;
    drop(one);
    assert_eq!((m.refs(first), m.seq_refs(first)), (Ok(2), Ok(1)));
    drop(seq);
    assert_eq!(usage(&mut m), [2, 0, 0, 2]);
    assert_eq!(m.state(first), Ok(BlockState::Pinned));
    drop(other);
    assert_eq!(usage(&mut m), [2, 2, 0, 0]);
    assert_eq!(m.state(first), Ok(BlockState::Evictable));
    m.check().expect("sound");
}

#[test]
fn a_pin_leaves_alone_what_a_sequence_holds() {
    let mut m = manager(4);
    let seq = computed(&mut m, prompt(10));
    drop(m.pin(seq.key()).expect("live"));
    assert_eq!(usage(&mut m), [1, 0, 3, 0]);
    m.check().expect("sound");
    let block = table(&m, &seq, 0)[0].expect("a block");
    assert_eq!(m.state(block), Ok(BlockState::Active));
    drop(seq);
    assert_eq!(usage(&mut m), [2, 2, 0, 0]);
}

#[test]
fn attached_tokens_are_computed_and_not_hashed_again() {
    let mut m = manager(8);
    drop(computed(&mut m, prompt(8)));
    let pin = m.match_prefix(&prompt(8), b"").expect("short");
    let hashed = m.stats().hashed_blocks;
    let seq = sequence(&mut m, prompt(14));
    m.attach(seq.key(), &pin).expect("its prefix");
    let view = m.view(seq.key()).expect("live");
    assert_eq!((view.num_computed_tokens, view.num_cached_tokens), (8, 8));
    assert_eq!(view.num_registered_blocks, 2);
    let error = Error::NotFresh { blocks: 2 };
    assert_eq!(m.attach(seq.key(), &pin), Err(error));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    m.commit(plan.key(), &[1]).expect("one row");
    m.check().expect("sound");
    assert_eq!(m.stats().hashed_blocks, hashed + 1);
    // The last token of a sequence is left to compute.
    let whole = sequence(&mut m, prompt(8));
    m.attach(whole.key(), &pin).expect("its prefix");
    assert_eq!(m.view(whole.key()).expect("live").num_computed_tokens, 7);
}

#[test]
fn a_pin_fits_its_own_tokens_and_namespace() {
    let mut m = manager(8);
    let owner = computed(&mut m, prompt(8));
    let pin = m.pin(owner.key()).expect("live");
    let short = sequence(&mut m, prompt(7));
    let other = m.sequence(prompt(8), b"tenant", true).expect("tokens");
    let differs = sequence(&mut m, vec![0, 1, 2, 3, 4, 5, 6, 8]);
    let early = sequence(&mut m, vec![9, 1, 2, 3, 4, 5, 6, 7]);
    for (seq, len) in [(&short, 7), (&other, 8), (&differs, 8), (&early, 8)] {
        let error = Error::PinMismatch {
            pin_tokens: 8,
            sequence_tokens: len,
        };
        assert_eq!(m.attach(seq.key(), &pin), Err(error));
    }
    m.check().expect("sound");
}

#[test]
fn a_planned_sequence_takes_no_pin() {
    let mut m = manager(8);
    let owner = computed(&mut m, prompt(8));
    let pin = m.pin(owner.key()).expect("live");
    let planned = sequence(&mut m, prompt(8));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &planned);
    let sequence = planned.id();
    assert_eq!(
        m.attach(planned.key(), &pin),
        Err(Error::InPlan { sequence })
    );
    m.check().expect("sound");
}

#[test]
fn keys_of_another_manager_are_foreign() {
    let (mut m, mut other) = (manager(4), manager(4));
    let seq = sequence(&mut other, prompt(4));
    let plan = begin(&mut other, PLENTY);
    let pin = other.match_prefix(&prompt(4), b"").expect("short");
    let mine = sequence(&mut m, prompt(4));
    let what = |what, id| Error::WrongManager { what, id };
    assert_eq!(m.free(seq.key()), Err(what("sequence", 1)));
    assert_eq!(m.rollback(plan.key()), Err(what("plan", 1)));
    let error = Error::PinOfAnotherManager { tokens: 0 };
    assert_eq!(m.attach(mine.key(), &pin), Err(error));
}

/// Of the same slot and the same number, ready to decode as well.
#[test]
fn a_step_decodes_no_sequence_of_another_manager() {
    let (mut m, mut other) = (manager(4), manager(4));
    let [mine, theirs] = [&mut m, &mut other].map(|m| computed(m, prompt(3)));
    assert_eq!(mine.id(), theirs.id());
    let plan = begin(&mut m, PLENTY);
    let what = "sequence";
    let error = Error::WrongManager { what, id: 1 };
    assert_eq!(m.decode(plan.key(), &[theirs.key()], 0), Err(error));
    assert_eq!(m.decode(plan.key(), &[mine.key()], 0), Ok(vec![]));
    m.check().expect("sound");
}

/// A key whose slot has another tenant by now.
#[test]
fn a_key_outlives_its_sequence_without_harm() {
    let mut m = manager(4);
    let gone = sequence(&mut m, prompt(4));
    let (key, id) = (gone.key(), gone.id());
    drop(gone);
    let next = sequence(&mut m, prompt(6));
    assert_eq!((id, next.id()), (1, 2));
    let error = Error::FreedSequence { sequence: 1 };
    assert_eq!(m.view(key).err(), Some(error.clone()));
    assert_eq!(m.append(key, &[1]), Err(error.clone()));
    assert_eq!(m.free(key), Err(error));
    assert_eq!(m.view(next.key()).expect("live").tokens, prompt(6));
}

/// Queries that change nothing see dropped handles once the manager has drained the deferred releases.
#[test]
fn settling_does_what_was_left() {
    let mut m = manager(4);
    let seq = sequence(&mut m, prompt(4));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    assert_eq!(m.num_prefixes(), 2, "the namespace and the block");
    drop(plan);
    assert_eq!((m.num_prefixes(), m.stats().rolled_back_steps), (2, 0));
    m.drain_deferred();
    assert_eq!((m.num_prefixes(), m.stats().rolled_back_steps), (1, 1));
    let key = seq.key();
    drop(seq);
    assert!(m.view(key).is_ok());
    m.drain_deferred();
    assert!(m.view(key).is_err());
    assert_eq!(m.num_prefixes(), 0);
}

#[test]
fn a_step_that_was_lost_takes_those_on_top_with_it() {
    let mut m = manager(4);
    let seqs: [SeqHandle; 2] = [0, 10].map(|at| sequence(&mut m, vec![at]));
    let plans = seqs.each_ref().map(|seq| {
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), seq);
        plan
    });
    let [first, second] = plans;
    drop(first);
    m.drain_deferred();
    let error = Error::PlanClosed { plan: 2 };
    assert_eq!(m.plan_view(second.key()), Err(error));
    assert_eq!(m.stats().rolled_back_steps, 2);
    assert_eq!(usage(&mut m), [4, 0, 0, 0]);
}

#[test]
fn the_newest_is_planned_into_and_the_oldest_is_committed() {
    let mut m = manager(4);
    let seq = sequence(&mut m, prompt(3));
    let [first, second] = [(); 2].map(|()| begin(&mut m, PLENTY));
    let order = |plan, first| Error::PlanOrder { plan, first };
    let (old, new) = (first.key(), second.key());
    assert_eq!(m.decode(old, &[], 0), Err(order(1, 2)));
    assert_eq!(m.prefill(old, seq.key(), 1, None), Err(order(1, 2)));
    assert_eq!(m.cancel(old, seq.key()), Err(order(1, 2)));
    assert_eq!(m.rollback(old), Err(order(1, 2)));
    assert_eq!(m.commit(new, &[]), Err(order(2, 1)));
    let answer = m.commit_accepted(new, &[], &[]);
    assert_eq!(answer, Err(order(2, 1)));
    let error = Error::NotPlanned { sequence: 1 };
    assert_eq!(m.cancel(new, seq.key()), Err(error));
    assert_eq!(m.commit(old, &[]), Ok(vec![]));
    assert_eq!(m.rollback(new), Ok(()));
    assert_eq!(m.commit(old, &[]), Err(Error::PlanClosed { plan: 1 }));
}
