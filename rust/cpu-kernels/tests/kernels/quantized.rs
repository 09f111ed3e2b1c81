//! Linear layers on quantised weights against ggml's definition of the formats in f64, and the same bits at all levels,
//! in every batch and by any number of threads.

use crate::levels::Tests;
use cpu_kernels::{Activation, Attention, Error, Isa, QuantizedFormat, QuantizedWeight};

use QuantizedFormat as F;

/// Levels whose results have the same bits: all of them, as there are no products of bfloat16.
const LEVELS: [Isa; 6] = Isa::ALL;

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as u32
    }

    /// From -1 to 1.
    fn float(&mut self) -> f32 {
        self.bits() as f32 / 2f32.powi(30) - 1.0
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// Blocks of any bits, but for half-precision floats, which are from -0.06 to 0.06.
    fn blocks(&mut self, format: F, count: usize) -> Vec<u8> {
        let mut data: Vec<u8> = (0..count * format.block_bytes())
            .map(|_| self.bits() as u8)
            .collect();
        for block in data.chunks_mut(format.block_bytes()) {
            for &at in halves_of(format) {
                block[at + 1] = block[at + 1] & 0x83 | ((self.bits() % 11) << 2) as u8;
            }
            if format == F::Mxfp4 {
                block[0] = 118 + (self.bits() % 8) as u8;
            }
        }
        data
    }
}

/// Where a block has half-precision floats.
fn halves_of(format: F) -> &'static [usize] {
    match format {
        F::Q4_0 | F::Q5_0 | F::Q8_0 => &[0],
        F::Q4_1 | F::Q5_1 | F::Q4K | F::Q5K => &[0, 2],
        F::Q6K => &[208],
        F::Mxfp4 => &[],
    }
}

