//! Norms, sums and activations of rows against f64, and the same bits at all levels, in every batch and by any number of
//! threads.

use crate::functions::activated;
use crate::levels::{FLOATS, Tests, all};
use cpu_kernels::{Activation, Attention, Element, Error, Gate, Isa, Map, Norm};

const SIZES: [usize; 5] = [1, 15, 16, 48, 577];
const COUNT: usize = 90;

fn numbers(count: usize, start: usize) -> Vec<f32> {
    let float = |at: usize| ((start + at) * 7919 % 4001) as f32 / 500.0 - 4.0;
    (0..count).map(float).collect()
}

fn narrow<E: Element>(floats: &[f32]) -> Vec<E> {
    floats.iter().map(|&float| E::narrow(float)).collect()
}

fn bits<E: Element>(row: &[E]) -> Vec<u32> {
    row.iter().map(|it| it.widen().to_bits()).collect()
}

fn attention(isa: Isa, threads: usize) -> Attention {
    Attention::with_isa(threads, isa).expect("there are threads")
}

/// What is computed with these threads, row by row, and at the plainest level has the same bits.
fn check_bits<E: Element>(
    isa: Isa,
    rows: usize,
    compute: impl Fn(&Attention, std::ops::Range<usize>) -> Vec<E>,
) -> Vec<E> {
    let actual = compute(&attention(isa, 1), 0..rows);
    for other in [attention(isa, 3), attention(Isa::Portable, 2)] {
        assert!(bits(&actual) == bits(&compute(&other, 0..rows)));
    }
    let one = attention(isa, 2);
    let alone = (0..rows).flat_map(|row| compute(&one, row..row + 1));
    assert!(bits(&actual) == bits(&alone.collect::<Vec<_>>()));
    actual
}

/// How far a result may be from the exact number.
fn near<E: Element>(actual: E, exact: f64, size: f64) {
    let unit = if size_of::<E>() == 2 {
        2f64.powi(-8)
    } else {
        2e-6
    };
    let error = (f64::from(actual.widen()) - exact).abs();
    assert!(
        error <= unit * size.max(exact.abs()),
        "{} for {exact}",
        actual.widen()
    );
}

fn exact_norm<E: Element>(row: &[E], norm: &Norm<'_, E>) -> Vec<f64> {
    let wide = |it: &E| f64::from(it.widen());
    let count = row.len() as f64;
    let mean = match norm.is_centered {
        true => row.iter().map(wide).sum::<f64>() / count,
        false => 0.0,
    };
    let squares = row.iter().map(|it| (wide(it) - mean).powi(2)).sum::<f64>() / count;
    let scale = 1.0 / (squares + f64::from(norm.epsilon)).sqrt();
    let vector = |vector: Option<&[E]>, at: usize, or: f64| vector.map_or(or, |it| wide(&it[at]));
    let normal = |(at, it): (usize, &E)| {
        let weight = match norm.weight {
            Some(weight) => f64::from(norm.offset) + wide(&weight[at]),
            None => 1.0,
        };
        (wide(it) - mean) * scale * weight + vector(norm.bias, at, 0.0)
    };
    row.iter().enumerate().map(normal).collect()
}

