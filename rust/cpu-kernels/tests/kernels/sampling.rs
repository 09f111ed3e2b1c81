//! Drawn tokens, largest logits and log-probabilities against plain f64, and the same bits at all levels, in every batch
//! and by any number of threads.

use crate::levels::{FLOATS, Tests};
use cpu_kernels::{Attention, Draws, Element, Error, Isa, Logprobs, Reported};

const VOCABULARIES: [usize; 6] = [1, 2, 63, 1000, 4097, 20_001];
const ROWS: usize = 5;

/// Logits of several kinds: spread out, with many equal ones, with a few large ones, with most of them barred.
fn logits(vocab_size: usize, seed: usize) -> Vec<f32> {
    let mut state = seed as u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let mut floats = vec![0.0; ROWS * vocab_size];
    for (row, floats) in floats.chunks_mut(vocab_size).enumerate() {
        for float in floats.iter_mut() {
            *float = match row {
                0 => next() * 20.0 - 10.0,
                1 => (next() * 8.0).floor() - 4.0,
                2 => {
                    next() * 3.0
                        + if next() < 20.0 / vocab_size as f32 {
                            12.0
                        } else {
                            0.0
                        }
                }
                3 if next() < 0.97 => f32::NEG_INFINITY,
                3 => next() * 5.0,
                _ => 0.5,
            };
        }
        floats[vocab_size - 1] = 0.5;
    }
    floats
}

fn narrow<E: Element>(floats: &[f32]) -> Vec<E> {
    floats.iter().map(|&float| E::narrow(float)).collect()
}

/// Temperature, min-p, top-k, top-p.
const SETTINGS: [[f64; 4]; 11] = [
    [0.8, 0.0, 0.0, 1.0],
    [1e30, 0.0, 0.0, 1.0],
    [1e-30, 0.0, 0.0, 1.0],
    [0.8, 0.0, 50.0, 1.0],
    [0.8, 0.0, 1.0, 1.0],
    [0.8, 0.0, 700.0, 0.9],
    [0.8, 0.0, 0.0, 0.9],
    [3.0, 0.0, 0.0, 0.999],
    [1.0, 0.05, 0.0, 1.0],
    [1.0, 0.05, 7.0, 0.5],
    [2.0, 1.0, 0.0, 1.0],
];
const NUMBERS: [f64; 4] = [0.0, 0.3, 0.77, 1.0 - f64::EPSILON / 2.0];

/// The token by a sort of the whole row.
fn expected(row: &[f32], [temperature, min_p, top_k, top_p]: [f64; 4], number: f64) -> i64 {
    let peak = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |&logit: &f32| {
        let power = ((f64::from(logit) - f64::from(peak)) / temperature).exp();
        if power < min_p { 0.0 } else { power }
    };
    let mut weights: Vec<f64> = row.iter().map(weight).collect();
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    let keep = |floor: f32, weights: &mut Vec<f64>| {
        for (weight, &logit) in weights.iter_mut().zip(row) {
            if logit < floor {
                *weight = 0.0;
            }
        }
    };
    if top_k > 0.0 && (top_k as usize) < row.len() {
        keep(row[order[top_k as usize - 1]], &mut weights);
    }
    if top_p < 1.0 {
        let limit = top_p * order.iter().map(|&id| weights[id]).sum::<f64>();
        let mut reached = 0.0;
        let last = order.iter().find(|&&id| {
            reached += weights[id];
            reached >= limit
        });
        keep(row[*last.expect("they add up")], &mut weights);
    }
    let target = number * weights.iter().sum::<f64>();
    let mut reached = 0.0;
    let token = weights.iter().position(|&weight| {
        reached += weight;
        reached > target
    });
    token.expect("the number is below 1") as i64
}

fn draw<E: Element>(
    attention: &Attention,
    logits: &[E],
    rows: &[i64],
    settings: [f64; 4],
    number: f64,
) -> Vec<i64> {
    let mut out = vec![-1; rows.len()];
    let [temperature, min_p, top_k, top_p] = settings.map(|it| vec![it; rows.len()]);
    let draws = Draws {
        rows,
        temperature: &temperature,
        min_p: &min_p,
        top_k: &top_k,
        top_p: &top_p,
        numbers: &vec![number; rows.len()],
    };
    let vocab_size = logits.len() / ROWS;
    attention
        .draw(logits, vocab_size, &draws, &mut out)
        .expect("they fit");
    out
}

fn attention(isa: Isa, threads: usize) -> Attention {
    Attention::with_isa(threads, isa).expect("there are threads")
}

