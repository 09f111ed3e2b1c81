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
        for entry in &self.entries {
            if let Some(amount) = amount_of(&mut usage, entry.state, entry.readers) {
                amount.entries += 1;
                amount.bytes += entry.extent.bytes();
            }
        }
        if usage != self.usage {
            return Err(format!("usage: {usage:?} counted, {:?} kept", self.usage));
        }
        equal("entries", usage.total().entries, self.total.entries)?;
        equal("bytes", usage.total().bytes, self.total.bytes)?;
        let linked = [State::Writing, State::Readable];
        let count = |states: &[State]| {
            self.entries
                .iter()
                .filter(|entry| states.contains(&entry.state))
                .count() as u64
        };
        equal("linked keys", count(&linked), self.table.len() as u64)?;
        equal(
            "free entries",
            count(&[State::Free]),
            self.free.len() as u64,
        )?;
        let mut seen = BTreeSet::new();
        for (number, segment) in &self.segments {
            let entries = || segment.entries.iter().map(|&id| self.entry(id));
            let live = || entries().filter(|entry| entry.state == State::Readable);
            if let Some(entry) = entries().find(|entry| entry.extent.segment != *number) {
                return Err(format!(
                    "segment {number} lists an entry of segment {}",
                    entry.extent.segment
                ));
            }
            seen.extend(segment.entries.iter().copied());
            let bytes: u64 = entries().map(|entry| entry.extent.bytes()).sum();
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
                live().map(|entry| entry.used).sum(),
                segment.use_sum,
            )?;
            let readers: u32 = entries().map(|entry| entry.readers).sum();
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
