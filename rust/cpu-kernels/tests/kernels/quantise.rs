//! Floats that are rounded to 4 and 8 bits: the codes of a plain computation, with the same bits at all levels and by any
//! number of threads.

use std::sync::LazyLock;

use crate::levels::{Tests, all};
use cpu_kernels::{Attention, Element, Error, Isa, QuantizedFormat, QuantizedWeight};

const GROUP: usize = 32;
const BYTES: usize = 34;

/// Codes, scales and zero points.
#[derive(Debug, PartialEq)]
struct Groups(Vec<u8>, Vec<u32>, Vec<u8>);

fn attention(isa: Isa, threads: usize) -> Attention {
    Attention::with_isa(threads, isa).expect("there are threads")
}

fn groups<E: Element>(attention: &Attention, weight: &[E], inputs: usize) -> Groups {
    let count = weight.len() / GROUP;
    let (mut codes, mut scales, mut zeros) =
        (vec![9; count * 16], vec![7.0; count], vec![8; count]);
    attention
        .quantise_groups(weight, inputs, &mut codes, &mut scales, &mut zeros)
        .expect("it fits");
    Groups(
        codes,
        scales.iter().map(|scale| scale.to_bits()).collect(),
        zeros,
    )
}

fn blocks<E: Element>(attention: &Attention, weight: &[E], inputs: usize) -> Vec<u8> {
    let mut blocks = vec![9; weight.len() / GROUP * BYTES];
    attention
        .quantise_q8_0(weight, inputs, &mut blocks)
        .expect("it fits");
    blocks
}

/// Groups of all kinds: of any size, with one sign, coarse, of one number, of zeros, with an outlier, of any finite bits.
fn weight(count: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let mut actual = vec![];
    for number in 0..count {
        let size = 2f32.powi((next() % 250) as i32 - 125);
        let outlier = next() as usize % GROUP;
        for at in 0..GROUP {
            let float = next() as f32 / 2f32.powi(31) - 1.0;
            let bits = f32::from_bits(next());
            actual.push(match number % 9 {
                0 => float * size,
                1 => float.abs() * size,
                2 => -float.abs() * size,
                3 => (float * 4.0).round() * size,
                4 => size,
                5 if at == 3 => f32::from_bits(1),
                5 => 0.0,
                6 if at == outlier => 20.0,
                7 if bits.is_finite() => bits,
                8 => float * 65_504.0 * 16.0,
                _ => float,
            });
        }
    }
    actual
}

/// The nearest half of a scale that is not negative, found among all of them.
fn nearest_half(float: f32) -> u16 {
    static HALVES: LazyLock<Vec<f64>> = LazyLock::new(|| (0..=0x7c00).map(value_of_half).collect());
    let halves = &*HALVES;
    let above = halves.partition_point(|&half| half < f64::from(float));
    let Some(below) = above.checked_sub(1) else {
        return 0;
    };
    let above = above.min(0x7c00);
    let distances = [below, above].map(|half| (halves[half] - f64::from(float)).abs());
    let is_below = distances[0] < distances[1] || (distances[0] == distances[1] && below % 2 == 0);
    (if is_below { below } else { above }) as u16
}

/// The value of a half by its definition; 2^16 for infinity, to which numbers from 65,520 on are nearest.
fn value_of_half(half: u16) -> f64 {
    let (exponent, fraction) = (i32::from(half >> 10), f64::from(half & 0x3ff));
    match exponent {
        0 => fraction * 2f64.powi(-24),
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    }
}

/// The groups of a plain computation.
fn plain_groups(weight: &[f32]) -> Groups {
    let mut actual = Groups(vec![], vec![], vec![]);
    for group in weight.chunks(GROUP) {
        let low = group.iter().copied().fold(0.0, f32::min);
        let high = group.iter().copied().fold(0.0, f32::max);
        let tries = [1.0, 0.93, 0.86].map(|span: f32| {
            let scale = match (high - low) * span / 15.0 {
                0.0 => 1.0,
                float if (2f32.powi(-14)..=65_504.0).contains(&float) => {
                    value_of_half(nearest_half(float)) as f32
                }
                float => float,
            };
            let zero = (-low * span / scale).round_ties_even().clamp(0.0, 15.0);
            let code = |&float: &f32| (float / scale + zero).round_ties_even().clamp(0.0, 15.0);
            let codes: Vec<f32> = group.iter().map(code).collect();
            let error = |at: usize| {
                let error = (codes[at] - zero) * scale - group[at];
                error * error
            };
            // Eight sums side by side.
            let sums = (0..8).map(|lane| (0..4).map(|part| error(8 * part + lane)).sum::<f32>());
            (sums.sum::<f32>(), scale, zero, codes)
        });
        let best = (1..3).fold(0, |best, at| {
            if tries[at].0 < tries[best].0 {
                at
            } else {
                best
            }
        });
        let (_, scale, zero, codes) = &tries[best];
        let pairs = codes.chunks(2);
        actual
            .0
            .extend(pairs.map(|pair| pair[0] as u8 | (pair[1] as u8) << 4));
        actual.1.push(scale.to_bits());
        actual.2.push(*zero as u8);
    }
    actual
}