/// A half-precision float's value by its definition.
fn half(bytes: &[u8]) -> f64 {
    let bits = i32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
    let (exponent, fraction) = (bits >> 10 & 31, f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

/// The weights of a block as `ggml-quants.c` defines them, by one formula for each.
fn dequantized(format: F, block: &[u8]) -> Vec<f64> {
    let nibble = |qs: &[u8], at: usize| f64::from(qs[at % 16] >> (at / 16 * 4) & 15);
    let fifth = |qh: &[u8], at: usize| f64::from(qh[at / 8] >> (at % 8) & 1) * 16.0;
    let pair = |at: usize| {
        let q = &block[4..16];
        match at {
            0..4 => (q[at] & 63, q[at + 4] & 63),
            _ => (
                (q[at + 4] & 0xf) | ((q[at - 4] >> 6) << 4),
                (q[at + 4] >> 4) | ((q[at] >> 6) << 4),
            ),
        }
    };
    let fourth = |code: u8| {
        let (exponent, fraction) = (i32::from(code >> 1 & 3), f64::from(code & 1) / 2.0);
        let magnitude = match exponent {
            0 => fraction,
            _ => (1.0 + fraction) * 2f64.powi(exponent - 1),
        };
        if code >> 3 == 1 {
            -magnitude
        } else {
            magnitude
        }
    };
    let value = |at: usize| match format {
        F::Mxfp4 => {
            let code = block[1 + at % 16] >> (at / 16 * 4) & 15;
            fourth(code) * 2f64.powi(i32::from(block[0]) - 127)
        }
        F::Q4_0 => (nibble(&block[2..], at) - 8.0) * half(block),
        F::Q4_1 => nibble(&block[4..], at) * half(block) + half(&block[2..]),
        F::Q5_0 => (nibble(&block[6..], at) + fifth(&block[2..], at) - 16.0) * half(block),
        F::Q5_1 => {
            let code = nibble(&block[8..], at) + fifth(&block[4..], at);
            code * half(block) + half(&block[2..])
        }
        F::Q8_0 => f64::from(block[2 + at] as i8) * half(block),
        F::Q4K | F::Q5K => {
            let (scale, minimum) = pair(at / 32);
            let is_five = format == F::Q5K;
            let qs = &block[if is_five { 48 } else { 16 }..];
            let low = qs[at / 64 * 32 + at % 32] >> (at / 32 % 2 * 4) & 15;
            let high = match is_five {
                true => (block[16 + at % 32] >> (at / 32) & 1) * 16,
                false => 0,
            };
            let scale = half(block) * f64::from(scale);
            scale * f64::from(low + high) - half(&block[2..]) * f64::from(minimum)
        }
        F::Q6K => {
            let (part, rest) = (at / 128, at % 128);
            let low = block[part * 64 + rest % 64] >> (rest / 64 * 4) & 15;
            let high = block[128 + part * 32 + rest % 32] >> (rest / 32 * 2) & 3;
            let scale = f64::from(block[192 + at / 16] as i8);
            half(&block[208..]) * scale * (f64::from(low | high << 4) - 32.0)
        }
    };
    (0..format.block_size()).map(value).collect()
}

fn attention(isa: Isa, threads: usize) -> Attention {
    Attention::with_isa(threads, isa).expect("there are threads")
}

fn bits(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|float| float.to_bits()).collect()
}

struct Layer {
    in_features: usize,
    out_features: usize,
    weight: QuantizedWeight,
    floats: Vec<f64>,
    bias: Vec<f32>,
}

impl Layer {
    fn new(format: F, (in_features, out_features): (usize, usize), seed: u64) -> Self {
        let mut random = Random(seed);
        let size = format.block_size();
        let data = random.blocks(format, in_features / size * out_features);
        let blocks = data.chunks(format.block_bytes());
        Self {
            in_features,
            out_features,
            weight: QuantizedWeight::pack(format, &data, in_features, out_features)
                .expect("it fits"),
            floats: blocks
                .flat_map(|block| dequantized(format, block))
                .collect(),
            bias: random.floats(out_features),
        }
    }

    /// With codes and scales for groups of inputs.
    fn of_groups(
        size: usize,
        has_halves: bool,
        (in_features, out_features): (usize, usize),
    ) -> Self {
        let mut random = Random(7);
        let codes: Vec<u8> = (0..in_features * out_features / 2)
            .map(|_| random.bits() as u8)
            .collect();
        let scales: Vec<f32> = random
            .floats(in_features / size * out_features)
            .into_iter()
            .map(|scale| match has_halves {
                true => (scale * 1024.0).round() / 1024.0,
                false => scale,
            })
            .collect();
        let zeros: Vec<u8> = scales.iter().map(|_| random.bits() as u8 % 17).collect();
        let weight = QuantizedWeight::from_groups(
            &codes,
            &scales,
            Some(&zeros),
            size,
            in_features,
            out_features,
        );
        let value = |at: usize| {
            let code = codes[at / 2] >> (at % 2 * 4) & 15;
            (f64::from(code) - f64::from(zeros[at / size])) * f64::from(scales[at / size])
        };
        Self {
            in_features,
            out_features,
            weight: weight.expect("it fits"),
            floats: (0..in_features * out_features).map(value).collect(),
            bias: random.floats(out_features),
        }
    }

    fn multiply(&self, attention: &Attention, rows: &[f32], has_bias: bool) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows.len() / self.in_features * self.out_features];
        let bias = has_bias.then_some(&self.bias[..]);
        attention
            .quantized_linear(rows, &self.weight, bias, &mut out)
            .expect("it fits");
        out
    }

    /// Each product of these rows, rounded as is documented, in f64, and the sum of the absolute values that were added.
    fn exact(&self, rows: &[f32], has_bias: bool) -> Vec<(f64, f64)> {
        let mut products = vec![];
        for row in rows.chunks(self.in_features) {
            let row: Vec<f64> = row.chunks(32).flat_map(rounded).collect();
            for (weight, &bias) in self.floats.chunks(self.in_features).zip(&self.bias) {
                let bias = f64::from(bias) * f64::from(u8::from(has_bias));
                let products_of = row.iter().zip(weight).map(|(x, w)| x * w);
                let sum = products_of.clone().sum::<f64>() + bias;
                let size = row.iter().map(|x| x.abs()).sum::<f64>();
                let largest = weight.iter().map(|w| w.abs()).fold(0.0, f64::max);
                products.push((sum, size * largest + bias.abs()));
            }
        }
        products
    }
}

