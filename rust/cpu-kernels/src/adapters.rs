//! Low-rank adapters of a linear layer (Hu et al., 2021, arXiv:2106.09685), several of them in one batch (Chen et al.,
//! 2023, arXiv:2310.18547).

use std::ops::Range;

use crate::attention::Attention;
use crate::builds::{InLanes, best_lanes};
use crate::element::{Element, widen};
use crate::error::Error;
use crate::lanes::{Vector, fetch, fetch_line};
use crate::step::{CacheShape, above_zero, same_length};
use crate::write::Rows;

/// Multiplications below which no other thread is woken.
const SMALL: usize = 100_000;

/// Maximum tokens of a task.
const TOKENS: usize = 16;

/// Distance of prefetches, in elements of A.
const AHEAD: usize = 1024;

/// Numbers of a vector: the same at every level, so that sums have the same bits.
const LANES: usize = 16;

/// A and B of all slots.
///
/// A is transposed: `[num_slots, in_features, num_parts * lanes]`, with as many lanes as ranks, rounded up to a multiple
/// of 16. So is B, which is scaled: `[num_slots, rank,
/// out_features]`.
#[derive(Clone, Copy, Debug)]
pub enum AdapterMatrices<'a> {
    /// In float32.
    Floats(&'a [f32], &'a [f32]),
    /// In bfloat16: two inputs of A, or two ranks of B, in an element, the first in its lower half. The last one may have
    /// no second.
    Halves(&'a [u32], &'a [u32]),
}

/// An element of these matrices.
trait Packed: Copy + Sync {
    /// Its numbers.
    const COUNT: usize;
    fn float(self, number: usize) -> f32;
    /// Adds to `sums` the products of `C` vectors of elements with the factors from `at` on of each of `T` tokens, number
    /// by number.
    fn multiply_add<V: Vector<16>, const T: usize, const C: usize>(
        sums: &mut [[V; C]; T],
        elements: &[&[Self; LANES]; C],
        factors: &[&[f32]; T],
        at: usize,
    );
    /// The same for their first numbers alone, where elements have more.
    #[inline(always)]
    fn multiply_add_first<V: Vector<16>, const T: usize, const C: usize>(
        sums: &mut [[V; C]; T],
        elements: &[&[Self; LANES]; C],
        factors: &[&[f32]; T],
        at: usize,
    ) {
        Self::multiply_add(sums, elements, factors, at);
    }
}

impl Packed for f32 {
    const COUNT: usize = 1;

    #[inline(always)]
    fn float(self, _: usize) -> f32 {
        self
    }

    #[inline(always)]
    fn multiply_add<V: Vector<16>, const T: usize, const C: usize>(
        sums: &mut [[V; C]; T],
        elements: &[&[f32; LANES]; C],
        factors: &[&[f32]; T],
        at: usize,
    ) {
        let lanes = elements.map(V::load);
        for (sums, factors) in sums.iter_mut().zip(factors) {
            let factor = V::splat(factors[at]);
            for (sum, lanes) in sums.iter_mut().zip(lanes) {
                *sum = lanes.multiply_add(factor, *sum);
            }
        }
    }
}

impl Packed for u32 {
    const COUNT: usize = 2;

    #[inline(always)]
    fn float(self, number: usize) -> f32 {
        f32::from_bits(match number {
            0 => self << 16,
            _ => self & 0xffff_0000,
        })
    }

    #[inline(always)]
    fn multiply_add<V: Vector<16>, const T: usize, const C: usize>(
        sums: &mut [[V; C]; T],
        elements: &[&[u32; LANES]; C],
        factors: &[&[f32]; T],
        at: usize,
    ) {
        let lanes = widened::<V, C>(elements);
        for (sums, factors) in sums.iter_mut().zip(factors) {
            let [first, second] = [V::splat(factors[at]), V::splat(factors[at + 1])];
            for (sum, [lower, upper]) in sums.iter_mut().zip(lanes) {
                *sum = upper.multiply_add(second, lower.multiply_add(first, *sum));
            }
        }
    }

