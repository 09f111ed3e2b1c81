//! `KVBlocks`: the memory of a pool's blocks, as a store reads and writes it.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use crate::errors::{BufferError, ConfigError, no_buffer};
use crate::exported::kept_buffer_of;
use crate::items::items;
use crate::memory::BlockRows;
use crate::numbers::number;

/// More tensors, groups and layers than any model has.
const MAX_ITEMS: usize = 1 << 20;

/// The memory of a pool's blocks: writable, C-contiguous arrays whose first dimension is the block id.
///
/// `groups[g]` lists the tensors with the layers of layer group `g`, by their indices in `tensors`. The payload of
/// a block is its row in each of them, in that order. Elements are numbers of any type; pass bfloat16 as uint16 or
/// uint8. All tensors have the same number of blocks. Groups may share tensors.
///
/// Raises `BufferError` for an array that is read-only, not contiguous, empty or not of numbers, has another number of
/// blocks than the others, or shares memory with one of them. Also raises it for a group that names a tensor twice or
/// one that does not exist.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct KVBlocks {
    tensors: Vec<BlockRows>,
    groups: Vec<Vec<usize>>,
}

impl KVBlocks {
    /// The tensors of a group.
    pub(crate) fn tensors(&self, group: usize) -> impl Iterator<Item = &BlockRows> {
        self.groups[group].iter().map(|&at| &self.tensors[at])
    }

    pub(crate) fn num_groups(&self) -> usize {
        self.groups.len()
    }

    fn len(&self) -> usize {
        self.tensors[0].num_blocks()
    }

    /// The error for a missing block.
    pub(crate) fn check_block(&self, block: usize) -> Result<(), String> {
        match self.len() {
            len if block < len => Ok(()),
            len => Err(format!("block {block} is not there: the arrays have {len}")),
        }
    }
}

#[pymethods]
impl KVBlocks {
    #[new]
    fn new(tensors: &Bound<'_, PyAny>, groups: &Bound<'_, PyAny>) -> PyResult<Self> {
        let refuse_many = |count| BufferError::new_err(format!("{count} are too many"));
        let tensors = items(tensors, MAX_ITEMS, refuse_many, tensor)?;
        let group = |group: &Bound<'_, PyAny>, at: usize| {
            let name = format!("an index in groups[{at}]");
            items(group, MAX_ITEMS, refuse_many, |index, _| {
                number(&name, index)
            })
        };
        let groups = items(groups, MAX_ITEMS, refuse_many, group)?;
        check_tensors(&tensors)?;
        check_groups(&groups, tensors.len())?;
        Ok(Self { tensors, groups })
    }

    /// Number of blocks in each array.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.len()
    }

    /// Size of a block's payload in a layer group, in bytes.
    fn block_bytes(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        let group = number("group", group)?;
        if group < self.groups.len() {
            return Ok(self.tensors(group).map(BlockRows::row_bytes).sum());
        }
        let count = self.groups.len();
        let message = format!("group={group}: there are {count} layer groups");
        Err(ConfigError::new_err(message))
    }

    fn __repr__(&self) -> String {
        let (blocks, tensors, groups) = (self.len(), self.tensors.len(), self.groups.len());
        format!("<KVBlocks, {blocks} blocks in {tensors} arrays of {groups} layer groups>")
    }
}

fn tensor(object: &Bound<'_, PyAny>, at: usize) -> PyResult<BlockRows> {
    let name = format!("tensors[{at}]");
    let refuse = |what: &str| Err(BufferError::new_err(format!("array {name} {what}")));
    let buffer =
        kept_buffer_of(object).map_err(|error| no_buffer(object.py(), &name, error.into()))?;
    if !is_of_numbers(&buffer) {
        let format = buffer.format().to_string_lossy();
        return refuse(&format!("has format {format:?}: blocks are of numbers"));
    }
    if buffer.readonly() {
        return refuse("is read-only");
    }
    if !buffer.is_c_contiguous() {
        return refuse("is not contiguous in C order");
    }
    BlockRows::over(buffer).map_or_else(|| refuse("has no blocks, or blocks of no bytes"), Ok)
}

/// Whether a buffer's elements are integers, floats or complex numbers of either byte order. Whatever else has bytes may
/// not be overwritten by those of a file: objects and pointers, and records and texts, which may hold them.
fn is_of_numbers(buffer: &PyUntypedBuffer) -> bool {
    let kind = match buffer.format().to_bytes() {
        [b'@' | b'=' | b'<' | b'>' | b'!', kind @ ..] => kind,
        kind => kind,
    };
    match kind {
        [b'Z', float] => b"fdg".contains(float),
        [number] => b"bBhHiIlLqQnNefdg".contains(number),
        _ => false,
    }
}

fn check_tensors(tensors: &[BlockRows]) -> PyResult<()> {
    let Some(first) = tensors.first() else {
        return Err(BufferError::new_err("tensors has no arrays"));
    };
    for (at, tensor) in tensors.iter().enumerate() {
        let (given, expected) = (tensor.num_blocks(), first.num_blocks());
        if given != expected {
            return Err(BufferError::new_err(format!(
                "array tensors[{at}] has {given} blocks, tensors[0] has {expected}"
            )));
        }
        let addresses = tensor.addresses();
        let overlaps = |other: &BlockRows| {
            let other = other.addresses();
            addresses.start.max(other.start) < addresses.end.min(other.end)
        };
        if let Some(other) = tensors[..at].iter().position(overlaps) {
            return Err(BufferError::new_err(format!(
                "arrays tensors[{other}] and tensors[{at}] share memory"
            )));
        }
    }
    Ok(())
}

fn check_groups(groups: &[Vec<usize>], num_tensors: usize) -> PyResult<()> {
    let refuse = |what: String| Err(BufferError::new_err(what));
    if groups.is_empty() {
        return refuse("groups has no layer group".into());
    }
    for (at, group) in groups.iter().enumerate() {
        if group.is_empty() {
            return refuse(format!("groups[{at}] has no tensor"));
        }
        for (position, index) in group.iter().enumerate() {
            if *index >= num_tensors {
                return refuse(format!(
                    "groups[{at}] names tensor {index}: there are {num_tensors}"
                ));
            }
            if group[..position].contains(index) {
                return refuse(format!("groups[{at}] names tensor {index} twice"));
            }
        }
    }
    Ok(())
}
