//! Snapshots of states: where they are kept, what a match continues, and which ones go first.

use kv_core::{
    BlockId, BlockManager, Config, Error, Extend, Miss, MissReason, Prefill, Reserve, SeqHandle,
    StateConfig, StateCopy, Transfer,
};

use crate::tools::{PLENTY, begin, commit, decoded, prompt, sequence, settings, with};

/// Snapshots of two blocks of four tokens, spare ones every 16 tokens, at least 8 tokens apart.
fn stateful(num_blocks: usize) -> BlockManager {
    with(Config {
        state: Some(StateConfig {
            blocks: 2,
            cadence: 16,
            min_tokens: 8,
        }),
        explain: true,
        ..settings(num_blocks)
    })
}

/// Positions without the blocks.
fn positions(copies: &[StateCopy]) -> Vec<usize> {
    copies.iter().map(|copy| copy.position).collect()
}

/// Computes all tokens of a sequence in steps of at most `max_tokens`; for each step the first and the last position, and
/// the positions of the states that it loads and saves.
fn steps(
    m: &mut BlockManager,
    seq: &SeqHandle,
    max_tokens: usize,
) -> Vec<(usize, usize, Vec<usize>, Vec<usize>)> {
    let mut steps = Vec::new();
    loop {
        let view = m.view(seq.key()).expect("live");
        let (planned, known) = (view.num_planned_tokens, view.tokens.len());
        let plan = begin(m, PLENTY.max(max_tokens));
        let answer = m.prefill(plan.key(), seq.key(), max_tokens, None);
        let Ok(Prefill::Planned {
            cached_tokens,
            tokens,
            samples,
        }) = answer
        else {
            panic!("{answer:?} to {planned} of {known}");
        };
        let loads = m.state_loads(plan.key()).expect("open");
        let saves = m.state_saves(plan.key()).expect("open");
        let start = planned + cached_tokens;
        steps.push((start, start + tokens, positions(&loads), positions(&saves)));
        commit(m, plan.key());
        if m.config().num_blocks < 500 {
            m.check().expect("sound");
        }
        if samples {
            return steps;
        }
    }
}

/// Tokens computed in these steps.
fn num_computed(steps: &[(usize, usize, Vec<usize>, Vec<usize>)]) -> usize {
    steps.iter().map(|step| step.1 - step.0).sum()
}

/// `len` tokens of which the first `shared` are those of [`prompt`].
fn diverging(shared: u32, len: u32) -> Vec<u32> {
    let own = (shared..len).map(|at| 5_000 + at);
    (0..shared).chain(own).collect()
}

#[test]
fn a_prompt_keeps_states_on_its_way_and_at_its_end() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(42));
    let expected = [
        (0, 16, vec![0], vec![16]),
        (16, 32, vec![], vec![32]),
        (32, 40, vec![], vec![40]),
        (40, 42, vec![], vec![]),
    ];
    assert_eq!(steps(&mut m, &seq, PLENTY), expected);
    let usage = m.state_usage();
    assert_eq!(
        (usage.snapshots, usage.blocks, usage.spare_blocks),
        (3, 6, 4)
    );
    let stats = m.stats();
    assert_eq!((stats.saved_snapshots, stats.replayed_tokens), (3, 0));
    // The same again computes its last two tokens.
    let again = sequence(&mut m, prompt(42));
    assert_eq!(steps(&mut m, &again, PLENTY), [(40, 42, vec![40], vec![])]);
    assert_eq!(m.stats().loaded_snapshots, 1);
}

