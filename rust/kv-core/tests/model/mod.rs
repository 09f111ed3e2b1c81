//! The block manager as it would be written by someone who has all the time in the world: contents
//! are named by their whole prefix, references are counted by looking at who holds what.

use std::collections::{BTreeMap, HashMap};

use kv_core::{Ledger, Prefill, Redirect};

/// A namespace and every token up to the end of a block.
type Content = (u8, Vec<u32>);

#[derive(Clone, Debug, Default)]
pub(crate) struct Seq {
    pub(crate) namespace: u8,
    pub(crate) tokens: Vec<u32>,
    pub(crate) table: Vec<u32>,
    pub(crate) computed: usize,
    pub(crate) read_cache: bool,
    pub(crate) planned: bool,
    pub(crate) dropped: bool,
    /// Leading blocks whose contents are registered.
    pub(crate) registered: usize,
}

#[derive(Clone, Debug)]
struct Entry {
    seq: u64,
    len: usize,
    before: Seq,
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    budget: usize,
    entries: Vec<Entry>,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) block_size: usize,
    pub(crate) caching: bool,
    /// Head first.
    queue: Vec<u32>,
    contents: HashMap<Content, u32>,
    pub(crate) seqs: BTreeMap<u64, Seq>,
    pub(crate) leases: BTreeMap<usize, Vec<u32>>,
    pub(crate) plan: Option<Plan>,
    num_blocks: usize,
}

impl Model {
    pub(crate) fn new(num_blocks: usize, block_size: usize, caching: bool) -> Self {
        let queue = (0..num_blocks as u32).collect();
        Self {
            block_size,
            caching,
            queue,
            num_blocks,
            contents: HashMap::new(),
            seqs: BTreeMap::new(),
            leases: BTreeMap::new(),
            plan: None,
        }
    }

    pub(crate) fn seq_refs(&self, block: u32) -> u32 {
        self.seqs
            .values()
            .filter(|seq| seq.table.contains(&block))
            .count() as u32
    }

    pub(crate) fn refs(&self, block: u32) -> u32 {
        self.seq_refs(block)
            + self
                .leases
                .values()
                .filter(|blocks| blocks.contains(&block))
                .count() as u32
    }

    fn has_content(&self, block: u32) -> bool {
        self.contents.values().any(|&holder| holder == block)
    }

    pub(crate) fn ledger(&self) -> Ledger {
        let idle = self
            .queue
            .iter()
            .filter(|&&block| self.has_content(block))
            .count();
        let active = (0..self.num_blocks as u32)
            .filter(|&block| self.seq_refs(block) > 0)
            .count();
        let free = self.queue.len() - idle;
        Ledger {
            free,
            idle,
            active,
            leased: self.num_blocks - free - idle - active,
        }
    }