fn draws_are_those_of_a_sort(isa: Isa) {
    fn check<E: Element>(isa: Isa) {
        for vocab_size in VOCABULARIES {
            let logits: Vec<E> = narrow(&logits(vocab_size, vocab_size));
            let floats: Vec<f32> = logits.iter().map(|it| it.widen()).collect();
            for settings in SETTINGS {
                for number in NUMBERS {
                    let rows: Vec<_> = floats.chunks(vocab_size).collect();
                    let expected: Vec<_> = rows
                        .iter()
                        .map(|row| expected(row, settings, number))
                        .collect();
                    for threads in [1, 3] {
                        let attention = attention(isa, threads);
                        let actual = draw(&attention, &logits, &[0, 1, 2, 3, 4], settings, number);
                        assert_eq!(actual, expected, "{vocab_size} {settings:?} {number}");
                    }
                    let alone = draw(&attention(isa, 1), &logits, &[3, 0], settings, number);
                    assert_eq!(alone, [expected[3], expected[0]]);
                }
            }
        }
    }
    check::<f32>(isa);
    check::<u16>(isa);
}

fn the_largest_is_the_first_of_equals(isa: Isa) {
    fn check<E: Element>(isa: Isa) {
        for vocab_size in [1, 2, 64, 700, 5000, 262_144] {
            let mut floats = logits(vocab_size, 3);
            floats[2 * vocab_size..3 * vocab_size].fill(f32::NEG_INFINITY);
            floats[4 * vocab_size - 1] = f32::NAN;
            floats[3 * vocab_size + vocab_size / 2] = -f32::NAN;
            let row: Vec<E> = narrow(&floats);
            let mut actual = vec![-1; ROWS];
            attention(isa, 2)
                .largest(&row, vocab_size, &mut actual)
                .expect("they fit");
            for (row, actual) in row.chunks(vocab_size).zip(actual) {
                let mut largest = 0;
                for (at, float) in row.iter().map(|it| it.widen()).enumerate() {
                    let before = row[largest].widen();
                    if float > before || (float.is_nan() && !before.is_nan()) {
                        largest = at;
                    }
                }
                assert_eq!(actual, largest as i64, "of {vocab_size}");
            }
        }
    }
    check::<f32>(isa);
    check::<u16>(isa);
}

fn rows_without_a_distribution_have_the_token_of_the_largest(isa: Isa) {
    let vocab_size = 3000;
    let mut floats = logits(vocab_size, 5);
    floats[7] = f32::NAN;
    floats[vocab_size..2 * vocab_size].fill(f32::NEG_INFINITY);
    floats[2 * vocab_size + 11] = f32::INFINITY;
    for settings in SETTINGS {
        let actual = draw(&attention(isa, 1), &floats, &[0, 1, 2], settings, 0.5);
        assert_eq!(actual, [7, 0, 11]);
    }
}

#[derive(Debug, PartialEq)]
struct Found {
    logprobs: Vec<u32>,
    ranks: Vec<i64>,
    top_ids: Vec<i64>,
    top_logprobs: Vec<u32>,
}

fn logprobs<E: Element>(
    attention: &Attention,
    logits: &[E],
    vocab_size: usize,
    (rows, token_ids, counts): (&[i64], &[i64], &[i64]),
) -> Found {
    let total = counts.iter().sum::<i64>() as usize;
    let (mut first, mut ranks) = (vec![0.0; rows.len()], vec![0; rows.len()]);
    let (mut top_ids, mut others) = (vec![0; total], vec![0.0; total]);
    let reported = Reported {
        rows,
        token_ids,
        counts,
    };
    let out = Logprobs {
        logprobs: &mut first,
        ranks: &mut ranks,
        top_ids: &mut top_ids,
        top_logprobs: &mut others,
    };
    attention
        .logprobs(logits, vocab_size, &reported, out)
        .expect("they fit");
    let bits = |floats: Vec<f32>| floats.into_iter().map(f32::to_bits).collect();
    Found {
        logprobs: bits(first),
        ranks,
        top_ids,
        top_logprobs: bits(others),
    }
}

