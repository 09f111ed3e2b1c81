//! Attention in float32: keys are the lanes of scores, elements of a value those of sums.
//!
//! A score is added up in the order of the dimensions, a sum in that of the keys. Each product is rounded once, with what
//! it is added to.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::take;
use std::ops::Range;

use crate::cache_tiles::Tiles;
use crate::element::{Element, widen};
use crate::kernel::{Arithmetic, Bounds, How};
use crate::key_lanes::{HALVES, KeyLanes, LANES, PER_ROW, attend};
use crate::lanes::{Scratch, Vector};
use crate::softmax::soften;
use crate::step::{CacheShape, TILE};

/// Scores or sums of 16 lanes.
type Lanes = [f32; LANES];

/// Queries, and a tile; of several vectors of rows, a part. `SUMS` vectors of sums stay in registers.
pub(crate) struct Floats<V, const SUMS: usize> {
    dim_k: usize,
    dim_v: usize,
    /// Tiles that are kept for the next vector of rows.
    num_kept: usize,
    memory: Memory,
    by: PhantomData<V>,
}

/// Buffers, large enough for the part or larger.
#[derive(Default)]
struct Memory {
    /// `[vectors, lanes, dim_k]`.
    queries: Scratch,
    /// `[TILE, dim_k]`, of a cache that does not hold floats.
    wide: Scratch,
    /// `[tiles, halves, dim_k]` of keys.
    keys: Scratch,
    /// `[tiles, TILE, vectors of a value]` of elements, unless they are read where they lie.
    values: Scratch,
    /// `[rows, tiles, halves]` of keys: scores, then weights.
    scores: Scratch,
    /// `[rows, vectors of a value]` of elements.
    sums: Scratch,
}

thread_local! {
    /// From task to task of a thread: fresh memory costs as much as the work of a short one.
    static KEPT: Cell<Memory> = Cell::default();
}

impl<V, const SUMS: usize> Drop for Floats<V, SUMS> {
    fn drop(&mut self) {
        KEPT.set(take(&mut self.memory));
    }
}

impl<V, const SUMS: usize> Floats<V, SUMS> {
    /// Where the keys of a tile are, in vectors.
    fn keys_of(&self, tile: usize) -> Range<usize> {
        let size = HALVES * self.dim_k;
        let at = tile % self.num_kept;
        at * size..(at + 1) * size
    }

    /// The same of values.
    fn values_of(&self, tile: usize) -> Range<usize> {
        let size = TILE * self.per_row();
        let at = tile % self.num_kept;
        at * size..(at + 1) * size
    }

    /// Vectors of a value, and of a row's sums.
    fn per_row(&self) -> usize {
        self.dim_v.div_ceil(LANES)
    }
}

impl<E: Element, V: Vector<LANES>, const SUMS: usize> Arithmetic<E, LANES> for Floats<V, SUMS> {
    type Lanes = V;

    #[inline(always)]
    fn is_narrow(_: usize) -> bool {
        true
    }

    #[inline(always)]
    fn new(shape: &CacheShape, num_rows: usize, num_tiles: usize) -> Self {
        let num_vectors = num_rows.div_ceil(LANES);
        let num_kept = if num_vectors > 1 { num_tiles } else { 1 };
        let mut memory = KEPT.take();
        make_room(&mut memory.queries, num_vectors * LANES * shape.dim_k);
        make_room(&mut memory.keys, num_kept * TILE * shape.dim_k);
        Self {
            dim_k: shape.dim_k,
            dim_v: shape.dim_v,
            num_kept,
            memory,
            by: PhantomData,
        }
    }

    #[inline(always)]
    fn take_queries<'q>(&mut self, number: usize, queries: impl Iterator<Item = &'q [E]>)
    where
        E: 'q,
    {
        let size = self.dim_k;
        let memory = &mut self.memory.queries.elements_mut()[number * LANES * size..];
        for (row, query) in memory.chunks_exact_mut(size).zip(queries) {
            widen(query, row);
        }
    }

    #[inline(always)]
    fn attend(
        &mut self,
        how: How,
        tiles: &Tiles<'_, E>,
        vectors: &[Bounds<LANES>],
        states: &mut [[f32; LANES]],
    ) {
        attend(self, how, tiles, vectors, states);
    }
}

