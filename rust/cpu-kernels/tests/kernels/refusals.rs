//! What does not fit is refused, with the value, and nothing is written.

use crate::levels::Tests;
use std::path::Path;

use cpu_kernels::{
    Attention, CacheArrays, CacheShape, Error, Options, Query, Rows, Sequences, SharedPrefixes,
    Step,
};

const SHAPE: CacheShape = CacheShape {
    num_blocks: 3,
    block_size: 2,
    kv_heads: 2,
    dim_k: 3,
    dim_v: 1,
};
const PLAIN: Options<'_> = Options {
    scaling: 1.0,
    window: None,
    first_key: 0,
    softcap: None,
    sinks: None,
};

fn step(starts: &[i32], lens: &[i32], tables: &[i32], width: usize) -> Result<Step, Error> {
    Step::new(
        &Sequences {
            starts,
            lens,
            tables,
            width,
        },
        3,
        2,
    )
}

/// Three sequences of five tokens on two blocks each that the first two have in common.
fn prefixes() {
    let tables = [0, 1, 2, 0, 1, 1, 0, 2, 2];
    let share = |order: &[i32], prefixes: &[i32]| {
        let step = step(&[0, 1, 2, 3], &[5, 5, 5], &tables, 3).expect("it fits");
        step.share(&SharedPrefixes { order, prefixes })
    };
    let refused =
        |order: &[i32], prefixes: &[i32]| share(order, prefixes).expect_err("it is refused");
    assert!(share(&[0, 1, 2], &[0, 3, 0, 1, -1, 0, 2, 1, 2, 0]).is_ok());
    assert!(share(&[2, 1, 0], &[]).is_ok());
    assert!(
        refused(&[0, 1], &[])
            .to_string()
            .contains("order has 2 elements")
    );
    assert!(
        refused(&[0, 1, 2], &[0, 3, 0, 1])
            .to_string()
            .contains("prefixes has 4 elements")
    );
    for (order, prefixes, prefix) in [
        ([0, 1, 2], &[0, 3, 0, 2, -1][..], 0), // the third has another second block
        ([0, 1, 2], &[0, 2, 0, 3, -1], 0),     // a new token is in it
        ([0, 1, 2], &[0, 2, 0, 9, -1], 0),
        ([0, 1, 2], &[0, 2, 0, 0, -1], 0),
        ([0, 1, 2], &[0, 2, 1, 2, -1], 0),
        ([0, 1, 2], &[0, 4, 0, 1, -1], 0),
        ([0, 1, 2], &[2, 1, 0, 1, -1], 0),
        ([0, 1, 2], &[0, -1, 0, 1, -1], 0),
        ([0, 1, 2], &[0, 2, 0, 1, 0], 0), // its own parent
        ([0, 3, 2], &[0, 2, 0, 1, -1], 0),
        ([0, -1, 2], &[0, 2, 0, 1, -1], 0),
        ([0, 1, 2], &[0, 2, 0, 1, -1, 1, 3, 1, 2, 0], 1), // beyond its parent
        ([0, 1, 2], &[0, 2, 0, 1, -1, 0, 2, 0, 2, 0], 1),
    ] {
        assert_eq!(
            refused(&order, prefixes),
            Error::Prefix { prefix },
            "{prefixes:?}"
        );
    }
}

/// Two prefixes side by side may not have a sequence in common: what it finds would go to one place.
fn prefixes_that_overlap() {
    let tables: Vec<i32> = (0..3).flat_map(|_| 0..=256).collect();
    let sequences = Sequences {
        starts: &[0, 1, 2, 3],
        lens: &[513; 3],
        tables: &tables,
        width: 257,
    };
    let step = || Step::new(&sequences, 257, 2).expect("it fits");
    let refused = |order: &[i32], prefixes: &[i32]| {
        let shared = SharedPrefixes { order, prefixes };
        step().share(&shared).expect_err("it is refused")
    };
    let overlapping = [0, 2, 0, 256, -1, 1, 3, 0, 256, -1];
    assert_eq!(
        refused(&[0, 1, 2], &overlapping),
        Error::Prefix { prefix: 1 }
    );
    assert_eq!(
        refused(&[0, 0, 2], &[0, 2, 0, 256, -1]),
        Error::Prefix { prefix: 0 }
    );
}

