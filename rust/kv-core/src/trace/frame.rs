//! Frames: a length, a check that the body is the one that was written there, and the body.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::error::{TraceError, place};
use crate::config::Config;

const MAGIC: &[u8; 8] = b"kvtrace\n";

/// The version of the format: of what `Call`, `Answer`, `Header` and everything in them are written as.
const VERSION: u64 = 3;

/// Bytes of the longest varint.
const LONGEST_NUMBER: usize = 10;

/// The first frame. In any version it begins with the text of who recorded.
#[derive(Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) recorded_by: String,
    /// The hash seed is the one in force.
    pub(super) config: Config,
}

/// Two bytes that depend on the body and on which operation it is, so that a body which is damaged,
/// missing or twice there is noticed.
fn check(body: &[u8], operation: u64) -> [u8; 2] {
    (xxh3_64_with_seed(body, operation) as u16).to_le_bytes()
}

fn write_number(out: &mut dyn Write, number: u64) -> io::Result<()> {
    let mut bytes = [0; LONGEST_NUMBER];
    out.write_all(postcard::to_slice(&number, &mut bytes).expect("it is that long"))
}

/// The beginning of a file.
pub(super) fn write_head(out: &mut dyn Write) -> io::Result<()> {
    out.write_all(MAGIC)?;
    write_number(out, VERSION)
}

pub(super) fn write_frame(out: &mut dyn Write, body: &[u8], operation: u64) -> io::Result<()> {
    write_number(out, body.len() as u64)?;
    out.write_all(&check(body, operation))?;
    out.write_all(body)
}

/// A file, frame by frame.
pub(super) struct Frames<R> {
    source: R,
    /// Bytes of the longest body that is read.
    longest: u64,
    /// Bytes read so far.
    at: u64,
    /// Where the frame begins that was read last.
    begins: u64,
    /// Which frames were begun: the header, then the operations from 1.
    frames: u64,
    body: Vec<u8>,
}

impl<R: Read> Frames<R> {
    /// Reads the beginning of a file, and its header. Nothing of that is believed yet:
    /// `BlockManager::new` looks at the settings.
    pub(super) fn open(source: R, longest: u64) -> Result<(Self, Header), TraceError> {
        let mut frames = Self {
            source,
            longest,
            at: 0,
            begins: 0,
            frames: 0,
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
        let header = frames.next();
        if found != VERSION {
            let there = matches!(header, Ok(true));
            return Err(TraceError::Version {
                found,
                supported: VERSION,
                recorded_by: frames.recorded_by().filter(|_| there),
            });
        }
        if !header? {
            return Err(frames.cut());
        }
        if frames.recorded_by().is_none() {
            return Err(frames.corrupt("it does not say which version recorded".into()));
        }
        let header = frames.take()?;
        Ok((frames, header))
    }

    /// The text at the beginning of the header, if it can be shown to anybody.
    fn recorded_by(&self) -> Option<String> {
        let (text, _) = postcard::take_from_bytes::<String>(&self.body).ok()?;
        let plain = |byte: u8| byte.is_ascii_graphic();
        ((1..=64).contains(&text.len()) && text.bytes().all(plain)).then_some(text)
    }

    /// Reads the next frame; false at the end of the file.
    pub(super) fn next(&mut self) -> Result<bool, TraceError> {
        self.begins = self.at;
        self.frames += 1;
        let Some(len) = self.number()? else {
            return Ok(false);
        };
        if len > self.longest {
            return Err(TraceError::Limit {
                what: format!("the length in bytes of {}", place(self.operation())),
                found: len,
                limit: self.longest,
            });
        }
        self.read(2)?;
        let Ok(expected) = <[u8; 2]>::try_from(&self.body[..]) else {
            return Err(self.cut());
        };
        self.read(len)?;
        if (self.body.len() as u64) < len {
            return Err(self.cut());
        }
        // A fuzzer should not have to guess hashes.
        if check(&self.body, self.operation()) != expected && !cfg!(fuzzing) {
            return Err(self.corrupt("its check does not fit".into()));
        }
        Ok(true)
    }

    /// What the frame holds that was read last.
    pub(super) fn take<T: DeserializeOwned>(&self) -> Result<T, TraceError> {
        match postcard::take_from_bytes(&self.body) {
            Ok((value, [])) => Ok(value),
            Ok(_) => Err(self.corrupt("it goes on after its end".into())),
            Err(error) => {
                Err(self.corrupt(format!("format {VERSION} has nothing like it ({error})")))
            }
        }
    }

    /// Which operation was read last, counted from 1; 0: the header.
    pub(super) fn operation(&self) -> u64 {
        self.frames.saturating_sub(1)
    }

    fn cut(&self) -> TraceError {
        TraceError::Cut {
            byte: self.at,
            operation: self.operation(),
        }
    }

    pub(super) fn corrupt(&self, what: String) -> TraceError {
        TraceError::Corrupt {
            byte: self.begins,
            operation: self.operation(),
            what,
        }
    }

    /// A varint; `None` if the file ends before it.
    fn number(&mut self) -> Result<Option<u64>, TraceError> {
        let mut digits = Vec::with_capacity(LONGEST_NUMBER);
        loop {
            self.read(1)?;
            match self.body.first() {
                None if digits.is_empty() => return Ok(None),
                None => return Err(self.cut()),
                Some(&digit) => digits.push(digit),
            }
            if digits.last() < Some(&0x80) || digits.len() == LONGEST_NUMBER {
                let number = postcard::from_bytes(&digits).map(Some);
                return number.map_err(|_| self.corrupt("a number of more than 64 bits".into()));
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
