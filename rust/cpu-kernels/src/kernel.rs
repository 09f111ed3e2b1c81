//! Attention of the rows of a task over their keys, part by part and tile by tile.

use std::ops::Range;

use crate::cache_tiles::Tiles;
use crate::element::Element;
use crate::job::{HEADER, Job, Member, Task, state_len};
use crate::lanes::{Scratch, Vector, larger};
use crate::parts::{add, divide, faded, finish_rows, gather};
use crate::step::{CacheShape, PART, Run, TILE};

/// The factor on the products of queries and keys, and their cap.
pub(crate) type How = (f32, Option<f32>);

/// Products of queries with keys and of weights with values, for vectors of `L` rows.
pub(crate) trait Arithmetic<E, const L: usize> {
    /// `L` floats.
    type Lanes: Vector<L>;

    /// True if a vector with this many used lanes has its sums as `[lanes, dim_v]` instead of `[dim_v, lanes]`.
    fn is_narrow(num_rows: usize) -> bool;

    /// For this number of rows, and parts of at most this number of tiles.
    fn new(shape: &CacheShape, num_rows: usize, num_tiles: usize) -> Self;

    /// Loads the queries of a KV head for vector `number`.
    fn take_queries<'q>(&mut self, number: usize, queries: impl Iterator<Item = &'q [E]>)
    where
        E: 'q;

    /// Attends with all vectors over the tiles of a part, from empty states: `states` is `[vectors, state_len]`.
    fn attend(
        &mut self,
        how: How,
        tiles: &Tiles<'_, E>,
        vectors: &[Bounds<L>],
        states: &mut [[f32; L]],
    );
}

/// Runs a task: attends with the rows of some runs over a part, from nothing, or with those of one run over all that
/// is left, and completes them.
///
/// What is computed for a row does not depend on who else is there: a lane of a vector is one query head of one row,
/// whatever is added up for it is added up in the order of the dimensions and of the keys, and parts come together in
/// their order ([`crate::parts`]).
///
/// `IS_REST` says which kind of task it is ([`Task::is_rest`]): one function with both takes the compiler much longer than
/// two.
#[inline(always)]
pub(crate) fn work<E: Element, A: Arithmetic<E, L>, const L: usize, const IS_REST: bool>(
    job: &Job<'_, E>,
    task: Task<'_, '_, E>,
) {
    match task {
        Task::Part { part, members } if !IS_REST => attend::<E, A, L>(job, part, members),
        Task::Rest { run, states, out } if IS_REST => complete::<E, A, L>(job, run, states, out),
        _ => unreachable!("the task is of the other kind"),
    }
}