/// Numbers rounded to a 127th of the largest.
fn rounded(floats: &[f32]) -> Vec<f64> {
    let largest = floats
        .iter()
        .fold(0f32, |largest, float| largest.max(float.abs()));
    let factor = if largest == 0.0 { 0.0 } else { 127.0 / largest };
    let scale = f64::from(largest / 127.0);
    let round = |&float: &f32| f64::from((float * factor).round_ties_even()) * scale;
    floats.iter().map(round).collect()
}

/// All formats, and groups, with outputs that end within a panel.
fn layers(blocks: usize, out_features: usize) -> Vec<Layer> {
    let mut layers: Vec<Layer> = F::ALL
        .into_iter()
        .map(|format| Layer::new(format, (format.block_size() * blocks, out_features), 3))
        .collect();
    for (size, has_halves) in [(32, true), (64, false), (128, true)] {
        let shape = (size * blocks, out_features);
        layers.push(Layer::of_groups(size, has_halves, shape));
    }
    layers
}

fn products_are_near_the_exact_ones(isa: Isa) {
    let attention = attention(isa, 1);
    for (blocks, out_features) in [(1, 1), (2, 15), (3, 16), (5, 33)] {
        for layer in layers(blocks, out_features) {
            for count in [1, 2, 3, 4, 5, 7, 11, 13, 17, 40] {
                let mut rows = Random(count as u64).floats(count * layer.in_features);
                rows[..32].fill(0.0);
                rows[layer.in_features - 1] = 1e-3;
                for has_bias in [false, true] {
                    let actual = layer.multiply(&attention, &rows, has_bias);
                    let exact = layer.exact(&rows, has_bias);
                    for (&actual, &(exact, size)) in actual.iter().zip(&exact) {
                        let error = (f64::from(actual) - exact).abs();
                        let bound = size * f64::from(f32::EPSILON) * 4.0 + 1e-30;
                        let name = layer.weight.format();
                        assert!(
                            error <= bound,
                            "{name:?}, {count} rows of {}x{out_features}: {error:e} of {size:e}",
                            layer.in_features
                        );
                    }
                }
            }
        }
    }
}

fn a_row_has_the_same_bits_in_every_batch(isa: Isa) {
    let attention = attention(isa, 1);
    for layer in layers(2, 35) {
        let (in_features, out_features) = (layer.in_features, layer.out_features);
        let rows = Random(5).floats(40 * in_features);
        let alone: Vec<u32> = rows
            .chunks(in_features)
            .flat_map(|row| bits(&layer.multiply(&attention, row, true)))
            .collect();
        for count in 1..=40 {
            for first in [0, 40 - count] {
                let batch = &rows[first * in_features..][..count * in_features];
                let actual = bits(&layer.multiply(&attention, batch, true));
                let expected = &alone[first * out_features..][..count * out_features];
                assert!(actual == expected, "{count} rows");
            }
        }
    }
}

