//! Blocks to store, and a disk that fails on purpose.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // each test uses a part of it

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kv_store::{Block, Config, Disk, DiskFile, Fingerprint, Get, MemoryDisk, Prefix, Put, Store};

pub const BLOCK_SIZE: usize = 4;
pub const SECOND: Duration = Duration::from_secs(1);
pub const MINUTE: Duration = Duration::from_secs(60);

pub fn fingerprint(model: &str) -> Fingerprint {
    Fingerprint::of([("model", model.as_bytes())])
}

/// The tokens of prompt `number`: prompts share their first two blocks by threes.
pub fn tokens(number: u32, blocks: usize) -> Vec<u32> {
    let token = |position: usize| match position / BLOCK_SIZE {
        0..2 => 1000 * (number / 3) + position as u32,
        _ => 1_000_000 + 1000 * number + position as u32,
    };
    (0..blocks * BLOCK_SIZE).map(token).collect()
}

pub fn prefix(tokens: &[u32]) -> Prefix<'_> {
    Prefix::new(fingerprint("model"), b"", tokens, BLOCK_SIZE)
}

/// The payload that belongs to a block: bytes and length follow from its key.
pub fn payload(block: &Block<'_>, max_len: usize) -> Vec<u8> {
    let key = *block.key().as_bytes();
    let len = 1 + u16::from_le_bytes([key[0], key[1]]) as usize % max_len;
    let mut state = u64::from_le_bytes(key[8..16].try_into().unwrap()) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub fn put(store: &Store, block: &Block<'_>, max_len: usize) -> Put {
    let payload = payload(block, max_len);
    let (first, second) = payload.split_at(payload.len() / 3);
    store.put(block, &[first, second])
}

/// Reads a block. A hit with other bytes than its own is a failure.
pub fn get(store: &Store, block: &Block<'_>, max_len: usize) -> Get {
    let expected = payload(block, max_len);
    let mut buffer = vec![0; expected.len()];
    let (first, second) = buffer.split_at_mut(expected.len() / 2);
    let answer = store.get(block, &mut [first, second]).unwrap();
    if answer == Get::Hit {
        assert!(buffer == expected, "wrong bytes for {block:?}");
    }
    answer
}

/// Segments of 16 KiB, eight of them.
pub fn small() -> Config {
    let mut config = Config::new(8 << 20);
    (config.max_bytes, config.segment_bytes, config.queue_bytes) = (128 << 10, 16 << 10, 64 << 10);
    config.retry_after = Duration::ZERO;
    config
}

/// A fault of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Error(io::ErrorKind),
    /// EIO.
    Device,
    /// Only this many bytes are transferred, then it is an error.
    Short(usize),
    /// The read has one flipped bit.
    Flip(usize),
}

#[derive(Default)]
struct Plan {
    read: Option<Fault>,
    write: Option<Fault>,
    /// Bytes that are still written before the power is gone.
    life: Option<usize>,
    /// The error of every write, by its number.
    broken: Option<i32>,
    is_hanging: bool,
    is_gone: bool,
    reads: u64,
    writes: u64,
}

/// Faults to inject. Clones share them.
#[derive(Clone, Default)]
pub struct Faults(Arc<(Mutex<Plan>, Condvar)>);

impl Faults {
    fn plan<T>(&self, change: impl FnOnce(&mut Plan) -> T) -> T {
        let answer = change(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
        answer
    }

    /// The next read fails.
    pub fn read(&self, fault: Fault) {
        self.plan(|plan| plan.read = Some(fault));
    }

    /// The next write fails.
    pub fn write(&self, fault: Fault) {
        self.plan(|plan| plan.write = Some(fault));
    }

    /// All writes fail, with this error of the system, until `repair`.
    pub fn break_writes(&self, code: i32) {
        self.plan(|plan| plan.broken = Some(code));
    }

    /// After so many more bytes nothing is written any more.
    pub fn kill_after(&self, bytes: usize) {
        self.plan(|plan| plan.life = Some(bytes));
    }

    pub fn hang(&self) {
        self.plan(|plan| plan.is_hanging = true);
    }

    pub fn remove_folder(&self) {
        self.plan(|plan| plan.is_gone = true);
    }

    pub fn repair(&self) {
        self.plan(|plan| {
            *plan = Plan {
                reads: plan.reads,
                writes: plan.writes,
                ..Plan::default()
            }
        });
    }

    /// Reads and writes so far.
    pub fn operations(&self) -> (u64, u64) {
        self.plan(|plan| (plan.reads, plan.writes))
    }

    fn wait(&self) -> std::sync::MutexGuard<'_, Plan> {
        let mut plan = self.0.0.lock().unwrap();
        while plan.is_hanging {
            plan = self.0.1.wait(plan).unwrap();
        }
        plan
    }

