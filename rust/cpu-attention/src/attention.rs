//! Work for threads: runs cut into parts, handed out, brought together.

use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rayon_core::{ThreadPool, ThreadPoolBuilder};

use crate::element::Element;
use crate::error::Error;
use crate::isa::Isa;
use crate::kernel::{self, state_len};
use crate::openmp::OpenMp;
use crate::step::{CacheShape, PART, Run, Step, above_zero, same_length};

/// Rows over a shared part that a thread takes at a time, about: their queries and sums stay in a core's cache.
const MOST_ROWS: usize = 64;

/// Floats that a thread brings together at a time, about.
const MOST_FLOATS: usize = 10_000;

/// Floats of what is found in parts before it is brought together, about: long prefills over long contexts would
/// need a gigabyte.
const MOST_STATES: usize = 4 << 20;

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

    /// Floats of what one row finds in a part.
    fn per_row(&self) -> usize {
        self.heads * state_len(self.shape.dim_v)
    }

    /// Floats of what a run finds in all of its parts.
    fn size(&self, run: &Run) -> usize {
        self.parts(run).len() * run.count * self.per_row()
    }

    /// Runs from `first` on that are worked on at a time, one at least, and the floats of what they find.
    fn slab(&self, first: usize) -> (Range<usize>, usize) {
        let (mut end, mut size) = (first, 0);
        for run in &self.step.runs[first..] {
            let more = self.size(run);
            if end > first && size + more > MOST_STATES {
                break;
            }
            (end, size) = (end + 1, size + more);
        }
        (first..end, size)
    }

    /// Multiplications of these runs, about.
    fn products(&self, runs: Range<usize>) -> usize {
        let per_key = self.heads * (self.shape.dim_k + self.shape.dim_v);
        let seen = |run: &Run| run.count * (run.position + run.count - self.low(run.position));
        let seen = self.step.runs[runs].iter().map(seen);
        seen.sum::<usize>().saturating_mul(per_key)
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
    /// What runs found in their parts, kept from layer to layer: fresh pages would cost as much as the work.
    states: Mutex<Vec<f32>>,
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
            states: Mutex::default(),
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
            states: Mutex::default(),
        })
    }

    /// Attends with the rows of `step` over the cache's `keys` and `values`, which lie as `shape` says,
    /// into `out` `[rows, heads, dim_v]`.
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
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        let mut first = 0;
        while first < step.runs.len() {
            let (runs, size) = job.slab(first);
            if states.len() < size {
                states.resize(size, 0.0);
            }
            self.attend_slab(
                &job,
                runs.clone(),
                &mut states[..size],
                (options.sinks, out),
            );
            first = runs.end;
        }
        Ok(())
    }

    fn attend_slab<E: Element>(
        &self,
        job: &Job<'_, E>,
        runs: Range<usize>,
        states: &mut [f32],
        (sinks, out): (Option<&[f32]>, &mut [E]),
    ) {
        let mut work = Work::new(job, runs.clone(), states);
        let tasks = work.tasks();
        let num_threads = match tasks.len() > 1 && job.products(runs.clone()) > SMALL {
            true => self.num_threads.min(tasks.len()),
            false => 1,
        };
        self.each(num_threads, tasks, |task| {
            let part = task.part * PART..(task.part + 1) * PART;
            E::attend(self.isa, job, task.members, part);
        });
        let found = results(job, runs, states, out);
        self.each(num_threads.min(found.len()), found, |found| {
            for (run, states, out) in found {
                finish(job, run, (states, sinks), out);
            }
        });
    }

    /// Every thread takes the next task until none is left.
    fn each<T: Send>(&self, num_threads: usize, tasks: Vec<T>, work: impl Fn(T) + Sync) {
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
    fn new<E>(job: &Job<'_, E>, runs: Range<usize>, states: &'a mut [f32]) -> Self {
        let (mut rest, mut pieces, mut firsts) = (states, vec![], vec![]);
        for run in &job.step.runs[runs.clone()] {
            firsts.push(pieces.len());
            for _ in job.parts(run) {
                let (state, others) =
                    std::mem::take(&mut rest).split_at_mut(run.count * job.per_row());
                pieces.push(Some(state));
                rest = others;
            }
        }
        let (mut members, mut tasks) = (Vec::with_capacity(pieces.len()), vec![]);
        let groups = job.step.groups.iter().filter(|_| job.window.is_none());
        for group in groups {
            let here = group.runs.iter().copied().filter(|run| runs.contains(run));
            let here: Vec<usize> = here.collect();
            let each = MOST_ROWS.div_ceil(
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

/// A run, what it found in its parts, and where its rows go.
type Found<'a, E> = (&'a Run, &'a [f32], &'a mut [E]);

/// What there is to bring together, cut into tasks.
fn results<'a, E>(
    job: &Job<'a, E>,
    runs: Range<usize>,
    states: &'a [f32],
    out: &'a mut [E],
) -> Vec<Vec<Found<'a, E>>> {
    let per_out = job.heads * job.shape.dim_v;
    let (mut tasks, mut task) = (vec![], vec![]);
    let (mut rest, mut others, mut first, mut size) = (states, out, 0, 0);
    for run in &job.step.runs[runs] {
        let (own, after) = rest.split_at(job.size(run));
        let (_, from) = others.split_at_mut((run.first_row - first) * per_out);
        let (out, beyond) = from.split_at_mut(run.count * per_out);
        (rest, others, first) = (after, beyond, run.first_row + run.count);
        task.push((run, own, out));
        size += own.len();
        if size > MOST_FLOATS {
            tasks.push(std::mem::take(&mut task));
            size = 0;
        }
    }
    tasks.push(task);
    tasks
}

/// Brings the parts of every query of a run together.
fn finish<E: Element>(
    job: &Job<'_, E>,
    run: &Run,
    (states, sinks): (&[f32], Option<&[f32]>),
    out: &mut [E],
) {
    let (size, dim_v) = (state_len(job.shape.dim_v), job.shape.dim_v);
    let mut row = vec![0.0; dim_v];
    for (at, out) in out.chunks_exact_mut(dim_v).enumerate() {
        let sink = sinks.map(|sinks| sinks[at % job.heads]);
        kernel::finish(
            &states[at * size..],
            run.count * job.per_row(),
            sink,
            &mut row,
        );
        for (element, &float) in out.iter_mut().zip(&row) {
            *element = E::narrow(float);
        }
    }
}
