//! Linear layers by AMX against the definition of its instructions, bit by bit: on a processor with AMX, and elsewhere on
//! the model of it (`cargo test --features modelled-tiles`).

use crate::levels::{HALVES, Tests};
use cpu_kernels::{Activation, Attention, Element, Isa, PackedWeight};

/// Inputs that a tile multiplies at once.
const TOGETHER: usize = 32;

/// Inputs and outputs: within a tile and beyond it, odd numbers, and more inputs than are multiplied in one pass.
const SHAPES: [(usize, usize); 8] = [
    (1, 1),
    (32, 16),
    (33, 17),
    (64, 48),
    (96, 80),
    (530, 145),
    (1031, 33),
    (2080, 70),
];

/// Rows: one tile and two, whole and not, and groups of them.
const COUNTS: [usize; 12] = [1, 2, 5, 15, 16, 17, 31, 32, 33, 63, 64, 101];

/// Numbers from -1 to 1 that look random.
fn halves(count: usize, seed: usize) -> Vec<u16> {
    let float = |at: usize| ((at + seed) * 7919 % 4001) as f32 / 2000.0 - 1.0;
    (0..count).map(|at| u16::narrow(float(at))).collect()
}

fn attention(isa: Isa, threads: usize) -> Attention {
    Attention::with_isa(threads, isa).expect("there are threads")
}

/// By the definition of `TDPBF16PS` for 32 inputs at a time, from zero.
fn product(row: &[u16], weight: &[u16]) -> f32 {
    let mut sum = 0.0;
    for (row, weight) in row.chunks(TOGETHER).zip(weight.chunks(TOGETHER)) {
        let mut parts = [0.0f32; 2];
        for (at, (a, b)) in row.iter().zip(weight).enumerate() {
            parts[at % 2] = a.widen().mul_add(b.widen(), parts[at % 2]);
        }
        sum += parts[0] + parts[1];
    }
    sum
}

fn linear(attention: &Attention, rows: &[u16], weight: &PackedWeight, bias: &[u16]) -> Vec<u16> {
    let count = rows.len() / weight.in_features();
    let mut out = vec![u16::MAX; count * weight.out_features()];
    attention
        .linear(rows, weight, Some(bias), &mut out)
        .expect("it fits");
    out
}

fn products_have_the_bits_of_the_definition(isa: Isa) {
    let [one, three] = [1, 3].map(|threads| attention(isa, threads));
    for (in_features, out_features) in SHAPES {
        let weight = halves(in_features * out_features, 5);
        let bias = halves(out_features, 6);
        let packed = PackedWeight::pack(&weight, in_features, out_features).expect("it fits");
        let rows = halves(COUNTS[COUNTS.len() - 1] * in_features, 7);
        let expected: Vec<u16> = rows
            .chunks(in_features)
            .flat_map(|row| {
                let outputs = weight.chunks(in_features).zip(&bias);
                outputs.map(|(weight, bias)| u16::narrow(bias.widen() + product(row, weight)))
            })
            .collect();
        for count in COUNTS {
            let rows = &rows[..count * in_features];
            let expected = &expected[..count * out_features];
            for attention in [&one, &three] {
                assert!(
                    linear(attention, rows, &packed, &bias) == expected,
                    "{count} rows of {in_features}x{out_features}"
                );
            }
        }
    }
}

fn gates_have_the_bits_of_their_products(isa: Isa) {
    let attention = attention(isa, 2);
    for (in_features, out_features) in [(33, 17), (530, 145)] {
        let [gate, up] = [1, 2].map(|seed| halves(in_features * out_features, seed));
        let [gate_packed, up_packed] = [&gate, &up]
            .map(|weight| PackedWeight::pack(weight, in_features, out_features).expect("it fits"));
        for count in [1, 16, 40] {
            let rows = halves(count * in_features, 3);
            let mut actual = vec![u16::MAX; count * out_features];
            attention
                .gated_linear(
                    &rows,
                    &gate_packed,
                    Activation::Relu,
                    &up_packed,
                    &mut actual,
                )
                .expect("it fits");
            let expected = rows.chunks(in_features).flat_map(|row| {
                let outputs = gate.chunks(in_features).zip(up.chunks(in_features));
                outputs.map(|(gate, up)| {
                    let gate = product(row, gate);
                    u16::narrow(product(row, up) * if gate < 0.0 { 0.0 } else { gate })
                })
            });
            assert!(actual.into_iter().eq(expected), "{count} rows");
        }
    }
}

