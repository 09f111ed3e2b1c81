//! Frames: length, check and body.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use kv_core::Config;

use crate::error::{TraceError, operation_name};

const MAGIC: &[u8; 8] = b"kvtrace\n";

/// The version of the format: of the encoding of `Call`, `Answer`, `Header` and their fields.
const VERSION: u64 = 5;

/// Bytes of the longest varint.
const LONGEST_NUMBER: usize = 10;

/// The first frame. In every version of the format it begins with the version of the crate.
#[derive(Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) recorded_by: String,
    /// `hash_seed` is the actual seed.
    pub(crate) config: Config,
}

/// Two bytes that depend on the body and the number of the operation, so that damaged, missing and repeated bodies are
/// detected.
fn check(body: &[u8], operation: u64) -> [u8; 2] {
    (xxh3_64_with_seed(body, operation) as u16).to_le_bytes()
}

fn write_number(out: &mut dyn Write, number: u64) -> io::Result<()> {
    let mut bytes = [0; LONGEST_NUMBER];
    out.write_all(postcard::to_slice(&number, &mut bytes).expect("it is that long"))
}

/// The beginning of a file.
pub(crate) fn write_head(out: &mut dyn Write) -> io::Result<()> {
    out.write_all(MAGIC)?;
    write_number(out, VERSION)
}

pub(crate) fn write_frame(out: &mut dyn Write, body: &[u8], operation: u64) -> io::Result<()> {
    write_number(out, body.len() as u64)?;
    out.write_all(&check(body, operation))?;
    out.write_all(body)
}

/// A file, frame by frame.
pub(crate) struct Frames<R> {
    source: R,
    /// Maximum length of a body, in bytes.
    longest: u64,
    /// Bytes read so far.
    at: u64,
    /// Where the current frame begins.
    begins: u64,
    /// Frames begun: the header, then the operations from 1.
    frames: u64,
    body: Vec<u8>,
}

impl<R: Read> Frames<R> {
    /// Reads the beginning of a file and its header. `BlockManager::new` validates the settings.
    pub(crate) fn open(source: R, longest: u64) -> Result<(Self, Header), TraceError> {
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

    /// The text at the beginning of the header, if it is printable.
    fn recorded_by(&self) -> Option<String> {
        let (text, _) = postcard::take_from_bytes::<String>(&self.body).ok()?;
        let plain = |byte: u8| byte.is_ascii_graphic();
        ((1..=64).contains(&text.len()) && text.bytes().all(plain)).then_some(text)
    }

    /// Reads the next frame; false at the end of the file.
    pub(crate) fn next(&mut self) -> Result<bool, TraceError> {
        self.begins = self.at;
        self.frames += 1;
        let Some(len) = self.number()? else {
            return Ok(false);
        };
        if len > self.longest {
            return Err(TraceError::Limit {
                what: format!(
                    "the length in bytes of {}",
                    operation_name(self.operation())
                ),
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
        // A fuzzer cannot guess hashes.
        if check(&self.body, self.operation()) != expected && !cfg!(fuzzing) {
            return Err(self.corrupt("its check does not fit".into()));
        }
        Ok(true)
    }

    /// Decodes the current frame.
    pub(crate) fn take<T: DeserializeOwned>(&self) -> Result<T, TraceError> {
        match postcard::take_from_bytes(&self.body) {
            Ok((value, [])) => Ok(value),
            Ok(_) => Err(self.corrupt("it goes on after its end".into())),
            Err(error) => {
                Err(self.corrupt(format!("format {VERSION} has nothing like it ({error})")))
            }
        }
    }

    /// The number of the current operation, from 1; 0: the header.
    pub(crate) fn operation(&self) -> u64 {
        self.frames.saturating_sub(1)
    }

    fn cut(&self) -> TraceError {
        TraceError::Cut {
            byte: self.at,
            operation: self.operation(),
        }
    }

    pub(crate) fn corrupt(&self, what: String) -> TraceError {
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

    /// Reads `len` bytes, or as many as there are. Allocates for existing bytes only.
    fn read(&mut self, len: u64) -> io::Result<()> {
        self.body.clear();
        let read = (&mut self.source).take(len).read_to_end(&mut self.body)?;
        self.at += read as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kv_core::Call;

    fn there_and_back(call: Call) -> Vec<u8> {
        let bytes = postcard::to_stdvec(&call).expect("memory takes everything");
        assert_eq!(postcard::take_from_bytes(&bytes), Ok((call, &[][..])));
        for cut in 0..bytes.len() {
            assert!(postcard::from_bytes::<Call>(&bytes[..cut]).is_err());
        }
        bytes
    }

    /// The encoding of files. If it changes, so does the version of the format.
    #[test]
    fn calls_are_written_as_ever() {
        let ids = vec![300, 301, 7, u64::MAX, 0];
        let decode = there_and_back(Call::Decode {
            plan: 2,
            sequences: ids,
            lookahead: 128,
        });
        let distances = [216, 4, 2, 203, 4, 15, 2];
        assert_eq!(decode, [&[10, 2, 5], &distances[..], &[128, 1]].concat());
        let tokens: Vec<u32> = vec![0, 127, 128, u32::MAX];
        let sequence = Call::Sequence {
            tokens,
            namespace: (*b"ns").into(),
            read_cache: true,
        };
        let written = [0, 4, 0, 127, 128, 1, 255, 255, 255, 255, 15, 2, 110, 115, 1];
        assert_eq!(there_and_back(sequence), written);
        assert_eq!(there_and_back(Call::Stop {}), [20]);
        let publish = Call::Publish {
            sequence: 1,
            num_tokens: 2,
            tokens: vec![3],
        };
        assert_eq!(there_and_back(publish), [24, 1, 2, 1, 3]);
        let complete = Call::Complete {
            transfer: 300,
            num_blocks: 4,
        };
        assert_eq!(there_and_back(complete), [26, 172, 2, 4]);
        assert_eq!(there_and_back(Call::Evict { num_blocks: 5 }), [29, 5]);
    }
}
