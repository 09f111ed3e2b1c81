//! Rotations against f64, one head at a time; the same bits at all levels and by all threads.

use crate::levels::{Tests, all, check};
use cpu_kernels::{
    Attend, Attention, CacheArrays, CacheShape, Element, Error, HeadNorm, Isa, Layout, NewRows,
    Order, Rotation, Rows,
};
use proptest::prelude::*;

/// Random rotations of a test.
const CASES: u32 = 64;

fn floats(count: usize, seed: usize) -> Vec<f32> {
    let float = |at: usize| ((at + seed) * 7919 % 4001) as f32 / 1000.0 - 2.0;
    (0..count).map(float).collect()
}

fn narrow<E: Element>(floats: &[f32]) -> Vec<E> {
    floats.iter().map(|&one| E::narrow(one)).collect()
}

#[derive(Clone, Debug)]
struct World {
    shape: CacheShape,
    heads: usize,
    layout: Layout,
    columns: usize,
    norm: Option<(f32, f32)>,
    slots: Vec<i64>,
    /// Elements between rows: query, key and value of a row stand side by side.
    gap: usize,
}

/// Keys, values, turned queries.
type Found<E> = (Vec<E>, Vec<E>, Vec<E>);

impl World {
    fn widths(&self) -> [usize; 3] {
        let CacheShape {
            kv_heads,
            dim_k,
            dim_v,
            ..
        } = self.shape;
        [self.heads * dim_k, kv_heads * dim_k, kv_heads * dim_v]
    }

    fn stride(&self) -> usize {
        self.widths().iter().sum::<usize>() + self.gap
    }

    fn angles(&self) -> [Vec<f32>; 2] {
        let count = self.slots.len() * self.columns;
        [floats(count, 3), floats(count, 17)]
    }

    fn weights(&self) -> [Vec<f32>; 2] {
        [floats(self.shape.dim_k, 5), floats(self.shape.dim_k, 31)]
    }

    fn run<E: Attend, A: Element>(&self, attention: &Attention) -> Found<E> {
        let (count, stride) = (self.slots.len(), self.stride());
        let memory: Vec<E> = narrow(&floats(count * stride, 0));
        let mut first = 0;
        let [query, key, value] = self.widths().map(|width| {
            let end = (count - 1) * stride + width;
            let rows = Rows::new(&memory[first..first + end], count, width, stride);
            first += width;
            rows.expect("it fits")
        });
        let [cos, sin] = self.angles().map(|angles| narrow::<A>(&angles));
        let new = NewRows { query, key, value };
        let [query, key] = self.weights().map(|weights| narrow::<E>(&weights));
        let rotation = Rotation {
            cos: &cos,
            sin: &sin,
            layout: self.layout,
            norm: self.norm.map(|(epsilon, offset)| HeadNorm {
                query: &query,
                key: &key,
                epsilon,
                offset,
            }),
        };
        let slots = self.shape.num_blocks * self.shape.block_size;
        let [q, k, v] = self.widths();
        let nothing = || E::narrow(9.0);
        let (mut keys, mut values) = (vec![nothing(); slots * k], vec![nothing(); slots * v]);
        let mut turned = vec![nothing(); count * q];
        attention
            .write_turned(
                &self.shape,
                &self.slots,
                new,
                &rotation,
                CacheArrays {
                    keys: &mut keys[..],
                    values: &mut values[..],
                },
                &mut turned,
            )
            .expect("it fits");
        (keys, values, turned)
    }

    /// One head in f64.
    fn exact(&self, head: &[f32], row: usize, weight: &[f32]) -> Vec<f64> {
        let mut x: Vec<f64> = head.iter().map(|&number| number.into()).collect();
        if let Some((epsilon, offset)) = self.norm {
            let mean = x.iter().map(|number| number * number).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean + f64::from(epsilon)).sqrt();
            for (one, &weight) in x.iter_mut().zip(weight) {
                *one *= scale * f64::from(offset + weight);
            }
        }
        let [cos, sin] = self.angles();
        let mut out = x.clone();
        for pair in 0..self.layout.size / 2 {
            let (a, b) = match self.layout.order {
                Order::Halves => (pair, pair + self.layout.size / 2),
                Order::Pairs => (2 * pair, 2 * pair + 1),
            };
            let column = row * self.columns + pair * self.layout.step;
            let (c, s) = (f64::from(cos[column]), f64::from(sin[column]));
            out[a] = x[a] * c - x[b] * s;
            out[b] = x[b] * c + x[a] * s;
        }
        out
    }
}

