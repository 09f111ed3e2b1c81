//! The threads that compute.

use std::path::Path;
use std::sync::Mutex;

use rayon_core::{ThreadPool, ThreadPoolBuilder};

use crate::error::Error;
use crate::openmp::OpenMp;
use crate::step::above_zero;

/// Threads, the caller's own among them.
#[derive(Debug)]
pub(crate) struct Threads {
    others: Others,
    count: usize,
}

/// The threads beside the caller's.
#[derive(Debug)]
enum Others {
    None,
    Own(ThreadPool),
    OpenMp(OpenMp),
}

impl Threads {
    /// A pool of `count - 1` threads.
    pub(crate) fn pool(count: usize) -> Result<Self, Error> {
        above_zero("the number of threads", count)?;
        let builder = ThreadPoolBuilder::new()
            .num_threads(count - 1)
            .thread_name(|number| format!("attention-{number}"));
        let others = match count {
            1 => Others::None,
            _ => builder
                .build()
                .map(Others::Own)
                .map_err(|error| Error::Threads(error.to_string()))?,
        };
        Ok(Self { others, count })
    }

    /// `count` threads of the OpenMP runtime in this file.
    pub(crate) fn openmp(count: usize, runtime: &Path) -> Result<Self, Error> {
        above_zero("the number of threads", count)?;
        let refused = |error| Error::Threads(format!("{}: {error}", runtime.display()));
        let others = Others::OpenMp(OpenMp::load(runtime).map_err(refused)?);
        Ok(Self { others, count })
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Calls `work` with each task: `num_threads` threads take the next one until none is left.
    pub(crate) fn each<T: Send>(&self, num_threads: usize, tasks: Vec<T>, work: impl Fn(T) + Sync) {
        let queue = Mutex::new(tasks.into_iter());
        let next = || queue.lock().ok().and_then(|mut tasks| tasks.next());
        let work = || {
            while let Some(task) = next() {
                work(task);
            }
        };
        match &self.others {
            Others::Own(pool) if num_threads > 1 => pool.in_place_scope(|scope| {
                for _ in 1..num_threads {
                    scope.spawn(|_| work());
                }
                work();
            }),
            Others::OpenMp(runtime) if num_threads > 1 => runtime.run(num_threads, &work),
            _ => work(),
        }
    }
}
