//! Products of bfloat16 by AMX, Intel's matrix instructions: 16 keys or 16 elements of a value with 16 rows at once,
//! 32 products each.
//!
//! A part is scored as a whole before its first value is read, so sums stay in the tiles and nothing fades. Weights are
//! rounded to bfloat16 before they meet the values, as in torch and flash-attn. A row's bits are its own here too: each
//! sum of a product of tiles is added up in an order that its neighbours do not change.

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::ops::Range;

use crate::cache_tiles;
use crate::job::{HEADER, state_len};
use crate::kernel::{Arithmetic, Bounds, How};
use crate::lanes::{Vector, transpose_16};
use crate::softmax::capped;
use crate::step::{CacheShape, PART, TILE};
use crate::tiles::{Line, ROWS, Rows, STRIDE, Tiles, WIDTH, load, multiply_add, store, zero};

/// Keys of a tile of the kernel, for each half.
type Keys<'t> = [Rows<'t>; TILE / ROWS];

/// Vectors that are multiplied with a tile while it is there.
const TOGETHER: usize = 2;

/// Queries and a part as the instructions want them.
pub(crate) struct Amx {
    dim_k: usize,
    dim_v: usize,
    /// `[vectors, dim_k / 2]` of lanes, two neighbouring dimensions each.
    queries: Vec<Line<u32>>,
    /// `[halves of tiles, 16, dim_k / 32]`, of keys that do not lie at equal distances.
    keys: Vec<Line<u32>>,
    /// `[tiles, dim_v]` of two neighbouring positions each.
    values: Vec<Line<u32>>,
    /// `[TOGETHER, tiles, TILE]` of lanes.
    scores: Vec<Line<f32>>,
    /// `[TOGETHER, tiles, TILE / 2]` of lanes, two neighbouring positions each.
    weights: Vec<Line<u32>>,
    _tiles: Tiles,
}

impl Amx {
    /// Whether it is for a cache of this shape.
    pub(crate) fn takes(shape: &CacheShape) -> bool {
        shape.dim_k.is_multiple_of(WIDTH) && shape.dim_v.is_multiple_of(ROWS)
    }
}

impl Arithmetic<u16, ROWS> for Amx {
    type Lanes = __m512;

    #[inline(always)]
    fn is_narrow(_: usize) -> bool {
        false
    }

    #[inline(always)]
    fn new(shape: &CacheShape, num_vectors: usize, num_tiles: usize) -> Self {
        let together = num_vectors.min(TOGETHER);
        let halves = match shape.block_size.is_multiple_of(ROWS) {
            true => 2, // where the part begins and ends
            false => num_tiles * (TILE / ROWS),
        };
        Self {
            dim_k: shape.dim_k,
            dim_v: shape.dim_v,
            queries: vec![Line([0; ROWS]); num_vectors * shape.dim_k / 2],
            keys: vec![Line([0; ROWS]); halves * ROWS * shape.dim_k / WIDTH],
            values: vec![Line([0; ROWS]); num_tiles * shape.dim_v],
            scores: vec![Line([0.0; ROWS]); together * num_tiles * TILE],
            weights: vec![Line([0; ROWS]); together * num_tiles * TILE / 2],
            _tiles: Tiles::begin(),
        }
    }

