//! Linear layers against f64, and the same bits at all levels, in every batch and by any number of threads.

use crate::functions::activated;
use crate::levels::{FLOATS, Tests, all};
use cpu_kernels::{Activation, Attention, Element, Error, Isa, PackedWeight};

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

/// As bfloat16.
fn halves(floats: &[f32]) -> Vec<u16> {
    floats.iter().map(|&float| u16::narrow(float)).collect()
}

fn widened(halves: &[u16]) -> Vec<f32> {
    halves.iter().map(|half| half.widen()).collect()
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
        Self::of(weight, in_features, out_features, seed)
    }

    /// Of weights that are bfloat16.
    fn halved(in_features: usize, out_features: usize, seed: usize) -> Self {
        let weight = halves(&floats(in_features * out_features, seed));
        let bias = widened(&halves(&floats(out_features, seed + 1)));
        let packed = PackedWeight::pack(&weight, in_features, out_features).expect("it fits");
        let weight = widened(&weight);
        Self {
            packed,
            bias,
            ..Self::of(weight, in_features, out_features, seed)
        }
    }

    fn of(weight: Vec<f32>, in_features: usize, out_features: usize, seed: usize) -> Self {
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

    fn multiply_halves(&self, attention: &Attention, rows: &[u16], has_bias: bool) -> Vec<u16> {
        let mut out = vec![u16::MAX; rows.len() / self.in_features * self.out_features];
        let bias = halves(&self.bias);
        let bias = has_bias.then_some(&bias[..]);
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

/// Outputs that end within a vector, a panel and a tile of panels; inputs at the end of a block of 1,024 and beyond.
const SHAPES: [(usize, usize); 11] = [
    (1, 1),
    (3, 7),
    (5, 16),
    (17, 31),
    (40, 48),
    (64, 129),
    (255, 70),
    (257, 33),
    (530, 145),
    (1024, 17),
    (1031, 81),
];

fn products_are_near_the_exact_ones(isa: Isa) {
    let attention = attention(isa, 1);
    for (in_features, out_features) in SHAPES {
        let layer = Layer::new(in_features, out_features, 5);
        for count in [1, 2, 3, 4, 5, 6, 7, 11, 13, 40] {
            let rows = floats(count * in_features, 3);
            for has_bias in [false, true] {
                let actual = layer.multiply(&attention, &rows, has_bias);
                let exact = layer.exact(&rows, has_bias);
                for (at, (&actual, &(exact, size))) in actual.iter().zip(&exact).enumerate() {
                    let error = (f64::from(actual) - exact).abs();
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
                let actual = bits(&layer.multiply(&attention, batch, true));
                let expected = &alone[first * out_features..][..count * out_features];
                assert!(
                    actual == expected,
                    "{count} rows of {in_features}x{out_features}"
                );
            }
        }
    }
}

/// Tiles of six and of fewer rows, in tasks that end within a tile; blocks of inputs of which the last has one.
fn many_rows_have_the_bits_of_one(isa: Isa) {
    let [one, two] = [1, 2].map(|threads| attention(isa, threads));
    for (in_features, out_features) in [(1025, 65), (2049, 17), (33, 209)] {
        let (layer, halved) = (
            Layer::new(in_features, out_features, 3),
            Layer::halved(in_features, out_features, 8),
        );
        let rows = floats(197 * in_features, 13);
        let low = halves(&rows);
        let (mut alone, mut alone_halved, mut alone_low) = (vec![], vec![], vec![]);
        for (row, low) in rows.chunks(in_features).zip(low.chunks(in_features)) {
            alone.extend(bits(&layer.multiply(&one, row, true)));
            alone_halved.extend(bits(&halved.multiply(&one, row, true)));
            alone_low.extend(halved.multiply_halves(&one, low, true));
        }
        for count in [41, 61, 95, 96, 97, 102, 192, 197] {
            let (size, end) = (count * in_features, count * out_features);
            for attention in [&one, &two] {
                let actual = bits(&layer.multiply(attention, &rows[..size], true));
                assert!(actual == alone[..end], "{count} rows of {in_features}");
                let actual = bits(&halved.multiply(attention, &rows[..size], true));
                assert!(
                    actual == alone_halved[..end],
                    "{count} rows of {in_features}"
                );
                let actual = halved.multiply_halves(attention, &low[..size], true);
                assert!(actual == alone_low[..end], "{count} rows of {in_features}");
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
                let (gate, up) = (&layer.packed, &other.packed);
                let gated = Activation::ALL.map(|activation| {
                    let mut gated = vec![f32::NAN; count * out_features];
                    attention
                        .gated_linear(&rows, gate, activation, up, &mut gated)
                        .expect("it fits");
                    bits(&gated)
                });
                (bits(&layer.multiply(attention, &rows, true)), gated)
            };
            let actual = all(&attention(isa, 1));
            for threads in [2, 3] {
                assert!(actual == all(&attention(isa, threads)), "{threads} threads");
            }
            if count < 8 {
                assert!(actual == all(&attention(Isa::Portable, 1)), "plain");
            }
        }
    }
}

fn a_gate_is_the_activation_of_its_product(isa: Isa) {
    for activation in Activation::ALL {
        check_gates(isa, activation);
    }
}

fn check_gates(isa: Isa, activation: Activation) {
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
            let mut actual = vec![f32::NAN; count * out_features];
            attention
                .gated_linear(&rows, &gate.packed, activation, &up.packed, &mut actual)
                .expect("it fits");
            let gates = gate.multiply(&attention, &rows, false);
            let ups = up.multiply(&attention, &rows, false);
            for ((&actual, gate), up) in actual.iter().zip(gates).zip(ups) {
                let (gate, up) = (f64::from(gate), f64::from(up));
                let exact = activated(activation, gate) * up;
                let error = (f64::from(actual) - exact).abs();
                assert!(
                    error <= 1e-5 * exact.abs() + 1e-25,
                    "{actual} is not {exact}"
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
    let actual = layer.multiply(&attention, &rows, false);
    assert!(actual[37..74].iter().all(|float| float.is_nan()));
    let expected = layer.multiply(&attention, &clean, false);
    assert_eq!(
        bits(&[&actual[..37], &actual[74..]].concat()),
        bits(&[&expected[..37], &expected[74..]].concat())
    );
}

fn products_of_bfloat16_are_near_the_exact_ones(isa: Isa) {
    let attention = attention(isa, 1);
    for (in_features, out_features) in SHAPES {
        let layer = Layer::halved(in_features, out_features, 5);
        for count in [1, 2, 3, 5, 6, 7, 13, 40] {
            let rows = halves(&floats(count * in_features, 3));
            for has_bias in [false, true] {
                let actual = layer.multiply_halves(&attention, &rows, has_bias);
                let exact = layer.exact(&widened(&rows), has_bias);
                for (at, (&actual, &(exact, size))) in actual.iter().zip(&exact).enumerate() {
                    let error = (f64::from(actual.widen()) - exact).abs();
                    let sum = size * f64::from(f32::EPSILON) * (in_features as f64).sqrt();
                    let bound = exact.abs() / 256.0 + 2.0 * sum;
                    assert!(
                        error <= bound,
                        "{count} rows of {in_features}x{out_features}, element {at}: {error:e}"
                    );
                }
            }
        }
    }
}

fn a_row_of_bfloat16_has_the_same_bits_in_every_batch_and_by_all_threads(isa: Isa) {
    let [attention, three] = [1, 3].map(|threads| attention(isa, threads));
    for (in_features, out_features) in [(17, 31), (255, 70), (530, 145), (1031, 33)] {
        let (layer, gate) = (
            Layer::halved(in_features, out_features, 11),
            Layer::halved(in_features, out_features, 4),
        );
        let rows = halves(&floats(40 * in_features, 7));
        let both = |attention: &Attention, rows: &[u16]| {
            let mut gated = vec![u16::MAX; rows.len() / in_features * out_features];
            attention
                .gated_linear(
                    rows,
                    &gate.packed,
                    Activation::Silu,
                    &layer.packed,
                    &mut gated,
                )
                .expect("it fits");
            (layer.multiply_halves(attention, rows, true), gated)
        };
        let (mut alone, mut gated) = (vec![], vec![]);
        for row in rows.chunks(in_features) {
            let (actual, actual_gated) = both(&attention, row);
            alone.extend(actual);
            gated.extend(actual_gated);
        }
        for count in 1..=40 {
            for first in [0, 40 - count] {
                let batch = &rows[first * in_features..][..count * in_features];
                let expected = [&alone, &gated].map(|all| &all[first * out_features..]);
                for attention in [&attention, &three] {
                    let (actual, actual_gated) = both(attention, batch);
                    let size = count * out_features;
                    assert!(actual == expected[0][..size], "{count} rows");
                    assert!(actual_gated == expected[1][..size], "{count} gated rows");
                }
            }
        }
    }
}

/// A weight that is all bfloat16 is kept as such; one more output that is not has it kept as floats.
fn bfloat16_weights_have_the_bits_of_floats(isa: Isa) {
    let (attention, plain) = (attention(isa, 2), attention(Isa::Portable, 1));
    for (in_features, out_features) in [(1, 1), (17, 31), (255, 70), (1031, 65)] {
        let layer = Layer::halved(in_features, out_features, 3);
        let mut weight = layer.weight.clone();
        weight.extend(vec![0.1; in_features]);
        let floats_layer = Layer::of(weight, in_features, out_features + 1, 0);
        for count in [1, 2, 3, 4, 6, 8, 19] {
            let rows = widened(&halves(&floats(count * in_features, 9)));
            let expected: Vec<f32> = floats_layer
                .multiply(&attention, &rows, false)
                .chunks(out_features + 1)
                .flat_map(|row| row[..out_features].to_vec())
                .collect();
            let actual = layer.multiply(&attention, &rows, false);
            assert_eq!(bits(&actual), bits(&expected));
            assert_eq!(bits(&actual), bits(&layer.multiply(&plain, &rows, false)));
            if FLOATS.contains(&isa) || isa == Isa::Avx512Bf16 && is_by_intel() {
                let actual = layer.multiply_halves(&attention, &halves(&rows), false);
                assert_eq!(actual, halves(&expected));
            }
        }
    }
}

/// Intel's processors multiply float32 faster than they multiply bfloat16, but for tiles.
fn is_by_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        return [vendor.ebx, vendor.edx, vendor.ecx]
            == [*b"Genu", *b"ineI", *b"ntel"].map(u32::from_le_bytes);
    }
    #[allow(unreachable_code)] // but for x86-64
    false
}

fn a_gate_of_bfloat16_is_the_activation_of_its_product(isa: Isa) {
    let attention = attention(isa, 2);
    let (gate, up) = (Layer::halved(300, 33, 5), Layer::halved(300, 33, 6));
    let counts = [1, 4, 9].into_iter();
    for (count, activation) in counts.flat_map(|count| Activation::ALL.map(|each| (count, each))) {
        let rows = halves(&floats(count * 300, 3));
        let mut actual = vec![u16::MAX; count * 33];
        attention
            .gated_linear(&rows, &gate.packed, activation, &up.packed, &mut actual)
            .expect("it fits");
        let rows = widened(&rows);
        for ((&actual, (gate, _)), (up, _)) in actual
            .iter()
            .zip(gate.exact(&rows, false))
            .zip(up.exact(&rows, false))
        {
            let exact = activated(activation, gate) * up;
            let error = (f64::from(actual.widen()) - exact).abs();
            assert!(error <= exact.abs() / 200.0 + 1e-4, "{exact}: {error:e}");
        }
    }
}

fn bfloat16_that_is_not_finite_stays_in_its_row(isa: Isa) {
    let (layer, attention) = (Layer::halved(21, 37, 4), attention(isa, 1));
    let clean = halves(&floats(3 * 21, 8));
    let mut rows = clean.clone();
    (rows[21], rows[41]) = (u16::narrow(f32::NAN), u16::narrow(f32::INFINITY));
    let actual = layer.multiply_halves(&attention, &rows, false);
    assert!(actual[37..74].iter().all(|half| half.widen().is_nan()));
    let expected = layer.multiply_halves(&attention, &clean, false);
    assert_eq!(
        [&actual[..37], &actual[74..]],
        [&expected[..37], &expected[74..]]
    );
}

/// Memory that one has used is not taken for results of the other.
fn formats_take_turns_on_a_thread(isa: Isa) {
    let (layer, attention) = (Layer::halved(40, 48, 1), attention(isa, 1));
    let rows = widened(&halves(&floats(4 * 40, 2)));
    let first = layer.multiply(&attention, &rows, true);
    let other = halves(&floats(4 * 40, 77));
    layer.multiply_halves(&attention, &other, true);
    assert_eq!(bits(&first), bits(&layer.multiply(&attention, &rows, true)));
}

fn what_does_not_fit_is_refused() {
    for (size, in_features, out_features) in [
        (0, 0, 1),
        (0, 1, 0),
        (5, 2, 3),
        (7, 2, 3),
        (1, usize::MAX, 2),
    ] {
        let actual = PackedWeight::pack(&vec![1.0_f32; size], in_features, out_features);
        assert!(matches!(
            actual,
            Err(Error::Zero(_) | Error::Length { .. } | Error::TooLarge)
        ));
    }
    let attention = attention(Isa::Portable, 1);
    let (layer, other) = (Layer::new(3, 2, 1), Layer::new(3, 4, 1));
    let mut out = [7.0; 4];
    for (rows, bias, size) in [(5, 2, 4), (6, 3, 4), (6, 2, 3), (9, 2, 4), (3, 2, 4)] {
        let bias = vec![1.0; bias];
        let actual = attention.linear(
            &vec![1.0_f32; rows],
            &layer.packed,
            Some(&bias),
            &mut out[..size],
        );
        assert!(matches!(actual, Err(Error::Length { .. })), "{actual:?}");
    }
    let actual = attention.gated_linear(
        &[1.0; 6],
        &other.packed,
        Activation::Silu,
        &layer.packed,
        &mut out,
    );
    assert!(matches!(actual, Err(Error::Length { .. })), "{actual:?}");
    assert_eq!(out, [7.0; 4]);
    attention
        .linear::<f32>(&[], &layer.packed, None, &mut [])
        .expect("no rows have no products");
}

fn rows_of_the_weight_come_back() {
    for (in_features, out_features) in SHAPES {
        rows_come_back(&Layer::new(in_features, out_features, 4));
        rows_come_back(&Layer::halved(in_features, out_features, 4));
    }
}

fn rows_come_back(layer: &Layer) {
    let (in_features, out_features) = (layer.in_features, layer.out_features);
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
    let mut rounded = vec![u16::MAX; 4 * in_features];
    layer
        .packed
        .gather(&outputs, &mut rounded)
        .expect("they are there");
    assert_eq!(rounded, halves(&out));
    for wrong in [-1, out_features as i64, i64::MAX] {
        let actual = layer.packed.gather(&[0, 0, 0, wrong], &mut out);
        let text = actual.expect_err("there is none").to_string();
        assert!(text.contains(&format!("outputs[3]={wrong}")), "{text}");
    }
    let actual = layer.packed.gather(&outputs[1..], &mut out);
    assert!(matches!(actual, Err(Error::Length { .. })));
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &FLOATS,
        products_are_near_the_exact_ones,
        a_row_has_the_same_bits_in_every_batch
    );
    at!(tests, &all(), many_rows_have_the_bits_of_one);
    at!(
        tests,
        &FLOATS,
        every_level_and_number_of_threads_gives_the_same_bits,
        a_gate_is_the_activation_of_its_product,
        numbers_that_are_not_finite_stay_in_their_row
    );
    at!(
        tests,
        &all(),
        products_of_bfloat16_are_near_the_exact_ones,
        a_row_of_bfloat16_has_the_same_bits_in_every_batch_and_by_all_threads,
        bfloat16_weights_have_the_bits_of_floats,
        a_gate_of_bfloat16_is_the_activation_of_its_product,
        bfloat16_that_is_not_finite_stays_in_its_row,
        formats_take_turns_on_a_thread
    );
    once!(
        tests,
        rows_of_the_weight_come_back,
        what_does_not_fit_is_refused
    );
}