    #[inline(always)]
    fn multiply_add_first<V: Vector<16>, const T: usize, const C: usize>(
        sums: &mut [[V; C]; T],
        elements: &[&[u32; LANES]; C],
        factors: &[&[f32]; T],
        at: usize,
    ) {
        let lanes = widened::<V, C>(elements);
        for (sums, factors) in sums.iter_mut().zip(factors) {
            let factor = V::splat(factors[at]);
            for (sum, [lower, _]) in sums.iter_mut().zip(lanes) {
                *sum = lower.multiply_add(factor, *sum);
            }
        }
    }
}

/// In a loop: `map` would call the instructions, as it is not compiled for them.
#[inline(always)]
fn widened<V: Vector<16>, const C: usize>(elements: &[&[u32; LANES]; C]) -> [[V; 2]; C] {
    let mut lanes = [[V::splat(0.0); 2]; C];
    for (lanes, elements) in lanes.iter_mut().zip(elements) {
        *lanes = V::widened(elements);
    }
    lanes
}

/// The adapters of a linear layer, whose outputs are in parts with an adapter each, such as queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Adapters<'a> {
    /// A and B.
    pub matrices: AdapterMatrices<'a>,
    /// Rows of A that are used, of each part: `[num_slots, num_parts]`, from 0 to `rank`.
    pub ranks: &'a [i32],
    /// Where the outputs of each part end, in ascending order; the last is `out_features`.
    pub ends: &'a [i64],
    /// The most rows of A of a part.
    pub rank: usize,
    /// Length of a row of the input.
    pub in_features: usize,
}

impl Attention {
    /// Adds `B A x` to `out` `[tokens, out_features]` for each row x of `rows` `[tokens, in_features]`, by the adapter in
    /// its slot, -1: none. It is computed in float32 and rounded once. A row has the same bits in every batch, with any
    /// number of threads and at every level.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match, slots and ranks that do not exist; nothing is written.
    pub fn add_adapters<E: Element>(
        &self,
        rows: Rows<'_, E>,
        slots: &[i32],
        adapters: &Adapters<'_>,
        out: &mut [E],
    ) -> Result<(), Error> {
        match adapters.matrices {
            AdapterMatrices::Floats(down, up) => {
                self.add_packed(rows, slots, adapters, (down, up), out)
            }
            AdapterMatrices::Halves(down, up) => {
                self.add_packed(rows, slots, adapters, (down, up), out)
            }
        }
    }

    fn add_packed<E: Element, P: Packed>(
        &self,
        rows: Rows<'_, E>,
        slots: &[i32],
        adapters: &Adapters<'_>,
        matrices: (&[P], &[P]),
        out: &mut [E],
    ) -> Result<(), Error> {
        let outputs = adapters.check(matrices)?;
        rows.check("rows", slots.len(), adapters.in_features)?;
        same_length(
            "out",
            CacheShape::elements(1, slots.len(), outputs)?,
            out.len(),
        )?;
        let num_slots = adapters.ranks.len() / adapters.ends.len();
        let beyond = |slot: &i32| *slot < -1 || *slot >= num_slots as i32;
        if let Some(row) = slots.iter().position(beyond) {
            let slot = i64::from(slots[row]);
            return Err(Error::Slot {
                row,
                slot,
                num_slots,
            });
        }
        let mut by_slot: Vec<Vec<Token<'_, E>>> = (0..num_slots).map(|_| vec![]).collect();
        for (number, (&slot, out)) in slots.iter().zip(out.chunks_exact_mut(outputs)).enumerate() {
            if let Ok(slot) = usize::try_from(slot) {
                by_slot[slot].push(Token { number, out });
            }
        }
        let (mut tasks, mut work) = (vec![], 0);
        for (slot, tokens) in by_slot.into_iter().enumerate() {
            let adapter = adapters.of_slot(slot, matrices, outputs);
            work += tokens.len() * adapter.work();
            let mut tokens = tokens.into_iter();
            while tokens.len() > 0 {
                let tokens = tokens.by_ref().take(TOKENS).collect();
                tasks.push(AddDelta {
                    rows,
                    adapter,
                    tokens,
                });
            }
        }
        let most = if work < SMALL {
            1
        } else {
            self.threads().count()
        };
        let num_threads = most.min(tasks.len());
        self.threads()
            .share_out(num_threads, tasks, |task| best_lanes(self.isa(), task));
        Ok(())
    }
}

