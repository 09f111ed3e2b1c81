//! kv-core conforms.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use kv_conformance::{BlockManager, Prefilled, Promises, Runs, StateCopy, check};
use kv_core::{BlockManager as Manager, Config, PlanHandle, Prefill, SeqHandle, StateConfig};

struct Adapter {
    manager: Manager,
    sequences: BTreeMap<u64, SeqHandle>,
    plan: Option<PlanHandle>,
}

impl Adapter {
    fn new(num_blocks: usize, block_size: usize) -> Self {
        Self::with(Config::new(num_blocks, block_size))
    }

    /// A manager for a model with states of one or two blocks.
    fn with_states(num_blocks: usize, block_size: usize) -> Self {
        let state = StateConfig {
            blocks: 1 + num_blocks % 2,
            cadence: 4,
            min_tokens: num_blocks % 5,
        };
        Self::with(Config {
            state: (state.blocks <= num_blocks).then_some(state),
            in_flight_sharing: false, // a refusal for that has nothing to do with blocks
            ..Config::new(num_blocks, block_size)
        })
    }

    fn with(config: Config) -> Self {
        Self {
            manager: Manager::new(config).unwrap(),
            sequences: BTreeMap::new(),
            plan: None,
        }
    }

    fn copies_of_states(&self, copies: Vec<kv_core::StateCopy>) -> Vec<StateCopy> {
        let id = |sequence: u64| {
            let mut all = self.sequences.iter();
            all.find(|(_, handle)| handle.id() == sequence).unwrap().0
        };
        let copy = |copy: kv_core::StateCopy| StateCopy {
            id: *id(copy.sequence),
            position: copy.position,
            blocks: copy.blocks.iter().map(|block| block.get()).collect(),
        };
        copies.into_iter().map(copy).collect()
    }

    fn plan(&mut self) -> kv_core::PlanKey {
        let begin = || self.manager.begin_step(1 << 20).unwrap();
        self.plan.get_or_insert_with(begin).key()
    }
}

impl BlockManager for Adapter {
    fn promises(&self) -> Promises {
        Promises {
            reuses_live_prefixes: self.manager.config().state.is_none(),
            deduplicates: true,
            forks: true,
            state_blocks: self.manager.config().state.map_or(0, |state| state.blocks),
        }
    }

    fn add(&mut self, id: u64, namespace: u8, tokens: &[u32]) {
        let sequence = self.manager.sequence(tokens.to_vec(), &[namespace], true);
        self.sequences.insert(id, sequence.unwrap());
    }

    fn prefill(&mut self, id: u64, max_tokens: usize) -> Option<Prefilled> {
        let (plan, key) = (self.plan(), self.sequences[&id].key());
        match self.manager.prefill(plan, key, max_tokens, None).unwrap() {
            Prefill::Planned {
                cached_tokens,
                tokens,
                ..
            } => Some(Prefilled {
                cached: cached_tokens,
                computed: tokens,
            }),
            _ => None,
        }
    }

    fn decode(&mut self, id: u64) -> bool {
        let (plan, key) = (self.plan(), self.sequences[&id].key());
        self.manager.decode(plan, &[key], 0).unwrap().is_empty()
    }

    fn copies(&mut self) -> Vec<(u32, u32)> {
        let plan = self.plan();
        let copies = self.manager.copies(plan).unwrap().iter();
        copies.map(|(from, to)| (from.get(), to.get())).collect()
    }

    fn state_loads(&mut self) -> Vec<StateCopy> {
        let plan = self.plan();
        let loads = self.manager.state_loads(plan).unwrap();
        self.copies_of_states(loads)
    }

    fn state_saves(&mut self) -> Vec<StateCopy> {
        let plan = self.plan();
        let saves = self.manager.state_saves(plan).unwrap();
        self.copies_of_states(saves)
    }

