//! A private folder on a real disk, with a lock for one writer.

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use crate::config::Access;
use crate::disk::{Disk, DiskFile};
use crate::error::OpenError;
use crate::marker::{self, LOCK, MARKER, MARKER_START};

const PRIVATE_FILE: Mode = Mode::from_raw_mode(0o600);

/// Files are opened relative to the folder, never through a symbolic link.
pub(crate) struct Folder {
    path: PathBuf,
    descriptor: RwLock<Arc<OwnedFd>>,
    /// The marker text, and whether this store writes: a folder that replaces this one must match both.
    store: Option<(String, bool)>,
}

/// True if the device failed to read, in contrast to the file system.
pub(crate) fn is_device_error(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

/// Held by the one process that writes; released when the process ends, even by a crash.
///
/// Forked processes inherit the file, so only its owner unlocks it.
pub(crate) struct WriterLock {
    file: File,
    owner: u32,
}

impl Drop for WriterLock {
    fn drop(&mut self) {
        if std::process::id() == self.owner {
            let _ = self.file.unlock(); // closing unlocks it, too
        }
    }
}

impl Folder {
    /// Opens a folder that only its owner can enter, or creates one for writing. The path ends with a name.
    ///
    /// A folder with other files is `NotAStore`, whatever its mode: a changed mode could break their users.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self, OpenError> {
        let io = |source| OpenError::Io {
            path: path.into(),
            source,
        };
        if path.as_os_str().is_empty() {
            return Err(OpenError::NoName);
        }
        if access != Access::Read {
            match DirBuilder::new().mode(0o700).create(path) {
                Ok(()) => sync_parent(path),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(io(error)),
            }
        }
        Self::open_existing(path)
    }

    /// Sets the marker text and the access of the store in this folder.
    pub(crate) fn of_store(mut self, marker: &str, is_writer: bool) -> Self {
        self.store = Some((marker.to_owned(), is_writer));
        self
    }

    fn open_existing(path: &Path) -> Result<Self, OpenError> {
        let io = |source| OpenError::Io {
            path: path.into(),
            source,
        };
        let status = rustix::fs::lstat(path).map_err(|error| io(error.into()))?;
        if FileType::from_raw_mode(status.st_mode) == FileType::Symlink {
            return Err(OpenError::Symlink { path: path.into() });
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor =
            rustix::fs::open(path, flags, Mode::empty()).map_err(|error| io(error.into()))?;
        let status = rustix::fs::fstat(&descriptor).map_err(|error| io(error.into()))?;
        let user = rustix::process::geteuid().as_raw();
        let mode = Mode::from_raw_mode(status.st_mode).as_raw_mode() & 0o7777;
        let folder = Self {
            path: path.into(),
            descriptor: RwLock::new(Arc::new(descriptor)),
            store: None,
        };
        if status.st_uid == user && mode & 0o077 == 0 {
            return Ok(folder);
        }
        let is_store = folder.has_marker_of(user);
        if !is_store && !marker::is_new(&folder).unwrap_or(true) {
            return Err(OpenError::NotAStore { path: path.into() });
        }
        if status.st_uid != user {
            return Err(OpenError::Owner {
                path: path.into(),
                owner: status.st_uid,
                user,
            });
        }
        let (path, mode) = (path.into(), format!("{mode:o}"));
        Err(if is_store {
            OpenError::Mode { path, mode }
        } else {
            OpenError::OpenToOthers { path, mode }
        })
    }

    /// True if the folder has the marker of a store that this user created.
    fn has_marker_of(&self, user: u32) -> bool {
        let Ok(file) = self.file(MARKER, OFlags::RDONLY) else {
            return false;
        };
        let mut start = [0; MARKER_START.len()];
        rustix::fs::fstat(&file).is_ok_and(|status| status.st_uid == user)
            && (&file).read_exact(&mut start).is_ok()
            && start == MARKER_START
    }

    fn descriptor(&self) -> Arc<OwnedFd> {
        let descriptor = self.descriptor.read();
        Arc::clone(&descriptor.unwrap_or_else(PoisonError::into_inner))
    }

    /// Locks and marks a folder that replaces this one.
    fn take_over(&self, other: &Self) -> io::Result<Box<dyn Send>> {
        let Some((text, is_writer)) = &self.store else {
            return Ok(Box::new(()));
        };
        let refuse = |error: OpenError| io::Error::other(error.to_string());
        let exists = marker::check(other, &self.path, text).map_err(refuse)?;
        if !is_writer {
            return Ok(Box::new(()));
        }
        let path = self.path.clone();
        let lock = other.lock()?;
        let lock = lock.map_err(|pid| refuse(OpenError::Locked { path, pid }))?;
        if !exists {
            marker::write(other, text)?;
        }
        Ok(Box::new(lock))
    }

    /// Locks the folder for writing; the error has the writer's process id, if known.
    pub(crate) fn lock(&self) -> io::Result<Result<WriterLock, Option<u32>>> {
        let mut file = self.file(LOCK, OFlags::RDWR | OFlags::CREATE)?;
        match file.try_lock() {
            Ok(()) => {
                let owner = std::process::id();
                let mut lock = WriterLock { file, owner };
                lock.file.set_len(0)?;
                write!(lock.file, "{owner}")?;
                Ok(Ok(lock))
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                let mut text = String::new();
                file.read_to_string(&mut text)?;
                Ok(Err(text.trim().parse().ok()))
            }
            Err(std::fs::TryLockError::Error(error)) => Err(error),
        }
    }

    fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        // NONBLOCK: a pipe of that name must not block the open.
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::openat(self.descriptor(), name, flags, PRIVATE_FILE)?;
        let status = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{name} is not a regular file"),
            ));
        }
        Ok(File::from(file))
    }
}

