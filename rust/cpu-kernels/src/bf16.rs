//! Products of bfloat16 by AVX-512's instruction for them (`VDPBF16PS`): 16 keys, or 16 elements of a value, at once, two
//! products each.
//!
//! Weights are rounded to bfloat16 before they meet the values, as with AMX. A row's bits are its own here too: what is
//! added up for it is added up in the order of the dimensions and of the keys, and keys that it does not see weigh
//! nothing.

use std::arch::x86_64::*;
use std::cell::Cell;
use std::mem::take;
use std::ops::Range;

use crate::amx::weight;
use crate::cache_tiles::Tiles;
use crate::kernel::{Arithmetic, Bounds, How};
use crate::key_lanes::{
    HALVES, KeyLanes, LANES, PER_ROW, TOGETHER, attend, largest, make_room, measure,
};
use crate::lanes::{Vector, transpose_16};
use crate::step::{CacheShape, TILE};
use crate::tiles::Line;

/// Elements of a vector.
const WIDTH: usize = 2 * LANES;
/// Pairs of positions in a tile.
const PAIRS: usize = TILE / 2;
/// Vectors of a value's elements that are added up at a time for each of them.
const WIDE: usize = 4;

/// Queries, and a tile as the instruction wants it; of several vectors of rows, a part.
pub(crate) struct Bf16 {
    dim_k: usize,
    dim_v: usize,
    /// Tiles that are kept for the next vector of rows.
    num_kept: usize,
    memory: Memory,
}

/// Buffers, large enough for the part or larger.
#[derive(Default)]
struct Memory {
    /// `[vectors, lanes, dim_k / 2]`: two neighbouring dimensions each.
    queries: Vec<u32>,
    /// `[tiles, halves, dim_k / 2]` of keys.
    keys: Vec<Line<u32>>,
    /// `[tiles, PAIRS, vectors]` of elements, two neighbouring positions each.
    values: Vec<Line<u32>>,
    /// `[rows, tiles, halves]` of keys.
    scores: Vec<Line<f32>>,
    /// `[rows, tiles]` of pairs of positions.
    weights: Vec<Line<u32>>,
    /// `[rows, vectors]` of elements, in the order of `values`.
    sums: Vec<Line<f32>>,
}

thread_local! {
    /// From task to task of a thread: a decode step has some hundred, and to ask for memory takes as long as to turn keys.
    static KEPT: Cell<Memory> = Cell::default();
}

impl Drop for Bf16 {
    fn drop(&mut self) {
        KEPT.set(take(&mut self.memory));
    }
}

impl Bf16 {
    /// Whether it is for a cache of this shape.
    pub(crate) fn takes(shape: &CacheShape) -> bool {
        shape.dim_k.is_multiple_of(WIDTH) && shape.dim_v.is_multiple_of(LANES)
    }

    fn keys_of(&self, tile: usize) -> Range<usize> {
        let size = HALVES * self.dim_k / 2;
        let at = tile % self.num_kept;
        at * size..(at + 1) * size
    }

    fn values_of(&self, tile: usize) -> Range<usize> {
        let size = PAIRS * vectors_of(self.dim_v);
        let at = tile % self.num_kept;
        at * size..(at + 1) * size
    }
}

/// Vectors of so many elements: an even number.
fn vectors_of(dim: usize) -> usize {
    dim.div_ceil(WIDTH) * 2
}

impl Arithmetic<u16, LANES> for Bf16 {
    type Lanes = __m512;

    #[inline(always)]
    fn is_narrow(_: usize) -> bool {
        true
    }

    #[inline(always)]
    fn new(shape: &CacheShape, num_rows: usize, num_tiles: usize) -> Self {
        let num_vectors = num_rows.div_ceil(LANES);
        let num_kept = if num_vectors > 1 { num_tiles } else { 1 };
        let mut memory = KEPT.take();
        let (zeros, pairs) = (Line([0; LANES]), shape.dim_k / 2);
        make_room(&mut memory.queries, num_vectors * LANES * pairs, 0);
        make_room(&mut memory.keys, num_kept * HALVES * pairs, zeros);
        let per_tile = PAIRS * vectors_of(shape.dim_v);
        make_room(&mut memory.values, num_kept * per_tile, zeros);
        Self {
            dim_k: shape.dim_k,
            dim_v: shape.dim_v,
            num_kept,
            memory,
        }
    }

