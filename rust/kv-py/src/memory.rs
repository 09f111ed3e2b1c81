//! Unsafe code: the memory of a Python buffer as a slice.

use std::sync::atomic::Ordering::Acquire;
use std::sync::atomic::compiler_fence;

use kv_core::{SharedI32, SharedI64};
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// An integer of step arrays, and the type by which its memory is shared with other threads.
pub(crate) trait SharedInt: Element {
    /// Of the same size and alignment; every access is atomic.
    type Shared;
}

impl SharedInt for i32 {
    type Shared = SharedI32;
}

impl SharedInt for i64 {
    type Shared = SharedI64;
}

/// The elements of a C-contiguous buffer; `None` for one that is not.
///
/// Other threads may read and write the array meanwhile, with or without an interpreter's lock: every access is
/// atomic, so they see old values and new ones.
#[allow(unsafe_code)]
pub(crate) fn elements<T: SharedInt>(buffer: &PyBuffer<T>) -> Option<&[T::Shared]> {
    if !buffer.is_c_contiguous() {
        return None;
    }
    match buffer.item_count() {
        0 => Some(&[]), // an empty array may have no memory
        // SAFETY: `PyBuffer<T>` has checked format, size and alignment of `T`, which `T::Shared` has too; the exporter
        // keeps the memory in place while the buffer is held; integers have no invalid values. Accesses of other
        // threads are atomic if they come through here, else (NumPy) one machine instruction an element.
        count => Some(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), count) }),
    }
}

/// Copies elements of a C-contiguous buffer, from number `first` on, to all of `to`. If another thread writes to them
/// meanwhile, the copy has old and new values, or parts of both.
#[allow(unsafe_code)]
pub(crate) fn copy_elements<T: Element>(buffer: &PyBuffer<T>, first: usize, to: &mut [T]) {
    assert!(buffer.is_c_contiguous() && first + to.len() <= buffer.item_count());
    let from = buffer.buf_ptr().cast::<T>().wrapping_add(first);
    // SAFETY: the buffer has these elements, and `to` is no part of it; all bits are a `T`. Writes of other threads are
    // races, as they are in NumPy. Nothing depends on the values during the copy, and the fence keeps the compiler from
    // reading the buffer again in place of the copy.
    unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
    compiler_fence(Acquire);
}

/// The memory of blocks: a writable C-contiguous buffer whose first dimension is the block id.
pub(crate) struct BlockRows {
    buffer: PyUntypedBuffer,
    num_blocks: usize,
    row_bytes: usize,
}

impl BlockRows {
    /// `None` for a buffer that is read-only, not contiguous or empty.
    pub(crate) fn over(buffer: PyUntypedBuffer) -> Option<Self> {
        let is_fit = buffer.is_c_contiguous() && !buffer.readonly() && buffer.len_bytes() > 0;
        let num_blocks = *buffer.shape().first().filter(|_| is_fit)?;
        let row_bytes = buffer.len_bytes() / num_blocks;
        Some(Self {
            buffer,
            num_blocks,
            row_bytes,
        })
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The addresses of all rows.
    pub(crate) fn addresses(&self) -> std::ops::Range<usize> {
        let start = self.buffer.buf_ptr() as usize;
        start..start + self.num_blocks * self.row_bytes
    }

    /// The bytes of a block, to be read while the GIL is released.
    ///
    /// The caller of the Python function promises that no thread writes to this block meanwhile.
    #[allow(unsafe_code)]
    pub(crate) fn row(&self, block: usize) -> &[u8] {
        let start = self.start(block);
        // SAFETY: the row is in the buffer (see `start`), whose memory stays in place while the buffer is held; all
        // bits are a `u8`; no thread writes to it (see above). Attention over the same array, in another thread,
        // reads and writes other blocks.
        unsafe { std::slice::from_raw_parts(start, self.row_bytes) }
    }

    /// The bytes of a block, to be written while the GIL is released. One at a time: rows of one block that are in
    /// use must be of different buffers, none of which overlap.
    ///
    /// The caller of the Python function promises that no other thread reads or writes this block meanwhile.
    #[allow(unsafe_code, clippy::mut_from_ref)]
    pub(crate) fn row_mut(&self, block: usize) -> &mut [u8] {
        let start = self.start(block);
        // SAFETY: as in `row`, and no other thread reads either; the buffer is writable.
        unsafe { std::slice::from_raw_parts_mut(start, self.row_bytes) }
    }

    #[allow(unsafe_code)]
    fn start(&self, block: usize) -> *mut u8 {
        assert!(block < self.num_blocks, "looked at when it came in");
        let start = self.buffer.buf_ptr().cast::<u8>();
        // SAFETY: the buffer is contiguous and has `num_blocks` times `row_bytes` bytes.
        unsafe { start.add(block * self.row_bytes) }
    }
}

/// New `bytes` of this length, which `fill` fills without the GIL.
#[allow(unsafe_code)]
pub(crate) fn bytes_filled_by(
    py: Python<'_>,
    count: usize,
    fill: impl FnOnce(&mut [u8]) + Send,
) -> PyResult<Bound<'_, PyBytes>> {
    let size = count as ffi::Py_ssize_t;
    // SAFETY: this thread is attached to the interpreter; the object is new, or null with an error set.
    let object = unsafe {
        let object = ffi::PyBytes_FromStringAndSize(std::ptr::null(), size);
        Bound::from_owned_ptr_or_err(py, object)?
    };
    let bytes = object.cast_into::<PyBytes>()?;
    // SAFETY: no other thread has the object yet, so its memory, of `count` bytes, may be written to. What is not
    // written yet is not read: `MaybeUninit` would say so, but a `u8` of any bits is one, and `fill` writes all.
    let memory = unsafe {
        let start = ffi::PyBytes_AsString(bytes.as_ptr()).cast::<u8>();
        std::slice::from_raw_parts_mut(start, count)
    };
    py.detach(|| fill(memory));
    Ok(bytes)
}

/// Whether a buffer's elements are spelt in the other byte order. PyO3 0.30 takes `>` for native.
pub(crate) fn is_swapped(buffer: &PyUntypedBuffer) -> bool {
    let swapped: &[u8] = if cfg!(target_endian = "little") {
        b">!"
    } else {
        b"<"
    };
    let order = buffer.format().to_bytes().first();
    order.is_some_and(|order| swapped.contains(order))
}
