//! Tiles of AMX, Intel's matrix instructions: what one is, and the instructions as macros that name it.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Rows of a tile; its lanes, too.
pub(crate) const ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(crate) const STRIDE: usize = 64;
/// Elements of a row of a tile.
pub(crate) const WIDTH: usize = 32;

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
pub(crate) struct Tiles;

impl Tiles {
    /// Sets them up.
    pub(crate) fn begin() -> Self {
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

/// A line of the processor's cache: a row of a tile that began in the middle of one would take two.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Line<T>(pub(crate) [T; ROWS]);

/// Rows in memory that is borrowed, each `stride` bytes after the last.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'t> {
    pub(crate) first: *const u8,
    pub(crate) stride: usize,
    pub(crate) borrowed: PhantomData<&'t [u8]>,
}

impl<'t> Rows<'t> {
    /// Side by side, the first 16.
    #[inline(always)]
    pub(crate) fn of<T>(memory: &'t [T]) -> Self {
        const { assert!(size_of::<T>() == STRIDE) };
        Self {
            first: memory[..ROWS].as_ptr().cast(),
            stride: STRIDE,
            borrowed: PhantomData,
        }
    }

    /// These, if they lie at equal distances: forwards or, with a stride that wraps, backwards.
    #[inline(always)]
    pub(crate) fn spread(rows: &[&'t [u16]; ROWS]) -> Option<Self> {
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
        let rows: $crate::tiles::Rows<'_> = $rows;
        // SAFETY: 16 rows of 64 bytes are borrowed there, the tiles are set up.
        unsafe {
            std::arch::asm!(concat!("tileloadd ", $tile, ", [{} + {} * 1]"), in(reg) rows.first.add($at),
                in(reg) rows.stride, options(nostack, readonly));
        }
    }};
}

/// The contrary, to rows side by side.
macro_rules! store {
    ($tile:literal, $to:expr) => {{
        let to = $crate::tiles::first_of(&mut $to[..$crate::tiles::ROWS]);
        // SAFETY: as above.
        unsafe {
            std::arch::asm!(concat!("tilestored [{} + {} * 1], ", $tile), in(reg) to, in(reg) $crate::tiles::STRIDE, options(nostack));
        }
    }};
}

/// Where rows of a tile are stored.
#[inline(always)]
pub(crate) fn first_of<T>(rows: &mut [T]) -> *mut T {
    const { assert!(size_of::<T>() == STRIDE) };
    rows.as_mut_ptr()
}

macro_rules! zero {
    ($($tile:literal),*) => {
        // SAFETY: the tiles are set up.
        $(unsafe { std::arch::asm!(concat!("tilezero ", $tile), options(nostack, nomem)) };)*
    };
}

/// `sums[m][n] += a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1]` for 16 `k`.
macro_rules! multiply_add {
    ($sums:literal, $a:literal, $b:literal) => {
        // SAFETY: the tiles are set up.
        unsafe {
            std::arch::asm!(
                concat!("tdpbf16ps ", $sums, ", ", $a, ", ", $b),
                options(nostack, nomem)
            )
        }
    };
}

pub(crate) use {load, multiply_add, store, zero};
