//! The threads that compute.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Mutex;

use crate::error::Error;
use crate::openmp::OpenMp;
use crate::pool::{Pool, thread_limit};
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
    Own(&'static Pool),
    OpenMp(OpenMp),
}

impl Threads {
    /// `count - 1` threads of the pool of this process.
    pub(crate) fn pool(count: usize) -> Result<Self, Error> {
        above_zero("the number of threads", count)?;
        let others = Others::Own(Pool::of_process(count - 1)?);
        Ok(Self { others, count })
    }

    /// `count` threads of the OpenMP runtime in this file.
    pub(crate) fn openmp(count: usize, runtime: &Path) -> Result<Self, Error> {
        above_zero("the number of threads", count)?;
        let refused = |error| Error::Threads(format!("{}: {error}", runtime.display()));
        let others = Others::OpenMp(OpenMp::load(runtime).map_err(refused)?);
        Ok(Self { others, count })
    }

    /// How many the calling thread may compute with now.
    pub(crate) fn count(&self) -> usize {
        self.count.min(match &self.others {
            Others::Own(_) => thread_limit(),
            Others::OpenMp(runtime) => runtime.max_threads(),
        })
    }

    /// Calls `work` with each task: up to `num_threads` threads take the next one until none is left.
    pub(crate) fn each<T: Send>(&self, num_threads: usize, tasks: Vec<T>, work: impl Fn(T) + Sync) {
        let queue = Mutex::new(tasks.into_iter());
        let next = || queue.lock().ok().and_then(|mut tasks| tasks.next());
        let work = || {
            while let Some(task) = next() {
                work(task);
            }
        };
        match &self.others {
            Others::Own(pool) if num_threads > 1 => pool.run(num_threads, &work),
            Others::OpenMp(runtime) if num_threads > 1 => runtime.run(num_threads, &work),
            _ => work(),
        }
    }

    /// Calls `work` with each task, neighbouring ones on the same thread.
    pub(crate) fn share_out<T: Send>(
        &self,
        num_threads: usize,
        tasks: Vec<T>,
        work: impl Fn(T) + Sync,
    ) {
        if tasks.len() <= num_threads {
            return self.each(num_threads, tasks, work);
        }
        let shares = Shares::new(tasks, num_threads);
        let numbers = (0..num_threads).collect();
        self.each(num_threads, numbers, |number| {
            while let Some(task) = shares.next(number) {
                work(task);
            }
        });
    }
}

/// Neighbouring tasks for each thread: a task prefetches the weights of the next one.
struct Shares<T>(Vec<Mutex<VecDeque<T>>>);

impl<T> Shares<T> {
    fn new(mut tasks: Vec<T>, count: usize) -> Self {
        let size = tasks.len().div_ceil(count.max(1));
        let share = |_| Mutex::new(tasks.drain(..size.min(tasks.len())).collect());
        Self((0..count).map(share).collect())
    }

    /// The next task of this share; if none is left, the last one of another share.
    fn next(&self, number: usize) -> Option<T> {
        let take = |at: usize| {
            let mut share = self.0[at % self.0.len()].lock().ok()?;
            match at == number {
                true => share.pop_front(),
                false => share.pop_back(),
            }
        };
        (number..number + self.0.len()).find_map(take)
    }
}
