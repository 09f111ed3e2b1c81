//! The block manager as it would be written by someone who has all the time in the world: contents
//! are named by their whole prefix, references are counted by looking at who holds what.

pub(crate) mod op;
#[allow(dead_code)] // not every test records
pub(crate) mod recording;
pub(crate) mod world;

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
    /// Where the open plans will have brought it.
    pub(crate) ahead: usize,
    /// Tokens that open plans sample for it.
    pub(crate) pending: usize,
    pub(crate) speculating: bool,
    pub(crate) read_cache: bool,
    /// Open plans that hold it.
    pub(crate) planned: u8,
    pub(crate) dropped: bool,
    /// Leading blocks whose contents are registered.
    pub(crate) registered: usize,
}

/// What an entry takes beside the tokens that it computes.
enum Extra {
    Announces,
    Lookahead(usize),
    Drafts(Vec<u32>),
}

#[derive(Clone, Debug)]
struct Entry {
    seq: u64,
    start: usize,
    len: usize,
    samples: bool,
    drafts: Vec<u32>,
    /// What the sequence was before: length of its table, how far ahead, blocks registered.
    before: (usize, usize, usize),
    /// The partial block in place of which it writes on a copy: index, block.
    source: Option<(usize, u32)>,
    /// Blocks adopted, and blocks whose contents this entry computes for all.
    adopted: Vec<u32>,
    announced: Vec<u32>,
    /// The copy that it writes on instead of a shared partial block.
    copy: Option<u32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    budget: usize,
    entries: Vec<Entry>,
    pub(crate) copies: Vec<(u32, u32)>,
    /// Sources of copies: the plan holds them until it is closed.
    fenced: Vec<u32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) block_size: usize,
    pub(crate) caching: bool,
    pub(crate) sharing: bool,
    /// Head first.
    queue: Vec<u32>,
    contents: HashMap<Content, u32>,
    pub(crate) seqs: BTreeMap<u64, Seq>,
    pub(crate) leases: BTreeMap<usize, Vec<u32>>,
    /// Oldest first.
    pub(crate) plans: Vec<Plan>,
    num_blocks: usize,
}

impl Model {
    pub(crate) fn new(num_blocks: usize, block_size: usize, caching: bool, sharing: bool) -> Self {
        let queue = (0..num_blocks as u32).collect();
        Self {
            block_size,
            caching,
            sharing,
            queue,
            num_blocks,
            contents: HashMap::new(),
            seqs: BTreeMap::new(),
            leases: BTreeMap::new(),
            plans: Vec::new(),
        }
    }

    pub(crate) fn seq_refs(&self, block: u32) -> u32 {
        self.seqs
            .values()
            .filter(|seq| seq.table.contains(&block))
            .count() as u32
    }

