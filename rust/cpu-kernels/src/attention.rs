//! Attention of a step: runs are cut into parts, computed by threads, merged.

use std::cmp::Reverse;
use std::ops::{DerefMut, Range};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::builds::best_build;
use crate::dispatch::Attend;
use crate::element::{Element, Kept};
use crate::error::Error;
use crate::isa::Isa;
use crate::job::{Job, Member, Task};
use crate::step::{CacheShape, PART, Step, above_zero, same_length};
use crate::stored::Stored;
use crate::threads::Threads;
use crate::write::{CacheArrays, CopyRows, Rows, check_write};

/// Rows over a shared part that a thread takes at a time, about: their queries and sums stay in a core's cache.
const MAX_ROWS: usize = 64;

/// A run is one task, unless it is more of the work than this share of a thread's: then its parts are.
const SHARE: usize = 4;

/// Products below which no other thread is woken: about ten microseconds of work.
const SMALL: usize = 200_000;

/// Numbers above which keys and values are written in parallel.
const MANY: usize = 50_000;

/// The queries of a step.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a, E> {
    /// Of `heads * dim_k` elements each.
    pub rows: Rows<'a, E>,
    /// Query heads, a multiple of the KV heads: consecutive ones share a KV head.
    pub heads: usize,
}

/// Options of a layer's attention, beyond causality.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Factor on the products of queries and keys.
    pub scaling: f32,
    /// A row sees its own position and the `window - 1` before it.
    pub window: Option<usize>,
    /// Positions before this one have no keys here: a later row sees none of them, and their own rows only themselves.
    pub first_key: usize,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// `[heads]`: one more score per head that has no value.
    pub sinks: Option<&'a [f32]>,
}

/// A task and its multiplications, about.
type Weighed<'a, 'b, E> = (usize, Task<'a, 'b, E>);

/// Threads that attend. The caller's own is one of them; the others are those of the process, or of an OpenMP runtime.
#[derive(Debug)]
pub struct Attention {
    threads: Threads,
    isa: Isa,
    /// The states of runs in their parts, memory that is kept from layer to layer: fresh pages cost as much as the work.
    states: Mutex<Vec<f32>>,
    /// Memory for rotated queries.
    kept: Kept,
}

impl Attention {
    /// With `num_threads` threads and [`Isa::chosen`].
    ///
    /// # Errors
    ///
    /// No threads, more than the system allows, or an unknown or missing instruction set.
    pub fn new(num_threads: usize) -> Result<Self, Error> {
        Self::with_isa(num_threads, Isa::chosen()?)
    }

    /// With these instructions.
    ///
    /// # Errors
    ///
    /// As [`Attention::new`].
    pub fn with_isa(num_threads: usize, isa: Isa) -> Result<Self, Error> {
        Self::with(Threads::pool(num_threads), isa.checked())
    }

    /// With `num_threads` of the OpenMP runtime in this file, for callers that use it between these calls: two
    /// pools whose threads spin on the same processors are in each other's way.
    ///
    /// # Errors
    ///
    /// No threads, a file that is no OpenMP runtime, or a level of instructions that is not known or not there.
    pub fn with_openmp(num_threads: usize, runtime: &Path) -> Result<Self, Error> {
        Self::with(Threads::openmp(num_threads, runtime), Isa::chosen())
    }

    fn with(threads: Result<Threads, Error>, isa: Result<Isa, Error>) -> Result<Self, Error> {
        Ok(Self {
            threads: threads?,
            isa: isa?,
            states: Mutex::default(),
            kept: Kept::default(),
        })
    }

    /// Writes a key `[kv_heads, dim_k]` and a value `[kv_heads, dim_v]` of each row into its slot,
    /// `block * block_size + offset`; -1: nowhere. One thread writes keys, another one values.
    ///
    /// # Errors
    ///
    /// Arrays of the wrong length, or a slot beyond the cache; nothing is written.
    pub fn write<E: Element, C: Stored<E>>(
        &self,
        shape: &CacheShape,
        slots: &[i64],
        key: Rows<'_, E>,
        value: Rows<'_, E>,
        cache: CacheArrays<'_, C>,
    ) -> Result<(), Error> {
        check_write(shape, slots, key, value, &cache)?;
        let copies = vec![
            CopyRows {
                slots,
                rows: key,
                dim: shape.dim_k,
                cache: cache.keys,
            },
            CopyRows {
                slots,
                rows: value,
                dim: shape.dim_v,
                cache: cache.values,
            },
        ];
        let num_threads = match key.len() * key.width() > MANY {
            true => self.threads.count().min(2),
            false => 1,
        };
        self.threads
            .each(num_threads, copies, |copy| best_build(self.isa, copy));
        Ok(())
    }

