//! Operations and answers as text, for reports.

use kv_core::{Answer, BlockId, Call, Extend, Prefill, Remapping};

/// Elements of a list that are shown.
const SHOWN: usize = 8;

/// The text of a value.
pub(crate) trait Text {
    fn text(&self) -> String;
}

macro_rules! as_displayed {
    ($($type:ty),*) => {
        $(impl Text for $type {
            fn text(&self) -> String {
                self.to_string()
            }
        })*
    };
}
as_displayed!(u32, u64, usize, bool);

impl Text for BlockId {
    fn text(&self) -> String {
        self.get().to_string()
    }
}

impl Text for Box<[u8]> {
    fn text(&self) -> String {
        format!("{:?}", self.escape_ascii().to_string())
    }
}

impl<T: Text> Text for Option<T> {
    fn text(&self) -> String {
        self.as_ref().map_or("none".into(), Text::text)
    }
}

impl<T: Text> Text for Vec<T> {
    fn text(&self) -> String {
        let mut shown: Vec<String> = self.iter().take(SHOWN).map(Text::text).collect();
        if self.len() > SHOWN {
            shown.push(format!("... {} in all", self.len()));
        }
        format!("[{}]", shown.join(", "))
    }
}

/// The arguments of a call, each with its name.
macro_rules! arguments {
    ($call:ident, $($name:ident { $($field:ident),* })*) => {
        match $call {
            $(Call::$name { $($field),* } => {
                vec![$(format!("{}={}", stringify!($field), $field.text())),*]
            })*
        }
    };
}

impl Text for Call {
    fn text(&self) -> String {
        let arguments: Vec<String> = arguments!(self,
            Sequence { tokens, namespace, read_cache }
            MatchPrefix { tokens, namespace }
            Pin { sequence }
            Attach { sequence, pin }
            Fork { sequence, num_tokens }
            Append { sequence, tokens }
            Trim { sequence, num_tokens }
            Reset { sequence }
            Free { sequence }
            BeginStep { token_budget }
            Decode { plan, sequences, lookahead }
            Speculate { plan, sequence, drafts }
            Prefill { plan, sequence, max_tokens, spare_blocks, replay }
            Cancel { plan, sequence }
            Commit { plan, tokens, counts }
            Rollback { plan }
            EvictAll {}
            DropSequence { sequence }
            DropPin { pin }
            DropPlan { plan }
            Stop {}
            Draft { plan, sequences, drafts, counts }
            ReuseCached { sequence }
            Extend { sequence, num_tokens }
            Publish { sequence, num_tokens, tokens }
            Reserve { sequence, num_tokens }
            Complete { transfer, num_blocks }
            Abandon { transfer }
            DropTransfer { transfer }
            Evict { num_blocks }
            FreeKeeping { sequence, num_tokens }
            WantSnapshots { sequence, positions }
            KeepSnapshot { sequence }
            AdvanceWeightsVersion {}
            SwitchingSequence { tokens, namespace, read_cache, position, other }
            MatchSwitchingPrefix { tokens, namespace, position, other }
        );
        format!("{}({})", self.kind(), arguments.join(", "))
    }
}

impl Text for Answer {
    fn text(&self) -> String {
        match self {
            Self::Done => "done".into(),
            Self::Number(number) => number.text(),
            Self::Numbers(numbers) => numbers.text(),
            Self::Prefill(Prefill::Planned {
                cached_tokens,
                tokens,
                samples,
            }) => {
                let samples = match samples {
                    true => "samples",
                    false => "does not sample",
                };
                format!("planned, {cached_tokens} tokens cached, {tokens} to compute, {samples}")
            }
            Self::Prefill(Prefill::NoBudget) => "no budget".into(),
            Self::Prefill(Prefill::Computing) => "an open step computes it".into(),
            Self::Prefill(Prefill::Loading { transfer }) => format!("transfer {transfer} loads"),
            Self::Prefill(Prefill::NoRoom { needed, available })
            | Self::Extend(Extend::NoRoom { needed, available }) => {
                format!("no room, {needed} blocks needed, {available} available")
            }
            Self::Extend(Extend::Extended { blocks, copies }) => {
                let copies = copies.iter().map(|&(from, to)| vec![from, to]);
                let copies: Vec<Vec<BlockId>> = copies.collect();
                format!("blocks {}, copies {}", blocks.text(), copies.text())
            }
            Self::Remappings(remappings) => format!("remappings {}", remappings.text()),
            Self::PoolUsage(usage) => format!(
                "{} blocks free, {} evictable, {} active, {} pinned, {} loading",
                usage.free, usage.evictable, usage.active, usage.pinned, usage.loading
            ),
        }
    }
}

impl Text for Remapping {
    fn text(&self) -> String {
        let (old, new) = (self.old_block.get(), self.new_block.get());
        format!(
            "sequence {} group {} entry {} from block {old} to {new}",
            self.sequence, self.group, self.index
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut() {
        let eight = "[0, 1, 2, 3, 4, 5, 6, 7]";
        assert_eq!((0..8).collect::<Vec<u64>>().text(), eight);
        assert_eq!(vec![1_u32, 2].text(), "[1, 2]");
        assert_eq!(
            (0..20).collect::<Vec<u64>>().text(),
            "[0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]"
        );
        assert_eq!(
            (None::<u64>.text(), Some(7_u64).text()),
            ("none".into(), "7".into())
        );
    }
}