    #[inline(always)]
    fn take_queries<'q>(&mut self, number: usize, queries: impl Iterator<Item = &'q [u16]>) {
        let mut rows: [&[u16]; ROWS] = [&[]; ROWS];
        for (row, query) in rows.iter_mut().zip(queries) {
            *row = query;
        }
        let pairs = &mut self.queries[number * self.dim_k / 2..][..self.dim_k / 2];
        for (at, pairs) in pairs.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
            // SAFETY: the machine has AVX-512, as every one with AMX.
            unsafe { transpose_pairs(&rows, at * WIDTH, pairs) };
        }
    }

    #[inline(always)]
    fn attend(
        &mut self,
        how: How,
        tiles: &cache_tiles::Tiles<'_, u16>,
        vectors: &[Bounds<ROWS>],
        states: &mut [[f32; ROWS]],
    ) {
        let nothing = Rows::of(&self.queries);
        let mut keys = [[nothing; TILE / ROWS]; PART / TILE];
        let mut copies = self.keys.chunks_exact_mut(ROWS * self.dim_k / WIDTH);
        let num_tiles = tiles.len();
        let values = self.values.chunks_exact_mut(self.dim_v);
        for (tile, (keys, values)) in keys.iter_mut().zip(values).take(num_tiles).enumerate() {
            tiles.fetch_after(tile);
            // SAFETY: the machine has AVX-512, as every one with AMX.
            unsafe { transpose(&tiles.values(tile).into_computed(), values) };
            for (rows, half) in keys
                .iter_mut()
                .zip(tiles.keys(tile).into_computed().as_chunks().0)
            {
                *rows = Rows::spread(half).unwrap_or_else(|| {
                    copied(half, copies.next().expect("as many as there are tiles"))
                });
            }
        }
        let part = Part {
            how,
            start: tiles.start,
            queries: &self.queries,
            pairs: self.dim_k / 2,
            keys: &keys[..num_tiles],
            values: &self.values[..num_tiles * self.dim_v],
        };
        let size = state_len(self.dim_v);
        let (scores, weights) = (&mut self.scores[..], &mut self.weights[..]);
        let pairs = vectors
            .chunks(TOGETHER)
            .zip(states.chunks_mut(TOGETHER * size));
        for (number, (vectors, states)) in pairs.enumerate() {
            let first = number * TOGETHER;
            // SAFETY: the machine has these instructions, as every one with AMX.
            unsafe { part.attend((first, vectors), (&mut *scores, &mut *weights), states) };
        }
    }
}

/// Keys, copied to where they lie at equal distances.
#[inline(always)]
fn copied<'t>(keys: &[&[u16]; ROWS], memory: &'t mut [Line<u32>]) -> Rows<'t> {
    let dim = keys[0].len();
    // SAFETY: a line is 32 elements, and every bit pattern is one.
    let (_, elements, _) = unsafe { memory.align_to_mut::<u16>() };
    for (copy, key) in elements.chunks_exact_mut(dim).zip(keys) {
        copy.copy_from_slice(key);
    }
    Rows {
        first: elements[..ROWS * dim].as_ptr().cast(),
        stride: size_of_val(keys[0]),
        borrowed: PhantomData,
    }
}

/// Keys and values of a part, which begins at `start`, and the queries of all vectors.
struct Part<'p> {
    how: How,
    start: usize,
    /// `[vectors, pairs]`.
    queries: &'p [Line<u32>],
    pairs: usize,
    keys: &'p [Keys<'p>],
    /// `[tiles, dim_v]`.
    values: &'p [Line<u32>],
}

