//! AMX in plain Rust, for tests on processors without it: the tiles of a thread, and the instructions by their definition
//! (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2). Where an instruction would raise an exception,
//! the model panics.

use std::cell::RefCell;

use crate::tile_shapes::{Config, ROWS, STRIDE, Shape, TILES};

/// The bytes of a tile.
type Bytes = [[u8; STRIDE]; ROWS];

/// Numbers of 32 bits in a row of a tile.
const LANES: usize = STRIDE / 4;

/// The registers of a thread.
struct Registers {
    /// None: the tiles are not set up.
    shapes: Option<[Shape; TILES]>,
    tiles: [Bytes; TILES],
}

thread_local! {
    static REGISTERS: RefCell<Registers> = const {
        RefCell::new(Registers {
            shapes: None,
            tiles: [[[0; STRIDE]; ROWS]; TILES],
        })
    };
}

/// `LDTILECFG`. Panics where it would raise #GP.
pub(crate) fn configure(config: &Config) {
    let tail = config.row_bytes[TILES..].iter().map(|&bytes| bytes as u8);
    let mut reserved = config.reserved.into_iter().chain(tail);
    assert_eq!(config.palette, 1, "#GP: a palette that is not there");
    assert_eq!(config.start_row, 0, "the model starts with the first row");
    assert!(
        reserved.all(|byte| byte == 0) && config.rows[TILES..] == [0; 16 - TILES],
        "#GP: reserved bytes are set"
    );
    let shape = |tile: usize| {
        let (rows, bytes) = (config.rows[tile].into(), config.row_bytes[tile].into());
        assert!(rows <= ROWS, "#GP: tile {tile} has {rows} rows");
        assert!(
            bytes <= STRIDE,
            "#GP: tile {tile} has rows of {bytes} bytes"
        );
        assert_eq!(rows == 0, bytes == 0, "#GP: tile {tile} is half empty");
        Shape { rows, bytes }
    };
    let shapes = std::array::from_fn(shape);
    REGISTERS.with_borrow_mut(|registers| {
        registers.shapes = Some(shapes);
        registers.tiles = [[[0; STRIDE]; ROWS]; TILES];
    });
}

/// `TILERELEASE`.
pub(crate) fn release() {
    REGISTERS.with_borrow_mut(|registers| registers.shapes = None);
}

/// `TILEZERO`.
pub(crate) fn zero(tile: &str) {
    REGISTERS.with_borrow_mut(|registers| {
        let (tile, _) = registers.tile(tile);
        registers.tiles[tile] = [[0; STRIDE]; ROWS];
    });
}

/// `TILELOADD`.
///
/// # Safety
///
/// As many rows of as many bytes as the tile has are there, each `stride` bytes after the last.
pub(crate) unsafe fn load(tile: &str, first: *const u8, stride: usize) {
    REGISTERS.with_borrow_mut(|registers| {
        let (tile, shape) = registers.tile(tile);
        let mut bytes = [[0; STRIDE]; ROWS];
        for (number, row) in bytes[..shape.rows].iter_mut().enumerate() {
            let from = first.wrapping_add(stride.wrapping_mul(number));
            // SAFETY: the caller says so.
            unsafe { from.copy_to_nonoverlapping(row.as_mut_ptr(), shape.bytes) };
        }
        registers.tiles[tile] = bytes;
    });
}

/// `TILESTORED`.
///
/// # Safety
///
/// As [`load`], with exclusive access to the memory.
pub(crate) unsafe fn store(tile: &str, first: *mut u8, stride: usize) {
    REGISTERS.with_borrow(|registers| {
        let (tile, shape) = registers.tile(tile);
        for (number, row) in registers.tiles[tile][..shape.rows].iter().enumerate() {
            let to = first.wrapping_add(stride.wrapping_mul(number));
            // SAFETY: the caller says so.
            unsafe { row.as_ptr().copy_to_nonoverlapping(to, shape.bytes) };
        }
    });
}

