//! What is shared without the manager's lock: the references of pins, and a mailbox for what was let
//! go.
//!
//! A pin may be dropped by any thread at any time. It lowers the counts of its blocks itself; the
//! blocks that reached zero are named in the mailbox and the manager puts them into its queue at its
//! next call, before it does anything else. The mailbox has a lock of its own, held for a few
//! instructions and never while another lock is taken.

use std::collections::HashSet;

use crate::ids::{BlockId, PlanKey, SeqKey};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering};

/// Something that was let go outside the manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// The last references of these blocks went; they may have been taken up again since.
    Blocks(Vec<BlockId>),
    /// This sequence's handle is gone.
    Sequence(SeqKey),
    /// This open plan's handle is gone.
    Plan(PlanKey),
    /// This pin, granted while recording, is gone; it still holds its blocks.
    Pin(u64, Vec<BlockId>),
}

/// One per manager, behind an `Arc` in every handle.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) manager: u32,
    /// By block.
    refs: Box<[AtomicU32]>,
    mail: Mutex<Vec<Dropped>>,
    has_mail: AtomicBool,
    /// Block references of pins: an upper bound while a drop is under way ...
    pub(crate) pin_refs_ceiling: AtomicUsize,
    /// ... and a lower one.
    pub(crate) pin_refs_floor: AtomicUsize,
    /// Plans are closed in the order in which they were opened; this is the last closed one.
    pub(crate) last_closed_plan: AtomicU64,
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
            pin_refs_ceiling: AtomicUsize::new(0),
            pin_refs_floor: AtomicUsize::new(0),
            last_closed_plan: AtomicU64::new(0),
        })
    }

    /// Pins that hold the block.
    #[inline]
    pub(crate) fn pin_refs_of(&self, block: BlockId) -> u32 {
        // Acquire: what the last pin's holder read of the block happened before its reuse.
        self.refs[block.at()].load(Ordering::Acquire)
    }

    /// Whether any pin may hold a block.
    #[inline]
    pub(crate) fn has_pins(&self) -> bool {
        // As `pin_refs_of`: the ceiling is lowered after the counts.
        self.pin_refs_ceiling.load(Ordering::Acquire) > 0
    }

    /// One pin more. Only the manager, under its lock, makes pins.
    #[inline]
    pub(crate) fn hold(&self, block: BlockId) {
        self.refs[block.at()].fetch_add(1, Ordering::Relaxed);
    }

    /// One pin less; true if it was the last.
    #[inline]
    pub(crate) fn let_go(&self, block: BlockId) -> bool {
        // Release: what this pin's holder read of the block happened before its reuse.
        // Acquire: the last one sees what all others did before they let go.
        self.refs[block.at()].fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Puts into the mailbox what was dropped.
    pub(crate) fn post(&self, dropped: impl IntoIterator<Item = Dropped>) {
        let mut mail = lock(&self.mail);
        mail.extend(dropped);
        self.has_mail.store(!mail.is_empty(), Ordering::Release);
    }

    /// Takes all that is in the mailbox. Costs one load when there is nothing.
    #[inline]
    pub(crate) fn collect(&self) -> Vec<Dropped> {
        if !self.has_mail.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut mail = lock(&self.mail);
        self.has_mail.store(false, Ordering::Release);
        std::mem::take(&mut *mail)
    }

    /// The blocks that the mailbox names, which stay where they are.
    pub(crate) fn posted_blocks(&self) -> HashSet<BlockId> {
        let mail = lock(&self.mail);
        let blocks = mail.iter().filter_map(|dropped| match dropped {
            Dropped::Blocks(blocks) => Some(blocks.iter().copied()),
            _ => None,
        });
        blocks.flatten().collect()
    }

    pub(crate) fn close_plan(&self, key: PlanKey) {
        self.last_closed_plan.store(key.serial, Ordering::Release);
    }

    /// The manager has let go of so many block references of pins.
    pub(crate) fn forget_pin_refs(&self, count: usize) {
        self.pin_refs_floor.fetch_sub(count, Ordering::AcqRel);
        self.pin_refs_ceiling.fetch_sub(count, Ordering::AcqRel);
    }

    /// The least and the most block references that pins can hold right now.
    pub(crate) fn pin_refs(&self) -> (usize, usize) {
        let ceiling = self.pin_refs_ceiling.load(Ordering::Acquire);
        (self.pin_refs_floor.load(Ordering::Acquire), ceiling)
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
