//! Products of bfloat16 by float32's instruction (FMA), in the order and to the bits of `VDPBF16PS`.
//!
//! Intel's processors do `VDPBF16PS` at half the rate of two FMAs: its two products are as many operations there. The
//! instruction adds the product of the odd elements first, then that of the even ones, and rounds after each. Products of
//! two bfloat16 are exact in float32, so two FMAs in that order give its bits. Only subnormal sums differ: the
//! instruction flushes them to zero. A process uses one of both, so a row has the same bits in every batch.

use std::arch::x86_64::*;
use std::cell::Cell;
use std::mem::take;
use std::ops::Range;

use crate::amx::weight;
use crate::bf16::Bf16;
use crate::cache_tiles::Tiles;
use crate::kernel::{Arithmetic, Bounds, How};
use crate::key_lanes::{
    HALVES, KeyLanes, LANES, PER_ROW, TOGETHER, attend, largest, make_room, measure,
};
use crate::lanes::{Vector, transpose_16};
use crate::step::{CacheShape, TILE};
use crate::tiles::Line;

/// Rows whose scores are computed together, if there are so many.
const MANY: usize = 8;
/// Vectors of a value's elements that are added up at a time.
const WIDE: usize = 4;

/// Queries, and a tile in float32; of several vectors of rows, a part.
pub(crate) struct Bf16Fma {
    dim_k: usize,
    dim_v: usize,
    /// Tiles that are kept for the next vector of rows.
    num_kept: usize,
    memory: Memory,
}

/// Buffers, large enough for the part or larger.
#[derive(Default)]
struct Memory {
    /// `[vectors, lanes, dim_k]`.
    queries: Vec<f32>,
    /// `[tiles, halves, dim_k]` of keys.
    keys: Vec<Line<f32>>,
    /// `[tiles, TILE, dim_v / LANES]` of elements.
    values: Vec<Line<f32>>,
    /// `[rows, tiles, halves]` of keys: scores, then weights.
    scores: Vec<Line<f32>>,
    /// `[rows, dim_v / LANES]` of elements.
    sums: Vec<Line<f32>>,
}

thread_local! {
    /// From task to task of a thread, as for [`Bf16`].
    static KEPT: Cell<Memory> = Cell::default();
}

impl Drop for Bf16Fma {
    fn drop(&mut self) {
        KEPT.set(take(&mut self.memory));
    }
}

impl Bf16Fma {
    /// Whether it is for a cache of this shape.
    pub(crate) fn takes(shape: &CacheShape) -> bool {
        Bf16::takes(shape)
    }

    fn keys_of(&self, tile: usize) -> Range<usize> {
        let size = HALVES * self.dim_k;
        let at = tile % self.num_kept;
        at * size..(at + 1) * size
    }

    fn values_of(&self, tile: usize) -> Range<usize> {
        let size = TILE * self.per_row();
        let at = tile % self.num_kept;
        at * size..(at + 1) * size
    }

    /// Vectors of a row's sums.
    fn per_row(&self) -> usize {
        self.dim_v / LANES
    }
}

