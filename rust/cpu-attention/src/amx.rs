//! Products of bfloat16 by AMX, Intel's matrix instructions: 16 keys or 16 elements of a value with 16 rows at once,
//! 32 products each.
//!
//! Weights are rounded to bfloat16 before they meet the values, as in torch and flash-attn. A row's bits are its
//! own here too: each sum of a product of tiles is added up in an order that its neighbours do not change.

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;

use crate::kernel::{Arithmetic, Products, TILE};
use crate::lanes::{Vector, transpose_16};
use crate::step::CacheShape;

/// Rows of a tile; its lanes, too.
const ROWS: usize = 16;
/// Bytes of a row of a tile.
const STRIDE: usize = 64;
/// Elements of a row of a tile.
const WIDTH: usize = 32;

/// Whether the processor has AMX for bfloat16 and the system lets us use it.
pub(crate) fn is_there() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
        let has = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_AND_TILES == BF16_AND_TILES;
        has && is_x86_feature_detected!("avx512bf16") && is_allowed()
    })
}

/// Linux keeps the tiles' state for a process only if that asks for it.
#[cfg(target_os = "linux")]
fn is_allowed() -> bool {
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XTILEDATA: usize = 18;
    // SAFETY: this call takes two numbers and no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_allowed() -> bool {
    false
}

/// Eight tiles of 16 rows of 64 bytes, until it is dropped.
struct Tiles;

impl Tiles {
    fn begin() -> Self {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let tiles = |per_tile: u16| std::array::from_fn(|tile| if tile < 8 { per_tile } else { 0 });
        let config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: tiles(STRIDE as u16),
            rows: tiles(ROWS as u16).map(|rows| rows as u8),
        };
        // SAFETY: the machine has AMX, as `takes` is asked first, and the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack)) };
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Rows in memory that is borrowed, each `stride` bytes after the last.
#[derive(Clone, Copy)]
struct Rows<'t> {
    first: *const u8,
    stride: usize,
    borrowed: PhantomData<&'t [u8]>,
}

impl<'t> Rows<'t> {
    /// Side by side.
    #[inline(always)]
    fn of<T>(memory: &'t [[T; STRIDE / size_of::<u32>()]; ROWS]) -> Self {
        const { assert!(size_of::<T>() == size_of::<u32>()) };
        Self {
            first: memory.as_ptr().cast(),
            stride: STRIDE,
            borrowed: PhantomData,
        }
    }

    /// These, if they lie at equal distances: forwards or, with a stride that wraps, backwards.
    #[inline(always)]
    fn spread(rows: &[&'t [u16]; ROWS]) -> Option<Self> {
        let [first, second] = [rows[0], rows[1]].map(|row| row.as_ptr().addr());
        let stride = second.wrapping_sub(first);
        let even = |(at, row): (usize, &&[u16])| {
            row.as_ptr().addr().wrapping_sub(first) == stride.wrapping_mul(at)
        };
        rows.iter().enumerate().all(even).then_some(Self {
            first: rows[0].as_ptr().cast(),
            stride,
            borrowed: PhantomData,
        })
    }
}

/// `tile = rows`, from byte `at` of each on.
macro_rules! load {
    ($tile:literal, $rows:expr, $at:expr) => {{
        let rows: Rows<'_> = $rows;
        // SAFETY: 16 rows of 64 bytes are borrowed there, the tiles are set up.
        unsafe {
            asm!(concat!("tileloadd ", $tile, ", [{} + {} * 1]"), in(reg) rows.first.add($at),
                in(reg) rows.stride, options(nostack, readonly));
        }
    }};
}

/// The contrary, to rows side by side.
macro_rules! store {
    ($tile:literal, $to:expr) => {{
        let to: &mut [[f32; ROWS]; ROWS] = $to;
        // SAFETY: as above.
        unsafe {
            asm!(concat!("tilestored [{} + {} * 1], ", $tile), in(reg) to.as_mut_ptr(), in(reg) STRIDE,
                options(nostack));
        }
    }};
}

macro_rules! zero {
    ($tile:literal) => {
        // SAFETY: the tiles are set up.
        unsafe { asm!(concat!("tilezero ", $tile), options(nostack, nomem)) }
    };
}

/// `sums[m][n] += a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1]` for 16 `k`.
macro_rules! multiply_add {
    ($sums:literal, $a:literal, $b:literal) => {
        // SAFETY: the tiles are set up.
        unsafe {
            asm!(
                concat!("tdpbf16ps ", $sums, ", ", $a, ", ", $b),
                options(nostack, nomem)
            )
        }
    };
}

/// Queries and tiles as the instructions want them.
pub(crate) struct Amx {
    dim_k: usize,
    dim_v: usize,
    /// `[vectors, dim_k / 2, lanes]`, two neighbouring dimensions each.
    queries: Vec<[u32; ROWS]>,
    /// `[TILE, dim_k]`, of keys that do not lie at equal distances.
    keys: Vec<u16>,
    /// `[dim_v, TILE / 2]`, two neighbouring positions each.
    values: Vec<[u32; TILE / 2]>,
    _tiles: Tiles,
}

impl Amx {
    /// Whether it is for a cache of this shape.
    pub(crate) fn takes(shape: &CacheShape) -> bool {
        shape.dim_k.is_multiple_of(WIDTH) && shape.dim_v.is_multiple_of(ROWS)
    }
}

/// See [`Amx`].
pub(crate) struct AmxTile<'t> {
    queries: &'t [[u32; ROWS]],
    pairs: usize,
    /// Two times 16.
    keys: [Rows<'t>; TILE / ROWS],
    values: &'t [[u32; TILE / 2]],
}

impl Arithmetic<u16, ROWS> for Amx {
    type Lanes = __m512;
    type Tile<'t> = AmxTile<'t>;

