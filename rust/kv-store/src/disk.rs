//! The file system as traits, so that tests can inject faults.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A flat folder of files.
pub trait Disk: Send + Sync {
    /// Names of the files.
    fn names(&self) -> io::Result<Vec<String>>;
    /// Creates an empty file; an error if the name is in use.
    fn create(&self, name: &str) -> io::Result<Box<dyn DiskFile>>;
    /// Opens a file for reading.
    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>>;
    /// Opens a file for reading and writing.
    fn open_writable(&self, name: &str) -> io::Result<Box<dyn DiskFile>>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Renames a file atomically.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Syncs the names of all files.
    fn sync(&self) -> io::Result<()>;
    /// Bytes that can still be written.
    fn available(&self) -> io::Result<u64>;
    /// Switches to the folder that has replaced this one, if any. If so, returns what
    /// the store holds while it uses the folder. An error if the folder is gone or cannot be used.
    fn reopen(&self) -> io::Result<Option<Box<dyn Send>>> {
        Ok(None)
    }
}

/// An open file.
pub trait DiskFile: Send + Sync {
    /// Reads at most `buffer.len()` bytes; fewer only at the end of the file or when interrupted.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes some bytes of `buffer`; returns their number.
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<usize>;
    /// Length of the file.
    fn size(&self) -> io::Result<u64>;
    /// Truncates the file.
    fn truncate(&self, size: u64) -> io::Result<()>;
    /// Syncs all writes to the device.
    fn sync(&self) -> io::Result<()>;
}

/// Fills `buffer`, or fails.
pub(crate) fn read_exact(
    file: &dyn DiskFile,
    mut buffer: &mut [u8],
    mut offset: u64,
) -> io::Result<()> {
    while !buffer.is_empty() {
        match file.read_at(buffer, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                buffer = &mut buffer[read..];
                offset += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `buffer`, or fails.
pub(crate) fn write_all(file: &dyn DiskFile, mut buffer: &[u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match file.write_at(buffer, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                buffer = &buffer[written..];
                offset += written as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A disk in memory, with a capacity. Clones share their files.
#[derive(Clone)]
pub struct MemoryDisk {
    files: Arc<Mutex<BTreeMap<String, MemoryFile>>>,
    capacity: u64,
}

#[derive(Clone, Default)]
struct MemoryFile(Arc<Mutex<Vec<u8>>>);

struct OpenMemoryFile {
    file: MemoryFile,
    disk: MemoryDisk,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryDisk {
    /// An empty disk of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self {
            files: Arc::default(),
            capacity,
        }
    }

    /// Bytes in all files.
    pub fn used(&self) -> u64 {
        lock(&self.files)
            .values()
            .map(|file| lock(&file.0).len() as u64)
            .sum()
    }

    fn find(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        let file = lock(&self.files)
            .get(name)
            .cloned()
            .ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(OpenMemoryFile {
            file,
            disk: self.clone(),
        }))
    }
}

impl Disk for MemoryDisk {
    fn names(&self) -> io::Result<Vec<String>> {
        Ok(lock(&self.files).keys().cloned().collect())
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        let mut files = lock(&self.files);
        if files.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let file = files.entry(name.to_owned()).or_default().clone();
        Ok(Box::new(OpenMemoryFile {
            file,
            disk: self.clone(),
        }))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        self.find(name)
    }

    fn open_writable(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        self.find(name)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        lock(&self.files)
            .remove(name)
            .map(|_| ())
            .ok_or(io::ErrorKind::NotFound.into())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut files = lock(&self.files);
        let file = files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        files.insert(to.to_owned(), file);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn available(&self) -> io::Result<u64> {
        Ok(self.capacity.saturating_sub(self.used()))
    }
}

impl DiskFile for OpenMemoryFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let bytes = lock(&self.file.0);
        let from = bytes.len().min(offset as usize);
        let len = buffer.len().min(bytes.len() - from);
        buffer[..len].copy_from_slice(&bytes[from..from + len]);
        Ok(len)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<usize> {
        let available = self.disk.available()?;
        let mut bytes = lock(&self.file.0);
        let space = (bytes.len() as u64 + available).saturating_sub(offset);
        let len = buffer.len().min(space as usize);
        if len == 0 && !buffer.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let end = offset as usize + len;
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[offset as usize..end].copy_from_slice(&buffer[..len]);
        Ok(len)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(lock(&self.file.0).len() as u64)
    }

    fn truncate(&self, size: u64) -> io::Result<()> {
        lock(&self.file.0).truncate(size as usize);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
