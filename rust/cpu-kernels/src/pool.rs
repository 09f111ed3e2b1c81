//! The pool of threads for parallel regions: they wait for the next one by spinning, and sleep after a while.
//!
//! A step has hundreds of regions of a few microseconds each. A region ends when its tasks are done: it does not wait for a
//! thread that has not begun, because that thread's processor is busy with another program.

use std::cell::Cell;
use std::hint::spin_loop;
use std::process;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{self, Builder, Thread};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::region::{MAX_THREADS, Regions};

/// How long a thread spins before it sleeps: longer than the time between two steps.
const SPIN: Duration = Duration::from_millis(1);

/// Looks at the state between two looks at the clock.
const LOOKS: usize = 64;

/// Threads of this process.
#[derive(Debug)]
pub(crate) struct Pool {
    regions: Arc<Regions>,
    /// The threads, held by the caller whose region is computed.
    workers: Mutex<Vec<Worker>>,
}

#[derive(Debug)]
struct Worker {
    thread: Thread,
    sleeps: Arc<AtomicBool>,
}

/// The pool, and the process that it belongs to: a fork has none of its threads. Never freed. No lock, which another thread
/// may hold while the process forks.
static POOL: AtomicPtr<OfProcess> = AtomicPtr::new(null_mut());

struct OfProcess {
    id: u32,
    pool: Pool,
}

thread_local! {
    static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Limits the threads of the calling thread's regions, its own included; returns the old limit.
pub fn limit_threads(count: usize) -> usize {
    LIMIT.replace(count.max(1))
}

/// The threads that regions of the calling thread may have.
pub(crate) fn thread_limit() -> usize {
    LIMIT.get()
}

impl Pool {
    /// The pool of this process, with at least this number of threads.
    pub(crate) fn of_process(count: usize) -> Result<&'static Self, Error> {
        if count > MAX_THREADS {
            return Err(Error::Threads(format!(
                "{count} threads: at most {MAX_THREADS}"
            )));
        }
        let (id, kept) = (process::id(), POOL.load(Ordering::Acquire));
        // SAFETY: the stored pool is never freed.
        let entry = match unsafe { kept.as_ref() } {
            Some(entry) if entry.id == id => entry,
            _ => {
                let new = Box::leak(Box::new(OfProcess {
                    id,
                    pool: Self::new(),
                }));
                match POOL.compare_exchange(kept, new, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => new,
                    // SAFETY: as above; another thread of this process has stored it.
                    Err(other) => unsafe { &*other },
                }
            }
        };
        entry.pool.grow(count)?;
        Ok(&entry.pool)
    }

    fn new() -> Self {
        Self {
            regions: Arc::new(Regions::new()),
            workers: Mutex::default(),
        }
    }

    fn grow(&self, count: usize) -> Result<(), Error> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        for index in workers.len()..count {
            let (regions, sleeps) = (self.regions.clone(), Arc::new(AtomicBool::new(false)));
            let own = sleeps.clone();
            let thread = Builder::new()
                .name(format!("kernels-{index}"))
                .spawn(move || serve(&regions, index, &own))
                .map_err(|error| Error::Threads(error.to_string()))?;
            workers.push(Worker {
                thread: thread.thread().clone(),
                sleeps,
            });
        }
        Ok(())
    }

    /// Calls `work` in the caller's thread, and in up to `num_threads - 1` others that begin before it returns there. All
    /// have returned afterwards. While another thread has a region, the caller computes alone.
    ///
    /// # Panics
    ///
    /// If `work` does.
    pub(crate) fn run<F: Fn() + Sync>(&self, num_threads: usize, work: &F) {
        let workers = match self.workers.try_lock() {
            Ok(workers) => workers,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return work(),
        };
        let limit = (num_threads - 1).min(workers.len());
        // SAFETY: the thread that has the lock is the only caller, and closes the region, also if `work` panics.
        let region = unsafe { self.regions.open(limit, work) };
        for worker in &workers[..limit] {
            if worker.sleeps.load(Ordering::SeqCst) && worker.sleeps.swap(false, Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        work();
        assert!(!region.close(), "a thread of a kernel panicked");
    }
}

/// A thread of the pool, for as long as the process lives.
fn serve(regions: &Regions, index: usize, sleeps: &AtomicBool) {
    let mut last = 0;
    loop {
        wait(regions, last, sleeps);
        last = regions.take_part(index);
    }
}

/// Waits for another region than `last`.
fn wait(regions: &Regions, last: u64, sleeps: &AtomicBool) {
    let start = Instant::now();
    while start.elapsed() < SPIN {
        for _ in 0..LOOKS {
            if regions.number() != last {
                return;
            }
            spin_loop();
        }
    }
    loop {
        sleeps.store(true, Ordering::SeqCst);
        if regions.number() != last {
            sleeps.store(false, Ordering::SeqCst);
            return;
        }
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn locked<T>(value: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
        value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pool(count: usize) -> Pool {
        let pool = Pool::new();
        pool.grow(count).expect("there are threads");
        pool
    }

    /// Calls `work` with each number once.
    fn each(pool: &Pool, num_threads: usize, count: usize, work: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        pool.run(num_threads, &|| {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    break;
                }
                work(number);
            }
        });
    }

    #[test]
    fn every_task_of_many_regions_is_done_once_before_the_region_ends() {
        let pool = pool(3);
        for region in 0..20_000 {
            let done: [AtomicUsize; 7] = Default::default();
            each(&pool, 1 + region % 4, done.len(), |number| {
                done[number].fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn threads_that_sleep_are_woken() {
        let pool = pool(2);
        for _ in 0..5 {
            thread::sleep(3 * SPIN);
            let seen = Mutex::new(HashSet::new());
            let start = Instant::now();
            pool.run(3, &|| {
                locked(&seen).insert(thread::current().id());
                while locked(&seen).len() < 3 && start.elapsed().as_secs() < 20 {
                    thread::yield_now();
                }
            });
            assert_eq!(locked(&seen).len(), 3);
        }
    }

    #[test]
    fn a_region_has_no_more_threads_than_it_is_for() {
        let pool = pool(3);
        let names = Mutex::new(HashSet::new());
        for _ in 0..200 {
            pool.run(2, &|| {
                locked(&names).insert(thread::current().id());
                thread::yield_now();
            });
        }
        assert!(locked(&names).len() <= 2);
    }

    #[test]
    fn callers_of_two_threads_and_regions_within_regions_do_not_wait_for_each_other() {
        let pool = pool(2);
        let sum = AtomicUsize::new(0);
        let add = |number: usize| {
            sum.fetch_add(number, Ordering::Relaxed);
        };
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        each(&pool, 3, 4, |_| each(&pool, 3, 3, add));
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 2 * 2000 * 4 * 3);
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_threads_have_left() {
        let pool = pool(2);
        for number in 0..100 {
            let inside = AtomicUsize::new(0);
            let region = AssertUnwindSafe(|| {
                each(&pool, 3, 6, |task| {
                    inside.fetch_add(1, Ordering::SeqCst);
                    let panics = task == number % 6;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    assert!(!panics, "wanted");
                });
            });
            assert!(catch_unwind(region).is_err());
            assert_eq!(inside.into_inner(), 0);
        }
        each(&pool, 3, 6, |_| {});
    }

    #[test]
    fn a_limit_is_that_of_a_thread() {
        assert_eq!(limit_threads(3), usize::MAX);
        assert_eq!(thread_limit(), 3);
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(thread_limit(), usize::MAX));
        });
        assert_eq!(limit_threads(usize::MAX), 3);
    }
}