fn check_norms<E: Element>(isa: Isa) {
    for size in SIZES {
        let (stream, change) = (numbers(COUNT * size, 0), numbers(COUNT * size, 5));
        let (stream, change) = (narrow::<E>(&stream), narrow::<E>(&change));
        let (weight, bias) = (
            narrow::<E>(&numbers(size, 3)),
            narrow::<E>(&numbers(size, 8)),
        );
        for (is_centered, offset, has_weight, has_bias) in [
            (false, 0.0, true, false),
            (false, 1.0, true, false),
            (false, 0.0, false, false),
            (true, 0.0, true, true),
            (true, 0.0, true, false),
        ] {
            let norm = Norm {
                size,
                is_centered,
                weight: has_weight.then_some(&weight[..]),
                bias: has_bias.then_some(&bias[..]),
                epsilon: 1e-5,
                offset,
            };
            let both = check_bits(isa, COUNT, |attention, rows| {
                let part = rows.start * size..rows.end * size;
                let mut sums = stream[part.clone()].to_vec();
                let mut out = vec![E::narrow(f32::NAN); sums.len()];
                attention
                    .add_norm(&mut sums, &change[part], 0.5, &norm, &mut out)
                    .expect("it fits");
                let mut again = out.clone();
                attention.norm(&sums, &norm, &mut again).expect("it fits");
                assert!(bits(&again) == bits(&out));
                let pairs = sums.chunks(size).zip(out.chunks(size));
                pairs.flat_map(|(sums, out)| [sums, out].concat()).collect()
            });
            for (row, pair) in both.chunks(2 * size).enumerate() {
                let (sums, out) = pair.split_at(size);
                for (at, &sum) in sums.iter().enumerate() {
                    let of = |row_: &[E]| f64::from(row_[row * size + at].widen());
                    let exact = of(&stream) + 0.5 * of(&change);
                    near(sum, exact, exact.abs());
                }
                for (&actual, exact) in out.iter().zip(exact_norm(sums, &norm)) {
                    near(actual, exact, 4.0);
                }
            }
        }
    }
}

fn norms_are_near_the_exact_numbers(isa: Isa) {
    check_norms::<f32>(isa);
    check_norms::<u16>(isa);
}

fn exact_map(map: Map, x: f64) -> f64 {
    match map {
        Map::Activation(activation) => activated(activation, x),
        Map::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Map::Scale(factor) => x * f64::from(factor),
        Map::Cap(cap) => f64::from(cap) * (x / f64::from(cap)).tanh(),
    }
}

fn check_functions<E: Element>(isa: Isa) {
    for size in SIZES {
        let (gates, ups) = (numbers(COUNT * size, 0), numbers(COUNT * size, 5));
        let rows = gates.chunks(size).zip(ups.chunks(size));
        let rows = rows.flat_map(|(gate, up)| [gate, up].concat());
        let rows = narrow::<E>(&rows.collect::<Vec<_>>());
        let clamped = Gate::Clamped {
            alpha: 1.7,
            limit: 2.0,
        };
        let gates = Activation::ALL.map(Gate::Activation);
        for gate in gates.into_iter().chain([clamped]) {
            let actual = check_bits(isa, COUNT, |attention, range| {
                let part = 2 * range.start * size..2 * range.end * size;
                let mut out = vec![E::narrow(f32::NAN); range.len() * size];
                attention
                    .gate(&rows[part], size, gate, &mut out)
                    .expect("it fits");
                out
            });
            for (row, out) in rows.chunks(2 * size).zip(actual.chunks(size)) {
                for (at, &actual) in out.iter().enumerate() {
                    let (g, up) = (
                        f64::from(row[at].widen()),
                        f64::from(row[size + at].widen()),
                    );
                    match gate {
                        Gate::Activation(activation) => {
                            near(actual, activated(activation, g) * up, 4.0);
                        }
                        Gate::Clamped { alpha, limit } => {
                            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                            let (g, up) = (g.min(limit), up.clamp(-limit, limit));
                            near(actual, g / (1.0 + (-alpha * g).exp()) * (up + 1.0), 4.0);
                        }
                    }
                }
            }
        }
        let maps = Activation::ALL.map(Map::Activation);
        for map in maps
            .into_iter()
            .chain([Map::Sigmoid, Map::Scale(0.3), Map::Cap(3.0)])
        {
            let actual = check_bits(isa, COUNT, |attention, range| {
                let part = 2 * range.start * size..2 * range.end * size;
                let mut out = vec![E::narrow(f32::NAN); part.len()];
                attention.map(&rows[part], map, &mut out).expect("it fits");
                out
            });
            for (&x, &actual) in rows.iter().zip(&actual) {
                near(actual, exact_map(map, f64::from(x.widen())), 1.0);
            }
        }
    }
}