impl Part<'_> {
    /// Some vectors, from `first` on, in memory as [`Amx`] has it.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn attend(
        &self,
        (first, vectors): (usize, &[Bounds<ROWS>]),
        (scores, weights): (&mut [Line<f32>], &mut [Line<u32>]),
        states: &mut [[f32; ROWS]],
    ) {
        let near = |tile: &usize| {
            let start = self.start + tile * TILE;
            vectors.iter().any(|vector| !vector.near(start).is_empty())
        };
        let begin = (0..self.keys.len()).find(near).unwrap_or(0);
        let end = (begin..self.keys.len())
            .rfind(near)
            .map_or(begin, |last| last + 1);
        let tiles = begin..end;
        let per_vector = scores.len() / vectors.len();
        let size = states.len() / vectors.len();
        for tile in tiles.clone() {
            match vectors.len() {
                TOGETHER => self.score_two(first, tile, scores.split_at_mut(per_vector)),
                _ => self.score_one(first, tile, scores),
            }
        }
        let per_weights = per_vector / 2;
        for (at, (bounds, state)) in vectors
            .iter()
            .zip(states.chunks_exact_mut(size))
            .enumerate()
        {
            let scores = &mut scores[at * per_vector..][..per_vector];
            let weights = &mut weights[at * per_weights..][..per_weights];
            let (header, _) = state.split_at_mut(HEADER);
            self.soften(bounds, tiles.clone(), (scores, weights), header);
        }
        self.weigh(&tiles, weights, states, size);
    }

    /// Of vector `vector` with a tile of keys.
    #[inline(always)]
    fn score_one(&self, vector: usize, tile: usize, scores: &mut [Line<f32>]) {
        let queries = self.queries_of(vector);
        zero!("tmm0", "tmm1");
        for (at, query) in queries.as_chunks::<ROWS>().0.iter().enumerate() {
            load!("tmm6", Rows::of(query), 0);
            load!("tmm4", self.keys[tile][0], at * STRIDE);
            load!("tmm5", self.keys[tile][1], at * STRIDE);
            multiply_add!("tmm0", "tmm4", "tmm6");
            multiply_add!("tmm1", "tmm5", "tmm6");
        }
        let scores = &mut scores[tile * TILE..][..TILE];
        store!("tmm0", scores);
        store!("tmm1", scores[ROWS..]);
    }

    /// Of vectors `first` and the next with a tile of keys.
    #[inline(always)]
    fn score_two(&self, first: usize, tile: usize, scores: (&mut [Line<f32>], &mut [Line<f32>])) {
        let queries =
            [first, first + 1].map(|vector| self.queries_of(vector).as_chunks::<ROWS>().0);
        zero!("tmm0", "tmm1", "tmm2", "tmm3");
        for (at, (one, other)) in queries[0].iter().zip(queries[1]).enumerate() {
            load!("tmm4", self.keys[tile][0], at * STRIDE);
            load!("tmm6", Rows::of(one), 0);
            load!("tmm7", Rows::of(other), 0);
            multiply_add!("tmm0", "tmm4", "tmm6");
            multiply_add!("tmm2", "tmm4", "tmm7");
            load!("tmm5", self.keys[tile][1], at * STRIDE);
            multiply_add!("tmm1", "tmm5", "tmm6");
            multiply_add!("tmm3", "tmm5", "tmm7");
        }
        let (one, other) = scores;
        let (one, other) = (
            &mut one[tile * TILE..][..TILE],
            &mut other[tile * TILE..][..TILE],
        );
        store!("tmm0", one);
        store!("tmm1", one[ROWS..]);
        store!("tmm2", other);
        store!("tmm3", other[ROWS..]);
    }

    #[inline(always)]
    fn queries_of(&self, vector: usize) -> &[Line<u32>] {
        let pairs = self.pairs;
        &self.queries[vector * pairs..][..pairs]
    }

    /// Scores of these tiles become weights, rounded; the header what they are measured against and their sum.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn soften(
        &self,
        bounds: &Bounds<ROWS>,
        tiles: Range<usize>,
        (scores, weights): (&mut [Line<f32>], &mut [Line<u32>]),
        header: &mut [[f32; ROWS]],
    ) {
        let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut largest = nothing;
        let factor = match self.how {
            (scaling, None) if scaling > 0.0 => scaling * LOG2_E,
            _ => 1.0, // it is in the scores
        };
        for tile in tiles.clone() {
            let start = self.start + tile * TILE;
            let scores = &mut scores[tile * TILE..][..TILE];
            if factor == 1.0 {
                for line in &mut *scores {
                    capped(self.how, &mut line.0);
                }
            }
            if !bounds.is_whole(start) {
                hide(scores, start, bounds);
            }
            for score in scores {
                largest = _mm512_max_ps(__m512::load(&score.0), largest);
            }
        }
        let factor = _mm512_set1_ps(factor);
        let reference = _mm512_mul_ps(largest, factor);
        let mut total = _mm512_setzero_ps();
        let lanes = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
            4, 19, 3, 18, 2, 17, 1, 16, 0,
        );
        let scores = &scores[tiles.start * TILE..tiles.end * TILE];
        let weights = &mut weights[tiles.start * TILE / 2..tiles.end * TILE / 2];
        for (weights, scores) in weights.iter_mut().zip(scores.as_chunks::<2>().0) {
            let [low, high] = scores
                .each_ref()
                .map(|score| weight(__m512::load(&score.0), factor, reference));
            total = _mm512_add_ps(_mm512_add_ps(total, low), high);
            // SAFETY: both are 64 bytes.
            let pairs: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) };
            let pairs = _mm512_permutexvar_epi16(lanes, pairs);
            // SAFETY: 64 bytes are written.
            unsafe { _mm512_storeu_si512(weights.0.as_mut_ptr().cast(), pairs) };
        }
        reference.store(&mut header[0]);
        total.store(&mut header[1]);
    }

    /// The values, weighted, become the sums of the states.
    #[inline(always)]
    fn weigh(
        &self,
        tiles: &Range<usize>,
        weights: &[Line<u32>],
        states: &mut [[f32; ROWS]],
        size: usize,
    ) {
        let num_dims = size - HEADER;
        let per_vector = weights.len() / (states.len() / size);
        let num_vectors = states.len() / size;
        let values = |tile: usize, dim: usize| Rows::of(&self.values[tile * num_dims + dim..]);
        let of = |vector: usize, tile: usize| {
            Rows::of(&weights[vector * per_vector + tile * TILE / 2..])
        };
        let mut dim = 0;
        while dim < num_dims {
            let left = num_dims - dim;
            if num_vectors == TOGETHER && left >= 2 * ROWS {
                zero!("tmm0", "tmm1", "tmm2", "tmm3");
                for tile in tiles.clone() {
                    load!("tmm4", values(tile, dim), 0);
                    load!("tmm6", of(0, tile), 0);
                    load!("tmm7", of(1, tile), 0);
                    multiply_add!("tmm0", "tmm4", "tmm6");
                    multiply_add!("tmm2", "tmm4", "tmm7");
                    load!("tmm5", values(tile, dim + ROWS), 0);
                    multiply_add!("tmm1", "tmm5", "tmm6");
                    multiply_add!("tmm3", "tmm5", "tmm7");
                }
                store!("tmm0", states[HEADER + dim..]);
                store!("tmm1", states[HEADER + dim + ROWS..]);
                store!("tmm2", states[size + HEADER + dim..]);
                store!("tmm3", states[size + HEADER + dim + ROWS..]);
                dim += 2 * ROWS;
            } else if num_vectors == 1 && left >= 4 * ROWS {
                zero!("tmm0", "tmm1", "tmm2", "tmm3");
                for tile in tiles.clone() {
                    load!("tmm6", of(0, tile), 0);
                    load!("tmm4", values(tile, dim), 0);
                    multiply_add!("tmm0", "tmm4", "tmm6");
                    load!("tmm5", values(tile, dim + ROWS), 0);
                    multiply_add!("tmm1", "tmm5", "tmm6");
                    load!("tmm4", values(tile, dim + 2 * ROWS), 0);
                    multiply_add!("tmm2", "tmm4", "tmm6");
                    load!("tmm5", values(tile, dim + 3 * ROWS), 0);
                    multiply_add!("tmm3", "tmm5", "tmm6");
                }
                store!("tmm0", states[HEADER + dim..]);
                store!("tmm1", states[HEADER + dim + ROWS..]);
                store!("tmm2", states[HEADER + dim + 2 * ROWS..]);
                store!("tmm3", states[HEADER + dim + 3 * ROWS..]);
                dim += 4 * ROWS;
            } else {
                for vector in 0..num_vectors {
                    zero!("tmm0");
                    for tile in tiles.clone() {
                        load!("tmm6", of(vector, tile), 0);
                        load!("tmm4", values(tile, dim), 0);
                        multiply_add!("tmm0", "tmm4", "tmm6");
                    }
                    store!("tmm0", states[vector * size + HEADER + dim..]);
                }
                dim += ROWS;
            }
        }
    }
}

