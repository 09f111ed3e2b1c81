//! The index in memory: the state and position of every entry. No I/O.

mod check;
mod segments;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};

use hashbrown::HashTable;

use crate::format::RECORD;
use crate::key::{BlockKey, Fingerprint};
use crate::usage::{Amount, FingerprintUsage, Usage};

/// Bytes of memory per entry of the index, with its share of tables.
pub const INDEX_BYTES_PER_ENTRY: usize = 128;

/// Index of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EntryId(u32);

/// The bytes of an entry in its segment's data file: a header, then the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) segment: u32,
    pub(crate) offset: u64,
    pub(crate) header_len: u32,
    pub(crate) payload_len: u64,
}

impl Extent {
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.header_len) + self.payload_len
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Writing,
    Readable,
    Condemned,
}

struct Entry {
    key: BlockKey,
    fingerprint: u16,
    state: State,
    extent: Extent, // segment and offset are 0 until it is written
    readers: u32,
    used: u64,
    written: u64,
}

/// A pair of files. Entries are appended to the last one only.
pub(crate) struct Segment {
    pub(crate) data_end: u64,
    pub(crate) index_end: u64,
    pub(crate) is_condemned: bool,
    /// Its files are gone, or in another folder.
    pub(crate) is_forgotten: bool,
    entries: Vec<EntryId>,
    live: u64,
    use_sum: u64, // over live entries
    readers: u32,
}

#[derive(Default)]
pub(crate) struct Index {
    entries: Vec<Entry>,
    free: Vec<EntryId>,
    table: HashTable<EntryId>,
    hasher: RandomState,
    pub(crate) segments: BTreeMap<u32, Segment>,
    fingerprints: Vec<Fingerprint>,
    usage: Usage,
    total: Amount,
    clock: u64,
}

impl Index {
    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    /// Entries in all states, and their bytes.
    pub(crate) fn total(&self) -> Amount {
        self.total
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        self.segments
            .values()
            .map(|segment| segment.data_end + segment.index_end)
            .sum()
    }

    pub(crate) fn find(&self, key: &BlockKey) -> Option<EntryId> {
        let hash = self.hasher.hash_one(key);
        self.table
            .find(hash, |&id| self.entry(id).key == *key)
            .copied()
    }

    pub(crate) fn is_readable(&self, id: EntryId) -> bool {
        self.entry(id).state == State::Readable
    }

    pub(crate) fn extent(&self, id: EntryId) -> Extent {
        self.entry(id).extent
    }

    pub(crate) fn key(&self, id: EntryId) -> BlockKey {
        self.entry(id).key
    }

    pub(crate) fn fingerprint(&self, id: EntryId) -> Fingerprint {
        self.fingerprints[usize::from(self.entry(id).fingerprint)]
    }

    pub(crate) fn written(&self, id: EntryId) -> u64 {
        self.entry(id).written
    }

    /// Readable entries, in any order.
    pub(crate) fn readable(&self) -> impl Iterator<Item = EntryId> {
        let readable = |(id, entry): (usize, &Entry)| {
            (entry.state == State::Readable).then_some(EntryId(id as u32))
        };
        self.entries.iter().enumerate().filter_map(readable)
    }

    /// Registers an entry to be written. `None` if there are 65,536 other fingerprints.
    pub(crate) fn begin_write(
        &mut self,
        key: BlockKey,
        fingerprint: Fingerprint,
        header_len: u32,
        payload_len: u64,
    ) -> Option<EntryId> {
        debug_assert!(self.find(&key).is_none());
        let fingerprint = self.intern(fingerprint)?;
        let extent = Extent {
            segment: 0,
            offset: 0,
            header_len,
            payload_len,
        };
        let entry = Entry {
            key,
            fingerprint,
            state: State::Writing,
            extent,
            readers: 0,
            used: 0,
            written: 0,
        };
        let id = self.allocate(entry);
        self.count(id, true);
        self.table
            .insert_unique(self.hasher.hash_one(key), id, |&id| {
                self.hasher.hash_one(self.entries[id.0 as usize].key)
            });
        Some(id)
    }

