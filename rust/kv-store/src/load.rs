//! Loads the indexes of segments: when a store opens, and when a reader follows a writer.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::PoisonError;

use crate::disk::read_exact;
use crate::error::Notice;
use crate::format::{FILE_HEADER, FileKind, RECORD, Record, RecordKind, header_len};
use crate::index::{Extent, Index};
use crate::state::Shared;
use crate::writer::Active;

/// Records of a segment that are not in the index yet.
struct NewRecords {
    records: Vec<Record>,
    data_size: u64,
    /// Length of the valid part of the index file, in bytes.
    index_end: u64,
    index_size: u64,
}

impl Shared {
    /// Fills the index from the folder. For a writer: truncates torn tails, and returns the segment to append to.
    pub(crate) fn load(&self) -> io::Result<Option<Active>> {
        let segments = self.segments()?;
        for (&segment, kinds) in &segments {
            {
                let mut state = self.lock();
                state.next_segment = state.next_segment.max(segment.saturating_add(1));
            }
            let loaded = self.load_segment(segment, kinds.contains(&FileKind::Index));
            if let Err(error) = loaded {
                let mut state = self.lock();
                state.counters.read_errors += 1;
                state.notify(Notice::ReadFailed(error.to_string()));
            }
        }
        let mut state = self.lock();
        state.counters.loaded = state.index.usage().readable.entries;
        let last = segments.keys().next_back().copied();
        let resumable = |segment: &u32| {
            let space = self.config.segment_bytes / 2;
            state
                .index
                .segments
                .get(segment)
                .is_some_and(|s| !s.is_condemned && s.data_end < space)
        };
        let resumed = last.filter(resumable).filter(|_| self.is_writer);
        drop(state);
        Ok(resumed.and_then(|segment| {
            let open = |kind: FileKind| self.disk.open_writable(&kind.name(segment)).ok();
            Some(Active {
                segment,
                data: open(FileKind::Data)?,
                index: open(FileKind::Index)?,
            })
        }))
    }

