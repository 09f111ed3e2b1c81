//! Unsafe code: the memory of a Python buffer as a slice.

use cpu_kernels::Rows;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};

/// The elements of a C-contiguous buffer, to be read while the GIL is released.
///
/// The caller of the Python function promises that no thread writes to the array meanwhile.
#[allow(unsafe_code)]
pub(crate) fn shared_slice<T: Element>(buffer: &PyBuffer<T>) -> &[T] {
    assert!(buffer.is_c_contiguous(), "looked at when it came in");
    match buffer.item_count() {
        0 => &[], // an empty array may have no memory
        // SAFETY: `PyBuffer<T>` has checked format, size and alignment; the memory stays in place
        // while the buffer is held; all bits are a `T`; no thread writes (see above).
        count => unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), count) },
    }
}

/// The rows of a buffer `[T, size]` or `[T, heads, dim]`, to be read likewise: elements of a row lie side by side, rows
/// anywhere after one another. `None`: they do not.
#[allow(unsafe_code)]
pub(crate) fn shared_rows<T: Element>(buffer: &PyBuffer<T>) -> Option<Rows<'_, T>> {
    let (&count, sizes) = buffer.shape().split_first()?;
    let mut width = 1usize;
    for &size in sizes {
        width = width.checked_mul(size)?;
    }
    if count == 0 || width == 0 {
        return Rows::new(&[], count, width, width).ok();
    }
    let (size, strides) = (size_of::<T>(), buffer.strides());
    let stride = match count {
        1 => width,
        _ => usize::try_from(strides[0]).ok()? / size,
    };
    if stride < width || (count > 1 && usize::try_from(strides[0]) != Ok(stride * size)) {
        return None;
    }
    let mut dense = size;
    for (&size, &stride) in sizes.iter().zip(&strides[1..]).rev() {
        if size != 1 && usize::try_from(stride) != Ok(dense) {
            return None;
        }
        dense *= size;
    }
    let length = stride.checked_mul(count - 1)?.checked_add(width)?;
    // SAFETY: as in `shared_slice`; by the strides, the memory from the first element to the last belongs to the
    // exporter's memory.
    let memory = unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), length) };
    Rows::new(memory, count, width, stride).ok()
}

/// The elements of a writable C-contiguous buffer, to be written while the GIL is released.
///
/// The caller of the Python function promises that no other thread reads or writes the array meanwhile.
#[allow(unsafe_code)]
pub(crate) fn unique_slice<T: Element>(buffer: &mut PyBuffer<T>) -> &mut [T] {
    assert!(
        buffer.is_c_contiguous() && !buffer.readonly(),
        "looked at when it came in"
    );
    match buffer.item_count() {
        0 => &mut [],
        // SAFETY: as in `shared_slice`, and no other thread reads either.
        count => unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast(), count) },
    }
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