    /// Removes an entry whose write failed.
    pub(crate) fn fail_write(&mut self, id: EntryId) {
        debug_assert_eq!(self.entry(id).state, State::Writing);
        self.unlink(id);
        self.count(id, false);
        self.release(id);
    }

    pub(crate) fn publish(&mut self, id: EntryId, extent: Extent, written: u64) {
        debug_assert_eq!(self.entry(id).state, State::Writing);
        self.count(id, false);
        self.clock += 1;
        let used = self.clock;
        let entry = self.entry_mut(id);
        (entry.state, entry.extent, entry.written, entry.used) =
            (State::Readable, extent, written, used);
        self.count(id, true);
        self.attach(id, extent);
        let segment = self.segment_mut(extent.segment);
        segment.live += 1;
        segment.use_sum += used;
        if segment.is_condemned {
            self.condemn(id); // the segment was pruned or found missing during the write
        }
    }

    /// Starts reading an entry: its bytes stay until [`end_read`](Self::end_read).
    pub(crate) fn begin_read(&mut self, id: EntryId) -> Extent {
        debug_assert_eq!(self.entry(id).state, State::Readable);
        self.count(id, false);
        self.entry_mut(id).readers += 1;
        self.count(id, true);
        let extent = self.entry(id).extent;
        self.segment_mut(extent.segment).readers += 1;
        extent
    }

    /// Ends reading an entry that was at `extent` when the read began.
    pub(crate) fn end_read(&mut self, id: EntryId, extent: Extent) {
        self.count(id, false);
        self.entry_mut(id).readers -= 1;
        self.count(id, true);
        self.segment_mut(extent.segment).readers -= 1;
        let now = self.entry(id).extent.segment;
        if now != extent.segment {
            self.segment_mut(now).readers -= 1;
        }
    }

    pub(crate) fn touch(&mut self, id: EntryId) {
        if self.entry(id).state != State::Readable {
            return;
        }
        self.clock += 1;
        let (used, extent) = (self.entry(id).used, self.entry(id).extent);
        let clock = self.clock;
        self.entry_mut(id).used = clock;
        self.segment_mut(extent.segment).use_sum += clock - used;
    }

    /// Drops a readable entry; its bytes stay until its segment is removed.
    pub(crate) fn condemn(&mut self, id: EntryId) {
        if self.entry(id).state != State::Readable {
            return;
        }
        self.unlink(id);
        self.count(id, false);
        self.entry_mut(id).state = State::Condemned;
        self.count(id, true);
        let (used, extent) = (self.entry(id).used, self.entry(id).extent);
        let segment = self.segment_mut(extent.segment);
        segment.live -= 1;
        segment.use_sum -= used;
    }

    /// Moves an entry to its copy. The bytes at the old position are condemned.
    /// If it was dropped meanwhile, the copy is condemned instead.
    pub(crate) fn relocate(&mut self, id: EntryId, from: Extent, to: Extent) {
        let is_same = self.entry(id).state == State::Readable && self.entry(id).extent == from;
        let (key, fingerprint) = (self.entry(id).key, self.entry(id).fingerprint);
        let unused = if is_same { from } else { to };
        let entry = Entry {
            key,
            fingerprint,
            state: State::Condemned,
            extent: unused,
            readers: 0,
            used: 0,
            written: 0,
        };
        let dropped = self.allocate(entry);
        self.count(dropped, true);
        if !is_same {
            return self.attach(dropped, to);
        }
        let (used, readers) = (self.entry(id).used, self.entry(id).readers);
        let old = self.segment_mut(from.segment);
        old.live -= 1;
        old.use_sum -= used;
        let position = old
            .entries
            .iter()
            .position(|&entry| entry == id)
            .expect("an entry is in its segment");
        old.entries[position] = dropped;
        self.entry_mut(id).extent = to;
        self.attach(id, to);
        let new = self.segment_mut(to.segment);
        new.live += 1;
        new.use_sum += used;
        new.readers += readers; // readers of the old bytes release both
        if new.is_condemned {
            self.condemn(id);
        }
    }

