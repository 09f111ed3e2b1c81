//! Products of bfloat16 with a cache of 8-bit integers, by AVX-512 VNNI's instruction for pairs of 16-bit integers
//! (`VPDPWSSD`): 16 keys, or 16 elements of a value, at once, two products each.
//!
//! The numbers of the cache are multiplied as they are. A query head becomes integers of 16 bits and a scale, and so do
//! the weights of a row in a part, multiplied with the scales of their values before: what is rounded is at most a
//! 65,000th of the largest. Products are added up as integers, whose sums are exact in any order.

use std::arch::x86_64::*;
use std::cell::Cell;
use std::mem::take;
use std::ops::Range;

use crate::amx::weight;
use crate::cache_tiles::Tiles;
use crate::element::Element;
use crate::kernel::{Arithmetic, Bounds, How};
use crate::key_lanes::{
    HALVES, KeyLanes, LANES, PER_ROW, TOGETHER, attend, largest, make_room, measure,
};
use crate::lanes::{Vector, transpose_16};
use crate::step::{CacheShape, PART, TILE};
use crate::stored::{LARGEST, SCALE, scale_of};
use crate::tiles::Line;

/// Neighbouring dimensions of a key, or positions of an element, in a lane.
const QUAD: usize = 4;
/// Numbers of a vector.
const WIDTH: usize = QUAD * LANES;
/// Quads of positions in a tile.
const QUADS: usize = TILE / QUAD;

/// Products of which 32 bits hold the sum.
const MAX_DIMS: usize = i32::MAX as usize / (LARGEST as usize * i16::MAX as usize);
const _: () = assert!(PART <= MAX_DIMS);

/// Queries, and a tile as the instruction wants it; of several vectors of rows, a part.
pub(crate) struct Int8 {
    dim_k: usize,
    dim_v: usize,
    /// Tiles that are kept for the next vector of rows.
    num_kept: usize,
    memory: Memory,
}

/// Buffers, large enough for the part or larger.
#[derive(Default)]
struct Memory {
    /// `[vectors, lanes, dim_k / QUAD]`: dimensions 0 and 2 of a quad, then 1 and 3.
    queries: Vec<[u32; 2]>,
    /// `[vectors, lanes]`.
    query_scales: Vec<f32>,
    /// `[tiles, halves, dim_k / QUAD]` of keys.
    keys: Vec<Line<u32>>,
    /// `[tiles, QUADS, vectors]` of elements.
    values: Vec<Line<u32>>,
    /// `[tiles, halves]` of scales of keys, and of values.
    scales: [Vec<Line<f32>>; 2],
    /// `[rows, tiles, halves]` of keys.
    scores: Vec<Line<f32>>,
    /// `[rows, tiles]` of quads of positions: 0 and 2, then 1 and 3.
    weights: Vec<Line<u32>>,
    /// `[rows]`.
    weight_scales: [f32; LANES],
    /// `[rows, vectors]` of elements, in the order of `values`.
    sums: Vec<Line<i32>>,
}

thread_local! {
    /// From task to task of a thread: a decode step has some hundred, and to ask for memory takes as long as to turn keys.
    static KEPT: Cell<Memory> = Cell::default();
}

impl Drop for Int8 {
    fn drop(&mut self) {
        KEPT.set(take(&mut self.memory));
    }
}

impl Int8 {
    /// Whether it is for a cache of this shape, on this machine.
    pub(crate) fn takes(shape: &CacheShape) -> bool {
        let has_sums = shape.dim_k <= MAX_DIMS;
        let is_even = shape.dim_k.is_multiple_of(32) && shape.dim_v.is_multiple_of(LANES);
        has_sums && is_even && is_x86_feature_detected!("avx512vnni")
    }

    fn keys_of(&self, tile: usize) -> Range<usize> {
        let size = HALVES * self.dim_k / QUAD;
        let at = tile % self.num_kept;
        at * size..(at + 1) * size
    }

    fn values_of(&self, tile: usize) -> Range<usize> {
        let size = QUADS * vectors_of(self.dim_v);
        let at = tile % self.num_kept;
        at * size..(at + 1) * size
    }
}

