//! Memory of weights, side by side in large pages.
//!
//! A product of a few rows reads each weight once, so misses in the TLB cost it most, and a processor reads ahead no further
//! than a page. Weights of one or two MiB on their own would mostly lie in pages of 4 KiB: one of 2 MiB has to begin at a
//! multiple of its size.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::Error;

/// Bytes of a line of the processor's cache.
const LINE: usize = 64;

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;

/// Bytes of a chunk, which several weights share. Pages without writes take no memory.
const CHUNK: usize = 64 << 20;

/// Elements aligned to a cache line.
#[derive(Debug)]
pub(crate) struct WeightMemory<T> {
    chunk: Arc<Chunk>,
    first: usize,
    count: usize,
    elements: PhantomData<T>,
}

/// The memory of several weights, until the last of them is dropped.
#[derive(Debug)]
struct Chunk {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is memory alone, which weights divide among them.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

/// The chunk that the next weight lies in, and the bytes of it that are taken.
static LAST: Mutex<(Weak<Chunk>, usize)> = Mutex::new((Weak::new(), 0));

/// A number that is 0 where all its bytes are, and has no other bytes that are none.
pub(crate) trait Number: Copy {}

impl Number for u8 {}
impl Number for u32 {}
impl Number for f32 {}

impl<T: Number> WeightMemory<T> {
    /// This number of zeros, in a chunk shared with other weights.
    pub(crate) fn zeros(count: usize) -> Result<Self, Error> {
        let size = bytes_of::<T>(count);
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |chunk: &Arc<Chunk>| chunk.layout.size() - last.1 >= size;
        let (chunk, first) = match last.0.upgrade().filter(fits) {
            Some(chunk) => (chunk, last.1),
            None => {
                let own = size.next_multiple_of(LARGE_PAGE);
                let chunk = Chunk::new(own.max(CHUNK), LARGE_PAGE)
                    .or_else(|| Chunk::new(own, LARGE_PAGE))
                    .ok_or(Error::OutOfMemory { bytes: own })?;
                (Arc::new(chunk), 0)
            }
        };
        *last = (Arc::downgrade(&chunk), first + size);
        drop(last);
        Ok(Self::zeroed(chunk, first, count))
    }

    /// This number of zeros, in their own allocation.
    pub(crate) fn alone(count: usize) -> Self {
        let size = bytes_of::<T>(count).max(LINE);
        let chunk = Chunk::new(size, LINE).unwrap_or_else(|| {
            handle_alloc_error(Layout::from_size_align(size, LINE).unwrap_or(Layout::new::<T>()))
        });
        Self::zeroed(Arc::new(chunk), 0, count)
    }

    fn zeroed(chunk: Arc<Chunk>, first: usize, count: usize) -> Self {
        let mut memory = Self {
            chunk,
            first,
            count,
            elements: PhantomData,
        };
        // SAFETY: the place is this one's alone; zeros are elements.
        unsafe { memory.as_mut_ptr().write_bytes(0, count) };
        memory
    }
}

impl<T> WeightMemory<T> {
    fn as_mut_ptr(&mut self) -> *mut T {
        // SAFETY: `first` is within the chunk.
        unsafe { self.chunk.memory.as_ptr().add(self.first).cast() }
    }

    pub(crate) fn elements(&self) -> &[T] {
        // SAFETY: so many elements were written there, and whoever changes them has this one alone.
        unsafe {
            let first = self.chunk.memory.as_ptr().add(self.first);
            std::slice::from_raw_parts(first.cast(), self.count)
        }
    }

    pub(crate) fn elements_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; no other weight has a part of them.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.count) }
    }
}

/// Whole cache lines.
fn bytes_of<T>(count: usize) -> usize {
    let bytes = count.saturating_mul(size_of::<T>());
    bytes.min(isize::MAX as usize / 2).next_multiple_of(LINE)
}

impl Chunk {
    /// None if there is no such memory.
    fn new(size: usize, align: usize) -> Option<Self> {
        let layout = Layout::from_size_align(size, align).ok()?;
        // SAFETY: the size is not 0.
        let memory = NonNull::new(unsafe { alloc(layout) })?;
        #[cfg(target_os = "linux")]
        if align == LARGE_PAGE {
            // SAFETY: whole pages that we have alone; the advice changes no byte of them. Without such pages it fails, and
            // nothing is lost.
            unsafe { libc::madvise(memory.as_ptr().cast(), size, libc::MADV_HUGEPAGE) };
        }
        Some(Self { memory, layout })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: it is from `alloc` with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_lie_side_by_side_and_begin_lines() {
        let mut first = WeightMemory::<f32>::zeros(5).expect("memory");
        let mut second = WeightMemory::<u8>::zeros(70).expect("memory");
        let alone = WeightMemory::<u32>::alone(0);
        assert!(alone.elements().is_empty());
        first.elements_mut().fill(1.0);
        second.elements_mut().fill(2);
        assert_eq!(first.elements(), [1.0; 5]);
        assert_eq!(second.elements(), [2; 70]);
        let addresses = [
            first.elements().as_ptr().addr(),
            second.elements().as_ptr().addr(),
        ];
        assert!(addresses.iter().all(|address| address.is_multiple_of(LINE)));
    }

    #[test]
    fn a_weight_larger_than_a_chunk_has_its_own_and_the_memory_of_a_dropped_one_is_zero_again() {
        let mut large = WeightMemory::<u8>::zeros(CHUNK + 1).expect("memory");
        *large.elements_mut().last_mut().expect("there are some") = 7;
        drop(large);
        let again = WeightMemory::<u8>::zeros(CHUNK + 1).expect("memory");
        assert!(again.elements().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn memory_that_no_machine_has_is_an_error_and_the_next_weight_has_its_place() {
        let result = WeightMemory::<f32>::zeros(usize::MAX).map(|_| ());
        assert!(matches!(result, Err(Error::OutOfMemory { bytes }) if bytes > 1 << 60));
        assert_eq!(
            WeightMemory::<u8>::zeros(3).expect("memory").elements(),
            [0; 3]
        );
    }
}