fn worlds() -> impl Strategy<Value = World> {
    let sizes = (1..4usize, 1..4usize, 1..40usize, 1..20usize, 1..60usize);
    let layout = (1..20usize, any::<bool>(), 1..3usize, 0..4usize);
    let norm = prop::option::of((1e-6..1e-2f32, prop_oneof![Just(0.0f32), Just(1.0)]));
    (sizes, layout, norm, 0..9usize).prop_map(|(sizes, layout, norm, gap)| {
        let (kv_heads, group, half, dim_v, count) = sizes;
        let (size, pairs, step, more) = layout;
        let size = 2 * size.min(half);
        let shape = CacheShape {
            num_blocks: 16,
            block_size: 8,
            kv_heads,
            dim_k: 2 * half,
            dim_v,
        };
        let slot = |at: usize| (at * 37 % 128) as i64 - i64::from(at == 3) * 200;
        World {
            shape,
            heads: kv_heads * group,
            layout: Layout {
                size,
                order: if pairs { Order::Pairs } else { Order::Halves },
                step,
            },
            columns: (size / 2 - 1) * step + 1 + more,
            norm,
            slots: (0..count).map(|at| slot(at).max(-1)).collect(),
            gap,
        }
    })
}

fn each_head_is_what_it_is_in_f64(isa: Isa) {
    check(CASES, worlds(), |world| {
        let attention = Attention::with_isa(2, isa).expect("it is there");
        let (keys, values, turned) = world.run::<f32, f32>(&attention);
        let (stride, [q, k, v], dim) = (world.stride(), world.widths(), world.shape.dim_k);
        let memory = floats(world.slots.len() * stride, 0);
        let weights = world.weights();
        let mut untouched = vec![true; keys.len() / k];
        for (row, &slot) in world.slots.iter().enumerate() {
            let from = &memory[row * stride..][..q + k + v];
            let mut pairs = vec![(&from[..q], &turned[row * q..][..q], &weights[0])];
            if slot >= 0 {
                let slot = slot as usize;
                untouched[slot] = false;
                pairs.push((&from[q..q + k], &keys[slot * k..][..k], &weights[1]));
                prop_assert_eq!(&from[q + k..], &values[slot * v..][..v]);
            }
            for (heads, actual, weight) in pairs {
                for (head, actual) in heads.chunks(dim).zip(actual.chunks(dim)) {
                    for (&actual, exact) in actual.iter().zip(world.exact(head, row, weight)) {
                        let error = (f64::from(actual) - exact).abs();
                        prop_assert!(error < 1e-4, "{} is not {}", actual, exact);
                    }
                }
            }
        }
        let slots = untouched.iter().enumerate();
        for (slot, _) in slots.filter(|(_, is_untouched)| **is_untouched) {
            let mut slot = keys[slot * k..][..k].iter().chain(&values[slot * v..][..v]);
            prop_assert!(slot.all(|&one| one == 9.0));
        }
        Ok(())
    });
}

fn every_level_gives_the_same_bits_and_bfloat16_is_rounded_once(isa: Isa) {
    check(CASES, worlds(), |world| {
        let one = Attention::with_isa(1, Isa::Portable).expect("it fits");
        let floats = world.run::<f32, f32>(&one);
        let halves = world.run::<u16, u16>(&one);
        let mixed = world.run::<u16, f32>(&one);
        for num_threads in 1..4 {
            let other = Attention::with_isa(num_threads, isa).expect("it is there");
            prop_assert_eq!(&world.run::<f32, f32>(&other), &floats);
            prop_assert_eq!(&world.run::<u16, u16>(&other), &halves);
            prop_assert_eq!(&world.run::<u16, f32>(&other), &mixed);
        }
        Ok(())
    });
}

