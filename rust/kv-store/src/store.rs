//! The store: put, get, look up, prune, verify.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use crate::config::{Access, Config};
use crate::disk::Disk;
use crate::error::{DropReason, Get, LengthMismatch, Notice, OpenError, Put};
use crate::folder::{Folder, WriterLock};
use crate::format::{Sealer, header_len};
use crate::key::{Block, BlockKey, Fingerprint};
use crate::marker;
use crate::read::dropped;
use crate::state::{Shared, Work, WriteJob};
use crate::stats::Stats;
use crate::usage::FingerprintUsage;
use crate::writer::Writer;

const MAX_QUEUED: u64 = 65_536;
const STALL_CHECK: Duration = Duration::from_millis(50);

/// KV-cache blocks on disk. All methods may be called from any thread.
///
/// Dropping a store drops queued entries; [`close`](Self::close) writes them first.
pub struct Store {
    shared: Arc<Shared>,
}

/// Entries to be dropped by [`Store::prune`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prune {
    /// All of them.
    All,
    /// Those of a fingerprint.
    Fingerprint(Fingerprint),
    /// Those of other fingerprints.
    Except(Fingerprint),
    /// Those older than this.
    OlderThan(Duration),
}

/// Result of [`Store::verify`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verification {
    /// Number of intact entries.
    pub whole: u64,
    /// Keys of the others. Damaged entries are dropped; unreadable ones stay.
    pub damaged: Vec<BlockKey>,
}

impl Store {
    /// Opens a folder, or creates one that only its owner can enter. [`Access::Read`] creates and changes nothing.
    pub fn open(path: impl AsRef<Path>, config: Config) -> Result<Self, OpenError> {
        config.check()?;
        // Without trailing slashes and dots, which would make the system follow a symbolic link.
        let path: PathBuf = path.as_ref().components().collect();
        let io = |source| OpenError::Io {
            path: path.clone(),
            source,
        };
        let folder = Folder::open(&path, config.access)?;
        let marker = marker::text(&Sealer::new(config.auth_key.as_ref()));
        marker::check(&folder, &path, &marker)?;
        let lock = match config.access {
            Access::Read => None,
            access => match folder.lock() {
                Ok(Ok(lock)) => Some(lock),
                Ok(Err(_)) if access == Access::WriteOrRead => None,
                Ok(Err(pid)) => return Err(OpenError::Locked { path, pid }),
                Err(source) if is_unwritable(&source) => {
                    return Err(OpenError::ReadOnly { path, source });
                }
                Err(source) => return Err(io(source)),
            },
        };
        if lock.is_some() {
            Self::mark(&folder, &path, &marker)?;
        }
        let folder = Box::new(folder.of_store(&marker, lock.is_some()));
        Self::start(folder, config, lock).map_err(io)
    }

    /// Marks a disk as a store, again if a power cut lost the marker.
    fn mark(disk: &dyn Disk, path: &Path, marker: &str) -> Result<(), OpenError> {
        marker::check(disk, path, marker)?; // another process may have marked it before the lock
        marker::write(disk, marker).map_err(|source| OpenError::Io {
            path: path.into(),
            source,
        })
    }

    /// Opens a store on a disk, as [`open`](Self::open) does in a folder: one of another format or authentication key
    /// is refused.
    pub fn open_disk(disk: Box<dyn Disk>, config: Config) -> Result<Self, OpenError> {
        config.check()?;
        let path = Path::new("(disk)");
        let marker = marker::text(&Sealer::new(config.auth_key.as_ref()));
        match config.access {
            Access::Read => drop(marker::check(&*disk, path, &marker)?),
            _ => Self::mark(&*disk, path, &marker)?,
        }
        Self::on_disk(disk, config)
    }

    /// Opens a store on a disk that is not a folder: in memory, or one that fails on purpose.
    pub fn on_disk(disk: Box<dyn Disk>, config: Config) -> Result<Self, OpenError> {
        config.check()?;
        Self::start(disk, config, None).map_err(|source| OpenError::Io {
            path: "(disk)".into(),
            source,
        })
    }

    fn start(disk: Box<dyn Disk>, config: Config, lock: Option<WriterLock>) -> io::Result<Self> {
        let is_folder_reader = lock.is_none() && config.access == Access::WriteOrRead;
        let is_writer = config.access != Access::Read && !is_folder_reader;
        let shared = Arc::new(Shared::new(disk, config, is_writer));
        let active = shared.load()?;
        if is_writer {
            let (asked, limit) = (shared.config.max_bytes, shared.measured_limit());
            let mut state = shared.lock();
            state.limit = limit;
            if limit < asked {
                state.notify(Notice::LimitLowered { asked, limit });
            }
            state.has_writer = true;
            state.writer_lock = lock.map(|lock| Box::new(lock) as Box<dyn Send>);
            let excess = state.index.disk_bytes().saturating_sub(limit);
            let (answer, _) = mpsc::channel();
            shared.enqueue(
                &mut state,
                if excess > 0 {
                    Work::Evict(excess, answer)
                } else {
                    Work::Tidy
                },
            );
            drop(state);
            let writer = Writer::new(Arc::clone(&shared), active);
            std::thread::Builder::new()
                .name("kv-store".into())
                .spawn(|| writer.run())?;
        }
        Ok(Self { shared })
    }

