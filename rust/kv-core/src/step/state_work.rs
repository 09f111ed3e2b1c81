//! The snapshots that an open plan holds for its sequences.

use crate::ids::BlockId;

/// The snapshots of a sequence in an open plan.
pub(crate) struct StateWork {
    pub(super) plan: u64,
    pub(super) seq_idx: u32,
    /// The position of the last kept state before this plan.
    pub(super) last_kept: usize,
    /// The position and the blocks of the state that it begins with; none: its own.
    pub(super) load: Option<(usize, Vec<BlockId>)>,
    pub(super) save: Option<Save>,
}

/// A snapshot to be written.
pub(super) struct Save {
    pub(super) cut: Cut,
    pub(super) blocks: Vec<BlockId>,
}

/// A position at which a state is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) position: usize,
    pub(super) kind: Kind,
}

/// Why a state is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// At the end of a prompt, a branch point, or where it is wanted.
    Prompt,
    /// Every so many tokens of a prefill.
    Spare,
    /// Every so many tokens of an answer: replaces the one before.
    Answer,
}

impl StateWork {
    /// The blocks that the plan holds for it.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let load = self.load.iter().flat_map(|(_, blocks)| blocks);
        let save = self.save.iter().flat_map(|save| &save.blocks);
        load.chain(save).copied()
    }
}