/// Sets the scores of keys that a lane does not see, in the tile from `start` on, to minus infinity.
#[target_feature(enable = "avx512f")]
#[inline]
fn hide(scores: &mut [Line<f32>], start: usize, bounds: &Bounds<ROWS>) {
    // SAFETY: 16 numbers are read.
    let [lows, highs] = [&bounds.lows, &bounds.highs]
        .map(|ends| unsafe { _mm512_loadu_si512(ends.as_ptr().cast()) });
    let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
    for (at, score) in scores.iter_mut().enumerate() {
        let position = _mm512_set1_epi32((start + at) as i32);
        let is_seen = _mm512_cmple_epi32_mask(lows, position);
        let is_seen = _mm512_mask_cmplt_epi32_mask(is_seen, position, highs);
        _mm512_mask_blend_ps(is_seen, nothing, __m512::load(&score.0)).store(&mut score.0);
    }
}

/// `2 ^ (score * factor - reference)`; 0 for what is not seen, whose score is minus infinity.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn weight(score: __m512, factor: __m512, reference: __m512) -> __m512 {
    let is_seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(score, _mm512_set1_ps(f32::NEG_INFINITY));
    let (power, scale) = exp2(_mm512_fmsub_ps(score, factor, reference));
    _mm512_maskz_mul_ps(is_seen, power, scale)
}

