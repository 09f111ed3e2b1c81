//! Linear layers on floats of 8 bits against f64, and the same bits at all levels, in every batch and by any number of
//! threads.

use crate::levels::{Tests, all};
use cpu_kernels::{Activation, Attention, Element, Error, Isa, PackedWeight};

/// Sizes of a weight and of its blocks: of all inputs, and with a shorter last one.
const SHAPES: [(usize, usize, usize); 6] = [
    (4, 1, 4),
    (8, 17, 8),
    (40, 48, 16),
    (256, 70, 128),
    (532, 145, 128),
    (1032, 33, 1032),
];

fn floats(count: usize, seed: usize) -> Vec<f32> {
    let float = |at: usize| ((at + seed) * 7919 % 4001) as f32 / 2000.0 - 1.0;
    (0..count).map(float).collect()
}

/// E4M3's value by its definition.
fn value(byte: u8) -> f64 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-9),
        _ => (8.0 + fraction) * 2f64.powi(exponent - 10),
    };
    if byte >> 7 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

fn attention(isa: Isa, threads: usize) -> Attention {
    Attention::with_isa(threads, isa).expect("there are threads")
}

struct Layer {
    in_features: usize,
    out_features: usize,
    weight: Vec<f64>,
    packed: PackedWeight,
    bias: Vec<f32>,
}

impl Layer {
    /// Of all finite numbers of 8 bits.
    fn new((in_features, out_features, block): (usize, usize, usize), seed: usize) -> Self {
        let byte = |at: usize| match ((at * 31 + seed) * 7919 % 65_521) as u8 {
            nan if nan & 0x7f == 0x7f => 0,
            byte => byte,
        };
        let bytes: Vec<u8> = (0..in_features * out_features).map(byte).collect();
        let num_blocks = in_features.div_ceil(block);
        let scales = floats(num_blocks * out_features, seed);
        let weight = |at: usize| {
            let (output, input) = (at / in_features, at % in_features);
            value(bytes[at]) * f64::from(scales[output * num_blocks + input / block])
        };
        Self {
            in_features,
            out_features,
            weight: (0..bytes.len()).map(weight).collect(),
            packed: PackedWeight::pack_float8(&bytes, &scales, block, in_features, out_features)
                .expect("it fits"),
            bias: floats(out_features, seed + 1),
        }
    }

    fn multiply(&self, attention: &Attention, rows: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows.len() / self.in_features * self.out_features];
        attention
            .linear(rows, &self.packed, Some(&self.bias), &mut out)
            .expect("it fits");
        out
    }
}

fn bits(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|float| float.to_bits()).collect()
}

fn products_are_near_the_exact_ones(isa: Isa) {
    let attention = attention(isa, 1);
    for shape in SHAPES {
        let layer = Layer::new(shape, 5);
        let size = layer.in_features;
        for count in [1, 2, 5, 6, 7, 13, 40] {
            let rows = floats(count * size, 3);
            let actual = layer.multiply(&attention, &rows);
            let halves: Vec<u16> = rows.iter().map(|&float| u16::narrow(float)).collect();
            let bias: Vec<u16> = layer.bias.iter().map(|&float| u16::narrow(float)).collect();
            let mut actual_halves = vec![u16::MAX; actual.len()];
            attention
                .linear(&halves, &layer.packed, Some(&bias), &mut actual_halves)
                .expect("it fits");
            for at in 0..actual.len() {
                let (row, output) = (at / layer.out_features, at % layer.out_features);
                let weight = &layer.weight[output * size..][..size];
                let terms = rows[row * size..][..size].iter().zip(weight);
                let terms: Vec<f64> = terms.map(|(&x, w)| f64::from(x) * w).collect();
                let exact = f64::from(layer.bias[output]) + terms.iter().sum::<f64>();
                let largest: f64 = 1.0 + terms.iter().map(|term| term.abs()).sum::<f64>();
                let error = (f64::from(actual[at]) - exact).abs();
                let bound = largest * f64::from(f32::EPSILON) * (size as f64).sqrt();
                assert!(error <= bound, "{count} rows of {shape:?}: {error:e}");
                let error = (f64::from(actual_halves[at].widen()) - exact).abs();
                assert!(
                    error <= largest / 64.0,
                    "{count} rows of {shape:?}: {error:e}"
                );
            }
        }
    }
}

