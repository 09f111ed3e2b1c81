//! `StoredPrefix`: the full blocks of a prompt in a store; payloads between a pool and the store.
//!
//! A snapshot of a state is an entry of its own: its key is that of the last block of its prefix under a fingerprint of its
//! own, and its payload is that of its blocks, one after the other.

use std::ops::Range;
use std::sync::Arc;

use kv_core::Namespace;
use kv_store::{Block, BlockKey, Fingerprint, Get, Put, Store};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::bounded;
use crate::errors::{ConfigError, StoreError};
use crate::items::items;
use crate::kv_blocks::KVBlocks;
use crate::numbers::{in_words, number};
use crate::opened_store::OpenedStore;

/// More blocks than a prefix has in all of its layer groups.
pub(crate) const MAX_BLOCKS: usize = 1 << 31;

/// The keys of a prompt's blocks for one layer group.
struct GroupKeys {
    fingerprint: Fingerprint,
    /// Of each block, that of its parent: with the switch of the namespace in the block that contains it.
    parents: Vec<BlockKey>,
    keys: Vec<BlockKey>,
    window: Option<usize>,
}

/// A block to move: its index in the prefix, its layer group, its id in the pool.
#[derive(Clone, Copy)]
struct Move {
    index: usize,
    group: usize,
    block: usize,
}

impl Move {
    fn tuple(self) -> (usize, usize, usize) {
        (self.index, self.group, self.block)
    }
}

/// The full blocks of a prompt in a `KVStore`, created by `KVStore.prefix`.
///
/// After `close`, nothing is stored or loaded. Raises `ConfigError` for an index, a layer group or a block that
/// does not exist, before any block is moved, and `StoreError` in a process that did not open the store.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct StoredPrefix {
    opened: Arc<OpenedStore>,
    tokens: Vec<u32>,
    namespace: Vec<u8>,
    block_size: usize,
    groups: Vec<GroupKeys>,
    /// The keys of snapshots, by the last block of their prefix; and the blocks of each.
    state: Option<(GroupKeys, usize)>,
}

impl GroupKeys {
    fn hash(
        fingerprint: Fingerprint,
        window: Option<usize>,
        blocks: std::slice::ChunksExact<'_, u32>,
        namespace: &Namespace<'_>,
    ) -> Self {
        let (mut parents, mut keys) = (Vec::new(), Vec::new());
        let mut last = BlockKey::root(fingerprint, namespace.name);
        let mut start = 0;
        for tokens in blocks {
            let end = start + tokens.len();
            if let Some((at, name)) = namespace.switch
                && (start..end).contains(&at)
            {
                last = last.switch(fingerprint, (at - start) as u32, name);
            }
            parents.push(last);
            last = last.child(fingerprint, tokens);
            keys.push(last);
            start = end;
        }
        Self {
            fingerprint,
            parents,
            keys,
            window,
        }
    }
}

impl StoredPrefix {
    /// Hashes every full block once for each layer group, given by its fingerprint and window; and for snapshots of
    /// `state`, given by their fingerprint and the number of their blocks.
    pub(crate) fn hash(
        opened: Arc<OpenedStore>,
        tokens: Vec<u32>,
        namespace: &Namespace<'_>,
        block_size: usize,
        groups: &[(Fingerprint, Option<usize>)],
        state: Option<(Fingerprint, usize)>,
    ) -> Self {
        let keys = |&(fingerprint, window): &(Fingerprint, Option<usize>)| {
            GroupKeys::hash(
                fingerprint,
                window,
                tokens.chunks_exact(block_size),
                namespace,
            )
        };
        Self {
            groups: groups.iter().map(keys).collect(),
            state: state.map(|(fingerprint, blocks)| (keys(&(fingerprint, None)), blocks)),
            opened,
            namespace: namespace.name.to_vec(),
            tokens,
            block_size,
        }
    }

    fn len(&self) -> usize {
        self.tokens.len() / self.block_size
    }

    /// Of a prefix of `end` blocks, those from `first` on that a window sees after it; with states, at least the last
    /// one.
    fn seen(&self, window: usize, first: usize, end: usize) -> Range<usize> {
        let blocks = window.saturating_sub(1).div_ceil(self.block_size);
        let blocks = blocks.max(usize::from(self.state.is_some()));
        end.saturating_sub(blocks).max(first)..end
    }

