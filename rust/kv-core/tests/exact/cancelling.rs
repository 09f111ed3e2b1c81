//! Taking sequences out of a step: which ones depend on which.

use kv_core::{BlockManager, Config, Error, PlanKey, Prefill, SeqHandle};

use super::tools::{
    PLENTY, begin, commit, computed, decoded, prefill, prompt, sequence, settings, table, with,
};

fn two_groups() -> BlockManager {
    with(Config {
        groups: vec![None, None],
        ..settings(32)
    })
}

fn planned(m: &mut BlockManager, plan: PlanKey, tokens: Vec<u32>) -> SeqHandle {
    let seq = sequence(m, tokens);
    prefill(m, plan, &seq);
    seq
}

/// Cancels a sequence. Returns the ids of the others; the usage is as without all of them.
fn cancelled(m: &mut BlockManager, plan: PlanKey, seq: &SeqHandle, expected: &[&SeqHandle]) {
    let others: Vec<u64> = expected.iter().map(|seq| seq.id()).collect();
    assert_eq!(m.cancel(plan, seq.key()), Ok(others));
    m.check().expect("sound");
    for gone in expected.iter().chain([&seq]) {
        let view = m.view(gone.key()).expect("live");
        assert_eq!((view.num_planned_tokens, view.num_pending_tokens), (0, 0));
    }
}

#[test]
fn who_shares_its_only_block_goes_with_it() {
    let mut m = two_groups();
    let plan = begin(&mut m, PLENTY);
    let first = planned(&mut m, plan.key(), prompt(4));
    let also = planned(&mut m, plan.key(), prompt(4));
    let longer = planned(&mut m, plan.key(), prompt(6));
    assert_eq!(m.usage().active, 4);
    cancelled(&mut m, plan.key(), &first, &[&also, &longer]);
    assert_eq!(m.usage().free, 32);
}

#[test]
fn who_shares_a_later_block_goes_with_it() {
    let mut m = two_groups();
    let _cached = computed(&mut m, prompt(4));
    let plan = begin(&mut m, PLENTY);
    let first = planned(&mut m, plan.key(), prompt(8));
    let also = planned(&mut m, plan.key(), prompt(8));
    let before = planned(&mut m, plan.key(), prompt(5)); // shares what was cached before
    cancelled(&mut m, plan.key(), &first, &[&also]);
    assert_eq!(m.view(before.key()).expect("live").num_planned_tokens, 5);
    commit(&mut m, plan.key());
    m.check().expect("sound");
}

#[test]
fn who_shares_with_another_one_stays() {
    let mut m = two_groups();
    let plan = begin(&mut m, PLENTY);
    let first = planned(&mut m, plan.key(), prompt(4));
    let other = planned(&mut m, plan.key(), vec![7; 4]);
    let same = planned(&mut m, plan.key(), vec![7; 4]);
    let longer = planned(&mut m, plan.key(), vec![7; 9]);
    cancelled(&mut m, plan.key(), &first, &[]);
    cancelled(&mut m, plan.key(), &longer, &[]);
    cancelled(&mut m, plan.key(), &other, &[&same]);
    assert_eq!(m.usage().free, 32);
}

#[test]
fn who_shares_with_one_that_goes_goes_too() {
    let mut m = two_groups();
    let plan = begin(&mut m, PLENTY);
    let first = planned(&mut m, plan.key(), prompt(4));
    let second = planned(&mut m, plan.key(), prompt(8));
    let third = planned(&mut m, plan.key(), prompt(12));
    // From the middle: each that is left depends on another one.
    cancelled(&mut m, plan.key(), &second, &[&third]);
    let third = planned(&mut m, plan.key(), prompt(12));
    cancelled(&mut m, plan.key(), &first, &[&third]);
    assert_eq!(m.usage().free, 32);
}

#[test]
fn the_last_one_goes_alone() {
    let mut m = two_groups();
    let plan = begin(&mut m, PLENTY);
    let first = planned(&mut m, plan.key(), prompt(8));
    let last = planned(&mut m, plan.key(), prompt(8));
    cancelled(&mut m, plan.key(), &last, &[]);
    assert_eq!(m.view(first.key()).expect("live").num_planned_tokens, 8);
    commit(&mut m, plan.key());
    assert_eq!(m.usage().active, 4);
}