fn a_row_has_the_same_bits_everywhere(isa: Isa) {
    let [attention, three, plain] =
        [(isa, 1), (isa, 3), (Isa::Portable, 1)].map(|(isa, threads)| attention(isa, threads));
    for shape in SHAPES {
        let (layer, gate) = (Layer::new(shape, 11), Layer::new(shape, 4));
        let (size, width) = (layer.in_features, layer.out_features);
        let both = |attention: &Attention, rows: &[f32]| {
            let mut gated = vec![f32::NAN; rows.len() / size * width];
            attention
                .gated_linear(
                    rows,
                    &gate.packed,
                    Activation::Silu,
                    &layer.packed,
                    &mut gated,
                )
                .expect("it fits");
            (bits(&layer.multiply(attention, rows)), bits(&gated))
        };
        let rows = floats(40 * size, 7);
        let alone: Vec<_> = rows.chunks(size).map(|row| both(&plain, row)).collect();
        for count in [1, 2, 3, 6, 7, 8, 19, 40] {
            for first in [0, 40 - count] {
                let batch = &rows[first * size..][..count * size];
                for attention in [&attention, &three] {
                    let (actual, gated) = both(attention, batch);
                    for (number, row) in alone[first..][..count].iter().enumerate() {
                        let own = number * width..(number + 1) * width;
                        assert!(actual[own.clone()] == row.0, "{count} rows of {shape:?}");
                        assert!(gated[own] == row.1, "{count} gated rows of {shape:?}");
                    }
                }
            }
        }
    }
}

fn rows_of_the_weight_come_back() {
    for shape in SHAPES {
        let layer = Layer::new(shape, 4);
        let outputs: Vec<i64> = (0..layer.out_features as i64).rev().collect();
        let mut out = vec![f32::NAN; layer.weight.len()];
        layer.packed.gather(&outputs, &mut out).expect("it fits");
        let rows = out.chunks(layer.in_features).rev().flatten();
        for (&actual, &expected) in rows.zip(&layer.weight) {
            assert_eq!(actual, expected as f32);
        }
    }
}

fn what_does_not_fit_is_refused() {
    let pack = |bytes: &[u8], scales: &[f32], block, (inputs, outputs)| {
        PackedWeight::pack_float8(bytes, scales, block, inputs, outputs)
            .expect_err("it does not fit")
    };
    let (bytes, scales) = ([0x38; 24], [1.0; 6]);
    for (bytes, scales, block, shape) in [
        (&bytes[..], &scales[..], 4, (0, 3)),
        (&bytes, &scales, 4, (8, 0)),
        (&bytes, &scales, 0, (8, 3)),
        (&bytes, &scales, 6, (8, 3)),
        (&bytes[..18], &scales, 4, (6, 3)),
        (&bytes, &scales, 8, (8, 3)),
        (&bytes[1..], &scales, 4, (8, 3)),
        (&bytes, &scales, 4, (8, usize::MAX)),
    ] {
        pack(bytes, scales, block, shape);
    }
    for nan in [0x7f, 0xff] {
        let mut bytes = bytes;
        bytes[13] = nan;
        let expected = Error::Weight {
            output: 1,
            input: 5,
        };
        assert_eq!(pack(&bytes, &scales, 4, (8, 3)), expected);
    }
    for infinite in [f32::NAN, f32::INFINITY] {
        let mut scales = scales;
        scales[3] = infinite;
        let expected = Error::Scale {
            output: 1,
            input: 4,
        };
        assert_eq!(pack(&bytes, &scales, 4, (8, 3)), expected);
    }
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &all(),
        products_are_near_the_exact_ones,
        a_row_has_the_same_bits_everywhere
    );
    once!(
        tests,
        rows_of_the_weight_come_back,
        what_does_not_fit_is_refused
    );
}