impl<'a> Adapters<'a> {
    /// Rows of A of a part in memory.
    fn lanes(&self) -> usize {
        self.rank.next_multiple_of(LANES)
    }

    /// Checks the arrays; the number of outputs.
    fn check<P: Packed>(&self, (down, up): (&[P], &[P])) -> Result<usize, Error> {
        let parts = self.ends.len();
        above_zero("the number of parts", parts)?;
        above_zero("the rank", self.rank)?;
        above_zero("the number of inputs", self.in_features)?;
        let num_slots = self.ranks.len() / parts;
        same_length("ranks", num_slots * parts, self.ranks.len())?;
        let mut end = 0;
        for &next in self.ends {
            let next = usize::try_from(next).unwrap_or(0);
            above_zero("the outputs of a part", next.saturating_sub(end))?;
            end = next;
        }
        let rows = CacheShape::elements(parts, self.lanes(), num_slots)?;
        let inputs = self.in_features.div_ceil(P::COUNT);
        same_length("down", CacheShape::elements(1, rows, inputs)?, down.len())?;
        let ranks = self.rank.div_ceil(P::COUNT);
        let len = CacheShape::elements(num_slots, ranks, end)?;
        same_length("up", len, up.len())?;
        let invalid = |rank: &&i32| usize::try_from(**rank).map_or(true, |rank| rank > self.rank);
        match self.ranks.iter().find(invalid) {
            Some(&rank) => Err(Error::Length {
                name: "a part of A",
                expected: self.rank,
                found: usize::try_from(rank).unwrap_or(0),
            }),
            None => Ok(end),
        }
    }

    fn of_slot<'m, P: Packed>(
        &self,
        slot: usize,
        (down, up): (&'m [P], &'m [P]),
        outputs: usize,
    ) -> Adapter<'m, P>
    where
        'a: 'm,
    {
        let parts = self.ends.len();
        let width = parts * self.lanes();
        let inputs = width * self.in_features.div_ceil(P::COUNT);
        let ranks = self.rank.div_ceil(P::COUNT) * outputs;
        Adapter {
            down: &down[slot * inputs..][..inputs],
            up: &up[slot * ranks..][..ranks],
            ranks: &self.ranks[slot * parts..][..parts],
            ends: self.ends,
            width,
            inputs: self.in_features,
            outputs,
        }
    }
}

/// One of them.
#[derive(Clone, Copy)]
struct Adapter<'a, P> {
    down: &'a [P],
    up: &'a [P],
    ranks: &'a [i32],
    ends: &'a [i64],
    /// Length of a row of `down`.
    width: usize,
    inputs: usize,
    outputs: usize,
}

impl<P: Packed> Adapter<'_, P> {
    /// Multiplications of a token.
    fn work(&self) -> usize {
        self.parts()
            .map(|(rows, columns)| rows.len() * (self.inputs + columns.len()))
            .sum()
    }

    /// The rows of A and the outputs of each part.
    fn parts(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (mut end, lanes) = (0, self.width / self.ends.len());
        self.ranks
            .iter()
            .zip(self.ends)
            .enumerate()
            .map(move |(part, (&rank, &next))| {
                let (first, start) = (part * lanes, end);
                end = next as usize;
                (first..first + rank as usize, start..end)
            })
    }

    /// The vectors of a row of `down` that have rows of A.
    fn vectors(&self) -> Vec<usize> {
        self.parts()
            .flat_map(|(rows, _)| rows.start / LANES..rows.end.div_ceil(LANES))
            .collect()
    }
}