/// `TDPBF16PS`.
pub(crate) fn multiply_add(sums: &str, a: &str, b: &str) {
    REGISTERS.with_borrow_mut(|registers| {
        registers.product(sums, a, b, |sums, a, b, num_k| {
            // SAFETY: a machine where the model is used has these instructions, as `tiles::is_there` looked up.
            unsafe { add_row_of_halves(sums, a, b, num_k) };
        });
    });
}

/// `TDPBSSD`.
pub(crate) fn multiply_add_bytes(sums: &str, a: &str, b: &str) {
    REGISTERS.with_borrow_mut(|registers| {
        registers.product(sums, a, b, |sums, a, b, num_k| {
            for (a, b) in a.as_chunks::<4>().0.iter().zip(b).take(num_k) {
                for (sum, b) in sums.iter_mut().zip(b.as_chunks::<4>().0) {
                    let product = |at: usize| i32::from(a[at] as i8) * i32::from(b[at] as i8);
                    let products: i32 = (0..4).map(product).sum();
                    *sum = sum.cast_signed().wrapping_add(products).cast_unsigned();
                }
            }
        });
    });
}

impl Registers {
    /// The number of this tile, and its shape. Panics where an instruction that names it would raise #UD.
    fn tile(&self, name: &str) -> (usize, Shape) {
        let shapes = self.shapes.expect("#UD: the tiles are not set up");
        let number = name.strip_prefix("tmm").and_then(|it| it.parse().ok());
        let number: usize = number.expect("the assembler knows no such tile");
        let shape = shapes[number];
        assert!(shape.rows > 0, "#UD: {name} has no rows");
        assert!(
            shape.bytes.is_multiple_of(4),
            "#UD: {name} has rows of {} bytes",
            shape.bytes
        );
        (number, shape)
    }

    /// Calls `add_row` with each row of the sums, the row of `a`, all of `b`, and the number of its rows. Panics where the
    /// shapes would raise #UD.
    fn product(
        &mut self,
        sums: &str,
        a: &str,
        b: &str,
        add_row: impl Fn(&mut [u32; LANES], &[u8; STRIDE], &Bytes, usize),
    ) {
        let [sums, a, b] = [sums, a, b].map(|name| self.tile(name));
        assert!(
            sums.0 != a.0 && sums.0 != b.0 && a.0 != b.0,
            "#UD: a tile is named twice"
        );
        assert_eq!(sums.1.rows, a.1.rows, "#UD: rows of the sums and of a");
        assert_eq!(sums.1.bytes, b.1.bytes, "#UD: columns of the sums and of b");
        assert_eq!(a.1.bytes, 4 * b.1.rows, "#UD: columns of a and rows of b");
        let (rows, columns) = (sums.1.rows, sums.1.bytes / 4);
        let mut result = [[0; STRIDE]; ROWS];
        for number in 0..rows {
            let old = self.tiles[sums.0][number].as_chunks::<4>().0;
            let mut lanes = std::array::from_fn(|lane| u32::from_le_bytes(old[lane]));
            add_row(
                &mut lanes,
                &self.tiles[a.0][number],
                &self.tiles[b.0],
                b.1.rows,
            );
            let new = result[number].as_chunks_mut::<4>().0;
            for (new, lane) in new.iter_mut().zip(lanes).take(columns) {
                *new = lane.to_le_bytes();
            }
        }
        self.tiles[sums.0] = result;
    }
}