#[test]
fn a_second_request_computes_again_from_the_last_state_and_keeps_the_branch_point() {
    let mut m = stateful(64);
    drop(sequence(&mut m, prompt(42)));
    let first = sequence(&mut m, prompt(42));
    steps(&mut m, &first, PLENTY);
    let tokens = diverging(26, 34);
    let explained = m.explain(&tokens, b"").expect("short");
    let reason = MissReason::NoSnapshot { cached_to: 24 };
    let miss = Miss {
        position: 16,
        reason,
    };
    assert_eq!(
        (explained.num_pool_tokens, explained.miss),
        (16, Some(miss.clone()))
    );
    let second = sequence(&mut m, tokens);
    let expected = [
        (16, 24, vec![16], vec![24]), // the keys and values of these are shared
        (24, 32, vec![], vec![32]),
        (32, 34, vec![], vec![]),
    ];
    assert_eq!(steps(&mut m, &second, PLENTY), expected);
    assert_eq!(m.stats().replayed_tokens, 8);
    let view = m.view(second.key()).expect("live");
    assert_eq!((view.num_cached_tokens, view.miss), (16, Some(&miss)));
    let table = |m: &BlockManager, seq: &SeqHandle| -> Vec<Option<BlockId>> {
        let view = m.view(seq.key()).expect("live");
        view.table(0).take(6).collect()
    };
    assert_eq!(table(&m, &first), table(&m, &second));
    let third = sequence(&mut m, diverging(27, 30));
    assert_eq!(steps(&mut m, &third, PLENTY), [(24, 30, vec![24], vec![])]);
}

#[test]
fn a_replay_writes_no_keys_and_values() {
    use kv_core::{IntArray, SharedI32, SharedI64, StepArrays, TableRows};
    let mut m = stateful(64);
    let first = sequence(&mut m, prompt(42));
    steps(&mut m, &first, PLENTY);
    let second = sequence(&mut m, diverging(24, 40));
    let (mut written, mut rows) = (Vec::new(), TableRows::default());
    // In steps of three tokens, so that a replay takes several.
    while m.view(second.key()).expect("live").num_computed_tokens < 28 {
        let plan = begin(&mut m, PLENTY);
        let answer = m.prefill(plan.key(), second.key(), 3, None);
        assert!(matches!(answer, Ok(Prefill::Planned { .. })), "{answer:?}");
        let small = || vec![SharedI32::new(0); 64];
        let (ids, slots, logits) = (small(), vec![SharedI64::new(0); 64], small());
        let (positions, starts, lens, tables) = (small(), small(), small(), small());
        let arrays = StepArrays {
            input_ids: IntArray::I32(&ids),
            positions: IntArray::I32(&positions),
            slot_mapping: IntArray::I64(&slots),
            slots_width: 64,
            query_start_loc: IntArray::I32(&starts),
            seq_lens: IntArray::I32(&lens),
            block_tables: IntArray::I32(&tables),
            table_rows: 4,
            table_width: 16,
            logits_indices: IntArray::I32(&logits),
        };
        m.fill(plan.key(), &arrays, &mut rows)
            .expect("large enough");
        let tokens = m.plan_view(plan.key()).expect("open").num_tokens;
        let row = (0..tokens).map(|at| (positions[at].get(), slots[at].get() >= 0));
        written.extend(row);
        commit(&mut m, plan.key());
        m.check().expect("sound");
    }
    let expected: Vec<_> = (16..written.len() as i32 + 16)
        .map(|position| (position, position >= 24))
        .collect();
    assert_eq!(written, expected);
}

#[test]
fn equal_prompts_of_one_step_wait_for_the_first() {
    let mut m = stateful(64);
    let (first, second) = (sequence(&mut m, prompt(20)), sequence(&mut m, prompt(20)));
    let plan = begin(&mut m, PLENTY);
    let planned = m.prefill(plan.key(), first.key(), PLENTY, None);
    assert!(matches!(planned, Ok(Prefill::Planned { tokens: 16, .. })));
    let answer = m.prefill(plan.key(), second.key(), PLENTY, None);
    assert_eq!(answer, Ok(Prefill::Computing));
    commit(&mut m, plan.key());
    assert_eq!(steps(&mut m, &second, PLENTY), [(16, 20, vec![16], vec![])]);
}

