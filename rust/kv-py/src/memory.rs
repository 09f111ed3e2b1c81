//! Unsafe code: the memory of a Python buffer as a slice.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI8, AtomicI16, AtomicU8, AtomicU16, AtomicU32, AtomicU64};

use kv_core::{SharedI32, SharedI64};
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// An integer that Python's arrays hold, and the type by which its memory is shared with other threads.
pub(crate) trait SharedInt: Element {
    /// Of the same size and alignment; every access is atomic.
    type Shared;

    /// The value of an element now.
    fn read(element: &Self::Shared) -> Self;
}

macro_rules! shared_ints {
    ($($int:ty: $shared:ty, |$element:ident| $value:expr;)*) => {
        $(
            impl SharedInt for $int {
                type Shared = $shared;

                #[inline]
                fn read($element: &$shared) -> Self {
                    $value
                }
            }

            const _: () = assert!(
                size_of::<$int>() == size_of::<$shared>() && align_of::<$int>() == align_of::<$shared>()
            );
        )*
    };
}

shared_ints! {
    i64: SharedI64, |element| element.get();
    i32: SharedI32, |element| element.get();
    u64: AtomicU64, |element| element.load(Relaxed);
    u32: AtomicU32, |element| element.load(Relaxed);
    u16: AtomicU16, |element| element.load(Relaxed);
    i16: AtomicI16, |element| element.load(Relaxed);
    u8: AtomicU8, |element| element.load(Relaxed);
    i8: AtomicI8, |element| element.load(Relaxed);
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
        // SAFETY: `PyBuffer<T>` has checked format, size and alignment of `T`, which `T::Shared` has too (see
        // above); the exporter keeps the memory in place while the buffer is held; integers have no invalid
        // values. Accesses of other threads are atomic if they come through here, else (NumPy) one machine
        // instruction an element.
        count => Some(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), count) }),
    }
}

/// Copies elements that other threads may write meanwhile: what they write may be in the copy, in part.
pub(crate) fn copy_shared<T: SharedInt>(from: &[T::Shared], to: &mut [T]) {
    let from = &from[..to.len()];
    let done = copy_blocks::<T>(from, to);
    for (to, from) in to.iter_mut().zip(from).skip(done) {
        *to = T::read(from);
    }
}

/// Copies blocks of 64 bytes; returns how many elements that were. In instructions that the compiler cannot look
/// into: it would take atomic accesses one by one, and must not see others where threads write.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
fn copy_blocks<T: SharedInt>(from: &[T::Shared], to: &mut [T]) -> usize {
    const BLOCK: usize = 64;
    let blocks = size_of_val(to).min(size_of_val(from)) / BLOCK;
    if blocks == 0 {
        return 0;
    }
    // SAFETY: both have so many blocks; `from` may be read at any time, and all bits are a `T`. Every x86-64 has
    // these instructions.
    unsafe {
        std::arch::asm!(
            "2:",
            "movdqu {a}, [{from}]",
            "movdqu {b}, [{from} + 16]",
            "movdqu {c}, [{from} + 32]",
            "movdqu {d}, [{from} + 48]",
            "movdqu [{to}], {a}",
            "movdqu [{to} + 16], {b}",
            "movdqu [{to} + 32], {c}",
            "movdqu [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "dec {blocks}",
            "jnz 2b",
            from = inout(reg) from.as_ptr().cast::<u8>() => _,
            to = inout(reg) to.as_mut_ptr().cast::<u8>() => _,
            blocks = inout(reg) blocks => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
    blocks * BLOCK / size_of::<T>()
}

/// Appends the lower halves of 64-bit elements that other threads may write meanwhile, as many as there are whole
/// blocks of eight, and returns their higher halves in one; `None` if the machine has no AVX2.
///
/// One pass in assembly: the compiler would take atomic accesses one by one, and must not read an element twice.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
pub(crate) fn append_low_halves<T: SharedInt>(
    from: &[T::Shared],
    to: &mut Vec<u32>,
) -> Option<u64> {
    const BLOCK: usize = 8;
    let blocks = from.len() / BLOCK;
    if size_of::<T>() != 8 || blocks == 0 || !is_x86_feature_detected!("avx2") {
        return None;
    }
    to.reserve(blocks * BLOCK);
    let mut all = [0u64; 4];
    // SAFETY: `from` has so many blocks, which may be read at any time, and `to` has space for as many elements, all
    // of which are written. The machine has AVX2.
    unsafe {
        std::arch::asm!(
            "vpxor ymm3, ymm3, ymm3",
            "2:",
            "vmovdqu ymm0, [{from}]",
            "vmovdqu ymm1, [{from} + 32]",
            "vpor ymm3, ymm3, ymm0",
            "vpor ymm3, ymm3, ymm1",
            "vshufps ymm0, ymm0, ymm1, 0x88", // lower halves of 0, 1, 4, 5, 2, 3, 6, 7
            "vpermq ymm0, ymm0, 0xd8",
            "vmovdqu [{to}], ymm0",
            "add {from}, 64",
            "add {to}, 32",
            "dec {blocks}",
            "jnz 2b",
            "vmovdqu [{all}], ymm3",
            "vzeroupper",
            from = inout(reg) from.as_ptr().cast::<u8>() => _,
            to = inout(reg) to.as_mut_ptr().add(to.len()).cast::<u8>() => _,
            blocks = inout(reg) blocks => _,
            all = in(reg) all.as_mut_ptr(),
            out("ymm0") _,
            out("ymm1") _,
            out("ymm3") _,
            options(nostack),
        );
        to.set_len(to.len() + blocks * BLOCK);
    }
    Some(all.into_iter().fold(0, |all, each| all | each) >> 32)
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn append_low_halves<T: SharedInt>(_: &[T::Shared], _: &mut Vec<u32>) -> Option<u64> {
    None
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_blocks<T: SharedInt>(_: &[T::Shared], _: &mut [T]) -> usize {
    0
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
        // SAFETY: the row lies in the buffer (see `start`), whose memory stays in place while the buffer is held; all
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
