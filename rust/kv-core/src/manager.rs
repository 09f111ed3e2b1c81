//! The block manager: blocks, sequences, leases, and the calls that are not part of a step.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::Error;
use crate::events::Event;
use crate::hash::ContentHasher;
use crate::ids::{BlockId, NodeIdx, SeqKey};
use crate::queue::FreeQueue;
use crate::sequence::{Chain, SequenceTable};
use crate::shared::{Lease, Letter, SeqHandle, Shared};
use crate::stats::{BlockState, Ledger, Stats};
use crate::step::Plan;
use crate::sync::Arc;
use crate::tree::{ContentTree, Step};

/// Settings of a pool, resolved once.
#[derive(Clone, Debug)]
pub struct Config {
    /// Physical blocks, `1..=2^31`.
    pub num_blocks: usize,
    /// Token positions per block, `1..=65536`.
    pub block_size: usize,
    /// Off: nothing is registered, matched or merged.
    pub prefix_caching: bool,
    /// On: a sequence shares blocks that one planned before it in the same step computes.
    pub in_flight_sharing: bool,
    /// On: changes of the set of contents are kept for [`BlockManager::take_events`].
    pub events: bool,
    /// Given: hashes are the same in every process. `None`: random per manager.
    pub hash_seed: Option<u64>,
    /// 128; fewer bits force collisions, for tests.
    pub hash_bits: u32,
}

impl Config {
    /// The usual settings for a pool of this shape.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            num_blocks,
            block_size,
            prefix_caching: true,
            in_flight_sharing: true,
            events: false,
            hash_seed: None,
            hash_bits: 128,
        }
    }

    /// Asks for the memory of all tables at once, before any of it is touched.
    fn probe_memory(&self) -> Result<(), std::collections::TryReserveError> {
        let per_block = size_of::<Block>()
            + size_of::<u32>()
            + FreeQueue::BYTES_PER_BLOCK
            + ContentTree::bytes_per_block(self.block_size);
        Vec::<u8>::new().try_reserve_exact(self.num_blocks.saturating_mul(per_block))
    }

    fn validate(&self) -> Result<(), Error> {
        if !(1..=65_536).contains(&self.block_size) {
            return Err(Error::BlockSize(self.block_size));
        }
        if !(1..=1 << 31).contains(&self.num_blocks) {
            return Err(Error::NumBlocks(self.num_blocks));
        }
        if self.hash_bits > 128 {
            return Err(Error::HashBits(self.hash_bits));
        }
        Ok(())
    }
}

/// What the manager knows of a block, apart from its references (atomic, in [`Shared`]).
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// Live sequences whose table holds the block.
    pub(crate) seq_refs: u32,
    /// The content it holds, if that is registered.
    pub(crate) node: NodeIdx,
}

static MANAGERS: AtomicU32 = AtomicU32::new(0);

/// The pool's one owner. Single-threaded by type; leases and handles may be dropped anywhere.
pub struct BlockManager {
    pub(crate) config: Config,
    pub(crate) shared: Arc<Shared>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) queue: FreeQueue,
    /// Blocks of the queue that hold a content.
    pub(crate) idle: usize,
    /// Blocks with `seq_refs > 0`.
    pub(crate) active: usize,
    pub(crate) tree: ContentTree,
    pub(crate) sequences: SequenceTable,
    /// Oldest first; at most two.
    pub(crate) open: VecDeque<Plan>,
    pub(crate) plans: u64,
    pub(crate) stats: Stats,
    events: Vec<Event>,
    /// Nodes of the match under way; kept to save the allocation.
    pub(crate) matched: Vec<(NodeIdx, BlockId)>,
}

impl BlockManager {
    /// A pool with every block free.
    pub fn new(config: Config) -> Result<Self, Error> {
        config.validate()?;
        let Config {
            num_blocks,
            block_size,
            hash_bits,
            ..
        } = config;
        let oom = |_| Error::OutOfMemory { num_blocks };
        config.probe_memory().map_err(oom)?;
        let seed = config.hash_seed.unwrap_or_else(ContentHasher::random_seed);
        let id = MANAGERS.fetch_add(1, Ordering::Relaxed);
        let mut blocks = Vec::new();
        blocks.try_reserve_exact(num_blocks).map_err(oom)?;
        blocks.resize(
            num_blocks,
            Block {
                seq_refs: 0,
                node: NodeIdx::NONE,
            },
        );
        let mut queue = FreeQueue::over(num_blocks).map_err(oom)?;
        (0..num_blocks).for_each(|block| queue.push_tail(BlockId::new(block)));
        let hasher = ContentHasher::new(seed, hash_bits);
        Ok(Self {
            shared: Arc::new(Shared::new(id, num_blocks).map_err(oom)?),
            blocks,
            queue,
            idle: 0,
            active: 0,
            tree: ContentTree::new(num_blocks, block_size, hasher).map_err(oom)?,
            sequences: SequenceTable::new(id),
            open: VecDeque::new(),
            plans: 0,
            stats: Stats::default(),
            events: Vec::new(),
            matched: Vec::new(),
            config,
        })
    }

