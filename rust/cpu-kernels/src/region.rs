//! Parallel regions: the caller opens one, other threads take part in it, and the caller closes it.

use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread::yield_now,
};
#[cfg(not(loom))]
use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread::yield_now,
};

/// Looks at the state before the caller lets other threads run: on its own processor may be the one that it waits for.
#[cfg(not(loom))]
const PATIENCE: usize = 512;

/// Maximum number of threads beside the caller's.
pub(crate) const MAX_THREADS: usize = (1 << 15) - 1;

const ACTIVE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const LIMIT_SHIFT: u32 = 17;
const NUMBER_SHIFT: u32 = 32;

/// The number of the region, how many threads it is for, whether threads may still begin it, and how many are in it.
#[derive(Clone, Copy)]
struct State(u64);

impl State {
    fn number(self) -> u64 {
        self.0 >> NUMBER_SHIFT
    }

    /// True if the thread of this index may enter the region.
    fn admits(self, index: usize) -> bool {
        let limit = self.0 >> LIMIT_SHIFT & MAX_THREADS as u64;
        self.0 & OPEN != 0 && (index as u64) < limit
    }

    /// The next region, open for this number of threads.
    fn next(self, limit: usize) -> Self {
        let number = self.number().wrapping_add(1) & 0xffff_ffff;
        Self(number << NUMBER_SHIFT | (limit as u64) << LIMIT_SHIFT | OPEN)
    }

    fn is_empty(self) -> bool {
        self.0 & ACTIVE == 0
    }
}

/// A closure without its type and lifetime.
#[derive(Clone, Copy)]
struct Work {
    data: *const (),
    call: unsafe fn(*const ()),
}

/// The regions of a pool, one at a time.
pub(crate) struct Regions {
    state: AtomicU64,
    work: UnsafeCell<Work>,
    has_panicked: AtomicBool,
}

// SAFETY: `work` is written by the only caller while no thread is in a region, and read by threads in it.
unsafe impl Sync for Regions {}
// SAFETY: as above; what `work` points to is `Sync`.
unsafe impl Send for Regions {}

impl std::fmt::Debug for Regions {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Regions").finish_non_exhaustive()
    }
}

impl Regions {
    pub(crate) fn new() -> Self {
        fn nothing(_: *const ()) {}
        Self {
            state: AtomicU64::new(0),
            work: UnsafeCell::new(Work {
                data: std::ptr::null(),
                call: nothing,
            }),
            has_panicked: AtomicBool::new(false),
        }
    }

    /// The number of the newest region.
    pub(crate) fn number(&self) -> u64 {
        State(self.state.load(Ordering::SeqCst)).number()
    }

    /// Opens a region for threads whose index is below `limit`.
    ///
    /// # Safety
    ///
    /// One caller at a time, whose last region is closed. `work` lives until the region is dropped, and it is dropped.
    pub(crate) unsafe fn open<F: Fn() + Sync>(&self, limit: usize, work: &F) -> Region<'_> {
        /// # Safety
        ///
        /// `data` is a live `F`.
        unsafe fn call<F: Fn()>(data: *const ()) {
            // SAFETY: by the contract.
            unsafe { (*data.cast::<F>())() }
        }
        self.has_panicked.store(false, Ordering::Relaxed);
        let work = Work {
            data: std::ptr::from_ref(work).cast(),
            call: call::<F>,
        };
        // SAFETY: the last region is closed and empty, so no thread reads this now.
        self.work.with_mut(|slot| unsafe { *slot = work });
        let state = State(self.state.load(Ordering::Relaxed)).next(limit);
        self.state.store(state.0, Ordering::SeqCst);
        Region(self)
    }

    /// Does the work of the newest region in this thread, unless it is closed or not for this thread; the region's number.
    pub(crate) fn take_part(&self, index: usize) -> u64 {
        let mut state = State(self.state.load(Ordering::Acquire));
        let number = state.number();
        while state.number() == number && state.admits(index) {
            let (entered, order) = (state.0 + 1, Ordering::Acquire);
            match self
                .state
                .compare_exchange_weak(state.0, entered, order, order)
            {
                Ok(_) => {
                    // SAFETY: the region is not closed while this thread is in it: `work` and what it points to stay.
                    let work = AssertUnwindSafe(|| unsafe {
                        let work = self.work.with(|slot| *slot);
                        (work.call)(work.data);
                    });
                    if catch_unwind(work).is_err() {
                        self.has_panicked.store(true, Ordering::Relaxed);
                    }
                    self.state.fetch_sub(1, Ordering::Release);
                    break;
                }
                Err(now) => state = State(now),
            }
        }
        number
    }
}

