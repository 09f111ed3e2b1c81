//! A block manager as short as it can be: it finds cached blocks by looking at all of them. A flaw breaks it.

use std::collections::BTreeMap;

use kv_conformance::{BlockManager, Prefilled, Promises};

/// The ways in which it can be wrong.
pub(crate) mod flaw {
    pub(crate) const NONE: u8 = 0;
    /// A block matches by its own tokens, whatever precedes them.
    pub(crate) const IGNORES_PREFIX: u8 = 1;
    pub(crate) const IGNORES_NAMESPACE: u8 = 2;
    /// A block that is allocated still matches what it held before.
    pub(crate) const MATCHES_EVICTED: u8 = 3;
    pub(crate) const LEAKS: u8 = 4;
    /// A refused prefill keeps what it matched.
    pub(crate) const KEEPS_AFTER_REFUSAL: u8 = 5;
    pub(crate) const REFUSES_TOO_MUCH: u8 = 6;
    pub(crate) const NEVER_REUSES: u8 = 7;
    pub(crate) const NEVER_MERGES: u8 = 8;
    /// A fork writes into the parent's partial block.
    pub(crate) const SHARES_PARTIAL_BLOCKS: u8 = 9;
    /// A full hit leaves nothing to compute.
    pub(crate) const REUSES_LAST_TOKEN: u8 = 10;
    pub(crate) const ALL: [(u8, &str); 10] = [
        (IGNORES_PREFIX, "is read from slot"),
        (IGNORES_NAMESPACE, "is read from slot"),
        (MATCHES_EVICTED, "is read from slot"),
        (LEAKS, "can be allocated and"),
        (KEEPS_AFTER_REFUSAL, "can be allocated and"),
        (REFUSES_TOO_MUCH, "is refused, although"),
        (NEVER_REUSES, "live sequences have"),
        (NEVER_MERGES, "hold the same tokens"),
        (SHARES_PARTIAL_BLOCKS, "is read from slot"),
        (REUSES_LAST_TOKEN, "and computes 0"),
    ];
}

/// A namespace, and the tokens up to the end of a block.
type PrefixKey = (u8, Vec<u32>);

#[derive(Clone, Default)]
struct Block {
    refs: usize,
    prefix: Option<PrefixKey>,
    last_used: u64,
}

struct Sequence {
    namespace: u8,
    tokens: Vec<u32>,
    computed: usize,
    table: Vec<u32>,
}

pub(crate) struct Naive {
    flaw: u8,
    block_size: usize,
    blocks: Vec<Block>,
    sequences: BTreeMap<u64, Sequence>,
    step: Vec<(u64, usize)>,
    clock: u64,
}

impl Naive {
    pub(crate) fn new(flaw: u8, num_blocks: usize, block_size: usize) -> Self {
        Self {
            flaw,
            block_size,
            blocks: vec![Block::default(); num_blocks],
            sequences: BTreeMap::new(),
            step: Vec::new(),
            clock: 0,
        }
    }

    fn find(&self, (namespace, tokens): &PrefixKey) -> Option<u32> {
        let own = |tokens: &[u32]| tokens[tokens.len() - self.block_size..].to_vec();
        let same = |prefix: &PrefixKey| match self.flaw {
            flaw::IGNORES_PREFIX => prefix.0 == *namespace && own(&prefix.1) == own(tokens),
            flaw::IGNORES_NAMESPACE => prefix.1 == *tokens,
            _ => prefix.0 == *namespace && prefix.1 == *tokens,
        };
        let holds = |block: &Block| block.prefix.as_ref().is_some_and(same);
        self.blocks.iter().position(holds).map(|block| block as u32)
    }

    fn prefix(&self, id: u64, index: usize) -> PrefixKey {
        let sequence = &self.sequences[&id];
        let end = (index + 1) * self.block_size;
        (sequence.namespace, sequence.tokens[..end].to_vec())
    }

    fn release(&mut self, table: &[u32]) {
        self.clock += 1;
        for block in table {
            let block = &mut self.blocks[*block as usize];
            block.last_used = self.clock;
            block.refs -= 1;
        }
    }

    /// Plans a sequence on `cached` blocks and new ones, up to token `to`.
    fn plan(&mut self, id: u64, cached: &[u32], to: usize) -> bool {
        for block in cached {
            self.blocks[*block as usize].refs += 1;
        }
        let held = self.sequences[&id].table.len() + cached.len();
        let needed = to.div_ceil(self.block_size).saturating_sub(held);
        let too_few = match self.flaw {
            flaw::REFUSES_TOO_MUCH => self.available() < 2 * needed,
            _ => self.available() < needed,
        };
        if too_few {
            if self.flaw != flaw::KEEPS_AFTER_REFUSAL {
                self.release(cached);
            }
            return false;
        }
        let mut table = cached.to_vec();
        for _ in 0..needed {
            let unused = |(_, block): &(usize, &Block)| block.refs == 0;
            let order = |(_, block): &(usize, &Block)| (block.prefix.is_some(), block.last_used);
            let blocks = self.blocks.iter().enumerate();
            let (victim, _) = blocks.filter(unused).min_by_key(order).expect("counted");
            let block = &mut self.blocks[victim];
            block.refs = 1;
            if self.flaw != flaw::MATCHES_EVICTED {
                block.prefix = None;
            }
            table.push(victim as u32);
        }
        self.sequences
            .get_mut(&id)
            .expect("added")
            .table
            .extend(table);
        self.step.push((id, to));
        true
    }

