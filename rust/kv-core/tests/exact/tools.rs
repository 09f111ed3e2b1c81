//! Helpers of the scripts: blocks of four tokens, steps with a large budget.

use std::cell::Cell;
use std::time::Duration;

use kv_core::{
    BlockId, BlockManager, Config, Event, PlanHandle, PlanKey, Prefill, Remapping, SeqHandle,
};

/// A budget that no script uses up.
pub(crate) const PLENTY: usize = 1_000;

/// The token that every step samples.
pub(crate) const SAMPLED: u32 = 9_000;

/// Nothing is cached; the weights are the first ones.
pub(crate) const CLEARED: Event = Event::Cleared { weights_version: 0 };

/// Settings of a pool with blocks of four tokens, the same hashes every time and events.
pub(crate) fn settings(num_blocks: usize) -> Config {
    Config {
        hash_seed: Some(1),
        events: true,
        ..Config::new(num_blocks, 4)
    }
}

pub(crate) fn manager(num_blocks: usize) -> BlockManager {
    with(settings(num_blocks))
}

pub(crate) fn with(config: Config) -> BlockManager {
    BlockManager::new(config).expect("valid settings")
}

/// So many tokens, each its position: blocks 0, 1, 2, ... of one prompt.
pub(crate) fn prompt(len: u32) -> Vec<u32> {
    (0..len).collect()
}

/// A prompt of one block, identified by `name`.
pub(crate) fn block_of(name: u32) -> Vec<u32> {
    vec![name; 4]
}

pub(crate) fn sequence(m: &mut BlockManager, tokens: Vec<u32>) -> SeqHandle {
    m.sequence(tokens, b"", true).expect("tokens")
}

pub(crate) fn begin(m: &mut BlockManager, budget: usize) -> PlanHandle {
    m.begin_step(budget).expect("less than two are open")
}

/// Plans all uncomputed tokens of a sequence; there are enough blocks.
pub(crate) fn prefill(m: &mut BlockManager, plan: PlanKey, seq: &SeqHandle) {
    let answer = m.prefill(plan, seq.key(), PLENTY, None).expect("no misuse");
    assert!(matches!(answer, Prefill::Planned { .. }), "{answer:?}");
}

/// Carries out the copies of the oldest plan and commits it; each of its rows samples the same.
pub(crate) fn commit(m: &mut BlockManager, plan: PlanKey) -> Vec<Remapping> {
    m.copies(plan).expect("open");
    let samples = m.plan_view(plan).expect("open").num_samples;
    m.commit(plan, &vec![SAMPLED; samples]).expect("the oldest")
}

/// A sequence of these tokens, all computed in one step.
pub(crate) fn computed(m: &mut BlockManager, tokens: Vec<u32>) -> SeqHandle {
    let seq = sequence(m, tokens);
    let plan = begin(m, PLENTY);
    prefill(m, plan.key(), &seq);
    commit(m, plan.key());
    seq
}

/// A step that decodes all of these.
pub(crate) fn decoded(m: &mut BlockManager, seqs: &[&SeqHandle]) -> Vec<Remapping> {
    let plan = begin(m, PLENTY);
    let keys: Vec<_> = seqs.iter().map(|seq| seq.key()).collect();
    assert_eq!(m.decode(plan.key(), &keys, 0), Ok(vec![]));
    commit(m, plan.key())
}

/// Computes or reuses blocks one after the other; they are evictable afterwards.
pub(crate) fn used(m: &mut BlockManager, names: impl IntoIterator<Item = u32>) {
    for name in names {
        drop(computed(m, block_of(name)));
    }
    m.drain_deferred();
}

/// Allocates `count` blocks. Returns the cached blocks that were evicted, in order.
pub(crate) fn given_up(m: &mut BlockManager, count: u32, known: &[u32]) -> Vec<u32> {
    m.take_events();
    let tokens = (0..4 * count).map(|at| 1_000_000 + at).collect();
    let taker = sequence(m, tokens);
    let plan = begin(m, PLENTY);
    prefill(m, plan.key(), &taker);
    let gone = removed(&m.take_events());
    let root = m.hasher().root(b"");
    let name = |hash: u128| {
        let mut known = known.iter().copied();
        known.find(|&name| m.hasher().child(root, &block_of(name)) == hash)
    };
    let names = gone.into_iter().map(|hash| name(hash).expect("known"));
    let names: Vec<u32> = names.collect();
    m.rollback(plan.key()).expect("the newest");
    m.check().expect("sound");
    names
}

pub(crate) fn removed(events: &[Event]) -> Vec<u128> {
    let hashes = |event: &Event| match event {
        Event::Removed { hashes } => hashes.clone(),
        _ => vec![],
    };
    events.iter().flat_map(hashes).collect()
}

/// The blocks of a sequence in a layer group.
pub(crate) fn table(m: &BlockManager, seq: &SeqHandle, group: usize) -> Vec<Option<u32>> {
    let view = m.view(seq.key()).expect("live");
    view.table(group)
        .map(|block| block.map(BlockId::get))
        .collect()
}

/// In a pool of four blocks that evicts by `2q`: the second block of a prompt is cached, the first one is not.
pub(crate) fn lose_the_head(m: &mut BlockManager) {
    drop(computed(m, prompt(8)));
    drop(computed(m, prompt(4))); // used again: half of the evictable blocks, evicted first
    m.take_events();
    let taker = sequence(m, vec![7_000; 12]);
    let plan = begin(m, PLENTY);
    prefill(m, plan.key(), &taker);
    m.rollback(plan.key()).expect("the newest");
}

/// Asserts that 16 times the work takes clearly less than 256 times as long. Compares the fastest of three tries, or of
/// up to 20 while other load slows the machine.
pub(crate) fn assert_linear(took: impl Fn(u32) -> Duration, few: u32) {
    let (mut short, mut long) = (Duration::MAX, Duration::MAX);
    for tries in 1..=20 {
        (short, long) = (short.min(took(few)), long.min(took(16 * few)));
        if tries >= 3 && long < 64 * short {
            return;
        }
    }
    panic!("{short:?} for {few}, {long:?} for 16 times as many");
}

#[test]
#[should_panic(expected = "for 16 times as many")]
fn quadratic_times_are_not_linear() {
    let is_first = Cell::new(true);
    let slow = |count: u32| match is_first.take() {
        true => Duration::from_secs(1), // of a machine that does something else
        false => Duration::from_nanos(u64::from(count).pow(2)),
    };
    assert_linear(slow, 500);
}
