//! The kernel against attention written out in f64, on random steps, at each level of instructions.

use crate::levels::{FLOATS, HALVES, Tests, all, check};
use cpu_kernels::{
    Attend, Attention, CacheArrays, CacheShape, Element, Isa, Options, Query, Rows, Sequences,
    SharedPrefixes, Step, Stored,
};
use proptest::prelude::*;

/// Random steps of a test: `ATTENTION_CASES` of them, for emulated processors. On x86-64 plain loops call a function
/// for each product that is rounded once.
fn cases(isa: Isa) -> u32 {
    let cases = std::env::var("ATTENTION_CASES").map(|cases| cases.parse().expect("a number"));
    cases.unwrap_or(if isa == Isa::Portable { 16 } else { 48 })
}

/// A step with everything in it: keys and values by sequence, scattered over a cache of NaN.
#[derive(Debug)]
struct World {
    shape: CacheShape,
    heads: usize,
    /// New tokens and length of each sequence.
    sequences: Vec<(usize, usize)>,
    starts: Vec<i32>,
    lens: Vec<i32>,
    tables: Vec<i32>,
    width: usize,
    /// As `SharedPrefixes`; empty: the kernel shares nothing.
    order: Vec<i32>,
    prefixes: Vec<i32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    query: Vec<f32>,
    scaling: f32,
    window: Option<usize>,
    first_key: usize,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
}

fn narrow<E: Element>(floats: &[f32]) -> Vec<E> {
    floats.iter().map(|&one| E::narrow(one)).collect()
}

/// Numbers between -2 and 2 (SplitMix64, Steele et al., 2014).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        let float = |bits: u64| (bits >> 40) as f32 / (1u64 << 22) as f32 - 2.0;
        (0..count).map(|_| float(self.next())).collect()
    }
}

impl World {
    fn slot(&self, sequence: usize, position: usize) -> usize {
        let size = self.shape.block_size;
        let block = self.tables[sequence * self.width + position / size];
        block as usize * size + position % size
    }