fn steps() {
    let said = |starts: &[i32], lens: &[i32], tables: &[i32], width: usize| {
        step(starts, lens, tables, width)
            .expect_err("it is refused")
            .to_string()
    };
    assert!(said(&[0, 1, 2], &[1], &[0], 1).contains("query_start_loc has 3 elements"));
    assert!(said(&[0, 1], &[1], &[0, 1, 2], 2).contains("block_tables has 3 elements"));
    assert!(said(&[1, 2], &[1], &[0], 1).contains("query_start_loc[0]=1"));
    assert!(said(&[0, 1, 0], &[1, 1], &[0, 0], 1).contains("query_start_loc[2]=0"));
    assert!(said(&[0, -1], &[1], &[0], 1).contains("query_start_loc[1]=-1"));
    assert!(said(&[0, 2], &[1], &[0], 1).contains("seq_lens[0]=1, but the sequence has 2"));
    assert!(said(&[0, 0], &[-1], &[0], 1).contains("seq_lens[0]=-1"));
    assert!(said(&[0, 1], &[5], &[0, 1], 2).contains("sequence 0 needs 3 blocks"));
    assert!(said(&[0, 1], &[3], &[0, 3], 2).contains("block 3 of sequence 0"));
    assert!(said(&[0, 1], &[3], &[-1, 0], 2).contains("block -1 of sequence 0"));
    let sequences = Sequences {
        starts: &[],
        lens: &[],
        tables: &[],
        width: usize::MAX,
    };
    assert!(matches!(
        Step::new(&sequences, 3, 2),
        Err(Error::Length { .. })
    ));
    assert_eq!(
        Step::new(&sequences, 3, 0).expect_err("it is refused"),
        Error::Zero("block_size")
    );
    let sequences = Sequences {
        starts: &[0, 1, 2],
        lens: &[1, 1],
        ..sequences
    };
    assert_eq!(
        Step::new(&sequences, 3, 2).expect_err("it is refused"),
        Error::TooLarge
    );
    assert_eq!(
        step(&[0, 1, 1], &[2, 6], &[2, 9, 9, 0, 1, 2], 3)
            .expect("it fits")
            .num_rows(),
        1
    );
}

/// Attends with one row over a cache that fits, but for what the caller changes.
fn attend(
    shape: CacheShape,
    lengths: [usize; 4],
    heads: usize,
    options: &Options<'_>,
) -> Result<Vec<f32>, Error> {
    let step = step(&[0, 1], &[3], &[2, 0], 2)?;
    let [keys, values, query, out] = lengths.map(|length| vec![1.0; length]);
    let (query, mut out) = (
        Query {
            rows: Rows::new(&query, 1, query.len(), query.len())?,
            heads,
        },
        out,
    );
    let attention = Attention::new(1)?;
    let actual = attention.attend(&step, &shape, &keys, &values, query, options, &mut out);
    if actual.is_err() {
        assert!(out.iter().all(|&float| float == 1.0));
    }
    actual.map(|()| out)
}

