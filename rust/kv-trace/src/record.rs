//! Recording: encodes the operations that a manager reports.

use std::any::Any;
use std::io::{self, Write};

use kv_core::{Answer, BlockManager, Call, Config, Error, Recorder};
use serde::Serialize;

use crate::frame::{Header, write_frame, write_head};
use crate::writer::{EndedRecording, WriterThread};

/// Encodes operations for the writer's thread, until the writer fails or falls behind.
struct Encoder {
    out: WriterThread,
    body: Vec<u8>,
    num_operations: u64,
}

impl Encoder {
    fn new(writer: impl Write + Send + 'static, header: &Header) -> Self {
        let mut encoder = Self {
            out: WriterThread::new(writer),
            body: Vec::new(),
            num_operations: 0,
        };
        encoder.out.write(0, |out| {
            write_head(out).expect("memory takes everything");
        });
        encoder.write_frame(header);
        encoder
    }

    fn write_frame(&mut self, value: &impl Serialize) {
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        let body = postcard::to_extend(value, body).expect("memory takes everything");
        self.out.write(self.num_operations, |out| {
            write_frame(out, &body, self.num_operations).expect("memory takes everything");
        });
        self.body = body;
    }
}

impl Recorder for Encoder {
    fn is_open(&self) -> bool {
        self.out.is_open()
    }

    fn record(&mut self, call: &Call, answer: &Answer) {
        self.num_operations += 1;
        self.write_frame(&(call, answer));
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        if self.out.is_open() {
            _ = self.out.end().finish(); // no caller is left to report an error to
        }
    }
}

/// Recording a [`BlockManager`].
pub trait Record {
    /// Writes every operation from now on to `writer`, for [`replay`](crate::replay).
    ///
    /// Only a manager without any sequence or step so far can be recorded, because a replay begins with an empty
    /// one. A separate thread writes, in chunks; it gets the rest at [`stop_recording`](Self::stop_recording),
    /// or when the manager is dropped. No call waits for the writer. If the writer fails, or falls 32 MiB behind,
    /// the recording ends there and the manager continues.
    ///
    /// # Errors
    /// [`Error::Recording`], [`Error::NotNew`]
    fn record(&mut self, writer: impl Write + Send + 'static) -> Result<(), Error>;

    /// Whether operations are recorded. False once the writer has failed or fallen behind.
    fn is_recording(&self) -> bool;

    /// Ends the recording with the pool's usage and waits until all of it is written. Without a recording it does
    /// nothing.
    ///
    /// # Errors
    /// As [`EndedRecording::wait`]; operations after the error were not written.
    fn stop_recording(&mut self) -> io::Result<()> {
        self.end_recording().map_or(Ok(()), EndedRecording::finish)
    }

    /// Ends the recording with the pool's usage, without waiting for the writer. `None` without a recording.
    fn end_recording(&mut self) -> Option<EndedRecording>;

    /// Ends the recording without a last operation, as dropping the manager does.
    fn abandon_recording(&mut self) -> Option<EndedRecording>;
}

impl Record for BlockManager {
    fn record(&mut self, writer: impl Write + Send + 'static) -> Result<(), Error> {
        self.check_recordable()?;
        let header = Header {
            recorded_by: env!("CARGO_PKG_VERSION").into(),
            config: Config {
                hash_seed: Some(self.hasher().seed()),
                ..self.config().clone()
            },
        };
        self.set_recorder(Box::new(Encoder::new(writer, &header)))
    }

    fn is_recording(&self) -> bool {
        self.recorder().is_some_and(Recorder::is_open)
    }

    fn end_recording(&mut self) -> Option<EndedRecording> {
        self.drain_deferred();
        let usage = self.usage();
        end(self, |encoder| {
            if encoder.is_open() {
                encoder.record(&Call::Stop {}, &(&usage).into());
            }
        })
    }

    fn abandon_recording(&mut self) -> Option<EndedRecording> {
        end(self, |_| ())
    }
}

fn end(manager: &mut BlockManager, last: impl FnOnce(&mut Encoder)) -> Option<EndedRecording> {
    let recorder: Box<dyn Any> = manager.take_recorder()?;
    let mut encoder = recorder.downcast::<Encoder>().ok()?;
    last(&mut encoder);
    Some(encoder.out.end())
}
