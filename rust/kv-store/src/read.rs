//! Reads entries: looked up by key, verified by header and checksum.

use std::cell::RefCell;
use std::io;

use crate::disk::{DiskFile, read_exact};
use crate::error::{Get, LengthMismatch, Notice};
use crate::folder::is_device_error;
use crate::format::{FileKind, Header, Record, RecordKind};
use crate::index::{EntryId, Extent};
use crate::key::{Block, BlockKey, Fingerprint};
use crate::state::{Shared, State, Work};

/// Bytes per read: few enough to stay in the processor's cache while they are hashed and copied, and enough for BLAKE3's
/// widest instructions.
const CHUNK: usize = 128 << 10;

thread_local! {
    /// A buffer per thread, reused: the system takes longer to clear new pages than to read an entry into them.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Reasons for which an entry's payload was not read.
enum Fault {
    Io(io::Error),
    Damaged(&'static str),
    Collision,
    Length(LengthMismatch),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Damaged("is truncated"),
            _ => Self::Io(error),
        }
    }
}

impl Shared {
    /// Reads a block's payload into `buffers`.
    pub(crate) fn get(
        &self,
        block: &Block<'_>,
        buffers: &mut [&mut [u8]],
    ) -> Result<Get, LengthMismatch> {
        let given: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        let key = block.key();
        let mut state = self.lock();
        let readable = state
            .index
            .find(&key)
            .filter(|&entry| state.index.is_readable(entry));
        let answer = match readable {
            _ if state.check_stall(self.config.stall_after) => Get::Failed,
            None => Get::Miss,
            Some(entry) => {
                let extent = state.index.begin_read(entry);
                drop(state);
                let result = self.read_payload(block, key, extent, given, buffers);
                state = self.lock();
                let answer = self.end_read(&mut state, entry, extent, result)?;
                if answer == Get::Hit {
                    state.index.touch(entry);
                }
                answer
            }
        };
        state.counters.count_get(answer, given);
        Ok(answer)
    }

    fn read_payload(
        &self,
        block: &Block<'_>,
        key: BlockKey,
        extent: Extent,
        given: u64,
        buffers: &mut [&mut [u8]],
    ) -> Result<(), Fault> {
        let _operation = self.operation();
        let file = self.disk.open(&FileKind::Data.name(extent.segment))?;
        let mut bytes = vec![0; extent.header_len as usize];
        read_exact(&*file, &mut bytes, extent.offset)?;
        let header = self.header(&bytes, key, extent)?;
        if !header.proves(block) {
            return Err(Fault::Collision);
        }
        if header.payload_len != given {
            return Err(Fault::Length(LengthMismatch {
                stored: header.payload_len,
                given,
            }));
        }
        let mut hasher = self.sealer.payload();
        let mut targets = Scatter::over(buffers);
        for_each_chunk(&*file, extent, |chunk| {
            hasher.update(chunk);
            targets.fill(chunk);
        })?;
        if hasher.finalize() != header.checksum {
            return Err(Fault::Damaged("has a payload with a wrong checksum"));
        }
        Ok(())
    }