    /// Caches full blocks, or takes those that are cached already.
    fn register(&mut self, id: u64, computed: usize) {
        for index in 0..computed / self.block_size {
            let prefix = self.prefix(id, index);
            let own = self.sequences[&id].table[index];
            match self.find(&prefix) {
                Some(other) if other != own && self.flaw != flaw::NEVER_MERGES => {
                    self.blocks[other as usize].refs += 1;
                    self.release(&[own]);
                    self.sequences.get_mut(&id).expect("added").table[index] = other;
                }
                _ => self.blocks[own as usize].prefix = Some(prefix),
            }
        }
    }
}

impl BlockManager for Naive {
    fn promises(&self) -> Promises {
        Promises {
            reuses_live_prefixes: true,
            deduplicates: true,
            forks: true,
            ..Promises::default()
        }
    }

    fn add(&mut self, id: u64, namespace: u8, tokens: &[u32]) {
        let sequence = Sequence {
            namespace,
            tokens: tokens.to_vec(),
            computed: 0,
            table: Vec::new(),
        };
        self.sequences.insert(id, sequence);
    }

    fn prefill(&mut self, id: u64, max_tokens: usize) -> Option<Prefilled> {
        let (computed, len) = (
            self.sequences[&id].computed,
            self.sequences[&id].tokens.len(),
        );
        let max_cached = match self.flaw {
            flaw::NEVER_REUSES => 0,
            flaw::REUSES_LAST_TOKEN => len / self.block_size,
            _ => (len - 1) / self.block_size,
        };
        let max_cached = if computed == 0 { max_cached } else { 0 };
        let cached: Vec<u32> = (0..max_cached)
            .map_while(|index| self.find(&self.prefix(id, index)))
            .collect();
        let from = computed + cached.len() * self.block_size;
        let to = len.min(from + max_tokens);
        self.plan(id, &cached, to).then_some(Prefilled {
            cached: from - computed,
            computed: to - from,
        })
    }

    fn decode(&mut self, id: u64) -> bool {
        let to = self.sequences[&id].tokens.len();
        self.plan(id, &[], to)
    }

    fn copies(&mut self) -> Vec<(u32, u32)> {
        Vec::new()
    }

    fn commit(&mut self, sampled: &[(u64, u32)]) {
        for (id, to) in std::mem::take(&mut self.step) {
            self.sequences.get_mut(&id).expect("planned").computed = to;
            self.register(id, to);
        }
        for (id, token) in sampled {
            self.append(*id, &[*token]);
        }
    }

    fn append(&mut self, id: u64, tokens: &[u32]) {
        let sequence = self.sequences.get_mut(&id).expect("added");
        sequence.tokens.extend(tokens);
    }

    /// Shares full blocks; the rest is computed again.
    fn fork(&mut self, id: u64, child: u64) {
        let parent = &self.sequences[&id];
        let known = parent.computed.min(parent.tokens.len() - 1);
        let (known, blocks) = match self.flaw {
            flaw::SHARES_PARTIAL_BLOCKS => (known, known.div_ceil(self.block_size)),
            _ => (known - known % self.block_size, known / self.block_size),
        };
        let fork = Sequence {
            namespace: parent.namespace,
            tokens: parent.tokens.clone(),
            computed: known,
            table: parent.table[..blocks].to_vec(),
        };
        for block in &fork.table {
            self.blocks[*block as usize].refs += 1;
        }
        self.sequences.insert(child, fork);
    }

    fn preempt(&mut self, id: u64) {
        let sequence = self.sequences.get_mut(&id).expect("added");
        sequence.computed = 0;
        let table = std::mem::take(&mut sequence.table);
        self.release(&table);
    }

    fn free(&mut self, id: u64) {
        let sequence = self.sequences.remove(&id).expect("added");
        let end = match self.flaw {
            flaw::LEAKS => sequence.table.len().min(2),
            _ => sequence.table.len(),
        };
        self.release(&sequence.table[..end]);
    }

    fn table(&self, id: u64) -> Vec<u32> {
        self.sequences[&id].table.clone()
    }

    fn num_computed(&self, id: u64) -> usize {
        self.sequences[&id].computed
    }

    fn available(&mut self) -> usize {
        self.blocks.iter().filter(|block| block.refs == 0).count()
    }
}