    /// The largest end, at most `max`, up to which every layer group has the blocks that tokens after it see. Blocks
    /// before `first` need not be there.
    fn restorable_end(&self, store: &Store, first: usize, max: usize) -> usize {
        let mut end = max;
        for group in self.groups.iter().filter(|group| group.window.is_none()) {
            end = end.min(first + store.stored_blocks(&group.keys[first..end]));
        }
        let gap = |group: &GroupKeys, end| {
            let seen = self.seen(group.window?, first, end);
            seen.rev()
                .find(|&index| !store.contains(&group.keys[index]))
        };
        // The prefix ends before a gap that a window sees.
        while let Some(gap) = self.groups.iter().filter_map(|group| gap(group, end)).max() {
            end = gap;
        }
        end
    }

    /// The largest end, at most `max`, with a snapshot, up to which every layer group has the blocks that tokens after
    /// it see. Blocks before `first` need not be there; 0: there is none.
    fn last_snapshot_in(&self, store: &Store, first: usize, max: usize) -> usize {
        let Some((state, _)) = &self.state else {
            return 0;
        };
        let mut end = max;
        loop {
            let snapshots = state.keys[..end].iter();
            let Some(last) = { snapshots }.rposition(|key| store.contains(key)) else {
                return 0;
            };
            end = last + 1;
            match end {
                _ if end <= first => return end,
                _ => match self.restorable_end(store, first, end) {
                    restorable if restorable == end => return end,
                    restorable => end = restorable,
                },
            }
        }
    }

    /// The keys of a layer group, or those of snapshots behind them.
    fn keys(&self, group: usize) -> &GroupKeys {
        match &self.state {
            Some((state, _)) if group == self.groups.len() => state,
            _ => &self.groups[group],
        }
    }

    fn block(&self, index: usize, group: usize) -> Block<'_> {
        let group = self.keys(group);
        Block {
            fingerprint: group.fingerprint,
            namespace: &self.namespace,
            parent: group.parents[index],
            tokens: &self.tokens[index * self.block_size..][..self.block_size],
        }
    }

    fn group(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        let group = number("group", group)?;
        match self.check_group(group) {
            Ok(()) => Ok(group),
            Err(message) => Err(ConfigError::new_err(format!("group={group}: {message}"))),
        }
    }

    fn check_group(&self, group: usize) -> Result<(), String> {
        match self.groups.len() + usize::from(self.state.is_some()) {
            count if group < count => Ok(()),
            count => Err(format!("the prefix has fingerprints of {count} groups")),
        }
    }

    fn check_index(&self, index: usize) -> Result<(), String> {
        match self.len() {
            len if index < len => Ok(()),
            len => Err(format!("the prefix has {len} full blocks")),
        }
    }

    /// Blocks by index, group and id, each of which is in the prefix, and in the memory if it is given.
    fn moves(&self, memory: Option<&KVBlocks>, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<Move>> {
        let too_many = |count| ConfigError::new_err(format!("{count} blocks are too many"));
        items(blocks, MAX_BLOCKS, too_many, |item, at| {
            let (index, group, block) = block_of(item, at)?;
            let check = self
                .check_index(index)
                .map_err(|e| format!("index {index}: {e}"));
            let check = check.and_then(|()| {
                self.check_group(group)
                    .map_err(|e| format!("group {group}: {e}"))?;
                let Some(memory) = memory else {
                    return Ok(());
                };
                match memory.num_groups() {
                    count if group < count => memory.check_block(block),
                    count => Err(format!("group {group}: the arrays are of {count} groups")),
                }
            });
            match check {
                Ok(()) => Ok(Move {
                    index,
                    group,
                    block,
                }),
                Err(message) => Err(ConfigError::new_err(format!("blocks[{at}]: {message}"))),
            }
        })
    }
}