/// A row, by its number, and its results.
struct Token<'a, E> {
    number: usize,
    out: &'a mut [E],
}

/// Some tokens of an adapter.
struct AddDelta<'a, E, P> {
    rows: Rows<'a, E>,
    adapter: Adapter<'a, P>,
    tokens: Vec<Token<'a, E>>,
}

impl<E: Element, P: Packed> InLanes for AddDelta<'_, E, P> {
    #[inline(always)]
    fn run<V: Vector<16>, const N: usize>(mut self) {
        let (adapter, rows, vectors) = (self.adapter, self.rows, self.adapter.vectors());
        fetch(adapter.up);
        let mut memory = Memory::default();
        for tokens in self.tokens.chunks_mut(N) {
            match tokens {
                [_] => add_delta::<V, N, 1, _, _>(&adapter, &vectors, rows, tokens, &mut memory),
                _ => add_delta::<V, N, N, _, _>(&adapter, &vectors, rows, tokens, &mut memory),
            }
        }
    }
}

/// The inputs, `A x` and the outputs of some tokens.
#[derive(Default)]
struct Memory {
    inputs: Vec<Vec<f32>>,
    latent: Vec<f32>,
    outputs: Vec<f32>,
}

/// Adds the products of up to `T` tokens. Where there are fewer, the last one is computed again, for nothing.
#[inline(always)]
fn add_delta<V: Vector<16>, const N: usize, const T: usize, E: Element, P: Packed>(
    adapter: &Adapter<'_, P>,
    vectors: &[usize],
    rows: Rows<'_, E>,
    tokens: &mut [Token<'_, E>],
    memory: &mut Memory,
) {
    memory.inputs.resize(T, vec![]);
    memory.latent.resize(T * adapter.width, 0.0);
    let numbers: [usize; T] = std::array::from_fn(|at| tokens[at.min(tokens.len() - 1)].number);
    let mut scratch = memory.inputs.iter_mut();
    let inputs = numbers.map(|number| match scratch.next() {
        Some(scratch) => E::floats(rows.row(number), scratch),
        None => &[],
    });
    let mut at = 0;
    while at < vectors.len() {
        let latent = &mut memory.latent;
        at += match vectors[at..] {
            [a, b, c, d, ..] if N > 3 => {
                shrink::<V, T, 4, P>(adapter, [a, b, c, d], &inputs, latent)
            }
            [a, b, c, ..] if N > 3 => shrink::<V, T, 3, P>(adapter, [a, b, c], &inputs, latent),
            [a, b, ..] if N > 1 => shrink::<V, T, 2, P>(adapter, [a, b], &inputs, latent),
            _ => shrink::<V, T, 1, P>(adapter, [vectors[at]], &inputs, latent),
        }
    }
    memory.outputs.resize(tokens.len() * adapter.outputs, 0.0);
    let outputs = memory.outputs.chunks_exact_mut(adapter.outputs);
    for (token, outputs) in tokens.iter().zip(outputs) {
        widen(token.out, outputs);
    }
    expand::<V, N, T, P>(adapter, &memory.latent, &mut memory.outputs);
    let outputs = memory.outputs.chunks_exact(adapter.outputs);
    for (token, outputs) in tokens.iter_mut().zip(outputs) {
        for (out, &float) in token.out.iter_mut().zip(outputs) {
            *out = E::narrow(float);
        }
    }
}

/// `A x` of `T` tokens for `C` vectors of rows of A, input by input; each token's results are a row of `latent`. `C`.
#[inline(always)]
fn shrink<V: Vector<16>, const T: usize, const C: usize, P: Packed>(
    adapter: &Adapter<'_, P>,
    vectors: [usize; C],
    inputs: &[&[f32]; T],
    latent: &mut [f32],
) -> usize {
    let mut sums = [[V::splat(0.0); C]; T];
    let elements = |at: usize| {
        let start = at * adapter.width;
        for ahead in (AHEAD..AHEAD + adapter.width).step_by(LANES) {
            fetch_line(adapter.down.as_ptr().wrapping_add(start + ahead));
        }
        let (lanes, _) = adapter.down[start..][..adapter.width].as_chunks::<LANES>();
        vectors.map(|vector| &lanes[vector])
    };
    let whole = adapter.inputs / P::COUNT;
    for at in 0..whole {
        P::multiply_add(&mut sums, &elements(at), inputs, at * P::COUNT);
    }
    if whole * P::COUNT < adapter.inputs {
        P::multiply_add_first(&mut sums, &elements(whole), inputs, whole * P::COUNT);
    }
    for (latent, sums) in latent.chunks_exact_mut(adapter.width).zip(sums) {
        let (lanes, _) = latent.as_chunks_mut::<LANES>();
        for (&vector, sum) in vectors.iter().zip(sums) {
            sum.store(&mut lanes[vector]);
        }
    }
    C
}

/// Adds `B latent` of up to `T` tokens to their rows of `out`, row by row of A.
#[inline(always)]
fn expand<V: Vector<16>, const N: usize, const T: usize, P: Packed>(
    adapter: &Adapter<'_, P>,
    latent: &[f32],
    out: &mut [f32],
) {
    for (rows, columns) in adapter.parts() {
        let factors: [&[f32]; T] =
            std::array::from_fn(|token| &latent[token * adapter.width..][rows.clone()]);
        let mut at = columns.start;
        while at < columns.end {
            let left = columns.end - at;
            if left >= N * LANES {
                columns_of::<V, T, N, P>(adapter, &factors, at, out);
                at += N * LANES;
            } else if left >= LANES {
                columns_of::<V, T, 1, P>(adapter, &factors, at, out);
                at += LANES;
            } else {
                for (out, factors) in out.chunks_exact_mut(adapter.outputs).zip(factors) {
                    let mut sum = out[at];
                    for (row, &factor) in factors.iter().enumerate() {
                        let element = adapter.up[row / P::COUNT * adapter.outputs + at];
                        sum = element.float(row % P::COUNT).mul_add(factor, sum);
                    }
                    out[at] = sum;
                }
                at += 1;
            }
        }
    }
}

/// `C` vectors of outputs from `at` on.
#[inline(always)]
fn columns_of<V: Vector<16>, const T: usize, const C: usize, P: Packed>(
    adapter: &Adapter<'_, P>,
    factors: &[&[f32]; T],
    at: usize,
    out: &mut [f32],
) {
    let mut sums = [[V::splat(0.0); C]; T];
    for (sums, out) in sums.iter_mut().zip(out.chunks_exact(adapter.outputs)) {
        let (lanes, _) = out[at..].as_chunks::<LANES>();
        for (sum, lanes) in sums.iter_mut().zip(lanes) {
            *sum = V::load(lanes);
        }
    }
    let elements = |row: usize| {
        let (lanes, _) = adapter.up[row * adapter.outputs + at..].as_chunks::<LANES>();
        std::array::from_fn(|at| &lanes[at])
    };
    let (rank, whole) = (factors[0].len(), factors[0].len() / P::COUNT);
    for row in 0..whole {
        P::multiply_add(&mut sums, &elements(row), factors, row * P::COUNT);
    }
    if whole * P::COUNT < rank {
        P::multiply_add_first(&mut sums, &elements(whole), factors, whole * P::COUNT);
    }
    for (sums, out) in sums.iter().zip(out.chunks_exact_mut(adapter.outputs)) {
        let (lanes, _) = out[at..].as_chunks_mut::<LANES>();
        for (sum, lanes) in sums.iter().zip(lanes) {
            sum.store(lanes);
        }
    }
}