    fn options(&self) -> Options<'_> {
        Options {
            scaling: self.scaling,
            window: self.window,
            first_key: self.first_key,
            softcap: self.softcap,
            sinks: self.sinks.as_deref(),
        }
    }

    fn attend(&self, attention: &Attention) -> Vec<f32> {
        self.attend_in(attention, f32::NAN)
    }

    /// Attends in the format of `nothing`, which stays in rows without attention.
    fn attend_in<E: Attend>(&self, attention: &Attention, nothing: E) -> Vec<E> {
        let (keys, values): (Vec<E>, Vec<E>) = (narrow(&self.keys), narrow(&self.values));
        self.attend_over(attention, nothing, &keys, &values)
    }

    /// The same over a cache in 8 bits, which keeps what `E` has of keys and values.
    fn attend_int8<E: Attend>(&self, attention: &Attention, nothing: E) -> Vec<E> {
        let (keys, values) = self.quantised::<E>(attention);
        self.attend_over(attention, nothing, &keys, &values)
    }

    /// Keys and values in 8 bits.
    fn quantised<E: Attend>(&self, attention: &Attention) -> (Vec<i8>, Vec<i8>) {
        let CacheShape {
            kv_heads,
            dim_k,
            dim_v,
            ..
        } = self.shape;
        let num_slots = self.shape.num_blocks * self.shape.block_size;
        let nothing = |dim: usize| vec![-1; num_slots * kv_heads * <i8 as Stored<E>>::width(dim)];
        let (mut keys, mut values) = (nothing(dim_k), nothing(dim_v));
        let slots: Vec<i64> = (0..num_slots as i64).collect();
        let floats: [Vec<E>; 2] = [narrow(&self.keys), narrow(&self.values)];
        let [key, value] = [(0, dim_k), (1, dim_v)].map(|(at, dim)| {
            let width = kv_heads * dim;
            Rows::new(&floats[at], num_slots, width, width).expect("it fits")
        });
        let cache = CacheArrays {
            keys: &mut keys[..],
            values: &mut values[..],
        };
        attention
            .write(&self.shape, &slots, key, value, cache)
            .expect("it fits");
        (keys, values)
    }

    /// With the keys and values that a cache in 8 bits has.
    fn dequantised<E: Attend>(&self) -> World {
        let (keys, values) = self.quantised::<E>(&threads(1, Isa::Portable));
        let floats = |heads: &[i8], dim: usize| {
            let heads = heads.chunks_exact(<i8 as Stored<E>>::width(dim));
            heads
                .flat_map(|head| {
                    let (numbers, scale) = head.split_at(dim);
                    let scale: [i8; 4] = scale.try_into().expect("a scale is four bytes");
                    let scale = f32::from_le_bytes(scale.map(i8::cast_unsigned));
                    numbers.iter().map(move |&number| f32::from(number) * scale)
                })
                .collect()
        };
        World {
            keys: floats(&keys, self.shape.dim_k),
            values: floats(&values, self.shape.dim_v),
            query: self.query.clone(),
            sequences: self.sequences.clone(),
            starts: self.starts.clone(),
            lens: self.lens.clone(),
            tables: self.tables.clone(),
            order: self.order.clone(),
            prefixes: self.prefixes.clone(),
            sinks: self.sinks.clone(),
            ..*self
        }
    }

    fn attend_over<E: Attend, C: Stored<E>>(
        &self,
        attention: &Attention,
        nothing: E,
        keys: &[C],
        values: &[C],
    ) -> Vec<E> {
        let sequences = Sequences {
            starts: &self.starts,
            lens: &self.lens,
            tables: &self.tables,
            width: self.width,
        };
        let shape = &self.shape;
        let step = Step::new(&sequences, shape.num_blocks, shape.block_size).expect("it fits");
        let shared = SharedPrefixes {
            order: &self.order,
            prefixes: &self.prefixes,
        };
        let step = match self.order.is_empty() {
            true => step,
            false => step.share(&shared).expect("it fits"),
        };
        let mut out = vec![nothing; step.num_rows() * self.heads * shape.dim_v];
        let (query, width): (Vec<E>, usize) = (narrow(&self.query), self.heads * shape.dim_k);
        let query = Query {
            rows: Rows::new(&query, step.num_rows(), width, width).expect("it fits"),
            heads: self.heads,
        };
        attention
            .attend(&step, shape, keys, values, query, &self.options(), &mut out)
            .expect("it fits");
        out
    }

    /// With numbers that bfloat16 has.
    fn rounded(self) -> World {
        let round = |floats: &[f32]| floats.iter().map(|&one| u16::narrow(one).widen()).collect();
        World {
            query: round(&self.query),
            keys: round(&self.keys),
            values: round(&self.values),
            ..self
        }
    }

    /// The same in f64, one row at a time.
    fn oracle(&self) -> Vec<f64> {
        let CacheShape {
            kv_heads,
            dim_k,
            dim_v,
            ..
        } = self.shape;
        let mut out = vec![];
        for (sequence, &(new, len)) in self.sequences.iter().enumerate() {
            for (row, position) in (len - new..len).enumerate() {
                let row = self.starts[sequence] as usize + row;
                let first = self
                    .window
                    .map_or(0, |window| (position + 1).saturating_sub(window))
                    .max(self.first_key.min(position));
                for head in 0..self.heads {
                    let kv_head = head / (self.heads / kv_heads);
                    let query = &self.query[(row * self.heads + head) * dim_k..][..dim_k];
                    let (mut total, mut sum) = (0.0, vec![0.0; dim_v]);
                    for seen in first..=position {
                        let at = self.slot(sequence, seen) * kv_heads + kv_head;
                        let key = &self.keys[at * dim_k..][..dim_k];
                        let dot = query
                            .iter()
                            .zip(key)
                            .map(|(&a, &b)| f64::from(a) * f64::from(b));
                        let mut score = dot.sum::<f64>() * f64::from(self.scaling);
                        if let Some(cap) = self.softcap.map(f64::from) {
                            score = cap * (score / cap).tanh();
                        }
                        total += score.exp();
                        let value = &self.values[at * dim_v..][..dim_v];
                        for (sum, &value) in sum.iter_mut().zip(value) {
                            *sum += score.exp() * f64::from(value);
                        }
                    }
                    if let Some(sinks) = &self.sinks {
                        total += f64::from(sinks[head]).exp();
                    }
                    out.extend(sum.iter().map(|sum| sum / total));
                }
            }
        }
        out
    }
}

