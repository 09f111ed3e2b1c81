//! Re-match: the index is asked again on every block boundary, whatever is reserved past it.

use kv_core::{BlockManager, Config, Eviction, Prefill, SeqHandle};

use super::tools::{
    PLENTY, begin, block_of, commit, computed, given_up, manager, prefill, prompt, settings, table,
    used, with,
};

/// A conversation of three tokens that has decoded one with `lookahead` slots, and its next turn; the
/// same tokens were computed by another one meanwhile.
fn conversation(lookahead: usize) -> (BlockManager, SeqHandle) {
    let mut m = manager(32);
    let seq = computed(&mut m, prompt(3));
    let plan = begin(&mut m, PLENTY);
    let rejected = m.decode(plan.key(), &[seq.key()], lookahead);
    assert_eq!(rejected, Ok(vec![]));
    commit(&mut m, plan.key());
    assert_eq!(m.view(seq.key()).expect("live").num_computed_tokens, 4);
    m.append(seq.key(), &prompt(12)).expect("in no plan");
    let tokens = m.view(seq.key()).expect("live").tokens.to_vec();
    drop(computed(&mut m, tokens));
    (m, seq)
}

#[test]
fn reserved_slots_do_not_keep_a_turn_from_being_found() {
    for lookahead in [0, 3, 6, 20] {
        let (mut m, seq) = conversation(lookahead);
        let before = table(&m, &seq, 0);
        let usage = m.usage();
        for _ in 0..2 {
            let plan = begin(&mut m, PLENTY);
            let answer = m.prefill(plan.key(), seq.key(), PLENTY, None);
            let planned = Prefill::Planned {
                cached_tokens: 12,
                tokens: 1,
                samples: true,
            };
            assert_eq!(answer, Ok(planned), "{lookahead} slots ahead");
            m.check().expect("sound");
            m.rollback(plan.key()).expect("open");
            assert_eq!((table(&m, &seq, 0), m.usage()), (before.clone(), usage));
        }
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), &seq);
        commit(&mut m, plan.key());
        assert_eq!(m.view(seq.key()).expect("live").num_cached_tokens, 12);
        m.check().expect("sound");
    }
}

/// A reused block stays protected when it is taken over.
#[test]
fn a_take_over_keeps_what_is_known_of_a_content() {
    let mut m = with(Config {
        eviction: Eviction::TwoQueue,
        in_flight_sharing: false,
        ..settings(4)
    });
    used(&mut m, [1, 1]); // used again
    let again = m.sequence(block_of(1), b"", false).expect("tokens");
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &again);
    commit(&mut m, plan.key());
    assert_eq!(m.stats().taken_over_blocks, 1);
    drop(again);
    used(&mut m, [2, 3, 4]);
    assert_eq!(given_up(&mut m, 1, &[1, 2, 3, 4]), [2]);
}

/// Deferred releases stay deferred after a check.
#[test]
fn a_check_changes_nothing() {
    let mut m = manager(8);
    let (seq, other) = (computed(&mut m, prompt(8)), computed(&mut m, prompt(12)));
    let pin = m.pin(other.key()).expect("live");
    let plan = begin(&mut m, PLENTY);
    drop((seq, other, plan));
    let queued = m.queued(); // drains the deferred releases
    drop(pin);
    let stats = m.stats();
    for _ in 0..2 {
        assert_eq!(m.check(), Ok(()));
    }
    assert_eq!(m.stats(), stats);
    assert!(queued.len() < m.queued().len());
    m.check().expect("sound");
}
