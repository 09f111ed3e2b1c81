//! Linear layers against f64, and the same bits at all levels, in every batch and by any number of threads.

use std::process::ExitCode;

use cpu_kernels::{Attention, Error, Isa, PackedWeight};
use levels::{FLOATS, Tests};

#[allow(dead_code)] // for its neighbours
mod levels;

/// Numbers from -1 to 1 that look random.
fn floats(count: usize, seed: usize) -> Vec<f32> {
    let float = |at: usize| ((at + seed) * 7919 % 4001) as f32 / 2000.0 - 1.0;
    (0..count).map(float).collect()
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
    weight: Vec<f32>,
    packed: PackedWeight,
    bias: Vec<f32>,
}

impl Layer {
    fn new(in_features: usize, out_features: usize, seed: usize) -> Self {
        let weight = floats(in_features * out_features, seed);
        let packed = PackedWeight::pack(&weight, in_features, out_features).expect("it fits");
        assert_eq!(
            (packed.in_features(), packed.out_features()),
            (in_features, out_features)
        );
        Self {
            in_features,
            out_features,
            weight,
            packed,
            bias: floats(out_features, seed + 1),
        }
    }

    fn multiply(&self, attention: &Attention, rows: &[f32], has_bias: bool) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows.len() / self.in_features * self.out_features];
        let bias = has_bias.then_some(&self.bias[..]);
        attention
            .linear(rows, &self.packed, bias, &mut out)
            .expect("it fits");
        out
    }

    /// Each product in f64, and the sum of the absolute values that were added.
    fn exact(&self, rows: &[f32], has_bias: bool) -> Vec<(f64, f64)> {
        let rows = rows.chunks(self.in_features);
        let product = |row: &[f32], output: usize| {
            let bias = f64::from(self.bias[output]) * f64::from(u8::from(has_bias));
            let weight = &self.weight[output * self.in_features..][..self.in_features];
            let products = row
                .iter()
                .zip(weight)
                .map(|(&x, &w)| f64::from(x) * f64::from(w));
            products.fold((bias, bias.abs()), |(sum, size), one| {
                (sum + one, size + one.abs())
            })
        };
        rows.flat_map(|row| (0..self.out_features).map(move |output| product(row, output)))
            .collect()
    }
}

/// Outputs that end within a vector, a panel and a tile of panels; inputs beyond a block of them.
const SHAPES: [(usize, usize); 9] = [
    (1, 1),
    (3, 7),
    (5, 16),
    (17, 31),
    (40, 48),
    (64, 129),
    (255, 70),
    (257, 33),
    (530, 145),
];

fn products_are_near_the_exact_ones(isa: Isa) {
    let attention = attention(isa, 1);
    for (in_features, out_features) in SHAPES {
        let layer = Layer::new(in_features, out_features, 5);
        for count in [1, 2, 3, 4, 5, 6, 7, 11, 13, 40] {
            let rows = floats(count * in_features, 3);
            for has_bias in [false, true] {
                let found = layer.multiply(&attention, &rows, has_bias);
                let exact = layer.exact(&rows, has_bias);
                for (at, (&found, &(exact, size))) in found.iter().zip(&exact).enumerate() {
                    let error = (f64::from(found) - exact).abs();
                    let bound = size * f64::from(f32::EPSILON) * (in_features as f64).sqrt();
                    assert!(
                        error <= bound,
                        "{count} rows of {in_features}x{out_features}, element {at}: {error:e}"
                    );
                }
            }
        }
    }
}

fn a_row_has_the_same_bits_in_every_batch(isa: Isa) {
    let attention = attention(isa, 1);
    for (in_features, out_features) in SHAPES {
        let layer = Layer::new(in_features, out_features, 11);
        let rows = floats(40 * in_features, 7);
        let alone: Vec<u32> = rows
            .chunks(in_features)
            .flat_map(|row| bits(&layer.multiply(&attention, row, true)))
            .collect();
        for count in 1..=40 {
            for first in [0, 40 - count] {
                let batch = &rows[first * in_features..][..count * in_features];
                let found = bits(&layer.multiply(&attention, batch, true));
                let expected = &alone[first * out_features..][..count * out_features];
                assert!(
                    found == expected,
                    "{count} rows of {in_features}x{out_features}"
                );
            }
        }
    }
}

fn every_level_and_number_of_threads_gives_the_same_bits(isa: Isa) {
    for (in_features, out_features) in [(577, 290), (40, 5000), (300, 33)] {
        let (layer, other) = (
            Layer::new(in_features, out_features, 2),
            Layer::new(in_features, out_features, 9),
        );
        for count in [1, 2, 5, 8, 100, 250] {
            if isa == Isa::Portable && count > 8 && out_features > 1000 {
                continue; // minutes
            }
            let rows = floats(count * in_features, 1);
            let all = |attention: &Attention| {
                let mut gated = vec![f32::NAN; count * out_features];
                let (gate, up) = (&layer.packed, &other.packed);
                attention
                    .gated_linear(&rows, gate, up, &mut gated)
                    .expect("it fits");
                (bits(&layer.multiply(attention, &rows, true)), bits(&gated))
            };
            let found = all(&attention(isa, 1));
            for threads in [2, 3] {
                assert!(found == all(&attention(isa, threads)), "{threads} threads");
            }
            if count < 8 {
                assert!(found == all(&attention(Isa::Portable, 1)), "plain");
            }
        }
    }
}

