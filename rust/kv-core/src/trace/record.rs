//! Recording: the manager's side.

use std::io::{self, BufWriter, Write};
use std::sync::Mutex;

use serde::Serialize;

use super::call::{Answer, Call};
use super::frame::{Header, write_frame, write_head};
use crate::config::Config;
use crate::error::Error;
use crate::ids::SeqKey;
use crate::manager::BlockManager;

/// Writes operations down until the writer fails.
pub(crate) struct Recorder {
    /// Never locked: the mutex makes the manager `Sync` whatever the writer is.
    out: Mutex<BufWriter<Box<dyn Write + Send>>>,
    body: Vec<u8>,
    operations: u64,
    leases: u64,
    failed: Option<io::Error>,
}

impl Recorder {
    fn new(writer: impl Write + Send + 'static, header: &Header) -> Self {
        let mut recorder = Self {
            out: Mutex::new(BufWriter::new(Box::new(writer))),
            body: Vec::new(),
            operations: 0,
            leases: 0,
            failed: None,
        };
        recorder.attempt(write_head);
        recorder.write_frame(header, 0);
        recorder
    }

    /// Writes, unless that has failed before. What fails is told at the end of the recording.
    fn attempt(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
        if self.failed.is_none() {
            let out = self.out.get_mut();
            let out = out.unwrap_or_else(std::sync::PoisonError::into_inner);
            self.failed = write(out).err();
        }
    }

    fn write(&mut self, call: &Call, answer: &Answer) {
        self.operations += 1;
        self.write_frame(&(call, answer), self.operations);
    }

    fn write_frame(&mut self, what: &impl Serialize, operation: u64) {
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        let body = postcard::to_extend(what, body).expect("memory takes everything");
        self.attempt(|out| write_frame(out, &body, operation));
        self.body = body;
    }
}

impl BlockManager {
    /// Whether [`record`](Self::record) would begin a recording now: for those who make a file for it.
    ///
    /// # Errors
    /// [`Error::Recording`], [`Error::NotNew`]
    pub fn may_record(&self) -> Result<(), Error> {
        if self.recorder.is_some() {
            return Err(Error::Recording);
        }
        match (self.state.seqs.made(), self.steps.made()) {
            (0, 0) => Ok(()),
            (sequences, steps) => Err(Error::NotNew { sequences, steps }),
        }
    }

    /// Writes every operation from now on to `writer`, for [`replay`](crate::replay).
    ///
    /// Only a manager that has had no sequence and no step can be recorded: a replay begins with an empty one.
    /// Buffered: the writer gets the rest at [`stop_recording`](Self::stop_recording), or when the manager
    /// is dropped. If writing fails, the recording ends there and the manager goes on as ever.
    ///
    /// # Errors
    /// [`Error::Recording`], [`Error::NotNew`]
    pub fn record(&mut self, writer: impl Write + Send + 'static) -> Result<(), Error> {
        self.may_record()?;
        let header = Header {
            recorded_by: env!("CARGO_PKG_VERSION").into(),
            config: Config {
                hash_seed: Some(self.hasher().seed()),
                ..self.config.clone()
            },
        };
        self.recorder = Some(Box::new(Recorder::new(writer, &header)));
        Ok(())
    }

    /// Ends the recording with the ledger. Without a recording it does nothing.
    ///
    /// # Errors
    /// The first error of the writer; what came after it was not written.
    pub fn stop_recording(&mut self) -> io::Result<()> {
        let ledger = self.ledger();
        self.note(|_| Call::stop_recording(), ledger);
        let Some(mut recorder) = self.recorder.take() else {
            return Ok(());
        };
        recorder.attempt(|out| out.flush());
        recorder.failed.take().map_or(Ok(()), Err)
    }

    /// Writes an operation down, if that is wanted: one branch if not.
    #[inline]
    pub(crate) fn note(&mut self, call: impl FnOnce(&Self) -> Call, answer: impl Into<Answer>) {
        if self.recorder.is_some() {
            self.write_down(call, answer);
        }
    }

    #[cold]
    #[inline(never)]
    fn write_down(&mut self, call: impl FnOnce(&Self) -> Call, answer: impl Into<Answer>) {
        let call = call(self);
        if let Some(recorder) = &mut self.recorder {
            recorder.write(&call, &answer.into());
        }
    }

    /// The number of the next lease, while recording.
    pub(crate) fn next_lease(&mut self) -> Option<u64> {
        let recorder = self.recorder.as_mut()?;
        recorder.leases += 1;
        Some(recorder.leases)
    }

    /// The call that made a sequence.
    pub(crate) fn creation(&self, key: SeqKey, namespace: &[u8]) -> Call {
        let seq = self.state.seqs.at(key.slot);
        Call::sequence(&seq.tokens[..], namespace, seq.read_cache)
    }
}

pub(crate) fn ids(keys: &[SeqKey]) -> Vec<u64> {
    keys.iter().map(|key| key.id).collect()
}

/// The counts of a commit, as they are written down: none if each is 1.
pub(crate) fn accepted(counts: &[usize]) -> &[usize] {
    let ones = counts.iter().all(|&count| count == 1);
    if ones { &[] } else { counts }
}
