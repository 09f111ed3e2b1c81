//! Budgets and pools that are used up exactly: the last thing that fits, the first that does not.

use kv_core::{BlockManager, Error, PlanView, Prefill, SeqHandle};

use super::tools::{PLENTY, begin, commit, computed, decoded, manager, prompt, sequence, table};

/// A prefill that is planned and reuses nothing.
fn planned(tokens: usize, samples: bool) -> Prefill {
    Prefill::Planned {
        cached_tokens: 0,
        tokens,
        samples,
    }
}

/// The answer to a prefill in a step that is rolled back.
fn tried(m: &mut BlockManager, tokens: u32, budget: usize, max_tokens: usize) -> Prefill {
    let seq = sequence(m, prompt(tokens));
    let plan = begin(m, budget);
    m.prefill(plan.key(), seq.key(), max_tokens, None)
        .expect("no misuse")
}

#[test]
fn a_prefill_takes_the_whole_budget() {
    let mut m = manager(8);
    assert_eq!(tried(&mut m, 10, 10, PLENTY), planned(10, true));
    assert_eq!(tried(&mut m, 10, PLENTY, 10), planned(10, true));
    assert_eq!(tried(&mut m, 10, 9, PLENTY), planned(8, false));
    assert_eq!(tried(&mut m, 10, PLENTY, 9), planned(8, false));
    assert_eq!(tried(&mut m, 10, 0, PLENTY), Prefill::NoBudget);
    assert_eq!(tried(&mut m, 10, PLENTY, 0), Prefill::NoBudget);
}

#[test]
fn a_chunk_ends_on_a_block_boundary_if_it_can() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(23));
    // At 0: less than a block; at 3: to the boundary; at 4: two blocks and no part of a third; ...
    for (max_tokens, tokens) in [(3, 3), (4, 1), (11, 8), (4, 4), (5, 4), (2, 2), (1, 1)] {
        let plan = begin(&mut m, PLENTY);
        let answer = m.prefill(plan.key(), seq.key(), max_tokens, None);
        let before = m.view(seq.key()).expect("live").num_computed_tokens;
        let last = before + tokens == 23;
        assert_eq!(answer, Ok(planned(tokens, last)), "at {before}");
        commit(&mut m, plan.key());
    }
    assert_eq!(m.view(seq.key()).expect("live").tokens.len(), 24);
}

#[test]
fn spare_blocks_that_are_exactly_available() {
    let mut m = manager(4);
    let seq = sequence(&mut m, prompt(8));
    for (spare_blocks, max_tokens, answer) in [
        (2, PLENTY, planned(8, true)),
        (2, 4, planned(4, false)), // a part is taken, all is asked for
        (
            3,
            4,
            Prefill::NoRoom {
                needed: 5,
                available: 4,
            },
        ),
    ] {
        let plan = begin(&mut m, PLENTY);
        let given = m.prefill(plan.key(), seq.key(), max_tokens, Some(spare_blocks));
        assert_eq!(given, Ok(answer), "{spare_blocks} spare blocks");
        m.rollback(plan.key()).expect("the newest");
    }
}

#[test]
fn blocks_that_a_match_revives_are_counted() {
    let mut m = manager(3);
    drop(computed(&mut m, prompt(8)));
    let plan = begin(&mut m, PLENTY);
    let seq = sequence(&mut m, prompt(13));
    let none = Prefill::NoRoom {
        needed: 4,
        available: 3,
    };
    assert_eq!(m.prefill(plan.key(), seq.key(), PLENTY, None), Ok(none));
    let part = Prefill::Planned {
        cached_tokens: 8,
        tokens: 4,
        samples: false,
    };
    assert_eq!(m.prefill(plan.key(), seq.key(), 4, None), Ok(part));
    assert_eq!(m.usage().active, 3);
}

/// Sequences of one token each that have one more to compute.
fn ready(m: &mut BlockManager, count: u32) -> Vec<SeqHandle> {
    let new = |token| computed(m, vec![token]);
    (0..count).map(new).collect()
}

#[test]
fn decodes_up_to_the_budget() {
    let mut m = manager(4);
    let seqs = ready(&mut m, 3);
    let keys: Vec<_> = seqs.iter().map(SeqHandle::key).collect();
    for (budget, rejected) in [(3, vec![]), (2, vec![2]), (0, vec![0, 1, 2])] {
        let plan = begin(&mut m, budget);
        assert_eq!(m.decode(plan.key(), &keys, 0), Ok(rejected.clone()));
        let fit = 3 - rejected.len();
        let view = PlanView {
            num_tokens: fit,
            num_sequences: fit,
            num_samples: fit,
            budget_left: 0,
        };
        assert_eq!(m.plan_view(plan.key()), Ok(view));
    }
}