/// The state of each run is `[rows, query heads, state_len]`. Where there are several runs, they have the blocks of the
/// part in common.
#[inline(always)]
fn attend<E: Element, A: Arithmetic<E, L>, const L: usize>(
    job: &Job<'_, E>,
    part: usize,
    members: &mut [Member<'_>],
) {
    let runs = members.iter().map(|(run, _)| &job.step.runs[*run]);
    let mut rows = Rows::<A, L>::of(job, runs);
    let mut states = rows.states(job, 1);
    let states = vectors_in::<L>(&mut states, rows.size(job));
    for kv_head in 0..job.shape.kv_heads {
        rows.take_queries(job, kv_head);
        rows.attend_part(job, kv_head, part, states);
        give_states::<E, A, L>(job, &rows.rows, kv_head, states, members);
    }
}

/// Attends with a run's rows over the parts after the first ones, and writes `out`, `[rows, query heads, dim_v]`.
/// `first_states`: of the first parts, `[parts, rows, query heads, state_len]`.
#[inline(always)]
fn complete<E: Element, A: Arithmetic<E, L>, const L: usize>(
    job: &Job<'_, E>,
    run: &Run,
    first_states: &[f32],
    out: &mut [E],
) {
    let num_first = first_states.len() / (run.count * job.per_row());
    let parts = job.parts(run);
    let rest = parts.start + num_first..parts.end;
    if rest.is_empty() {
        return finish_rows(job, first_states, run.count, out);
    }
    let mut rows = Rows::<A, L>::of(job, std::iter::once(run));
    let (mut sums, mut states) = (rows.states(job, job.shape.kv_heads), rows.states(job, 1));
    let size = rows.size(job);
    let sums = vectors_in::<L>(&mut sums, job.shape.kv_heads * size);
    let states = vectors_in::<L>(&mut states, size);
    let first_is_all = num_first == 0 && job.sinks.is_none();
    if !first_is_all {
        for (kv_head, sums) in sums.chunks_exact_mut(size).enumerate() {
            rows.begin(job, kv_head, first_states, run.count, sums);
        }
    }
    // Heads are adjacent: reading one head's part also caches some of the next head's.
    for part in rest.clone() {
        for (kv_head, sums) in sums.chunks_exact_mut(size).enumerate() {
            rows.take_queries(job, kv_head);
            let is_first = first_is_all && part == rest.start;
            let target = if is_first { &mut *sums } else { &mut *states };
            rows.attend_part(job, kv_head, part, target);
            if !is_first {
                rows.merge(job, states, sums);
            }
        }
    }
    for (kv_head, sums) in sums.chunks_exact_mut(size).enumerate() {
        give_rows::<E, A, L>(job, &rows.rows, kv_head, sums, out);
    }
}

/// This number of vectors.
#[inline(always)]
fn vectors_in<const L: usize>(memory: &mut Scratch, count: usize) -> &mut [[f32; L]] {
    &mut memory.elements_mut().as_chunks_mut::<L>().0[..count]
}

/// One query head of one row, by its index in its run.
struct Row {
    member: usize,
    /// Its row in the step.
    query: usize,
    row: usize,
    /// Among the heads that share a KV head.
    head: usize,
    position: usize,
}

impl Row {
    /// Its index in `[rows, query heads]` of its run.
    #[inline(always)]
    fn index<E>(&self, job: &Job<'_, E>, kv_head: usize) -> usize {
        self.row * job.heads + kv_head * job.group + self.head
    }
}

/// The lanes of a task, in order, the same for every KV head, and their arithmetic.
struct Rows<'j, A, const L: usize> {
    rows: Vec<Row>,
    vectors: Vec<Bounds<L>>,
    /// Positions that any of them sees.
    seen: Range<usize>,
    /// Where their keys lie: all of them read the same.
    blocks: &'j [u32],
    arithmetic: A,
}

impl<'j, A, const L: usize> Rows<'j, A, L> {
    #[inline(always)]
    fn of<E>(job: &Job<'j, E>, runs: impl Iterator<Item = &'j Run> + Clone) -> Self
    where
        A: Arithmetic<E, L>,
    {
        let (mut rows, mut blocks) = (vec![], 0..0);
        for (member, run) in runs.enumerate() {
            blocks = run.blocks.clone();
            for row in 0..run.count {
                rows.extend((0..job.group).map(|head| Row {
                    member,
                    query: run.first_row + row,
                    row,
                    head,
                    position: run.position + row,
                }));
            }
        }
        let vectors: Vec<Bounds<L>> = rows.chunks(L).map(|rows| bounds(job, rows)).collect();
        let low = vectors.iter().map(|vector| vector.any.start).min();
        let high = vectors.iter().map(|vector| vector.any.end).max();
        let seen = low.unwrap_or(0)..high.unwrap_or(0);
        let num_tiles = (seen.end.div_ceil(TILE) - seen.start / TILE).min(PART / TILE);
        Self {
            arithmetic: A::new(&job.shape, rows.len(), num_tiles),
            rows,
            vectors,
            seen,
            blocks: &job.step.blocks[blocks],
        }
    }

    /// Memory for `[kv_heads, vectors, state_len]`.
    #[inline(always)]
    fn states<E>(&self, job: &Job<'_, E>, kv_heads: usize) -> Scratch {
        Scratch::zeros(kv_heads * self.size(job) * L)
    }

    /// `[vectors, state_len]`, vectors of numbers.
    #[inline(always)]
    fn size<E>(&self, job: &Job<'_, E>) -> usize {
        self.vectors.len() * state_len(job.shape.dim_v)
    }

