//! The writer thread: appends entries to the last segment and removes the least useful segments.

mod eviction;

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::disk::{DiskFile, write_all};
use crate::error::{DropReason, Notice};
use crate::format::{FileKind, Record, RecordKind, encode_header};
use crate::index::{Extent, Index};
use crate::state::{Shared, Work, WriteJob};

/// After a fault, the writer checks its folder and the free space at least this often.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The segment that entries are appended to.
pub(crate) struct Active {
    pub(crate) segment: u32,
    pub(crate) data: Box<dyn DiskFile>,
    pub(crate) index: Box<dyn DiskFile>,
}

pub(crate) struct Writer {
    shared: Arc<Shared>,
    active: Option<Active>,
    /// Segments with unsynced bytes.
    unsynced: BTreeSet<u32>,
    /// True if names of files are unsynced.
    are_names_unsynced: bool,
    /// When it last checked its folder and the free space.
    last_check: Instant,
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

pub(crate) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Marks the writer as ended in the shared state, even if it panics.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.has_writer = false;
        state.is_busy = false;
        state.writer_lock = None;
        self.0.idle.notify_all();
    }
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>, active: Option<Active>) -> Self {
        let unsynced = shared.lock().index.segments.keys().copied().collect();
        Self {
            shared,
            active,
            unsynced, // an earlier process may have left them so
            are_names_unsynced: true,
            last_check: Instant::now(),
        }
    }

    /// Runs until the store closes.
    pub(crate) fn run(mut self) {
        lower_priority();
        let shared = Arc::clone(&self.shared);
        let _ended = Ended(&shared);
        while let Some(work) = self.next() {
            match work {
                Work::Write(job) => self.write(job),
                Work::Tombstone(segment, record) => self.tombstone(segment, &record),
                Work::Evict(bytes, answer) => drop(answer.send(self.evict_bytes(bytes))),
                Work::Tidy => drop(self.remove_condemned()),
                Work::Sync(answer) => drop(answer.send(self.sync())),
            }
        }
        self.drop_queue();
        let _ = self.sync();
    }

    fn next(&self) -> Option<Work> {
        let mut state = self.shared.lock();
        loop {
            state.is_busy = !state.is_closing && !state.queue.is_empty();
            if state.is_closing {
                return None;
            }
            if let Some(work) = state.queue.pop_front() {
                return Some(work);
            }
            self.shared.idle.notify_all();
            state = self
                .shared
                .work
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn drop_queue(&self) {
        let mut state = self.shared.lock();
        while let Some(work) = state.queue.pop_front() {
            if let Work::Write(job) = work {
                state.drop_job(&job);
            }
        }
    }

    fn write(&mut self, job: WriteJob) {
        let is_suspended = self.shared.lock().is_suspended();
        let result = match is_suspended {
            true => None,
            false => Some(
                self.check_disk()
                    .and_then(|()| self.append_job(&job))
                    .or_else(|error| self.retry_full(&job, error)),
            ),
        };
        let mut state = self.shared.lock();
        let bytes = job.payload.len() as u64;
        state.queued_bytes -= bytes;
        match result {
            Some(Ok(extent)) => {
                state.index.publish(job.entry, extent, now());
                state.counters.stored += 1;
                state.counters.stored_bytes += bytes;
                if state.suspended_until.take().is_some() {
                    state.recover();
                }
            }
            failed => {
                state.index.fail_write(job.entry);
                state.counters.count_drop(DropReason::Suspended);
                if let Some(Err(error)) = failed {
                    self.shared.suspend(&mut state, &error);
                }
            }
        }
        let spare: u64 = state
            .spare
            .iter()
            .map(|buffer| buffer.capacity() as u64)
            .sum();
        if state.queued_bytes + spare + job.payload.capacity() as u64
            <= self.shared.config.queue_bytes
        {
            state.spare.push(job.payload);
        }
    }

    /// Checks whether the folder was replaced, and raises the limit if the free space has grown. At most once
    /// a second, and after each failed write. An error if the folder is gone.
    fn check_disk(&mut self) -> io::Result<()> {
        let (has_failed, is_lowered) = {
            let state = self.shared.lock();
            let is_lowered = state.limit < self.shared.config.max_bytes;
            (state.suspended_until.is_some(), is_lowered)
        };
        let interval = CHECK_INTERVAL.min(self.shared.config.retry_after);
        if !has_failed && self.last_check.elapsed() < interval {
            return Ok(());
        }
        self.last_check = Instant::now();
        let shared = Arc::clone(&self.shared);
        let _operation = shared.operation();
        let held = shared.disk.reopen()?;
        if let Some(held) = held {
            self.active = None;
            shared.forget_all();
            shared.lock().writer_lock = Some(held);
            self.active = shared.load()?;
            self.unsynced = shared.lock().index.segments.keys().copied().collect();
            self.are_names_unsynced = true;
        } else if !has_failed && !is_lowered {
            return Ok(());
        }
        let limit = shared.measured_limit();
        shared.lock().limit = limit;
        Ok(())
    }

    /// Lowers the limit of a full disk to the bytes that the store has, and tries once more.
    fn retry_full(&mut self, job: &WriteJob, error: io::Error) -> io::Result<Extent> {
        if !is_full(&error) {
            return Err(error);
        }
        {
            let mut state = self.shared.lock();
            state.counters.write_errors += 1;
            state.limit = state.limit.min(state.index.disk_bytes());
            let (asked, limit) = (self.shared.config.max_bytes, state.limit);
            state.notify(Notice::LimitLowered { asked, limit });
        }
        self.append_job(job)
    }

    fn append_job(&mut self, job: &WriteJob) -> io::Result<Extent> {
        let block = job.block();
        let mut hasher = self.shared.sealer.payload();
        hasher.update(&job.payload);
        let checksum = *hasher.finalize().as_bytes();
        let header = encode_header(
            &block,
            job.payload.len() as u64,
            &checksum,
            &self.shared.sealer,
        );
        self.make_space((header.len() + job.payload.len()) as u64)?;
        let record = Record {
            kind: RecordKind::Stored,
            key: block.key(),
            fingerprint: job.fingerprint,
            offset: 0,
            header_len: header.len() as u32,
            payload_len: job.payload.len() as u64,
            written: now(),
        };
        self.append(&[&header, &job.payload], record)
    }

    /// Appends an entry's bytes, then its record. After a failure the next entry overwrites both.
    fn append(&mut self, parts: &[&[u8]], mut record: Record) -> io::Result<Extent> {
        let shared = Arc::clone(&self.shared);
        let _operation = shared.operation();
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        self.rotate(bytes)?;
        let active = self.active.as_ref().expect("a segment to append to");
        self.unsynced.insert(active.segment);
        let (start, index_end) = {
            let mut state = shared.lock();
            let segment = state.index.segment_mut(active.segment);
            (segment.data_end, segment.index_end)
        };
        let mut offset = start;
        let mut write = || -> io::Result<()> {
            for part in parts {
                write_all(&*active.data, part, offset)?;
                offset += part.len() as u64;
            }
            record.offset = start;
            write_all(&*active.index, &record.encode(active.segment), index_end)
        };
        if let Err(error) = write() {
            let _ = active.index.truncate(index_end);
            let _ = active.data.truncate(start);
            if !is_full(&error) {
                self.active = None;
            }
            return Err(error);
        }
        let (header_len, payload_len) = (record.header_len, record.payload_len);
        Ok(Extent {
            segment: active.segment,
            offset: start,
            header_len,
            payload_len,
        })
    }

    /// Ensures that the active segment has space for an entry of this size.
    fn rotate(&mut self, bytes: u64) -> io::Result<()> {
        if let Some(active) = &self.active {
            let state = self.shared.lock();
            let segment = state
                .index
                .segments
                .get(&active.segment)
                .filter(|segment| !segment.is_condemned);
            let end = segment.map_or(u64::MAX, |segment| segment.data_end);
            if end.saturating_add(bytes) <= self.shared.config.segment_bytes {
                return Ok(());
            }
            drop(state);
            let sealed = self.sync();
            self.active = None;
            sealed?;
        }
        let segment = {
            let mut state = self.shared.lock();
            state.next_segment += 1;
            state.next_segment - 1
        };
        self.are_names_unsynced = true;
        self.active = Some(create(&self.shared, segment)?);
        self.shared.lock().index.add_segment(segment);
        Ok(())
    }

    /// Syncs all segments and their names.
    fn sync(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let _operation = shared.operation();
        for segment in self.unsynced.clone() {
            let exists = |index: &Index| {
                index
                    .segments
                    .get(&segment)
                    .is_some_and(|s| !s.is_condemned)
            };
            let active = self
                .active
                .as_ref()
                .filter(|active| active.segment == segment);
            if let Some(active) = active {
                active.data.sync()?;
                active.index.sync()?;
            } else if exists(&shared.lock().index) {
                for kind in [FileKind::Data, FileKind::Index] {
                    shared.disk.open_writable(&kind.name(segment))?.sync()?;
                }
            }
            self.unsynced.remove(&segment);
        }
        if self.are_names_unsynced {
            shared.disk.sync()?;
            self.are_names_unsynced = false;
        }
        Ok(())
    }
}

impl Shared {
    /// The configured limit, or less on a small disk: a twentieth of the bytes available to the store stays free.
    pub(crate) fn measured_limit(&self) -> u64 {
        let used = self.lock().index.disk_bytes();
        let available = self.disk.available().unwrap_or(u64::MAX);
        let space = used.saturating_add(available);
        self.config.max_bytes.min(space - space / 20)
    }

    fn suspend(&self, state: &mut crate::state::State, error: &io::Error) {
        state.counters.write_errors += 1;
        state.suspended_until = Some(Instant::now() + self.config.retry_after);
        state.notify(Notice::WriteFailed(error.to_string()));
    }
}

fn create(shared: &Shared, segment: u32) -> io::Result<Active> {
    let file = |kind: FileKind| -> io::Result<Box<dyn DiskFile>> {
        let file = shared.disk.create(&kind.name(segment))?;
        write_all(&*file, &kind.header(segment), 0)?;
        Ok(file)
    };
    let result = file(FileKind::Data).and_then(|data| Ok((data, file(FileKind::Index)?)));
    if result.is_err() {
        let _ = shared.disk.remove(&FileKind::Index.name(segment));
        let _ = shared.disk.remove(&FileKind::Data.name(segment));
    }
    let (data, index) = result?;
    Ok(Active {
        segment,
        data,
        index,
    })
}

/// Lowers this thread's priority below the compute threads; on Linux, niceness is per thread.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 10);
}
