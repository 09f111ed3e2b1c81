//! Recounting the index.

use std::collections::BTreeSet;

use super::{Index, State, amount_of};
use crate::format::FILE_HEADER;
use crate::usage::Usage;

impl Index {
    /// Recounts everything; the error names the first difference.
    pub(crate) fn check(&self) -> Result<(), String> {
        let equal = |what: &str, counted: u64, kept: u64| {
            if counted == kept {
                Ok(())
            } else {
                Err(format!("{what}: {counted} counted, {kept} kept"))
            }
        };
        let mut usage = Usage::default();
        for slot in &self.slots {
            if let Some(amount) = amount_of(&mut usage, slot.state, slot.readers) {
                amount.entries += 1;
                amount.bytes += slot.place.bytes();
            }
        }
        if usage != self.usage {
            return Err(format!("usage: {usage:?} counted, {:?} kept", self.usage));
        }
        equal("entries", usage.total().entries, self.total.entries)?;
        equal("bytes", usage.total().bytes, self.total.bytes)?;
        let linked = [State::Writing, State::Readable];
        let count = |states: &[State]| {
            self.slots
                .iter()
                .filter(|slot| states.contains(&slot.state))
                .count() as u64
        };
        equal("linked keys", count(&linked), self.table.len() as u64)?;
        equal("free slots", count(&[State::Free]), self.free.len() as u64)?;
        let mut seen = BTreeSet::new();
        for (number, segment) in &self.segments {
            let slots = || segment.slots.iter().map(|&id| self.slot(id));
            let live = || slots().filter(|slot| slot.state == State::Readable);
            if let Some(slot) = slots().find(|slot| slot.place.segment != *number) {
                return Err(format!(
                    "segment {number} lists an entry of segment {}",
                    slot.place.segment
                ));
            }
            seen.extend(segment.slots.iter().copied());
            let bytes: u64 = slots().map(|slot| slot.place.bytes()).sum();
            equal(
                &format!("bytes of segment {number}"),
                FILE_HEADER as u64 + bytes,
                segment.data_end,
            )?;
            equal(
                &format!("live entries of segment {number}"),
                live().count() as u64,
                segment.live,
            )?;
            equal(
                &format!("uses of segment {number}"),
                live().map(|slot| slot.used).sum(),
                segment.use_sum,
            )?;
            let readers: u32 = slots().map(|slot| slot.readers).sum();
            if readers > segment.readers || (segment.is_condemned && segment.live > 0) {
                return Err(format!(
                    "segment {number}: {readers} readers, {} live entries",
                    segment.live
                ));
            }
        }
        equal(
            "entries in segments",
            count(&[State::Readable, State::Condemned]),
            seen.len() as u64,
        )
    }
}
