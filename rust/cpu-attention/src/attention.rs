//! Work for threads: runs cut into parts, handed out, brought together.

use std::ops::Range;
use std::sync::Mutex;

use rayon_core::{ThreadPool, ThreadPoolBuilder};

use crate::element::Element;
use crate::error::Error;
use crate::kernel::{self, Isa, state_len};
use crate::step::{CacheShape, Run, Step, above_zero, same_length};

/// Keys of a part: what a thread takes at a time.
const PART: usize = 256;

/// Products of a step below which other threads are not woken: about ten microseconds of work.
const SMALL: usize = 200_000;

/// The queries of a step.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a, E> {
    /// `[rows, heads, dim_k]`.
    pub rows: &'a [E],
    /// Query heads, a multiple of the KV heads: consecutive ones share a KV head.
    pub heads: usize,
}

/// What a layer asks of attention, beyond causality.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Factor on the products of queries and keys.
    pub scaling: f32,
    /// A row sees its own position and the `window - 1` before it.
    pub window: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// `[heads]`: one more score per head that has no value.
    pub sinks: Option<&'a [f32]>,
}

/// Everything that a run needs to know.
pub(crate) struct Job<'a, E> {
    pub(crate) step: &'a Step,
    pub(crate) shape: CacheShape,
    pub(crate) keys: &'a [E],
    pub(crate) values: &'a [E],
    pub(crate) query: &'a [E],
    pub(crate) heads: usize,
    pub(crate) group: usize,
    pub(crate) scaling: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) window: Option<usize>,
}

impl<E> Job<'_, E> {
    /// The first position that a row at `position` sees.
    #[inline(always)]
    pub(crate) fn low(&self, position: usize) -> usize {
        self.window
            .map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The parts that the rows of a run see, by number.
    fn parts(&self, run: &Run) -> Range<usize> {
        self.low(run.position) / PART..(run.position + run.count).div_ceil(PART)
    }
}

/// A run over one part, and where what it finds goes.
struct Task<'a> {
    run: &'a Run,
    part: usize,
    state: &'a mut [f32],
}

/// Threads that attend. The caller's own is one of them.
#[derive(Debug)]
pub struct Attention {
    others: Option<ThreadPool>,
    num_threads: usize,
    isa: Isa,
}

impl Attention {
    /// With `num_threads` threads and the best instructions there are.
    ///
    /// # Errors
    ///
    /// No threads, or more than the system gives.
    pub fn new(num_threads: usize) -> Result<Self, Error> {
        Self::with_isa(num_threads, Isa::detect())
    }

    /// With these instructions, or portably where the machine does not have them.
    ///
    /// # Errors
    ///
    /// As [`Attention::new`].
    pub fn with_isa(num_threads: usize, isa: Isa) -> Result<Self, Error> {
        above_zero("the number of threads", num_threads)?;
        let builder = ThreadPoolBuilder::new()
            .num_threads(num_threads - 1)
            .thread_name(|number| format!("attention-{number}"));
        let others = match num_threads {
            1 => None,
            _ => Some(
                builder
                    .build()
                    .map_err(|error| Error::Threads(error.to_string()))?,
            ),
        };
        Ok(Self {
            others,
            num_threads,
            isa,
        })
    }

    /// Attends with the rows of `step` over the cache's `keys` and `values`, which lie as `shape` says,
    /// into `out` `[rows, heads, dim_v]`. Rows that the step leaves to others are not written.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit each other: nothing is written then.
    #[allow(clippy::too_many_arguments)]
    pub fn attend<E: Element>(
        &self,
        step: &Step,
        shape: &CacheShape,
        keys: &[E],
        values: &[E],
        query: Query<'_, E>,
        options: &Options<'_>,
        out: &mut [E],
    ) -> Result<(), Error> {
        shape.check(keys.len(), values.len())?;
        check_step(step, shape)?;
        check_query(step, shape, query, options, out.len())?;
        let job = Job {
            step,
            shape: *shape,
            keys,
            values,
            query: query.rows,
            heads: query.heads,
            group: query.heads / shape.kv_heads,
            scaling: options.scaling,
            softcap: options.softcap,
            window: options.window,
        };
        let per_row = query.heads * state_len(shape.dim_v);
        let size = |run: &Run| job.parts(run).len() * run.count * per_row;
        let mut states = vec![0.0; step.runs.iter().map(size).sum()];
        self.run_tasks(&job, tasks(&job, per_row, &mut states));
        finish(&job, per_row, &states, options.sinks, out);
        Ok(())
    }

    /// Every thread takes the next task until none is left.
    fn run_tasks<E: Element>(&self, job: &Job<'_, E>, tasks: Vec<Task<'_>>) {
        let num_tasks = tasks.len();
        let queue = Mutex::new(tasks.into_iter());
        let next = || queue.lock().ok().and_then(|mut tasks| tasks.next());
        let work = || {
            while let Some(task) = next() {
                let part = task.part * PART..(task.part + 1) * PART;
                kernel::attend(self.isa, job, task.run, part, task.state);
            }
        };
        match &self.others {
            Some(others) if num_tasks > 1 && products(job) > SMALL => {
                others.in_place_scope(|scope| {
                    for _ in 1..self.num_threads.min(num_tasks) {
                        scope.spawn(|_| work());
                    }
                    work();
                });
            }
            _ => work(),
        }
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
    same_length("query", expected, query.rows.len())?;
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

/// One task for each part of each run, with its share of `states`.
fn tasks<'a, E>(job: &Job<'a, E>, per_row: usize, states: &'a mut [f32]) -> Vec<Task<'a>> {
    let mut rest = states;
    let mut tasks = vec![];
    for run in &job.step.runs {
        for part in job.parts(run) {
            let (state, others) = std::mem::take(&mut rest).split_at_mut(run.count * per_row);
            tasks.push(Task { run, part, state });
            rest = others;
        }
    }
    tasks
}

/// Multiplications of the job, about.
fn products<E>(job: &Job<'_, E>) -> usize {
    let per_key = job.heads * (job.shape.dim_k + job.shape.dim_v);
    let runs = job.step.runs.iter();
    let seen = runs.map(|run| run.count * (run.position + run.count - job.low(run.position)));
    seen.sum::<usize>().saturating_mul(per_key)
}

/// Brings the parts of every query together.
fn finish<E: Element>(
    job: &Job<'_, E>,
    per_row: usize,
    states: &[f32],
    sinks: Option<&[f32]>,
    out: &mut [E],
) {
    let (size, dim_v) = (state_len(job.shape.dim_v), job.shape.dim_v);
    let mut row = vec![0.0; dim_v];
    let mut rest = states;
    for run in &job.step.runs {
        let stride = run.count * per_row;
        let (own, others) = rest.split_at(job.parts(run).len() * stride);
        rest = others;
        let rows = &mut out[run.first_row * job.heads * dim_v..][..run.count * job.heads * dim_v];
        for (at, out) in rows.chunks_exact_mut(dim_v).enumerate() {
            let sink = sinks.map(|sinks| sinks[at % job.heads]);
            kernel::finish(&own[at * size..], stride, sink, &mut row);
            for (element, &float) in out.iter_mut().zip(&row) {
                *element = E::narrow(float);
            }
        }
    }
}
