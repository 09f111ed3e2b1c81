//! The softmax: the rows of a run over a part of their keys, and how parts come together.

use std::ops::Range;

use crate::attention::{Job, Member};
use crate::element::Element;
use crate::lanes::{Scratch, exp, fetch, larger};
use crate::step::{CacheShape, Run};

/// Keys that are scored before their values are read: keys and values of a head stay in the L1 cache
/// from one query to the next.
pub(crate) const TILE: usize = 32;

/// What a query has found so far: the largest score, the sum of `e ^ (score - largest)`, and the sum of
/// the values so weighted. In memory one after the other.
const HEADER: usize = 2;

/// Floats of the state of one query.
pub(crate) fn state_len(dim_v: usize) -> usize {
    HEADER + dim_v
}

/// Products of queries with keys and of weights with values, for vectors of `L` rows.
pub(crate) trait Arithmetic<E, const L: usize> {
    /// A tile of keys and values, ready for any number of vectors.
    type Tile<'t>: Products<L>
    where
        Self: 't,
        E: 't;

    /// Whether the sums of a vector of which so many lanes are used are `[lanes, dim_v]` instead of `[dim_v, lanes]`.
    fn is_narrow(num_rows: usize) -> bool;

    /// For so many vectors.
    fn new(shape: &CacheShape, num_vectors: usize) -> Self;

    /// Takes the queries of a KV head: those of vector `number` are at `places` of the step's.
    fn take_queries(&mut self, number: usize, places: impl Iterator<Item = usize>, query: &[E]);

    /// Keys and values beside those in `near` repeat others.
    fn tile<'t>(
        &'t mut self,
        near: &Range<usize>,
        keys: [&'t [E]; TILE],
        values: [&'t [E]; TILE],
    ) -> Self::Tile<'t>;
}

/// What a tile is for.
pub(crate) trait Products<const L: usize> {
    /// The products of a vector of queries with, at least, the keys in `near`.
    fn scores(&self, vector: usize, near: &Range<usize>, scores: &mut [[f32; L]; TILE]);