    /// True if this store writes; false if it reads what another process writes.
    pub fn is_writer(&self) -> bool {
        self.shared.is_writer
    }

    /// Copies a block's payload and queues it for writing. Never waits for the disk.
    pub fn put(&self, block: &Block<'_>, payload: &[&[u8]]) -> Put {
        let bytes: u64 = payload.iter().map(|part| part.len() as u64).sum();
        let header = header_len(block.namespace.len(), block.tokens.len());
        let key = block.key();
        let mut state = self.shared.lock();
        let config = &self.shared.config;
        let waiting = state.index.usage().writing.entries;
        let reason = match state.index.find(&key) {
            Some(entry) => {
                state.counters.known += 1;
                state.index.touch(entry);
                return Put::Known;
            }
            None if !self.shared.is_writer => DropReason::ReadOnly,
            None if state.is_closing || !state.has_writer => DropReason::Closed,
            None if header as u64 + bytes + 16 > config.segment_bytes => DropReason::TooLarge,
            None if state.check_stall(config.stall_after) || state.is_suspended() => {
                DropReason::Suspended
            }
            None if state.queued_bytes + bytes > config.queue_bytes || waiting >= MAX_QUEUED => {
                DropReason::QueueFull
            }
            None => match state
                .index
                .begin_write(key, block.fingerprint, header as u32, bytes)
            {
                None => DropReason::QueueFull,
                Some(entry) => {
                    state.queued_bytes += bytes;
                    let mut buffer = state.spare.pop().unwrap_or_default();
                    drop(state);
                    buffer.clear();
                    buffer.reserve_exact(bytes as usize);
                    payload
                        .iter()
                        .for_each(|part| buffer.extend_from_slice(part));
                    let job = WriteJob {
                        entry,
                        fingerprint: block.fingerprint,
                        parent: block.parent,
                        namespace: block.namespace.to_vec(),
                        tokens: block.tokens.to_vec(),
                        payload: buffer,
                    };
                    let mut state = self.shared.lock();
                    self.shared.enqueue(&mut state, Work::Write(job));
                    return Put::Queued;
                }
            },
        };
        state.counters.count_drop(reason);
        Put::Dropped(reason)
    }

    /// Reads a block's payload into `buffers`, in order. Waits for the disk: call it without locks.
    pub fn get(&self, block: &Block<'_>, buffers: &mut [&mut [u8]]) -> Result<Get, LengthMismatch> {
        self.shared.get(block, buffers)
    }

    /// True if an entry with this key is readable.
    pub fn contains(&self, key: &BlockKey) -> bool {
        let state = self.shared.lock();
        state
            .index
            .find(key)
            .is_some_and(|entry| state.index.is_readable(entry))
    }

    /// Counts a use of an entry, as [`put`](Self::put) does. False if neither index nor queue has this key.
    pub fn touch(&self, key: &BlockKey) -> bool {
        let mut state = self.shared.lock();
        let entry = state.index.find(key);
        if let Some(entry) = entry {
            state.counters.known += 1;
            state.index.touch(entry);
        }
        entry.is_some()
    }

    /// Number of blocks at the beginning of `keys` that are readable without a gap: the longest stored prefix, or how
    /// far it continues one that is cached elsewhere. It looks up keys in memory; [`get`](Self::get) verifies the entries.
    pub fn stored_blocks(&self, keys: &[BlockKey]) -> usize {
        let mut state = self.shared.lock();
        if state.check_stall(self.shared.config.stall_after) {
            return 0;
        }
        let is_readable = |key: &&BlockKey| {
            state
                .index
                .find(key)
                .is_some_and(|entry| state.index.is_readable(entry))
        };
        keys.iter().take_while(is_readable).count()
    }

    /// Waits until everything queued is written or dropped. False after `timeout`.
    pub fn flush(&self, timeout: Duration) -> bool {
        self.shared.wait_idle(Instant::now() + timeout)
    }