fn attending() {
    let fits = [36, 12, 12, 4];
    assert_eq!(attend(SHAPE, fits, 4, &PLAIN).expect("it fits"), [1.0; 4]);
    let said = |lengths, heads, options: &Options<'_>| {
        attend(SHAPE, lengths, heads, options)
            .expect_err("it is refused")
            .to_string()
    };
    assert!(said([35, 12, 12, 4], 4, &PLAIN).contains("the cache's keys has 35 elements"));
    assert!(said([36, 13, 12, 4], 4, &PLAIN).contains("the cache's values has 13 elements"));
    assert!(said([36, 12, 11, 4], 4, &PLAIN).contains("query has 11 elements"));
    assert!(said([36, 12, 12, 5], 4, &PLAIN).contains("out has 5 elements"));
    assert!(said(fits, 3, &PLAIN).contains("3 query heads cannot share 2 KV heads"));
    assert!(said(fits, 0, &PLAIN).contains("the number of query heads is 0"));
    let window = Options {
        window: Some(0),
        ..PLAIN
    };
    assert!(said(fits, 4, &window).contains("the sliding window is 0"));
    for cap in [0.0, -1.0, f32::NAN] {
        let softcap = Options {
            softcap: Some(cap),
            ..PLAIN
        };
        assert!(said(fits, 4, &softcap).contains(&format!("softcap={cap}")));
    }
    let sinks = Options {
        sinks: Some(&[1.0]),
        ..PLAIN
    };
    assert!(said(fits, 4, &sinks).contains("sinks has 1 elements"));
    let other = CacheShape {
        num_blocks: 2,
        block_size: 3,
        ..SHAPE
    };
    assert!(matches!(
        attend(other, fits, 4, &PLAIN),
        Err(Error::OtherCache { .. })
    ));
    for shape in [
        CacheShape {
            kv_heads: 0,
            ..SHAPE
        },
        CacheShape { dim_k: 0, ..SHAPE },
        CacheShape { dim_v: 0, ..SHAPE },
        CacheShape {
            block_size: 0,
            ..SHAPE
        },
    ] {
        assert!(matches!(
            attend(shape, fits, 4, &PLAIN),
            Err(Error::Zero(_))
        ));
    }
    let huge = CacheShape {
        dim_k: usize::MAX,
        ..SHAPE
    };
    assert_eq!(attend(huge, fits, 4, &PLAIN), Err(Error::TooLarge));
    assert_eq!(
        Attention::new(0).expect_err("it is refused"),
        Error::Zero("the number of threads")
    );
    let nothing = Path::new("/no/such/libgomp.so");
    let refused = Attention::with_openmp(2, nothing).expect_err("it is refused");
    assert!(
        matches!(&refused, Error::Threads(why) if why.contains("/no/such/libgomp.so")),
        "{refused}"
    );
}

/// Rows side by side, as many as `memory` has.
fn dense(memory: &[f32], count: usize) -> Rows<'_, f32> {
    let width = memory.len() / count;
    Rows::new(memory, count, width, width).expect("it fits")
}

fn writing() {
    let written = |slots: &[i64], keys: usize, values: usize| {
        let (mut cache_k, mut cache_v) = (vec![0.0; 36], vec![0.0; 12]);
        let (keys, values) = (vec![1.0; keys], vec![2.0; values]);
        let actual = Attention::new(2).expect("there are threads").write(
            &SHAPE,
            slots,
            dense(&keys, slots.len()),
            dense(&values, slots.len()),
            CacheArrays {
                keys: &mut cache_k[..],
                values: &mut cache_v[..],
            },
        );
        (actual, cache_k, cache_v)
    };
    let (actual, keys, values) = written(&[4, -1], 12, 4);
    assert_eq!(actual, Ok(()));
    let at =
        |cache: &[f32]| -> Vec<usize> { (0..cache.len()).filter(|&at| cache[at] != 0.0).collect() };
    assert_eq!(at(&keys), [24, 25, 26, 27, 28, 29]);
    assert_eq!(at(&values), [8, 9]);
    for (slots, keys, values) in [
        (&[0, 6][..], 12, 4),
        (&[0, -2], 12, 4),
        (&[0], 5, 2),
        (&[0], 6, 3),
    ] {
        let (actual, cache_k, cache_v) = written(slots, keys, values);
        assert!(matches!(
            actual,
            Err(Error::Slot { row: 1, .. } | Error::Length { .. })
        ));
        assert!(cache_k.iter().chain(&cache_v).all(|&float| float == 0.0));
    }
    let said = written(&[7], 6, 2)
        .0
        .expect_err("it is refused")
        .to_string();
    assert_eq!(
        said,
        "slot 7 of row 0 is neither -1 nor one of the 6 of the cache"
    );
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    once!(
        tests,
        prefixes,
        prefixes_that_overlap,
        steps,
        attending,
        writing
    );
}