/// A cached block that one group has lost is still cached for the other one.
#[test]
fn who_shares_one_group_only_goes_with_it() {
    let mut m = with(Config {
        groups: vec![None, Some(4)],
        ..settings(6)
    });
    let seq = computed(&mut m, prompt(12)); // two blocks of the window are evictable
    let taker = computed(&mut m, vec![7, 7]); // both go
    drop(taker);
    m.evict_all();
    drop(seq);
    m.drain_deferred();
    let plan = begin(&mut m, PLENTY);
    let first = sequence(&mut m, prompt(4));
    let answer = m.prefill(plan.key(), first.key(), PLENTY, None);
    let computes = Prefill::Planned {
        cached_tokens: 0,
        tokens: 4,
        samples: true,
    };
    assert_eq!(answer, Ok(computes));
    let also = planned(&mut m, plan.key(), prompt(4));
    cancelled(&mut m, plan.key(), &first, &[&also]);
    assert_eq!(m.stats().already_cached_blocks, 0);
}

#[test]
fn budget_comes_back() {
    let mut m = two_groups();
    let plan = begin(&mut m, 14);
    let first = planned(&mut m, plan.key(), prompt(8));
    let also = planned(&mut m, plan.key(), prompt(12));
    let left = |m: &BlockManager| {
        let view = m.plan_view(plan.key()).expect("open");
        (view.budget_left, view.num_tokens, view.num_samples)
    };
    assert_eq!(left(&m), (2, 12, 2));
    cancelled(&mut m, plan.key(), &also, &[]);
    assert_eq!(left(&m), (6, 8, 1));
    cancelled(&mut m, plan.key(), &first, &[]);
    assert_eq!(left(&m), (14, 0, 0));
}

/// A sequence that both open steps hold, and one that only the later one does.
#[test]
fn out_of_the_later_of_two_steps() {
    let mut m = two_groups();
    let both = computed(&mut m, vec![1]);
    let first = begin(&mut m, PLENTY);
    assert_eq!(m.decode(first.key(), &[both.key()], 0), Ok(vec![]));
    let second = begin(&mut m, PLENTY);
    assert_eq!(m.decode(second.key(), &[both.key()], 0), Ok(vec![]));
    let later = planned(&mut m, second.key(), prompt(4));
    assert_eq!(m.cancel(second.key(), both.key()), Ok(vec![]));
    cancelled(&mut m, second.key(), &later, &[]);
    m.rollback(second.key()).expect("the newest");
    let busy = Error::InPlan {
        sequence: both.id(),
    };
    let answer = m.decode(first.key(), &[both.key()], 0);
    assert_eq!(answer, Err(busy));
    prefill(&mut m, first.key(), &later);
    commit(&mut m, first.key());
    m.check().expect("sound");
}

#[test]
fn a_copy_goes_with_its_sequence() {
    let mut m = two_groups();
    let seq = computed(&mut m, prompt(6));
    let plan = begin(&mut m, PLENTY);
    let forks = [(); 2].map(|()| {
        let fork = m.fork(seq.key(), 6).expect("within");
        m.append(fork.key(), &[77]).expect("in no plan");
        prefill(&mut m, plan.key(), &fork);
        fork
    });
    let copies = m.copies(plan.key()).expect("open").to_vec();
    assert_eq!(copies.len(), 4, "one of each group");
    assert_eq!(m.cancel(plan.key(), forks[0].key()), Ok(vec![]));
    assert_eq!(m.copies(plan.key()), Ok(&copies[2..]));
    m.check().expect("sound");
}

/// Copies return to the free queue in the order of their layer groups: the one of the last group is allocated next.
#[test]
fn copies_are_undone_in_the_order_of_their_layer_groups() {
    let mut m = two_groups();
    let seq = computed(&mut m, prompt(6));
    let _fork = m.fork(seq.key(), 6).expect("within");
    let before = [0, 1].map(|group| table(&m, &seq, group));
    let sources = before.each_ref().map(|blocks| blocks[1]);
    let mut previous = None;
    for cancels in [true, false, true] {
        let plan = begin(&mut m, PLENTY);
        assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
        let copies = m.copies(plan.key()).expect("open").to_vec();
        let now = [0, 1].map(|group| table(&m, &seq, group)[1]);
        let expected = [0, 1].map(|group| (sources[group], now[group]));
        let ids = copies
            .iter()
            .map(|&(from, to)| (Some(from.get()), Some(to.get())));
        assert_eq!(ids.collect::<Vec<_>>(), expected, "group by group");
        if let Some([first, second]) = previous.replace(now) {
            assert_eq!(
                now,
                [second, first],
                "the last one undone is allocated first"
            );
        }
        if cancels {
            assert_eq!(m.cancel(plan.key(), seq.key()), Ok(vec![]));
        }
        m.rollback(plan.key()).expect("the newest");
        assert_eq!([0, 1].map(|group| table(&m, &seq, group)), before);
        m.check().expect("sound");
    }
}