impl<E: Element, V: Vector<LANES>, const SUMS: usize> KeyLanes<E> for Floats<V, SUMS> {
    #[inline(always)]
    fn make_room(&mut self, max_rows: usize) {
        let per_row = self.per_row();
        let memory = &mut self.memory;
        make_room(&mut memory.scores, max_rows * PER_ROW * TILE);
        make_room(&mut memory.sums, max_rows * per_row * LANES);
    }

    #[inline(always)]
    fn take_keys(&mut self, tiles: &Tiles<'_, E>, tile: usize) {
        let (tile_vectors, size) = (self.keys_of(tile), self.dim_k);
        let keys = tiles.keys(tile);
        let Memory {
            wide,
            keys: columns,
            ..
        } = &mut self.memory;
        if !tiles.are_floats() {
            make_room(wide, TILE * size);
            for at in tiles.near(tile) {
                keys.widen(at, &mut wide.elements_mut()[at * size..][..size]);
            }
        }
        let wide = wide.elements();
        // Scores with keys that no row sees are computed, and hidden.
        let mut rows: [&[f32]; TILE] = [&[]; TILE];
        for (at, row) in rows.iter_mut().enumerate() {
            *row = match keys.in_place(at) {
                Some(key) => key,
                None => &wide[at * size..][..size],
            };
        }
        turn_keys::<V>(&rows, &mut vectors_mut(columns)[tile_vectors]);
    }

    #[inline(always)]
    fn score(&mut self, vector: usize, num_rows: usize, tile: usize) {
        let tile_vectors = self.keys_of(tile);
        let Memory {
            queries,
            keys,
            scores,
            ..
        } = &mut self.memory;
        let keys = &vectors(keys)[tile_vectors];
        let size = self.dim_k;
        let queries = &queries.elements()[vector * LANES * size..][..num_rows * size];
        let scores = vectors_mut(scores);
        let mut row = 0;
        while row < num_rows {
            let queries = &queries[row * size..];
            let scores = &mut scores[row * PER_ROW * HALVES + tile * HALVES..];
            row += match (SUMS, num_rows - row) {
                (1, _) => score::<V, 1, 1>(queries, keys, scores),
                (_, 1) => score::<V, 1, 2>(queries, keys, scores),
                (_, 2) => score::<V, 2, 2>(queries, keys, scores),
                (6, 4 | 8) => score::<V, 4, 1>(queries, keys, scores),
                (6, _) | (_, 3) => score::<V, 3, 2>(queries, keys, scores),
                (_, 4..8) => score::<V, 4, 2>(queries, keys, scores),
                _ => score::<V, 8, 2>(queries, keys, scores),
            };
        }
    }

    #[inline(always)]
    fn soften(
        &mut self,
        how: How,
        start: usize,
        bounds: &Bounds<LANES>,
        tiles: Range<usize>,
        header: &mut [[f32; LANES]],
    ) {
        let per_row = self.per_row();
        let first = (start + tiles.start * TILE) as i32;
        let rows = vectors_mut(&mut self.memory.scores).chunks_exact_mut(HALVES * PER_ROW);
        for (lane, scores) in rows.take(bounds.num_rows).enumerate() {
            let scores = &mut scores[tiles.start * HALVES..tiles.end * HALVES];
            let seen = bounds.lows[lane] - first..bounds.highs[lane] - first;
            let [reference, total] = soften(how, scores, seen);
            header[0][lane] = reference;
            header[1][lane] = total;
        }
        vectors_mut(&mut self.memory.sums)[..bounds.num_rows * per_row].fill([0.0; LANES]);
    }

    #[inline(always)]
    fn take_values(&mut self, tiles: &Tiles<'_, E>, tile: usize) {
        let (tile_vectors, per_row, dim) = (self.values_of(tile), self.per_row(), self.dim_v);
        if tiles.are_floats() && dim.is_multiple_of(LANES) {
            return;
        }
        let values = tiles.values(tile);
        make_room(&mut self.memory.values, tile_vectors.end * LANES);
        let rows = &mut vectors_mut(&mut self.memory.values)[tile_vectors];
        for at in tiles.near(tile) {
            let row = rows[at * per_row..][..per_row].as_flattened_mut();
            values.widen(at, &mut row[..dim]);
            row[dim..].fill(0.0);
        }
    }

