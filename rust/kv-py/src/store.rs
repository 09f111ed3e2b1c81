//! `KVStore`: blocks on a disk or in memory, which survive the pool.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kv_store::{Access, Amount, Config, Fingerprint, MemoryDisk, Stats, Store};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use crate::bounded;
use crate::errors::{ConfigError, StoreError};
use crate::items::items;
use crate::manager::windows_of;
use crate::numbers::{in_words, number, seconds};
use crate::opened_store::OpenedStore;
use crate::stored_prefix::StoredPrefix;
use crate::switch::{in_namespace, switch_of};
use crate::tokens::token_ids;

/// More fingerprints than a store holds.
const MAX_GROUPS: usize = 1 << 16;

/// A fingerprint, the entries that it has, their bytes, and when the newest was written.
type FingerprintRow<'py> = (Bound<'py, PyBytes>, u64, u64, u64);

/// Keeps KV-cache blocks in a folder, where they outlive the process, or in memory. Calls may come from any thread;
/// they release the GIL.
///
/// `max_bytes` limits all files together. With `access="write"`, opening is refused while another process writes;
/// "read" reads the entries of another process; "write_or_read" reads if another process writes. `queue_bytes`
/// limits the payloads that wait to be written, and `segment_bytes` is the unit of eviction. With `auth_key`, 32
/// secret bytes, every entry is authenticated. After a failed write, blocks are dropped for `retry_after` seconds.
/// If the disk does not answer for `stall_after` seconds, calls return without it.
///
/// A new folder can be entered only by its owner. Queued blocks are dropped unless `close` is called.
///
/// Raises `StoreError` for a folder that is accessible to others, belongs to another user, is a symbolic link or is
/// not a store, and if another process writes to it; also for every call after `close`, and in a process forked
/// later. Raises `ConfigError` for an argument of a wrong type or range.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct KVStore {
    opened: Arc<OpenedStore>,
    is_writer: bool,
}

/// Limits as they were given.
struct Limits<'a, 'py> {
    max_bytes: &'a Bound<'py, PyAny>,
    queue_bytes: Option<&'a Bound<'py, PyAny>>,
    segment_bytes: Option<&'a Bound<'py, PyAny>>,
    auth_key: Option<&'a [u8]>,
    stall_after: Option<&'a Bound<'py, PyAny>>,
    retry_after: Option<&'a Bound<'py, PyAny>>,
}

impl Limits<'_, '_> {
    fn config(self, access: Access) -> PyResult<Config> {
        let mut config = Config::new(number("max_bytes", self.max_bytes)?);
        config.access = access;
        if let Some(bytes) = self.queue_bytes {
            config.queue_bytes = number("queue_bytes", bytes)?;
        }
        if let Some(bytes) = self.segment_bytes {
            config.segment_bytes = number("segment_bytes", bytes)?;
        }
        if let Some(after) = self.stall_after {
            config.stall_after = seconds("stall_after", after)?;
        }
        if let Some(after) = self.retry_after {
            config.retry_after = seconds("retry_after", after)?;
        }
        let auth_key = self.auth_key.map(|key| {
            let refuse =
                |_| ConfigError::new_err(format!("auth_key has {} bytes, not 32", key.len()));
            <[u8; 32]>::try_from(key).map_err(refuse)
        });
        config.auth_key = auth_key.transpose()?;
        Ok(config)
    }
}

impl KVStore {
    fn opened(
        py: Python<'_>,
        name: String,
        open: impl FnOnce() -> Result<Store, kv_store::OpenError> + Send,
    ) -> PyResult<Self> {
        let store = py.detach(open);
        let store = store.map_err(|error| StoreError::new_err(error.to_string()))?;
        Ok(Self {
            is_writer: store.is_writer(),
            opened: Arc::new(OpenedStore::new(store, name)),
        })
    }

    /// Runs `work` with the store, without the GIL.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Store) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        py.detach(|| match self.opened.store()? {
            Some(store) => work(&store),
            None => Err(self.closed()),
        })
    }

    fn closed(&self) -> PyErr {
        StoreError::new_err(format!("the KV store {} is closed", self.opened.name()))
    }
}

