//! Tiles of AMX, Intel's matrix instructions: their type, and the instructions as macros.
//!
//! With the feature `modelled-tiles`, the macros call [`crate::amx_model`] in place of the instructions.

#[cfg(not(feature = "modelled-tiles"))]
use std::arch::asm;
#[cfg(any(not(feature = "modelled-tiles"), test))]
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;
#[cfg(not(feature = "modelled-tiles"))]
use std::sync::OnceLock;

#[cfg(feature = "modelled-tiles")]
use crate::amx_model;
use crate::tile_shapes::Config;
pub(crate) use crate::tile_shapes::{ROWS, STRIDE, Shape, TILES};

/// Elements of a row of a tile.
pub(crate) const WIDTH: usize = 32;

/// Whether the processor has AMX for bfloat16 and for bytes, and the system lets us use it.
#[cfg(not(feature = "modelled-tiles"))]
pub(crate) fn is_there() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(processor_has_them)
}

#[cfg(any(not(feature = "modelled-tiles"), test))]
pub(crate) fn processor_has_them() -> bool {
    const BF16_TILES_AND_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    let has =
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_TILES_AND_INT8 == BF16_TILES_AND_INT8;
    has && is_x86_feature_detected!("avx512bf16") && is_allowed()
}

/// Whether the kernels around the model run here.
#[cfg(feature = "modelled-tiles")]
pub(crate) fn is_there() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// Linux keeps the tiles' state for a process only if that asks for it.
#[cfg(all(target_os = "linux", any(not(feature = "modelled-tiles"), test)))]
fn is_allowed() -> bool {
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XTILEDATA: usize = 18;
    // SAFETY: this call takes two numbers and no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(all(not(target_os = "linux"), any(not(feature = "modelled-tiles"), test)))]
fn is_allowed() -> bool {
    false
}

/// Eight tiles, until it is dropped.
pub(crate) struct Tiles;

impl Tiles {
    /// Sets them up with these shapes: 1 to 16 rows of 4 to 64 bytes.
    pub(crate) fn of_shapes(shapes: &[Shape; TILES]) -> Self {
        let config = Config::of(shapes);
        #[cfg(feature = "modelled-tiles")]
        amx_model::configure(&config);
        // SAFETY: the machine has AMX, as is asked first, and the configuration is valid.
        #[cfg(not(feature = "modelled-tiles"))]
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly));
        }
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(feature = "modelled-tiles")]
        amx_model::release();
        // SAFETY: as above.
        #[cfg(not(feature = "modelled-tiles"))]
        unsafe {
            asm!("tilerelease", options(nostack, nomem));
        }
    }
}

/// A line of the processor's cache: a row of a tile that began in the middle of one would take two.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Line<T>(pub(crate) [T; ROWS]);

/// Rows in borrowed memory, each `stride` bytes after the last.
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

    /// Rows of `memory`, each `stride` bytes after the last. A tile is no larger than they are.
    #[inline(always)]
    pub(crate) fn every<T>(memory: &'t [T], stride: usize) -> Self {
        Self {
            first: memory.as_ptr().cast(),
            stride,
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

/// Where rows of a tile are stored.
#[inline(always)]
pub(crate) fn first_of<T>(rows: &mut [T]) -> *mut T {
    const { assert!(size_of::<T>() == STRIDE) };
    rows.as_mut_ptr()
}

/// `tile = rows`, from byte `at` of each on.
#[cfg(not(feature = "modelled-tiles"))]
macro_rules! load {
    ($tile:literal, $rows:expr, $at:expr) => {{
        let rows: $crate::tiles::Rows<'_> = $rows;
        // SAFETY: as many rows of as many bytes as the tile has are borrowed there, the tiles are set up.
        unsafe {
            std::arch::asm!(concat!("tileloadd ", $tile, ", [{} + {} * 1]"), in(reg) rows.first.add($at),
                in(reg) rows.stride, options(nostack, readonly));
        }
    }};
}

/// The contrary, to rows side by side.
#[cfg(not(feature = "modelled-tiles"))]
macro_rules! store {
    ($tile:literal, $to:expr) => {{
        let to = $crate::tiles::first_of(&mut $to[..$crate::tiles::ROWS]);
        // SAFETY: as above.
        unsafe {
            std::arch::asm!(concat!("tilestored [{} + {} * 1], ", $tile), in(reg) to, in(reg) $crate::tiles::STRIDE, options(nostack));
        }
    }};
}

#[cfg(not(feature = "modelled-tiles"))]
macro_rules! zero {
    ($($tile:literal),*) => {
        // SAFETY: the tiles are set up.
        $(unsafe { std::arch::asm!(concat!("tilezero ", $tile), options(nostack, nomem)) };)*
    };
}

/// `sums[m][n] += a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1]` for 16 `k`.
#[cfg(not(feature = "modelled-tiles"))]
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

/// The same with four bytes for two elements: both signed, and sums of 32 bits.
#[cfg(not(feature = "modelled-tiles"))]
macro_rules! multiply_add_bytes {
    ($sums:literal, $a:literal, $b:literal) => {
        // SAFETY: the tiles are set up.
        unsafe {
            std::arch::asm!(
                concat!("tdpbssd ", $sums, ", ", $a, ", ", $b),
                options(nostack, nomem)
            )
        }
    };
}

#[cfg(feature = "modelled-tiles")]
macro_rules! load {
    ($tile:literal, $rows:expr, $at:expr) => {{
        let rows: $crate::tiles::Rows<'_> = $rows;
        // SAFETY: as many rows of as many bytes as the tile has are borrowed there.
        unsafe { $crate::amx_model::load($tile, rows.first.add($at), rows.stride) }
    }};
}

#[cfg(feature = "modelled-tiles")]
macro_rules! store {
    ($tile:literal, $to:expr) => {{
        let to = $crate::tiles::first_of(&mut $to[..$crate::tiles::ROWS]);
        // SAFETY: as above.
        unsafe { $crate::amx_model::store($tile, to.cast(), $crate::tiles::STRIDE) }
    }};
}

#[cfg(feature = "modelled-tiles")]
macro_rules! zero {
    ($($tile:literal),*) => {
        $($crate::amx_model::zero($tile);)*
    };
}

#[cfg(feature = "modelled-tiles")]
macro_rules! multiply_add {
    ($sums:literal, $a:literal, $b:literal) => {
        $crate::amx_model::multiply_add($sums, $a, $b)
    };
}

#[cfg(feature = "modelled-tiles")]
macro_rules! multiply_add_bytes {
    ($sums:literal, $a:literal, $b:literal) => {
        $crate::amx_model::multiply_add_bytes($sums, $a, $b)
    };
}

pub(crate) use {load, multiply_add, multiply_add_bytes, store, zero};
