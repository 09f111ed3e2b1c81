//! Drafts for a batch of decodes: they use what budget and blocks are left.

use kv_core::Error;

use super::tools::{PLENTY, begin, commit, computed, manager, prefill, prompt, sequence, table};

#[test]
fn drafts_take_what_is_left() {
    let mut m = manager(5);
    let seqs = [10, 20, 30].map(|first| computed(&mut m, vec![first, 1]));
    let keys = seqs.each_ref().map(|seq| seq.key());
    let plan = begin(&mut m, 9);
    assert_eq!(m.decode(plan.key(), &keys, 0), Ok(vec![]));
    // Six tokens are left of the budget, two blocks of the pool; positions 3 are in blocks that are held.
    let drafts: Vec<u32> = (0..9).collect();
    let taken = m.draft(plan.key(), &keys, &drafts, &[3, 4, 2]);
    assert_eq!(taken, Ok(vec![3, 3, 0]));
    let view = m.plan_view(plan.key()).expect("open");
    assert_eq!(
        (view.budget_left, view.num_tokens, view.num_samples),
        (0, 9, 9)
    );
    assert_eq!(table(&m, &seqs[0], 0).len(), 2);
    m.check().expect("sound");
    let answer = m.commit_accepted(plan.key(), &[0, 1, 77, 5, 6], &[3, 1, 1]);
    assert_eq!(answer.err(), None);
    let computed = seqs
        .each_ref()
        .map(|seq| m.view(seq.key()).expect("live").num_computed_tokens);
    assert_eq!(computed, [5, 3, 3]);
    m.check().expect("sound");
}

#[test]
fn drafts_end_where_the_blocks_do() {
    let mut m = manager(1);
    let seq = computed(&mut m, prompt(2));
    let plan = begin(&mut m, PLENTY);
    assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
    assert_eq!(
        m.draft(plan.key(), &[seq.key()], &[1, 2, 3], &[3]),
        Ok(vec![1])
    );
    m.rollback(plan.key()).expect("open");
    assert_eq!(table(&m, &seq, 0).len(), 1);
    m.check().expect("sound");
}

#[test]
fn drafts_that_are_rolled_back_or_cancelled_give_their_blocks_back() {
    let mut m = manager(5);
    let seq = computed(&mut m, prompt(2));
    let free = m.usage().available();
    for is_cancelled in [false, true] {
        let plan = begin(&mut m, PLENTY);
        assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
        let taken = m.draft(plan.key(), &[seq.key()], &[1, 2, 3, 4, 5], &[5]);
        assert_eq!(taken, Ok(vec![5]));
        assert_eq!(table(&m, &seq, 0).len(), 2);
        if is_cancelled {
            m.cancel(plan.key(), seq.key()).expect("planned");
        }
        m.rollback(plan.key()).expect("open");
        assert_eq!(table(&m, &seq, 0).len(), 1);
        assert_eq!(m.usage().available(), free);
        m.check().expect("sound");
    }
}

#[test]
fn misuse_gives_nobody_drafts() {
    let mut m = manager(16);
    let (seq, other) = (computed(&mut m, prompt(2)), computed(&mut m, vec![9, 9]));
    let prompt = sequence(&mut m, prompt(6));
    let plan = begin(&mut m, PLENTY);
    let key = plan.key();
    assert_eq!(m.decode(key, &[seq.key()], 0), Ok(vec![]));
    prefill(&mut m, key, &prompt);
    let before = m.plan_view(key);
    let count = |expected, given| Err(Error::DraftCount { expected, given });
    assert_eq!(m.draft(key, &[seq.key()], &[], &[]), count(1, 0));
    assert_eq!(m.draft(key, &[seq.key()], &[1], &[2]), count(2, 1));
    assert_eq!(
        m.draft(key, &[seq.key()], &[1], &[usize::MAX]),
        count(usize::MAX, 1)
    );
    let sequence = other.id();
    let answer = m.draft(key, &[seq.key(), other.key()], &[1, 2], &[1, 1]);
    assert_eq!(answer, Err(Error::NotPlanned { sequence }));
    let (sequence, uncomputed) = (prompt.id(), 6);
    let answer = m.draft(key, &[seq.key(), prompt.key()], &[1, 2], &[1, 1]);
    let error = Error::NotDecoding {
        sequence,
        uncomputed,
    };
    assert_eq!(answer, Err(error));
    let sequence = seq.id();
    let answer = m.draft(key, &[seq.key(), seq.key()], &[1, 2], &[1, 1]);
    assert_eq!(answer, Err(Error::InPlan { sequence }));
    assert_eq!(m.plan_view(key), before);
    assert_eq!(m.draft(key, &[seq.key()], &[1], &[1]), Ok(vec![1]));
    let answer = m.draft(key, &[seq.key()], &[1], &[1]);
    assert!(answer.is_err(), "it has drafts already");
    m.rollback(key).expect("open");
    // A pending token is followed by nothing that is known.
    let older = begin(&mut m, PLENTY);
    assert_eq!(m.decode(older.key(), &[seq.key()], 0), Ok(vec![]));
    let newer = begin(&mut m, PLENTY);
    assert_eq!(m.decode(newer.key(), &[seq.key()], 0), Ok(vec![]));
    let answer = m.draft(newer.key(), &[seq.key()], &[1], &[1]);
    assert_eq!(answer, Err(Error::InPlan { sequence }));
    m.check().expect("sound");
    m.rollback(newer.key()).expect("open");
    commit(&mut m, older.key());
}
