//! A thread that writes a recording: no call of the manager waits for the file.

use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{mem, thread};

/// Bytes that are sent to the thread at once.
const CHUNK: usize = 8 << 10;

/// The most bytes that may wait to be written. A recording that falls further behind ends.
const MAX_WAITING: usize = 32 << 20;

/// How long to wait for a writer that accepts nothing.
const PATIENCE: Duration = Duration::from_secs(10);

/// Shared by the manager and the thread.
#[derive(Debug, Default)]
struct Progress {
    /// Bytes sent to the writer and not yet written.
    waiting: AtomicUsize,
    /// The outcome, once the thread has ended.
    outcome: Mutex<Option<io::Result<()>>>,
    ended: Condvar,
}

impl Progress {
    fn outcome(&self) -> MutexGuard<'_, Option<io::Result<()>>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, outcome: io::Result<()>) {
        self.outcome().get_or_insert(outcome);
        self.ended.notify_all();
    }
}

/// Reports the end of the thread in any case, also if the writer panics.
struct Ending(Arc<Progress>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0
            .end(Err(io::Error::other("the recording's writer panicked")));
    }
}

/// The sending side: bytes go in, a thread writes them.
pub(crate) struct WriterThread {
    chunk: Vec<u8>,
    /// `None` once the recording has ended.
    chunks: Option<Sender<Vec<u8>>>,
    /// Why it ended early, unless the writer failed.
    overflow: Option<io::Error>,
    progress: Arc<Progress>,
}

impl WriterThread {
    pub(crate) fn new(writer: impl Write + Send + 'static) -> Self {
        let (progress, (chunks, receiver)) = (Arc::new(Progress::default()), channel());
        let ending = Ending(Arc::clone(&progress));
        let thread = thread::Builder::new().name("kv-recording".into());
        let spawned = thread.spawn(move || {
            let outcome = write_all(writer, &receiver, &ending.0);
            ending.0.end(outcome);
        });
        if let Err(error) = &spawned {
            // The dropped closure has reported a panic.
            *progress.outcome() = Some(Err(io::Error::new(error.kind(), error.to_string())));
        }
        Self {
            chunk: Vec::with_capacity(CHUNK),
            chunks: spawned.is_ok().then_some(chunks),
            overflow: None,
            progress,
        }
    }

    /// Whether it still accepts operations.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.chunks.is_some()
    }

    /// Accepts the bytes of operation number `operation`.
    pub(crate) fn write(&mut self, operation: u64, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.chunk);
        if self.chunk.len() < CHUNK {
            return;
        }
        let waiting = self.progress.waiting.load(Ordering::Relaxed);
        // A single operation may be longer than the limit.
        if waiting == 0 || waiting + self.chunk.len() <= MAX_WAITING {
            self.send();
            return;
        }
        self.chunks = None;
        self.overflow = Some(io::Error::other(format!(
            "the recording ended before operation {operation}: {} MiB of it wait to be written; record to a \
             file that takes them faster",
            waiting >> 20
        )));
    }

    fn send(&mut self) {
        let Some(chunks) = &self.chunks else { return };
        let chunk = mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK));
        let waiting = &self.progress.waiting;
        waiting.fetch_add(chunk.len(), Ordering::Relaxed);
        if chunks.send(chunk).is_err() {
            self.chunks = None;
        }
    }

    /// Sends the rest; the thread ends once that is written.
    pub(crate) fn end(&mut self) -> EndedRecording {
        self.send();
        self.chunks = None;
        EndedRecording {
            overflow: self.overflow.take(),
            progress: Arc::clone(&self.progress),
            seen: usize::MAX,
            since: Instant::now(),
        }
    }
}

fn write_all(
    mut writer: impl Write,
    chunks: &Receiver<Vec<u8>>,
    progress: &Progress,
) -> io::Result<()> {
    for chunk in chunks {
        writer.write_all(&chunk)?;
        progress.waiting.fetch_sub(chunk.len(), Ordering::Relaxed);
    }
    writer.flush()
}

/// A recording that has ended, perhaps with bytes that are still to be written. If it is dropped, the thread still
/// writes them.
#[derive(Debug)]
pub struct EndedRecording {
    overflow: Option<io::Error>,
    progress: Arc<Progress>,
    /// Waiting bytes at the last progress, and its time.
    seen: usize,
    since: Instant,
}

impl EndedRecording {
    /// Waits for at most `limit` until everything is written; `None` if it is not yet.
    ///
    /// # Errors
    /// The first error of the writer; or that it was too slow, so the recording ended early; or that it stalls.
    pub fn wait(&mut self, limit: Duration) -> Option<io::Result<()>> {
        let mut outcome = self.progress.outcome();
        if outcome.is_none() && self.overflow.is_none() {
            let waits = |outcome: &mut Option<_>| outcome.is_none();
            let waited = self
                .progress
                .ended
                .wait_timeout_while(outcome, limit, waits);
            (outcome, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        let written = match outcome.take() {
            // The writer wrote the rest, but the part that exceeded the limit is missing.
            Some(Ok(())) | None if self.overflow.is_some() => self.overflow.take().map(Err),
            outcome => outcome,
        };
        let waiting = self.progress.waiting.load(Ordering::Relaxed);
        if written.is_some() || waiting != self.seen {
            (self.seen, self.since) = (waiting, Instant::now());
        }
        let stalled = || {
            io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "{waiting} bytes of the recording are not written, and its file has taken none for {} s",
                    PATIENCE.as_secs()
                ),
            )
        };
        written.or_else(|| (self.since.elapsed() >= PATIENCE).then(|| Err(stalled())))
    }

    /// Waits until everything is written, or the writer stalls.
    ///
    /// # Errors
    /// As [`EndedRecording::wait`].
    pub fn finish(mut self) -> io::Result<()> {
        loop {
            if let Some(written) = self.wait(PATIENCE) {
                return written;
            }
        }
    }
}