    fn header<'a>(
        &self,
        bytes: &'a [u8],
        key: BlockKey,
        extent: Extent,
    ) -> Result<Header<'a>, Fault> {
        let header =
            Header::decode(bytes, &self.sealer).ok_or(Fault::Damaged("has no valid header"))?;
        if header.key != key || header.payload_len != extent.payload_len {
            return Err(Fault::Damaged("contradicts the index"));
        }
        Ok(header)
    }

    /// The answer of a finished read. A hit is not yet a use: `verify` reads entries, too.
    fn end_read(
        &self,
        state: &mut State,
        entry: EntryId,
        extent: Extent,
        result: Result<(), Fault>,
    ) -> Result<Get, LengthMismatch> {
        state.index.end_read(entry, extent);
        let answer = match result {
            Ok(()) => Ok(Get::Hit),
            Err(Fault::Length(mismatch)) => Err(mismatch),
            Err(Fault::Collision) => {
                state.counters.collisions += 1;
                Ok(Get::Miss)
            }
            Err(Fault::Damaged(how)) => {
                state.counters.damaged += 1;
                let (key, fingerprint) = (state.index.key(entry), state.index.fingerprint(entry));
                state.notify(Notice::Damaged(format!("entry {key} {how}")));
                // If the entry was relocated meanwhile, its new extent is not damaged.
                if state.index.is_readable(entry) && state.index.extent(entry) == extent {
                    state.index.condemn(entry);
                    let record = dropped(key, fingerprint, extent);
                    self.enqueue(state, Work::Tombstone(extent.segment, record));
                }
                Ok(Get::Miss)
            }
            Err(Fault::Io(error)) => {
                state.counters.read_errors += 1;
                state.notify(Notice::ReadFailed(error.to_string()));
                if error.kind() == io::ErrorKind::NotFound {
                    let lost = state.index.condemn_segment(extent.segment);
                    state.counters.lost += lost as u64;
                } else if is_device_error(&error) {
                    state.counters.lost += u64::from(state.index.is_readable(entry));
                    state.index.condemn(entry);
                }
                Ok(Get::Failed)
            }
        };
        if state
            .index
            .segments
            .get(&extent.segment)
            .is_some_and(|segment| segment.is_condemned)
        {
            self.enqueue(state, Work::Tidy);
        }
        answer
    }

    /// Reads an entry whose block is unknown; drops it if damaged. True if it is complete.
    pub(crate) fn verify_entry(&self, entry: EntryId, key: BlockKey) -> Option<bool> {
        let mut state = self.lock();
        if state.index.find(&key) != Some(entry) || !state.index.is_readable(entry) {
            return None; // dropped meanwhile
        }
        let extent = state.index.begin_read(entry);
        drop(state);
        let result = self.read_unknown(key, extent);
        let is_whole = result.is_ok();
        let _ = self.end_read(&mut self.lock(), entry, extent, result);
        Some(is_whole)
    }

    fn read_unknown(&self, key: BlockKey, extent: Extent) -> Result<(), Fault> {
        let file = self.disk.open(&FileKind::Data.name(extent.segment))?;
        let mut bytes = vec![0; extent.header_len as usize];
        read_exact(&*file, &mut bytes, extent.offset)?;
        let header = self.header(&bytes, key, extent)?;
        if !header.is_consistent() {
            return Err(Fault::Damaged("has a key that does not match its tokens"));
        }
        let mut hasher = self.sealer.payload();
        for_each_chunk(&*file, extent, |chunk| {
            hasher.update(chunk);
        })?;
        if hasher.finalize() != header.checksum {
            return Err(Fault::Damaged("has a payload with a wrong checksum"));
        }
        Ok(())
    }
}

/// Buffers, filled in order.
struct Scatter<'a, 'b> {
    buffers: &'a mut [&'b mut [u8]],
    /// Bytes of the first buffer that are filled.
    filled: usize,
}

impl<'a, 'b> Scatter<'a, 'b> {
    fn over(buffers: &'a mut [&'b mut [u8]]) -> Self {
        Self { buffers, filled: 0 }
    }

    /// Appends bytes; the buffers have space for them.
    fn fill(&mut self, mut bytes: &[u8]) {
        while let [first, ..] = &mut *self.buffers {
            let free = &mut first[self.filled..];
            let len = free.len().min(bytes.len());
            free[..len].copy_from_slice(&bytes[..len]);
            (bytes, self.filled) = (&bytes[len..], self.filled + len);
            if bytes.is_empty() {
                return;
            }
            self.buffers = &mut std::mem::take(&mut self.buffers)[1..];
            self.filled = 0;
        }
    }
}

fn for_each_chunk(
    file: &dyn DiskFile,
    extent: Extent,
    mut visit: impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut offset = extent.offset + u64::from(extent.header_len);
    let end = offset + extent.payload_len;
    BUFFER.with_borrow_mut(|buffer| {
        buffer.resize(CHUNK, 0);
        while offset < end {
            let chunk = &mut buffer[..CHUNK.min((end - offset) as usize)];
            read_exact(file, chunk, offset)?;
            visit(chunk);
            offset += chunk.len() as u64;
        }
        Ok(())
    })
}

/// The record that removes an entry from its segment's index.
pub(crate) fn dropped(key: BlockKey, fingerprint: Fingerprint, extent: Extent) -> Record {
    Record {
        kind: RecordKind::Dropped,
        key,
        fingerprint,
        offset: extent.offset,
        header_len: extent.header_len,
        payload_len: extent.payload_len,
        written: 0,
    }
}