prop_compose! {
    fn shapes()(
        block_size in 1..20usize, kv_heads in 1..4usize,
        dim_k in prop_oneof![1..20usize, Just(64), Just(96)],
        dim_v in prop_oneof![1..20usize, Just(64), Just(80)],
    ) -> CacheShape {
        CacheShape { num_blocks: 0, block_size, kv_heads, dim_k, dim_v }
    }
}

prop_compose! {
    /// Heads that the products of bfloat16 take.
    fn wide_shapes()(
        block_size in 1..20usize, kv_heads in 1..4usize,
        dim_k in prop::sample::select(vec![32usize, 64, 96]),
        dim_v in prop::sample::select(vec![32usize, 64, 96]),
    ) -> CacheShape {
        CacheShape { num_blocks: 0, block_size, kv_heads, dim_k, dim_v }
    }
}

fn worlds() -> impl Strategy<Value = World> {
    worlds_of(shapes())
}

fn wide_worlds() -> impl Strategy<Value = World> {
    worlds_of(wide_shapes())
}

fn any_worlds() -> impl Strategy<Value = World> {
    prop_oneof![worlds(), wide_worlds()]
}

prop_compose! {
    fn worlds_of(shapes: impl Strategy<Value = CacheShape>)(
        shape in shapes,
        group in 1..4usize,
        tokens in prop::collection::vec((prop_oneof![0..12usize, 0..80usize], prop_oneof![0..50usize, 0..700usize]), 1..5),
        window in prop::option::of(prop_oneof![1..40usize, 200..600usize]),
        softcap in prop::option::of(0.5f32..3.0),
        sinks in any::<bool>(),
        scaling in 0.05f32..0.5,
        first_key in prop_oneof![3 => Just(0usize), 1 => 1..300usize],
        seed in any::<u64>(),
    ) -> World {
        World { first_key, ..world(shape, group, &tokens, (scaling, window, softcap, sinks), seed) }
    }
}

fn world(
    mut shape: CacheShape,
    group: usize,
    tokens: &[(usize, usize)],
    (scaling, window, softcap, sinks): (f32, Option<usize>, Option<f32>, bool),
    seed: u64,
) -> World {
    let mut numbers = Numbers(seed);
    let sequences: Vec<_> = tokens
        .iter()
        .map(|&(new, before)| (new, new + before))
        .collect();
    let blocks = |len: usize| len.div_ceil(shape.block_size);
    let width = sequences
        .iter()
        .map(|&(_, len)| blocks(len))
        .max()
        .expect("it fits");
    shape.num_blocks = sequences.iter().map(|&(_, len)| blocks(len)).sum::<usize>() + 3;
    let mut ids: Vec<i32> = (0..shape.num_blocks as i32).collect();
    for at in (1..ids.len()).rev() {
        ids.swap(at, (numbers.next() % (at as u64 + 1)) as usize);
    }
    let (mut tables, mut starts) = (vec![], vec![0]);
    for &(new, len) in &sequences {
        let mut row = ids.split_off(ids.len() - blocks(len));
        row.resize(width, -7); // past its end nothing is looked at
        tables.extend(row);
        starts.push(starts.last().expect("it fits") + new as i32);
    }
    let rows = starts[sequences.len()] as usize;
    let heads = shape.kv_heads * group;
    let slots = shape.num_blocks * shape.block_size;
    let mut world = World {
        shape,
        heads,
        lens: sequences.iter().map(|&(_, len)| len as i32).collect(),
        sequences,
        starts,
        tables,
        width,
        order: vec![],
        prefixes: vec![],
        keys: vec![f32::NAN; slots * shape.kv_heads * shape.dim_k],
        values: vec![f32::NAN; slots * shape.kv_heads * shape.dim_v],
        query: numbers.floats(rows * heads * shape.dim_k),
        scaling,
        window,
        first_key: 0,
        softcap,
        sinks: sinks.then(|| numbers.floats(heads)),
    };
    let attention = Attention::new(2).expect("there are threads");
    for (sequence, (_, len)) in world.sequences.clone().into_iter().enumerate() {
        let slots: Vec<i64> = (0..len).map(|at| world.slot(sequence, at) as i64).collect();
        let widths = (shape.kv_heads * shape.dim_k, shape.kv_heads * shape.dim_v);
        let keys = numbers.floats(len * widths.0);
        let values = numbers.floats(len * widths.1);
        let cache = CacheArrays {
            keys: &mut world.keys[..],
            values: &mut world.values[..],
        };
        attention
            .write(
                &shape,
                &slots,
                dense(&keys, len, widths.0),
                dense(&values, len, widths.1),
                cache,
            )
            .expect("it fits");
    }
    world
}