fn many_rows_are_turned_as_few_are(isa: Isa) {
    let world = World {
        shape: CacheShape {
            num_blocks: 40,
            block_size: 16,
            kv_heads: 3,
            dim_k: 64,
            dim_v: 64,
        },
        heads: 9,
        layout: Layout {
            size: 64,
            order: Order::Halves,
            step: 1,
        },
        columns: 64,
        norm: None,
        slots: (0..600).collect(),
        gap: 0,
    };
    let run = |num_threads| {
        let attention = Attention::with_isa(num_threads, isa).expect("it is there");
        world.run::<u16, u16>(&attention)
    };
    assert!(run(1) == run(3));
}

fn what_does_not_fit_is_refused() {
    let shape = CacheShape {
        num_blocks: 1,
        block_size: 4,
        kv_heads: 1,
        dim_k: 4,
        dim_v: 2,
    };
    let attention = Attention::new(1).expect("there are threads");
    let refused = |rows: [usize; 3], angles: [usize; 2], layout, norm: Option<usize>, turned| {
        let [query, key, value] = rows.map(|width| vec![1.0f32; 2 * width]);
        let [cos, sin] = angles.map(|count| vec![1.0f32; count]);
        let weight = vec![1.0; norm.unwrap_or(0)];
        let rotation = Rotation {
            cos: &cos,
            sin: &sin,
            layout,
            norm: norm.map(|_| HeadNorm {
                query: &weight,
                key: &weight,
                epsilon: 1e-6,
                offset: 0.0,
            }),
        };
        let dense = |memory| Rows::new(memory, 2, memory.len() / 2, memory.len() / 2);
        let (mut keys, mut values) = (vec![7.0; 16], vec![7.0; 8]);
        let mut turned: Vec<f32> = vec![7.0; turned];
        let rows = NewRows {
            query: dense(&query).expect("it fits"),
            key: dense(&key).expect("it fits"),
            value: dense(&value).expect("it fits"),
        };
        let cache = CacheArrays {
            keys: &mut keys[..],
            values: &mut values[..],
        };
        let actual = attention.write_turned(&shape, &[0, 1], rows, &rotation, cache, &mut turned);
        let untouched = keys
            .iter()
            .chain(&values)
            .chain(&turned)
            .all(|&one| one == 7.0);
        assert_eq!(actual.is_err(), untouched);
        actual.err()
    };
    let layout = Layout {
        size: 4,
        order: Order::Halves,
        step: 1,
    };
    assert_eq!(refused([8, 4, 2], [4, 4], layout, Some(4), 16), None);
    for (rows, angles, norm, turned) in [
        ([7, 4, 2], [4, 4], None, 16),
        ([8, 3, 2], [4, 4], None, 16),
        ([8, 4, 1], [4, 4], None, 16),
        ([8, 4, 2], [3, 4], None, 16),
        ([8, 4, 2], [2, 2], None, 16),
        ([8, 4, 2], [4, 6], None, 16),
        ([8, 4, 2], [4, 4], Some(3), 16),
        ([8, 4, 2], [4, 4], None, 15),
    ] {
        let actual = refused(rows, angles, layout, norm, turned);
        assert!(matches!(actual, Some(Error::Length { .. })), "{actual:?}");
    }
    for (size, step) in [(0, 1), (3, 1), (6, 1), (4, 0)] {
        let odd = Layout {
            size,
            step,
            ..layout
        };
        let actual = refused([8, 4, 2], [4, 4], odd, None, 16);
        assert_eq!(actual, Some(Error::Layout { size, step, dim: 4 }));
    }
    let wide = Layout {
        step: usize::MAX,
        ..layout
    };
    assert_eq!(
        refused([8, 4, 2], [4, 4], wide, None, 16),
        Some(Error::TooLarge)
    );
    for (memory, count, width, stride) in [(6, 2, 4, 4), (9, 2, 4, 4), (1, 0, 4, 4)] {
        let actual = Rows::new(&vec![1.0f32; memory], count, width, stride).map(|_| ());
        assert!(matches!(actual, Err(Error::Length { .. })));
    }
    let huge = Rows::new(&[1.0f32], 3, 1, usize::MAX).map(|_| ());
    assert_eq!(huge, Err(Error::TooLarge));
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &all(),
        each_head_is_what_it_is_in_f64,
        every_level_gives_the_same_bits_and_bfloat16_is_rounded_once,
        many_rows_are_turned_as_few_are
    );
    once!(tests, what_does_not_fit_is_refused);
}