/// A row of `TDPBF16PS`: the products of even and of odd elements are added up apart, each sum from zero in the order of
/// `k`, then to each other, then to the old sum.
#[target_feature(enable = "avx2,fma")]
fn add_row_of_halves(sums: &mut [u32; LANES], a: &[u8; STRIDE], b: &Bytes, num_k: usize) {
    let mut parts = [[0.0; LANES]; 2];
    for (a, b) in a.as_chunks::<4>().0.iter().zip(b).take(num_k) {
        let b = b.as_chunks::<4>().0;
        for (half, part) in parts.iter_mut().enumerate() {
            let a = widened(a, half);
            let factors = std::array::from_fn(|lane| widened(&b[lane], half));
            *part = fused(a, factors, *part);
        }
    }
    for lane in 0..LANES {
        let products = flushed(parts[0][lane] + parts[1][lane]);
        let old = flushed(f32::from_bits(sums[lane]));
        sums[lane] = flushed(old + products).to_bits();
    }
}

/// Two neighbouring elements in four bytes: the first or the second as a float. Denormal numbers are zeros.
#[inline(always)]
fn widened(pair: &[u8; 4], half: usize) -> f32 {
    let bits = u32::from_le_bytes(*pair);
    flushed(f32::from_bits(match half {
        0 => bits << 16,
        _ => bits & 0xffff_0000,
    }))
}

/// Zero, with its sign, for a denormal number.
#[inline(always)]
fn flushed(float: f32) -> f32 {
    let is_denormal = float.abs() < f32::MIN_POSITIVE;
    let zero = f32::from_bits(float.to_bits() & 0x8000_0000);
    if is_denormal { zero } else { float }
}

/// `a * factors + sums`, rounded once to the nearest, ties to even, and flushed where the rounded result is tiny. No factor
/// and no sum is denormal.
#[inline(always)]
fn fused(a: f32, factors: [f32; LANES], sums: [f32; LANES]) -> [f32; LANES] {
    let mut result: [f32; LANES] =
        std::array::from_fn(|lane| flushed(a.mul_add(factors[lane], sums[lane])));
    if result.iter().any(|float| float.abs() == f32::MIN_POSITIVE) {
        for lane in 0..LANES {
            if result[lane].abs() == f32::MIN_POSITIVE {
                result[lane] = smallest(a, factors[lane], sums[lane]);
            }
        }
    }
    result
}

/// The same for a result that rounds to the smallest normal number: with as many digits as normal numbers have, it may be
/// below that.
#[cold]
fn smallest(a: f32, factor: f32, sum: f32) -> f32 {
    const SCALE: f32 = 18_446_744_073_709_551_616.0; // 2^64
    let (a, factor) = match a.abs() < factor.abs() {
        true => (a * SCALE, factor),
        false => (a, factor * SCALE),
    };
    let scaled = a.mul_add(factor, sum * SCALE);
    match scaled.abs() < f32::MIN_POSITIVE * SCALE {
        true => 0.0_f32.copysign(scaled),
        false => f32::MIN_POSITIVE.copysign(scaled),
    }
}

#[cfg(test)]
mod tests {
    use std::arch::asm;

    use super::*;
    use crate::tiles;
    use crate::tiles::{Line, Rows, Tiles};

    /// A tile of 16 rows of 64 bytes with some numbers of 32 bits, by row and column.
    fn tile_of(numbers: &[(usize, usize, u32)]) -> Vec<Line<u32>> {
        let mut lines = vec![Line([0; ROWS]); ROWS];
        for &(row, column, number) in numbers {
            lines[row].0[column] = number;
        }
        lines
    }

    /// Two elements of bfloat16, the first in the lower half.
    fn pair(first: f32, second: f32) -> u32 {
        assert!((first.to_bits() | second.to_bits()) & 0xffff == 0);
        first.to_bits() >> 16 | second.to_bits()
    }

    fn multiplied(old: &[Line<u32>], a: &[Line<u32>], b: &[Line<u32>]) -> Vec<Line<u32>> {
        let mut result = vec![Line([u32::MAX; ROWS]); ROWS];
        tiles::load!("tmm0", Rows::of(old), 0);
        tiles::load!("tmm1", Rows::of(a), 0);
        tiles::load!("tmm2", Rows::of(b), 0);
        tiles::multiply_add!("tmm0", "tmm1", "tmm2");
        tiles::store!("tmm0", result);
        result
    }