impl World {
    /// All sequences stand on the blocks of the one that has computed most, as far as the shortest has
    /// computed; the longer half of them also as far as the shortest of these has. Returns what is shared.
    fn put_on_one_prefix(&mut self) -> (Vec<i32>, Vec<i32>) {
        let size = self.shape.block_size;
        let computed = |&sequence: &usize| {
            let (new, len) = self.sequences[sequence];
            len.min(len - new + 1) / size // the first new token sees its own position, too
        };
        let mut order: Vec<usize> = (0..self.sequences.len()).collect();
        order.sort_by_key(|sequence| usize::MAX - computed(sequence));
        let (all, half) = (order.len(), order.len().div_ceil(2));
        let (outer, inner) = (computed(&order[all - 1]), computed(&order[half - 1]));
        for (row, &sequence) in order.iter().enumerate() {
            let shared = if row < half { inner } else { outer };
            let from = order[0] * self.width;
            let shared: Vec<i32> = self.tables[from..][..shared].to_vec();
            self.tables[sequence * self.width..][..shared.len()].copy_from_slice(&shared);
        }
        let mut prefixes = vec![];
        if outer > 0 {
            prefixes.extend([0, all, 0, outer, usize::MAX].map(|number| number as i32));
        }
        if inner > outer {
            let parent = if outer > 0 { 0 } else { -1 };
            prefixes.extend([0, half as i32, outer as i32, inner as i32, parent]);
        }
        (order.iter().map(|&one| one as i32).collect(), prefixes)
    }
}

/// Rows side by side.
fn dense(memory: &[f32], count: usize, width: usize) -> Rows<'_, f32> {
    Rows::new(memory, count, width, width).expect("it fits")
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|float| float.to_bits()).collect()
}

/// Threads that compute at this level.
fn threads(num_threads: usize, isa: Isa) -> Attention {
    Attention::with_isa(num_threads, isa).expect("it is there")
}

fn every_row_sees_what_it_should_and_nothing_else(isa: Isa) {
    check(cases(isa), worlds(), |world| {
        let out = world.attend(&threads(1, isa));
        let oracle = world.oracle();
        prop_assert_eq!(out.len(), oracle.len());
        for (actual, exact) in out.iter().zip(oracle) {
            let error = (f64::from(*actual) - exact).abs();
            prop_assert!(error < 2e-5, "{} is not {}", actual, exact);
        }
        Ok(())
    });
}

fn levels_and_threads_give_the_same_bits(isa: Isa) {
    check(cases(isa), worlds(), |world| {
        let one = bits(&world.attend(&threads(1, Isa::Portable)));
        for num_threads in 1..4 {
            prop_assert_eq!(&one, &bits(&world.attend(&threads(num_threads, isa))));
        }
        Ok(())
    });
}