    /// The settings in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The hasher in force, for those who compute content hashes elsewhere.
    pub fn hasher(&self) -> &ContentHasher {
        self.tree.hasher()
    }

    /// A new sequence of at least one token. It holds no block until it is planned.
    ///
    /// With `read_cache` false nothing is adopted for it: every token gets computed, which is what
    /// a caller needs who wants the logits of all prompt tokens.
    pub fn sequence(
        &mut self,
        tokens: Vec<u32>,
        namespace: &[u8],
        read_cache: bool,
    ) -> Result<SeqHandle, Error> {
        self.read_mail();
        if tokens.is_empty() {
            return Err(Error::EmptySequence);
        }
        let root = self.tree.hold_root(namespace);
        let (key, id) = self.sequences.insert(tokens, root, read_cache);
        Ok(SeqHandle::new(&self.shared, key, id))
    }

    /// A lease on the longest cached prefix of `tokens`, in whole blocks; perhaps on none.
    pub fn match_prefix(&mut self, tokens: &[u32], namespace: &[u8]) -> Lease {
        self.read_mail();
        let mut end = NodeIdx::NONE;
        let mut blocks = Vec::new();
        if let Some(root) = self.tree.root(namespace) {
            let mut tip = root;
            for tokens in tokens.chunks_exact(self.config.block_size) {
                let Step::Found(node) = self.tree.step(tip, tokens, None) else {
                    break;
                };
                match self.tree.block(node) {
                    Some(block) if self.is_ready(node) => blocks.push(block),
                    _ => break,
                }
                (tip, end) = (node, node);
            }
        }
        self.grant(blocks, end)
    }