/// An open region. Dropping it closes it, and returns when all threads have left it.
#[must_use]
pub(crate) struct Region<'r>(&'r Regions);

impl Region<'_> {
    /// Closes it; whether the work panicked in another thread.
    pub(crate) fn close(self) -> bool {
        let regions = self.0;
        drop(self);
        regions.has_panicked.load(Ordering::Relaxed)
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        let mut state = State(self.0.state.fetch_and(!OPEN, Ordering::AcqRel));
        #[cfg(not(loom))]
        let mut looks = 0;
        while !state.is_empty() {
            #[cfg(not(loom))]
            if looks < PATIENCE {
                looks += 1;
                spin_loop();
            } else {
                yield_now();
            }
            #[cfg(loom)]
            yield_now();
            state = State(self.0.state.load(Ordering::Acquire));
        }
    }
}

/// `std`'s, with the methods of loom's, which sees accesses that are not ordered.
#[cfg(not(loom))]
struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    fn with<R>(&self, use_it: impl FnOnce(*const T) -> R) -> R {
        use_it(self.0.get())
    }

    fn with_mut<R>(&self, use_it: impl FnOnce(*mut T) -> R) -> R {
        use_it(self.0.get())
    }
}

/// Every interleaving: `make loom`.
#[cfg(all(loom, test))]
mod tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// The result of a region's work; loom sees accesses that are not ordered.
    struct Sum(UnsafeCell<u64>);

    // SAFETY: the thread that takes the only task writes; the caller reads when the region is closed.
    unsafe impl Sync for Sum {}

    impl Sum {
        fn set(&self, value: u64) {
            // SAFETY: as above.
            self.0.with_mut(|sum| unsafe { *sum = value });
        }
    }

    /// A region of one task, and its result, which the caller reads and frees when the region is closed.
    fn compute(regions: &Regions, limit: usize, first: u64) {
        let (sum, next) = (Sum(UnsafeCell::new(0)), AtomicU64::new(0));
        let work = || {
            if next.fetch_add(1, Ordering::Relaxed) == 0 {
                sum.set(first);
            }
        };
        // SAFETY: this is the only caller, and `work` lives longer.
        let region = unsafe { regions.open(limit, &work) };
        work();
        assert!(!region.close());
        // SAFETY: all threads have left the region.
        sum.0.with(|sum| assert_eq!(unsafe { *sum }, first));
    }

    #[test]
    fn region_work_ends_before_the_region_and_is_seen_after_it() {
        loom::model(|| {
            let regions = Arc::new(Regions::new());
            let own = regions.clone();
            let other = thread::spawn(move || {
                own.take_part(0);
                own.take_part(0);
            });
            compute(&regions, 1, 5);
            compute(&regions, 1, 7);
            other.join().expect("it ends");
        });
    }

    #[test]
    fn region_of_two_threads_and_one_that_it_is_not_for() {
        loom::model(|| {
            let regions = Arc::new(Regions::new());
            let others = [0, 1].map(|index| {
                let own = regions.clone();
                thread::spawn(move || own.take_part(index))
            });
            compute(&regions, 1, 5);
            for other in others {
                assert!(other.join().expect("it ends") <= 1);
            }
        });
    }
}