    /// Follows the writer: loads new entries, drops removed ones. Returns the number of readable entries.
    pub(crate) fn refresh(&self) -> io::Result<u64> {
        let _one_at_a_time = self
            .refreshing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if self.disk.reopen()?.is_some() {
            self.forget_all();
        }
        let segments = self.segments()?;
        let known: Vec<u32> = self.lock().index.segments.keys().copied().collect();
        for segment in known
            .into_iter()
            .filter(|segment| !segments.contains_key(segment))
        {
            let mut state = self.lock();
            let gone = state.index.condemn_segment(segment);
            state.counters.evicted += gone as u64;
        }
        self.forget_condemned();
        for (&segment, kinds) in segments.iter().filter(|(_, kinds)| kinds.len() == 2) {
            match self.load_segment(segment, kinds.contains(&FileKind::Index)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(self.lock().index.usage().readable.entries)
    }

    /// Drops all entries after the folder was replaced.
    pub(crate) fn forget_all(&self) {
        let mut state = self.lock();
        let lost = state.index.forget_all();
        state.counters.lost += lost as u64;
    }

    /// For a reader, a condemned segment needs no removal of files.
    fn forget_condemned(&self) {
        let mut state = self.lock();
        for segment in state.index.removable() {
            state.index.remove_segment(segment);
        }
    }

    fn segments(&self) -> io::Result<BTreeMap<u32, Vec<FileKind>>> {
        let mut segments: BTreeMap<u32, Vec<FileKind>> = BTreeMap::new();
        for (segment, kind) in self
            .disk
            .names()?
            .iter()
            .filter_map(|name| FileKind::parse(name))
        {
            segments.entry(segment).or_default().push(kind);
        }
        Ok(segments)
    }

    fn load_segment(&self, segment: u32, has_index: bool) -> io::Result<()> {
        let from = {
            let state = self.lock();
            match state.index.segments.get(&segment) {
                Some(segment) if segment.is_condemned => return Ok(()),
                known => known.map_or(0, |segment| segment.index_end),
            }
        };
        let new = if has_index {
            self.read_index(segment, from)?
        } else {
            None
        };
        let Some(new) = new else {
            if self.is_writer {
                self.remove_files(segment);
            }
            return Ok(());
        };
        let (data_end, index_end, live) = {
            let state = &mut *self.lock();
            if from == 0 {
                state.index.add_segment(segment);
            }
            apply(&mut state.index, segment, &new);
            let live = state.index.live(segment).len();
            if live == 0 && self.is_writer {
                state.index.condemn_segment(segment);
            }
            let known = state.index.segment_mut(segment);
            (known.data_end, known.index_end, live)
        };
        debug_assert!(index_end <= new.index_end);
        if self.is_writer && live > 0 {
            // Torn tails of a crash. One that cannot be truncated is overwritten, or removed by eviction.
            let cut = |kind: FileKind, size: u64, end: u64| match size > end {
                true => self
                    .disk
                    .open_writable(&kind.name(segment))
                    .and_then(|file| file.truncate(end)),
                false => Ok(()),
            };
            cut(FileKind::Index, new.index_size, index_end)?;
            cut(FileKind::Data, new.data_size, data_end)?;
        }
        Ok(())
    }

    fn remove_files(&self, segment: u32) {
        for kind in [FileKind::Index, FileKind::Data] {
            let _ = self.disk.remove(&kind.name(segment));
        }
    }

    /// Reads the records from byte `from` to the first invalid one. `None`: not a segment.
    fn read_index(&self, segment: u32, from: u64) -> io::Result<Option<NewRecords>> {
        let index = self.disk.open(&FileKind::Index.name(segment))?;
        let data_size = match self.disk.open(&FileKind::Data.name(segment)) {
            Ok(file) => file.size()?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let header = FILE_HEADER as u64;
        let index_size = index.size()?;
        let mut start = [0; FILE_HEADER];
        if index_size < header || data_size < header {
            return Ok(None);
        }
        read_exact(&*index, &mut start, 0)?;
        if start != FileKind::Index.header(segment) {
            return Ok(None);
        }
        let from = from.max(header);
        let max_bytes = self.config.max_entries.saturating_mul(2 * RECORD as u64);
        let mut bytes = vec![0; index_size.saturating_sub(from).min(max_bytes) as usize];
        read_exact(&*index, &mut bytes, from)?;
        let (chunks, _) = bytes.as_chunks::<RECORD>();
        let records: Vec<Record> = chunks
            .iter()
            .map_while(|chunk| Record::decode(segment, chunk))
            .collect();
        let index_end = from + (records.len() * RECORD) as u64;
        Ok(Some(NewRecords {
            records,
            data_size,
            index_end,
            index_size,
        }))
    }
}

/// Applies records in order, up to the first without a complete entry in the data file.
fn apply(index: &mut Index, segment: u32, new: &NewRecords) {
    let mut dropped = BTreeSet::new();
    for record in &new.records {
        let known = index.segment_mut(segment);
        let bytes = u64::from(record.header_len).saturating_add(record.payload_len);
        let extent = Extent {
            segment,
            offset: record.offset,
            header_len: record.header_len,
            payload_len: record.payload_len,
        };
        match record.kind {
            RecordKind::Dropped => {
                known.index_end += RECORD as u64;
                dropped.insert(record.offset);
                let entry = index
                    .find(&record.key)
                    .filter(|&entry| index.is_readable(entry));
                if let Some(entry) = entry.filter(|&entry| index.extent(entry) == extent) {
                    index.condemn(entry);
                }
            }
            RecordKind::Stored => {
                let end = record.offset.saturating_add(bytes);
                let is_sound = record.offset == known.data_end
                    && end <= new.data_size
                    && (record.header_len as usize) >= header_len(0, 0);
                if !is_sound {
                    break;
                }
                // The same entry in an earlier segment was copied, or damaged and stored again.
                if let Some(entry) = index.find(&record.key) {
                    index.condemn(entry);
                }
                let Some(entry) = index.begin_write(
                    record.key,
                    record.fingerprint,
                    record.header_len,
                    record.payload_len,
                ) else {
                    break;
                };
                index.publish(entry, extent, record.written);
            }
        }
    }
}