    #[inline(always)]
    fn is_narrow(_: usize) -> bool {
        false
    }

    #[inline(always)]
    fn new(shape: &CacheShape, num_vectors: usize) -> Self {
        Self {
            dim_k: shape.dim_k,
            dim_v: shape.dim_v,
            queries: vec![[0; ROWS]; num_vectors * shape.dim_k / 2],
            keys: vec![0; TILE * shape.dim_k],
            values: vec![[0; TILE / 2]; shape.dim_v],
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
    fn tile<'t>(
        &'t mut self,
        _: &Range<usize>,
        keys: [&'t [u16]; TILE],
        values: [&'t [u16]; TILE],
    ) -> AmxTile<'t> {
        // SAFETY: the machine has AVX-512, as every one with AMX.
        unsafe { transpose(&values, &mut self.values[..self.dim_v]) };
        let halves: &[[&[u16]; ROWS]; TILE / ROWS] =
            keys.as_chunks().0.try_into().expect("ROWS divides TILE");
        let keys = match halves.map(|half| Rows::spread(&half)) {
            [Some(first), Some(second)] => [first, second],
            _ => {
                for (copy, key) in self.keys.chunks_exact_mut(self.dim_k).zip(keys) {
                    copy.copy_from_slice(key);
                }
                let copies = &self.keys[..];
                let copy = |at: usize| &copies[at * self.dim_k..][..self.dim_k];
                [0, ROWS].map(|first| {
                    let rows = std::array::from_fn(|at| copy(first + at));
                    Rows::spread(&rows).expect("they are side by side")
                })
            }
        };
        AmxTile {
            queries: &self.queries,
            pairs: self.dim_k / 2,
            keys,
            values: &self.values,
        }
    }
}

/// `columns[pair]` becomes two neighbouring dimensions of all rows, from dimension `first` on; of rows that are empty,
/// zeros.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose_pairs(rows: &[&[u16]; ROWS], first: usize, columns: &mut [[u32; ROWS]; ROWS]) {
    let mut pairs = [_mm512_setzero_si512(); ROWS];
    for (pairs, row) in pairs.iter_mut().zip(rows) {
        if let Some(row) = row.get(first..first + WIDTH) {
            // SAFETY: 32 elements are read.
            *pairs = unsafe { _mm512_loadu_si512(row.as_ptr().cast()) };
        }
    }
    for (column, pair) in columns.iter_mut().zip(transpose_16(pairs)) {
        // SAFETY: 16 numbers are written.
        unsafe { _mm512_storeu_si512(column.as_mut_ptr().cast(), pair) };
    }
}

/// `columns[dim]` becomes that dimension of all rows.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn transpose(rows: &[&[u16]; TILE], columns: &mut [[u32; TILE / 2]]) {
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
                    unsafe { _mm512_storeu_si512(column.as_mut_ptr().cast(), positions) };
                }
            }
        }
    }
}

/// Weights of neighbouring positions side by side, as bfloat16: rounded as `Element::narrow` does, which differs for
/// numbers below 2^-126 only. No weight but 0 is.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn narrow_pairs(weights: &[[f32; ROWS]; TILE], pairs: &mut [[u32; ROWS]; TILE / 2]) {
    let lanes = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0,
    );
    for (pairs, [low, high]) in pairs.iter_mut().zip(weights.as_chunks::<2>().0) {
        let halves = _mm512_cvtne2ps_pbh(__m512::load(high), __m512::load(low));
        // SAFETY: both are 64 bytes, of which 64 are written.
        unsafe {
            let halves: __m512i = std::mem::transmute(halves);
            let halves = _mm512_permutexvar_epi16(lanes, halves);
            _mm512_storeu_si512(pairs.as_mut_ptr().cast(), halves);
        }
    }
}

impl Products<ROWS> for AmxTile<'_> {
    #[inline(always)]
    fn scores(&self, vector: usize, _: &Range<usize>, scores: &mut [[f32; ROWS]; TILE]) {
        let query = &self.queries[vector * self.pairs..][..self.pairs];
        zero!("tmm0");
        zero!("tmm1");
        for (at, query) in query.as_chunks().0.iter().enumerate() {
            load!("tmm2", Rows::of(query), 0);
            load!("tmm3", self.keys[0], at * STRIDE);
            load!("tmm4", self.keys[1], at * STRIDE);
            multiply_add!("tmm0", "tmm3", "tmm2");
            multiply_add!("tmm1", "tmm4", "tmm2");
        }
        let (halves, _) = scores.as_chunks_mut::<ROWS>();
        store!("tmm0", &mut halves[0]);
        store!("tmm1", &mut halves[1]);
    }

    #[inline(always)]
    fn weigh(
        &self,
        weights: &[[f32; ROWS]; TILE],
        _: (&Range<usize>, bool),
        faded: Option<[f32; ROWS]>,
        (_, sums): (usize, &mut [[f32; ROWS]]),
    ) {
        let mut pairs = [[0; ROWS]; TILE / 2];
        // SAFETY: the machine has these instructions, as every one with AMX.
        unsafe { narrow_pairs(weights, &mut pairs) };
        if let Some(faded) = faded {
            let faded = __m512::load(&faded);
            for sum in sums.iter_mut() {
                __m512::load(sum).multiply(faded).store(sum);
            }
        }
        load!("tmm2", Rows::of(&pairs), 0);
        let (values, _) = self.values.as_chunks();
        for (sums, values) in sums.as_chunks_mut::<ROWS>().0.iter_mut().zip(values) {
            load!("tmm0", Rows::of(sums), 0);
            load!("tmm3", Rows::of(values), 0);
            multiply_add!("tmm0", "tmm3", "tmm2");
            store!("tmm0", sums);
        }
    }
}