#[test]
fn equal_snapshots_merge() {
    let mut m = with(Config {
        in_flight_sharing: false,
        ..stateful(64).config().clone()
    });
    let seqs = [(); 2].map(|()| sequence(&mut m, prompt(20)));
    let plan = begin(&mut m, PLENTY);
    for seq in &seqs {
        let answer = m.prefill(plan.key(), seq.key(), PLENTY, None);
        assert!(matches!(answer, Ok(Prefill::Planned { tokens: 16, .. })));
    }
    assert_eq!(m.state_usage().pending_blocks, 4);
    commit(&mut m, plan.key());
    let stats = m.stats();
    assert_eq!((stats.saved_snapshots, stats.merged_snapshots), (1, 1));
    assert_eq!(m.state_usage().blocks, 2);
    m.check().expect("sound");
}

#[test]
fn an_answer_leaves_its_last_state() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(9)); // 8 of them are kept
    steps(&mut m, &seq, PLENTY);
    for _ in 9..33 {
        decoded(&mut m, &[&seq]);
        m.check().expect("sound");
    }
    // At 8 by the prompt; those at 16 and 24 were replaced by the one at 32.
    assert_eq!(m.state_usage().snapshots, 2);
    let mut tokens = m.view(seq.key()).expect("live").tokens.to_vec();
    tokens.extend([1, 2, 3]);
    drop(seq);
    let next = sequence(&mut m, tokens);
    let all = steps(&mut m, &next, PLENTY);
    assert_eq!((all[0].0, &all[0].2), (32, &vec![32]));
}

#[test]
fn wanted_states_are_kept_wherever_they_are() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(20));
    assert_eq!(m.want_snapshots(seq.key(), &[7, 13, 99]), Ok(()));
    let all = steps(&mut m, &seq, PLENTY);
    let saved: Vec<usize> = all.into_iter().flat_map(|step| step.3).collect();
    assert_eq!(saved, [4, 12]); // 16 is too near
}

#[test]
fn a_fork_continues_the_running_state_or_begins_anew() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(22));
    steps(&mut m, &seq, PLENTY);
    let fork = m.fork(seq.key(), 22).expect("at rest");
    m.append(fork.key(), &[1, 2]).expect("at rest");
    assert_eq!(m.view(fork.key()).expect("live").num_computed_tokens, 22);
    let shorter = m.fork(seq.key(), 19).expect("at rest");
    assert_eq!(m.view(shorter.key()).expect("live").num_computed_tokens, 0);
    assert_eq!(
        steps(&mut m, &shorter, PLENTY),
        [(16, 19, vec![16], vec![])]
    );
    m.check().expect("sound");
}

#[test]
fn a_preempted_sequence_resumes_from_its_last_snapshot() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(22));
    steps(&mut m, &seq, PLENTY);
    m.reset(seq.key()).expect("at rest");
    let all = steps(&mut m, &seq, PLENTY);
    assert_eq!((all[0].0, &all[0].2), (16, &vec![16]));
}

#[test]
fn a_pin_holds_the_last_snapshot_of_its_prefix() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(42));
    steps(&mut m, &seq, PLENTY);
    drop(seq);
    let pin = m.match_prefix(&prompt(38), b"").expect("short");
    let (position, blocks) = pin.snapshot();
    assert_eq!((pin.num_tokens(), pin.num_blocks()), (36, 9 + 2));
    assert_eq!((position, blocks.len()), (32, 2));
    m.evict_all();
    assert_eq!(m.state_usage().snapshots, 1);
    let seq = sequence(&mut m, prompt(38));
    assert_eq!(m.attach(seq.key(), &pin), Ok(()));
    assert_eq!(steps(&mut m, &seq, PLENTY)[0].0, 32);
    drop(pin);
    m.check().expect("sound");
}

#[test]
fn a_snapshot_goes_with_a_block_of_its_prefix() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(22));
    steps(&mut m, &seq, PLENTY);
    let before = m.state_usage().snapshots;
    m.free_keeping(seq.key(), 8).expect("live");
    assert_eq!((before, m.state_usage().snapshots), (1, 0));
    m.check().expect("sound");
}

