//! Answers of the manager's calls on steps.

use crate::ids::BlockId;

/// The answer to [`BlockManager::prefill`](crate::BlockManager::prefill) and
/// [`BlockManager::speculate`](crate::BlockManager::speculate).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
pub enum Prefill {
    /// The sequence is in the plan.
    Planned {
        /// Cached tokens that this call reused.
        cached_tokens: usize,
        /// Tokens to compute, charged to the budget.
        tokens: usize,
        /// Whether the step reaches the last known token, so that its logits give the next one.
        samples: bool,
    },
    /// Too few blocks; nothing was changed.
    NoRoom {
        /// Blocks needed, including evictable ones that a match would revive, and spare blocks.
        needed: usize,
        /// Blocks free or evictable.
        available: usize,
    },
    /// The budget or `max_tokens` is used up; nothing was changed.
    NoBudget,
    /// A transfer is to fill blocks that this call would reuse; nothing was changed. Ask again once it has ended.
    Loading {
        /// The number of the transfer.
        transfer: u64,
    },
    /// Of a model with state layers: an open step computes tokens of this sequence, whose state would be computed once
    /// more; nothing was changed. Ask again once the step is committed.
    Computing,
}

/// The answer to [`BlockManager::extend`](crate::BlockManager::extend).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
pub enum Extend {
    /// The slots are allocated.
    Extended {
        /// New blocks at the end of the table, by index, then by layer group.
        blocks: Vec<BlockId>,
        /// Blocks to copy before anything is written, as (source, destination): a fork's partial block.
        copies: Vec<(BlockId, BlockId)>,
    },
    /// Too few blocks; nothing was changed.
    NoRoom {
        /// Blocks needed.
        needed: usize,
        /// Blocks free or evictable.
        available: usize,
    },
}

/// A remapping: a commit moved a table entry to the block that was cached first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
pub struct Remapping {
    /// The sequence's id.
    pub sequence: u64,
    /// The layer group of the table.
    pub group: usize,
    /// Index in that table.
    pub index: usize,
    /// The duplicate, released.
    pub old_block: BlockId,
    /// The cached block.
    pub new_block: BlockId,
}

/// Figures of an open plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanView {
    /// Tokens to compute.
    pub num_tokens: usize,
    /// Sequences in the plan.
    pub num_sequences: usize,
    /// Rows of the logits that are sampled: one per sequence that reaches its last known token, and one more for
    /// each draft.
    pub num_samples: usize,
    /// Tokens that may still be planned.
    pub budget_left: usize,
}
