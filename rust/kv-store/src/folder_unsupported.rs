//! Systems without Unix owners and modes: no folder is opened, so no `Folder` exists.

use std::convert::Infallible;
use std::io;
use std::path::Path;

use crate::config::Access;
use crate::disk::{Disk, DiskFile};
use crate::error::OpenError;

pub(crate) struct Folder(Infallible);

/// True if the device failed to read, in contrast to the file system: `ERROR_CRC` and `ERROR_IO_DEVICE` of Windows.
pub(crate) fn is_device_error(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(23 | 1117))
}

pub(crate) struct WriterLock(#[allow(dead_code, reason = "there is no value of it")] Infallible);

impl Folder {
    /// Refuses the folder.
    pub(crate) fn open(path: &Path, _: Access) -> Result<Self, OpenError> {
        Err(OpenError::Unsupported { path: path.into() })
    }

    pub(crate) fn lock(&self) -> io::Result<Result<WriterLock, Option<u32>>> {
        match self.0 {}
    }

    pub(crate) fn of_store(self, _: &str, _: bool) -> Self {
        match self.0 {}
    }
}

impl Disk for Folder {
    fn names(&self) -> io::Result<Vec<String>> {
        match self.0 {}
    }

    fn create(&self, _: &str) -> io::Result<Box<dyn DiskFile>> {
        match self.0 {}
    }

    fn open(&self, _: &str) -> io::Result<Box<dyn DiskFile>> {
        match self.0 {}
    }

    fn open_writable(&self, _: &str) -> io::Result<Box<dyn DiskFile>> {
        match self.0 {}
    }

    fn remove(&self, _: &str) -> io::Result<()> {
        match self.0 {}
    }

    fn rename(&self, _: &str, _: &str) -> io::Result<()> {
        match self.0 {}
    }

    fn sync(&self) -> io::Result<()> {
        match self.0 {}
    }

    fn available(&self) -> io::Result<u64> {
        match self.0 {}
    }
}
