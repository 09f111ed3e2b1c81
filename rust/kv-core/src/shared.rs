//! What is shared without the manager's lock: the references of leases, and a mailbox for what was let
//! go.
//!
//! A lease may be dropped by any thread at any time. It lowers the counts of its blocks itself; the
//! blocks that reached zero are named in the mailbox and the manager puts them into its queue at its
//! next call, before it does anything else. The mailbox has a lock of its own, held for a few
//! instructions and never while another lock is taken.

use std::collections::HashSet;

use crate::ids::{BlockId, NodeIdx, PlanKey, SeqKey};
use crate::sync::{Arc, AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering};

/// Something that was let go outside the manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Letter {
    /// This block's last reference went; it may have been taken up again since.
    Block(BlockId),
    /// This sequence's handle is gone.
    Sequence(SeqKey),
    /// This open plan's handle is gone.
    Plan(PlanKey),
    /// This lease, granted while recording, is gone; it still holds its blocks.
    Lease(u64, Box<[BlockId]>),
}

/// One per manager, behind an `Arc` in every handle.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) manager: u32,
    /// By block.
    refs: Box<[AtomicU32]>,
    mail: Mutex<Vec<Letter>>,
    has_mail: AtomicBool,
    /// Block references of leases: an upper bound while a drop is under way ...
    lease_refs_ceiling: AtomicUsize,
    /// ... and a lower one.
    lease_refs_floor: AtomicUsize,
    /// Plans are closed in the order in which they were opened; this is the last closed one.
    last_closed_plan: AtomicU64,
}

impl Shared {
    pub(crate) fn new(
        manager: u32,
        num_blocks: usize,
    ) -> Result<Self, std::collections::TryReserveError> {
        let mut refs = Vec::new();
        refs.try_reserve_exact(num_blocks)?;
        refs.resize_with(num_blocks, || AtomicU32::new(0));
        Ok(Self {
            manager,
            refs: refs.into_boxed_slice(),
            mail: Mutex::new(Vec::new()),
            has_mail: AtomicBool::new(false),
            lease_refs_ceiling: AtomicUsize::new(0),
            lease_refs_floor: AtomicUsize::new(0),
            last_closed_plan: AtomicU64::new(0),
        })
    }

    /// Leases that hold the block.
    #[inline]
    pub(crate) fn lease_refs_of(&self, block: BlockId) -> u32 {
        // Acquire: what the last lease's holder read of the block happened before its reuse.
        self.refs[block.at()].load(Ordering::Acquire)
    }

    /// One lease more. Only the manager, under its lock, makes leases.
    #[inline]
    fn hold(&self, block: BlockId) {
        self.refs[block.at()].fetch_add(1, Ordering::Relaxed);
    }

    /// One lease less; true if it was the last.
    #[inline]
    pub(crate) fn let_go(&self, block: BlockId) -> bool {
        // Release: what this lease's holder read of the block happened before its reuse.
        // Acquire: the last one sees what all others did before they let go.
        self.refs[block.at()].fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Puts letters into the mailbox.
    pub(crate) fn post(&self, letters: impl IntoIterator<Item = Letter>) {
        let mut mail = lock(&self.mail);
        mail.extend(letters);
        self.has_mail.store(!mail.is_empty(), Ordering::Release);
    }

    /// Takes all letters. Costs one load when there are none.
    #[inline]
    pub(crate) fn collect(&self) -> Vec<Letter> {
        if !self.has_mail.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut mail = lock(&self.mail);
        self.has_mail.store(false, Ordering::Release);
        std::mem::take(&mut *mail)
    }

    /// The blocks that letters name, which stay where they are.
    pub(crate) fn posted_blocks(&self) -> HashSet<BlockId> {
        let mail = lock(&self.mail);
        let blocks = mail.iter().filter_map(|letter| match letter {
            Letter::Block(block) => Some(*block),
            _ => None,
        });
        blocks.collect()
    }

    pub(crate) fn close_plan(&self, key: PlanKey) {
        self.last_closed_plan.store(key.serial, Ordering::Release);
    }

    /// The manager has let go of so many block references of leases.
    pub(crate) fn forget_lease_refs(&self, count: usize) {
        self.lease_refs_floor.fetch_sub(count, Ordering::AcqRel);
        self.lease_refs_ceiling.fetch_sub(count, Ordering::AcqRel);
    }

    /// The least and the most block references that leases can hold right now.
    pub(crate) fn lease_refs(&self) -> (usize, usize) {
        let ceiling = self.lease_refs_ceiling.load(Ordering::Acquire);
        (self.lease_refs_floor.load(Ordering::Acquire), ceiling)
    }
}

#[cfg(not(loom))]
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing that can panic runs under this lock.
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(loom)]
fn lock<T>(mutex: &Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Keeps a prefix alive, from the root to its end, without being a sequence.
///
/// Dropping it takes neither the manager nor its lock and may happen on any thread.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
    /// Granted while recording: its number there. Then the manager lets go of the blocks, at its next
    /// call, so that a replay can do it at the same place.
    serial: Option<u64>,
    /// As a sequence's table: row-major, with gaps where no token after the prefix sees a block.
    table: Box<[BlockId]>,
    num_blocks: usize,
    end: NodeIdx,
    num_tokens: usize,
}

