//! The block manager: blocks, sequences, leases, and the calls that are not part of a step.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::blocks::Block;
use crate::config::Config;
use crate::error::Error;
use crate::events::Event;
use crate::eviction::Policy;
use crate::groups::Groups;
use crate::hash::ContentHasher;
use crate::ids::{BlockId, NodeIdx, SeqKey};
use crate::matching::Match;
use crate::plan::{Entry, Plan};
use crate::queue::{FreeQueue, List};
use crate::sequence::SequenceTable;
use crate::shared::Shared;
use crate::stats::{BlockState, Ledger, Stats};
use crate::sync::Arc;
use crate::trace::{Call, Recorder};
use crate::tree::ContentTree;

static MANAGERS: AtomicU32 = AtomicU32::new(0);

/// The pool's one owner. Single-threaded by type; leases and handles may be dropped anywhere.
pub struct BlockManager {
    pub(crate) config: Config,
    pub(crate) shared: Arc<Shared>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) queue: FreeQueue,
    pub(crate) policy: Policy,
    /// Blocks with `seq_refs > 0`.
    pub(crate) active: usize,
    pub(crate) tree: ContentTree,
    pub(crate) sequences: SequenceTable,
    /// Oldest first; at most two.
    pub(crate) open: Vec<Plan>,
    pub(crate) plans: u64,
    /// The memory of a closed plan's entries.
    pub(crate) spare_entries: Vec<Entry>,
    pub(crate) stats: Stats,
    pub(crate) events: Vec<Event>,
    pub(crate) groups: Groups,
    /// The match under way; kept to save the allocation.
    pub(crate) matched: Match,
    pub(crate) recorder: Option<Box<Recorder>>,
}

impl BlockManager {
    /// A pool with every block free.
    pub fn new(config: Config) -> Result<Self, Error> {
        let groups = config.validate()?;
        let Config {
            num_blocks,
            block_size,
            hash_bits,
            ..
        } = config;
        let oom = |_| Error::OutOfMemory { num_blocks };
        probe_memory(&config).map_err(oom)?;
        let seed = config.hash_seed.unwrap_or_else(ContentHasher::random_seed);
        let id = MANAGERS.fetch_add(1, Ordering::Relaxed);
        let mut blocks = Vec::new();
        blocks.try_reserve_exact(num_blocks).map_err(oom)?;
        blocks.resize(num_blocks, Block::NEW);
        let mut queue = FreeQueue::over(num_blocks).map_err(oom)?;
        (0..num_blocks).for_each(|block| queue.push_tail(List::Free, BlockId::new(block)));
        let hasher = ContentHasher::new(seed, hash_bits);
        Ok(Self {
            shared: Arc::new(Shared::new(id, num_blocks).map_err(oom)?),
            blocks,
            queue,
            policy: Policy::new(config.eviction, num_blocks),
            active: 0,
            tree: ContentTree::new(num_blocks, block_size, groups.len(), hasher).map_err(oom)?,
            sequences: SequenceTable::new(id),
            open: Vec::new(),
            plans: 0,
            spare_entries: Vec::new(),
            stats: Stats::default(),
            events: Vec::new(),
            groups,
            matched: Match::NOTHING,
            recorder: None,
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

    /// Blocks that freeing this sequence would really give back: those that no one else holds.
    pub fn preview(&mut self, key: SeqKey) -> Result<usize, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        let blocks = seq.table.iter().copied().filter_map(BlockId::some);
        Ok(blocks.filter(|&block| self.refs_of(block) == 1).count())
    }

    /// The most blocks that one sequence holds at once on its way to `num_tokens` tokens, when a step
    /// computes at most `max_tokens` of them: what the pool must have for it to be served at all.
    pub fn blocks_for(&self, num_tokens: usize, max_tokens: usize) -> usize {
        self.groups.blocks_for(num_tokens, max_tokens)
    }

    /// Where every block is.
    pub fn ledger(&mut self) -> Ledger {
        self.read_mail();
        let free = self.queue.len_of(List::Free);
        Ledger {
            free,
            idle: self.queue.len() - free,
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
        Ok(self.refs_of(self.known(block)?))
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
        let Block { seq_refs, node, .. } = self.blocks[block.at()];
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
            groups: self.groups.len(),
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
        let idle = List::IDLE
            .into_iter()
            .flat_map(|list| self.queue.iter(list));
        let idle: Vec<BlockId> = idle.collect();
        let told = self.events.len();
        for &block in &idle {
            self.leave_queue(block);
            self.evict(block, Block::NEW);
            self.enter_queue(block);
        }
        if self.config.events && !idle.is_empty() && self.tree.held().next().is_none() {
            self.events.truncate(told);
            self.events.push(Event::Cleared);
        }
        self.note(|_| Call::evict_idle(), idle.len());
        idle.len()
    }

    /// Blocks that nobody holds: the free ones in the order in which they are handed out, then the idle
    /// ones in the order in which `lru` evicts them. O(blocks).
    pub fn queued(&mut self) -> Vec<BlockId> {
        self.read_mail();
        let lists = [List::Free].into_iter().chain(List::IDLE);
        lists.flat_map(|list| self.queue.iter(list)).collect()
    }

    /// What became of the set of contents since the last call, in order, if `Config::events` is on.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.read_mail();
        std::mem::take(&mut self.events)
    }

    /// The names of all contents whose KV a block holds now, in no order. O(contents).
    pub fn contents(&mut self) -> Vec<u128> {
        self.read_mail();
        let ready = |node: &NodeIdx| self.tree.blocks(*node).any(|block| self.is_ready(block));
        let held = self.tree.held().filter(ready);
        held.map(|node| self.tree.hash(node)).collect()
    }

    /// The content is there now; before, no block held it.
    pub(crate) fn tell_stored(&mut self, slot: u32, node: NodeIdx) {
        let event = self.tree.stored(node, self.sequences.at(slot).root);
        self.events.push(event);
    }
}

/// Asks for the memory of all tables at once, before any of it is touched.
fn probe_memory(config: &Config) -> Result<(), std::collections::TryReserveError> {
    let per_block = size_of::<Block>()
        + size_of::<u32>()
        + FreeQueue::BYTES_PER_BLOCK
        + ContentTree::bytes_per_block(config.block_size);
    Vec::<u8>::new().try_reserve_exact(config.num_blocks.saturating_mul(per_block))
}

/// A look at one sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    /// Its number, never reused.
    pub id: u64,
    /// All known tokens.
    pub tokens: &'a [u32],
    /// Row-major: a row of blocks for each block of tokens, one per layer group.
    table: &'a [BlockId],
    groups: usize,
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

impl<'a> SequenceView<'a> {
    /// Its blocks in a layer group, first to last; `None` where one was given back because no later
    /// token sees it.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn table(&self, group: usize) -> impl ExactSizeIterator<Item = Option<BlockId>> + 'a {
        assert!(group < self.groups, "one of {} layer groups", self.groups);
        let row = self.table.iter().skip(group).step_by(self.groups);
        row.map(|block| block.some())
    }
}