/// In a full pool the spare snapshots of many prompts stay within an eighth of it.
#[test]
fn spare_snapshots_have_a_share() {
    let mut m = stateful(320);
    let mut fulls = 0;
    for name in 0..40 {
        let tokens = (0..66).map(|at| 100_000 * name + at).collect();
        let seq = sequence(&mut m, tokens);
        steps(&mut m, &seq, PLENTY);
        drop(seq);
        let (usage, pool) = (m.state_usage(), m.usage());
        if pool.free < 2 {
            fulls += 1;
            assert!(usage.spare_blocks <= 320 / 8, "{usage:?}");
            assert!(usage.snapshots > usage.spare_blocks / 2, "{usage:?}");
        }
    }
    assert!(fulls > 20, "the pool was full {fulls} times");
}

/// Blocks to which a state is copied.
fn kept(m: &mut BlockManager, seq: &SeqHandle) -> Vec<BlockId> {
    match m.keep_snapshot(seq.key()).expect("at the end of a block") {
        Extend::Extended { blocks, .. } => blocks,
        answer => panic!("{answer:?}"),
    }
}

#[test]
fn an_engine_without_plans_keeps_and_continues_snapshots() {
    let mut m = stateful(32);
    let seq = sequence(&mut m, prompt(22));
    for num_tokens in [8, 4, 10] {
        m.extend(seq.key(), num_tokens).expect("at rest");
        m.publish(seq.key(), num_tokens, &[]).expect("extended");
        if num_tokens == 8 {
            assert_eq!(kept(&mut m, &seq).len(), 2);
            assert_eq!(kept(&mut m, &seq), [], "it is there");
        }
        m.check().expect("sound");
    }
    let refused = Error::SnapshotPosition {
        sequence: 1,
        computed: 22,
    };
    assert_eq!(m.keep_snapshot(seq.key()), Err(refused));
    // Blocks of 20 tokens are cached, and a state of 8.
    let next = sequence(&mut m, prompt(22));
    assert_eq!(m.reuse_cached(next.key()), Ok(8));
    assert_eq!(m.view(next.key()).expect("live").num_computed_tokens, 8);
    let pin = m.pin(next.key()).expect("live");
    assert_eq!((pin.snapshot().0, pin.snapshot().1.len()), (8, 2));
    drop(pin);
    assert_eq!(m.reuse_cached(next.key()), Ok(0), "it has a state already");
    m.extend(next.key(), 4).expect("at rest");
    let merged = m.publish(next.key(), 4, &[]).expect("extended");
    assert_eq!(merged.len(), 1);
    assert_eq!(kept(&mut m, &next).len(), 2);
    assert_eq!(m.state_usage().snapshots, 2);
    m.check().expect("sound");
    // A plan continues it, too.
    let third = sequence(&mut m, prompt(22));
    assert_eq!(steps(&mut m, &third, PLENTY)[0].0, 12);
}

#[test]
fn a_snapshot_without_room_is_not_kept() {
    let mut m = stateful(3);
    let seq = sequence(&mut m, prompt(9));
    m.extend(seq.key(), 8).expect("at rest");
    m.publish(seq.key(), 8, &[]).expect("extended");
    let no_room = Extend::NoRoom {
        needed: 2,
        available: 1,
    };
    assert_eq!(m.keep_snapshot(seq.key()), Ok(no_room));
    m.check().expect("sound");
}

#[test]
fn snapshots_of_too_many_blocks_are_refused() {
    let too_large = Config {
        state: Some(StateConfig::new(17)),
        ..settings(16)
    };
    let error = BlockManager::new(too_large).err();
    assert!(matches!(error, Some(Error::OutOfRange { max: 16, .. })));
}

/// A linear congruential generator, for tests that need many cases and not good ones.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((self.0 >> 33) % u64::from(bound)) as u32
    }
}