    /// Syncs all writes, also those before this store was opened, so that they survive a power failure. An error if that
    /// fails or the disk stalls.
    pub fn sync(&self) -> io::Result<()> {
        match self.ask(Work::Sync) {
            Some(result) => result,
            None if self.stats().is_stalled => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the disk does not answer",
            )),
            None => Ok(()),
        }
    }

    /// Removes the least useful segments until at least `bytes` are free. Returns the bytes freed.
    pub fn evict(&self, bytes: u64) -> u64 {
        self.ask(|answer| Work::Evict(bytes, answer)).unwrap_or(0)
    }

    /// The writer's answer; `None` without a writer or if the disk stalls.
    fn ask<T>(&self, work: impl FnOnce(mpsc::Sender<T>) -> Work) -> Option<T> {
        let (answer, receiver) = mpsc::channel();
        let mut state = self.shared.lock();
        self.shared.enqueue(&mut state, work(answer));
        drop(state);
        loop {
            match receiver.recv_timeout(STALL_CHECK) {
                Ok(answer) => return Some(answer),
                Err(mpsc::RecvTimeoutError::Disconnected) => return None,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let stall_after = self.shared.config.stall_after;
                    if self.shared.lock().check_stall(stall_after) {
                        return None;
                    }
                }
            }
        }
    }

    /// Drops entries. Their bytes are freed with their segments; empty segments are removed at once.
    pub fn prune(&self, what: Prune) -> u64 {
        self.prune_where(|entry, age| match what {
            Prune::All => true,
            Prune::Fingerprint(fingerprint) => entry == fingerprint,
            Prune::Except(fingerprint) => entry != fingerprint,
            Prune::OlderThan(limit) => age > limit,
        })
    }

    /// Drops entries for which `is_dropped(fingerprint, age)` is true.
    pub fn prune_where(&self, is_dropped: impl Fn(Fingerprint, Duration) -> bool) -> u64 {
        let mut state = self.shared.lock();
        if !self.shared.is_writer || state.is_closing {
            return 0;
        }
        let now = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let index = &state.index;
        let is_dropped = |&entry: &_| {
            let age = Duration::from_secs(now.saturating_sub(index.written(entry)));
            is_dropped(index.fingerprint(entry), age)
        };
        let entries: Vec<_> = index.readable().filter(is_dropped).collect();
        let mut records = Vec::with_capacity(entries.len());
        for &entry in &entries {
            let extent = state.index.extent(entry);
            records.push((
                extent.segment,
                dropped(
                    state.index.key(entry),
                    state.index.fingerprint(entry),
                    extent,
                ),
            ));
            state.index.condemn(entry);
        }
        let empty = state.index.condemn_empty_segments();
        for (segment, record) in records
            .into_iter()
            .filter(|(segment, _)| !empty.contains(segment))
        {
            self.shared
                .enqueue(&mut state, Work::Tombstone(segment, record));
        }
        self.shared.enqueue(&mut state, Work::Tidy);
        state.counters.pruned += entries.len() as u64;
        entries.len() as u64
    }

    /// Reads every entry and drops damaged ones. This is not a use of the entries.
    pub fn verify(&self) -> Verification {
        let entries: Vec<_> = {
            let state = self.shared.lock();
            state
                .index
                .readable()
                .map(|entry| (entry, state.index.key(entry)))
                .collect()
        };
        let mut verification = Verification::default();
        for (entry, key) in entries {
            match self.shared.verify_entry(entry, key) {
                Some(true) => verification.whole += 1,
                Some(false) => verification.damaged.push(key),
                None => {}
            }
        }
        verification
    }

    /// For a reader: loads entries that the writer stored, and drops those that it removed. Returns the number of
    /// readable entries.
    pub fn refresh(&self) -> io::Result<u64> {
        if self.shared.is_writer {
            return Ok(self.shared.lock().index.usage().readable.entries);
        }
        self.shared.refresh()
    }

    /// Counters, usage and limits.
    pub fn stats(&self) -> Stats {
        let mut state = self.shared.lock();
        Stats {
            is_stalled: state.check_stall(self.shared.config.stall_after),
            usage: state.index.usage(),
            disk_bytes: state.index.disk_bytes(),
            limit_bytes: state.limit,
            queued_bytes: state.queued_bytes,
            is_writer: self.shared.is_writer,
            is_suspended: state.is_suspended(),
            counters: state.counters,
        }
    }

    /// Readable entries by fingerprint, the one with the most bytes first.
    pub fn by_fingerprint(&self) -> Vec<FingerprintUsage> {
        self.shared.lock().index.by_fingerprint()
    }

    /// Takes the messages for the operator: one per fault, whatever the number of entries.
    pub fn take_notices(&self) -> Vec<Notice> {
        self.shared.lock().take_notices()
    }

    /// Recounts entries and bytes of every state and segment. The error names the first difference.
    pub fn check(&self) -> Result<(), String> {
        self.shared.lock().index.check()
    }

    /// Writes queued entries and ends the writer. False if that takes longer than `timeout`. Later puts are dropped;
    /// reads go on.
    pub fn close(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let is_written = self.shared.wait_idle(deadline);
        self.end(deadline) && is_written
    }

    fn end(&self, deadline: Instant) -> bool {
        let mut state = self.shared.lock();
        state.is_closing = true;
        self.shared.work.notify_all();
        while state.has_writer {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false; // the thread ends when the disk answers, and keeps the lock until then
            }
            state = self
                .shared
                .idle
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }
}

/// True if an error means that this process cannot write.
fn is_unwritable(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied
    )
}

impl Drop for Store {
    fn drop(&mut self) {
        let is_closed = self.shared.lock().is_closing;
        if !is_closed {
            self.end(Instant::now() + self.shared.config.stall_after);
        }
    }
}
