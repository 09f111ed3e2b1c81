//! kv-core conforms.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use kv_conformance::{BlockManager, Prefilled, Promises, Runs, check};
use kv_core::{BlockManager as Manager, Config, PlanHandle, Prefill, SeqHandle};

struct Adapter {
    manager: Manager,
    sequences: BTreeMap<u64, SeqHandle>,
    plan: Option<PlanHandle>,
}

impl Adapter {
    fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            manager: Manager::new(Config::new(num_blocks, block_size)).unwrap(),
            sequences: BTreeMap::new(),
            plan: None,
        }
    }

    fn plan(&mut self) -> kv_core::PlanKey {
        let begin = || self.manager.begin_step(1 << 20).unwrap();
        self.plan.get_or_insert_with(begin).key()
    }
}

impl BlockManager for Adapter {
    fn promises(&self) -> Promises {
        Promises {
            reuses_live_prefixes: true,
            deduplicates: true,
            forks: true,
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
