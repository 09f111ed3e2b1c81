//! RMSNorm against f64, and the same bits at all levels and by any number of threads.

use crate::levels::{Tests, all};
use cpu_kernels::{Attention, Element, Error, Isa};

fn rows(count: usize, size: usize) -> Vec<f32> {
    let float = |at: usize| (at * 7919 % 4001) as f32 / 500.0 - 4.0;
    (0..count * size).map(float).collect()
}

fn every_level_gives_the_same_bits_near_the_exact_numbers(isa: Isa) {
    for size in [1, 15, 16, 48, 577] {
        let (count, epsilon) = (200, 1e-5);
        let (rows, weight) = (rows(count, size), rows(1, size));
        let normal = |isa, threads| {
            let attention = Attention::with_isa(threads, isa).expect("there are threads");
            let mut out = vec![f32::NAN; rows.len()];
            let narrow = |floats: &[f32]| -> Vec<u16> {
                floats.iter().map(|&one| u16::narrow(one)).collect()
            };
            let (halves, half_weight) = (narrow(&rows), narrow(&weight));
            let (mut half, mut mixed) = (vec![0; rows.len()], vec![0; rows.len()]);
            let fits = attention.rms_norm(&rows, &weight, epsilon, &mut out);
            fits.and_then(|()| attention.rms_norm(&halves, &half_weight, epsilon, &mut half))
                .and_then(|()| attention.rms_norm(&halves, &weight, epsilon, &mut mixed))
                .expect("it fits");
            let wide = halves.iter().map(|half| half.widen()).collect::<Vec<_>>();
            let mut rounded_once = vec![0.0; rows.len()];
            let fits = attention.rms_norm(&wide, &weight, epsilon, &mut rounded_once);
            fits.expect("it fits");
            assert_eq!(mixed, narrow(&rounded_once));
            (out.into_iter().map(f32::to_bits).collect::<Vec<_>>(), half)
        };
        let actual = normal(isa, 1);
        assert!(actual == normal(isa, 3) && actual == normal(Isa::Portable, 2));
        for (row, out) in rows.chunks(size).zip(actual.0.chunks(size)) {
            let squares = row.iter().map(|&one| f64::from(one).powi(2)).sum::<f64>();
            let scale = 1.0 / (squares / size as f64 + f64::from(epsilon)).sqrt();
            for ((&one, &weight), &bits) in row.iter().zip(&weight).zip(out) {
                let exact = f64::from(one) * scale * f64::from(weight);
                assert!((f64::from(f32::from_bits(bits)) - exact).abs() <= 1e-6 * exact.abs());
            }
        }
    }
}

fn what_does_not_fit_is_refused() {
    let attention = Attention::new(1).expect("there are threads");
    let mut out = [7.0; 6];
    for (rows, weight) in [(6, 0), (5, 3), (6, 4), (9, 3)] {
        let actual = attention.rms_norm(&vec![1.0; rows], &vec![1.0; weight], 1e-5, &mut out);
        assert!(matches!(actual, Err(Error::Length { .. } | Error::Zero(_))));
    }
    assert_eq!(out, [7.0; 6]);
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &all(),
        every_level_gives_the_same_bits_near_the_exact_numbers
    );
    once!(tests, what_does_not_fit_is_refused);
}
