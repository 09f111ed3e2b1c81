//! Frames: a length, a body, and a check that the body is the one that was written there.

use std::io::{self, Read, Write};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::code::{Field, next_digit};
use super::error::TraceError;

const MAGIC: &[u8; 8] = b"kvtrace\n";

/// The version of the format: everything that `call.rs`, `code.rs` and this file say.
pub(super) const VERSION: u64 = 1;

/// Two bytes that depend on the body and on which operation it is, so that a body which is damaged,
/// missing or twice there is noticed.
fn check(body: &[u8], operation: u64) -> [u8; 2] {
    (xxh3_64_with_seed(body, operation) as u16).to_le_bytes()
}

/// The beginning of a file.
pub(super) fn write_head(out: &mut dyn Write) -> io::Result<()> {
    let mut version = Vec::new();
    VERSION.put(&mut version);
    out.write_all(MAGIC)?;
    out.write_all(&version)
}

pub(super) fn write_frame(out: &mut dyn Write, body: &[u8], operation: u64) -> io::Result<()> {
    let mut len = Vec::with_capacity(10);
    body.len().put(&mut len);
    out.write_all(&len)?;
    out.write_all(&check(body, operation))?;
    out.write_all(body)
}

/// A file, frame by frame.
pub(super) struct Frames<R> {
    source: R,
    /// Bytes read so far.
    at: u64,
    /// Where the frame begins that was read last.
    begins: u64,
    /// Which frame that was; 0: the header.
    operation: u64,
    started: bool,
    body: Vec<u8>,
}

impl<R: Read> Frames<R> {
    /// Reads the beginning of a file.
    pub(super) fn open(source: R) -> Result<Self, TraceError> {
        let mut frames = Self {
            source,
            at: 0,
            begins: 0,
            operation: 0,
            started: false,
            body: Vec::new(),
        };
        frames.read(MAGIC.len() as u64)?;
        if !MAGIC.starts_with(&frames.body) {
            return Err(TraceError::NotATrace);
        }
        if frames.body.len() < MAGIC.len() {
            return Err(frames.cut());
        }
        let found = frames.number()?.ok_or_else(|| frames.cut())?;
        if found != VERSION {
            return Err(TraceError::Version {
                found,
                supported: VERSION,
            });
        }
        Ok(frames)
    }

    /// Reads the next frame; false at the end of the file.
    pub(super) fn next(&mut self) -> Result<bool, TraceError> {
        self.begins = self.at;
        self.operation += u64::from(self.started);
        self.started = true;
        let Some(len) = self.number()? else {
            return Ok(false);
        };
        self.read(2)?;
        let Ok(expected) = <[u8; 2]>::try_from(&self.body[..]) else {
            return Err(self.cut());
        };
        self.read(len)?;
        if (self.body.len() as u64) < len {
            return Err(self.cut());
        }
        // A fuzzer should not have to guess hashes.
        if check(&self.body, self.operation) != expected && !cfg!(fuzzing) {
            return Err(self.corrupt("its check does not fit".into()));
        }
        Ok(true)
    }

    /// The body of the frame that was read last.
    pub(super) fn body(&self) -> &[u8] {
        &self.body
    }

    /// Which operation was read last, counted from 1.
    pub(super) fn operation(&self) -> u64 {
        self.operation
    }

    pub(super) fn cut(&self) -> TraceError {
        TraceError::Cut {
            byte: self.at,
            operation: self.operation,
        }
    }

    pub(super) fn corrupt(&self, what: String) -> TraceError {
        TraceError::Corrupt {
            byte: self.begins,
            operation: self.operation,
            what,
        }
    }

    /// A varint; `None` if the file ends before it.
    fn number(&mut self) -> Result<Option<u64>, TraceError> {
        let (mut value, mut shift) = (0, 0);
        loop {
            self.read(1)?;
            let Some(&byte) = self.body.first() else {
                return if shift == 0 {
                    Ok(None)
                } else {
                    Err(self.cut())
                };
            };
            let next = next_digit(&mut value, &mut shift, byte);
            if let Some(number) = next.map_err(|what| self.corrupt(what))? {
                return Ok(Some(number));
            }
        }
    }

    /// Reads `len` bytes, or as many as there are. Takes memory for those that are there.
    fn read(&mut self, len: u64) -> io::Result<()> {
        self.body.clear();
        let read = (&mut self.source).take(len).read_to_end(&mut self.body)?;
        self.at += read as u64;
        Ok(())
    }
}
