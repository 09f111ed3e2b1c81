//! `Transfer`: blocks that are to be filled with KV from outside the pool; and blocks that were evicted.

use std::sync::Arc;

use forks::Own;
use kv_core::{Evicted as CoreEvicted, LoadingBlock, Reserve};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt};

use crate::answers::{Loading, NoRoom};
use crate::bounded;
use crate::errors::ConfigError;
use crate::items::items;
use crate::locked::Locked;
use crate::numbers::in_words;
use crate::stored_prefix::{MAX_BLOCKS, block_of};

/// Blocks reserved for a prefix whose KV comes from outside the pool: from a disk, host memory or another process.
///
/// Until the transfer ends with `complete` or `fail`, no step reads or writes its blocks, even if the sequence is
/// freed. Dropping the object fails the transfer, so keep it until the last byte is written.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Transfer {
    core: Arc<Locked>,
    handle: Own<kv_core::Transfer>,
}

impl Transfer {
    /// Indices from the front whose blocks are all among these.
    fn filled(&self, blocks: &Bound<'_, PyAny>) -> PyResult<usize> {
        if blocks.is_instance_of::<PyInt>() {
            let shown = in_words(blocks)?;
            return Err(ConfigError::new_err(format!(
                "blocks={shown} is a number: give the filled blocks themselves, as StoredPrefix.load returns them, \
                 for example transfer.blocks[:{shown}]"
            )));
        }
        let too_many = |count| ConfigError::new_err(format!("{count} blocks are too many"));
        let filled = items(blocks, MAX_BLOCKS, too_many, |item, at| {
            let (index, group, block): (_, _, u32) = block_of(item, at)?;
            let block = block.into();
            Ok(LoadingBlock {
                index,
                group,
                block,
            })
        })?;
        let refused = |LoadingBlock {
                           index,
                           group,
                           block,
                       }| {
            let (block, id) = (block.get(), self.id());
            ConfigError::new_err(format!(
                "({index}, {group}, {block}) is not one of the blocks of transfer {id}"
            ))
        };
        self.handle.filled_indices(&filled).map_err(refused)
    }
}

#[pymethods]
impl Transfer {
    /// The number of the transfer in its manager, from 1.
    #[getter]
    fn id(&self) -> u64 {
        self.handle.key().serial()
    }

    /// The index in the prefix of the first block to restore: the block with the tokens from `index * block_size` on.
    #[getter]
    fn first_index(&self) -> usize {
        self.handle.indices().start
    }

    /// Number of blocks of tokens to restore.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.handle.indices().len()
    }

    /// The blocks to fill, as (index in the prefix, layer group, block id), ordered by index. A layer group with a
    /// window needs only the last ones. Blocks that are already cached are left out. For a model with states, the last
    /// ones are those of the snapshot at the end, with the index of the last block of tokens, and the layer group after
    /// the others.
    #[getter]
    fn blocks(&self) -> Vec<(usize, usize, u32)> {
        let blocks = self.handle.blocks().iter();
        let blocks = blocks.map(|loading| (loading.index, loading.group, loading.block.get()));
        blocks.collect()
    }

    /// Ends the transfer, of whose blocks these are filled (None: all), given as in `blocks` and in any order, as
    /// `StoredPrefix.load` returns them. The blocks of tokens from the front that are filled in every layer group
    /// become cached as if a step had computed them. The other blocks are freed. A snapshot needs all blocks.
    ///
    /// If the sequence that reserved the blocks can reuse them, it does so at once. Returns the number of tokens
    /// that it reuses. Raises `PlanError` if the transfer has ended, and `ConfigError` for anything that is not one of
    /// its blocks, numbers among it: a number of blocks means two things if there are several layer groups.
    #[pyo3(signature = (blocks = None))]
    fn complete(&self, py: Python<'_>, blocks: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
        let num_indices = match blocks {
            None => self.handle.indices().len(),
            Some(blocks) => self.filled(blocks)?,
        };
        self.core
            .with(py, |core| core.complete(self.handle.key(), num_indices))
    }

    /// Number of tokens that `complete` caches if these blocks are filled. Raises `ConfigError` as `complete` does.
    fn restored_tokens(&self, py: Python<'_>, blocks: &Bound<'_, PyAny>) -> PyResult<usize> {
        let num_indices = self.filled(blocks)?;
        let block_size = self.core.with(py, |core| Ok(core.config().block_size))?;
        Ok(num_indices * block_size)
    }

    /// Ends the transfer as failed: no block is cached, and its blocks are freed. Raises `PlanError` if it has ended.
    fn fail(&self, py: Python<'_>) -> PyResult<()> {
        self.core.with(py, |core| core.fail(self.handle.key()))
    }

    /// Abandons the transfer while its I/O still runs: prefills no longer wait for it, and completing it caches no
    /// block. It holds its blocks until it ends. Raises `PlanError` if it has ended.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        self.core.with(py, |core| core.abandon(self.handle.key()))
    }

    fn __repr__(&self) -> String {
        let blocks = self.handle.indices();
        format!("<Transfer {} of blocks {blocks:?}>", self.id())
    }
}

/// An answer to `reserve` as the Python object of its kind; None if there is nothing to restore.
pub(crate) fn reserve_answer(
    py: Python<'_>,
    core: &Arc<Locked>,
    answer: Reserve,
) -> PyResult<Option<Py<PyAny>>> {
    Ok(Some(match answer {
        Reserve::Reserved(handle) => {
            let (core, handle) = (Arc::clone(core), Own::new(handle));
            Py::new(py, Transfer { core, handle })?.into_any()
        }
        Reserve::NoRoom { needed, available } => {
            Py::new(py, NoRoom { needed, available })?.into_any()
        }
        Reserve::Loading { transfer } => Py::new(py, Loading { transfer })?.into_any(),
        Reserve::NotNeeded => return Ok(None),
    }))
}

/// A cached block that was evicted. Its KV is intact until the block is written again.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Evicted(CoreEvicted);

#[pymethods]
impl Evicted {
    /// The block id.
    #[getter]
    fn block(&self) -> u32 {
        self.0.block.get()
    }

    /// The layer group for which it was cached.
    #[getter]
    fn group(&self) -> usize {
        self.0.group
    }

    /// The block hash: 16 bytes, little-endian.
    #[getter]
    fn hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.hash.to_le_bytes())
    }

    /// The hash of the parent block; None for the first block of a prompt.
    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let parent = self.0.parent?;
        Some(PyBytes::new(py, &parent.to_le_bytes()))
    }

    /// The token ids of the block.
    #[getter]
    fn tokens(&self) -> &[u32] {
        &self.0.tokens
    }

    /// Where the namespace switches, and to which name, if the block contains that position or follows it.
    #[getter]
    fn switch<'py>(&self, py: Python<'py>) -> Option<(usize, Bound<'py, PyBytes>)> {
        let (position, name) = self.0.switch.as_ref()?;
        Some((*position, PyBytes::new(py, name)))
    }

    /// The namespace in which it was cached.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.namespace)
    }

    fn __repr__(&self) -> String {
        let CoreEvicted { block, hash, .. } = &self.0;
        format!("Evicted(block={}, hash={hash:032x})", block.get())
    }
}

/// A list of evicted blocks.
pub(crate) fn evicted_list<'py>(
    py: Python<'py>,
    evicted: Vec<CoreEvicted>,
) -> PyResult<Bound<'py, pyo3::types::PyList>> {
    bounded::list(py, evicted, |evicted| Ok(Evicted(evicted)))
}