impl Arithmetic<u16, LANES> for Bf16Fma {
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
        let zeros = Line([0.0; LANES]);
        make_room(&mut memory.queries, num_vectors * LANES * shape.dim_k, 0.0);
        make_room(&mut memory.keys, num_kept * HALVES * shape.dim_k, zeros);
        let per_tile = TILE * shape.dim_v / LANES;
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
        let size = self.dim_k;
        let rows = self.memory.queries[number * LANES * size..].chunks_exact_mut(size);
        for (row, query) in rows.zip(queries) {
            crate::element::widen(query, row);
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

impl KeyLanes<u16> for Bf16Fma {
    #[inline(always)]
    fn make_room(&mut self, max_rows: usize) {
        let (zeros, per_row) = (Line([0.0; LANES]), self.per_row());
        let memory = &mut self.memory;
        make_room(&mut memory.scores, max_rows * PER_ROW * HALVES, zeros);
        make_room(&mut memory.sums, max_rows * per_row, zeros);
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
        let per_row = self.per_row();
        self.memory.sums[..bounds.num_rows * per_row].fill(Line([0.0; LANES]));
    }

    #[inline(always)]
    fn take_values(&mut self, tiles: &Tiles<'_, u16>, tile: usize) {
        let tile_lines = self.values_of(tile);
        let values = tiles.values(tile).into_computed();
        // SAFETY: as above.
        unsafe { widen_values(&values, &mut self.memory.values[tile_lines]) };
    }

    #[inline(always)]
    fn weigh(&mut self, _: &Tiles<'_, u16>, bounds: &Bounds<LANES>, tile: usize) {
        // SAFETY: as above.
        unsafe { self.weigh_rows(bounds.num_rows, tile) };
    }

    #[inline(always)]
    fn give(&self, row: usize, sums: &mut [f32]) {
        let per_row = self.per_row();
        let lines = &self.memory.sums[row * per_row..][..per_row];
        for (sums, line) in sums.as_chunks_mut::<LANES>().0.iter_mut().zip(lines) {
            *sums = line.0;
        }
    }
}

impl Bf16Fma {
    /// Scores of so many rows of a vector with a tile that is there.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn score_rows(&mut self, vector: usize, num_rows: usize, tile: usize) {
        let size = self.dim_k;
        let keys = &self.memory.keys[self.keys_of(tile)];
        let queries = &self.memory.queries[vector * LANES * size..][..num_rows * size];
        let per_row = HALVES * PER_ROW;
        let mut row = 0;
        while row < num_rows {
            let queries = &queries[row * size..];
            let scores = &mut self.memory.scores[row * per_row + tile * HALVES..];
            row += match num_rows - row {
                1 => score::<1>(queries, keys, scores),
                2 => score::<2>(queries, keys, scores),
                3 => score::<3>(queries, keys, scores),
                4..MANY => score::<4>(queries, keys, scores),
                _ => score::<MANY>(queries, keys, scores),
            };
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
        for (lane, scores) in rows.take(bounds.num_rows).enumerate() {
            let scores = &mut scores[tiles.start * HALVES..tiles.end * HALVES];
            let largest = largest(how, scores, start, tiles.start, bounds, lane);
            let (reference, total) = soften(how, largest, scores);
            header[0][lane] = reference;
            header[1][lane] = total;
        }
    }

    /// Adds the values of a tile that is there, weighted, to the sums of so many rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn weigh_rows(&mut self, num_rows: usize, tile: usize) {
        let per_row = self.per_row();
        let values = &self.memory.values[self.values_of(tile)];
        let groups = self.memory.sums[..num_rows * per_row].chunks_mut(TOGETHER * per_row);
        let weights = self.memory.scores.chunks(TOGETHER * PER_ROW * HALVES);
        for (sums, weights) in groups.zip(weights) {
            let weights = |row: usize| {
                let first = (row * PER_ROW + tile) * HALVES;
                weights[first..].first_chunk().expect("a row has all tiles")
            };
            match sums.len() / per_row {
                1 => weigh::<1>(weights, values, sums),
                2 => weigh::<2>(weights, values, sums),
                3 => weigh::<3>(weights, values, sums),
                _ => weigh::<TOGETHER>(weights, values, sums),
            }
        }
    }
}

/// Scores of the first `R` rows of `queries` with the keys of a tile, where the tile's stand in those of the part; `R`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn score<const R: usize>(queries: &[f32], keys: &[Line<f32>], scores: &mut [Line<f32>]) -> usize {
    let size = keys.len() / HALVES;
    let queries: [&[[f32; 2]]; R] =
        std::array::from_fn(|row| queries[row * size..][..size].as_chunks().0);
    let (low, high) = keys.split_at(size);
    let (low, high) = (low.as_chunks::<2>().0, high.as_chunks::<2>().0);
    let queries = queries.map(|query| &query[..low.len()]);
    let mut sums = [[_mm512_setzero_ps(); HALVES]; R];
    for (pair, halves) in low.iter().zip(high).enumerate() {
        for parity in [1, 0] {
            let keys = [&halves.0[parity], &halves.1[parity]].map(|line| __m512::load(&line.0));
            for row in 0..R {
                let query = _mm512_set1_ps(queries[row][pair][parity]);
                for half in 0..HALVES {
                    sums[row][half] = _mm512_fmadd_ps(keys[half], query, sums[row][half]);
                }
            }
        }
    }
    let scores = &mut scores[..(R - 1) * HALVES * PER_ROW + HALVES];
    for row in 0..R {
        for half in 0..HALVES {
            sums[row][half].store(&mut scores[row * HALVES * PER_ROW + half].0);
        }
    }
    R
}