    #[inline(always)]
    fn take_queries<'q>(&mut self, number: usize, queries: impl Iterator<Item = &'q [u16]>) {
        let size = self.dim_k / 2;
        let rows = self.memory.queries[number * LANES * size..].chunks_exact_mut(size);
        for (row, query) in rows.zip(queries) {
            for (pair, &[low, high]) in row.iter_mut().zip(query.as_chunks().0) {
                *pair = u32::from(low) | u32::from(high) << 16;
            }
        }
    }

    #[inline(always)]
    fn attend(
        &mut self,
        how: How,
        tiles: &Tiles<'_, u16>,
        vectors: &[Bounds<LANES>],
        states: &mut [[f32; LANES]],
    ) {
        attend(self, how, tiles, vectors, states);
    }
}

impl KeyLanes<u16> for Bf16 {
    #[inline(always)]
    fn make_room(&mut self, max_rows: usize) {
        let (zeros, memory) = (Line([0.0; LANES]), &mut self.memory);
        make_room(&mut memory.scores, max_rows * PER_ROW * HALVES, zeros);
        make_room(&mut memory.weights, max_rows * PER_ROW, Line([0; LANES]));
        make_room(&mut memory.sums, max_rows * vectors_of(self.dim_v), zeros);
    }

    #[inline(always)]
    fn take_keys(&mut self, tiles: &Tiles<'_, u16>, tile: usize) {
        let tile_lines = self.keys_of(tile);
        let keys = tiles.keys(tile).into_computed();
        // SAFETY: the machine has these instructions, as was looked up before this was chosen.
        unsafe { turn_keys(&keys, &mut self.memory.keys[tile_lines]) };
    }

    #[inline(always)]
    fn score(&mut self, vector: usize, num_rows: usize, tile: usize) {
        // SAFETY: as above.
        unsafe { self.score_rows(vector, num_rows, tile) };
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
        // SAFETY: as above.
        unsafe { self.soften_rows(how, start, bounds, tiles, header) };
        let per_row = vectors_of(self.dim_v);
        self.memory.sums[..bounds.num_rows * per_row].fill(Line([0.0; LANES]));
    }

    #[inline(always)]
    fn take_values(&mut self, tiles: &Tiles<'_, u16>, tile: usize) {
        let tile_lines = self.values_of(tile);
        let values = tiles.values(tile).into_computed();
        // SAFETY: as above.
        unsafe { turn_values(&values, &mut self.memory.values[tile_lines]) };
    }

    #[inline(always)]
    fn weigh(&mut self, _: &Tiles<'_, u16>, bounds: &Bounds<LANES>, tile: usize) {
        // SAFETY: as above.
        unsafe { self.weigh_rows(bounds.num_rows, tile) };
    }

    #[inline(always)]
    fn give(&self, row: usize, sums: &mut [f32]) {
        let per_row = vectors_of(self.dim_v);
        // SAFETY: as above.
        unsafe { give(&self.memory.sums[row * per_row..][..per_row], sums) };
    }
}