    fn commit(&mut self, sampled: &[(u64, u32)]) {
        let plan = self.plan.take().unwrap();
        let tokens: Vec<_> = sampled.iter().map(|(_, token)| *token).collect();
        self.manager.commit(plan.key(), &tokens).unwrap();
        self.manager.check().unwrap();
    }

    fn append(&mut self, id: u64, tokens: &[u32]) {
        self.manager
            .append(self.sequences[&id].key(), tokens)
            .unwrap();
    }

    fn fork(&mut self, id: u64, child: u64) {
        let key = self.sequences[&id].key();
        let len = self.manager.view(key).unwrap().tokens.len();
        let fork = self.manager.fork(key, len).unwrap();
        self.sequences.insert(child, fork);
    }

    fn preempt(&mut self, id: u64) {
        self.manager.reset(self.sequences[&id].key()).unwrap();
    }

    fn free(&mut self, id: u64) {
        self.sequences.remove(&id);
    }

    fn table(&self, id: u64) -> Vec<u32> {
        let view = self.manager.view(self.sequences[&id].key()).unwrap();
        view.table(0).map(|block| block.unwrap().get()).collect()
    }

    fn num_computed(&self, id: u64) -> usize {
        let view = self.manager.view(self.sequences[&id].key()).unwrap();
        view.num_computed_tokens
    }

    fn available(&mut self) -> usize {
        self.manager.usage().available()
    }
}

#[test]
fn kv_core_conforms() {
    let report =
        check(&Runs::default(), Adapter::new).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(report.steps > 1000, "{report:?}");
    assert!(report.cached_tokens > 1000, "{report:?}");
    assert!(report.refusals > 1000, "{report:?}");
    assert!(report.copies > 10, "{report:?}");
}

#[test]
fn kv_core_conforms_with_states() {
    let report =
        check(&Runs::default(), Adapter::with_states).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(report.steps > 1000, "{report:?}");
    assert!(report.states > 100, "{report:?}");
}

#[test]
fn a_state_of_other_tokens_is_found() {
    struct Wrong(Adapter);
    // The blocks of a state are given in the wrong order.
    impl Wrong {
        fn shift(mut copies: Vec<StateCopy>) -> Vec<StateCopy> {
            for copy in &mut copies {
                copy.blocks.reverse();
            }
            copies
        }
    }
    impl BlockManager for Wrong {
        fn promises(&self) -> Promises {
            self.0.promises()
        }
        fn add(&mut self, id: u64, namespace: u8, tokens: &[u32]) {
            self.0.add(id, namespace, tokens);
        }
        fn prefill(&mut self, id: u64, max_tokens: usize) -> Option<Prefilled> {
            self.0.prefill(id, max_tokens)
        }
        fn decode(&mut self, id: u64) -> bool {
            self.0.decode(id)
        }
        fn copies(&mut self) -> Vec<(u32, u32)> {
            self.0.copies()
        }
        fn state_loads(&mut self) -> Vec<StateCopy> {
            self.0.state_loads()
        }
        fn state_saves(&mut self) -> Vec<StateCopy> {
            Self::shift(self.0.state_saves())
        }
        fn commit(&mut self, sampled: &[(u64, u32)]) {
            self.0.commit(sampled);
        }
        fn append(&mut self, id: u64, tokens: &[u32]) {
            self.0.append(id, tokens);
        }
        fn fork(&mut self, id: u64, child: u64) {
            self.0.fork(id, child);
        }
        fn preempt(&mut self, id: u64) {
            self.0.preempt(id);
        }
        fn free(&mut self, id: u64) {
            self.0.free(id);
        }
        fn table(&self, id: u64) -> Vec<u32> {
            self.0.table(id)
        }
        fn num_computed(&self, id: u64) -> usize {
            self.0.num_computed(id)
        }
        fn available(&mut self) -> usize {
            self.0.available()
        }
    }
    let new = |blocks, size| Wrong(Adapter::with_states(blocks, size));
    let failure = check(&Runs::default(), new).expect_err("halves of states change places");
    assert!(
        failure.difference.contains("is loaded from block"),
        "{failure}"
    );
}
