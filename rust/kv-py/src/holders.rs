//! `Holders`: which of several replicas hold which contents, by what their events say.

use std::sync::{Mutex, PoisonError};

use holders::{Change, MOST_HOLDERS, Name};
use kv_core::{ContentHasher, Event};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::bounded;
use crate::errors::ConfigError;
use crate::memory::bytes_filled_by;
use crate::numbers::number;
use crate::tokens::token_ids;

const REMOVED: u8 = 0;
const STORED: u8 = 1;
const CLEARED: u8 = 2;

/// Events as bytes: a kind each, and a name each, of zeros where nothing is named.
pub(crate) fn packed(events: &[Event]) -> (Vec<u8>, Vec<u8>) {
    let (mut kinds, mut names) = (vec![], vec![]);
    for event in events {
        let (kind, hashes) = match event {
            Event::Stored { hashes, .. } => (STORED, &hashes[..]),
            Event::Removed { hashes } => (REMOVED, &hashes[..]),
            Event::Cleared => (CLEARED, &[0][..]),
        };
        kinds.resize(kinds.len() + hashes.len(), kind);
        names.extend(hashes.iter().map(|hash| hash.to_le_bytes()));
    }
    (kinds, names.into_flattened())
}

/// Which of at most 128 holders, numbers from 0, hold which contents of `block_size` tokens each.
///
/// What they hold follows from `apply`, which takes what `BlockManager.take_packed_events` gives;
/// `expect` says that a prompt is on its way to a holder, and counts until `unexpect`. Names are 16
/// bytes a content, one after the other. They are those of managers with the same `hash_seed`. Raises
/// `ConfigError` for a holder, a size or bytes that cannot be; nothing has changed then.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Holders {
    known: Mutex<holders::Holders>,
    hasher: ContentHasher,
    block_size: usize,
}

impl Holders {
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut holders::Holders) -> R + Send,
    ) -> R {
        py.detach(|| work(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl Holders {
    #[new]
    #[pyo3(signature = (block_size, *, hash_seed))]
    fn new(block_size: &Bound<'_, PyAny>, hash_seed: &Bound<'_, PyAny>) -> PyResult<Self> {
        let block_size: usize = number("block_size", block_size)?;
        if block_size == 0 {
            return Err(ConfigError::new_err("block_size=0: it must be at least 1"));
        }
        let hash_seed = number("hash_seed", hash_seed)?;
        Ok(Self {
            known: Mutex::new(holders::Holders::new()),
            hasher: ContentHasher::new(hash_seed, u128::BITS),
            block_size,
        })
    }

    /// The names of a prompt's full blocks.
    #[pyo3(signature = (tokens, *, namespace = None))]
    fn names<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        namespace: Option<&[u8]>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tokens = token_ids(tokens)?;
        let mut name = self.hasher.root(namespace.unwrap_or_default());
        let blocks = tokens.chunks_exact(self.block_size);
        bytes_filled_by(py, blocks.len() * size_of::<Name>(), |names| {
            let (names, _) = names.as_chunks_mut();
            for (bytes, block) in names.iter_mut().zip(blocks) {
                name = self.hasher.child(name, block);
                *bytes = name.to_le_bytes();
            }
        })
    }

    /// Takes what became of a holder's contents, in order: a kind (0 removed, 1 stored, 2 cleared)
    /// and a name for each. Returns how many it holds then.
    fn apply(
        &self,
        py: Python<'_>,
        holder: &Bound<'_, PyAny>,
        kinds: &[u8],
        names: &[u8],
    ) -> PyResult<usize> {
        let (holder, names) = (slot(holder)?, names_of(names)?);
        if kinds.len() != names.len() {
            let (kinds, names) = (kinds.len(), names.len());
            let message = format!("{kinds} kinds and {names} names: one of each an event");
            return Err(ConfigError::new_err(message));
        }
        if let Some(other) = kinds.iter().find(|kind| **kind > CLEARED) {
            return Err(ConfigError::new_err(format!(
                "an event of kind {other}: there are 0 (removed), 1 (stored) and 2 (cleared)"
            )));
        }
        Ok(self.with(py, |known| {
            known.apply(holder, kinds.iter().zip(names).map(change));
            known.num_held(holder)
        }))
    }

    /// The holder holds nothing. O(names known).
    fn clear(&self, py: Python<'_>, holder: &Bound<'_, PyAny>) -> PyResult<()> {
        let holder = slot(holder)?;
        self.with(py, |known| known.clear(holder));
        Ok(())
    }

    /// A request with a prompt of these contents is on its way to the holder, or runs there. Returns
    /// how many contents such prompts have then, each counted once.
    fn expect(&self, py: Python<'_>, holder: &Bound<'_, PyAny>, names: &[u8]) -> PyResult<usize> {
        let (holder, names) = (slot(holder)?, unpacked(names)?);
        Ok(self.with(py, |known| {
            known.expect(holder, &names);
            known.num_expected(holder)
        }))
    }

    /// Such a request, which was expected, has ended. Returns the same.
    fn unexpect(&self, py: Python<'_>, holder: &Bound<'_, PyAny>, names: &[u8]) -> PyResult<usize> {
        let (holder, names) = (slot(holder)?, unpacked(names)?);
        Ok(self.with(py, |known| {
            known.unexpect(holder, &names);
            known.num_expected(holder)
        }))
    }

    /// Of a prompt of these contents, how many from the first on each holder has or will have, by
    /// the holder's number; those that the list is too short for have none. O(names).
    fn depths(&self, py: Python<'_>, names: &[u8]) -> PyResult<Vec<usize>> {
        let names = unpacked(names)?;
        Ok(self.with(py, |known| known.depths(&names)))
    }

    /// The names that a holder holds, in no order. O(names known).
    fn contents<'py>(
        &self,
        py: Python<'py>,
        holder: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let holder = slot(holder)?;
        let names = self.with(py, |known| known.contents(holder));
        bounded::list(py, names, |name| Ok(PyBytes::new(py, &name.to_le_bytes())))
    }

    /// Names that any of them holds.
    #[getter]
    fn num_names(&self, py: Python<'_>) -> usize {
        self.with(py, |known| known.num_names())
    }
}

fn slot(holder: &Bound<'_, PyAny>) -> PyResult<usize> {
    let holder = number("holder", holder)?;
    if holder < MOST_HOLDERS {
        return Ok(holder);
    }
    let message = format!("holder={holder}: there are {MOST_HOLDERS}, from 0");
    Err(ConfigError::new_err(message))
}

fn names_of(bytes: &[u8]) -> PyResult<&[[u8; size_of::<Name>()]]> {
    let (names, rest) = bytes.as_chunks();
    if rest.is_empty() {
        return Ok(names);
    }
    let message = format!("{} bytes are no names of 16 bytes each", bytes.len());
    Err(ConfigError::new_err(message))
}

fn unpacked(bytes: &[u8]) -> PyResult<Vec<Name>> {
    let names = names_of(bytes)?.iter();
    Ok(names.map(|name| Name::from_le_bytes(*name)).collect())
}

/// An event whose kind was checked.
fn change((kind, name): (&u8, &[u8; size_of::<Name>()])) -> Change {
    let name = Name::from_le_bytes(*name);
    match *kind {
        REMOVED => Change::Removed(name),
        STORED => Change::Stored(name),
        _ => Change::Cleared,
    }
}