    pub(crate) fn refs(&self, block: u32) -> u32 {
        let leases = self.leases.values();
        let fenced = self.plans.iter().flat_map(|plan| &plan.fenced);
        self.seq_refs(block)
            + leases.filter(|blocks| blocks.contains(&block)).count() as u32
            + fenced.filter(|&&fenced| fenced == block).count() as u32
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

    /// How many of these blocks, from the first on, no open step is to compute.
    fn ready(&self, blocks: &[u32]) -> usize {
        let entries = self.plans.iter().flat_map(|plan| &plan.entries);
        let computing: Vec<u32> = entries.flat_map(|entry| entry.announced.clone()).collect();
        blocks
            .iter()
            .take_while(|block| !computing.contains(block))
            .count()
    }

    pub(crate) fn match_prefix(&mut self, lease: usize, namespace: u8, tokens: &[u32]) {
        let mut blocks = self.matched(namespace, tokens, 0);
        blocks.truncate(self.ready(&blocks));
        blocks.iter().for_each(|&block| self.unqueue(block));
        self.leases.insert(lease, blocks);
    }

    pub(crate) fn lease(&mut self, lease: usize, seq: u64) {
        let seq = &self.seqs[&seq];
        let blocks = &seq.table[..seq.registered];
        self.leases
            .insert(lease, blocks[..self.ready(blocks)].to_vec());
    }

    pub(crate) fn drop_lease(&mut self, lease: usize) {
        let blocks = self.leases.remove(&lease).unwrap_or_default();
        self.settle(blocks.into_iter().rev());
    }

    /// Whether the lease's blocks hold a prefix of the sequence.
    pub(crate) fn attach(&mut self, seq: u64, lease: usize) -> bool {
        let blocks = self.leases[&lease].clone();
        let s = &self.seqs[&seq];
        if s.planned > 0 || !s.table.is_empty() {
            return false;
        }
        let found = self.matched(s.namespace, &s.tokens, 0);
        if !found.starts_with(&blocks) {
            return false;
        }
        let (size, s) = (self.block_size, self.seqs.get_mut(&seq).expect("live"));
        s.registered = blocks.len();
        s.computed = (blocks.len() * size).min(s.tokens.len() - 1);
        s.ahead = s.computed;
        s.table = blocks;
        true
    }

    /// Puts a sequence back to what it was; what it held since goes, the last block first.
    fn shorten(&mut self, seq: u64, to: &Seq) {
        let now = self.seqs.insert(seq, to.clone()).expect("live");
        to.table.iter().for_each(|&block| self.unqueue(block));
        let (kept, grown) = now.table.split_at(to.table.len());
        self.settle(grown.iter().rev().copied());
        self.settle(kept.iter().copied());
    }

    pub(crate) fn fork(&mut self, seq: u64, fork: u64, num_tokens: usize) -> bool {
        let s = &self.seqs[&seq];
        if s.planned > 0 || num_tokens == 0 || num_tokens > s.tokens.len() {
            return false;
        }
        let computed = s.computed.min(num_tokens);
        let child = Seq {
            tokens: s.tokens[..num_tokens].to_vec(),
            table: s.table[..computed.div_ceil(self.block_size)].to_vec(),
            computed,
            ahead: computed,
            registered: s.registered.min(computed / self.block_size),
            ..s.clone()
        };
        self.seqs.insert(fork, child);
        true
    }

    /// The table index of a partial block that others hold too and that is about to be written.
    fn must_copy(&self, seq: u64, position: usize) -> Option<usize> {
        let (s, index) = (&self.seqs[&seq], position / self.block_size);
        let shared = |&&block: &&u32| self.seq_refs(block) > 1 || self.has_content(block);
        let block = s.table.get(index).filter(shared);
        block.filter(|_| index >= s.registered).map(|_| index)
    }

    fn allocate(&mut self) -> u32 {
        let block = self.queue.remove(0);
        self.contents.retain(|_, holder| *holder != block);
        block
    }

    fn copy(&mut self, seq: u64, index: usize) -> u32 {
        let copy = self.allocate();
        let table = &mut self.seqs.get_mut(&seq).expect("live").table;
        let source = std::mem::replace(&mut table[index], copy);
        let plan = self.newest();
        plan.copies.push((source, copy));
        plan.fenced.push(source);
        copy
    }

    pub(crate) fn reset(&mut self, seq: u64) {
        let s = self.seqs[&seq].clone();
        self.shorten(
            seq,
            &Seq {
                table: Vec::new(),
                computed: 0,
                ahead: 0,
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
        if self.seqs[&seq].dropped && self.seqs[&seq].planned == 0 {
            let table = self.seqs.remove(&seq).expect("live").table;
            self.settle(table.into_iter().rev());
        }
    }

    pub(crate) fn begin(&mut self, budget: usize) {
        self.plans.push(Plan {
            budget,
            entries: Vec::new(),
            copies: Vec::new(),
            fenced: Vec::new(),
        });
    }

    fn push(&mut self, seq: u64, adopted: &[u32], start: usize, len: usize, extra: Extra) {
        let announces = matches!(extra, Extra::Announces);
        let (lookahead, drafts) = match extra {
            Extra::Lookahead(slots) => (slots, Vec::new()),
            Extra::Drafts(drafts) => (0, drafts),
            Extra::Announces => (0, Vec::new()),
        };
        let s = &self.seqs[&seq];
        let before = (s.table.len(), s.ahead, s.registered);
        adopted.iter().for_each(|&block| self.unqueue(block));
        let needed = (start + len + lookahead).div_ceil(self.block_size);
        let copied = self.must_copy(seq, start).filter(|_| adopted.is_empty());
        let source = copied.map(|index| (index, self.seqs[&seq].table[index]));
        let copy = copied.map(|index| self.copy(seq, index));
        let s = self.seqs.get_mut(&seq).expect("live");
        s.table.extend(adopted);
        s.registered += adopted.len();
        let samples = start + len == s.tokens.len() + s.pending + drafts.len();
        (s.ahead, s.speculating) = (start + len, !drafts.is_empty());
        s.pending += usize::from(samples);
        s.planned += 1;
        while self.seqs[&seq].table.len() < needed {
            let block = self.allocate();
            self.seqs.get_mut(&seq).expect("live").table.push(block);
        }
        let mut announced = Vec::new();
        let s = self.seqs.get_mut(&seq).expect("live");
        let full = (start + len) / self.block_size;
        while announces && self.caching && self.sharing && s.registered < full {
            let end = (s.registered + 1) * self.block_size;
            let content = (s.namespace, s.tokens[..end].to_vec());
            if self.contents.contains_key(&content) {
                break;
            }
            self.contents.insert(content, s.table[s.registered]);
            announced.push(s.table[s.registered]);
            s.registered += 1;
        }
        let plan = self.newest();
        plan.budget -= len;
        plan.entries.push(Entry {
            seq,
            start,
            len,
            samples,
            drafts,
            before,
            source,
            adopted: adopted.to_vec(),
            announced,
            copy,
        });
    }

    fn newest(&mut self) -> &mut Plan {
        self.plans.last_mut().expect("open")
    }

    fn blocks_to_write(&self, seq: u64, len: usize) -> usize {
        let s = &self.seqs[&seq];
        let blocks = (s.ahead + len).div_ceil(self.block_size);
        let copy = self.must_copy(seq, s.ahead).is_some();
        blocks.saturating_sub(s.table.len()) + usize::from(copy)
    }

    pub(crate) fn decode(&mut self, seq: u64, lookahead: usize) -> bool {
        let needed = self.blocks_to_write(seq, 1 + lookahead);
        let fits = self.budget() > 0 && needed <= self.queue.len();
        if fits {
            let start = self.seqs[&seq].ahead;
            self.push(seq, &[], start, 1, Extra::Lookahead(lookahead));
        }
        fits
    }

    pub(crate) fn speculate(&mut self, seq: u64, drafts: Vec<u32>) -> Prefill {
        let tokens = 1 + drafts.len();
        let (needed, available) = (self.blocks_to_write(seq, tokens), self.queue.len());
        if tokens > self.budget() {
            return Prefill::NoBudget;
        }
        if needed > available {
            return Prefill::NoRoom { needed, available };
        }
        let start = self.seqs[&seq].ahead;
        self.push(seq, &[], start, tokens, Extra::Drafts(drafts));
        Prefill::Planned {
            cached_tokens: 0,
            tokens,
            samples: true,
        }
    }

    pub(crate) fn trim(&mut self, seq: u64, num_tokens: usize) -> Option<usize> {
        let s = &self.seqs[&seq];
        if s.planned > 0 || num_tokens < s.computed {
            return None;
        }
        let keep = num_tokens.div_ceil(self.block_size).max(s.registered);
        let mut shorter = s.clone();
        shorter.table.truncate(keep);
        let gone = s.table.len() - shorter.table.len();
        self.shorten(seq, &shorter);
        Some(gone)
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
            && s.ahead == s.table.len() * size;
        let adopted = if may_match {
            self.matched(s.namespace, &s.tokens, s.table.len())
        } else {
            Vec::new()
        };
        let blocks = s.table.len() + adopted.len();
        let start = if adopted.is_empty() {
            s.ahead
        } else {
            (blocks * size).min(s.tokens.len() - 1)
        };
        let most = max_tokens.min(self.budget());
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
        let copy = adopted.is_empty() && self.must_copy(seq, start).is_some();
        let needed = revived
            + end.div_ceil(size).saturating_sub(blocks)
            + usize::from(copy)
            + reserve.unwrap_or(0);
        if needed > self.queue.len() {
            return Prefill::NoRoom {
                needed,
                available: self.queue.len(),
            };
        }
        self.push(seq, &adopted, start, tokens, Extra::Announces);
        Prefill::Planned {
            cached_tokens: start - s.ahead,
            tokens,
            samples: start + tokens == s.tokens.len(),
        }
    }

    fn undo(&mut self, entry: Entry) {
        self.contents
            .retain(|_, holder| !entry.announced.contains(holder));
        if let Some(copy) = entry.copy {
            self.newest().copies.retain(|&(_, to)| to != copy);
        }
        let (table_len, ahead, registered) = entry.before;
        let mut s = self.seqs[&entry.seq].clone();
        s.table.truncate(table_len);
        if let Some((index, source)) = entry.source {
            s.table[index] = source;
        }
        if !entry.adopted.is_empty() || !entry.announced.is_empty() {
            s.registered = registered;
        }
        (s.ahead, s.speculating) = (ahead, false);
        s.pending -= usize::from(entry.samples);
        s.planned -= 1;
        self.shorten(entry.seq, &s);
        self.bury(entry.seq);
    }

    /// The others that had to go with it, because they were to share what it computes.
    pub(crate) fn cancel(&mut self, seq: u64) -> Option<Vec<u64>> {
        let plan = self.newest();
        let first = plan.entries.iter().position(|entry| entry.seq == seq);
        let (mut out, mut gone) = (Vec::new(), Vec::new());
        for (at, entry) in plan.entries.iter().enumerate() {
            if Some(at) == first || entry.adopted.iter().any(|block| gone.contains(block)) {
                gone.extend(entry.announced.clone());
                out.push(at);
            }
        }
        let removed: Vec<Entry> = out
            .iter()
            .rev()
            .map(|&at| plan.entries.remove(at))
            .collect();
        plan.budget += removed.iter().map(|entry| entry.len).sum::<usize>();
        let ids = removed
            .iter()
            .rev()
            .map(|entry| entry.seq)
            .skip(1)
            .collect();
        removed.into_iter().for_each(|entry| self.undo(entry));
        first.map(|_| ids)
    }

    pub(crate) fn roll_back(&mut self) {
        // Every undo sees the fence; it is lifted at the end.
        while let Some(entry) = self.newest().entries.pop() {
            self.undo(entry);
        }
        let fenced = self.plans.pop().expect("open").fenced;
        self.settle(fenced);
    }

    /// `accepted` holds the tokens of each sampling entry, in plan order.
    pub(crate) fn commit(&mut self, accepted: &[Vec<u32>]) -> Vec<Redirect> {
        let mut accepted = accepted.iter();
        let plan = self.plans[0].clone();
        let mut redirects = Vec::new();
        for entry in &plan.entries {
            let seq = &entry.seq;
            let mut s = self.seqs[seq].clone();
            s.computed = entry.start + entry.len;
            if entry.samples {
                let tokens = accepted.next().expect("one per sampling entry");
                s.tokens.extend(tokens);
                s.computed -= entry.drafts.len() + 1 - tokens.len();
                s.pending -= 1;
            }
            if !entry.drafts.is_empty() {
                (s.ahead, s.speculating) = (s.computed, false);
            }
            s.planned -= 1;
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
                let found = self.contents.get(&content).copied();
                let later = self.plans.iter().skip(1).flat_map(|plan| &plan.entries);
                let computing = |block: u32| later.clone().any(|e| e.announced.contains(&block));
                if found.is_some_and(computing) {
                    break; // the step after this one is to compute it, if it comes to that
                }
                match found {
                    Some(first) if first == mine => {}
                    Some(first) if self.refs(first) > 0 => {
                        s.table[index] = first;
                        redirects.push(Redirect {
                            sequence: *seq,
                            index,
                            old_block: mine.into(),
                            new_block: first.into(),
                        });
                        self.seqs.insert(*seq, s.clone());
                        if let Some(newer) = self.plans.get_mut(1) {
                            newer.fenced.push(mine);
                        }
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
            self.seqs.insert(*seq, s);
        }
        plan.entries.iter().for_each(|entry| self.bury(entry.seq));
        self.plans.remove(0);
        self.settle(plan.fenced);
        redirects
    }

    pub(crate) fn budget(&self) -> usize {
        self.plans.last().map_or(0, |plan| plan.budget)
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