/// Vectors of so many elements: a multiple of four.
fn vectors_of(dim: usize) -> usize {
    dim.div_ceil(WIDTH) * QUAD
}

/// Where the scales of a tile are.
fn scales_of(tile: usize) -> Range<usize> {
    tile * HALVES..(tile + 1) * HALVES
}

impl Arithmetic<u16, LANES> for Int8 {
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
        let (zeros, quads) = (Line([0; LANES]), shape.dim_k / QUAD);
        make_room(&mut memory.queries, num_vectors * LANES * quads, [0; 2]);
        make_room(&mut memory.query_scales, num_vectors * LANES, 0.0);
        make_room(&mut memory.keys, num_kept * HALVES * quads, zeros);
        let per_tile = QUADS * vectors_of(shape.dim_v);
        make_room(&mut memory.values, num_kept * per_tile, zeros);
        for scales in &mut memory.scales {
            make_room(scales, PER_ROW * HALVES, Line([0.0; LANES]));
        }
        Self {
            dim_k: shape.dim_k,
            dim_v: shape.dim_v,
            num_kept,
            memory,
        }
    }

    #[inline(always)]
    fn take_queries<'q>(&mut self, number: usize, queries: impl Iterator<Item = &'q [u16]>) {
        let size = self.dim_k / QUAD;
        let rows = self.memory.queries[number * LANES * size..].chunks_exact_mut(size);
        let scales = &mut self.memory.query_scales[number * LANES..];
        for ((row, scale), query) in rows.zip(scales).zip(queries) {
            *scale = take_query(query, row);
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

impl KeyLanes<u16> for Int8 {
    #[inline(always)]
    fn make_room(&mut self, max_rows: usize) {
        let (zeros, memory) = (Line([0.0; LANES]), &mut self.memory);
        make_room(&mut memory.scores, max_rows * PER_ROW * HALVES, zeros);
        make_room(&mut memory.weights, max_rows * PER_ROW, Line([0; LANES]));
        let num_sums = max_rows * vectors_of(self.dim_v);
        make_room(&mut memory.sums, num_sums, Line([0; LANES]));
    }

    #[inline(always)]
    fn take_keys(&mut self, tiles: &Tiles<'_, u16>, tile: usize) {
        let tile_lines = self.keys_of(tile);
        let (keys, values) = (tiles.keys(tile).into_int8(), tiles.values(tile).into_int8());
        take_scales(&keys, &mut self.memory.scales[0][scales_of(tile)]);
        take_scales(&values, &mut self.memory.scales[1][scales_of(tile)]);
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
        self.memory.sums[..bounds.num_rows * per_row].fill(Line([0; LANES]));
    }

    #[inline(always)]
    fn take_values(&mut self, tiles: &Tiles<'_, u16>, tile: usize) {
        let tile_lines = self.values_of(tile);
        let values = tiles.values(tile).into_int8();
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
        let lines = &self.memory.sums[row * per_row..][..per_row];
        // SAFETY: as above.
        unsafe { give(lines, self.memory.weight_scales[row], sums) };
    }
}

impl Int8 {
    /// [`KeyLanes::score`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    #[inline]
    fn score_rows(&mut self, vector: usize, num_rows: usize, tile: usize) {
        let size = self.dim_k / QUAD;
        let keys = &self.memory.keys[self.keys_of(tile)];
        let key_scales = &self.memory.scales[0][scales_of(tile)];
        let queries = &self.memory.queries[vector * LANES * size..][..num_rows * size];
        let query_scales = &self.memory.query_scales[vector * LANES..][..num_rows];
        let per_row = HALVES * PER_ROW;
        let groups = queries
            .chunks(TOGETHER * size)
            .zip(query_scales.chunks(TOGETHER))
            .zip(self.memory.scores.chunks_mut(TOGETHER * per_row));
        for ((queries, query_scales), scores) in groups {
            let scores = scores.chunks_mut(per_row);
            let scores = scores.map(|row| &mut row[tile * HALVES..][..HALVES]);
            match query_scales.len() {
                1 => score::<1>(queries, query_scales, keys, key_scales, scores),
                2 => score::<2>(queries, query_scales, keys, key_scales, scores),
                3 => score::<3>(queries, query_scales, keys, key_scales, scores),
                _ => score::<TOGETHER>(queries, query_scales, keys, key_scales, scores),
            }
        }
    }

    /// [`KeyLanes::soften`], but for the sums.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    #[inline]
    fn soften_rows(
        &mut self,
        how: How,
        start: usize,
        bounds: &Bounds<LANES>,
        tiles: Range<usize>,
        header: &mut [[f32; LANES]],
    ) {
        let scales = &self.memory.scales[1][tiles.start * HALVES..tiles.end * HALVES];
        let rows = self.memory.scores.chunks_exact_mut(HALVES * PER_ROW);
        let rows = rows.zip(self.memory.weights.chunks_exact_mut(PER_ROW));
        for (lane, (scores, weights)) in rows.take(bounds.num_rows).enumerate() {
            let scores = &mut scores[tiles.start * HALVES..tiles.end * HALVES];
            let largest = largest(how, scores, start, tiles.start, bounds, lane);
            let (reference, total, largest_weight) = soften(how, largest, scores, scales);
            let (inverse, scale) = scales_for(largest_weight);
            for (weights, scores) in weights[tiles.clone()]
                .iter_mut()
                .zip(scores.as_chunks::<HALVES>().0)
            {
                round(scores, inverse, weights);
            }
            header[0][lane] = reference;
            header[1][lane] = total;
            self.memory.weight_scales[lane] = scale;
        }
    }

    /// [`KeyLanes::weigh`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
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

/// The factor that makes numbers integers of 16 bits, and the scale of these; `largest` is the largest absolute value.
#[inline(always)]
fn scales_for(largest: f32) -> (f32, f32) {
    let inverse = f32::from(i16::MAX) / largest;
    match inverse.is_infinite() {
        true => (0.0, 0.0),
        false => (inverse, largest / f32::from(i16::MAX)),
    }
}

/// Rounds a query to integers in `row`; their scale, which is NaN if a number is not finite.
#[inline(always)]
fn take_query(query: &[u16], row: &mut [[u32; 2]]) -> f32 {
    // As integers, so that NaN is the largest.
    let bits = |&element: &u16| u32::from(element) << 16 & 0x7fff_ffff;
    let largest = f32::from_bits(query.iter().map(bits).fold(0, u32::max));
    let (inverse, scale) = scales_for(largest);
    for (pairs, quad) in row.iter_mut().zip(query.as_chunks::<QUAD>().0) {
        let quad = quad.map(|element| (element.widen() * inverse).round_ties_even() as i32);
        *pairs = [pair(quad[0], quad[2]), pair(quad[1], quad[3])];
    }
    match largest.is_finite() {
        true => scale,
        false => f32::NAN,
    }
}

/// Two integers of 16 bits in a lane.
#[inline(always)]
fn pair(low: i32, high: i32) -> u32 {
    (low & 0xffff | high << 16).cast_unsigned()
}

/// The scales of a tile's heads.
#[inline]
fn take_scales(heads: &[&[i8]; TILE], scales: &mut [Line<f32>]) {
    for (line, heads) in scales.iter_mut().zip(heads.as_chunks::<LANES>().0) {
        line.0 = heads.map(scale_of);
    }
}

/// Scores of `R` rows with the keys of a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn score<'s, const R: usize>(
    queries: &[[u32; 2]],
    query_scales: &[f32],
    keys: &[Line<u32>],
    key_scales: &[Line<f32>],
    scores: impl Iterator<Item = &'s mut [Line<f32>]>,
) {
    let size = queries.len() / R;
    let (low, high) = keys.split_at(size);
    let queries: [&[[u32; 2]]; R] = std::array::from_fn(|row| &queries[row * size..][..size]);
    // Two sums each, which do not wait for each other.
    let mut sums = [[[_mm512_setzero_si512(); 2]; HALVES]; R];
    for quad in 0..size {
        let keys = [widened(&low[quad]), widened(&high[quad])];
        for row in 0..R {
            for (at, &pair) in queries[row][quad].iter().enumerate() {
                let query = _mm512_set1_epi32(pair.cast_signed());
                for half in 0..HALVES {
                    let sum = sums[row][half][at];
                    sums[row][half][at] = _mm512_dpwssd_epi32(sum, keys[half][at], query);
                }
            }
        }
    }
    for ((sums, scores), &query_scale) in sums.into_iter().zip(scores).zip(query_scales) {
        for (half, [even, odd]) in sums.into_iter().enumerate() {
            let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
            let scaled = sum.multiply(__m512::load(&key_scales[half].0));
            let scaled = scaled.multiply(_mm512_set1_ps(query_scale));
            scaled.store(&mut scores[half].0);
        }
    }
}

/// Scores of a row become weights times the scales of their values; what weights are measured against, their sum, and
/// the largest of these products, NaN if there is one.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn soften(
    how: How,
    largest: f32,
    scores: &mut [Line<f32>],
    scales: &[Line<f32>],
) -> (f32, f32, f32) {
    let (factors, references) = measure(how, largest);
    let (mut total, mut largest) = (_mm512_setzero_ps(), _mm512_setzero_si512());
    for (score, scale) in scores.iter_mut().zip(scales) {
        let weight = weight(__m512::load(&score.0), factors, references);
        total = _mm512_add_ps(total, weight);
        // Not NaN where the weight is 0: what a row does not see is not its own.
        let weighs = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(weight, _mm512_setzero_ps());
        let scaled = _mm512_maskz_mul_ps(weighs, weight, __m512::load(&scale.0));
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(scaled)); // none is negative but NaN
        scaled.store(&mut score.0);
    }
    (
        _mm512_cvtss_f32(references),
        _mm512_reduce_add_ps(total),
        f32::from_bits(_mm512_reduce_max_epu32(largest)),
    )
}