impl Bf16 {
    /// Scores of so many rows of a vector with a tile that is there.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn score_rows(&mut self, vector: usize, num_rows: usize, tile: usize) {
        let size = self.dim_k / 2;
        let keys = &self.memory.keys[self.keys_of(tile)];
        let queries = &self.memory.queries[vector * LANES * size..][..num_rows * size];
        let per_row = HALVES * PER_ROW;
        let groups = queries.chunks(TOGETHER * size);
        let scores = self.memory.scores.chunks_mut(TOGETHER * per_row);
        for (queries, scores) in groups.zip(scores) {
            let scores = scores.chunks_mut(per_row);
            let scores = scores.map(|row| &mut row[tile * HALVES..][..HALVES]);
            match queries.len() / size {
                1 => score::<1>(queries, keys, scores),
                2 => score::<2>(queries, keys, scores),
                3 => score::<3>(queries, keys, scores),
                _ => score::<TOGETHER>(queries, keys, scores),
            }
        }
    }

    /// Scores of these tiles become weights, rounded; the header what they are measured against and their sum.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn soften_rows(
        &mut self,
        how: How,
        start: usize,
        bounds: &Bounds<LANES>,
        tiles: Range<usize>,
        header: &mut [[f32; LANES]],
    ) {
        let rows = self.memory.scores.chunks_exact_mut(HALVES * PER_ROW);
        let rows = rows.zip(self.memory.weights.chunks_exact_mut(PER_ROW));
        for (lane, (scores, weights)) in rows.take(bounds.num_rows).enumerate() {
            let scores = &mut scores[tiles.start * HALVES..tiles.end * HALVES];
            let largest = largest(how, scores, start, tiles.start, bounds, lane);
            let (reference, total) = soften(how, largest, scores, &mut weights[tiles.clone()]);
            header[0][lane] = reference;
            header[1][lane] = total;
        }
    }

    /// Adds the values of a tile that is there, weighted, to the sums of so many rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn weigh_rows(&mut self, num_rows: usize, tile: usize) {
        let per_row = vectors_of(self.dim_v);
        let values = &self.memory.values[self.values_of(tile)];
        let groups = self.memory.sums[..num_rows * per_row].chunks_mut(TOGETHER * per_row);
        for (sums, weights) in groups.zip(self.memory.weights.chunks(TOGETHER * PER_ROW)) {
            let weights = |row: usize| &weights[row * PER_ROW + tile];
            match sums.len() / per_row {
                1 => weigh::<1>(weights, values, sums),
                2 => weigh::<2>(weights, values, sums),
                3 => weigh::<3>(weights, values, sums),
                _ => weigh::<TOGETHER>(weights, values, sums),
            }
        }
    }
}

/// Scores of `R` rows with the keys of a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn score<'s, const R: usize>(
    queries: &[u32],
    keys: &[Line<u32>],
    scores: impl Iterator<Item = &'s mut [Line<f32>]>,
) {
    let size = queries.len() / R;
    let queries: [&[u32]; R] = std::array::from_fn(|row| &queries[row * size..][..size]);
    let (low, high) = keys.split_at(size);
    let mut sums = [[_mm512_setzero_ps(); HALVES]; R];
    for pair in 0..size {
        let keys = [pairs(&low[pair]), pairs(&high[pair])];
        for row in 0..R {
            let query = pair_in_all(queries[row][pair]);
            for half in 0..HALVES {
                sums[row][half] = _mm512_dpbf16_ps(sums[row][half], keys[half], query);
            }
        }
    }
    for (sums, scores) in sums.into_iter().zip(scores) {
        for (sum, score) in sums.into_iter().zip(scores) {
            sum.store(&mut score.0);
        }
    }
}

/// Scores of a row become weights, rounded; what they are measured against, and their sum.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn soften(how: How, largest: f32, scores: &[Line<f32>], weights: &mut [Line<u32>]) -> (f32, f32) {
    let (factors, references) = measure(how, largest);
    let mut total = _mm512_setzero_ps();
    for (weights, scores) in weights.iter_mut().zip(scores.as_chunks::<HALVES>().0) {
        let [low, high] = scores
            .each_ref()
            .map(|score| weight(__m512::load(&score.0), factors, references));
        total = _mm512_add_ps(_mm512_add_ps(total, low), high);
        // SAFETY: both are 64 bytes.
        let pairs: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) };
        // SAFETY: 64 bytes are written.
        unsafe { _mm512_storeu_si512(weights.0.as_mut_ptr().cast(), pairs) };
    }
    (_mm512_cvtss_f32(references), _mm512_reduce_add_ps(total))
}

/// Adds weighted values to the sums of `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn weigh<'w, const R: usize>(
    weights: impl Fn(usize) -> &'w Line<u32>,
    values: &[Line<u32>],
    sums: &mut [Line<f32>],
) {
    let weights: [&Line<u32>; R] = std::array::from_fn(weights);
    let per_row = sums.len() / R;
    let mut first = 0;
    while first < per_row {
        match per_row - first {
            2 => weigh_some::<R, 2>(&weights, values, sums, first),
            _ => weigh_some::<R, WIDE>(&weights, values, sums, first),
        }
        first += WIDE;
    }
}

