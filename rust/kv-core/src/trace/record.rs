//! Recording: the manager's side.

use std::io::{self, Write};

use serde::Serialize;

use super::call::{Answer, Call};
use super::frame::{Header, write_frame, write_head};
use super::writer::{EndedRecording, WriterThread};
use crate::config::Config;
use crate::error::Error;
use crate::ids::SeqKey;
use crate::manager::BlockManager;

/// Codes operations, for a thread to write them down until the writer fails or falls behind.
pub(crate) struct Recorder {
    out: WriterThread,
    body: Vec<u8>,
    operations: u64,
    pins: u64,
}

impl Recorder {
    fn new(writer: impl Write + Send + 'static, header: &Header) -> Self {
        let mut recorder = Self {
            out: WriterThread::new(writer),
            body: Vec::new(),
            operations: 0,
            pins: 0,
        };
        recorder.out.write(0, |out| {
            write_head(out).expect("memory takes everything");
        });
        recorder.write_frame(header);
        recorder
    }

    fn write(&mut self, call: &Call, answer: &Answer) {
        self.operations += 1;
        self.write_frame(&(call, answer));
    }

    fn write_frame(&mut self, what: &impl Serialize) {
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        let body = postcard::to_extend(what, body).expect("memory takes everything");
        self.out.write(self.operations, |out| {
            write_frame(out, &body, self.operations).expect("memory takes everything");
        });
        self.body = body;
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.out.is_open() {
            _ = self.out.end().finish(); // nobody is there to be told
        }
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
    /// A thread of its own writes, in chunks: it gets the rest at [`stop_recording`](Self::stop_recording), or
    /// when the manager is dropped. No call waits for the writer. If writing fails, or falls 32 MiB behind, the
    /// recording ends there and the manager goes on as ever.
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

    /// Whether operations are recorded: not any more once writing has failed or has fallen behind.
    pub fn is_recording(&self) -> bool {
        let recorder = self.recorder.as_ref();
        recorder.is_some_and(|recorder| recorder.out.is_open())
    }

    /// Ends the recording with the usage, and waits until all of it is written. Without a recording it does
    /// nothing.
    ///
    /// # Errors
    /// As [`EndedRecording::wait`]; what came after the error was not written.
    pub fn stop_recording(&mut self) -> io::Result<()> {
        self.end_recording().map_or(Ok(()), EndedRecording::finish)
    }

    /// Ends the recording with the usage, and waits for nothing: the answer can be waited for without the
    /// manager. `None` without a recording.
    pub fn end_recording(&mut self) -> Option<EndedRecording> {
        let usage = self.usage();
        self.note(|_| Call::stop_recording(), usage);
        self.abandon_recording()
    }

    /// Ends the recording without a last operation, as dropping the manager does.
    pub fn abandon_recording(&mut self) -> Option<EndedRecording> {
        let mut recorder = self.recorder.take()?;
        Some(recorder.out.end())
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
        if !self.is_recording() {
            return;
        }
        let call = call(self);
        if let Some(recorder) = &mut self.recorder {
            recorder.write(&call, &answer.into());
        }
    }

    /// The number of the next pin, while recording.
    pub(crate) fn next_pin(&mut self) -> Option<u64> {
        let recorder = self.recorder.as_mut()?;
        recorder.pins += 1;
        Some(recorder.pins)
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