/// 1,000 pairs: a second request that shares any prefix of at least 64 tokens with the one before computes at most a block
/// and the cadence beyond the divergence. Returns the most that any computed again.
fn pairs(num_blocks: usize, num_pairs: u32) -> usize {
    const BLOCK: usize = 16;
    let state = StateConfig::new(20);
    let mut m = with(Config {
        state: Some(state),
        ..Config::new(num_blocks, BLOCK)
    });
    let (mut numbers, mut most) = (Numbers(7), 0);
    for pair in 0..num_pairs {
        let len = 65 + numbers.below(2_400);
        let shared = 64 + numbers.below(len - 64);
        let own = shared + 1 + numbers.below(300);
        let name = (pair + 1) << 16;
        let first: Vec<u32> = (0..len).map(|at| name + at).collect();
        let mut second = first[..shared as usize].to_vec();
        second.extend((shared..own).map(|at| name + 0x8000 + at));
        let seq = sequence(&mut m, first);
        steps(&mut m, &seq, 1_024);
        drop(seq);
        let seq = sequence(&mut m, second);
        let all = steps(&mut m, &seq, 1_024);
        let again = num_computed(&all) - (own - shared) as usize;
        assert!(
            again <= BLOCK + state.cadence,
            "{again} tokens before {shared} of {len} in pair {pair}: {all:?}"
        );
        most = most.max(again);
    }
    most
}

#[test]
fn a_second_request_computes_at_most_a_block_and_the_cadence_again() {
    let (large, full) = (pairs(60_000, 1_000), pairs(1_000, 1_000));
    println!("at most {large} tokens again in a large pool, {full} in a full one");
}

/// The snapshot at the end of the first `num_tokens` tokens of a sequence, with all blocks that it needs.
fn reserved(m: &mut BlockManager, seq: &SeqHandle, num_tokens: usize) -> Transfer {
    let answer = m.reserve(seq.key(), num_tokens).expect("at rest");
    let Reserve::Reserved(transfer) = answer else {
        panic!("{answer:?}");
    };
    m.check().expect("sound");
    transfer
}

/// Indices and layer groups of the blocks to fill.
fn parts(transfer: &Transfer) -> Vec<(usize, usize)> {
    let blocks = transfer.blocks().iter();
    blocks.map(|block| (block.index, block.group)).collect()
}

#[test]
fn a_transfer_restores_a_prefix_and_its_snapshot() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(22));
    let transfer = reserved(&mut m, &seq, 17);
    assert_eq!(transfer.indices(), 0..4);
    assert_eq!(
        parts(&transfer),
        [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 1)]
    );
    let plan = begin(&mut m, PLENTY);
    let answer = m.prefill(plan.key(), seq.key(), PLENTY, None);
    assert_eq!(answer, Ok(Prefill::Loading { transfer: 1 }));
    m.rollback(plan.key()).expect("the newest");
    let all = transfer.filled_indices(transfer.blocks());
    assert_eq!(all, Ok(4));
    assert_eq!(m.complete(transfer.key(), 4), Ok(0));
    m.check().expect("sound");
    assert_eq!(
        (m.state_usage().snapshots, m.stats().restored_blocks),
        (1, 6)
    );
    assert_eq!(steps(&mut m, &seq, PLENTY), [(16, 22, vec![16], vec![])]);
    // All of it is there now.
    let other = sequence(&mut m, prompt(22));
    let answer = m.reserve(other.key(), 16);
    assert!(matches!(answer, Ok(Reserve::NotNeeded)), "{answer:?}");
}

