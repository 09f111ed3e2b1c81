//! Products in float32: a lane is a row, and `N` sums of that width are kept in registers.

use std::marker::PhantomData;
use std::ops::Range;

use crate::cache_tiles::Tiles;
use crate::element::Element;
use crate::job::HEADER;
use crate::kernel::{Arithmetic, Bounds, How};
use crate::lanes::{Scratch, Vector};
use crate::softmax::{cap, scale, scale_and_hide, soften};
use crate::step::{CacheShape, TILE};

/// Queries as lanes, and the widened elements of a tile.
pub(crate) struct Floats<V, const L: usize, const N: usize> {
    dim_k: usize,
    queries: Scratch,
    keys: Vec<f32>,
    values: Vec<f32>,
    by: PhantomData<V>,
}

/// Keys and values of a tile, with the queries `[vectors, dim_k]` of lanes.
struct FloatTile<'t, V, const L: usize, const N: usize> {
    keys: [&'t [f32]; TILE],
    values: [&'t [f32]; TILE],
    queries: &'t [[f32; L]],
    by: PhantomData<V>,
}

impl<E: Element, V: Vector<L>, const L: usize, const N: usize> Arithmetic<E, L>
    for Floats<V, L, N>
{
    type Lanes = V;

    #[inline(always)]
    fn is_narrow(num_rows: usize) -> bool {
        is_narrow::<L>(num_rows)
    }

    #[inline(always)]
    fn new(shape: &CacheShape, num_vectors: usize, _: usize) -> Self {
        Self {
            dim_k: shape.dim_k,
            queries: Scratch::zeros(num_vectors * shape.dim_k * L),
            keys: vec![],
            values: vec![],
            by: PhantomData,
        }
    }

    #[inline(always)]
    fn take_queries<'q>(&mut self, number: usize, queries: impl Iterator<Item = &'q [E]>)
    where
        E: 'q,
    {
        let (lanes, _) = self.queries.elements_mut().as_chunks_mut::<L>();
        let lanes = &mut lanes[number * self.dim_k..][..self.dim_k];
        let mut rows: [&[E]; L] = [&[]; L];
        for (row, query) in rows.iter_mut().zip(queries) {
            *row = query;
        }
        let (wide, rest) = lanes.as_chunks_mut::<L>();
        let first = wide.len() * L;
        for (at, lanes) in wide.iter_mut().enumerate() {
            let columns = rows.map(|row| match row.get(at * L..at * L + L) {
                Some(row) => V::load(&std::array::from_fn(|dim| row[dim].widen())),
                None => V::splat(0.0),
            });
            for (lanes, column) in lanes.iter_mut().zip(V::transposed(columns)) {
                column.store(lanes);
            }
        }
        for (dim, lanes) in rest.iter_mut().enumerate() {
            *lanes = rows.map(|row| row.get(first + dim).map_or(0.0, |element| element.widen()));
        }
    }

    #[inline(always)]
    fn attend(
        &mut self,
        how: How,
        tiles: &Tiles<'_, E>,
        vectors: &[Bounds<L>],
        states: &mut [[f32; L]],
    ) {
        let size = states.len() / vectors.len();
        for state in states.chunks_exact_mut(size) {
            state.fill([0.0; L]);
            state[0] = [f32::NEG_INFINITY; L];
        }
        let mut weights = [[0.0; L]; TILE];
        for tile in 0..tiles.len() {
            tiles.fetch_after(tile);
            let near = tiles.near(tile);
            let floats = FloatTile {
                keys: tiles.keys(tile).floats(&near, &mut self.keys),
                values: tiles.values(tile).floats(&near, &mut self.values),
                queries: self.queries.elements().as_chunks().0,
                by: PhantomData,
            };
            let vectors = vectors.iter().zip(states.chunks_exact_mut(size));
            for (number, (bounds, state)) in vectors.enumerate() {
                let to = (&mut weights, state);
                attend_tile::<V, L, N>(how, (&floats, tiles.start_of(tile)), (number, bounds), to);
            }
        }
    }
}

