//! Arguments and answers in words, for whoever reads where a replay parted.

use crate::ids::BlockId;
use crate::step::Remapping;

/// Elements of a list that are shown.
const SHOWN: usize = 8;

pub(super) trait Words {
    fn words(&self) -> String;
}

macro_rules! as_displayed {
    ($($type:ty),*) => {
        $(impl Words for $type {
            fn words(&self) -> String {
                self.to_string()
            }
        })*
    };
}
as_displayed!(u32, u64, usize, bool);

impl Words for BlockId {
    fn words(&self) -> String {
        self.get().to_string()
    }
}

impl Words for Box<[u8]> {
    fn words(&self) -> String {
        format!("{:?}", self.escape_ascii().to_string())
    }
}

impl Words for Remapping {
    fn words(&self) -> String {
        let Self {
            sequence,
            group,
            index,
            ..
        } = self;
        let (old, new) = (self.old_block.get(), self.new_block.get());
        format!("sequence {sequence} group {group} entry {index} from block {old} to {new}")
    }
}

impl<T: Words> Words for Option<T> {
    fn words(&self) -> String {
        self.as_ref().map_or("none".into(), Words::words)
    }
}

impl<T: Words> Words for Vec<T> {
    fn words(&self) -> String {
        let mut shown: Vec<String> = self.iter().take(SHOWN).map(Words::words).collect();
        if self.len() > SHOWN {
            shown.push(format!("... {} in all", self.len()));
        }
        format!("[{}]", shown.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_short_in_words() {
        let eight = "[0, 1, 2, 3, 4, 5, 6, 7]";
        assert_eq!((0..8).collect::<Vec<u64>>().words(), eight);
        assert_eq!(vec![1_u32, 2].words(), "[1, 2]");
        assert_eq!(
            (0..20).collect::<Vec<u64>>().words(),
            "[0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]"
        );
        assert_eq!(
            (None::<u64>.words(), Some(7_u64).words()),
            ("none".into(), "7".into())
        );
    }
}