fn bfloat16_is_float32_that_was_rounded(isa: Isa) {
    check(cases(isa), worlds(), |world| {
        let rounded = world.rounded();
        let exact = rounded.attend(&threads(1, Isa::Portable));
        let exact: Vec<u16> = exact.into_iter().map(u16::narrow).collect();
        for num_threads in 1..4 {
            let actual = rounded.attend_in(&threads(num_threads, isa), u16::narrow(f32::NAN));
            prop_assert_eq!(&exact, &actual);
        }
        Ok(())
    });
}

fn eight_bits_have_the_bits_of_what_they_stand_for(isa: Isa) {
    check(cases(isa), worlds(), |world| {
        let plain = threads(1, Isa::Portable);
        let exact = bits(&world.dequantised::<f32>().attend(&plain));
        for num_threads in 1..4 {
            let attention = threads(num_threads, isa);
            prop_assert_eq!(&exact, &bits(&world.attend_int8(&attention, f32::NAN)));
        }
        let rounded = world.rounded();
        let dequantised = rounded.dequantised::<u16>().attend(&plain);
        let narrowed: Vec<u16> = dequantised.into_iter().map(u16::narrow).collect();
        for num_threads in 1..4 {
            let attention = threads(num_threads, isa);
            let actual = rounded.attend_int8(&attention, u16::narrow(f32::NAN));
            prop_assert_eq!(&narrowed, &actual);
        }
        Ok(())
    });
}

/// As [`products_of_bfloat16_are_near`]: what is rounded is weights times scales.
fn eight_bits_in_products_of_bfloat16_are_near(isa: Isa) {
    check(cases(isa), wide_worlds(), |world| {
        let rounded = world.rounded();
        let oracle = rounded.dequantised::<u16>().oracle();
        for num_threads in [1, 2] {
            let out = rounded.attend_int8(&threads(num_threads, isa), 0_u16);
            for (actual, exact) in out.iter().zip(&oracle) {
                let actual = f64::from(actual.widen());
                let error = (actual - exact).abs();
                prop_assert!(
                    error < 8e-3 + exact.abs() / 200.0,
                    "{} is not {}",
                    actual,
                    exact
                );
            }
        }
        Ok(())
    });
}

/// The weights too are rounded there, to 1 in 512 parts.
fn products_of_bfloat16_are_near(isa: Isa) {
    check(cases(isa), wide_worlds(), |world| {
        let rounded = world.rounded();
        let oracle = rounded.oracle();
        for num_threads in [1, 2] {
            let out = rounded.attend_in(&threads(num_threads, isa), 0);
            for (actual, exact) in out.iter().zip(&oracle) {
                let actual = f64::from(actual.widen());
                let error = (actual - exact).abs();
                prop_assert!(
                    error < 8e-3 + exact.abs() / 200.0,
                    "{} is not {}",
                    actual,
                    exact
                );
            }
        }
        Ok(())
    });
}

fn a_row_depends_on_itself_alone(isa: Isa) {
    check(cases(isa), any_worlds(), |world| {
        let attention = threads(1, isa);
        let together = world.attend(&attention);
        let rounded = world.attend_in(&attention, 0);
        let quantised = world.attend_int8(&attention, 0_u16);
        let (per_query, per_row) = (
            world.heads * world.shape.dim_k,
            world.heads * world.shape.dim_v,
        );
        for (sequence, &(new, len)) in world.sequences.iter().enumerate() {
            for at in 0..new {
                let row = world.starts[sequence] as usize + at;
                let alone = World {
                    sequences: vec![(1, len - new + at + 1)],
                    starts: vec![0, 1],
                    lens: vec![(len - new + at + 1) as i32],
                    tables: world.tables[sequence * world.width..][..world.width].to_vec(),
                    order: vec![],
                    prefixes: vec![],
                    query: world.query[row * per_query..][..per_query].to_vec(),
                    keys: world.keys.clone(),
                    values: world.values.clone(),
                    sinks: world.sinks.clone(),
                    ..world
                };
                let out = alone.attend(&attention);
                prop_assert_eq!(bits(&out), bits(&together[row * per_row..][..per_row]));
                let out = alone.attend_in(&attention, 0);
                prop_assert_eq!(&out, &rounded[row * per_row..][..per_row]);
                let out = alone.attend_int8(&attention, 0_u16);
                prop_assert_eq!(&out, &quantised[row * per_row..][..per_row]);
            }
        }
        Ok(())
    });
}