impl StoredPrefix {
    /// The runs of blocks that are one entry each: single blocks, and those of a snapshot. Refuses parts of a snapshot.
    fn entries<'a>(&self, moves: &'a [Move]) -> PyResult<Vec<&'a [Move]>> {
        let Some((_, blocks)) = self.state else {
            return Ok(moves.chunks(1).collect());
        };
        let of_state = self.groups.len();
        let is_one =
            |a: &Move, b: &Move| a.group == of_state && (a.index, a.group) == (b.index, b.group);
        let entries: Vec<&[Move]> = moves.chunk_by(is_one).collect();
        let is_part = |entry: &&&[Move]| entry[0].group == of_state && entry.len() != blocks;
        match entries.iter().find(is_part) {
            None => Ok(entries),
            Some(part) => Err(ConfigError::new_err(format!(
                "{} blocks of the snapshot after block {}: a snapshot has {blocks}",
                part.len(),
                part[0].index
            ))),
        }
    }

    /// Stores entries up to the first dropped one; returns the number of blocks stored.
    fn store_moves(&self, memory: &KVBlocks, moves: &[Move]) -> PyResult<usize> {
        let mut done = 0;
        for entry in self.entries(moves)? {
            let Some(store) = self.opened.store()? else {
                return Ok(done);
            };
            let rows = |it: &Move| {
                let block = it.block;
                memory.tensors(it.group).map(move |rows| rows.row(block))
            };
            let payload: Vec<_> = entry.iter().flat_map(rows).collect();
            if let Put::Dropped(_) =
                store.put(&self.block(entry[0].index, entry[0].group), &payload)
            {
                return Ok(done);
            }
            done += entry.len();
        }
        Ok(done)
    }

    /// Loads entries up to the first failure; returns the number of blocks loaded.
    fn load_moves(&self, memory: &KVBlocks, moves: &[Move]) -> PyResult<usize> {
        let mut done = 0;
        for entry in self.entries(moves)? {
            let Some(store) = self.opened.store()? else {
                return Ok(done);
            };
            let (index, group) = (entry[0].index, entry[0].group);
            let rows = |it: &Move| {
                let block = it.block;
                memory.tensors(group).map(move |rows| rows.row_mut(block))
            };
            let mut payload: Vec<_> = entry.iter().flat_map(rows).collect();
            match store.get(&self.block(index, group), &mut payload) {
                Ok(Get::Hit) => {}
                Ok(Get::Miss | Get::Failed) => return Ok(done),
                Err(error) => {
                    let message = format!("block {index} of group {group}: {error}");
                    return Err(StoreError::new_err(message));
                }
            }
            done += entry.len();
        }
        Ok(done)
    }
}

