//! The shared state of a store's threads. Its lock is never held during I/O.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem::Discriminant;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::disk::Disk;
use crate::error::{DropReason, Notice};
use crate::format::{Record, Sealer};
use crate::index::{EntryId, Index};
use crate::key::{Block, BlockKey, Fingerprint};
use crate::stats::Counters;

const REPEAT_NOTICE: Duration = Duration::from_secs(60);
const MAX_NOTICES: usize = 64;

/// An entry that waits to be written.
pub(crate) struct WriteJob {
    pub(crate) entry: EntryId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) parent: BlockKey,
    pub(crate) namespace: Vec<u8>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) payload: Vec<u8>,
}

impl WriteJob {
    pub(crate) fn block(&self) -> Block<'_> {
        Block {
            fingerprint: self.fingerprint,
            namespace: &self.namespace,
            parent: self.parent,
            tokens: &self.tokens,
        }
    }
}

/// Work for the writer thread.
pub(crate) enum Work {
    Write(WriteJob),
    /// Records that an entry was dropped from a segment.
    Tombstone(u32, Record),
    /// Frees at least this many bytes, and returns the number freed.
    Evict(u64, Sender<u64>),
    /// Removes condemned segments.
    Tidy,
    /// Waits until everything written is on the device.
    Sync(Sender<io::Result<()>>),
}

pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) queue: VecDeque<Work>,
    pub(crate) queued_bytes: u64,
    pub(crate) spare: Vec<Vec<u8>>, // payload buffers to reuse
    pub(crate) limit: u64,
    pub(crate) counters: Counters,
    pub(crate) suspended_until: Option<Instant>,
    pub(crate) is_closing: bool,
    pub(crate) is_busy: bool, // the writer has work in progress
    pub(crate) has_writer: bool,
    /// Held until the writer ends, so that a stalled disk gets no second writer.
    pub(crate) writer_lock: Option<Box<dyn Send>>,
    pub(crate) next_segment: u32,
    notices: Vec<Notice>,
    last_notices: Vec<(Discriminant<Notice>, Instant)>,
    operations: BTreeMap<u64, Instant>, // I/O in progress, by number
    next_operation: u64,
    is_stalled: bool,
}

pub(crate) struct Shared {
    pub(crate) disk: Box<dyn Disk>,
    pub(crate) config: Config,
    pub(crate) sealer: Sealer,
    pub(crate) is_writer: bool,
    pub(crate) work: Condvar,
    pub(crate) idle: Condvar,
    pub(crate) refreshing: Mutex<()>,
    state: Mutex<State>,
}

/// A disk operation in progress; dropped when it ends.
pub(crate) struct Operation<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Shared {
    pub(crate) fn new(disk: Box<dyn Disk>, config: Config, is_writer: bool) -> Self {
        let sealer = Sealer::new(config.auth_key.as_ref());
        let state = State {
            index: Index::default(),
            queue: VecDeque::new(),
            queued_bytes: 0,
            spare: Vec::new(),
            limit: config.max_bytes,
            counters: Counters::default(),
            suspended_until: None,
            is_closing: false,
            is_busy: false,
            has_writer: false,
            writer_lock: None,
            next_segment: 0,
            notices: Vec::new(),
            last_notices: Vec::new(),
            operations: BTreeMap::new(),
            next_operation: 0,
            is_stalled: false,
        };
        let (work, idle) = (Condvar::new(), Condvar::new());
        Self {
            disk,
            config,
            sealer,
            is_writer,
            work,
            idle,
            refreshing: Mutex::new(()),
            state: Mutex::new(state),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a disk operation, so that a stall is detected.
    pub(crate) fn operation(&self) -> Operation<'_> {
        let mut state = self.lock();
        state.next_operation += 1;
        let number = state.next_operation;
        state.operations.insert(number, Instant::now());
        Operation {
            shared: self,
            number,
        }
    }

    /// Queues work for the writer. Without a writer, entries are dropped and requests get no answer.
    pub(crate) fn enqueue(&self, state: &mut State, work: Work) {
        if state.has_writer && !state.is_closing {
            state.queue.push_back(work);
            self.work.notify_one();
        } else if let Work::Write(job) = work {
            state.drop_job(&job);
        }
    }

    /// Waits until the writer is idle, at most until `deadline`.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        while state.has_writer
            && (state.is_busy || !state.queue.is_empty() || state.index.usage().writing.entries > 0)
        {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self
                .idle
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.operations.remove(&self.number);
        state.check_stall(self.shared.config.stall_after);
    }
}

impl State {
    /// Removes an entry that the closing store no longer writes.
    pub(crate) fn drop_job(&mut self, job: &WriteJob) {
        self.index.fail_write(job.entry);
        self.queued_bytes -= job.payload.len() as u64;
        self.counters.count_drop(DropReason::Closed);
    }

    /// True if the oldest operation takes longer than `stall_after`.
    pub(crate) fn check_stall(&mut self, stall_after: Duration) -> bool {
        let is_stalled = self
            .operations
            .values()
            .next()
            .is_some_and(|start| start.elapsed() > stall_after);
        if is_stalled != self.is_stalled {
            self.is_stalled = is_stalled;
            self.counters.stalls += u64::from(is_stalled);
            if is_stalled {
                self.notify(Notice::Stalled)
            } else {
                self.recover()
            }
        }
        is_stalled
    }

    /// True while puts are dropped because writing failed.
    pub(crate) fn is_suspended(&self) -> bool {
        self.suspended_until
            .is_some_and(|until| Instant::now() < until)
    }

    /// Adds a notice, unless one of its kind was added within a minute.
    pub(crate) fn notify(&mut self, notice: Notice) {
        let (kind, now) = (std::mem::discriminant(&notice), Instant::now());
        let is_recent = |&(other, at): &(_, Instant)| other == kind && now - at < REPEAT_NOTICE;
        if self.last_notices.iter().any(is_recent) {
            return;
        }
        self.last_notices.retain(|&(other, _)| other != kind);
        self.last_notices.push((kind, now));
        self.push_notice(notice);
    }

    /// Adds a notice; of unread ones, the latest are kept.
    fn push_notice(&mut self, notice: Notice) {
        if self.notices.len() == MAX_NOTICES {
            self.notices.remove(0);
        }
        self.notices.push(notice);
    }

    /// Notes that a fault ended. All kinds of notices may be added again.
    pub(crate) fn recover(&mut self) {
        self.last_notices.clear();
        self.push_notice(Notice::Recovered);
    }

    pub(crate) fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }
}