    /// Adds the values, weighted, to the `sums` of so many rows, which count `faded` times from now on. Where
    /// the tile is not `whole`, some lanes do not see some of the keys in `near`; the weight is 0 then.
    fn weigh(
        &self,
        weights: &[[f32; L]; TILE],
        near_and_whole: (&Range<usize>, bool),
        faded: &[f32; L],
        rows_and_sums: (usize, &mut [[f32; L]]),
    );
}

/// Attends with the rows of some runs over the keys of a part, from nothing.
///
/// The state of each is `[rows, query heads, state_len]`. Where there are several runs, they have the blocks
/// of the part in common. What is computed for a row does not depend on who else is there.
///
/// A lane of a vector is one query head of one row; whatever is added up for it is added up in the order of
/// the dimensions and of the keys.
#[inline(always)]
pub(crate) fn attend<E: Element, A: Arithmetic<E, L>, const L: usize>(
    job: &Job<'_, E>,
    members: &mut [Member<'_>],
    part: Range<usize>,
) {
    let (shape, size) = (job.shape, state_len(job.shape.dim_v));
    let rows = rows(job, members);
    let vectors: Vec<Bounds<L>> = rows.chunks(L).map(|rows| bounds(job, rows)).collect();
    let low = rows.iter().map(|row| job.low(row.position)).min();
    let high = rows.iter().map(|row| row.position + 1).max();
    let seen = part.start.max(low.unwrap_or(0))..part.end.min(high.unwrap_or(0));
    let mut arithmetic = A::new(&shape, vectors.len());
    let mut states = Scratch::zeros(vectors.len() * size * L);
    let states = &mut states.floats_mut().as_chunks_mut::<L>().0[..vectors.len() * size];
    let model = &job.step.runs[members[0].0];
    fetch_tile(
        job,
        model,
        seen.start..seen.end.min(seen.start / TILE * TILE + TILE),
    );
    for kv_head in 0..shape.kv_heads {
        for (number, rows) in rows.chunks(L).enumerate() {
            let head = |row: &Row| row.first_query + kv_head * job.group + row.head;
            let places = rows.iter().map(|row| head(row) * shape.dim_k);
            arithmetic.take_queries(number, places, job.query);
        }
        for state in states.chunks_exact_mut(size) {
            state.fill([0.0; L]);
            state[0] = [f32::NEG_INFINITY; L];
        }
        let first = seen.start / TILE * TILE; // parts begin with a tile
        for start in (first..seen.end).step_by(TILE) {
            let near = seen.start.max(start)..seen.end.min(start + TILE);
            let at = slots(job, model, start, &near).map(|slot| slot * shape.kv_heads + kv_head);
            let keys = at.map(|row| &job.keys[row * shape.dim_k..][..shape.dim_k]);
            let values = at.map(|row| &job.values[row * shape.dim_v..][..shape.dim_v]);
            if kv_head == 0 && start + TILE < seen.end {
                fetch_tile(job, model, start + TILE..seen.end.min(start + 2 * TILE));
            }
            let near = near.start - start..near.end - start;
            let tile = arithmetic.tile(&near, keys, values);
            let how = (job.scaling, job.softcap);
            for (number, state) in states.chunks_exact_mut(size).enumerate() {
                attend_tile(how, (&tile, start), (number, &vectors[number]), state);
            }
        }
        give_states::<E, A, L>(job, &rows, kv_head, states, members);
    }
}

/// One query head of one row, by its place in its run.
struct Row {
    member: usize,
    /// Where the query of the first KV head's first head lies in the step.
    first_query: usize,
    row: usize,
    /// Among the heads that share a KV head.
    head: usize,
    position: usize,
}

/// What all lanes of a task stand for, in their order: the same for every KV head.
#[inline(always)]
fn rows<E>(job: &Job<'_, E>, members: &[Member<'_>]) -> Vec<Row> {
    let mut rows = vec![];
    for (member, (run, _)) in members.iter().enumerate() {
        let run = &job.step.runs[*run];
        for row in 0..run.count {
            rows.extend((0..job.group).map(|head| Row {
                member,
                first_query: (run.first_row + row) * job.heads,
                row,
                head,
                position: run.position + row,
            }));
        }
    }
    rows
}

/// Which positions the lanes of a vector see.
struct Bounds<const L: usize> {
    /// Lanes that stand for something.
    num_rows: usize,
    lows: [i32; L],
    highs: [i32; L],
    /// Those that any of them sees.
    any: Range<usize>,
    /// Those that each of them sees.
    all: Range<usize>,
}

/// Lanes that stand for nothing see what the first one sees.
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

/// Writes what the lanes have found where it belongs.
#[inline(always)]
fn give_states<E: Element, A: Arithmetic<E, L>, const L: usize>(
    job: &Job<'_, E>,
    rows: &[Row],
    kv_head: usize,
    states: &[[f32; L]],
    members: &mut [Member<'_>],
) {
    let (dim, size) = (job.shape.dim_v, state_len(job.shape.dim_v));
    for (rows, lanes) in rows.chunks(L).zip(states.chunks_exact(size)) {
        let (header, sums) = lanes.split_at(HEADER);
        for (lane, row) in rows.iter().enumerate() {
            let at = row.row * job.heads + kv_head * job.group + row.head;
            let state = &mut members[row.member].1[at * size..][..size];
            let (own, found) = state.split_at_mut(HEADER);
            for (float, lanes) in own.iter_mut().zip(header) {
                *float = lanes[lane];
            }
            match A::is_narrow(rows.len()) {
                true => found.copy_from_slice(&sums.as_flattened()[lane * dim..][..dim]),
                false => {
                    for (float, lanes) in found.iter_mut().zip(sums) {
                        *float = lanes[lane];
                    }
                }
            }
        }
    }
}

/// Where the keys of the tile at `start` stand in the cache; beside `seen`, its first or last one.
#[inline(always)]
fn slots<E: Element>(
    job: &Job<'_, E>,
    run: &Run,
    start: usize,
    seen: &Range<usize>,
) -> [usize; TILE] {
    let (table, size) = (&job.step.blocks[run.blocks.clone()], job.shape.block_size);
    let mut slots = [0; TILE];
    for (at, slot) in slots.iter_mut().enumerate() {
        let position = (start + at).clamp(seen.start, seen.end - 1);
        *slot = table[position / size] as usize * size + position % size;
    }
    slots
}

/// Asks for the keys and values at these positions, of all heads, to be brought into the cache: blocks lie anywhere,
/// and no processor guesses where the next one is.
#[inline(always)]
fn fetch_tile<E>(job: &Job<'_, E>, run: &Run, positions: Range<usize>) {
    let (table, size) = (&job.step.blocks[run.blocks.clone()], job.shape.block_size);
    let (keys, values) = (
        job.shape.kv_heads * job.shape.dim_k,
        job.shape.kv_heads * job.shape.dim_v,
    );
    let mut position = positions.start;
    while position < positions.end {
        let count = (size - position % size).min(positions.end - position);
        let slot = table[position / size] as usize * size + position % size;
        fetch(&job.keys[slot * keys..][..count * keys]);
        fetch(&job.values[slot * values..][..count * values]);
        position += count;
    }
}

/// A vector of rows over the tile that begins at `start`.
#[inline(always)]
fn attend_tile<const L: usize>(
    (scaling, softcap): (f32, Option<f32>),
    (tile, start): (&impl Products<L>, usize),
    (number, bounds): (usize, &Bounds<L>),
    state: &mut [[f32; L]],
) {
    let end = start + TILE;
    let seen = bounds.any.start.max(start)..bounds.any.end.min(end);
    if seen.is_empty() {
        return;
    }
    let near = seen.start - start..seen.end - start;
    let whole = bounds.all.start <= start && end <= bounds.all.end;
    let mut weights = [[f32::NEG_INFINITY; L]; TILE];
    tile.scores(number, &near, &mut weights);
    for score in weights[near.clone()].as_flattened_mut() {
        *score *= scaling;
    }
    if let Some(cap) = softcap {
        for score in weights[near.clone()].as_flattened_mut() {
            *score = cap * (*score / cap).tanh();
        }
    }
    if !whole {
        for (at, score) in weights.iter_mut().enumerate() {
            let position = (start + at) as i32;
            for lane in 0..L {
                let is_seen = bounds.lows[lane] <= position && position < bounds.highs[lane];
                score[lane] = if is_seen {
                    score[lane]
                } else {
                    f32::NEG_INFINITY
                };
            }
        }
    }
    let (header, sums) = state.split_at_mut(HEADER);
    let faded = soften(&mut weights, header);
    tile.weigh(&weights, (&near, whole), &faded, (bounds.num_rows, sums));
}

/// Turns scores into weights `e ^ (score - largest)` and brings the header up to them; how much what was found
/// before counts now.
#[inline(always)]
fn soften<const L: usize>(weights: &mut [[f32; L]; TILE], header: &mut [[f32; L]]) -> [f32; L] {
    let (before, mut now) = (header[0], header[0]);
    for score in &*weights {
        for lane in 0..L {
            now[lane] = larger(score[lane], now[lane]);
        }
    }
    let mut faded = [1.0; L];
    for lane in 0..L {
        let less = exp(before[lane] - now[lane]);
        faded[lane] = if now[lane] == before[lane] { 1.0 } else { less };
    }
    header[0] = now;
    let mut total = header[1];
    for lane in 0..L {
        total[lane] *= faded[lane];
    }
    for weight in weights {
        for lane in 0..L {
            let power = exp(weight[lane] - now[lane]);
            weight[lane] = if weight[lane] == f32::NEG_INFINITY {
                0.0
            } else {
                power
            };
            total[lane] += weight[lane];
        }
    }
    header[1] = total;
    faded
}

/// Brings the parts of one query together and divides: `states` are `[parts, stride]`, of which the
/// first `state_len` floats count. A sink is a score without a value.
pub(crate) fn finish(states: &[f32], stride: usize, sink: Option<f32>, out: &mut [f32]) {
    let mut largest = sink.unwrap_or(f32::NEG_INFINITY);
    for state in states.chunks(stride) {
        largest = larger(largest, state[0]);
    }
    let mut total = sink.map_or(0.0, |sink| exp(sink - largest));
    out.fill(0.0);
    for state in states.chunks(stride) {
        let (header, sum) = state.split_at(HEADER);
        if header[1] == 0.0 {
            continue; // it sees nothing of this part
        }
        let faded = exp(header[0] - largest);
        total = header[1].mul_add(faded, total);
        for (element, &found) in out.iter_mut().zip(sum) {
            *element += found * faded;
        }
    }
    for element in out {
        *element /= total;
    }
}
