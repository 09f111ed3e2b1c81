//! The open transfers of a manager.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::Error;
use crate::handles::LoadingBlock;
use crate::ids::{BlockId, SeqKey, TransferKey};

/// A transfer that has not ended.
pub(crate) struct OpenTransfer {
    pub(crate) key: TransferKey,
    /// Its sequence, which may have ended since.
    pub(crate) sequence: SeqKey,
    pub(crate) indices: Range<usize>,
    /// The blocks to fill, logical block by logical block.
    pub(crate) loading: Vec<LoadingBlock>,
    /// Cached blocks before and among them.
    pub(crate) held: Vec<BlockId>,
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

    /// The number of an open transfer from the lower 32 bits in its blocks: the last one with these bits.
    pub(crate) fn serial(&self, number: u32) -> u64 {
        let later = (self.num_begun as u32).wrapping_sub(number);
        self.num_begun - u64::from(later)
    }
}