fn reading_a_shared_prefix_once_changes_no_bit(isa: Isa) {
    check(cases(isa), any_worlds(), |mut world| {
        let (order, prefixes) = world.put_on_one_prefix();
        let one = threads(1, isa);
        let exact = bits(&world.attend(&one));
        let rounded = world.attend_in(&one, u16::narrow(f32::NAN));
        let quantised = world.attend_int8(&one, u16::narrow(f32::NAN));
        (world.order, world.prefixes) = (order, prefixes);
        for num_threads in [1, 3] {
            let attention = threads(num_threads, isa);
            prop_assert_eq!(&exact, &bits(&world.attend(&attention)));
            let actual = world.attend_in(&attention, u16::narrow(f32::NAN));
            prop_assert_eq!(&rounded, &actual);
            let actual = world.attend_int8(&attention, u16::narrow(f32::NAN));
            prop_assert_eq!(&quantised, &actual);
        }
        Ok(())
    });
}

/// Parts after the shared one belong to the longer sequence alone.
fn a_shared_part_is_the_last_of_one_and_not_of_the_other(isa: Isa) {
    let shape = CacheShape {
        num_blocks: 0,
        block_size: 16,
        kv_heads: 1,
        dim_k: 16,
        dim_v: 16,
    };
    for tokens in [
        [(1, 255), (1, 256)],
        [(1, 256), (1, 255)],
        [(1, 511), (1, 999)],
    ] {
        let mut world = world(shape, 2, &tokens, (0.25, None, None, false), 7);
        let (order, prefixes) = world.put_on_one_prefix();
        let attention = threads(1, isa);
        let exact = bits(&world.attend(&attention));
        (world.order, world.prefixes) = (order, prefixes);
        assert_eq!(exact, bits(&world.attend(&attention)));
    }
}

/// Enough work for every thread to take some: the small steps above are done by the caller alone. With many threads
/// the long rows are cut into parts that several take.
fn threads_share_a_large_step(isa: Isa) {
    let shape = CacheShape {
        num_blocks: 0,
        block_size: 16,
        kv_heads: 2,
        dim_k: 64,
        dim_v: 64,
    };
    let mut tokens: Vec<_> = (0..9).map(|number| (1, 300 + 97 * number)).collect();
    tokens.extend([(70, 700), (300, 0)]);
    for (window, sinks) in [(None, true), (Some(290), false)] {
        let world = world(shape, 4, &tokens, (0.125, window, None, sinks), 5).rounded();
        let alone = threads(1, isa);
        let one = bits(&world.attend(&alone));
        let half = world.attend_in(&alone, 0);
        let (counts, repeats): (&[usize], _) = match cases(isa) < 48 {
            true => (&[3, 64], 1),
            false => (&[2, 3, 8, 64], 5),
        };
        for &num_threads in counts {
            let attention = threads(num_threads, isa);
            for _ in 0..repeats {
                assert_eq!(one, bits(&world.attend(&attention)));
                assert_eq!(half, world.attend_in(&attention, 0));
            }
        }
        let actual = world.attend(&threads(2, isa));
        for (actual, exact) in actual.iter().zip(world.oracle()) {
            assert!(
                (f64::from(*actual) - exact).abs() < 2e-6,
                "{actual} is not {exact}"
            );
        }
    }
}