#[pymethods]
impl KVStore {
    #[new]
    #[pyo3(signature = (folder, *, max_bytes, access = None, queue_bytes = None, segment_bytes = None, auth_key = None, stall_after = None, retry_after = None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        max_bytes: &Bound<'_, PyAny>,
        access: Option<&Bound<'_, PyAny>>,
        queue_bytes: Option<&Bound<'_, PyAny>>,
        segment_bytes: Option<&Bound<'_, PyAny>>,
        auth_key: Option<&[u8]>,
        stall_after: Option<&Bound<'_, PyAny>>,
        retry_after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let limits = Limits {
            max_bytes,
            queue_bytes,
            segment_bytes,
            auth_key,
            stall_after,
            retry_after,
        };
        let config = limits.config(access.map_or(Ok(Access::WriteOrRead), access_of)?)?;
        let name = folder.display().to_string();
        Self::opened(py, name, || Store::open(&folder, config))
    }

    /// Creates an empty store in memory.
    #[staticmethod]
    #[pyo3(signature = (max_bytes, *, queue_bytes = None, segment_bytes = None, auth_key = None, stall_after = None, retry_after = None))]
    fn in_memory(
        py: Python<'_>,
        max_bytes: &Bound<'_, PyAny>,
        queue_bytes: Option<&Bound<'_, PyAny>>,
        segment_bytes: Option<&Bound<'_, PyAny>>,
        auth_key: Option<&[u8]>,
        stall_after: Option<&Bound<'_, PyAny>>,
        retry_after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let limits = Limits {
            max_bytes,
            queue_bytes,
            segment_bytes,
            auth_key,
            stall_after,
            retry_after,
        };
        let config = limits.config(Access::Write)?;
        let disk = Box::new(MemoryDisk::new(u64::MAX)); // the store keeps to its own limit
        Self::opened(py, "in memory".into(), || Store::on_disk(disk, config))
    }

    /// True if it writes; otherwise it reads the entries of another process.
    #[getter]
    fn is_writer(&self) -> bool {
        self.is_writer
    }

    /// The full blocks of a prompt in this store, with one fingerprint and one window for each layer group: pass
    /// `BlockManager.groups` as `windows`. Without it, no layer group has a window. It hashes every block once per
    /// fingerprint.
    ///
    /// `namespace` and `switch` are those of `BlockManager.sequence`.
    ///
    /// For a model with states, `state` is the fingerprint of its snapshots and the number of blocks of each. They have
    /// the layer group after the others.
    ///
    /// Raises `TokenError` for invalid tokens, and `ConfigError` for a `block_size` of 0, invalid fingerprints, another
    /// number of windows, or snapshots of no block.
    #[pyo3(signature = (tokens, block_size, *, fingerprints, namespace = None, switch = None, windows = None, state = None))]
    #[allow(clippy::too_many_arguments)]
    fn prefix(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        fingerprints: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
        switch: Option<&Bound<'_, PyAny>>,
        windows: Option<&Bound<'_, PyAny>>,
        state: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ) -> PyResult<StoredPrefix> {
        let block_size = number("block_size", block_size)?;
        if block_size == 0 {
            return Err(ConfigError::new_err("block_size=0: it must be at least 1"));
        }
        let fingerprints = fingerprints_of(fingerprints)?;
        if fingerprints.is_empty() {
            return Err(ConfigError::new_err(
                "fingerprints is empty: each layer group has one",
            ));
        }
        let windows = match windows {
            Some(windows) => windows_of("windows", windows)?,
            None => vec![None; fingerprints.len()],
        };
        if windows.len() != fingerprints.len() {
            let (windows, fingerprints) = (windows.len(), fingerprints.len());
            return Err(ConfigError::new_err(format!(
                "windows has {windows} layer groups and fingerprints has {fingerprints}: each has one of both"
            )));
        }
        let state = state.map(|state| state_of(&state)).transpose()?;
        let groups: Vec<_> = fingerprints.into_iter().zip(windows).collect();
        let switch = switch_of(switch)?;
        let namespace = in_namespace(namespace, &switch);
        let (tokens, opened) = (token_ids(tokens)?, Arc::clone(&self.opened));
        self.with(py, |_| {
            Ok(StoredPrefix::hash(
                opened, tokens, &namespace, block_size, &groups, state,
            ))
        })
    }

    /// Entries and bytes by state (`readable_entries`, `readable_bytes`, and the same for `writing`, `reading` and
    /// `condemned`), `disk_bytes`, `limit_bytes`, `queued_bytes`, `is_writer`, `is_suspended`, `is_stalled`, and
    /// all counters since the store was opened.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |store| Ok(store.stats()))?;
        stats_dict(py, &stats)
    }

    /// Takes the messages for the operator: one per fault, however many blocks it affects.
    fn take_notices(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let notices = self.with(py, |store| Ok(store.take_notices()))?;
        Ok(notices.iter().map(ToString::to_string).collect())
    }

    /// Waits until all queued blocks are written or dropped. Returns False if that takes longer than `timeout` seconds.
    fn flush(&self, py: Python<'_>, timeout: &Bound<'_, PyAny>) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        self.with(py, |store| Ok(store.flush(timeout)))
    }

    /// Waits until all written blocks, also those of earlier processes, are on the device, so that they survive a power
    /// failure. Raises `StoreError` if that fails, or if the disk does not answer for `stall_after` seconds.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |store| {
            store.sync().map_err(|error| self.failed("sync", &error))
        })
    }

    /// For a reader: loads entries that the writer has stored, and drops those that it has removed. Returns the
    /// number of readable entries. Raises `StoreError` if the folder cannot be read.
    fn refresh(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |store| {
            store
                .refresh()
                .map_err(|error| self.failed("refresh", &error))
        })
    }

    /// Drops the entries of these fingerprints that were written more than `older_than` seconds ago; an argument
    /// that is None excludes none. Returns their number. Raises `StoreError` if another process writes.
    #[pyo3(signature = (*, fingerprints = None, older_than = None))]
    fn prune(
        &self,
        py: Python<'_>,
        fingerprints: Option<&Bound<'_, PyAny>>,
        older_than: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let fingerprints = fingerprints.map(fingerprints_of).transpose()?;
        let older_than = older_than
            .map(|age| seconds("older_than", age))
            .transpose()?;
        let is_dropped = |fingerprint: Fingerprint, age: Duration| {
            let is_named = fingerprints
                .as_ref()
                .is_none_or(|named| named.contains(&fingerprint));
            is_named && older_than.is_none_or(|limit| age > limit)
        };
        if !self.is_writer {
            return Err(StoreError::new_err(format!(
                "the KV store {} is open for reading: only the process that writes prunes it",
                self.opened.name()
            )));
        }
        self.with(py, |store| Ok(store.prune_where(is_dropped)))
    }

    /// Reads every entry, and drops damaged ones. Returns the number of intact entries, and the keys of those that
    /// are damaged or cannot be read.
    fn verify<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyList>)> {
        let verification = self.with(py, |store| Ok(store.verify()))?;
        let damaged = bounded::list(py, verification.damaged, |key| Ok(key.to_string()))?;
        Ok((verification.whole, damaged))
    }

    /// The fingerprints with readable entries, the one with the most bytes first: the fingerprint, the number of
    /// its entries, their bytes, and the time when the newest was written, in seconds since 1970.
    fn fingerprints<'py>(&self, py: Python<'py>) -> PyResult<Vec<FingerprintRow<'py>>> {
        let rows = self.with(py, |store| Ok(store.by_fingerprint()))?;
        let row = |usage: &kv_store::FingerprintUsage| {
            let fingerprint = PyBytes::new(py, usage.fingerprint.as_bytes());
            let Amount { entries, bytes } = usage.amount;
            (fingerprint, entries, bytes, usage.last_written)
        };
        Ok(rows.iter().map(row).collect())
    }

    /// Writes queued blocks and closes the store: every later call raises `StoreError`. Returns False if `timeout`
    /// seconds are not enough; the rest is dropped. Returns True if it is already closed.
    fn close(&self, py: Python<'_>, timeout: &Bound<'_, PyAny>) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        py.detach(|| {
            let store = self.opened.take()?;
            Ok(store.is_none_or(|store| store.close(timeout)))
        })
    }

    fn __repr__(&self) -> String {
        let access = if self.is_writer { "writes" } else { "reads" };
        format!("<KVStore {}, {access}>", self.opened.name())
    }
}