/// A decode copies the shared row, then its lookahead allocates another one: the last change is undone first, so
/// the copies are in front of the free queue again.
#[test]
fn copies_are_undone_after_the_row_allocated_behind_them() {
    for cancels in [true, false] {
        let mut m = two_groups();
        let seq = computed(&mut m, prompt(6));
        let _fork = m.fork(seq.key(), 6).expect("within");
        let before = m.queued();
        let plan = begin(&mut m, PLENTY);
        assert_eq!(m.decode(plan.key(), &[seq.key()], 2), Ok(vec![]));
        let [copies, added] = [1, 2].map(|row| [0, 1].map(|group| table(&m, &seq, group)[row]));
        let allocated = [copies, added].concat();
        assert_eq!(
            allocated,
            before[..4]
                .iter()
                .map(|id| Some(id.get()))
                .collect::<Vec<_>>()
        );
        match cancels {
            true => assert_eq!(m.cancel(plan.key(), seq.key()), Ok(vec![])),
            false => m.rollback(plan.key()).expect("the newest"),
        }
        let [first, second] = [before[0], before[1]];
        let expected = [&[second, first], &before[2..]].concat();
        assert_eq!(m.queued(), expected);
    }
}

/// Two forks share a partial block. The first to be planned writes on a copy, so the other one may write in
/// place; if the first goes back to the block, the other one must not.
#[test]
fn who_writes_in_place_goes_with_who_left_the_block_to_it() {
    for second_fills_the_block in [false, true] {
        let mut m = two_groups();
        let seq = computed(&mut m, prompt(7));
        let fork = m.fork(seq.key(), 6).expect("within");
        let tokens: &[u32] = if second_fills_the_block {
            &[70, 71, 72]
        } else {
            &[70]
        };
        m.append(fork.key(), tokens).expect("in no plan");
        let tables = [&seq, &fork].map(|seq| table(&m, seq, 0));
        let plan = begin(&mut m, PLENTY);
        assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
        prefill(&mut m, plan.key(), &fork);
        assert_ne!(table(&m, &seq, 0), tables[0], "on a copy");
        assert_eq!(table(&m, &fork, 0)[..2], tables[1][..2], "in place");
        m.check().expect("sound");

        assert_eq!(m.cancel(plan.key(), seq.key()), Ok(vec![fork.id()]));
        m.check().expect("sound");
        assert_eq!([&seq, &fork].map(|seq| table(&m, seq, 0)), tables);
        assert_eq!(m.copies(plan.key()), Ok(&[][..]));

        // Planned again the other way round, the fork writes on copies and can be taken out alone.
        prefill(&mut m, plan.key(), &fork);
        assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
        assert_eq!(table(&m, &seq, 0), tables[0], "in place");
        assert_eq!(m.copies(plan.key()).expect("open").len(), 2);
        assert_eq!(m.cancel(plan.key(), seq.key()), Ok(vec![]));
        commit(&mut m, plan.key());
        m.check().expect("sound");
    }
}

/// Rows that a commit of the step before has registered stay registered.
#[test]
fn a_rollback_leaves_what_the_step_before_has_done() {
    let mut m = two_groups();
    let seq = computed(&mut m, prompt(3));
    let [first, second] = [(); 2].map(|()| {
        let plan = begin(&mut m, PLENTY);
        assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
        plan
    });
    commit(&mut m, first.key());
    m.rollback(second.key()).expect("the newest");
    assert_eq!(m.view(seq.key()).expect("live").num_registered_blocks, 1);
    m.check().expect("sound");
}

#[test]
fn remappings_name_group_and_entry() {
    let mut m = two_groups();
    let seqs = [(); 2].map(|()| computed(&mut m, prompt(7)));
    let remappings = decoded(&mut m, &[&seqs[0], &seqs[1]]);
    let entries: Vec<_> = remappings.iter().map(|it| (it.group, it.index)).collect();
    assert_eq!(entries, [(0, 1), (1, 1)]);
    for remapping in remappings {
        assert_eq!(remapping.sequence, seqs[1].id());
        let [first, second] = seqs.each_ref().map(|seq| table(&m, seq, remapping.group));
        assert_eq!(first, second);
        assert_eq!(second[1], Some(remapping.new_block.get()));
        assert_eq!(m.refs(remapping.old_block.get()), Ok(0));
    }
}