    #[test]
    fn amx_adds_even_products_and_odd_ones_apart_and_the_old_sum_last() {
        let _tiles = Tiles::of_shapes(&[Shape::WHOLE; TILES]);
        let large = 2f32.powi(24);
        // In the order of the elements, 1 + 2^24 + 1 - 2^24 would be 0 or 2, by the rounding: 1 is lost each time.
        let a = tile_of(&[(3, 0, pair(1.0, large)), (3, 1, pair(1.0, -large))]);
        let b = tile_of(&[(0, 5, pair(1.0, 1.0)), (1, 5, pair(1.0, 1.0))]);
        let result = multiplied(&tile_of(&[(3, 5, 0.5f32.to_bits())]), &a, &b);
        assert_eq!(f32::from_bits(result[3].0[5]), 2.5);
        assert!(
            result
                .iter()
                .flat_map(|line| line.0)
                .filter(|&it| it != 0)
                .count()
                == 1
        );
        // The products' sum is rounded before it meets the old one: 2^24 + (1 + 1), not (2^24 + 1) + 1.
        let a = tile_of(&[(0, 0, pair(1.0, 1.0))]);
        let b = tile_of(&[(0, 0, pair(1.0, 1.0))]);
        let result = multiplied(&tile_of(&[(0, 0, large.to_bits())]), &a, &b);
        assert_eq!(f32::from_bits(result[0].0[0]), large + 2.0);
        // A product is not rounded before it is added: 257/256 squared has 17 digits.
        let float = 129.0 / 128.0;
        let rounded = float * float;
        let a = tile_of(&[(0, 0, pair(float, 0.0)), (0, 1, pair(1.0, 0.0))]);
        let b = tile_of(&[(0, 0, pair(float, 0.0)), (1, 0, pair(-large, 0.0))]);
        let result = multiplied(&tile_of(&[]), &a, &b);
        let expected = 1.0f32.mul_add(-large, rounded);
        assert_eq!(f32::from_bits(result[0].0[0]), expected);
    }

    #[test]
    fn amx_takes_denormal_numbers_for_zeros_and_makes_none() {
        let _tiles = Tiles::of_shapes(&[Shape::WHOLE; TILES]);
        let tiny = f32::from_bits(0x0001_0000); // a denormal bfloat16
        let a = tile_of(&[(0, 0, pair(tiny, 0.0))]);
        let b = tile_of(&[(0, 0, pair(2f32.powi(100), 0.0))]);
        assert_eq!(multiplied(&tile_of(&[]), &a, &b)[0].0[0], 0);
        // A product below the normal numbers, and one that is the smallest of them.
        let half = 2f32.powi(-64);
        let a = tile_of(&[(0, 0, pair(-half, 0.0)), (1, 0, pair(half * 2.0, 0.0))]);
        let b = tile_of(&[(0, 0, pair(half, 0.0)), (0, 1, pair(half * 2.0, 0.0))]);
        let result = multiplied(&tile_of(&[]), &a, &b);
        assert_eq!(result[0].0[0], 0); // -0 + 0
        assert_eq!(f32::from_bits(result[1].0[1]), f32::MIN_POSITIVE);
        // An old sum that is denormal, and sums that would become so.
        let old = tile_of(&[(0, 0, 1), (1, 0, 0x80_0001)]);
        let a = tile_of(&[(1, 0, pair(-half * 2.0, 0.0))]);
        let b = tile_of(&[(0, 0, pair(half * 2.0, 0.0))]);
        let result = multiplied(&old, &a, &b);
        assert_eq!([result[0].0[0], result[1].0[0]], [0, 0]);
    }