    #[inline(always)]
    fn take_queries<E>(&mut self, job: &Job<'_, E>, kv_head: usize)
    where
        A: Arithmetic<E, L>,
    {
        for (number, rows) in self.rows.chunks(L).enumerate() {
            let dim = job.shape.dim_k;
            let queries = rows.iter().map(|row| {
                let head = kv_head * job.group + row.head;
                &job.query.row(row.query)[head * dim..][..dim]
            });
            self.arithmetic.take_queries(number, queries);
        }
    }

    /// Attends over the keys of one part, from empty states.
    #[inline(always)]
    fn attend_part<E: Element>(
        &mut self,
        job: &Job<'_, E>,
        kv_head: usize,
        part: usize,
        states: &mut [[f32; L]],
    ) where
        A: Arithmetic<E, L>,
    {
        let tiles = Tiles::of(job, self.blocks, &self.seen, kv_head, part);
        let how = (job.scaling, job.softcap);
        self.arithmetic.attend(how, &tiles, &self.vectors, states);
    }

    /// Merges the states of the first parts, `[parts, count, query heads, state_len]`, into `sums`.
    #[inline(always)]
    fn begin<E: Element>(
        &self,
        job: &Job<'_, E>,
        kv_head: usize,
        first_states: &[f32],
        count: usize,
        sums: &mut [[f32; L]],
    ) where
        A: Arithmetic<E, L>,
    {
        let (size, dim) = (state_len(job.shape.dim_v), job.shape.dim_v);
        let mut own = vec![0.0; size];
        for (rows, lanes) in self.rows.chunks(L).zip(sums.chunks_exact_mut(size)) {
            lanes.fill([0.0; L]);
            lanes[0] = [f32::NEG_INFINITY; L];
            let (header, sums) = lanes.split_at_mut(HEADER);
            for (lane, row) in rows.iter().enumerate() {
                let nothing = job.nothing(kv_head * job.group + row.head);
                for (lanes, float) in header.iter_mut().zip(nothing) {
                    lanes[lane] = float;
                }
                if first_states.is_empty() {
                    continue;
                }
                gather(job, first_states, count, row.index(job, kv_head), &mut own);
                for (lanes, &float) in header.iter_mut().zip(&own) {
                    lanes[lane] = float;
                }
                match A::is_narrow(rows.len()) {
                    true => {
                        sums.as_flattened_mut()[lane * dim..][..dim].copy_from_slice(&own[HEADER..])
                    }
                    false => {
                        for (lanes, &float) in sums.iter_mut().zip(&own[HEADER..]) {
                            lanes[lane] = float;
                        }
                    }
                }
            }
        }
    }

    /// Adds the states of a part to `sums`, as [`crate::parts`] does.
    #[inline(always)]
    fn merge<E>(&self, job: &Job<'_, E>, states: &[[f32; L]], sums: &mut [[f32; L]])
    where
        A: Arithmetic<E, L>,
    {
        let (size, dim) = (state_len(job.shape.dim_v), job.shape.dim_v);
        let vectors = sums.chunks_exact_mut(size).zip(states.chunks_exact(size));
        for ((sums, part), vector) in vectors.zip(&self.vectors) {
            let (mut own, mut other) = ([1.0; L], [1.0; L]);
            for lane in 0..L {
                let now = larger(part[0][lane], sums[0][lane]);
                own[lane] = faded(sums[0][lane], now);
                other[lane] = faded(part[0][lane], now);
                sums[0][lane] = now;
                sums[1][lane] = part[1][lane].mul_add(other[lane], sums[1][lane] * own[lane]);
            }
            let (sums, part) = (&mut sums[HEADER..], &part[HEADER..]);
            if A::is_narrow(vector.num_rows) {
                let sums = sums.as_flattened_mut().chunks_exact_mut(dim);
                let rows = sums.zip(part.as_flattened().chunks_exact(dim));
                for (row, (sums, part)) in rows.take(vector.num_rows).enumerate() {
                    add(sums, part, own[row], other[row]);
                }
                continue;
            }
            let (own, other) = (A::Lanes::load(&own), A::Lanes::load(&other));
            for (sum, part) in sums.iter_mut().zip(part) {
                let kept = A::Lanes::load(sum).multiply(own);
                A::Lanes::load(part).multiply_add(other, kept).store(sum);
            }
        }
    }
}

/// The positions that the lanes of a vector see.
pub(crate) struct Bounds<const L: usize> {
    /// Lanes that stand for something.
    pub(crate) num_rows: usize,
    pub(crate) lows: [i32; L],
    pub(crate) highs: [i32; L],
    /// Those that any of them sees.
    pub(crate) any: Range<usize>,
    /// Those that each of them sees.
    pub(crate) all: Range<usize>,
}

impl<const L: usize> Bounds<L> {
    /// Positions of the tile from `start` on that any lane sees, counted from there.
    #[inline(always)]
    pub(crate) fn near(&self, start: usize) -> Range<usize> {
        let end = start + TILE;
        let seen = self.any.start.max(start)..self.any.end.min(end).max(start);
        seen.start.min(seen.end) - start..seen.end - start
    }

    /// Whether all lanes see the same of them.
    #[inline(always)]
    pub(crate) fn sees_same(&self, start: usize) -> bool {
        let end = start + TILE;
        let [any, all] =
            [&self.any, &self.all].map(|seen| seen.start.max(start)..seen.end.min(end));
        any == all
    }

    /// Whether each lane sees all of them.
    #[cfg(target_arch = "x86_64")] // the others hide by position
    #[inline(always)]
    pub(crate) fn is_whole(&self, start: usize) -> bool {
        self.all.start <= start && start + TILE <= self.all.end
    }
}

/// Unused lanes see what the first one sees.
#[inline(always)]
fn bounds<E, const L: usize>(job: &Job<'_, E>, rows: &[Row]) -> Bounds<L> {
    let sees = |row: &Row| job.low(row.position)..row.position + 1;
    let (mut any, mut all) = (sees(&rows[0]), sees(&rows[0]));
    let (mut lows, mut highs) = ([any.start as i32; L], [any.end as i32; L]);
    for (at, row) in rows.iter().enumerate() {
        let sees = sees(row);
        (lows[at], highs[at]) = (sees.start as i32, sees.end as i32);
        any = any.start.min(sees.start)..any.end.max(sees.end);
        all = all.start.max(sees.start)..all.end.min(sees.end);
    }
    Bounds {
        num_rows: rows.len(),
        lows,
        highs,
        any,
        all,
    }
}

/// The sums of a vector as `[lanes, dim_v]`: as they are, or turned into `memory`.
#[inline(always)]
fn in_rows<'s, V: Vector<L>, const L: usize>(
    is_narrow: bool,
    sums: &'s [[f32; L]],
    memory: &'s mut Vec<f32>,
) -> &'s [f32] {
    if is_narrow {
        return sums.as_flattened();
    }
    let dim = sums.len();
    memory.resize(L * dim, 0.0);
    let (wide, rest) = sums.as_chunks::<L>();
    for (at, lanes) in wide.iter().enumerate() {
        let rows = V::transposed(std::array::from_fn(|dim| V::load(&lanes[dim])));
        for (memory, row) in memory.chunks_exact_mut(dim).zip(rows) {
            row.store(
                memory[at * L..]
                    .first_chunk_mut()
                    .expect("there are so many dimensions"),
            );
        }
    }
    for (lane, memory) in memory.chunks_exact_mut(dim).enumerate() {
        for (float, lanes) in memory[wide.len() * L..].iter_mut().zip(rest) {
            *float = lanes[lane];
        }
    }
    memory
}