    /// Attends with the rows of `step` over the cache's `keys` and `values`, which lie as `shape` says,
    /// into `out` `[rows, heads, dim_v]`.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match; nothing is written.
    #[allow(clippy::too_many_arguments)]
    pub fn attend<E: Attend, C: Stored<E>>(
        &self,
        step: &Step,
        shape: &CacheShape,
        keys: &[C],
        values: &[C],
        query: Query<'_, E>,
        options: &Options<'_>,
        out: &mut [E],
    ) -> Result<(), Error> {
        shape.check(keys.len(), values.len(), C::width)?;
        check_step(step, shape)?;
        check_query(step, shape, query, options, out.len())?;
        let mut job = Job {
            step,
            shape: *shape,
            cached: C::cached(keys, values),
            query: query.rows,
            heads: query.heads,
            group: query.heads / shape.kv_heads,
            scaling: options.scaling,
            softcap: options.softcap,
            window: options.window,
            first_key: options.first_key,
            sinks: options.sinks,
            most_products: usize::MAX,
        };
        if self.threads.count() > 1 {
            let products = step.runs.iter().map(|run| job.products(run)).sum::<usize>();
            job.most_products = products / (SHARE * self.threads.count());
        }
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        let mut first = 0;
        while first < step.runs.len() {
            let (runs, size) = job.slab(first);
            if states.len() < size {
                states.resize(size, 0.0);
            }
            self.attend_slab(&job, runs.clone(), &mut states[..size], out);
            first = runs.end;
        }
        Ok(())
    }

    fn attend_slab<E: Attend>(
        &self,
        job: &Job<'_, E>,
        runs: Range<usize>,
        states: &mut [f32],
        out: &mut [E],
    ) {
        let mut work = Work::new(job, runs.clone(), states);
        self.work(job, work.tasks(job));
        self.work(job, rests(job, runs, states, out));
    }

    /// Runs tasks, the longest first: an idle thread takes the next one.
    fn work<E: Attend>(&self, job: &Job<'_, E>, mut tasks: Vec<Weighed<'_, '_, E>>) {
        let products = tasks.iter().map(|(products, _)| products).sum::<usize>();
        let num_threads = match products > SMALL {
            true => self.threads.count().min(tasks.len()),
            false => 1,
        };
        tasks.sort_by_key(|&(products, _)| Reverse(products));
        self.threads
            .each(num_threads, tasks, |(_, task)| E::work(self.isa, job, task));
    }

    /// Memory for `count` elements, reused from call to call and not cleared.
    pub fn scratch<E: Element>(&self, count: usize) -> impl DerefMut<Target = Vec<E>> {
        let mut memory = E::kept(&self.kept)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        memory.resize(count, E::narrow(0.0));
        memory
    }

    pub(crate) fn threads(&self) -> &Threads {
        &self.threads
    }

    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }
}

fn check_step(step: &Step, shape: &CacheShape) -> Result<(), Error> {
    let (found, expected) = (
        (shape.num_blocks, shape.block_size),
        (step.num_blocks, step.block_size),
    );
    match found == expected {
        true => Ok(()),
        false => Err(Error::OtherCache { found, expected }),
    }
}

