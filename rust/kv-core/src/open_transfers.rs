//! The open transfers of a manager.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::Error;
use crate::handles::LoadingBlock;
use crate::ids::{BlockId, NodePosition, SeqKey, TransferKey};

/// A transfer that has not ended.
pub(crate) struct OpenTransfer {
    pub(crate) key: TransferKey,
    /// Its sequence, which may have ended since.
    pub(crate) sequence: SeqKey,
    pub(crate) indices: Range<usize>,
    /// The blocks to fill, logical block by logical block.
    pub(crate) loading: Vec<LoadingBlock>,
    /// The snapshot to fill.
    pub(crate) snapshot: Option<LoadingSnapshot>,
    /// Cached blocks before and among them.
    pub(crate) held: Vec<BlockId>,
}

/// A snapshot that a transfer is to fill.
pub(crate) struct LoadingSnapshot {
    /// The last block of its prefix; `NONE` if the transfer was abandoned.
    pub(crate) position: NodePosition,
    pub(crate) blocks: Vec<BlockId>,
}

impl OpenTransfer {
    /// All blocks to fill.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        let snapshot = self.snapshot.iter().flat_map(|of| &of.blocks).copied();
        self.loading.iter().map(|of| of.block).chain(snapshot)
    }
}

/// The open transfers of a manager, by number.
#[derive(Default)]
pub(crate) struct Transfers {
    pub(crate) manager: u32,
    pub(crate) num_begun: u64,
    pub(crate) open: BTreeMap<u64, OpenTransfer>,
}

impl Transfers {
    pub(crate) fn new(manager: u32) -> Self {
        Self {
            manager,
            ..Self::default()
        }
    }

    pub(crate) fn is_open(&self, key: TransferKey) -> bool {
        self.find(key).is_ok()
    }

    /// The number of an open transfer.
    pub(crate) fn find(&self, key: TransferKey) -> Result<u64, Error> {
        let transfer = key.serial;
        if key.manager != self.manager {
            return Err(Error::WrongManager {
                what: "transfer",
                id: transfer,
            });
        }
        match self.open.contains_key(&transfer) {
            true => Ok(transfer),
            false => Err(Error::TransferEnded { transfer }),
        }
    }

    /// An open transfer, to change it.
    pub(crate) fn find_mut(&mut self, key: TransferKey) -> Result<&mut OpenTransfer, Error> {
        let transfer = self.find(key)?;
        let open = self.open.get_mut(&transfer);
        open.ok_or(Error::TransferEnded { transfer })
    }

    pub(crate) fn remove(&mut self, key: TransferKey) -> Result<OpenTransfer, Error> {
        let transfer = self.find(key)?;
        let open = self.open.remove(&transfer);
        open.ok_or(Error::TransferEnded { transfer })
    }

    /// The transfer that is to fill the snapshot at a position.
    pub(crate) fn of_snapshot(&self, position: NodePosition) -> Option<u64> {
        let fills = |open: &OpenTransfer| {
            let snapshot = open.snapshot.as_ref();
            snapshot.is_some_and(|of| of.position == position)
        };
        let mut open = self.open.iter();
        open.find(|(_, open)| fills(open))
            .map(|(&serial, _)| serial)
    }

    /// The number of an open transfer from the lower 32 bits in its blocks: the last one with these bits.
    pub(crate) fn serial(&self, number: u32) -> u64 {
        let later = (self.num_begun as u32).wrapping_sub(number);
        self.num_begun - u64::from(later)
    }
}