fn log_probabilities_are_those_of_a_sort(isa: Isa) {
    fn check<E: Element>(isa: Isa) {
        for vocab_size in VOCABULARIES {
            let logits: Vec<E> = narrow(&logits(vocab_size, 9));
            let size = vocab_size as i64;
            let (rows, tokens) = ([4, 0, 1, 2, 3], [size - 1, 0, size / 2, size / 3, size - 1]);
            let counts = [size.min(5), size, 0, size.min(300), 1];
            let arguments = (&rows[..], &tokens[..], &counts[..]);
            let actual = logprobs(&attention(isa, 1), &logits, vocab_size, arguments);
            for other in [attention(isa, 3), attention(Isa::Portable, 2)] {
                assert_eq!(actual, logprobs(&other, &logits, vocab_size, arguments));
            }
            let mut first = 0;
            for at in 0..ROWS {
                let row = &logits[rows[at] as usize * vocab_size..][..vocab_size];
                let row: Vec<f64> = row.iter().map(|it| f64::from(it.widen())).collect();
                let mut order: Vec<usize> = (0..vocab_size).collect();
                order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
                let peak = row[order[0]];
                let sum: f64 = row.iter().map(|logit| (logit - peak).exp()).sum();
                let near = |bits: u32, id: usize| {
                    let (actual, exact) =
                        (f64::from(f32::from_bits(bits)), row[id] - peak - sum.ln());
                    assert!(
                        actual == exact || (actual - exact).abs() < 3e-6,
                        "{actual} for {exact}"
                    );
                };
                let token = tokens[at] as usize;
                near(actual.logprobs[at], token);
                let rank = order
                    .iter()
                    .position(|&id| id == token)
                    .expect("it is there")
                    + 1;
                assert_eq!(actual.ranks[at], rank as i64);
                let end = first + counts[at] as usize;
                for (rank_at, (&id, &bits)) in actual.top_ids[first..end]
                    .iter()
                    .zip(&actual.top_logprobs[first..end])
                    .enumerate()
                {
                    assert_eq!(id, order[rank_at] as i64);
                    near(bits, id as usize);
                }
                let one = (&rows[at..=at], &tokens[at..=at], &counts[at..=at]);
                let alone = logprobs(&attention(isa, 2), &logits, vocab_size, one);
                assert_eq!(alone.logprobs, [actual.logprobs[at]]);
                assert_eq!(alone.top_logprobs, actual.top_logprobs[first..end]);
                first = end;
            }
        }
    }
    check::<f32>(isa);
    check::<u16>(isa);
}

fn what_does_not_fit_is_refused() {
    let attention = Attention::new(1).expect("there are threads");
    let (logits, mut out) = ([0.0f32; 6], [7i64; 2]);
    assert_eq!(
        attention.largest(&logits, 0, &mut out),
        Err(Error::Zero("the vocabulary"))
    );
    for (vocab_size, out) in [(4, &mut [7i64; 1][..]), (3, &mut [7; 3]), (3, &mut [])] {
        assert!(matches!(
            attention.largest(&logits, vocab_size, out),
            Err(Error::Length { .. })
        ));
        assert!(out.iter().all(|&it| it == 7));
    }
    let ones = [1.0; 2];
    let draws = Draws {
        rows: &[0, 1],
        temperature: &ones,
        min_p: &ones,
        top_k: &ones,
        top_p: &ones,
        numbers: &[0.5; 2],
    };
    let index = |name, at, value, count| {
        Err(Error::Index {
            name,
            at,
            value,
            count,
        })
    };
    for value in [2, -1] {
        let draws = Draws {
            rows: &[0, value],
            ..draws
        };
        assert_eq!(
            attention.draw(&logits, 3, &draws, &mut out),
            index("rows", 1, value, 2)
        );
    }
    for draws in [
        Draws {
            temperature: &[1.0],
            ..draws
        },
        Draws {
            min_p: &[1.0],
            ..draws
        },
        Draws {
            top_k: &[1.0],
            ..draws
        },
        Draws {
            top_p: &[1.0],
            ..draws
        },
        Draws {
            numbers: &[0.0],
            ..draws
        },
        Draws {
            rows: &[0],
            ..draws
        },
    ] {
        let refused = attention.draw(&logits, 3, &draws, &mut out);
        assert!(matches!(refused, Err(Error::Length { .. })), "{refused:?}");
    }
    let reported = Reported {
        rows: &[0, 1],
        token_ids: &[0, 2],
        counts: &[1, 1],
    };
    let mut report = |reported: &Reported<'_>, count: usize| {
        let (mut floats, mut others) = ([7.0; 2], [7.0; 2]);
        let logprobs = Logprobs {
            logprobs: &mut floats,
            ranks: &mut [7; 2],
            top_ids: &mut out,
            top_logprobs: &mut others[..count],
        };
        let result = attention.logprobs(&logits, 3, reported, logprobs);
        assert!(result.is_ok() || floats == [7.0; 2]);
        result
    };
    assert_eq!(report(&reported, 2), Ok(()));
    assert!(matches!(report(&reported, 1), Err(Error::Length { .. })));
    let other = Reported {
        token_ids: &[0, 3],
        ..reported
    };
    assert_eq!(report(&other, 2), index("token_ids", 1, 3, 3));
    let other = Reported {
        counts: &[4, 1],
        ..reported
    };
    assert_eq!(report(&other, 2), index("counts", 0, 4, 4));
    let other = Reported {
        counts: &[1],
        ..reported
    };
    assert!(matches!(report(&other, 1), Err(Error::Length { .. })));
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &FLOATS,
        draws_are_those_of_a_sort,
        the_largest_is_the_first_of_equals,
        rows_without_a_distribution_have_the_token_of_the_largest,
        log_probabilities_are_those_of_a_sort
    );
    once!(tests, what_does_not_fit_is_refused);
}