/// `2 ^ x` for `x` of at most 0, as [`crate::lanes::exp2`] has it but to 1e-4, a twentieth of what rounding to bfloat16
/// costs: two factors.
#[target_feature(enable = "avx512f")]
#[inline]
fn exp2(x: __m512) -> (__m512, __m512) {
    let round = _mm512_set1_ps(12_583_039.0);
    let x = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let shifted = _mm512_add_ps(x, round);
    let r = _mm512_sub_ps(x, _mm512_sub_ps(shifted, round));
    let mut power = _mm512_set1_ps(5.500_893e-2);
    for coefficient in [0.242_210_96, 0.693_282_9, 1.0] {
        power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(coefficient));
    }
    (
        power,
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(shifted))),
    )
}

/// `columns[pair]` becomes two neighbouring dimensions of all rows, from dimension `first` on; of rows that are empty,
/// zeros.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose_pairs(rows: &[&[u16]; ROWS], first: usize, columns: &mut [Line<u32>; ROWS]) {
    let mut pairs = [_mm512_setzero_si512(); ROWS];
    for (pairs, row) in pairs.iter_mut().zip(rows) {
        if let Some(row) = row.get(first..first + WIDTH) {
            // SAFETY: 32 elements are read.
            *pairs = unsafe { _mm512_loadu_si512(row.as_ptr().cast()) };
        }
    }
    for (column, pair) in columns.iter_mut().zip(transpose_16(pairs)) {
        // SAFETY: 16 numbers are written.
        unsafe { _mm512_storeu_si512(column.0.as_mut_ptr().cast(), pair) };
    }
}

/// `columns[dim]` becomes that dimension of all rows.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn transpose(rows: &[&[u16]; TILE], columns: &mut [Line<u32>]) {
    for (at, columns) in columns.chunks_mut(WIDTH).enumerate() {
        let mask = u32::MAX >> (WIDTH - columns.len());
        let row = |row: &[u16]| {
            let row = &row[at * WIDTH..][..columns.len()];
            // SAFETY: as many elements as the slice has are read.
            unsafe { _mm512_maskz_loadu_epi16(mask, row.as_ptr().cast()) }
        };
        let (mut low, mut high) = (
            [_mm512_setzero_si512(); ROWS],
            [_mm512_setzero_si512(); ROWS],
        );
        for (pair, [first, second]) in rows.as_chunks::<2>().0.iter().enumerate() {
            let (first, second) = (row(first), row(second));
            low[pair] = _mm512_unpacklo_epi16(first, second); // dimensions 0 to 3, 8 to 11, ...
            high[pair] = _mm512_unpackhi_epi16(first, second);
        }
        for (first, pairs) in [(0, transpose_16(low)), (4, transpose_16(high))] {
            for (place, positions) in pairs.into_iter().enumerate() {
                let dim = place / 4 * 8 + first + place % 4;
                if let Some(column) = columns.get_mut(dim) {
                    // SAFETY: 16 numbers are written.
                    unsafe { _mm512_storeu_si512(column.0.as_mut_ptr().cast(), positions) };
                }
            }
        }
    }
}
