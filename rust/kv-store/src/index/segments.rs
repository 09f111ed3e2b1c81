//! Segments of the index: creation, removal, and choice of a victim.

use std::collections::BTreeSet;

use super::{EntryId, Index, Segment, State};
use crate::format::{FILE_HEADER, RECORD};

impl Index {
    pub(crate) fn add_segment(&mut self, id: u32) {
        let header = FILE_HEADER as u64;
        let segment = Segment {
            data_end: header,
            index_end: header,
            is_condemned: false,
            is_forgotten: false,
            entries: Vec::new(),
            live: 0,
            use_sum: 0,
            readers: 0,
        };
        assert!(
            self.segments.insert(id, segment).is_none(),
            "segment {id} exists"
        );
    }

    /// Live entries of a segment, in the order in which they were written.
    pub(crate) fn live(&self, segment: u32) -> Vec<EntryId> {
        let entries = self
            .segments
            .get(&segment)
            .map_or(&[][..], |segment| &segment.entries);
        entries
            .iter()
            .copied()
            .filter(|&id| self.is_readable(id))
            .collect()
    }

    /// Drops all entries of a segment. Its files are removed after the last read ends.
    pub(crate) fn condemn_segment(&mut self, segment: u32) -> usize {
        let live = self.live(segment);
        live.iter().for_each(|&id| self.condemn(id));
        if let Some(segment) = self.segments.get_mut(&segment) {
            segment.is_condemned = true;
        }
        live.len()
    }

    /// Drops all entries: their folder is gone. Returns their number.
    pub(crate) fn forget_all(&mut self) -> usize {
        let segments: Vec<u32> = self.segments.keys().copied().collect();
        let lost = segments.iter().map(|&id| self.condemn_segment(id)).sum();
        self.segments
            .values_mut()
            .for_each(|segment| segment.is_forgotten = true);
        for id in self.removable() {
            self.remove_segment(id);
        }
        lost
    }

    /// Condemns all segments without a live entry, and returns them.
    pub(crate) fn condemn_empty_segments(&mut self) -> BTreeSet<u32> {
        let empty = self
            .segments
            .iter_mut()
            .filter(|(_, segment)| segment.live == 0);
        empty
            .map(|(&id, segment)| (segment.is_condemned = true, id).1)
            .collect()
    }

    /// Condemned segments without a read in progress.
    pub(crate) fn removable(&self) -> Vec<u32> {
        let removable = |segment: &Segment| segment.is_condemned && segment.readers == 0;
        self.segments
            .iter()
            .filter(|(_, segment)| removable(segment))
            .map(|(&id, _)| id)
            .collect()
    }

    pub(crate) fn remove_segment(&mut self, id: u32) {
        let segment = self.segments.remove(&id).expect("a segment that exists");
        debug_assert!(segment.is_condemned && segment.readers == 0);
        for id in segment.entries {
            debug_assert_eq!(self.entry(id).state, State::Condemned);
            self.count(id, false);
            self.release(id);
        }
    }

    /// The segment whose entries were used the longest ago on average. Segments being read come last.
    pub(crate) fn least_useful(&self) -> Option<u32> {
        let candidates = self
            .segments
            .iter()
            .filter(|(_, segment)| !segment.is_condemned);
        let order = |segment: &Segment| {
            (
                segment.readers > 0,
                segment.use_sum.checked_div(segment.live).unwrap_or(0),
            )
        };
        candidates
            .min_by_key(|(_, segment)| order(segment))
            .map(|(&id, _)| id)
    }

    /// Entries of a segment that were used more recently than the average entry of the store, the latest first,
    /// of at most `bytes`.
    pub(crate) fn worth_keeping(&self, segment: u32, bytes: u64) -> Vec<EntryId> {
        let (sum, live) = self.segments.values().fold((0, 0), |(s, l), segment| {
            (s + segment.use_sum, l + segment.live)
        });
        let average = sum.checked_div(live).unwrap_or(0);
        let mut entries = self.live(segment);
        entries.retain(|&id| self.entry(id).used > average);
        entries.sort_by_key(|&id| std::cmp::Reverse(self.entry(id).used));
        let mut left = bytes;
        let fits = |id: &EntryId| {
            let needed = self.extent(*id).bytes() + RECORD as u64;
            left.checked_sub(needed).map(|rest| left = rest).is_some()
        };
        entries.into_iter().take_while(fits).collect()
    }
}
