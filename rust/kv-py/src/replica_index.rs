//! `ReplicaIndex`: which replicas have which cached blocks, by their KV events.

use std::sync::{Mutex, PoisonError};

use forks::Own;
use kv_core::{ContentHasher, Event};
use kv_router::{BlockHash, Change, MAX_REPLICAS};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::bounded;
use crate::errors::{ConfigError, forked};
use crate::memory::bytes_filled_by;
use crate::numbers::number;
use crate::tokens::token_ids;

const REMOVED: u8 = 0;
const STORED: u8 = 1;
const CLEARED: u8 = 2;

/// Events as bytes: a kind and a block hash each; the hash is all zeros in a cleared event.
pub(crate) fn packed(events: &[Event]) -> (Vec<u8>, Vec<u8>) {
    let (mut kinds, mut packed) = (vec![], vec![]);
    for event in events {
        let (kind, hashes) = match event {
            Event::Stored { hashes, .. } => (STORED, &hashes[..]),
            Event::Removed { hashes } => (REMOVED, &hashes[..]),
            Event::Cleared { .. } => (CLEARED, &[0][..]),
            Event::Lost { .. } => continue, // the next ones state all cached blocks
        };
        kinds.resize(kinds.len() + hashes.len(), kind);
        packed.extend(hashes.iter().map(|hash| hash.to_le_bytes()));
    }
    (kinds, packed.into_flattened())
}

/// An index of the cached blocks, of `block_size` tokens each, of at most 128 replicas, which are numbered from 0.
///
/// `apply` applies the KV events of `BlockManager.take_packed_events`. `add_request` counts the blocks of a request
/// that was routed to a replica, until `remove_request`. Block hashes are concatenated, 16 bytes each, and come
/// from block managers with the same `hash_seed`. Raises `ConfigError` for an unknown replica, and for bytes that
/// are not events or hashes; nothing has changed then.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct ReplicaIndex {
    index: Own<Mutex<kv_router::ReplicaIndex>>,
    hasher: ContentHasher,
    block_size: usize,
}

impl ReplicaIndex {
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut kv_router::ReplicaIndex) -> R + Send,
    ) -> PyResult<R> {
        self.index.origin.check("ReplicaIndex").map_err(forked)?;
        let locked = || self.index.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(py.detach(|| work(&mut locked())))
    }
}

#[pymethods]
impl ReplicaIndex {
    #[new]
    #[pyo3(signature = (block_size, *, hash_seed))]
    fn new(block_size: &Bound<'_, PyAny>, hash_seed: &Bound<'_, PyAny>) -> PyResult<Self> {
        let block_size: usize = number("block_size", block_size)?;
        if block_size == 0 {
            return Err(ConfigError::new_err("block_size=0: it must be at least 1"));
        }
        let hash_seed = number("hash_seed", hash_seed)?;
        Ok(Self {
            index: Own::new(Mutex::new(kv_router::ReplicaIndex::new())),
            hasher: ContentHasher::new(hash_seed, u128::BITS),
            block_size,
        })
    }

