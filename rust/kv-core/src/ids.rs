//! Typed indices and keys.

use std::fmt;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
        #[allow(unreachable_pub)]
        pub struct $name(u32);

        #[allow(dead_code, unreachable_pub)] // the macro gives every index the same tools
        impl $name {
            /// No index. For links inside flat arrays only, never part of an answer.
            pub(crate) const NONE: Self = Self(u32::MAX);

            /// The index as a number.
            pub fn get(self) -> u32 {
                self.0
            }

            pub(crate) fn new(index: usize) -> Self {
                debug_assert!(index < u32::MAX as usize);
                Self(index as u32)
            }

            pub(crate) fn at(self) -> usize {
                self.0 as usize
            }

            pub(crate) fn some(self) -> Option<Self> {
                (self != Self::NONE).then_some(self)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::NONE
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.some() {
                    Some(index) => write!(f, "{}({})", stringify!($name), index.0),
                    None => write!(f, "{}(none)", stringify!($name)),
                }
            }
        }
    };
}

index!(
    /// A physical block of KV cache, `0..num_blocks`.
    BlockId
);
index!(
    /// The number of a radix node; reused once the node is removed.
    NodeId
);

/// A position in the tree: after the first `offset` blocks of `node`. It denotes the last of these blocks;
/// offset 0 is the root of a namespace.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct NodePosition {
    pub(crate) node: NodeId,
    pub(crate) offset: u32,
}

impl NodePosition {
    pub(crate) const NONE: Self = Self::new(NodeId::NONE, 0);

    pub(crate) const fn new(node: NodeId, offset: u32) -> Self {
        Self { node, offset }
    }

    pub(crate) fn some(self) -> Option<Self> {
        (self.node != NodeId::NONE).then_some(self)
    }

    /// Index in the node of the block that it denotes.
    pub(crate) fn index(self) -> usize {
        self.offset as usize - 1
    }
}

impl From<u32> for BlockId {
    fn from(index: u32) -> Self {
        Self(index)
    }
}

/// A copyable reference to a sequence. It may outlive the sequence: every use is checked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SeqKey {
    pub(crate) manager: u32,
    pub(crate) seq_idx: u32,
    pub(crate) id: u64,
}

/// A copyable reference to a step plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PlanKey {
    pub(crate) manager: u32,
    pub(crate) serial: u64,
}

impl PlanKey {
    /// The plan's number, counted from 1 in each manager.
    pub fn serial(self) -> u64 {
        self.serial
    }
}

/// A copyable reference to a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TransferKey {
    pub(crate) manager: u32,
    pub(crate) serial: u64,
}

impl TransferKey {
    /// The transfer's number, counted from 1 in each manager.
    pub fn serial(self) -> u64 {
        self.serial
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_numbers() {
        assert_eq!(BlockId::from(8).get(), 8);
        assert_eq!(
            format!("{:?} {:?}", BlockId::new(9), NodeId::NONE),
            "BlockId(9) NodeId(none)"
        );
        assert_eq!(
            (BlockId::NONE.some(), BlockId::from(3).some()),
            (None, Some(BlockId(3)))
        );
    }
}