    #[test]
    fn amx_keeps_what_is_not_finite_in_its_row_and_column() {
        let _tiles = Tiles::of_shapes(&[Shape::WHOLE; TILES]);
        let a = tile_of(&[(2, 0, pair(f32::INFINITY, 1.0)), (4, 0, pair(1.0, 1.0))]);
        let b = tile_of(&[(0, 1, pair(2.0, 1.0)), (0, 3, pair(1.0, -1.0))]);
        let result = multiplied(&tile_of(&[]), &a, &b);
        let float = |row: usize, column: usize| f32::from_bits(result[row].0[column]);
        assert_eq!([float(2, 1), float(2, 3)], [f32::INFINITY; 2]);
        assert!(float(2, 0).is_nan()); // infinity times 0
        assert_eq!([float(4, 1), float(4, 3), float(4, 0)], [3.0, 0.0, 0.0]);
    }

    #[test]
    fn amx_multiplies_bytes_with_their_signs() {
        let _tiles = Tiles::of_shapes(&[Shape::WHOLE; TILES]);
        let bytes = |bytes: [i8; 4]| u32::from_le_bytes(bytes.map(|byte| byte as u8));
        let old = tile_of(&[(7, 9, 100), (8, 9, i32::MAX as u32)]);
        let a = tile_of(&[
            (7, 0, bytes([-128, 127, -1, 2])),
            (7, 15, bytes([1, 2, 3, 4])),
            (8, 0, bytes([1, 0, 0, 0])),
        ]);
        let b = tile_of(&[
            (0, 9, bytes([-128, -128, 5, 127])),
            (15, 9, bytes([-1, -2, -3, -4])),
        ]);
        let mut result = vec![Line([0u32; ROWS]); ROWS];
        tiles::load!("tmm3", Rows::of(&old), 0);
        tiles::load!("tmm4", Rows::of(&a), 0);
        tiles::load!("tmm5", Rows::of(&b), 0);
        tiles::multiply_add_bytes!("tmm3", "tmm4", "tmm5");
        tiles::store!("tmm3", result);
        let expected = 100 + 128 * 128 - 127 * 128 - 5 + 254 - 1 - 4 - 9 - 16;
        assert_eq!(result[7].0[9].cast_signed(), expected);
        assert_eq!(result[8].0[9].cast_signed(), i32::MAX - 128);
    }

    #[test]
    fn amx_reads_and_writes_as_many_rows_and_bytes_as_a_tile_has() {
        let mut shapes = [Shape { rows: 3, bytes: 64 }; TILES];
        shapes[1] = Shape { rows: 3, bytes: 8 };
        shapes[2] = Shape { rows: 2, bytes: 64 };
        let _tiles = Tiles::of_shapes(&shapes);
        // Rows 12 bytes apart: the third element of each is never read.
        let nan = pair(f32::NAN, f32::NAN);
        let one = pair(1.0, 0.0);
        let rows = [one, one, nan, one, one, nan, one, one, nan];
        let b = tile_of(&[(0, 4, one), (1, 4, one), (2, 4, nan)]);
        let mut result = vec![Line([7u32; ROWS]); ROWS];
        tiles::zero!("tmm0");
        tiles::load!("tmm1", Rows::every(&rows, 12), 0);
        tiles::load!("tmm2", Rows::of(&b), 0);
        tiles::multiply_add!("tmm0", "tmm1", "tmm2");
        tiles::store!("tmm0", result);
        for (number, line) in result.iter().enumerate() {
            let expected = if number < 3 { 2f32.to_bits() } else { 7 };
            assert_eq!(line.0[4], expected, "row {number}");
        }
        assert_eq!([result[0].0[3], result[3].0[3]], [0, 7]);
    }