/// Waits until a new folder's name is on the device, if its parent can be read.
fn sync_parent(path: &Path) {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    if let Ok(folder) = File::open(parent.unwrap_or(Path::new("."))) {
        let _ = folder.sync_all();
    }
}

impl Disk for Folder {
    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(self.descriptor())? {
            if let Ok(name) = entry?.file_name().to_str()
                && ![".", ".."].contains(&name)
            {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(self.file(
            name,
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
        )?))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(self.file(name, OFlags::RDONLY)?))
    }

    fn open_writable(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(self.file(name, OFlags::RDWR)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(
            self.descriptor(),
            name,
            AtFlags::empty(),
        )?)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let folder = self.descriptor();
        Ok(rustix::fs::renameat(&folder, from, &folder, to)?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(self.descriptor())?)
    }

    fn reopen(&self) -> io::Result<Option<Box<dyn Send>>> {
        let old = rustix::fs::fstat(self.descriptor())?;
        let other = match Self::open_existing(&self.path) {
            Ok(other) => other,
            Err(_) if old.st_nlink > 0 => return Ok(None), // moved: its files still exist
            Err(error) => return Err(io::Error::other(error.to_string())),
        };
        let descriptor = other.descriptor();
        let new = rustix::fs::fstat(&descriptor)?;
        if (new.st_dev, new.st_ino) == (old.st_dev, old.st_ino) {
            return Ok(None);
        }
        let held = self.take_over(&other)?;
        *self
            .descriptor
            .write()
            .unwrap_or_else(PoisonError::into_inner) = descriptor;
        Ok(Some(held))
    }

    fn available(&self) -> io::Result<u64> {
        let status = rustix::fs::fstatvfs(self.descriptor())?;
        Ok(status.f_bavail.saturating_mul(status.f_frsize))
    }
}

impl DiskFile for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(self, buffer, offset)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::write_at(self, buffer, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn truncate(&self, size: u64) -> io::Result<()> {
        self.set_len(size)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}