    /// The hashes of a prompt's full blocks.
    #[pyo3(signature = (tokens, *, namespace = None))]
    fn block_hashes<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        namespace: Option<&[u8]>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tokens = token_ids(tokens)?;
        let mut hash = self.hasher.root(namespace.unwrap_or_default());
        let blocks = tokens.chunks_exact(self.block_size);
        bytes_filled_by(py, blocks.len() * size_of::<BlockHash>(), |hashes| {
            let (hashes, _) = hashes.as_chunks_mut();
            for (bytes, block) in hashes.iter_mut().zip(blocks) {
                hash = self.hasher.child(hash, block);
                *bytes = hash.to_le_bytes();
            }
        })
    }

    /// Applies the KV events of a replica in order, each with a kind (0 removed, 1 stored, 2 cleared) and a block
    /// hash. Returns the number of blocks that the replica then has cached.
    fn apply(
        &self,
        py: Python<'_>,
        replica: &Bound<'_, PyAny>,
        kinds: &[u8],
        hashes: &[u8],
    ) -> PyResult<usize> {
        let (replica, hashes) = (replica_number(replica)?, hashes_of(hashes)?);
        if kinds.len() != hashes.len() {
            let (kinds, hashes) = (kinds.len(), hashes.len());
            let message = format!("{kinds} kinds and {hashes} hashes: an event has one of each");
            return Err(ConfigError::new_err(message));
        }
        if let Some(other) = kinds.iter().find(|kind| **kind > CLEARED) {
            return Err(ConfigError::new_err(format!(
                "an event of kind {other}: there are 0 (removed), 1 (stored) and 2 (cleared)"
            )));
        }
        self.with(py, |index| {
            index.apply(replica, kinds.iter().zip(hashes).map(change));
            index.num_cached(replica)
        })
    }

    /// Removes all cached blocks of a replica. O(blocks in the index).
    fn clear(&self, py: Python<'_>, replica: &Bound<'_, PyAny>) -> PyResult<()> {
        let replica = replica_number(replica)?;
        self.with(py, |index| index.clear(replica))
    }

    /// Adds a request that was routed to a replica, with the hashes of its prompt's blocks. Returns the number of
    /// different blocks that the replica's requests then have.
    fn add_request(
        &self,
        py: Python<'_>,
        replica: &Bound<'_, PyAny>,
        hashes: &[u8],
    ) -> PyResult<usize> {
        let (replica, hashes) = (replica_number(replica)?, hashes_from(hashes)?);
        self.with(py, |index| {
            index.add_request(replica, &hashes);
            index.num_pending(replica)
        })
    }

    /// Removes an added request that has finished. Returns the same number.
    fn remove_request(
        &self,
        py: Python<'_>,
        replica: &Bound<'_, PyAny>,
        hashes: &[u8],
    ) -> PyResult<usize> {
        let (replica, hashes) = (replica_number(replica)?, hashes_from(hashes)?);
        self.with(py, |index| {
            index.remove_request(replica, &hashes);
            index.num_pending(replica)
        })
    }

    /// For each replica, by its number, how many leading blocks of a prompt it has cached or in a request. Replicas
    /// beyond the end of the list have none. O(hashes).
    fn matched_blocks(&self, py: Python<'_>, hashes: &[u8]) -> PyResult<Vec<usize>> {
        let hashes = hashes_from(hashes)?;
        self.with(py, |index| index.matched_blocks(&hashes))
    }

    /// The hashes of a replica's cached blocks, in any order. O(blocks in the index).
    fn cached_blocks<'py>(
        &self,
        py: Python<'py>,
        replica: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let replica = replica_number(replica)?;
        let hashes = self.with(py, |index| index.cached_blocks(replica))?;
        bounded::list(py, hashes, |hash| Ok(PyBytes::new(py, &hash.to_le_bytes())))
    }

    /// Number of different blocks that the replicas have cached.
    #[getter]
    fn num_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |index| index.num_blocks())
    }
}

fn replica_number(replica: &Bound<'_, PyAny>) -> PyResult<usize> {
    let replica = number("replica", replica)?;
    if replica < MAX_REPLICAS {
        return Ok(replica);
    }
    let message = format!(
        "replica={replica}: replicas are numbered from 0 to {}",
        MAX_REPLICAS - 1
    );
    Err(ConfigError::new_err(message))
}

fn hashes_of(bytes: &[u8]) -> PyResult<&[[u8; size_of::<BlockHash>()]]> {
    let (hashes, rest) = bytes.as_chunks();
    if rest.is_empty() {
        return Ok(hashes);
    }
    let message = format!(
        "{} bytes are not a whole number of hashes of 16 bytes",
        bytes.len()
    );
    Err(ConfigError::new_err(message))
}

fn hashes_from(bytes: &[u8]) -> PyResult<Vec<BlockHash>> {
    let hashes = hashes_of(bytes)?.iter();
    Ok(hashes.map(|hash| BlockHash::from_le_bytes(*hash)).collect())
}

/// An event whose kind was checked.
fn change((kind, hash): (&u8, &[u8; size_of::<BlockHash>()])) -> Change {
    let hash = BlockHash::from_le_bytes(*hash);
    match *kind {
        REMOVED => Change::Removed(hash),
        STORED => Change::Stored(hash),
        _ => Change::Cleared,
    }
}
