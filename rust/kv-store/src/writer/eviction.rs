//! The writer's eviction: segments are removed, entries in use are copied first.

use std::io;
use std::sync::Arc;

use super::Writer;
use crate::disk::{read_exact, write_all};
use crate::format::{FILE_HEADER, FileKind, RECORD, Record, RecordKind};
use crate::index::EntryId;

impl Writer {
    /// Removes segments until an entry of this size fits below the limits.
    pub(super) fn make_space(&mut self, bytes: u64) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let config = &shared.config;
        let fixed = (RECORD + 2 * FILE_HEADER) as u64;
        loop {
            self.remove_condemned()?;
            let (victim, kept) = {
                let state = self.shared.lock();
                // Space for copies of entries in use.
                let copy_space = if state.limit >= 4 * config.segment_bytes {
                    config.segment_bytes / 2
                } else {
                    0
                };
                let has_bytes =
                    state.index.disk_bytes() + bytes + fixed + copy_space <= state.limit;
                let entries = state.index.total().entries - state.index.usage().writing.entries;
                if has_bytes && entries < config.max_entries {
                    return Ok(());
                }
                (
                    state.index.least_useful(),
                    copy_space.saturating_sub(2 * fixed),
                )
            };
            let Some(victim) = victim else {
                return Err(io::ErrorKind::StorageFull.into());
            };
            self.evict(victim, kept)?;
        }
    }

    /// Removes a segment. Its entries that are in use are copied first, at most `kept` bytes.
    fn evict(&mut self, victim: u32, kept: u64) -> io::Result<()> {
        if self
            .active
            .as_ref()
            .is_some_and(|active| active.segment == victim)
        {
            self.active = None;
        }
        let entries = self.shared.lock().index.worth_keeping(victim, kept);
        let is_any_kept = !entries.is_empty();
        for entry in entries {
            // An entry that cannot be copied is evicted with the others.
            if self.relocate(entry, victim).is_err() {
                break;
            }
        }
        if is_any_kept {
            // A power cut must not find the originals removed and the copies missing.
            let _ = self.sync();
        }
        let mut state = self.shared.lock();
        let evicted = state.index.condemn_segment(victim);
        state.counters.evicted += evicted as u64;
        state.counters.evicted_segments += 1;
        drop(state);
        self.remove_condemned()
    }

    fn relocate(&mut self, entry: EntryId, segment: u32) -> io::Result<()> {
        let (extent, record) = {
            let state = self.shared.lock();
            if !state.index.is_readable(entry) || state.index.extent(entry).segment != segment {
                return Ok(());
            }
            let extent = state.index.extent(entry);
            let mut record = crate::read::dropped(
                state.index.key(entry),
                state.index.fingerprint(entry),
                extent,
            );
            (record.kind, record.written) = (RecordKind::Stored, state.index.written(entry));
            (extent, record)
        };
        let mut bytes = vec![0; extent.bytes() as usize];
        {
            let _operation = self.shared.operation();
            let file = self.shared.disk.open(&FileKind::Data.name(segment))?;
            read_exact(&*file, &mut bytes, extent.offset)?;
        }
        let copy = self.append(&[&bytes], record)?;
        let mut state = self.shared.lock();
        state.index.relocate(entry, extent, copy);
        state.counters.relocated += 1;
        Ok(())
    }

    pub(super) fn remove_condemned(&mut self) -> io::Result<()> {
        let removable = self.shared.lock().index.removable();
        for segment in removable {
            if self
                .active
                .as_ref()
                .is_some_and(|active| active.segment == segment)
            {
                self.active = None;
            }
            if self.shared.lock().index.segment_mut(segment).is_forgotten {
                self.shared.lock().index.remove_segment(segment);
                continue;
            }
            let _operation = self.shared.operation();
            // The index first: data without an index is removed when the store is opened.
            for kind in [FileKind::Index, FileKind::Data] {
                match self.shared.disk.remove(&kind.name(segment)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        self.shared.lock().counters.write_errors += 1;
                        return Err(error);
                    }
                    _ => {}
                }
            }
            self.shared.lock().index.remove_segment(segment);
        }
        Ok(())
    }

    pub(super) fn evict_bytes(&mut self, bytes: u64) -> u64 {
        let before = self.shared.lock().index.disk_bytes();
        loop {
            let state = self.shared.lock();
            let freed = before.saturating_sub(state.index.disk_bytes());
            let victim = state.index.least_useful();
            drop(state);
            match victim {
                Some(victim) if freed < bytes && self.evict(victim, 0).is_ok() => {}
                _ => return freed,
            }
        }
    }

    pub(super) fn tombstone(&mut self, segment: u32, record: &Record) {
        let end = {
            let state = self.shared.lock();
            let has_space = state.index.disk_bytes() + RECORD as u64 <= state.limit;
            match state.index.segments.get(&segment) {
                Some(segment) if !segment.is_condemned && has_space => segment.index_end,
                _ => return,
            }
        };
        let _operation = self.shared.operation();
        let write = || -> io::Result<()> {
            let file = self
                .shared
                .disk
                .open_writable(&FileKind::Index.name(segment))?;
            write_all(&*file, &record.encode(segment), end)
        };
        let result = write();
        let mut state = self.shared.lock();
        match result {
            Ok(()) => {
                state.index.segment_mut(segment).index_end += RECORD as u64;
                self.unsynced.insert(segment);
            }
            Err(_) => state.counters.write_errors += 1, // it will be detected again
        }
    }
}