    /// Blocks that nobody holds any more go to the queue, in the order given.
    fn settle(&mut self, blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            if self.refs(block) > 0 || self.queue.contains(&block) {
                continue;
            }
            match self.has_content(block) {
                true => self.queue.push(block),
                false => self.queue.insert(0, block),
            }
        }
    }

    fn unqueue(&mut self, block: u32) {
        self.queue.retain(|&queued| queued != block);
    }

    fn matched(&self, namespace: u8, tokens: &[u32], from: usize) -> Vec<u32> {
        let ends =
            (from + 1..=tokens.len() / self.block_size).map(|blocks| blocks * self.block_size);
        ends.map_while(|end| {
            self.contents
                .get(&(namespace, tokens[..end].to_vec()))
                .copied()
        })
        .collect()
    }

    pub(crate) fn match_prefix(&mut self, lease: usize, namespace: u8, tokens: &[u32]) {
        let blocks = self.matched(namespace, tokens, 0);
        blocks.iter().for_each(|&block| self.unqueue(block));
        self.leases.insert(lease, blocks);
    }

    pub(crate) fn lease(&mut self, lease: usize, seq: u64) {
        let seq = &self.seqs[&seq];
        self.leases
            .insert(lease, seq.table[..seq.registered].to_vec());
    }

    pub(crate) fn drop_lease(&mut self, lease: usize) {
        let blocks = self.leases.remove(&lease).unwrap_or_default();
        self.settle(blocks.into_iter().rev());
    }

    /// Whether the lease's blocks hold a prefix of the sequence.
    pub(crate) fn attach(&mut self, seq: u64, lease: usize) -> bool {
        let blocks = self.leases[&lease].clone();
        let s = &self.seqs[&seq];
        if s.planned || !s.table.is_empty() {
            return false;
        }
        let found = self.matched(s.namespace, &s.tokens, 0);
        if !found.starts_with(&blocks) {
            return false;
        }
        let (size, s) = (self.block_size, self.seqs.get_mut(&seq).expect("live"));
        s.registered = blocks.len();
        s.computed = (blocks.len() * size).min(s.tokens.len() - 1);
        s.table = blocks;
        true
    }

    fn shorten(&mut self, seq: u64, to: &Seq) {
        let now = self.seqs.insert(seq, to.clone()).expect("live");
        self.settle(now.table[to.table.len()..].iter().rev().copied());
    }

    pub(crate) fn reset(&mut self, seq: u64) {
        let s = self.seqs[&seq].clone();
        self.shorten(
            seq,
            &Seq {
                table: Vec::new(),
                computed: 0,
                registered: 0,
                ..s
            },
        );
    }

    pub(crate) fn free(&mut self, seq: u64) {
        self.seqs.get_mut(&seq).expect("live").dropped = true;
        self.bury(seq);
    }

    /// Ends a dropped sequence unless a plan holds it.
    fn bury(&mut self, seq: u64) {
        if self.seqs[&seq].dropped && !self.seqs[&seq].planned {
            let table = self.seqs.remove(&seq).expect("live").table;
            self.settle(table.into_iter().rev());
        }
    }

    pub(crate) fn begin(&mut self, budget: usize) {
        self.plan = Some(Plan {
            budget,
            entries: Vec::new(),
        });
    }

    fn push(&mut self, seq: u64, adopted: &[u32], start: usize, len: usize) {
        let before = self.seqs[&seq].clone();
        adopted.iter().for_each(|&block| self.unqueue(block));
        let needed = (start + len).div_ceil(self.block_size);
        let s = self.seqs.get_mut(&seq).expect("live");
        s.table.extend(adopted);
        s.registered += adopted.len();
        (s.computed, s.planned) = (start, true);
        while self.seqs[&seq].table.len() < needed {
            let block = self.queue.remove(0);
            self.contents.retain(|_, holder| *holder != block);
            self.seqs.get_mut(&seq).expect("live").table.push(block);
        }
        let plan = self.plan.as_mut().expect("open");
        plan.budget -= len;
        plan.entries.push(Entry { seq, len, before });
    }

    pub(crate) fn decode(&mut self, seq: u64) -> bool {
        let s = &self.seqs[&seq];
        let needs_block = s.computed == s.table.len() * self.block_size;
        let fits = self.plan.as_ref().expect("open").budget > 0
            && (!needs_block || !self.queue.is_empty());
        if fits {
            self.push(seq, &[], s.computed, 1);
        }
        fits
    }

    pub(crate) fn prefill(
        &mut self,
        seq: u64,
        max_tokens: usize,
        reserve: Option<usize>,
    ) -> Prefill {
        let (size, s) = (self.block_size, self.seqs[&seq].clone());
        let may_match = self.caching
            && s.read_cache
            && s.registered == s.table.len()
            && s.computed == s.table.len() * size;
        let adopted = if may_match {
            self.matched(s.namespace, &s.tokens, s.table.len())
        } else {
            Vec::new()
        };
        let blocks = s.table.len() + adopted.len();
        let start = if adopted.is_empty() {
            s.computed
        } else {
            (blocks * size).min(s.tokens.len() - 1)
        };
        let most = max_tokens.min(self.plan.as_ref().expect("open").budget);
        let (all, fits) = (s.tokens.len(), start + most);
        let end = match fits / size * size {
            _ if fits >= all => all,
            boundary if boundary > start => boundary,
            _ => fits,
        };
        let tokens = end - start;
        if tokens == 0 {
            return Prefill::NoBudget;
        }
        let revived = adopted
            .iter()
            .filter(|block| self.queue.contains(block))
            .count();
        let end = if reserve.is_some() {
            s.tokens.len()
        } else {
            start + tokens
        };
        let needed = revived + end.div_ceil(size).saturating_sub(blocks) + reserve.unwrap_or(0);
        if needed > self.queue.len() {
            return Prefill::NoRoom {
                needed,
                available: self.queue.len(),
            };
        }
        self.push(seq, &adopted, start, tokens);
        Prefill::Planned {
            cached_tokens: start - s.computed,
            tokens,
            samples: start + tokens == s.tokens.len(),
        }
    }

    fn undo(&mut self, entry: Entry) {
        let dropped = self.seqs[&entry.seq].dropped;
        self.shorten(
            entry.seq,
            &Seq {
                dropped,
                ..entry.before
            },
        );
        self.bury(entry.seq);
    }

    pub(crate) fn cancel(&mut self, seq: u64) -> bool {
        let plan = self.plan.as_mut().expect("open");
        let Some(at) = plan.entries.iter().position(|entry| entry.seq == seq) else {
            return false;
        };
        let entry = plan.entries.remove(at);
        plan.budget += entry.len;
        self.undo(entry);
        true
    }

    pub(crate) fn roll_back(&mut self) {
        let plan = self.plan.take().expect("open");
        plan.entries
            .into_iter()
            .rev()
            .for_each(|entry| self.undo(entry));
    }

    pub(crate) fn commit(&mut self, mut sampled: impl Iterator<Item = u32>) -> Vec<Redirect> {
        let plan = self.plan.take().expect("open");
        let mut redirects = Vec::new();
        for Entry { seq, len, .. } in &plan.entries {
            let mut s = self.seqs[seq].clone();
            s.computed += len;
            s.planned = false;
            let full = if self.caching {
                s.computed / self.block_size
            } else {
                0
            };
            for index in s.registered..full {
                let content = (
                    s.namespace,
                    s.tokens[..(index + 1) * self.block_size].to_vec(),
                );
                let mine = s.table[index];
                match self.contents.get(&content).copied() {
                    Some(first) if self.refs(first) > 0 => {
                        s.table[index] = first;
                        redirects.push(Redirect {
                            sequence: *seq,
                            index,
                            old_block: mine.into(),
                            new_block: first.into(),
                        });
                        self.seqs.insert(*seq, s.clone());
                        self.settle([mine]);
                    }
                    known => {
                        self.contents.insert(content, mine);
                        if let Some(idle) = known {
                            self.unqueue(idle);
                            self.settle([idle]);
                        }
                    }
                }
                s.registered = index + 1;
            }
            if s.computed == s.tokens.len() {
                s.tokens.extend(sampled.next());
            }
            self.seqs.insert(*seq, s);
        }
        plan.entries.iter().for_each(|entry| self.bury(entry.seq));
        redirects
    }

    pub(crate) fn budget(&self) -> usize {
        self.plan.as_ref().map_or(0, |plan| plan.budget)
    }

    pub(crate) fn evict_idle(&mut self) -> usize {
        let idle: Vec<u32> = self
            .queue
            .iter()
            .copied()
            .filter(|&block| self.has_content(block))
            .collect();
        for &block in &idle {
            self.unqueue(block);
            self.contents.retain(|_, holder| *holder != block);
            self.settle([block]);
        }
        idle.len()
    }
}