/// Scores of a row become weights, rounded to bfloat16; what they are measured against, and their sum.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn soften(how: How, largest: f32, scores: &mut [Line<f32>]) -> (f32, f32) {
    let (factors, references) = measure(how, largest);
    let mut total = _mm512_setzero_ps();
    for score in scores {
        let weight = weight(__m512::load(&score.0), factors, references);
        total = _mm512_add_ps(total, weight);
        // SAFETY: both are 32 bytes.
        let rounded: __m256i = unsafe { std::mem::transmute(_mm512_cvtneps_pbh(weight)) };
        widened(rounded).store(&mut score.0);
    }
    (_mm512_cvtss_f32(references), _mm512_reduce_add_ps(total))
}

/// Adds weighted values to the sums of `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn weigh<'w, const R: usize>(
    weights: impl Fn(usize) -> &'w [Line<f32>; HALVES],
    values: &[Line<f32>],
    sums: &mut [Line<f32>],
) {
    let weights: [&[Line<f32>; HALVES]; R] = std::array::from_fn(weights);
    let per_row = sums.len() / R;
    let mut first = 0;
    while first < per_row {
        first += match per_row - first {
            1 => weigh_some::<R, 1>(&weights, values, sums, first),
            2 => weigh_some::<R, 2>(&weights, values, sums, first),
            3 => weigh_some::<R, 3>(&weights, values, sums, first),
            _ => weigh_some::<R, WIDE>(&weights, values, sums, first),
        };
    }
}

/// The same for `N` vectors of elements from `first` on; `N`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn weigh_some<const R: usize, const N: usize>(
    weights: &[&[Line<f32>; HALVES]; R],
    values: &[Line<f32>],
    sums: &mut [Line<f32>],
    first: usize,
) -> usize {
    let per_row = sums.len() / R;
    let mut acc = [[_mm512_setzero_ps(); N]; R];
    for row in 0..R {
        for at in 0..N {
            acc[row][at] = __m512::load(&sums[row * per_row + first + at].0);
        }
    }
    for (pair, values) in values.chunks_exact(2 * per_row).enumerate() {
        for parity in [1, 0] {
            let values: &[Line<f32>; N] = values[parity * per_row + first..]
                .first_chunk()
                .expect("there are so many");
            let values = values.each_ref().map(|line| __m512::load(&line.0));
            let position = 2 * pair + parity;
            for row in 0..R {
                let weight = weights[row][position / LANES].0[position % LANES];
                let weight = _mm512_set1_ps(weight);
                for at in 0..N {
                    acc[row][at] = _mm512_fmadd_ps(values[at], weight, acc[row][at]);
                }
            }
        }
    }
    for row in 0..R {
        for at in 0..N {
            acc[row][at].store(&mut sums[row * per_row + first + at].0);
        }
    }
    N
}

/// 16 elements in float32.
#[target_feature(enable = "avx512f")]
#[inline]
fn widened(elements: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(elements)))
}

/// `lines[half][dim]` becomes a dimension of the keys of that half.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn turn_keys(keys: &[&[u16]; TILE], lines: &mut [Line<f32>]) {
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    let (halves, per_half) = (keys.as_chunks::<LANES>().0, lines.len() / HALVES);
    for (keys, lines) in halves.iter().zip(lines.chunks_exact_mut(per_half)) {
        for (at, lines) in lines
            .as_chunks_mut::<{ 2 * LANES }>()
            .0
            .iter_mut()
            .enumerate()
        {
            // SAFETY: 32 elements are read of a slice that has them.
            let rows = keys.map(|key| unsafe {
                _mm512_loadu_si512(key[at * 2 * LANES..][..2 * LANES].as_ptr().cast())
            });
            let pairs = lines.as_chunks_mut::<2>().0.iter_mut();
            for ([even, odd], column) in pairs.zip(transpose_16(rows)) {
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(column)).store(&mut even.0);
                _mm512_castsi512_ps(_mm512_and_si512(column, upper)).store(&mut odd.0);
            }
        }
    }
}