/// Weights of a tile times `inverse`, rounded to 16 bits: of each four, 0 and 2 in a lane, 1 and 3 in the next one.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn round(weights: &[Line<f32>; HALVES], inverse: f32, pairs: &mut Line<u32>) {
    let [low, high] = weights.each_ref().map(|weights| {
        let weights = __m512::load(&weights.0).multiply(_mm512_set1_ps(inverse));
        let weights = _mm512_cvtps_epi32(weights);
        let last_two = _mm512_shuffle_epi32::<0b11_10_11_10>(weights);
        _mm512_or_si512(weights, _mm512_slli_epi32::<16>(last_two))
    });
    let firsts = _mm512_set_epi32(29, 28, 25, 24, 21, 20, 17, 16, 13, 12, 9, 8, 5, 4, 1, 0);
    // SAFETY: 64 bytes are written.
    unsafe {
        _mm512_store_si512(
            pairs.0.as_mut_ptr().cast(),
            _mm512_permutex2var_epi32(low, firsts, high),
        );
    }
}

/// Adds weighted values to the sums of `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn weigh<'w, const R: usize>(
    weights: impl Fn(usize) -> &'w Line<u32>,
    values: &[Line<u32>],
    sums: &mut [Line<i32>],
) {
    let weights: [&Line<u32>; R] = std::array::from_fn(weights);
    let per_row = sums.len() / R;
    for first in (0..per_row).step_by(QUAD) {
        let mut acc = [[_mm512_setzero_si512(); QUAD]; R];
        for row in 0..R {
            for at in 0..QUAD {
                acc[row][at] = load(&sums[row * per_row + first + at]);
            }
        }
        for (quad, values) in values.chunks_exact(per_row).enumerate() {
            let values: &[Line<u32>; QUAD] =
                values[first..].first_chunk().expect("there are so many");
            for (at, line) in values.iter().enumerate() {
                let values = widened(line);
                for row in 0..R {
                    for (half, values) in values.into_iter().enumerate() {
                        let weight = weights[row].0[2 * quad + half];
                        let weight = _mm512_set1_epi32(weight.cast_signed());
                        acc[row][at] = _mm512_dpwssd_epi32(acc[row][at], values, weight);
                    }
                }
            }
        }
        for row in 0..R {
            for at in 0..QUAD {
                let sum = &mut sums[row * per_row + first + at];
                // SAFETY: 64 bytes are written.
                unsafe { _mm512_store_si512(sum.0.as_mut_ptr().cast(), acc[row][at]) };
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load<T>(line: &Line<T>) -> __m512i {
    // SAFETY: a line of numbers of four bytes is 64 bytes.
    unsafe { _mm512_load_si512(std::ptr::from_ref(line).cast()) }
}

/// Numbers 0 and 2 of each lane as 16 bits, then 1 and 3.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn widened(line: &Line<u32>) -> [__m512i; 2] {
    let numbers = load(line);
    [
        _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(numbers)),
        _mm512_srai_epi16::<8>(numbers),
    ]
}

/// Numbers of a head from `first` on, as many as a vector has or the head; zeros after them.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn numbers(head: &[i8], first: usize) -> __m512i {
    let left = &head[first..head.len() - SCALE];
    // SAFETY: at most as many numbers as the slice has are read.
    unsafe {
        match left.len() < WIDTH {
            true => _mm512_maskz_loadu_epi8(u64::MAX >> (WIDTH - left.len()), left.as_ptr()),
            false => _mm512_loadu_si512(left.as_ptr().cast()),
        }
    }
}

/// `lines[half][quad]` becomes four neighbouring dimensions of the keys of that half.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn turn_keys(keys: &[&[i8]; TILE], lines: &mut [Line<u32>]) {
    let (halves, per_half) = (keys.as_chunks::<LANES>().0, lines.len() / HALVES);
    for (keys, lines) in halves.iter().zip(lines.chunks_exact_mut(per_half)) {
        for (at, lines) in lines.chunks_mut(LANES).enumerate() {
            let rows = keys.map(|key| numbers(key, at * WIDTH));
            for (line, column) in lines.iter_mut().zip(transpose_16(rows)) {
                // SAFETY: 64 bytes are written.
                unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), column) };
            }
        }
    }
}