    /// A lease on the registered blocks of a sequence whose KV is there.
    pub fn lease(&mut self, key: SeqKey) -> Result<Lease, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        let Chain {
            mut tip,
            mut blocks,
            ..
        } = seq.chain;
        while blocks > 0 && !self.is_ready(tip) {
            tip = self.tree.parent(tip).expect("inside the chain");
            blocks -= 1;
        }
        let end = if blocks == 0 { NodeIdx::NONE } else { tip };
        let blocks = seq.table[..blocks].to_vec();
        Ok(self.grant(blocks, end))
    }

    /// Whether a content's KV is there: no open step is to compute it.
    pub(crate) fn is_ready(&self, node: NodeIdx) -> bool {
        let step = self.tree.step_of(node);
        self.open.iter().all(|plan| plan.step() != step)
    }

    fn grant(&mut self, blocks: Vec<BlockId>, end: NodeIdx) -> Lease {
        let num_tokens = blocks.len() * self.config.block_size;
        for &block in &blocks {
            self.leave_queue(block);
        }
        Lease::over(&self.shared, blocks.into(), end, num_tokens)
    }

    /// Puts a lease's blocks into the table of a sequence that has none. The lease stays in force.
    pub fn attach(&mut self, key: SeqKey, lease: &Lease) -> Result<(), Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if lease.manager() != self.shared.manager {
            return Err(Error::Foreign("lease"));
        }
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        if !seq.table.is_empty() {
            return Err(Error::NotFresh {
                blocks: seq.table.len(),
            });
        }
        let Some(end) = lease.end() else {
            return Ok(());
        };
        if !self.leads_to(end, lease.num_tokens(), seq.root, &seq.tokens) {
            return Err(Error::LeaseMismatch {
                lease_tokens: lease.num_tokens(),
                sequence_tokens: seq.tokens.len(),
            });
        }
        let path = std::iter::successors(Some(end), |&node| self.tree.parent(node));
        let mut hashes: Vec<u128> = path
            .take(lease.blocks().len())
            .map(|node| self.tree.hash(node))
            .collect();
        hashes.reverse();
        let seq = self.sequences.at_mut(key.slot);
        if seq.hashes.len() < hashes.len() {
            seq.hashes = hashes;
        }
        seq.table.extend_from_slice(lease.blocks());
        seq.chain = Chain {
            tip: end,
            blocks: lease.blocks().len(),
            private: false,
        };
        seq.stand(lease.num_tokens().min(seq.tokens.len() - 1));
        seq.cached = seq.computed;
        for &block in lease.blocks() {
            self.hold_for_sequence(block);
        }
        Ok(())
    }

    /// Whether the path from `root` to `end` is `num_tokens` of exactly these tokens.
    fn leads_to(&self, end: NodeIdx, num_tokens: usize, root: NodeIdx, tokens: &[u32]) -> bool {
        let Some(tokens) = tokens.get(..num_tokens) else {
            return false;
        };
        let mut at = end;
        for tokens in tokens.rchunks_exact(self.config.block_size) {
            match self.tree.parent(at) {
                Some(parent) if self.tree.tokens(at) == tokens => at = parent,
                _ => return false,
            }
        }
        at == root
    }

    /// A new sequence of the first `num_tokens` tokens of this one, on the same blocks.
    ///
    /// Nothing is copied now. A partial last block is copied when one of several holders writes to it
    /// (see [`BlockManager::copies`]); the last holder writes in place.
    pub fn fork(&mut self, key: SeqKey, num_tokens: usize) -> Result<SeqHandle, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        if num_tokens == 0 || num_tokens > seq.tokens.len() {
            return Err(Error::ForkLength {
                num_tokens,
                sequence_tokens: seq.tokens.len(),
            });
        }
        let block_size = self.config.block_size;
        let computed = seq.computed.min(num_tokens);
        let full = computed / block_size;
        let mut chain = seq.chain;
        while chain.blocks > full {
            chain.tip = self.tree.parent(chain.tip).expect("inside the chain");
            chain.blocks -= 1;
        }
        chain.private &= full > chain.blocks;
        let table = seq.table[..computed.div_ceil(block_size)].to_vec();
        let tokens = seq.tokens[..num_tokens].to_vec();
        let hashes = seq.hashes[..seq.hashes.len().min(num_tokens / block_size)].to_vec();
        let (root, read_cache, cached) = (seq.root, seq.read_cache, seq.cached.min(computed));
        let (key, id) = self.sequences.insert(tokens, root, read_cache);
        self.tree.hold(root);
        for &block in &table {
            self.hold_for_sequence(block);
        }
        let fork = self.sequences.at_mut(key.slot);
        (fork.table, fork.hashes, fork.chain) = (table, hashes, chain);
        fork.stand(computed);
        fork.cached = cached;
        Ok(SeqHandle::new(&self.shared, key, id))
    }

    /// Adds known tokens to the end of a sequence: the next turn of a conversation, a fork's own token.
    pub fn append(&mut self, key: SeqKey, tokens: &[u32]) -> Result<(), Error> {
        self.read_mail();
        let seq = self.sequences.get_mut(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        seq.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Gives back the blocks past the first `num_tokens` tokens: slots reserved for a speculation that
    /// was rejected, to the block. Returns how many.
    pub fn trim(&mut self, key: SeqKey, num_tokens: usize) -> Result<usize, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        if num_tokens < seq.computed {
            return Err(Error::TrimBelowComputed {
                num_tokens,
                computed: seq.computed,
            });
        }
        let (before, keep) = (seq.table.len(), num_tokens.div_ceil(self.config.block_size));
        let keep = keep.max(seq.chain.blocks).min(before);
        self.release_table(key.slot, keep);
        Ok(before - keep)
    }

    /// Takes a sequence's blocks away and keeps its tokens: preemption by recomputation.
    ///
    /// Its registered blocks become idle, so it comes back cheaply.
    pub fn reset(&mut self, key: SeqKey) -> Result<(), Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        self.release_table(key.slot, 0);
        let seq = self.sequences.at_mut(key.slot);
        seq.stand(0);
        seq.cached = 0;
        seq.chain = Chain::at_root(seq.root);
        Ok(())
    }

    /// Ends a sequence. One that an open plan holds lives in the plan until that is closed.
    pub fn free(&mut self, key: SeqKey) -> Result<(), Error> {
        self.read_mail();
        self.sequences.get(key)?;
        self.drop_sequence(key.slot);
        Ok(())
    }

    pub(crate) fn drop_sequence(&mut self, slot: u32) {
        let seq = self.sequences.at_mut(slot);
        seq.dropped = true;
        if seq.planned > 0 {
            return;
        }
        self.release_table(slot, 0);
        let seq = self.sequences.remove(slot);
        self.tree.unhold(seq.root);
    }

    /// Blocks that freeing this sequence would really give back: those that no one else holds.
    pub fn preview(&mut self, key: SeqKey) -> Result<usize, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        let alone = |&&block: &&BlockId| self.shared.refs(block) == 1;
        Ok(seq.table.iter().filter(alone).count())
    }

    /// Where every block is.
    pub fn ledger(&mut self) -> Ledger {
        self.read_mail();
        let free = self.queue.len() - self.idle;
        Ledger {
            free,
            idle: self.idle,
            active: self.active,
            leased: self.config.num_blocks - self.queue.len() - self.active,
        }
    }

    /// The counters so far.
    pub fn stats(&self) -> Stats {
        Stats {
            hashed_blocks: self.tree.hashed,
            ..self.stats
        }
    }

    /// Contents known, with or without a block, and namespaces.
    pub fn num_contents(&self) -> usize {
        self.tree.len()
    }

    /// All holders of a block: table entries and leases.
    pub fn refs(&mut self, block: u32) -> Result<u32, Error> {
        self.read_mail();
        Ok(self.shared.refs(self.known(block)?))
    }

    /// Live sequences whose table holds a block.
    pub fn seq_refs(&mut self, block: u32) -> Result<u32, Error> {
        self.read_mail();
        Ok(self.blocks[self.known(block)?.at()].seq_refs)
    }

    /// Where a block is.
    pub fn state(&mut self, block: u32) -> Result<BlockState, Error> {
        self.read_mail();
        let block = self.known(block)?;
        let Block { seq_refs, node } = self.blocks[block.at()];
        Ok(match (self.queue.contains(block), node.some(), seq_refs) {
            (true, None, _) => BlockState::Free,
            (true, Some(_), _) => BlockState::Idle,
            (false, _, 1..) => BlockState::Active,
            (false, _, 0) => BlockState::Leased,
        })
    }

    fn known(&self, block: u32) -> Result<BlockId, Error> {
        if (block as usize) < self.config.num_blocks {
            return Ok(BlockId::from(block));
        }
        Err(Error::UnknownBlock {
            block,
            num_blocks: self.config.num_blocks,
        })
    }

    /// The tokens, table and progress of a sequence.
    pub fn view(&self, key: SeqKey) -> Result<SequenceView<'_>, Error> {
        let seq = self.sequences.get(key)?;
        Ok(SequenceView {
            id: seq.id,
            tokens: &seq.tokens,
            table: &seq.table,
            num_computed_tokens: seq.computed,
            num_planned_tokens: seq.ahead,
            num_pending_tokens: seq.pending,
            num_cached_tokens: seq.cached,
            num_registered_blocks: seq.chain.blocks,
        })
    }

    /// Forgets every content that nobody holds: idle blocks become free. Returns how many.
    pub fn evict_idle(&mut self) -> usize {
        self.read_mail();
        let idle: Vec<BlockId> = self
            .queue
            .iter()
            .filter(|block| self.blocks[block.at()].node != NodeIdx::NONE)
            .collect();
        for &block in &idle {
            self.leave_queue(block);
            self.evict(block);
            self.enter_queue(block);
        }
        if self.config.events && !idle.is_empty() && self.tree.held().next().is_none() {
            let told_apart = self.events.len() - idle.len();
            self.events.truncate(told_apart);
            self.events.push(Event::Cleared);
        }
        idle.len()
    }

    /// What became of the set of contents since the last call, in order, if `Config::events` is on.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.read_mail();
        std::mem::take(&mut self.events)
    }

    /// The names of all contents whose KV a block holds now, in no order. O(contents).
    pub fn contents(&mut self) -> Vec<u128> {
        self.read_mail();
        let ready = |node: &NodeIdx| self.is_ready(*node);
        let held = self.tree.held().filter(ready);
        held.map(|node| self.tree.hash(node)).collect()
    }

    /// The content of the sequence's block `index` is there now; before, no block held it.
    pub(crate) fn tell_stored(&mut self, slot: u32, index: usize) {
        if self.config.events {
            let seq = self.sequences.at(slot);
            let node = self.blocks[seq.table[index].at()].node;
            let event = self.tree.stored(node, seq.root);
            self.events.push(event);
        }
    }

    // ---- blocks: the only places where counters, queue and tree meet ----

    /// Does what dropped handles and leases left to do. Every call that changes something begins with
    /// it; before `view`, `stats` or `plan_view` it may be called for their sake.
    #[inline]
    pub fn settle(&mut self) {
        self.read_mail();
    }

    /// Does what was left in the mailbox: the first thing in every call that looks at blocks.
    #[inline]
    pub(crate) fn read_mail(&mut self) {
        for letter in self.shared.collect() {
            match letter {
                Letter::Block(block) => {
                    if self.shared.refs(block) == 0 && !self.queue.contains(block) {
                        self.enter_queue(block);
                    }
                }
                Letter::Sequence(key) => {
                    if self.sequences.get(key).is_ok() {
                        self.drop_sequence(key.slot);
                    }
                }
                Letter::Plan(key) => self.roll_back_from(key),
            }
        }
    }

    /// A block that nobody holds any more: idle if its content can be matched, else free.
    #[inline]
    pub(crate) fn enter_queue(&mut self, block: BlockId) {
        if self.blocks[block.at()].node == NodeIdx::NONE {
            self.queue.push_head(block);
        } else {
            self.queue.push_tail(block);
            self.idle += 1;
        }
    }

    /// Before a block gets a holder.
    #[inline]
    pub(crate) fn leave_queue(&mut self, block: BlockId) {
        if self.queue.contains(block) {
            self.queue.unlink(block);
            self.idle -= usize::from(self.blocks[block.at()].node != NodeIdx::NONE);
        }
    }

    /// An idle block loses its content.
    fn evict(&mut self, block: BlockId) {
        if self.config.events {
            let hash = self.tree.hash(self.blocks[block.at()].node);
            self.events.push(Event::Removed { hash });
        }
        self.forget(block);
        self.stats.evicted_blocks += 1;
    }

    /// The block's content, if it has one, loses this block.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let node = std::mem::replace(&mut self.blocks[block.at()].node, NodeIdx::NONE);
        if node != NodeIdx::NONE {
            self.tree.clear_block(node);
        }
    }

    /// A table entry more.
    #[inline]
    pub(crate) fn hold_for_sequence(&mut self, block: BlockId) {
        self.leave_queue(block);
        self.shared.hold(block);
        let seq_refs = &mut self.blocks[block.at()].seq_refs;
        self.active += usize::from(*seq_refs == 0);
        *seq_refs += 1;
    }

    /// A table entry less.
    #[inline]
    pub(crate) fn let_go_for_sequence(&mut self, block: BlockId) {
        let seq_refs = &mut self.blocks[block.at()].seq_refs;
        *seq_refs -= 1;
        self.active -= usize::from(*seq_refs == 0);
        if self.shared.let_go(block) {
            self.enter_queue(block);
        }
    }

    /// The next block of the queue, without its old content. The caller has counted that there is one.
    #[inline]
    pub(crate) fn allocate(&mut self) -> BlockId {
        let block = self.queue.pop_head().expect("counted before");
        if self.blocks[block.at()].node != NodeIdx::NONE {
            self.idle -= 1;
            self.evict(block);
        }
        self.stats.allocated_blocks += 1;
        self.hold_for_sequence(block);
        block
    }

    /// Shortens a table to `len` entries, last entry first, so that prefixes outlive continuations.
    pub(crate) fn release_table(&mut self, slot: u32, len: usize) {
        let seq = self.sequences.at_mut(slot);
        if seq.table.len() <= len {
            return;
        }
        seq.table_version += 1;
        let mut table = std::mem::take(&mut seq.table);
        for &block in table[len..].iter().rev() {
            self.let_go_for_sequence(block);
        }
        table.truncate(len);
        self.sequences.at_mut(slot).table = table;
    }
}

/// A look at one sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    /// Its number, never reused.
    pub id: u64,
    /// All known tokens.
    pub tokens: &'a [u32],
    /// Its blocks, first to last.
    pub table: &'a [BlockId],
    /// Tokens whose KV is computed and committed.
    pub num_computed_tokens: usize,
    /// The same once the open plans are committed.
    pub num_planned_tokens: usize,
    /// Tokens after the known ones that open plans sample.
    pub num_pending_tokens: usize,
    /// Tokens adopted from the cache since it was last without blocks.
    pub num_cached_tokens: usize,
    /// Leading blocks whose contents are registered.
    pub num_registered_blocks: usize,
}
