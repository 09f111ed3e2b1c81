//! The open transfers of a manager.

use std::ops::Range;

use crate::error::Error;
use crate::handles::LoadingBlock;
use crate::ids::{BlockId, SeqKey, TransferKey};

/// A transfer that has not ended.
pub(crate) struct OpenTransfer {
    pub(crate) key: TransferKey,
    /// The sequence that asked for it. It may have ended since.
    pub(crate) sequence: SeqKey,
    pub(crate) rows: Range<usize>,
    /// The blocks to fill, row by row.
    pub(crate) loading: Vec<LoadingBlock>,
    /// Cached blocks before and among them.
    pub(crate) held: Vec<BlockId>,
}

/// The open transfers of a manager, oldest first.
#[derive(Default)]
pub(crate) struct Transfers {
    pub(crate) manager: u32,
    pub(crate) made: u64,
    pub(crate) open: Vec<OpenTransfer>,
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

    pub(crate) fn find(&self, key: TransferKey) -> Result<usize, Error> {
        let transfer = key.serial;
        if key.manager != self.manager {
            return Err(Error::WrongManager {
                what: "transfer",
                id: transfer,
            });
        }
        let at = self.open.iter().position(|open| open.key == key);
        at.ok_or(Error::TransferEnded { transfer })
    }

    /// The number of an open transfer, of which its blocks carry 32 bits.
    pub(crate) fn serial(&self, number: u32) -> u64 {
        let mut serials = self.open.iter().map(|open| open.key.serial);
        let serial = serials.find(|&serial| serial as u32 == number);
        serial.unwrap_or(number.into())
    }
}