/// Calls `take` with each row's result: header and sums.
#[inline(always)]
fn give<A: Arithmetic<E, L>, E: Element, const L: usize>(
    job: &Job<'_, E>,
    rows: &[Row],
    states: &[[f32; L]],
    mut take: impl FnMut(&Row, [f32; HEADER], &[f32]),
) {
    let (dim, size) = (job.shape.dim_v, state_len(job.shape.dim_v));
    let mut memory = vec![];
    for (rows, lanes) in rows.chunks(L).zip(states.chunks_exact(size)) {
        let (header, sums) = lanes.split_at(HEADER);
        let sums = in_rows::<A::Lanes, L>(A::is_narrow(rows.len()), sums, &mut memory);
        for (lane, (row, sums)) in rows.iter().zip(sums.chunks_exact(dim)).enumerate() {
            take(row, [header[0][lane], header[1][lane]], sums);
        }
    }
}

/// Writes the lanes' states to their positions.
#[inline(always)]
fn give_states<E: Element, A: Arithmetic<E, L>, const L: usize>(
    job: &Job<'_, E>,
    rows: &[Row],
    kv_head: usize,
    states: &[[f32; L]],
    members: &mut [Member<'_>],
) {
    let size = state_len(job.shape.dim_v);
    give::<A, E, L>(job, rows, states, |row, header, sums| {
        let state = &mut members[row.member].1[row.index(job, kv_head) * size..][..size];
        state[..HEADER].copy_from_slice(&header);
        state[HEADER..].copy_from_slice(sums);
    });
}

/// Writes the output: the sums, each divided by the sum of its weights.
#[inline(always)]
fn give_rows<E: Element, A: Arithmetic<E, L>, const L: usize>(
    job: &Job<'_, E>,
    rows: &[Row],
    kv_head: usize,
    states: &[[f32; L]],
    out: &mut [E],
) {
    let dim = job.shape.dim_v;
    give::<A, E, L>(job, rows, states, |row, [_, total], sums| {
        divide(
            sums,
            total,
            &mut out[row.index(job, kv_head) * dim..][..dim],
        );
    });
}