#[pymethods]
impl StoredPrefix {
    /// Number of full blocks of the prompt.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.len()
    }

    /// The number of blocks of tokens from index `first` on, at most `most`, that can be restored: every layer group has
    /// them, or with a window those that a token after them sees. With `group`, the number of consecutive blocks that
    /// this layer group has, whatever its window. It only looks up keys in memory; `load` verifies each block.
    #[pyo3(signature = (first = None, group = None, *, most = None))]
    fn stored_blocks(
        &self,
        py: Python<'_>,
        first: Option<&Bound<'_, PyAny>>,
        group: Option<&Bound<'_, PyAny>>,
        most: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let first = first.map_or(Ok(0), |first| number("first", first))?;
        let group = group.map(|group| self.group(group)).transpose()?;
        let max = most.map_or(Ok(usize::MAX), |most| number("most", most))?;
        let len = self.len();
        if first > len {
            let message = format!("first={first}: the prefix has {len} full blocks");
            return Err(ConfigError::new_err(message));
        }
        let end = first.saturating_add(max).min(len);
        py.detach(|| {
            let Some(store) = self.opened.store()? else {
                return Ok(0);
            };
            Ok(match group {
                Some(group) => store.stored_blocks(&self.keys(group).keys[first..end]),
                None => self.restorable_end(&store, first, end) - first,
            })
        })
    }

    /// For a model with states, the number of blocks of the longest prefix, at most `end`, that has a snapshot and whose
    /// blocks from index `first` on can be restored. It may end before `first`: then only the snapshot is missing. 0
    /// without one. It only looks up keys in memory.
    fn last_snapshot(
        &self,
        py: Python<'_>,
        first: &Bound<'_, PyAny>,
        end: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let (first, end): (usize, usize) = (number("first", first)?, number("end", end)?);
        py.detach(|| {
            let store = self.opened.store()?;
            let end = end.min(self.len());
            Ok(store.map_or(0, |store| self.last_snapshot_in(&store, first, end)))
        })
    }

    /// For each layer group, the number of blocks from index `first` on that a sequence needs after the first `end`
    /// blocks: all, or with a window those that a token after them sees.
    fn needed_blocks(
        &self,
        first: &Bound<'_, PyAny>,
        end: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<usize>> {
        let (first, end) = (number("first", first)?, number("end", end)?);
        if first > end || end > self.len() {
            let message = format!(
                "first={first}, end={end}: the prefix has {} full blocks",
                self.len()
            );
            return Err(ConfigError::new_err(message));
        }
        let needed = |group: &GroupKeys| {
            let all = first..end;
            group
                .window
                .map_or(all, |window| self.seen(window, first, end))
                .len()
        };
        Ok(self.groups.iter().map(needed).collect())
    }

    /// True if the block at `index` is stored for a layer group.
    #[pyo3(signature = (index, group = None))]
    fn contains(
        &self,
        py: Python<'_>,
        index: &Bound<'_, PyAny>,
        group: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let index = number("index", index)?;
        self.check_index(index)
            .map_err(|message| ConfigError::new_err(format!("index={index}: {message}")))?;
        let group = group.map_or(Ok(0), |group| self.group(group))?;
        let key = &self.keys(group).keys[index];
        py.detach(|| {
            let store = self.opened.store()?;
            Ok(store.is_some_and(|store| store.contains(key)))
        })
    }

    /// Those of the blocks, given as to `store`, that are neither stored nor queued. Each of the others counts as used.
    fn missing<'py>(
        &self,
        py: Python<'py>,
        blocks: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut moves = self.moves(None, blocks)?;
        let missing = py.detach(|| {
            if let Some(store) = self.opened.store()? {
                moves.retain(|it| !store.touch(&self.keys(it.group).keys[it.index]));
            }
            Ok::<_, PyErr>(moves)
        })?;
        bounded::list(py, missing, |done| Ok(done.tuple()))
    }

    /// Stores blocks of a pool, given as (index in the prefix, layer group, block id), as in `Transfer.blocks`. It
    /// copies the payloads into the queue of the store, and never waits for the disk.
    ///
    /// Returns those of the blocks, from the front, that are queued or already stored: it stops at the first block that
    /// the store drops. Meanwhile the caller must hold the blocks with a pin, so that no other thread writes to them.
    fn store<'py>(
        &self,
        py: Python<'py>,
        memory: &KVBlocks,
        blocks: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut moves = self.moves(Some(memory), blocks)?;
        let stored = py.detach(|| self.store_moves(memory, &moves))?;
        moves.truncate(stored);
        bounded::list(py, moves, |done| Ok(done.tuple()))
    }

    /// Loads blocks into a pool, given as (index in the prefix, layer group, block id), as in `Transfer.blocks`.
    ///
    /// Returns those of the blocks, from the front, that now hold exactly the stored bytes, as `Transfer.complete` takes
    /// them: it stops at the first block that is missing or damaged, or if the disk fails. Ignore the bytes of the other
    /// blocks. Meanwhile the caller must hold the blocks with a `Transfer`, so that no other thread reads or writes them.
    ///
    /// Raises `StoreError` for a stored block of another length, which means that the fingerprint lacks a part of
    /// the layout. The blocks before it have then been loaded.
    fn load<'py>(
        &self,
        py: Python<'py>,
        memory: &KVBlocks,
        blocks: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut moves = self.moves(Some(memory), blocks)?;
        let loaded = py.detach(|| self.load_moves(memory, &moves))?;
        moves.truncate(loaded);
        bounded::list(py, moves, |done| Ok(done.tuple()))
    }

    fn __repr__(&self) -> String {
        let (blocks, groups) = (self.len(), self.groups.len());
        format!("<StoredPrefix of {blocks} blocks, {groups} layer groups>")
    }
}

/// An item of a list of blocks: index in the prefix, layer group, block id.
pub(crate) fn block_of<'py, T>(item: &Bound<'py, PyAny>, at: usize) -> PyResult<(usize, usize, T)>
where
    T: FromPyObjectOwned<'py>,
{
    item.extract().map_err(|error| not_a_block(item, at, error))
}

#[cold]
fn not_a_block(item: &Bound<'_, PyAny>, at: usize, error: PyErr) -> PyErr {
    let py = item.py();
    let is_of_this = error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py) // a tuple of another length
        || error.is_instance_of::<PyOverflowError>(py);
    if !is_of_this {
        return error;
    }
    let shown = match in_words(item) {
        Ok(shown) => shown,
        Err(error) => return error,
    };
    let refused = ConfigError::new_err(format!(
        "blocks[{at}]={shown} is not (index in the prefix, layer group, block id)"
    ));
    refused.set_cause(py, Some(error));
    refused
}