fn a_gate_is_the_silu_of_its_product(isa: Isa) {
    let attention = attention(isa, 2);
    for (in_features, out_features) in [(1, 1), (24, 50), (300, 33)] {
        let (gate, up) = (
            Layer::new(in_features, out_features, 5),
            Layer::new(in_features, out_features, 6),
        );
        for (count, factor) in [(1, 1.0), (9, 0.1), (4, 1e4), (4, -1e4)] {
            let rows: Vec<f32> = floats(count * in_features, 3)
                .into_iter()
                .map(|float| float * factor)
                .collect();
            let mut found = vec![f32::NAN; count * out_features];
            attention
                .gated_linear(&rows, &gate.packed, &up.packed, &mut found)
                .expect("it fits");
            let gates = gate.multiply(&attention, &rows, false);
            let ups = up.multiply(&attention, &rows, false);
            for ((&found, gate), up) in found.iter().zip(gates).zip(ups) {
                let (gate, up) = (f64::from(gate), f64::from(up));
                let exact = gate / (1.0 + (-gate).exp()) * up;
                let error = (f64::from(found) - exact).abs();
                assert!(
                    error <= 1e-5 * exact.abs() + 1e-25,
                    "{found} is not {exact}"
                );
            }
        }
    }
}

fn numbers_that_are_not_finite_stay_in_their_row(isa: Isa) {
    let layer = Layer::new(20, 37, 4);
    let attention = attention(isa, 1);
    let clean = floats(3 * 20, 8);
    let mut rows = clean.clone();
    (rows[20], rows[25]) = (f32::NAN, f32::INFINITY);
    let found = layer.multiply(&attention, &rows, false);
    assert!(found[37..74].iter().all(|float| float.is_nan()));
    let expected = layer.multiply(&attention, &clean, false);
    assert_eq!(
        bits(&[&found[..37], &found[74..]].concat()),
        bits(&[&expected[..37], &expected[74..]].concat())
    );
}

fn what_does_not_fit_is_refused() {
    for (size, in_features, out_features) in [
        (0, 0, 1),
        (0, 1, 0),
        (5, 2, 3),
        (7, 2, 3),
        (1, usize::MAX, 2),
    ] {
        let found = PackedWeight::pack(&vec![1.0; size], in_features, out_features);
        assert!(matches!(
            found,
            Err(Error::Zero(_) | Error::Length { .. } | Error::TooLarge)
        ));
    }
    let attention = attention(Isa::Portable, 1);
    let (layer, other) = (Layer::new(3, 2, 1), Layer::new(3, 4, 1));
    let mut out = [7.0; 4];
    for (rows, bias, size) in [(5, 2, 4), (6, 3, 4), (6, 2, 3), (9, 2, 4), (3, 2, 4)] {
        let bias = vec![1.0; bias];
        let found = attention.linear(
            &vec![1.0; rows],
            &layer.packed,
            Some(&bias),
            &mut out[..size],
        );
        assert!(matches!(found, Err(Error::Length { .. })), "{found:?}");
    }
    let found = attention.gated_linear(&[1.0; 6], &other.packed, &layer.packed, &mut out);
    assert!(matches!(found, Err(Error::Length { .. })), "{found:?}");
    assert_eq!(out, [7.0; 4]);
    attention
        .linear(&[], &layer.packed, None, &mut [])
        .expect("no rows have no products");
}

fn rows_of_the_weight_come_back() {
    for (in_features, out_features) in SHAPES {
        let layer = Layer::new(in_features, out_features, 4);
        let outputs: Vec<i64> = [0, out_features / 2, out_features - 1, 0]
            .map(|it| it as i64)
            .into();
        let mut out = vec![f32::NAN; 4 * in_features];
        layer
            .packed
            .gather(&outputs, &mut out)
            .expect("they are there");
        for (&output, row) in outputs.iter().zip(out.chunks(in_features)) {
            assert_eq!(
                row,
                &layer.weight[output as usize * in_features..][..in_features]
            );
        }
        for wrong in [-1, out_features as i64, i64::MAX] {
            let found = layer.packed.gather(&[0, 0, 0, wrong], &mut out);
            let text = found.expect_err("there is none").to_string();
            assert!(text.contains(&format!("outputs[3]={wrong}")), "{text}");
        }
        let found = layer.packed.gather(&outputs[1..], &mut out);
        assert!(matches!(found, Err(Error::Length { .. })));
    }
}

fn main() -> ExitCode {
    Tests::new()
        .at(
            &FLOATS,
            "products_are_near_the_exact_ones",
            products_are_near_the_exact_ones,
        )
        .at(
            &FLOATS,
            "a_row_has_the_same_bits_in_every_batch",
            a_row_has_the_same_bits_in_every_batch,
        )
        .at(
            &FLOATS,
            "every_level_and_number_of_threads_gives_the_same_bits",
            every_level_and_number_of_threads_gives_the_same_bits,
        )
        .at(
            &FLOATS,
            "a_gate_is_the_silu_of_its_product",
            a_gate_is_the_silu_of_its_product,
        )
        .at(
            &FLOATS,
            "numbers_that_are_not_finite_stay_in_their_row",
            numbers_that_are_not_finite_stay_in_their_row,
        )
        .once("rows_of_the_weight_come_back", rows_of_the_weight_come_back)
        .once("what_does_not_fit_is_refused", what_does_not_fit_is_refused)
        .run()
}