fn small_and_large_numbers_are_near_the_exact_ones(isa: Isa) {
    let sizes = (0..=1600).map(|step| 2f32.powf(step as f32 / 40.0 - 30.0));
    let rows: Vec<f32> = sizes.flat_map(|size| [size, -size]).collect();
    let mut out = vec![0.0; rows.len()];
    for map in [Map::Sigmoid, Map::Cap(0.5), Map::Cap(30.0)] {
        attention(isa, 1)
            .map(&rows, map, &mut out)
            .expect("it fits");
        for (&x, &actual) in rows.iter().zip(&out) {
            let size = if map == Map::Sigmoid { 1e-4 } else { 0.0 };
            near(actual, exact_map(map, f64::from(x)), size);
        }
    }
    for activation in Activation::ALL {
        let map = Map::Activation(activation);
        attention(isa, 1)
            .map(&rows, map, &mut out)
            .expect("it fits");
        for (&x, &actual) in rows.iter().zip(&out) {
            near(
                actual,
                activated(activation, f64::from(x)),
                f64::from(x).abs(),
            );
        }
        for (x, end) in [(f32::INFINITY, f32::INFINITY), (f32::NAN, f32::NAN)] {
            attention(isa, 1)
                .map(&[x; 17], map, &mut out[..17])
                .expect("it fits");
            assert!(
                out[..17]
                    .iter()
                    .all(|it| it.total_cmp(&end).is_eq() || end.is_nan() && it.is_nan())
            );
        }
    }
}

fn functions_are_near_the_exact_numbers(isa: Isa) {
    check_functions::<f32>(isa);
    check_functions::<u16>(isa);
}

fn what_does_not_fit_is_refused() {
    let attention = Attention::new(1).expect("there are threads");
    let vector = [1.0; 3];
    let norm = |size, weight, bias| Norm {
        size,
        is_centered: false,
        weight,
        bias,
        epsilon: 1e-5,
        offset: 0.0,
    };
    let refused = |actual| {
        assert!(matches!(actual, Err(Error::Length { .. } | Error::Zero(_))));
    };
    let (mut stream, mut out) = ([7.0; 6], [7.0; 6]);
    for norm in [
        norm(0, None, None),
        norm(4, None, None),
        norm(2, Some(&vector), None),
        norm(2, None, Some(&vector)),
    ] {
        refused(attention.norm(&[1.0; 6], &norm, &mut out));
        refused(attention.add_norm(&mut stream, &[1.0; 6], 1.0, &norm, &mut out));
    }
    let fits = norm(3, Some(&vector), Some(&vector));
    refused(attention.add_norm(&mut stream, &[1.0; 3], 1.0, &fits, &mut out));
    refused(attention.add_norm(&mut stream, &[1.0; 6], 1.0, &fits, &mut out[..3]));
    refused(attention.norm(&[1.0; 3], &fits, &mut out));
    refused(attention.add(&mut stream, &[1.0; 5], 1.0));
    refused(attention.map(&[1.0; 5], Map::Sigmoid, &mut out));
    let gate = Gate::Activation(Activation::Silu);
    refused(attention.gate(&[1.0; 12], 0, gate, &mut out));
    refused(attention.gate(&[1.0; 12], 4, gate, &mut out));
    refused(attention.gate(&[1.0; 6], 3, gate, &mut out));
    assert_eq!((stream, out), ([7.0; 6], [7.0; 6]));
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &all(),
        norms_are_near_the_exact_numbers,
        functions_are_near_the_exact_numbers
    );
    at!(
        tests,
        &FLOATS,
        small_and_large_numbers_are_near_the_exact_ones
    );
    once!(tests, what_does_not_fit_is_refused);
}