/// `lines[position][vector]` becomes 16 elements of a value.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn widen_values(values: &[&[u16]; TILE], lines: &mut [Line<f32>]) {
    let per_value = lines.len() / TILE;
    for (value, lines) in values.iter().zip(lines.chunks_exact_mut(per_value)) {
        for (elements, line) in value.as_chunks::<LANES>().0.iter().zip(lines) {
            // SAFETY: 16 elements are read.
            let elements = unsafe { _mm256_loadu_si256(elements.as_ptr().cast()) };
            widened(elements).store(&mut line.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;
    use crate::isa::Isa;
    use crate::job::{Job, Task};
    use crate::kernel::work;
    use crate::step::{Sequences, Step};
    use crate::stored::Stored;
    use crate::write::Rows;

    const HEADS: usize = 4;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn by<A: Arithmetic<u16, LANES>>(job: &Job<'_, u16>) -> Vec<u16> {
        let per_row = job.heads * job.shape.dim_v;
        let mut out = vec![0; job.step.num_rows * per_row];
        for run in &job.step.runs {
            let out = &mut out[run.first_row * per_row..][..run.count * per_row];
            work::<u16, A, LANES, true>(
                job,
                Task::Rest {
                    run,
                    states: &[],
                    out,
                },
            );
        }
        out
    }

    fn compare(new: usize, dim_k: usize, dim_v: usize, window: Option<usize>) {
        let (len, block_size, mut seed) = (700_usize, 16, 7_u32);
        let num_blocks = len.div_ceil(block_size);
        let mut numbers = |count: usize| -> Vec<u16> {
            let mut next = || {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                u16::narrow(((seed >> 8) as f32 / (1 << 23) as f32 - 1.0) * 3.0)
            };
            (0..count).map(|_| next()).collect()
        };
        let shape = CacheShape {
            num_blocks,
            block_size,
            kv_heads: 1,
            dim_k,
            dim_v,
        };
        let slots = num_blocks * block_size;
        let (keys, values) = (numbers(slots * dim_k), numbers(slots * dim_v));
        let queries = numbers(new * HEADS * dim_k);
        let tables: Vec<i32> = (0..num_blocks as i32).rev().collect();
        let sequences = Sequences {
            starts: &[0, new as i32],
            lens: &[len as i32],
            tables: &tables,
            width: num_blocks,
        };
        let width = HEADS * dim_k;
        let job = Job {
            step: &Step::new(&sequences, num_blocks, block_size).expect("it fits"),
            shape,
            cached: u16::cached(&keys, &values),
            query: Rows::new(&queries, new, width, width).expect("it fits"),
            heads: HEADS,
            group: HEADS,
            scaling: 0.125,
            softcap: None,
            window,
            first_key: 0,
            sinks: None,
            most_products: usize::MAX,
        };
        // SAFETY: the caller looked up that the machine has these instructions.
        let [dots, fmas] = unsafe { [by::<Bf16>(&job), by::<Bf16Fma>(&job)] };
        assert_eq!(
            dots, fmas,
            "{new} rows of {dim_k} and {dim_v}, window {window:?}"
        );
        assert!(fmas.iter().any(|&element| element != 0));
    }

    #[test]
    fn two_fmas_give_the_bits_of_the_instruction_for_two_products() {
        if !(Isa::Avx512Bf16.is_there() && is_x86_feature_detected!("avx512bf16")) {
            return; // nothing to compare with
        }
        for new in [1, 2, 3, 20, 67] {
            for (dim_k, dim_v) in [(32, 16), (64, 64), (96, 48), (256, 256), (64, 112)] {
                compare(new, dim_k, dim_v, None);
                compare(new, dim_k, dim_v, Some(300));
            }
        }
    }
}