#[test]
fn decodes_up_to_the_last_block() {
    let mut m = manager(3);
    let seqs = [0, 10].map(|first| computed(&mut m, (first..first + 4).collect()));
    let plan = begin(&mut m, PLENTY);
    // Each of them needs a block more, one is free.
    let keys = seqs.each_ref().map(SeqHandle::key);
    assert_eq!(m.decode(plan.key(), &keys, 0), Ok(vec![1]));
    assert_eq!(m.usage().available(), 0);
    m.rollback(plan.key()).expect("the newest");
    // A prefill that needs no block is planned in a full pool.
    let mut m = manager(1);
    let seq = computed(&mut m, prompt(2));
    assert_eq!(decoded(&mut m, &[&seq]), []);
}

/// Two sequences part on a block that both have begun: the first one to write needs a copy.
#[test]
fn copies_up_to_the_last_block() {
    for (num_blocks, rejected) in [(1, vec![0, 1]), (2, vec![])] {
        let mut m = manager(num_blocks);
        let seq = computed(&mut m, prompt(2));
        let fork = m.fork(seq.key(), 3).expect("within");
        let plan = begin(&mut m, PLENTY);
        let answer = m.decode(plan.key(), &[seq.key(), fork.key()], 0);
        assert_eq!(answer, Ok(rejected), "{num_blocks} blocks");
        let copies = m.copies(plan.key()).expect("open").len();
        assert_eq!(copies, num_blocks - 1);
    }
}

#[test]
fn lookahead_up_to_the_last_slot() {
    let mut m = manager(2);
    let seq = computed(&mut m, prompt(4));
    for (lookahead, rejected) in [(4, vec![0]), (usize::MAX, vec![0]), (3, vec![])] {
        let plan = begin(&mut m, PLENTY);
        let answer = m.decode(plan.key(), &[seq.key()], lookahead);
        assert_eq!(answer, Ok(rejected), "{lookahead} slots more");
        assert_eq!(
            m.plan_view(plan.key()).map(|view| view.num_tokens <= 1),
            Ok(true)
        );
        if lookahead == 3 {
            assert_eq!(table(&m, &seq, 0), [Some(0), Some(1)]);
        }
    }
}

#[test]
fn drafts_up_to_the_budget_and_to_the_last_block() {
    let mut m = manager(2);
    let seq = computed(&mut m, prompt(4));
    let none = Prefill::NoRoom {
        needed: 2,
        available: 1,
    };
    for (drafts, budget, answer) in [
        (3, 4, planned(4, true)),
        (3, 3, Prefill::NoBudget),
        (0, 1, planned(1, true)),
        (0, 0, Prefill::NoBudget),
        (4, 5, none),
        (4, 4, Prefill::NoBudget),
    ] {
        let plan = begin(&mut m, budget);
        let drafts = vec![7; drafts];
        let given = m.speculate(plan.key(), seq.key(), &drafts);
        assert_eq!(given, Ok(answer), "{} drafts of {budget}", drafts.len());
        let view = m.plan_view(plan.key()).expect("open");
        let (tokens, samples) = match answer {
            Prefill::Planned { tokens, .. } => (tokens, drafts.len() + 1),
            _ => (0, 0),
        };
        assert_eq!((view.num_tokens, view.num_samples), (tokens, samples));
        assert_eq!(view.budget_left, budget - tokens);
    }
}

#[test]
fn a_pending_token_is_decoded_and_nothing_else() {
    let mut m = manager(4);
    let seq = computed(&mut m, vec![1]);
    let first = begin(&mut m, PLENTY);
    assert_eq!(m.decode(first.key(), &[seq.key()], 0), Ok(vec![]));
    let second = begin(&mut m, PLENTY);
    let busy = Error::InPlan { sequence: seq.id() };
    let answer = m.speculate(second.key(), seq.key(), &[7]);
    assert_eq!(answer, Err(busy.clone()));
    let answer = m.prefill(second.key(), seq.key(), PLENTY, None);
    assert_eq!(answer, Err(busy.clone()));
    assert_eq!(m.decode(second.key(), &[seq.key()], 0), Ok(vec![]));
    assert_eq!(m.decode(second.key(), &[seq.key()], 0), Err(busy));
    m.check().expect("sound");
}

#[test]
fn the_most_blocks_on_the_way() {
    let m = manager(1);
    for (tokens, blocks) in [(0, 0), (1, 1), (4, 1), (5, 2), (400, 100)] {
        assert_eq!(m.blocks_for(tokens, PLENTY), blocks);
    }
}