fn every_level_and_number_of_threads_gives_the_same_bits(isa: Isa) {
    for (layer, other) in layers(2, 300).iter().zip(&layers(2, 300)) {
        for count in [1, 5, 70] {
            let rows = Random(9).floats(count * layer.in_features);
            let all = |attention: &Attention| {
                let gated = Activation::ALL.map(|activation| {
                    let mut gated = vec![f32::NAN; count * layer.out_features];
                    attention
                        .quantized_gated_linear(
                            &rows,
                            &layer.weight,
                            activation,
                            &other.weight,
                            &mut gated,
                        )
                        .expect("it fits");
                    bits(&gated)
                });
                (bits(&layer.multiply(attention, &rows, true)), gated)
            };
            let actual = all(&attention(isa, 1));
            for threads in [2, 3] {
                assert!(actual == all(&attention(isa, threads)), "{threads} threads");
            }
            assert!(actual == all(&attention(Isa::Portable, 1)), "plain");
        }
    }
}

/// More blocks than are unpacked at a time, and rows around those where instructions change.
fn many_blocks_and_rows_have_the_same_bits_at_every_level(isa: Isa) {
    let [attention, plain] = [isa, Isa::Portable].map(|isa| attention(isa, 1));
    for blocks in [9, 33] {
        for layer in layers(blocks, 18) {
            let rows = Random(4).floats(40 * layer.in_features);
            let expected = bits(&layer.multiply(&plain, &rows, true));
            for count in [3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 25, 40] {
                let rows = &rows[..count * layer.in_features];
                let actual = bits(&layer.multiply(&attention, rows, true));
                let name = layer.weight.format();
                assert!(
                    actual == expected[..count * 18],
                    "{name:?}, {count} rows of {blocks} blocks"
                );
            }
        }
    }
}

fn extreme_codes_and_numbers_do_not_overflow(isa: Isa) {
    let attention = attention(isa, 1);
    for format in F::ALL {
        let (size, bytes) = (format.block_size(), format.block_bytes());
        for fill in [0x00, 0xff, 0x80, 0x7f] {
            let mut block = vec![fill; bytes];
            for &at in halves_of(format) {
                block[at..at + 2].copy_from_slice(&[0, 0x3c]); // 1
            }
            if format == F::Mxfp4 {
                block[0] = 127;
            }
            let weight = QuantizedWeight::pack(format, &block, size, 1).expect("it fits");
            for row in [vec![127.0; size], vec![-127.0; size]] {
                let mut out = [f32::NAN];
                attention
                    .quantized_linear(&row, &weight, None, &mut out)
                    .expect("it fits");
                let mut many = [f32::NAN; 9];
                attention
                    .quantized_linear(&row.repeat(9), &weight, None, &mut many)
                    .expect("it fits");
                assert_eq!(many, [out[0]; 9]);
                let weights = dequantized(format, &block);
                let exact: f64 = weights
                    .iter()
                    .map(|weight| weight * f64::from(row[0]))
                    .sum();
                let error = (f64::from(out[0]) - exact).abs();
                assert!(error <= exact.abs() * 1e-6, "{format:?} of {fill}: {error}");
            }
        }
    }
}

fn rows_of_the_weight_come_back() {
    for layer in layers(3, 35) {
        let in_features = layer.in_features;
        let outputs = [0, 17, 34, 0];
        let mut out = vec![f32::NAN; 4 * in_features];
        layer
            .weight
            .gather(&outputs, &mut out)
            .expect("they are there");
        for (&output, row) in outputs.iter().zip(out.chunks(in_features)) {
            let expected = &layer.floats[output as usize * in_features..][..in_features];
            let expected: Vec<f32> = expected.iter().map(|&weight| weight as f32).collect();
            assert_eq!(row, expected);
        }
        for wrong in [-1, 35, i64::MAX] {
            let actual = layer.weight.gather(&[0, 0, 0, wrong], &mut out);
            let text = actual.expect_err("there is none").to_string();
            assert!(text.contains(&format!("outputs[3]={wrong}")), "{text}");
        }
        let actual = layer.weight.gather(&outputs[1..], &mut out);
        assert!(matches!(actual, Err(Error::Length { .. })));
    }
}

