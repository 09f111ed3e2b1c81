//! A healthy scene for the validators' tests: everything that a sequence can be, two open plans.

use crate::config::{Config, StateConfig};
use crate::eviction::Eviction;
use crate::handles::Pin;
use crate::handles::{PlanHandle, SeqHandle, Transfer};
use crate::ids::PlanKey;
use crate::manager::BlockManager;
use crate::sequence::Sequence;
use crate::step::Prefill;
use crate::transfers::Reserve;

// The sequences of the scene by their indices; their ids are one more.
/// At rest on four full logical blocks, the first two of which have slid out of the window.
pub(crate) const REST: u32 = 0;
/// Its fork: every token computed.
pub(crate) const COPY: u32 = 1;
/// At rest with a partial logical block, which its forks share.
pub(crate) const PARENT: u32 = 2;
/// Its fork: writes on a copy in the newer plan.
pub(crate) const CHILD: u32 = 3;
/// Its fork: fewer tokens than its logical blocks have room for.
pub(crate) const TAIL: u32 = 4;
/// Stands on a pin that covers all its tokens.
pub(crate) const ATTACHED: u32 = 5;
/// Without blocks.
pub(crate) const FRESH: u32 = 6;
/// In a separate namespace.
pub(crate) const TENANT: u32 = 7;
/// A chunk in each plan; the newer one reuses a logical block that `TWIN` computes.
pub(crate) const LONG: u32 = 8;
/// The same prompt: reuses what `LONG` computes in the older plan, and computes a logical block more.
pub(crate) const TWIN: u32 = 9;
/// Decodes in both plans.
pub(crate) const TALK: u32 = 10;
/// A prompt in the older plan, a decode in the newer one.
pub(crate) const BRIEF: u32 = 11;
/// Two drafts in the newer plan.
pub(crate) const DRAFTY: u32 = 12;
/// A full hit in the newer plan.
pub(crate) const FULL: u32 = 13;
/// Computes logical blocks again that one group has kept, in the newer plan.
pub(crate) const AGAIN: u32 = 14;
/// Dropped, and alive in the older plan.
pub(crate) const LEFT: u32 = 15;
/// Begins inside a logical block in the newer plan, after tokens copied from `PARENT`.
pub(crate) const BORROWER: u32 = 16;