#[test]
fn a_transfer_restores_a_snapshot_alone() {
    let mut m = stateful(64);
    drop(sequence(&mut m, prompt(42)));
    let first = sequence(&mut m, prompt(42));
    steps(&mut m, &first, PLENTY); // snapshots at 16, 32, 40
    let seq = sequence(&mut m, diverging(30, 34));
    let transfer = reserved(&mut m, &seq, 28);
    assert_eq!(
        (transfer.indices(), parts(&transfer)),
        (6..7, vec![(6, 1); 2])
    );
    let other = sequence(&mut m, diverging(29, 34));
    let answer = m.reserve(other.key(), 28);
    assert!(
        matches!(answer, Ok(Reserve::Loading { transfer: 1 })),
        "{answer:?}"
    );
    // A prompt that ends before it does not wait.
    let shorter = sequence(&mut m, prompt(28));
    assert_eq!(steps(&mut m, &shorter, PLENTY)[0].0, 16);
    let plan = begin(&mut m, PLENTY);
    let answer = m.prefill(plan.key(), other.key(), PLENTY, None);
    assert_eq!(answer, Ok(Prefill::Loading { transfer: 1 }));
    m.rollback(plan.key()).expect("the newest");
    assert_eq!(m.complete(transfer.key(), 1), Ok(0));
    m.check().expect("sound");
    assert_eq!(steps(&mut m, &other, PLENTY)[0].0, 28);
}

#[test]
fn a_transfer_without_its_snapshot_leaves_the_blocks() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(22));
    let transfer = reserved(&mut m, &seq, 16);
    let filled = &transfer.blocks()[..5]; // half of the snapshot
    assert_eq!(transfer.filled_indices(filled), Ok(3));
    assert_eq!(m.complete(transfer.key(), 3), Ok(0));
    m.check().expect("sound");
    assert_eq!(m.state_usage().snapshots, 0);
    assert_eq!(steps(&mut m, &seq, PLENTY)[0].0, 0);
    let usage = m.usage();
    assert_eq!(
        (usage.loading, usage.free + usage.active + usage.evictable),
        (0, 64)
    );
}

#[test]
fn an_abandoned_snapshot_is_not_awaited_and_never_cached() {
    let mut m = stateful(64);
    let first = sequence(&mut m, prompt(42));
    steps(&mut m, &first, PLENTY);
    let seq = sequence(&mut m, diverging(30, 34));
    let transfer = reserved(&mut m, &seq, 28);
    m.abandon(transfer.key()).expect("open");
    m.check().expect("sound");
    assert_eq!(steps(&mut m, &seq, PLENTY)[0].0, 16);
    let before = m.state_usage().snapshots;
    assert_eq!(m.complete(transfer.key(), 1), Ok(0));
    m.check().expect("sound");
    assert_eq!(m.state_usage().snapshots, before);
}

#[test]
fn what_has_begun_or_waits_for_a_step_is_not_restored() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(42));
    let plan = begin(&mut m, PLENTY);
    m.prefill(plan.key(), seq.key(), PLENTY, None)
        .expect("planned");
    let other = sequence(&mut m, prompt(42));
    // Blocks and a snapshot alone are of no use, so it is all or nothing.
    let answer = m.reserve(other.key(), 40);
    assert!(matches!(answer, Ok(Reserve::NotNeeded)), "{answer:?}");
    commit(&mut m, plan.key());
    let answer = m.reserve(seq.key(), 40);
    assert!(matches!(answer, Ok(Reserve::NotNeeded)), "{answer:?}");
}

#[test]
fn snapshots_on_a_path_are_named_by_their_positions() {
    let mut m = stateful(64);
    let seq = sequence(&mut m, prompt(42)); // 16 and 32 are spare
    steps(&mut m, &seq, PLENTY);
    assert_eq!(m.snapshot_positions(&prompt(42), b""), Ok(vec![40]));
    let other = sequence(&mut m, diverging(26, 34));
    steps(&mut m, &other, PLENTY); // 16 was used, and 24 is a branch point
    assert_eq!(m.snapshot_positions(&prompt(42), b""), Ok(vec![16, 24, 40]));
    assert_eq!(
        m.snapshot_positions(&diverging(26, 34), b""),
        Ok(vec![16, 24, 32])
    );
    assert_eq!(m.snapshot_positions(&prompt(42), b"other"), Ok(vec![]));
    assert_eq!(m.snapshot_positions(&prompt(39), b""), Ok(vec![16, 24]));
}