fn check_query<E>(
    step: &Step,
    shape: &CacheShape,
    query: Query<'_, E>,
    options: &Options<'_>,
    out: usize,
) -> Result<(), Error> {
    above_zero("the number of query heads", query.heads)?;
    if !query.heads.is_multiple_of(shape.kv_heads) {
        return Err(Error::Heads {
            query: query.heads,
            kv: shape.kv_heads,
        });
    }
    let expected = CacheShape::elements(step.num_rows, query.heads, shape.dim_k)?;
    same_length("query", expected, query.rows.len() * query.rows.width())?;
    same_length("the rows of query", step.num_rows, query.rows.len())?;
    let expected = CacheShape::elements(step.num_rows, query.heads, shape.dim_v)?;
    same_length("out", expected, out)?;
    if let Some(window) = options.window {
        above_zero("the sliding window", window)?;
    }
    if let Some(sinks) = options.sinks {
        same_length("sinks", query.heads, sinks.len())?;
    }
    match options.softcap {
        Some(cap) if cap.is_nan() || cap <= 0.0 => Err(Error::Softcap(cap)),
        _ => Ok(()),
    }
}

/// The parts of all runs, those that are worked on together side by side.
struct Work<'a> {
    members: Vec<Member<'a>>,
    /// How many members each task has, and their part.
    tasks: Vec<(usize, usize)>,
}

impl<'a> Work<'a> {
    /// Parts that runs share, then those of runs that are cut, each with its share of `states`.
    fn new<E>(job: &Job<'_, E>, runs: Range<usize>, states: &'a mut [f32]) -> Self {
        let (mut rest, mut pieces, mut firsts) = (states, vec![], vec![]);
        for run in &job.step.runs[runs.clone()] {
            firsts.push(pieces.len());
            for _ in job.parts_apart(run) {
                let (state, others) =
                    std::mem::take(&mut rest).split_at_mut(run.count * job.per_row());
                pieces.push(Some(state));
                rest = others;
            }
        }
        let (mut members, mut tasks) = (Vec::with_capacity(pieces.len()), vec![]);
        let groups = job.step.groups.iter().filter(|_| job.sees_all());
        for group in groups {
            let here = group.runs.iter().copied().filter(|run| runs.contains(run));
            let here: Vec<usize> = here.collect();
            let each = MAX_ROWS.div_ceil(
                here.iter()
                    .map(|&run| job.step.runs[run].count)
                    .max()
                    .unwrap_or(1),
            );
            for part in group.parts.clone() {
                for together in here.chunks(each) {
                    members.extend(together.iter().map(|&run| {
                        let state = pieces[firsts[run - runs.start] + part].take();
                        (run, state.expect("a part of a run is in one group"))
                    }));
                    tasks.push((together.len(), part));
                }
            }
        }
        for (run, &first) in runs.zip(&firsts) {
            let parts = job.parts_apart(&job.step.runs[run]);
            for (part, piece) in parts.clone().zip(&mut pieces[first..][..parts.len()]) {
                if let Some(state) = piece.take() {
                    members.push((run, state));
                    tasks.push((1, part));
                }
            }
        }
        Self { members, tasks }
    }

    fn tasks<'b, E>(&'b mut self, job: &Job<'_, E>) -> Vec<Weighed<'a, 'b, E>> {
        let mut rest = &mut self.members[..];
        let tasks = self.tasks.iter().map(|&(count, part)| {
            let (members, others) = std::mem::take(&mut rest).split_at_mut(count);
            rest = others;
            let rows = members.iter().map(|&(run, _)| job.step.runs[run].count);
            let products = rows.sum::<usize>() * PART * job.per_key();
            (products, Task::Part { part, members })
        });
        tasks.collect()
    }
}

/// The last task of each run.
fn rests<'b, E>(
    job: &Job<'b, E>,
    runs: Range<usize>,
    states: &'b [f32],
    out: &'b mut [E],
) -> Vec<Weighed<'b, 'b, E>> {
    let per_out = job.heads * job.shape.dim_v;
    let (mut rest, mut others, mut first) = (states, out, 0);
    let tasks = job.step.runs[runs].iter().map(|run| {
        let (states, after) = rest.split_at(job.size(run));
        let (_, from) = std::mem::take(&mut others).split_at_mut((run.first_row - first) * per_out);
        let (out, beyond) = from.split_at_mut(run.count * per_out);
        (rest, others, first) = (after, beyond, run.first_row + run.count);
        let products = match job.parts_apart(run) == job.parts(run) {
            true => states.len(),
            false => job.products(run),
        };
        (products, Task::Rest { run, states, out })
    });
    tasks.collect()
}