/// Also where a row ends within a pair of inputs, and its neighbour lies in the same tile.
fn what_is_not_finite_stays_in_its_row(isa: Isa) {
    let attention = attention(isa, 1);
    for in_features in [1, 21, 33, 64] {
        let weight = halves(in_features * 20, 5);
        let packed = PackedWeight::pack(&weight, in_features, 20).expect("it fits");
        let bias = [0; 20];
        for count in [2, 17, 40] {
            let clean = halves(count * in_features, 9);
            let expected = linear(&attention, &clean, &packed, &bias);
            for spoilt in [0, 1, count - 1] {
                let mut rows = clean.clone();
                rows[spoilt * in_features..][..in_features].fill(u16::narrow(f32::NAN));
                let actual = linear(&attention, &rows, &packed, &bias);
                for (row, (actual, expected)) in
                    actual.chunks(20).zip(expected.chunks(20)).enumerate()
                {
                    match row == spoilt {
                        true => assert!(actual.iter().all(|half| half.widen().is_nan())),
                        false => assert_eq!(actual, expected, "row {row} beside {spoilt}"),
                    }
                }
            }
        }
    }
}

fn denormal_numbers_are_zeros(isa: Isa) {
    let attention = attention(isa, 1);
    let weight = vec![u16::narrow(2f32.powi(100)); 64 * 16];
    let packed = PackedWeight::pack(&weight, 64, 16).expect("it fits");
    let rows = [[0x007f; 64], [0x0080; 64]].concat(); // the largest denormal number, the smallest normal one
    let actual = linear(&attention, &rows, &packed, &[0; 16]);
    assert_eq!(actual[..16], [0; 16]);
    assert_eq!(actual[16..], [u16::narrow(2f32.powi(100 - 126 + 6)); 16]);
}

/// Memory of whole pages, behind which is none that can be read.
#[cfg(target_os = "linux")]
struct Guarded {
    pages: *mut libc::c_void,
    size: usize,
}

#[cfg(target_os = "linux")]
impl Guarded {
    const PAGE: usize = 4096;

    /// With these numbers at the end.
    fn of(numbers: &[u16]) -> Self {
        let size = size_of_val(numbers).next_multiple_of(Self::PAGE);
        // SAFETY: new pages, of which the last one is protected; the numbers fit those before it.
        unsafe {
            let (access, kind) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            let pages = libc::mmap(std::ptr::null_mut(), size + Self::PAGE, access, kind, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            let last = pages.byte_add(size);
            assert_eq!(libc::mprotect(last, Self::PAGE, libc::PROT_NONE), 0);
            let first: *mut u16 = last.byte_sub(size_of_val(numbers)).cast();
            first.copy_from_nonoverlapping(numbers.as_ptr(), numbers.len());
            Self { pages, size }
        }
    }

    fn numbers(&self, count: usize) -> &[u16] {
        // SAFETY: `of` has written them.
        unsafe {
            let last: *const u16 = self.pages.byte_add(self.size).cast();
            std::slice::from_raw_parts(last.sub(count), count)
        }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: they are ours.
        unsafe { libc::munmap(self.pages, self.size + Self::PAGE) };
    }
}

#[cfg(target_os = "linux")]
fn rows_are_not_read_beyond_their_end(isa: Isa) {
    let attention = attention(isa, 1);
    for in_features in [1, 31, 32, 33, 64, 1056] {
        let packed = PackedWeight::pack(&halves(in_features * 20, 5), in_features, 20);
        let packed = packed.expect("it fits");
        for count in [1, 7, 16, 17, 32, 33, 70] {
            let rows = halves(count * in_features, 2);
            let guarded = Guarded::of(&rows);
            let actual = linear(&attention, guarded.numbers(rows.len()), &packed, &[0; 20]);
            assert_eq!(actual, linear(&attention, &rows, &packed, &[0; 20]));
        }
    }
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &[Isa::Amx],
        products_have_the_bits_of_the_definition,
        gates_have_the_bits_of_their_products
    );
    at!(tests, &HALVES, what_is_not_finite_stays_in_its_row);
    at!(tests, &[Isa::Amx], denormal_numbers_are_zeros);
    #[cfg(target_os = "linux")]
    at!(tests, &HALVES, rows_are_not_read_beyond_their_end);
}
