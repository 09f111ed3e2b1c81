//! The marker file: it marks a folder as a store and names its format and authentication key.

use std::io;
use std::path::Path;

use crate::disk::{Disk, DiskFile, read_exact, write_all};
use crate::error::OpenError;
use crate::format::{FORMAT_VERSION, Sealer};

/// The lock file: one process at a time writes.
pub(crate) const LOCK: &str = "lock";
/// The marker file.
pub(crate) const MARKER: &str = "format";
/// Start of the marker text, in every format.
pub(crate) const MARKER_START: &[u8] = b"pyengine kv-store\n";
const NEW_MARKER: &str = "format.new";
const MAX_MARKER_BYTES: u64 = 4096;

/// The text of the marker file.
pub(crate) fn text(sealer: &Sealer) -> String {
    format!(
        "pyengine kv-store\nformat {FORMAT_VERSION}\nkey {}\n",
        sealer.id()
    )
}

/// True if the marker file has this text, false if the folder has no files of a store yet.
pub(crate) fn check(disk: &dyn Disk, path: &Path, text: &str) -> Result<bool, OpenError> {
    let io = |source| OpenError::Io {
        path: path.into(),
        source,
    };
    let mut current = read(disk, MARKER).map_err(io)?;
    if current.is_none() {
        if is_new(disk).map_err(io)? {
            return Ok(false);
        }
        // Earlier versions did not sync the folder, so a power cut may have undone the rename.
        current = read(disk, NEW_MARKER).map_err(io)?;
    }
    match current {
        Some(current) if current == text => Ok(true),
        Some(current) if current.lines().nth(1) == text.lines().nth(1) => {
            Err(OpenError::AuthKey { path: path.into() })
        }
        Some(current) => Err(OpenError::Format {
            path: path.into(),
            found: (current.lines().nth(1))
                .and_then(|line| line.strip_prefix("format "))
                .map_or_else(|| format!("{current:?}"), str::to_owned),
        }),
        None => Err(OpenError::NotAStore { path: path.into() }),
    }
}

/// Writes the marker file atomically, unless it exists, and syncs it before any segment is created.
pub(crate) fn write(disk: &dyn Disk, text: &str) -> io::Result<()> {
    if read(disk, MARKER)?.is_none() {
        if read(disk, NEW_MARKER)?.as_deref() != Some(text) {
            match disk.remove(NEW_MARKER) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            disk.create(NEW_MARKER)
                .and_then(|file| write_all(&*file, text.as_bytes(), 0))?;
        }
        disk.open_writable(NEW_MARKER)?.sync()?;
        disk.rename(NEW_MARKER, MARKER)?;
    }
    disk.sync()
}

/// True if the folder has no files but those of a new store.
pub(crate) fn is_new(disk: &dyn Disk) -> io::Result<bool> {
    let is_of_new_store = |name: &String| [LOCK, NEW_MARKER].contains(&name.as_str());
    Ok(disk.names()?.iter().all(is_of_new_store))
}

fn read(disk: &dyn Disk, name: &str) -> io::Result<Option<String>> {
    let file: Box<dyn DiskFile> = match disk.open(name) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = vec![0; file.size()?.min(MAX_MARKER_BYTES) as usize];
    read_exact(&*file, &mut bytes, 0)?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}