/// Vector `number` of rows over the tile that begins at `start`.
#[inline(always)]
fn attend_tile<V: Vector<L>, const L: usize, const N: usize>(
    how: How,
    (tile, start): (&FloatTile<'_, V, L, N>, usize),
    (number, bounds): (usize, &Bounds<L>),
    (weights, state): (&mut [[f32; L]; TILE], &mut [[f32; L]]),
) {
    let near = bounds.near(start);
    if near.is_empty() {
        return;
    }
    tile.scores(number, &near, weights);
    let factor = cap(how, weights[near.clone()].as_flattened_mut());
    let whole = bounds.is_whole(start);
    let largest = match whole {
        true => scale(weights, factor),
        false => scale_and_hide(weights, factor, (start, bounds)),
    };
    let (header, sums) = state.split_at_mut(HEADER);
    let faded = soften(weights, largest, header);
    tile.weigh(&*weights, (&near, whole), faded, (bounds.num_rows, sums));
}

impl<V: Vector<L>, const L: usize, const N: usize> FloatTile<'_, V, L, N> {
    /// The products of a vector of queries with, at least, the keys in `near`.
    #[inline(always)]
    fn scores(&self, vector: usize, near: &Range<usize>, scores: &mut [[f32; L]; TILE]) {
        let dim = self.keys[0].len();
        let query = &self.queries[vector * dim..][..dim];
        for at in (near.start / N * N..near.end).step_by(N) {
            let keys: &[&[f32]; N] = self.keys[at..].first_chunk().expect("N divides TILE");
            let keys = keys.map(|key| &key[..query.len()]);
            let mut sums = [V::splat(0.0); N];
            for (dim, query) in query.iter().enumerate() {
                let query = V::load(query);
                for at in 0..N {
                    sums[at] = V::splat(keys[at][dim]).multiply_add(query, sums[at]);
                }
            }
            for (sum, scores) in sums.into_iter().zip(&mut scores[at..]) {
                sum.store(scores);
            }
        }
    }

    /// Adds the values, weighted, to the `sums` of so many rows, which count `faded` times from now on, or in full. Where
    /// the tile is not `whole`, some lanes do not see some of the keys in `near`; the weight is 0 then.
    #[inline(always)]
    fn weigh(
        &self,
        weights: &[[f32; L]; TILE],
        (near, whole): (&Range<usize>, bool),
        faded: Option<[f32; L]>,
        (num_rows, sums): (usize, &mut [[f32; L]]),
    ) {
        let (weights, values) = (&weights[near.clone()], &self.values[near.clone()]);
        let faded = faded.unwrap_or([1.0; L]);
        if is_narrow::<L>(num_rows) {
            let dim = sums.len();
            let sums = sums.as_flattened_mut().chunks_exact_mut(dim);
            for (row, sums) in sums.take(num_rows).enumerate() {
                weigh_row::<V, L>(weights, row, values, faded[row], sums);
            }
            return;
        }
        let faded = V::load(&faded);
        let (wide, rest) = sums.as_chunks_mut::<N>();
        let first = wide.len() * N;
        for (at, sums) in wide.iter_mut().enumerate() {
            match whole {
                true => weigh::<V, L, N, false>(weights, values, at * N, faded, sums),
                false => weigh::<V, L, N, true>(weights, values, at * N, faded, sums),
            }
        }
        for (at, sum) in rest.iter_mut().enumerate() {
            let sum = std::array::from_mut(sum);
            weigh::<V, L, 1, true>(weights, values, first + at, faded, sum);
        }
    }
}

/// Whether so many rows leave most lanes idle: each row then has its sums in a piece.
const fn is_narrow<const L: usize>(num_rows: usize) -> bool {
    num_rows <= L / 2
}

/// Vectors of elements that are added up at a time for one row.
const WIDE: usize = 4;

/// Adds weighted values to the sums of one row, `[dim_v]`: where few lanes are used, elements take their place. The
/// bits are those of [`weigh`].
#[inline(always)]
fn weigh_row<V: Vector<L>, const L: usize>(
    weights: &[[f32; L]],
    row: usize,
    values: &[&[f32]],
    faded: f32,
    sums: &mut [f32],
) {
    let (vectors, rest) = sums.as_chunks_mut::<L>();
    let first = vectors.len() * L;
    let (wide, narrow) = vectors.as_chunks_mut::<WIDE>();
    for (at, sums) in wide.iter_mut().enumerate() {
        weigh_elements::<V, L, WIDE>(weights, row, values, at * WIDE * L, faded, sums);
    }
    let at = wide.len() * WIDE;
    for (number, sum) in narrow.iter_mut().enumerate() {
        let sum = std::array::from_mut(sum);
        weigh_elements::<V, L, 1>(weights, row, values, (at + number) * L, faded, sum);
    }
    for (at, sum) in rest.iter_mut().enumerate() {
        *sum *= faded;
        for (weight, value) in weights
            .iter()
            .zip(values)
            .filter(|(weight, _)| weight[row] != 0.0)
        {
            *sum = value[first + at].mul_add(weight[row], *sum);
        }
    }
}

#[inline(always)]
fn weigh_elements<V: Vector<L>, const L: usize, const N: usize>(
    weights: &[[f32; L]],
    row: usize,
    values: &[&[f32]],
    first: usize,
    faded: f32,
    sums: &mut [[f32; L]; N],
) {
    let mut found = [V::splat(faded); N];
    for at in 0..N {
        found[at] = V::load(&sums[at]).multiply(found[at]);
    }
    for (weight, value) in weights.iter().zip(values) {
        if weight[row] == 0.0 {
            continue;
        }
        let weight = V::splat(weight[row]);
        let (value, _) = value[first..][..N * L].as_chunks::<L>();
        for at in 0..N {
            found[at] = V::load(&value[at]).multiply_add(weight, found[at]);
        }
    }
    for at in 0..N {
        found[at].store(&mut sums[at]);
    }
}

/// Adds weighted values, of the `N` elements from `first` on. With `SOME`, a weight of 0 keeps even an infinite
/// value out, which is not the lane's to see.
#[inline(always)]
fn weigh<V: Vector<L>, const L: usize, const N: usize, const SOME: bool>(
    weights: &[[f32; L]],
    values: &[&[f32]],
    first: usize,
    faded: V,
    sums: &mut [[f32; L]; N],
) {
    let mut found = [faded; N];
    for at in 0..N {
        found[at] = V::load(&sums[at]).multiply(faded);
    }
    for (weight, value) in weights.iter().zip(values) {
        let value: &[f32; N] = value[first..]
            .first_chunk()
            .expect("all values are as long");
        let weight = V::load(weight);
        for at in 0..N {
            let sum = V::splat(value[at]).multiply_add(weight, found[at]);
            found[at] = match SOME {
                true => sum.where_it_weighs(weight, found[at]),
                false => sum,
            };
        }
    }
    for at in 0..N {
        found[at].store(&mut sums[at]);
    }
}