/// The blocks of a plain computation.
fn plain_blocks(weight: &[f32]) -> Vec<u8> {
    let mut actual = vec![];
    for group in weight.chunks(GROUP) {
        let size = group
            .iter()
            .fold(0.0, |size: f32, float| size.max(float.abs()));
        let half = nearest_half(size / 127.0);
        let scale = match half {
            0x7c00 => f32::INFINITY,
            half => value_of_half(half) as f32,
        };
        actual.extend(half.to_le_bytes());
        let divisor = scale.max(2f32.powi(-14));
        let number = |float: &f32| (float / divisor).round_ties_even().clamp(-127.0, 127.0);
        actual.extend(group.iter().map(|float| number(float) as i8 as u8));
    }
    actual
}

fn codes_are_those_of_a_plain_computation(isa: Isa) {
    let weight = weight(900);
    let attention = attention(isa, 1);
    assert!(groups(&attention, &weight, 3 * GROUP) == plain_groups(&weight));
    assert!(blocks(&attention, &weight, 3 * GROUP) == plain_blocks(&weight));
}

fn threads_and_formats_of_the_weight_change_nothing(isa: Isa) {
    let floats = weight(2 * 1300);
    let halves: Vec<u16> = floats.iter().map(|&float| u16::narrow(float)).collect();
    let halves: Vec<u16> = halves
        .into_iter()
        .map(|half| if half.widen().is_finite() { half } else { 0 })
        .collect();
    let widened: Vec<f32> = halves.iter().map(|half| half.widen()).collect();
    let plain = attention(Isa::Portable, 1);
    for threads in [1, 2, 5] {
        let attention = attention(isa, threads);
        for inputs in [GROUP, 2 * GROUP, floats.len()] {
            assert!(groups(&attention, &floats, inputs) == groups(&plain, &floats, GROUP));
            assert!(blocks(&attention, &floats, inputs) == blocks(&plain, &floats, GROUP));
        }
        assert!(groups(&attention, &halves, GROUP) == groups(&plain, &widened, GROUP));
        assert!(blocks(&attention, &halves, GROUP) == blocks(&plain, &widened, GROUP));
    }
}

fn numbers_that_are_not_finite_give_such_scales(isa: Isa) {
    let attention = attention(isa, 1);
    for (at, number) in [f32::NAN, f32::INFINITY, -f32::INFINITY]
        .into_iter()
        .enumerate()
    {
        let mut weight = weight(6);
        weight[2 * GROUP..3 * GROUP].fill(0.5);
        weight[2 * GROUP + 13 * at] = number;
        let Groups(codes, scales, zeros) = groups(&attention, &weight, 2 * GROUP);
        let scales: Vec<f32> = scales.into_iter().map(f32::from_bits).collect();
        let expected = Error::Scale {
            output: 1,
            input: 0,
        };
        let zeros = Some(&zeros[..]);
        let refused = QuantizedWeight::from_groups(&codes, &scales, zeros, GROUP, 2 * GROUP, 3);
        assert_eq!(refused.expect_err("a scale is not finite"), expected);
        let blocks = blocks(&attention, &weight, 2 * GROUP);
        let refused = QuantizedWeight::pack(QuantizedFormat::Q8_0, &blocks, 2 * GROUP, 3);
        assert_eq!(refused.expect_err("a scale is not finite"), expected);
    }
}

fn what_does_not_fit_is_refused() {
    let attention = attention(Isa::Portable, 1);
    let weight = [1.0f32; 128];
    for (inputs, length, sizes) in [
        (0, 128, [64, 4, 4]),
        (48, 128, [64, 4, 4]),
        (96, 128, [64, 4, 4]),
        (64, 120, [64, 4, 4]),
        (64, 128, [63, 4, 4]),
        (64, 128, [64, 5, 4]),
        (64, 128, [64, 4, 3]),
    ] {
        let [mut codes, mut zeros] = [vec![7; sizes[0]], vec![7; sizes[2]]];
        let mut scales = vec![7.0; sizes[1]];
        let weight = &weight[..length];
        let error = attention.quantise_groups(weight, inputs, &mut codes, &mut scales, &mut zeros);
        let is_inputs = matches!(error, Err(Error::Inputs { .. }));
        assert_eq!(is_inputs, inputs % GROUP != 0 || inputs == 0, "{error:?}");
        assert!(is_inputs || matches!(error, Err(Error::Length { .. })));
        assert!(scales.iter().all(|&scale| scale == 7.0));
        assert!(codes.iter().chain(&zeros).all(|&byte| byte == 7));
    }
    for (inputs, length, size) in [(48, 128, 136), (64, 120, 136), (64, 128, 135)] {
        let mut blocks = vec![7; size];
        let error = attention.quantise_q8_0(&weight[..length], inputs, &mut blocks);
        error.expect_err("it does not fit");
        assert!(blocks.iter().all(|&byte| byte == 7));
    }
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &all(),
        codes_are_those_of_a_plain_computation,
        threads_and_formats_of_the_weight_change_nothing,
        numbers_that_are_not_finite_give_such_scales
    );
    once!(tests, what_does_not_fit_is_refused);
}