impl KVStore {
    fn failed(&self, what: &str, error: &std::io::Error) -> PyErr {
        let name = &self.opened.name();
        StoreError::new_err(format!("cannot {what} the KV store {name}: {error}"))
    }
}

/// The fingerprint of a model, computed from named properties in order. Entries with different fingerprints never
/// match.
#[pyfunction]
pub(crate) fn kv_fingerprint<'py>(
    py: Python<'py>,
    properties: Vec<(String, Vec<u8>)>,
) -> Bound<'py, PyBytes> {
    let named = properties
        .iter()
        .map(|(name, value)| (&name[..], &value[..]));
    PyBytes::new(py, Fingerprint::of(named).as_bytes())
}

fn access_of(access: &Bound<'_, PyAny>) -> PyResult<Access> {
    let text = access
        .cast::<PyString>()
        .ok()
        .map(|text| text.to_cow())
        .transpose()?;
    match text.as_deref() {
        Some("write") => Ok(Access::Write),
        Some("read") => Ok(Access::Read),
        Some("write_or_read") => Ok(Access::WriteOrRead),
        _ => {
            let shown = in_words(access)?;
            Err(ConfigError::new_err(format!(
                "access={shown} is none of \"write\", \"read\" and \"write_or_read\""
            )))
        }
    }
}

