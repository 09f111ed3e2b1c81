//! A private folder on a real disk, with a lock for one writer.

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use crate::config::Access;
use crate::disk::{Disk, DiskFile};
use crate::error::OpenError;

const LOCK: &str = "lock";
const MARKER: &str = "format";
const MARKER_START: &[u8] = b"pyengine kv-store\n";
const PRIVATE_FILE: Mode = Mode::from_raw_mode(0o600);

/// Files are opened relative to the folder, never through a symbolic link.
pub(crate) struct Folder {
    descriptor: OwnedFd,
}

/// True if the device failed to read, in contrast to the file system.
pub(crate) fn is_device_error(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

/// Held by the one process that writes; released when the process ends, however it ends.
pub(crate) struct WriterLock {
    _file: File,
}

impl Folder {
    /// Opens a folder that only its owner can enter, or makes one to write to. The path ends with a name.
    ///
    /// A folder of something else is said to be that, whoever can enter it: advice to change its mode
    /// would harm what it holds.
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
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(io(error)),
            }
        }
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
        let folder = Self { descriptor };
        if status.st_uid == user && mode & 0o077 == 0 {
            return Ok(folder);
        }
        let is_store = folder.has_marker_of(user);
        if !is_store && !folder.is_new().unwrap_or(true) {
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

    /// True if the folder has the marker of a store that this user made.
    fn has_marker_of(&self, user: u32) -> bool {
        let Ok(file) = self.file(MARKER, OFlags::RDONLY) else {
            return false;
        };
        let mut start = [0; MARKER_START.len()];
        rustix::fs::fstat(&file).is_ok_and(|status| status.st_uid == user)
            && (&file).read_exact(&mut start).is_ok()
            && start == MARKER_START
    }

    /// Locks the folder for writing; the error holds the process id of the writer, if it is known.
    pub(crate) fn lock(&self) -> io::Result<Result<WriterLock, Option<u32>>> {
        let mut file = self.file(LOCK, OFlags::RDWR | OFlags::CREATE)?;
        match file.try_lock() {
            Ok(()) => {
                file.set_len(0)?;
                write!(file, "{}", std::process::id())?;
                Ok(Ok(WriterLock { _file: file }))
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                let mut text = String::new();
                file.read_to_string(&mut text)?;
                Ok(Err(text.trim().parse().ok()))
            }
            Err(std::fs::TryLockError::Error(error)) => Err(error),
        }
    }

    /// The text of the marker file, if the folder has one.
    pub(crate) fn marker(&self) -> io::Result<Option<String>> {
        let mut text = String::new();
        match self.file(MARKER, OFlags::RDONLY) {
            Ok(file) => file
                .take(4096)
                .read_to_string(&mut text)
                .map(|_| Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the marker file, whole or not at all.
    pub(crate) fn write_marker(&self, text: &str) -> io::Result<()> {
        let new = "format.new";
        let mut file = self.file(new, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        file.write_all(text.as_bytes())?;
        file.sync_data()?;
        rustix::fs::renameat(&self.descriptor, new, &self.descriptor, MARKER)?;
        Ok(())
    }

    /// True if the folder holds nothing but files that a new store makes.
    pub(crate) fn is_new(&self) -> io::Result<bool> {
        Ok(self
            .names()?
            .iter()
            .all(|name| [LOCK, "format.new"].contains(&name.as_str())))
    }

    fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        // NONBLOCK: a pipe of that name must not block the open.
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::openat(&self.descriptor, name, flags, PRIVATE_FILE)?;
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

impl Disk for Folder {
    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.descriptor)? {
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
            &self.descriptor,
            name,
            AtFlags::empty(),
        )?)
    }

    fn available(&self) -> io::Result<u64> {
        let status = rustix::fs::fstatvfs(&self.descriptor)?;
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
