//! Threads of an OpenMP runtime that another library has loaded.
//!
//! Its threads spin for a while after each parallel region. A separate pool would compete with them for the
//! processors.

use std::ffi::{c_int, c_uint, c_void};
use std::path::Path;

use libloading::Library;

/// `GOMP_parallel` of GCC's runtime, which LLVM's has too: calls a function in every thread of a team.
type Parallel =
    unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// `omp_get_max_threads`: as many threads as the calling thread may compute with now.
type MaxThreads = unsafe extern "C" fn() -> c_int;

#[derive(Debug)]
pub(crate) struct OpenMp {
    parallel: Parallel,
    max_threads: MaxThreads,
    _library: Library,
}

impl OpenMp {
    /// The runtime in this file. One that is loaded already is the same one.
    pub(crate) fn load(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: an OpenMP runtime may be initialised at any time; the functions have these types in both.
        unsafe {
            let library = Library::new(path)?;
            let parallel = *library.get::<Parallel>(b"GOMP_parallel\0")?;
            let max_threads = *library.get::<MaxThreads>(b"omp_get_max_threads\0")?;
            Ok(Self {
                parallel,
                max_threads,
                _library: library,
            })
        }
    }

    /// As many threads as the calling thread may have: fewer where it has limited the runtime (`omp_set_num_threads`).
    pub(crate) fn max_threads(&self) -> usize {
        // SAFETY: it has no arguments, and reads a setting of this thread.
        usize::try_from(unsafe { (self.max_threads)() }).map_or(1, |max| max.max(1))
    }

    /// Calls `work` in so many threads, the caller's among them, and waits for all.
    pub(crate) fn run<F: Fn() + Sync>(&self, num_threads: usize, work: &F) {
        /// A panic ends the process, as it may not cross the runtime.
        unsafe extern "C" fn call<F: Fn() + Sync>(work: *mut c_void) {
            // SAFETY: it is the `work` below, which outlives the team.
            let work = unsafe { &*work.cast::<F>() };
            work();
        }
        let num_threads = c_uint::try_from(num_threads).unwrap_or(c_uint::MAX);
        let work = std::ptr::from_ref(work).cast_mut().cast();
        // SAFETY: `call` is given what it expects, which may be shared among threads.
        unsafe {
            (self.parallel)(call::<F>, work, num_threads, 0);
        }
    }
}