/// `lines[quad][vector]` becomes 16 elements of four neighbouring positions; of 64 elements the first vector has 0 to 3, 16
/// to 19 and so on, the second one those after these.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn turn_values(values: &[&[i8]; TILE], lines: &mut [Line<u32>]) {
    let per_quad = lines.len() / QUADS;
    let quads = values.as_chunks::<QUAD>().0.iter();
    for (values, lines) in quads.zip(lines.chunks_exact_mut(per_quad)) {
        for (at, lines) in lines.as_chunks_mut::<QUAD>().0.iter_mut().enumerate() {
            let [a, b, c, d] = values.map(|value| numbers(value, at * WIDTH));
            let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
            let (last_ab, last_cd) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
            let turned = [
                _mm512_unpacklo_epi16(ab, cd),
                _mm512_unpackhi_epi16(ab, cd),
                _mm512_unpacklo_epi16(last_ab, last_cd),
                _mm512_unpackhi_epi16(last_ab, last_cd),
            ];
            for (line, turned) in lines.iter_mut().zip(turned) {
                // SAFETY: 64 bytes are written.
                unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), turned) };
            }
        }
    }
}

/// A row's sums times `scale`, in the order of its elements.
#[target_feature(enable = "avx512f")]
#[inline]
fn give(lines: &[Line<i32>], scale: f32, row: &mut [f32]) {
    for (lines, elements) in lines
        .as_chunks::<QUAD>()
        .0
        .iter()
        .zip(row.chunks_mut(WIDTH))
    {
        let [a, b, c, d] = lines
            .each_ref()
            .map(|line| _mm512_cvtepi32_ps(load(line)).multiply(_mm512_set1_ps(scale)));
        let (ab, cd) = (
            _mm512_shuffle_f32x4::<0x44>(a, b),
            _mm512_shuffle_f32x4::<0x44>(c, d),
        );
        let (last_ab, last_cd) = (
            _mm512_shuffle_f32x4::<0xee>(a, b),
            _mm512_shuffle_f32x4::<0xee>(c, d),
        );
        let vectors = [
            _mm512_shuffle_f32x4::<0x88>(ab, cd),
            _mm512_shuffle_f32x4::<0xdd>(ab, cd),
            _mm512_shuffle_f32x4::<0x88>(last_ab, last_cd),
            _mm512_shuffle_f32x4::<0xdd>(last_ab, last_cd),
        ];
        for (vector, elements) in vectors.into_iter().zip(elements.as_chunks_mut().0) {
            vector.store(elements);
        }
    }
}