fn memory_is_that_of_the_file() {
    for format in F::ALL {
        let layer = Layer::new(format, (1024, 64), 1);
        let bytes = match format {
            F::Mxfp4 => 21, // five bits instead of four
            _ => format.block_bytes(),
        };
        let file = 1024 / format.block_size() * 64 * bytes;
        assert!(layer.weight.num_bytes() * 100 < file * 105, "{format:?}");
    }
}

fn what_does_not_fit_is_refused() {
    let pack = QuantizedWeight::pack;
    let data = Random(1).blocks(F::Q4K, 6);
    for (data, in_features, out_features) in [
        (&data[1..], 512, 3),
        (&data[..], 512, 4),
        (&data[..], 500, 3),
        (&data[..], 0, 3),
        (&data[..], 512, 0),
        (&data[..], 256, usize::MAX),
    ] {
        pack(F::Q4K, data, in_features, out_features).expect_err("it does not fit");
    }
    for infinite in [0x7c00u16, 0xfc00, 0x7e00] {
        for &at in halves_of(F::Q4K) {
            let mut data = data.clone();
            data[3 * F::Q4K.block_bytes() + at..][..2].copy_from_slice(&infinite.to_le_bytes());
            let expected = Error::Scale {
                output: 1,
                input: 256,
            };
            assert_eq!(pack(F::Q4K, &data, 512, 3).err(), Some(expected));
        }
    }
    let mut data = Random(1).blocks(F::Mxfp4, 6);
    data[3 * F::Mxfp4.block_bytes()] = u8::MAX;
    let expected = Error::Scale {
        output: 1,
        input: 32,
    };
    assert_eq!(pack(F::Mxfp4, &data, 64, 3).err(), Some(expected));
    let data = Random(1).blocks(F::Q4K, 6);
    let groups = |codes: &[u8], scales: &[f32], size, (inputs, outputs)| {
        QuantizedWeight::from_groups(codes, scales, None, size, inputs, outputs).err()
    };
    assert_eq!(groups(&[0; 64], &[1.0; 4], 32, (64, 2)), None);
    for (size, shape) in [
        (16, (64, 2)),
        (0, (64, 2)),
        (32, (48, 2)),
        (64, (64, 2)),
        (32, (64, 3)),
    ] {
        groups(&[0; 64], &[1.0; 4], size, shape).expect("it does not fit");
    }
    for scale in [f32::NAN, f32::INFINITY] {
        let expected = Error::Scale {
            output: 1,
            input: 32,
        };
        let scales = [1.0, 1.0, 1.0, scale];
        assert_eq!(groups(&[0; 64], &scales, 32, (64, 2)), Some(expected));
    }
    let weight = pack(F::Q4K, &data, 512, 3).expect("it fits");
    let attention = attention(Isa::Portable, 1);
    let (rows, mut out) = ([1.0; 1024], [7.0; 6]);
    for (rows, bias) in [
        (&rows[1..], None),
        (&rows[..512], None),
        (&rows[..], Some(&[1.0; 2][..])),
    ] {
        let actual = attention.quantized_linear(rows, &weight, bias, &mut out);
        assert!(matches!(actual, Err(Error::Length { .. })));
    }
    let other = pack(F::Q4K, &data, 256, 6).expect("it fits");
    let actual =
        attention.quantized_gated_linear(&rows, &other, Activation::Silu, &weight, &mut out);
    assert!(matches!(actual, Err(Error::Length { .. })));
    assert_eq!(out, [7.0; 6]);
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &LEVELS,
        products_are_near_the_exact_ones,
        a_row_has_the_same_bits_in_every_batch,
        every_level_and_number_of_threads_gives_the_same_bits
    );
    at!(
        tests,
        &LEVELS[1..],
        many_blocks_and_rows_have_the_same_bits_at_every_level
    );
    at!(tests, &LEVELS, extreme_codes_and_numbers_do_not_overflow);
    once!(
        tests,
        rows_of_the_weight_come_back,
        memory_is_that_of_the_file,
        what_does_not_fit_is_refused
    );
}