    #[inline(always)]
    fn weigh(&mut self, tiles: &Tiles<'_, E>, bounds: &Bounds<LANES>, tile: usize) {
        let (tile_vectors, per_row) = (self.values_of(tile), self.per_row());
        let is_even = self.dim_v.is_multiple_of(LANES);
        let Memory {
            values: kept,
            scores,
            sums,
            ..
        } = &mut self.memory;
        let values = tiles.values(tile);
        let mut rows: [&[Lanes]; TILE] = [&[]; TILE];
        for (at, row) in rows.iter_mut().enumerate() {
            *row = match values.in_place(at) {
                Some(value) if is_even => &value.as_chunks().0[..per_row],
                _ => &vectors(kept)[tile_vectors.clone()][at * per_row..][..per_row],
            };
        }
        let start = tiles.start_of(tile);
        let near = bounds.near(start);
        let values = (&rows, &near);
        let (sums, scores) = (vectors_mut(sums), vectors(scores));
        let num_rows = bounds.num_rows;
        let mut row = 0;
        while row < num_rows {
            let sums = &mut sums[row * per_row..num_rows * per_row];
            let weights = |next: usize| -> &[f32; TILE] {
                let first = ((row + next) * PER_ROW + tile) * HALVES;
                let weights = scores[first..][..HALVES].as_flattened();
                weights.first_chunk().expect("a tile has so many keys")
            };
            row += match bounds.sees_same(start) {
                true => weigh::<V, SUMS, false>(weights, values, per_row, sums),
                false => weigh::<V, SUMS, true>(weights, values, per_row, sums),
            };
        }
    }

    #[inline(always)]
    fn give(&self, row: usize, sums: &mut [f32]) {
        let size = self.per_row() * LANES;
        let own = &self.memory.sums.elements()[row * size..][..sums.len()];
        sums.copy_from_slice(own);
    }
}

/// Room for so many floats, at least.
#[inline(always)]
fn make_room(memory: &mut Scratch, count: usize) {
    if memory.elements().len() < count {
        let before = take(memory);
        *memory = Scratch::zeros(count);
        memory.elements_mut()[..before.elements().len()].copy_from_slice(before.elements());
    }
}

#[inline(always)]
fn vectors(memory: &Scratch) -> &[Lanes] {
    memory.elements().as_chunks().0
}

#[inline(always)]
fn vectors_mut(memory: &mut Scratch) -> &mut [Lanes] {
    memory.elements_mut().as_chunks_mut().0
}

/// `columns[half][dim]` becomes a dimension of the keys of that half.
#[inline(always)]
fn turn_keys<V: Vector<LANES>>(keys: &[&[f32]; TILE], columns: &mut [Lanes]) {
    let size = columns.len() / HALVES;
    let halves = keys.as_chunks::<LANES>().0.iter();
    for (keys, columns) in halves.zip(columns.chunks_exact_mut(size)) {
        let (wide, rest) = columns.as_chunks_mut::<LANES>();
        for (at, columns) in wide.iter_mut().enumerate() {
            let mut rows = [&[0.0; LANES]; LANES];
            for lane in 0..LANES {
                let row = keys[lane][at * LANES..].first_chunk();
                rows[lane] = row.expect("all keys are as long");
            }
            V::turn(&rows, columns, 0);
        }
        if !rest.is_empty() {
            let mut padded = [[0.0; LANES]; LANES];
            for (padded, key) in padded.iter_mut().zip(keys) {
                padded[..rest.len()].copy_from_slice(&key[size - rest.len()..]);
            }
            let mut columns = [[0.0; LANES]; LANES];
            V::turn(&padded.each_ref(), &mut columns, 0);
            rest.copy_from_slice(&columns[..rest.len()]);
        }
    }
}

/// Scores of the first `R` rows of `queries` with the keys of a tile, `N` vectors at a time, where the tile's stand in
/// those of the part; `R`.
#[inline(always)]
fn score<V: Vector<LANES>, const R: usize, const N: usize>(
    queries: &[f32],
    keys: &[Lanes],
    scores: &mut [Lanes],
) -> usize {
    let size = keys.len() / HALVES;
    let queries: [&[f32]; R] = std::array::from_fn(|row| &queries[row * size..][..size]);
    for first in (0..HALVES).step_by(N) {
        let halves: [&[Lanes]; N] = std::array::from_fn(|at| &keys[(first + at) * size..][..size]);
        let mut sums = [[V::splat(0.0); N]; R];
        for dim in 0..size {
            let mut query = [V::splat(0.0); R];
            for row in 0..R {
                query[row] = V::splat(queries[row][dim]);
            }
            for at in 0..N {
                let keys = V::load(&halves[at][dim]);
                for row in 0..R {
                    sums[row][at] = keys.multiply_add(query[row], sums[row][at]);
                }
            }
        }
        for row in 0..R {
            let scores = &mut scores[row * PER_ROW * HALVES + first..][..N];
            for at in 0..N {
                sums[row][at].store(&mut scores[at]);
            }
        }
    }
    R
}