/// Far from the first scores, up and down: what they are measured against has to move on.
fn scores_that_climb_and_fall(isa: Isa) {
    let shape = CacheShape {
        num_blocks: 0,
        block_size: 16,
        kv_heads: 1,
        dim_k: 32,
        dim_v: 16,
    };
    for slope in [0.02, -0.02, 0.9, -0.9] {
        let mut world = world(shape, 3, &[(40, 600)], (1.0, None, None, false), 3);
        let slot = |at: usize| world.slot(0, at) * 32;
        let slots: Vec<usize> = (0..640).map(slot).collect();
        for (at, slot) in slots.into_iter().enumerate() {
            world.keys[slot..][..32].fill(at as f32 * slope / 32.0);
        }
        world.query.fill(1.0);
        let world = world.rounded();
        let oracle = world.oracle();
        let attention = threads(1, isa);
        let floats = world.attend(&attention);
        let halves = world.attend_in(&attention, 0);
        for ((float, half), exact) in floats.iter().zip(halves).zip(oracle) {
            assert!(
                (f64::from(*float) - exact).abs() < 1e-4,
                "{float} is not {exact}"
            );
            let half = f64::from(half.widen());
            assert!(
                (half - exact).abs() < 8e-3 + exact.abs() / 200.0,
                "{half} is not {exact}"
            );
        }
    }
}

fn scores_that_leave_no_room_for_others(isa: Isa) {
    let shape = CacheShape {
        num_blocks: 0,
        block_size: 4,
        kv_heads: 1,
        dim_k: 8,
        dim_v: 8,
    };
    let world = world(shape, 1, &[(1, 600), (3, 2)], (90.0, None, None, true), 1);
    let out = world.attend(&threads(1, isa));
    for (actual, exact) in out.iter().zip(world.oracle()) {
        assert!(
            exact.is_nan() || (f64::from(*actual) - exact).abs() < 1e-3,
            "{actual} is not {exact}"
        );
        assert!(actual.is_finite());
    }
}

/// Rows of one vector differ in what they see of a tile.
fn what_a_row_does_not_see_may_be_infinite(isa: Isa) {
    for (dim, window) in [(20, None), (64, None), (64, Some(17))] {
        let shape = CacheShape {
            num_blocks: 0,
            block_size: 4,
            kv_heads: 1,
            dim_k: dim,
            dim_v: dim,
        };
        let mut world = world(shape, 3, &[(41, 30)], (0.2, window, None, false), 1);
        let finite = world.attend(&threads(1, isa));
        let slot = world.slot(0, 60);
        for (element, wrong) in [f32::INFINITY, f32::NAN].into_iter().enumerate() {
            world.keys[slot * dim + element] = wrong;
            world.values[slot * dim + element] = wrong;
        }
        let actual = world.attend(&threads(1, isa));
        let per_row = world.heads * dim;
        let rows = actual.chunks(per_row).zip(finite.chunks(per_row));
        for (position, (actual, finite)) in (30..).zip(rows) {
            let is_seen = position >= 60 && window.is_none_or(|window| position - 60 < window);
            assert_eq!(bits(actual) != bits(finite), is_seen, "{position}");
        }
    }
}

/// Attention takes the level that is named: a mistake in a name is no lower level.
fn a_level_that_is_not_there_is_refused() {
    for isa in Isa::ALL {
        assert_eq!(Attention::with_isa(1, isa).is_ok(), isa.is_there());
    }
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &FLOATS,
        every_row_sees_what_it_should_and_nothing_else,
        levels_and_threads_give_the_same_bits,
        bfloat16_is_float32_that_was_rounded
    );
    at!(tests, &HALVES, products_of_bfloat16_are_near);
    at!(
        tests,
        &FLOATS,
        eight_bits_have_the_bits_of_what_they_stand_for
    );
    at!(tests, &HALVES, eight_bits_in_products_of_bfloat16_are_near);
    at!(
        tests,
        &all(),
        a_row_depends_on_itself_alone,
        reading_a_shared_prefix_once_changes_no_bit,
        a_shared_part_is_the_last_of_one_and_not_of_the_other,
        threads_share_a_large_step,
        scores_that_climb_and_fall
    );
    at!(
        tests,
        &FLOATS,
        scores_that_leave_no_room_for_others,
        what_a_row_does_not_see_may_be_infinite
    );
    once!(tests, a_level_that_is_not_there_is_refused);
}
