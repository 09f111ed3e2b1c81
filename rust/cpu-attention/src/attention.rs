//! Work for threads: runs cut into parts, handed out, brought together.

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use rayon_core::{ThreadPool, ThreadPoolBuilder};

use crate::element::Element;
use crate::error::Error;
use crate::kernel::{self, Isa, state_len};
use crate::openmp::OpenMp;
use crate::step::{CacheShape, PART, Run, Step, above_zero, same_length};

/// Runs of a shared part that a thread takes at a time.
const MOST_RUNS: usize = 32;

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

/// A run over one part: which run, and where what it finds goes.
pub(crate) type Member<'a> = (usize, &'a mut [f32]);

/// Runs over one part whose keys they share; mostly one.
struct Task<'a, 'b> {
    part: usize,
    members: &'b mut [Member<'a>],
}

/// Who works beside the caller's thread.
#[derive(Debug)]
enum Others {
    Nobody,
    Own(ThreadPool),
    OpenMp(OpenMp),
}

/// Threads that attend. The caller's own is one of them.
#[derive(Debug)]
pub struct Attention {
    others: Others,
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
            1 => Others::Nobody,
            _ => builder
                .build()
                .map(Others::Own)
                .map_err(|error| Error::Threads(error.to_string()))?,
        };
        Ok(Self {
            others,
            num_threads,
            isa,
        })
    }

    /// With so many threads of the OpenMP runtime in this file, for callers that compute by it, too: two
    /// pools on the same processors are in each other's way.
    ///
    /// # Errors
    ///
    /// No threads, or a file that is no OpenMP runtime.
    pub fn with_openmp(num_threads: usize, runtime: &Path) -> Result<Self, Error> {
        above_zero("the number of threads", num_threads)?;
        let refused = |error| Error::Threads(format!("{}: {error}", runtime.display()));
        Ok(Self {
            others: Others::OpenMp(OpenMp::load(runtime).map_err(refused)?),
            num_threads,
            isa: Isa::detect(),
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
        let mut work = Work::new(&job, per_row, &mut states);
        self.run_tasks(&job, work.tasks());
        finish(&job, per_row, &states, options.sinks, out);
        Ok(())
    }

    /// Every thread takes the next task until none is left.
    fn run_tasks<E: Element>(&self, job: &Job<'_, E>, tasks: Vec<Task<'_, '_>>) {
        let num_tasks = tasks.len();
        let queue = Mutex::new(tasks.into_iter());
        let next = || queue.lock().ok().and_then(|mut tasks| tasks.next());
        let work = || {
            while let Some(task) = next() {
                let part = task.part * PART..(task.part + 1) * PART;
                E::attend(self.isa, job, task.members, part);
            }
        };
        let num_threads = match num_tasks > 1 && products(job) > SMALL {
            true => self.num_threads.min(num_tasks),
            false => 1,
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

/// The parts of all runs, those that are worked on together side by side.
struct Work<'a> {
    members: Vec<Member<'a>>,
    /// How many members each task has, and their part.
    tasks: Vec<(usize, usize)>,
}

impl<'a> Work<'a> {
    /// Parts that runs share, then every other part of each run, each with its share of `states`. With a
    /// window nothing is shared: what a row sees moves on with every token.
    fn new<E>(job: &Job<'_, E>, per_row: usize, states: &'a mut [f32]) -> Self {
        let (mut rest, mut pieces, mut firsts) = (states, vec![], vec![]);
        for run in &job.step.runs {
            firsts.push(pieces.len());
            for _ in job.parts(run) {
                let (state, others) = std::mem::take(&mut rest).split_at_mut(run.count * per_row);
                pieces.push(Some(state));
                rest = others;
            }
        }
        let (mut members, mut tasks) = (Vec::with_capacity(pieces.len()), vec![]);
        let groups = job.step.groups.iter().filter(|_| job.window.is_none());
        for group in groups {
            for part in group.parts.clone() {
                for runs in group.runs.chunks(MOST_RUNS) {
                    members.extend(runs.iter().map(|&run| {
                        let state = pieces[firsts[run] + part].take();
                        (run, state.expect("a part of a run is in one group"))
                    }));
                    tasks.push((runs.len(), part));
                }
            }
        }
        for (run, &first) in firsts.iter().enumerate() {
            let parts = job.parts(&job.step.runs[run]);
            for (part, piece) in parts.clone().zip(&mut pieces[first..][..parts.len()]) {
                if let Some(state) = piece.take() {
                    members.push((run, state));
                    tasks.push((1, part));
                }
            }
        }
        Self { members, tasks }
    }

    fn tasks(&mut self) -> Vec<Task<'a, '_>> {
        let mut rest = &mut self.members[..];
        let tasks = self.tasks.iter().map(|&(count, part)| {
            let (members, others) = std::mem::take(&mut rest).split_at_mut(count);
            rest = others;
            Task { part, members }
        });
        tasks.collect()
    }
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