    fn change(&self) -> io::Result<()> {
        let plan = self.wait();
        if let Some(code) = plan.broken {
            return Err(io::Error::from_raw_os_error(code));
        }
        match plan.life {
            Some(0) => Err(eio()),
            _ if plan.is_gone => Err(io::ErrorKind::NotFound.into()),
            _ => Ok(()),
        }
    }
}

/// `EIO`; on Windows `ERROR_IO_DEVICE`.
fn eio() -> io::Error {
    io::Error::from_raw_os_error(if cfg!(windows) { 1117 } else { 5 })
}

/// A disk on which faults are injected.
pub struct FaultyDisk<D>(pub D, pub Faults);

struct FaultyFile(Box<dyn DiskFile>, Faults);

impl<D: Disk> Disk for FaultyDisk<D> {
    fn names(&self) -> io::Result<Vec<String>> {
        drop(self.1.wait());
        self.0.names()
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        self.1.change()?;
        Ok(Box::new(FaultyFile(self.0.create(name)?, self.1.clone())))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        if self.1.wait().is_gone {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Box::new(FaultyFile(self.0.open(name)?, self.1.clone())))
    }

    fn open_writable(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        self.1.change()?;
        Ok(Box::new(FaultyFile(
            self.0.open_writable(name)?,
            self.1.clone(),
        )))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.1.change()?;
        self.0.remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.1.change()?;
        self.0.rename(from, to)
    }

    fn sync(&self) -> io::Result<()> {
        self.1.change()?;
        self.0.sync()
    }

    fn available(&self) -> io::Result<u64> {
        self.0.available()
    }
}

impl DiskFile for FaultyFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let fault = {
            let mut plan = self.1.wait();
            plan.reads += 1;
            plan.read.take()
        };
        match fault {
            None => self.0.read_at(buffer, offset),
            Some(Fault::Error(kind)) => Err(kind.into()),
            Some(Fault::Device) => Err(eio()),
            Some(Fault::Short(_)) => Ok(0),
            Some(Fault::Flip(bit)) => {
                let read = self.0.read_at(buffer, offset)?;
                if read > 0 {
                    buffer[bit / 8 % read] ^= 1 << (bit % 8);
                }
                Ok(read)
            }
        }
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<usize> {
        let mut plan = self.1.wait();
        plan.writes += 1;
        if let Some(code) = plan.broken {
            return Err(io::Error::from_raw_os_error(code));
        }
        if let Some(left) = &mut plan.life {
            if *left == 0 {
                return Err(eio());
            }
            let len = buffer.len().min(*left);
            *left -= len;
            return self.0.write_at(&buffer[..len], offset);
        }
        match plan.write.take() {
            None | Some(Fault::Flip(_)) => self.0.write_at(buffer, offset),
            Some(Fault::Error(kind)) => Err(kind.into()),
            Some(Fault::Device) => Err(eio()),
            Some(Fault::Short(len)) if len == 0 || len >= buffer.len() => Err(eio()),
            Some(Fault::Short(len)) => {
                plan.write = Some(Fault::Device); // the rest fails
                self.0.write_at(&buffer[..len], offset)
            }
        }
    }

    fn size(&self) -> io::Result<u64> {
        drop(self.1.wait());
        self.0.size()
    }

    fn truncate(&self, size: u64) -> io::Result<()> {
        self.1.change()?;
        self.0.truncate(size)
    }

    fn sync(&self) -> io::Result<()> {
        self.1.change()?;
        self.0.sync()
    }
}

/// A store on a faulty disk in memory.
pub fn faulty(config: Config) -> (Store, MemoryDisk, Faults) {
    let (disk, faults) = (MemoryDisk::new(1 << 30), Faults::default());
    let store = Store::on_disk(Box::new(FaultyDisk(disk.clone(), faults.clone())), config).unwrap();
    (store, disk, faults)
}

/// Waits until the queue is empty, and recounts.
pub fn flush(store: &Store) {
    assert!(store.flush(MINUTE));
    store.check().unwrap();
}