    #[test]
    fn amx_is_refused_where_the_processor_raises_an_exception() {
        let refused = |work: fn()| {
            let result = std::panic::catch_unwind(work).expect_err("it is refused");
            result.downcast_ref::<String>().cloned().unwrap_or_else(|| {
                let text = result.downcast_ref::<&str>();
                (*text.expect("a panic has a text")).to_owned()
            })
        };
        let shaped = |tile: usize, rows: usize, bytes: usize| {
            let mut shapes = [Shape::WHOLE; TILES];
            shapes[tile] = Shape { rows, bytes };
            Config::of(&shapes)
        };
        assert!(refused(|| zero("tmm0")).contains("not set up"));
        for (tile, rows, bytes) in [(0, 17, 64), (7, 16, 65), (3, 0, 64), (3, 16, 0)] {
            let result = std::panic::catch_unwind(|| configure(&shaped(tile, rows, bytes)));
            assert!(result.is_err(), "{rows} rows of {bytes} bytes");
        }
        let reserved = Config {
            reserved: [1; 14],
            ..Config::of(&[Shape::WHOLE; TILES])
        };
        assert!(std::panic::catch_unwind(|| configure(&reserved)).is_err());
        configure(&Config::of(&[Shape::WHOLE; TILES]));
        assert!(refused(|| multiply_add("tmm1", "tmm1", "tmm2")).contains("twice"));
        configure(&shaped(1, 4, 64));
        assert!(refused(|| multiply_add("tmm0", "tmm1", "tmm2")).contains("rows of the sums"));
        configure(&shaped(1, 16, 32));
        assert!(refused(|| multiply_add_bytes("tmm0", "tmm1", "tmm2")).contains("rows of b"));
        configure(&shaped(2, 16, 32));
        assert!(refused(|| multiply_add("tmm0", "tmm1", "tmm2")).contains("columns of the sums"));
        configure(&shaped(5, 16, 30));
        assert!(refused(|| zero("tmm5")).contains("30 bytes"));
        configure(&shaped(5, 0, 0));
        assert!(refused(|| zero("tmm5")).contains("no rows"));
        release();
    }