fn fingerprints_of(fingerprints: &Bound<'_, PyAny>) -> PyResult<Vec<Fingerprint>> {
    let too_many = |count| ConfigError::new_err(format!("{count} fingerprints are too many"));
    items(fingerprints, MAX_GROUPS, too_many, |fingerprint, at| {
        fingerprint_of(&format!("fingerprints[{at}]"), fingerprint)
    })
}

fn fingerprint_of(name: &str, fingerprint: &Bound<'_, PyAny>) -> PyResult<Fingerprint> {
    let bytes = fingerprint.cast::<PyBytes>().ok();
    let bytes = bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes.as_bytes()).ok());
    let Some(bytes) = bytes else {
        let shown = in_words(fingerprint)?;
        return Err(ConfigError::new_err(format!(
            "{name}={shown} is not 32 bytes"
        )));
    };
    Ok(Fingerprint::from_bytes(bytes))
}

/// The fingerprint of snapshots, and their blocks.
fn state_of(
    (fingerprint, blocks): &(Bound<'_, PyAny>, Bound<'_, PyAny>),
) -> PyResult<(Fingerprint, usize)> {
    let fingerprint = fingerprint_of("state[0]", fingerprint)?;
    match number("state[1]", blocks)? {
        0 => Err(ConfigError::new_err(
            "state[1]=0: a snapshot has at least 1 block",
        )),
        blocks => Ok((fingerprint, blocks)),
    }
}

fn stats_dict<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let usage = &stats.usage;
    for (state, amount) in [
        ("readable", usage.readable),
        ("writing", usage.writing),
        ("reading", usage.reading),
        ("condemned", usage.condemned),
    ] {
        dict.set_item(format!("{state}_entries"), amount.entries)?;
        dict.set_item(format!("{state}_bytes"), amount.bytes)?;
    }
    dict.set_item("disk_bytes", stats.disk_bytes)?;
    dict.set_item("limit_bytes", stats.limit_bytes)?;
    dict.set_item("queued_bytes", stats.queued_bytes)?;
    dict.set_item("is_writer", stats.is_writer)?;
    dict.set_item("is_suspended", stats.is_suspended)?;
    dict.set_item("is_stalled", stats.is_stalled)?;
    for (name, value) in stats.counters.by_name() {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