/// Values of a tile, and those of them that any row sees.
type Seen<'v> = (&'v [&'v [Lanes]; TILE], &'v Range<usize>);

/// Adds weighted values to the `sums` of some rows; how many. With `SOME`, rows do not see all of these values: a weight
/// of 0 keeps even an infinite one out.
#[inline(always)]
fn weigh<'w, V: Vector<LANES>, const SUMS: usize, const SOME: bool>(
    weights: impl Fn(usize) -> &'w [f32; TILE],
    values: Seen<'_>,
    per_row: usize,
    sums: &mut [Lanes],
) -> usize {
    match (SUMS, sums.len() / per_row) {
        (1, _) => weigh_rows::<V, 1, 1, SOME>(weights, values, per_row, sums),
        (_, 1) => weigh_rows::<V, 1, 4, SOME>(weights, values, per_row, sums),
        (6, 2) => weigh_rows::<V, 2, 2, SOME>(weights, values, per_row, sums),
        (6, 4 | 8) => weigh_rows::<V, 4, 1, SOME>(weights, values, per_row, sums),
        (6, _) => weigh_rows::<V, 3, 2, SOME>(weights, values, per_row, sums),
        (_, 2) => weigh_rows::<V, 2, 4, SOME>(weights, values, per_row, sums),
        (_, 3) => weigh_rows::<V, 3, 4, SOME>(weights, values, per_row, sums),
        _ => weigh_rows::<V, 4, 4, SOME>(weights, values, per_row, sums),
    }
}

/// The same for the first `R` rows, `N` vectors of elements at a time; `R`.
#[inline(always)]
fn weigh_rows<'w, V: Vector<LANES>, const R: usize, const N: usize, const SOME: bool>(
    weights: impl Fn(usize) -> &'w [f32; TILE],
    values: Seen<'_>,
    per_row: usize,
    sums: &mut [Lanes],
) -> usize {
    let weights: [&[f32; TILE]; R] = std::array::from_fn(weights);
    let mut first = 0;
    while first < per_row {
        first += match (N, per_row - first) {
            (4, 4..) => weigh_some::<V, R, 4, SOME>(&weights, values, sums, per_row, first),
            (2.., 2..) => weigh_some::<V, R, 2, SOME>(&weights, values, sums, per_row, first),
            _ => weigh_some::<V, R, 1, SOME>(&weights, values, sums, per_row, first),
        };
    }
    R
}

/// The same for `N` vectors of elements from `first` on; `N`.
#[inline(always)]
fn weigh_some<V: Vector<LANES>, const R: usize, const N: usize, const SOME: bool>(
    weights: &[&[f32; TILE]; R],
    (values, near): Seen<'_>,
    sums: &mut [Lanes],
    per_row: usize,
    first: usize,
) -> usize {
    let mut acc = [[V::splat(0.0); N]; R];
    for row in 0..R {
        let sums = &sums[row * per_row + first..][..N];
        for at in 0..N {
            acc[row][at] = V::load(&sums[at]);
        }
    }
    let values = &values[near.clone()];
    let weights = weights.map(|weights| &weights[near.clone()][..values.len()]);
    for (key, value) in values.iter().enumerate() {
        let value = value[first..].first_chunk::<N>();
        let value = value.expect("there are so many");
        let mut weight = [V::splat(0.0); R];
        for row in 0..R {
            weight[row] = V::splat(weights[row][key]);
        }
        for at in 0..N {
            let value = V::load(&value[at]);
            for row in 0..R {
                let sum = value.multiply_add(weight[row], acc[row][at]);
                acc[row][at] = match SOME {
                    true => sum.where_it_weighs(weight[row], acc[row][at]),
                    false => sum,
                };
            }
        }
    }
    for row in 0..R {
        let sums = &mut sums[row * per_row + first..][..N];
        for at in 0..N {
            acc[row][at].store(&mut sums[at]);
        }
    }
    N
}