/// A corruption of a scene, and the validator's message.
pub(crate) type Case = (&'static str, fn(&mut Scene));

pub(crate) struct Scene {
    pub(crate) manager: BlockManager,
    handles: Vec<Option<SeqHandle>>,
    plans: Vec<PlanHandle>,
    pins: Vec<Pin>,
    transfers: Vec<Transfer>,
}

impl Scene {
    fn new(config: Config) -> Self {
        let manager = BlockManager::new(Config {
            hash_seed: Some(1),
            ..config
        });
        Self {
            manager: manager.expect("a valid config"),
            handles: Vec::new(),
            plans: Vec::new(),
            pins: Vec::new(),
            transfers: Vec::new(),
        }
    }

    /// A sequence with the next index.
    fn add(&mut self, tokens: std::ops::Range<u32>, namespace: &[u8]) -> u32 {
        let seq = self.manager.sequence(tokens.collect(), namespace, true);
        self.keep(seq.expect("a short prompt"))
    }

    fn fork(&mut self, seq_idx: u32, num_tokens: usize) -> u32 {
        let key = self.handle(seq_idx).key();
        let fork = self.manager.fork(key, num_tokens);
        self.keep(fork.expect("at rest"))
    }

    fn keep(&mut self, seq: SeqHandle) -> u32 {
        self.handles.push(Some(seq));
        (self.handles.len() - 1) as u32
    }

    fn handle(&self, seq_idx: u32) -> &SeqHandle {
        self.handles[seq_idx as usize]
            .as_ref()
            .expect("not dropped")
    }

    fn begin(&mut self) -> PlanKey {
        self.plans
            .push(self.manager.begin_step(100).expect("one open"));
        self.plans[self.plans.len() - 1].key()
    }

    fn prefill(&mut self, seq_idx: u32, max_tokens: usize) {
        let (plan, key) = (
            self.plans[self.plans.len() - 1].key(),
            self.handle(seq_idx).key(),
        );
        let answer = self.manager.prefill(plan, key, max_tokens, None);
        assert!(matches!(answer, Ok(Prefill::Planned { .. })), "{answer:?}");
    }

    fn decode(&mut self, seq_idxs: &[u32]) {
        let keys: Vec<_> = seq_idxs
            .iter()
            .map(|&seq_idx| self.handle(seq_idx).key())
            .collect();
        let plan = self.plans[self.plans.len() - 1].key();
        assert_eq!(self.manager.decode(plan, &keys, 0), Ok(vec![]));
    }

    /// Closes the oldest plan; every logical block samples 7.
    pub(crate) fn commit(&mut self) {
        let plan = self.plans.remove(0);
        let view = self.manager.plan_view(plan.key()).expect("open");
        let sampled = vec![7; view.num_samples];
        let answer = self.manager.commit(plan.key(), &sampled);
        answer.expect("the right number of tokens");
    }

    /// A prompt, computed.
    fn run(&mut self, tokens: std::ops::Range<u32>, namespace: &[u8]) -> u32 {
        let seq_idx = self.add(tokens, namespace);
        self.begin();
        self.prefill(seq_idx, 100);
        self.commit();
        seq_idx
    }

    /// A prompt, computed and forgotten: its full logical blocks are evictable. Its index is free again.
    fn pass(&mut self, tokens: std::ops::Range<u32>) {
        self.run(tokens, b"");
        self.handles.pop();
        self.manager.drain_deferred();
    }

    pub(crate) fn seq(&mut self, seq_idx: u32) -> &mut Sequence {
        self.manager.state.seqs.at_mut(seq_idx)
    }
}

/// Two layer groups, everything that a sequence can be, two open plans.
pub(crate) fn scene() -> Scene {
    let mut scene = Scene::new(Config {
        groups: vec![None, Some(5)],
        events: true,
        eviction: Eviction::TwoQueue,
        ..Config::new(128, 3)
    });
    assert_eq!(scene.run(0..12, b""), REST);
    scene.manager.evict_all();
    assert_eq!(scene.fork(REST, 12), COPY);
    assert_eq!(scene.run(100..107, b""), PARENT);
    assert_eq!(scene.fork(PARENT, 8), CHILD);
    assert_eq!(scene.fork(PARENT, 7), TAIL);
    assert_eq!(scene.add(0..12, b""), ATTACHED);
    let tokens: Vec<u32> = (0..12).collect();
    let pin = scene.manager.match_prefix(&tokens, b"").expect("short");
    let key = scene.handle(ATTACHED).key();
    scene.manager.attach(key, &pin).expect("the same tokens");
    scene.pins.push(pin);
    assert_eq!(scene.add(0..4, b""), FRESH);
    assert_eq!(scene.run(0..5, b"tenant"), TENANT);
    assert_eq!(scene.add(200..220, b""), LONG);
    assert_eq!(scene.add(200..220, b""), TWIN);
    assert_eq!(scene.run(300..304, b""), TALK);
    assert_eq!(scene.add(400..402, b""), BRIEF);
    assert_eq!(scene.run(500..504, b""), DRAFTY);
    assert_eq!(scene.add(0..12, b""), FULL);
    assert_eq!(scene.add(0..10, b""), AGAIN);
    assert_eq!(scene.add(600..604, b""), LEFT);
    assert_eq!(scene.add(100..105, b""), BORROWER);
    rest_of_the_pool(&mut scene);
    older_plan(&mut scene);
    newer_plan(&mut scene);
    transfer(&mut scene);
    scene
}

/// A transfer of two logical blocks after those of `REST`.
fn transfer(scene: &mut Scene) {
    let seq_idx = scene.add(0..18, b"");
    let key = scene.handle(seq_idx).key();
    match scene.manager.reserve(key, 18) {
        Ok(Reserve::Reserved(transfer)) => scene.transfers.push(transfer),
        answer => panic!("{answer:?}"),
    }
}

/// Evictable blocks of every kind, blocks that only a pin holds.
fn rest_of_the_pool(scene: &mut Scene) {
    for first in [700, 710, 720, 730, 740] {
        scene.pass(first..first + 4);
    }
    let mut pin = |first: u32| {
        let tokens: Vec<u32> = (first..first + 3).collect();
        scene.manager.match_prefix(&tokens, b"").expect("short")
    };
    drop(pin(700)); // used again
    let pinned = pin(740);
    scene.pins.push(pinned);
}

fn older_plan(scene: &mut Scene) {
    scene.begin();
    scene.prefill(LONG, 6);
    scene.prefill(TWIN, 3);
    scene.decode(&[TALK]);
    scene.prefill(BRIEF, 100);
    scene.prefill(LEFT, 100);
    scene.handles[LEFT as usize] = None;
}

fn newer_plan(scene: &mut Scene) {
    let plan = scene.begin();
    scene.decode(&[CHILD, TALK, BRIEF]);
    let drafty = scene.handle(DRAFTY).key();
    let answer = scene.manager.speculate(plan, drafty, &[1, 2]);
    assert!(matches!(answer, Ok(Prefill::Planned { .. })), "{answer:?}");
    scene.prefill(LONG, 6);
    scene.prefill(FULL, 100);
    scene.prefill(AGAIN, 100);
    scene.prefill(BORROWER, 100);
    // Taken back: free blocks that say this step is to compute them.
    let taken_back = scene.add(750..756, b"");
    scene.prefill(taken_back, 100);
    let key = scene.handle(taken_back).key();
    assert_eq!(scene.manager.cancel(plan, key), Ok(vec![]));
    scene.manager.drain_deferred();
}

/// A model with states, in blocks of four tokens: cached snapshots after 8 and 12 tokens, a plan that loads the first one
/// and saves another one, and a transfer of a prefix with its snapshot.
pub(crate) fn recurrent() -> Scene {
    let mut scene = Scene::new(Config {
        state: Some(StateConfig {
            blocks: 2,
            cadence: 8,
            min_tokens: 4,
        }),
        ..Config::new(64, 4)
    });
    let first = scene.add(0..14, b"");
    for _ in 0..3 {
        scene.begin();
        scene.prefill(first, 100);
        scene.commit();
    }
    let restored = scene.add(100..110, b"");
    let key = scene.handle(restored).key();
    match scene.manager.reserve(key, 8) {
        Ok(Reserve::Reserved(transfer)) => scene.transfers.push(transfer),
        answer => panic!("{answer:?}"),
    }
    let tokens = (0..8).chain(50..57).collect();
    let second = scene.manager.sequence(tokens, b"", true);
    let second = scene.keep(second.expect("a short prompt"));
    scene.begin();
    scene.prefill(second, 100);
    scene
}

/// Without prefix caching, in a pool that it fills.
pub(crate) fn nameless() -> Scene {
    let mut scene = Scene::new(Config {
        prefix_caching: false,
        ..Config::new(2, 3)
    });
    scene.run(0..4, b"");
    scene
}

/// Fails unless `check` names each corruption of a healthy scene.
pub(crate) fn each_is_named(healthy: fn() -> Scene, cases: &[Case]) {
    for (at, (expected, spoil)) in cases.iter().enumerate() {
        let mut scene = healthy();
        assert_eq!(scene.manager.check(), Ok(()), "before case {at}");
        spoil(&mut scene);
        let difference = scene.manager.check().expect_err(expected);
        assert!(
            difference.contains(expected),
            "case {at}: {difference:?} is not {expected:?}"
        );
    }
}

#[test]
fn healthy_scenes_have_no_differences() {
    let mut scene = scene();
    scene.commit();
    assert_eq!(scene.manager.check(), Ok(()));
    assert_eq!(nameless().manager.check(), Ok(()));
    assert_eq!(recurrent().manager.check(), Ok(()));
    scene.transfers.clear();
    assert_eq!(scene.manager.check(), Ok(()));
    drop(scene.plans);
    assert_eq!(scene.manager.check(), Ok(()));
}