    /// The product of bfloat16 and that of bytes by the processor's own tiles, which it has.
    fn by_its_tiles(old: &[Line<u32>], a: &[Line<u32>], b: &[Line<u32>]) -> [Vec<Line<u32>>; 2] {
        let config = Config::of(&[Shape::WHOLE; TILES]);
        let mut result = [(); 2].map(|()| vec![Line([0u32; ROWS]); ROWS]);
        let [halves, bytes] = result.each_mut().map(|lines| lines.as_mut_ptr());
        // SAFETY: each address has 16 rows of 64 bytes, and no state is left behind.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tileloadd tmm0, [{old} + {stride} * 1]",
                "tileloadd tmm1, [{a} + {stride} * 1]",
                "tileloadd tmm2, [{b} + {stride} * 1]",
                "tileloadd tmm3, [{old} + {stride} * 1]",
                "tdpbf16ps tmm0, tmm1, tmm2",
                "tdpbssd tmm3, tmm1, tmm2",
                "tilestored [{halves} + {stride} * 1], tmm0",
                "tilestored [{bytes} + {stride} * 1], tmm3",
                "tilerelease",
                config = in(reg) &raw const config,
                old = in(reg) old[..ROWS].as_ptr(),
                a = in(reg) a[..ROWS].as_ptr(),
                b = in(reg) b[..ROWS].as_ptr(),
                halves = in(reg) halves,
                bytes = in(reg) bytes,
                stride = in(reg) STRIDE,
                options(nostack),
            );
        }
        result
    }

    #[test]
    fn amx_has_the_bits_of_the_processors_tiles() {
        if !tiles::processor_has_them() {
            return; // nothing to compare with
        }
        let mut state = 7u64;
        let mut bits = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 32) as u32
        };
        // Numbers near 1, near the smallest normal one, and denormal ones among others.
        for (round, exponents) in (0..300).zip([0x3f80, 0x2000, 0x1f80].into_iter().cycle()) {
            let mut half = || match bits() % 8 {
                0 if round % 2 == 0 => bits() & 0x807f,
                _ => bits() & 0x81ff ^ exponents,
            };
            let mut lines = || -> Vec<Line<u32>> {
                let mut line = || Line(std::array::from_fn(|_| half() | half() << 16));
                (0..ROWS).map(|_| line()).collect()
            };
            let (old, a, b) = (lines(), lines(), lines());
            let [halves, bytes] = by_its_tiles(&old, &a, &b);
            let _tiles = Tiles::of_shapes(&[Shape::WHOLE; TILES]);
            let result = multiplied(&old, &a, &b);
            let mut integers = vec![Line([0u32; ROWS]); ROWS];
            tiles::load!("tmm3", Rows::of(&old), 0);
            tiles::load!("tmm4", Rows::of(&a), 0);
            tiles::load!("tmm5", Rows::of(&b), 0);
            tiles::multiply_add_bytes!("tmm3", "tmm4", "tmm5");
            tiles::store!("tmm3", integers);
            for row in 0..ROWS {
                assert_eq!(result[row].0, halves[row].0, "round {round}, row {row}");
                assert_eq!(integers[row].0, bytes[row].0, "round {round}, row {row}");
            }
        }
    }

    /// The processor's own multiply-add with the flags by which it takes denormal numbers for zeros and makes none.
    fn by_the_processor(a: f32, factor: f32, sum: f32) -> f32 {
        const FLUSHED: u32 = 0x1f80 | 1 << 15 | 1 << 6;
        let (mut old, mut result, flags) = (0u32, sum, FLUSHED);
        // SAFETY: the machine has the instruction, and the flags are as before afterwards.
        unsafe {
            asm!(
                "stmxcsr [{old}]",
                "ldmxcsr [{flags}]",
                "vfmadd231ss {sum}, {a}, {factor}",
                "ldmxcsr [{old}]",
                old = in(reg) &raw mut old,
                flags = in(reg) &raw const flags,
                sum = inout(xmm_reg) result,
                a = in(xmm_reg) a,
                factor = in(xmm_reg) factor,
                options(nostack),
            );
        }
        result
    }

    #[test]
    fn amx_multiplies_and_adds_as_the_processor_does_without_denormal_numbers() {
        let mut state = 1u64;
        let mut bits = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 32) as u32
        };
        let (mut flushed_ones, mut smallest_ones) = (0, 0);
        for round in 0..200_000 {
            // Products around the smallest normal number, and sums that they nearly cancel.
            let a = f32::from_bits(bits() & 0x80ff_0000 | 0x2000_0000);
            let factor = f32::from_bits(bits() & 0x80ff_0000 | 0x1f00_0000);
            let sum = match round % 3 {
                0 => 0.0,
                1 => flushed(f32::from_bits(bits() & 0x81ff_ffff)),
                _ => {
                    let near = f32::MIN_POSITIVE - a * factor;
                    flushed(f32::from_bits(
                        near.to_bits().wrapping_add(bits() % 5).wrapping_sub(2),
                    ))
                }
            };
            let result = fused(a, [factor; LANES], [sum; LANES])[0];
            let expected = by_the_processor(a, factor, sum);
            flushed_ones += u32::from(expected == 0.0);
            smallest_ones += u32::from(expected.abs() == f32::MIN_POSITIVE);
            assert_eq!(
                result.to_bits(),
                expected.to_bits(),
                "{a:e} * {factor:e} + {sum:e}"
            );
        }
        assert!(
            flushed_ones > 1000 && smallest_ones > 20,
            "{flushed_ones}, {smallest_ones}"
        );
        // Rounded as denormal numbers, both of the first two are the smallest normal one; with all digits the first is
        // below.
        for (power, expected) in [(-75, 0.0), (-76, f32::MIN_POSITIVE), (-74, 0.0)] {
            let (a, factor) = (-2f32.powi(power), 2f32.powi(-75));
            let result = fused(a, [factor; LANES], [f32::MIN_POSITIVE; LANES])[0];
            assert_eq!(result, expected, "2^{power}");
            assert_eq!(result, by_the_processor(a, factor, f32::MIN_POSITIVE));
        }
    }
}