impl Lease {
    /// Holds each block of `table` once more. Called by the manager, under its lock.
    pub(crate) fn over(
        shared: &Arc<Shared>,
        serial: Option<u64>,
        table: Box<[BlockId]>,
        end: NodeIdx,
        num_tokens: usize,
    ) -> Self {
        let blocks = table.iter().copied().filter_map(BlockId::some);
        let num_blocks = blocks.clone().count();
        shared
            .lease_refs_ceiling
            .fetch_add(num_blocks, Ordering::AcqRel);
        blocks.for_each(|block| shared.hold(block));
        shared
            .lease_refs_floor
            .fetch_add(num_blocks, Ordering::AcqRel);
        Self {
            shared: Arc::clone(shared),
            serial,
            table,
            num_blocks,
            end,
            num_tokens,
        }
    }

    /// The blocks kept, first to last; of each block of tokens, those of all layer groups.
    pub fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        self.table.iter().copied().filter_map(BlockId::some)
    }

    /// How many these are.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub(crate) fn table(&self) -> &[BlockId] {
        &self.table
    }

    /// Tokens covered: a multiple of the block size.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(crate) fn manager(&self) -> u32 {
        self.shared.manager
    }

    pub(crate) fn serial(&self) -> u64 {
        self.serial.expect("a recorded lease")
    }

    pub(crate) fn end(&self) -> Option<NodeIdx> {
        self.end.some()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let shared = &self.shared;
        if let Some(serial) = self.serial {
            if self.num_blocks > 0 {
                let table = std::mem::take(&mut self.table);
                shared.post([Letter::Lease(serial, table)]);
            }
            return;
        }
        shared
            .lease_refs_floor
            .fetch_sub(self.num_blocks, Ordering::AcqRel);
        // Last block first, so that a prefix outlives its continuations in the queue.
        let released: Vec<_> = self
            .blocks()
            .rev()
            .filter(|&block| shared.let_go(block))
            .map(Letter::Block)
            .collect();
        if !released.is_empty() {
            shared.post(released);
        }
        shared
            .lease_refs_ceiling
            .fetch_sub(self.num_blocks, Ordering::AcqRel);
    }
}

/// Owns a sequence: dropping it frees the sequence, at the manager's next call.
#[derive(Debug)]
pub struct SeqHandle {
    shared: Arc<Shared>,
    key: SeqKey,
}

impl SeqHandle {
    pub(crate) fn new(shared: &Arc<Shared>, key: SeqKey) -> Self {
        Self {
            shared: Arc::clone(shared),
            key,
        }
    }

    /// What the manager's calls take.
    pub fn key(&self) -> SeqKey {
        self.key
    }

    /// The sequence's number, unique in its manager and never reused.
    pub fn id(&self) -> u64 {
        self.key.id
    }
}

impl Drop for SeqHandle {
    fn drop(&mut self) {
        self.shared.post([Letter::Sequence(self.key)]);
    }
}

/// Owns an open plan: dropping it rolls the plan back, at the manager's next call.
#[derive(Debug)]
pub struct PlanHandle {
    shared: Arc<Shared>,
    key: PlanKey,
}

impl PlanHandle {
    pub(crate) fn new(shared: &Arc<Shared>, key: PlanKey) -> Self {
        Self {
            shared: Arc::clone(shared),
            key,
        }
    }

    /// What the manager's calls take.
    pub fn key(&self) -> PlanKey {
        self.key
    }
}

impl Drop for PlanHandle {
    fn drop(&mut self) {
        if self.key.serial > self.shared.last_closed_plan.load(Ordering::Acquire) {
            self.shared.post([Letter::Plan(self.key)]);
        }
    }
}