    /// Readable entries by fingerprint, the one with the most bytes first.
    pub(crate) fn by_fingerprint(&self) -> Vec<FingerprintUsage> {
        let unused = |&fingerprint: &Fingerprint| FingerprintUsage {
            fingerprint,
            amount: Amount::default(),
            last_written: 0,
        };
        let mut all: Vec<_> = self.fingerprints.iter().map(unused).collect();
        for id in self.readable() {
            let entry = self.entry(id);
            let usage = &mut all[usize::from(entry.fingerprint)];
            usage.amount.entries += 1;
            usage.amount.bytes += entry.extent.bytes();
            usage.last_written = usage.last_written.max(entry.written);
        }
        all.retain(|usage| usage.amount.entries > 0);
        all.sort_by_key(|usage| (Reverse(usage.amount.bytes), usage.fingerprint));
        all
    }

    fn intern(&mut self, fingerprint: Fingerprint) -> Option<u16> {
        let known = self
            .fingerprints
            .iter()
            .position(|&known| known == fingerprint);
        let index = known.unwrap_or(self.fingerprints.len());
        let index = u16::try_from(index).ok()?;
        if known.is_none() {
            self.fingerprints.push(fingerprint);
        }
        Some(index)
    }

    fn entry(&self, id: EntryId) -> &Entry {
        &self.entries[id.0 as usize]
    }

    fn entry_mut(&mut self, id: EntryId) -> &mut Entry {
        &mut self.entries[id.0 as usize]
    }

    pub(crate) fn segment_mut(&mut self, id: u32) -> &mut Segment {
        self.segments.get_mut(&id).expect("a segment that exists")
    }

    fn allocate(&mut self, entry: Entry) -> EntryId {
        if let Some(id) = self.free.pop() {
            *self.entry_mut(id) = entry;
            return id;
        }
        self.entries.push(entry);
        EntryId((self.entries.len() - 1) as u32)
    }

    fn release(&mut self, id: EntryId) {
        debug_assert_eq!(self.entry(id).readers, 0);
        self.entry_mut(id).state = State::Free;
        self.free.push(id);
    }

    fn attach(&mut self, id: EntryId, extent: Extent) {
        let segment = self.segment_mut(extent.segment);
        debug_assert_eq!(segment.data_end, extent.offset);
        segment.entries.push(id);
        segment.data_end += extent.bytes();
        segment.index_end += RECORD as u64;
    }

    fn unlink(&mut self, id: EntryId) {
        let hash = self.hasher.hash_one(self.entry(id).key);
        let entry = self
            .table
            .find_entry(hash, |&other| other == id)
            .expect("a linked entry");
        entry.remove();
    }

    fn count(&mut self, id: EntryId, is_added: bool) {
        let bytes = self.entry(id).extent.bytes();
        let amount = amount_of(
            &mut self.usage,
            self.entries[id.0 as usize].state,
            self.entries[id.0 as usize].readers,
        );
        for amount in [Some(&mut self.total), amount].into_iter().flatten() {
            if is_added {
                amount.entries += 1;
                amount.bytes += bytes;
            } else {
                amount.entries -= 1;
                amount.bytes -= bytes;
            }
        }
    }
}

fn amount_of(usage: &mut Usage, state: State, readers: u32) -> Option<&mut Amount> {
    match state {
        State::Free => None,
        State::Writing => Some(&mut usage.writing),
        State::Readable if readers > 0 => Some(&mut usage.reading),
        State::Readable => Some(&mut usage.readable),
        State::Condemned => Some(&mut usage.condemned),
    }
}