/// The same for `N` vectors of elements from `first` on.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn weigh_some<const R: usize, const N: usize>(
    weights: &[&Line<u32>; R],
    values: &[Line<u32>],
    sums: &mut [Line<f32>],
    first: usize,
) {
    let per_row = sums.len() / R;
    let mut acc = [[_mm512_setzero_ps(); N]; R];
    for row in 0..R {
        for at in 0..N {
            acc[row][at] = __m512::load(&sums[row * per_row + first + at].0);
        }
    }
    for (pair, values) in values.chunks_exact(per_row).enumerate() {
        let values: &[Line<u32>; N] = values[first..].first_chunk().expect("there are so many");
        let values = values.each_ref().map(|line| pairs(line));
        for row in 0..R {
            let weight = pair_in_all(weights[row].0[pair]);
            for at in 0..N {
                acc[row][at] = _mm512_dpbf16_ps(acc[row][at], values[at], weight);
            }
        }
    }
    for row in 0..R {
        for at in 0..N {
            acc[row][at].store(&mut sums[row * per_row + first + at].0);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn pairs(line: &Line<u32>) -> __m512bh {
    // SAFETY: 64 bytes are read, and every bit pattern is 32 elements.
    unsafe { std::mem::transmute(_mm512_load_si512(line.0.as_ptr().cast())) }
}

#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn pair_in_all(pair: u32) -> __m512bh {
    // SAFETY: both are 64 bytes, and every bit pattern is 32 elements.
    unsafe { std::mem::transmute(_mm512_set1_epi32(pair as i32)) }
}

/// `lines[half][pair]` becomes two neighbouring dimensions of the keys of that half.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn turn_keys(keys: &[&[u16]; TILE], lines: &mut [Line<u32>]) {
    let (halves, per_half) = (keys.as_chunks::<LANES>().0, lines.len() / HALVES);
    for (keys, lines) in halves.iter().zip(lines.chunks_exact_mut(per_half)) {
        for (at, lines) in lines.chunks_exact_mut(LANES).enumerate() {
            // SAFETY: 32 elements are read of a slice that has them.
            let rows = keys.map(|key| unsafe {
                _mm512_loadu_si512(key[at * WIDTH..][..WIDTH].as_ptr().cast())
            });
            for (line, column) in lines.iter_mut().zip(transpose_16(rows)) {
                // SAFETY: 64 bytes are written.
                unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), column) };
            }
        }
    }
}

/// `lines[pair][vector]` becomes 16 elements of two neighbouring positions; of 32 elements the first vector has 0 to 3, 8 to
/// 11 and so on, the second one the others.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn turn_values(values: &[&[u16]; TILE], lines: &mut [Line<u32>]) {
    let per_pair = lines.len() / PAIRS;
    for ([first, second], lines) in values
        .as_chunks::<2>()
        .0
        .iter()
        .zip(lines.chunks_exact_mut(per_pair))
    {
        for (at, lines) in lines.chunks_exact_mut(2).enumerate() {
            let [first, second] = [first, second].map(|value| {
                let left = &value[at * WIDTH..];
                let mask = match left.len() < WIDTH {
                    true => 0xffff,
                    false => u32::MAX,
                };
                // SAFETY: 16 or 32 elements are read of a slice that has them.
                unsafe { _mm512_maskz_loadu_epi16(mask, left.as_ptr().cast()) }
            });
            let low = _mm512_unpacklo_epi16(first, second);
            let high = _mm512_unpackhi_epi16(first, second);
            // SAFETY: 64 bytes are written, twice.
            unsafe {
                _mm512_store_si512(lines[0].0.as_mut_ptr().cast(), low);
                _mm512_store_si512(lines[1].0.as_mut_ptr().cast(), high);
            }
        }
    }
}

/// A row's sums in the order of its elements.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn give(lines: &[Line<f32>], row: &mut [f32]) {
    let lower = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    let upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
    for (lines, elements) in lines.as_chunks::<2>().0.iter().zip(row.chunks_mut(WIDTH)) {
        let [low, high] = lines.each_ref().map(|line| __m512::load(&line.0));
        for (index, elements) in [lower, upper].into_iter().zip(elements.as_chunks_mut().0) {
            _mm512_permutex2var_ps(low, index, high).store(elements);
        }
    }
}
