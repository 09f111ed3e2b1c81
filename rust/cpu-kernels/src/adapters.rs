//! Low-rank adapters of a linear layer (Hu et al., 2021, arXiv:2106.09685), several of them in one batch (Chen et al.,
//! 2023, arXiv:2310.18547).

use std::ops::Range;

use crate::attention::Attention;
use crate::builds::{InLanes, best_lanes};
use crate::element::{Element, widen};
use crate::error::Error;
use crate::lanes::Vector;
use crate::step::{CacheShape, above_zero, same_length};
use crate::write::Rows;

/// Multiplications below which no other thread is woken.
const SMALL: usize = 100_000;

/// Maximum tokens of a task.
const TOKENS: usize = 16;

/// Numbers of a vector: the same at every level, so that sums have the same bits.
const LANES: usize = 16;

/// The adapters of a linear layer, whose outputs are in parts with an adapter each, such as queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Adapters<'a> {
    /// A: `[num_slots, num_parts * rank, in_features]`.
    pub down: &'a [f32],
    /// B, transposed and scaled: `[num_slots, rank, out_features]`.
    pub up: &'a [f32],
    /// Rows of A that are used: `[num_slots, num_parts]`, from 0 to `rank`.
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
        let outputs = adapters.check()?;
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
            let adapter = adapters.of_slot(slot, outputs);
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
    /// Checks the arrays; the number of outputs.
    fn check(&self) -> Result<usize, Error> {
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
        let rows = CacheShape::elements(parts, self.rank, num_slots)?;
        let down = CacheShape::elements(1, rows, self.in_features)?;
        same_length("down", down, self.down.len())?;
        same_length(
            "up",
            CacheShape::elements(num_slots, self.rank, end)?,
            self.up.len(),
        )?;
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

    fn of_slot(&self, slot: usize, outputs: usize) -> Adapter<'a> {
        let parts = self.ends.len();
        let (down, up) = (parts * self.rank * self.in_features, self.rank * outputs);
        Adapter {
            down: &self.down[slot * down..][..down],
            up: &self.up[slot * up..][..up],
            ranks: &self.ranks[slot * parts..][..parts],
            ends: self.ends,
            rank: self.rank,
            inputs: self.in_features,
            outputs,
        }
    }
}

/// One of them.
#[derive(Clone, Copy)]
struct Adapter<'a> {
    down: &'a [f32],
    up: &'a [f32],
    ranks: &'a [i32],
    ends: &'a [i64],
    rank: usize,
    inputs: usize,
    outputs: usize,
}

impl Adapter<'_> {
    /// Multiplications of a token.
    fn work(&self) -> usize {
        self.parts()
            .map(|(rows, columns)| rows.len() * (self.inputs + columns.len()))
            .sum()
    }

    /// The rows of A and the outputs of each part.
    fn parts(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let mut end = 0;
        self.ranks
            .iter()
            .zip(self.ends)
            .enumerate()
            .map(move |(part, (&rank, &next))| {
                let (first, start) = (part * self.rank, end);
                end = next as usize;
                (first..first + rank as usize, start..end)
            })
    }

    fn row_of_a(&self, number: usize) -> &[f32] {
        &self.down[number * self.inputs..][..self.inputs]
    }
}

/// A row, by its number, and its results.
struct Token<'a, E> {
    number: usize,
    out: &'a mut [E],
}

/// Some tokens of an adapter.
struct AddDelta<'a, E> {
    rows: Rows<'a, E>,
    adapter: Adapter<'a>,
    tokens: Vec<Token<'a, E>>,
}

impl<E: Element> InLanes for AddDelta<'_, E> {
    #[inline(always)]
    fn run<V: Vector<16>, const N: usize>(mut self) {
        let adapter = self.adapter;
        let mut scratch = vec![vec![]; self.tokens.len()];
        let tokens = self.tokens.iter().zip(&mut scratch);
        let inputs: Vec<&[f32]> = tokens
            .map(|(token, scratch)| E::floats(self.rows.row(token.number), scratch))
            .collect();
        let width = adapter.ends.len() * adapter.rank;
        let mut latent = vec![0.0f32; inputs.len() * width];
        for (rows, _) in adapter.parts() {
            for (at, inputs) in inputs.chunks(2).enumerate() {
                let latent = &mut latent[2 * at * width..];
                match *inputs {
                    [first, second] => {
                        shrink::<V, N, 2>(&adapter, rows.clone(), [first, second], latent)
                    }
                    [first] => shrink::<V, N, 1>(&adapter, rows.clone(), [first], latent),
                    _ => {}
                }
            }
        }
        let mut floats = vec![0.0; adapter.outputs];
        for (token, latent) in self.tokens.iter_mut().zip(latent.chunks_exact(width)) {
            widen(token.out, &mut floats);
            expand::<V, N>(&adapter, latent, &mut floats);
            for (out, &float) in token.out.iter_mut().zip(&floats) {
                *out = E::narrow(float);
            }
        }
    }
}

/// `A x` of `T` tokens for some rows of A; each token's results are a row of `latent`.
#[inline(always)]
fn shrink<V: Vector<16>, const N: usize, const T: usize>(
    adapter: &Adapter<'_>,
    rows: Range<usize>,
    inputs: [&[f32]; T],
    latent: &mut [f32],
) {
    let width = adapter.ends.len() * adapter.rank;
    let mut row = rows.start;
    while row < rows.end {
        if row + N <= rows.end {
            let sums =
                dots::<V, N, T>(std::array::from_fn(|at| adapter.row_of_a(row + at)), inputs);
            for (at, sums) in sums.into_iter().enumerate() {
                for (token, sum) in sums.into_iter().enumerate() {
                    latent[token * width + row + at] = sum;
                }
            }
            row += N;
        } else {
            let [sums] = dots::<V, 1, T>([adapter.row_of_a(row)], inputs);
            for (token, sum) in sums.into_iter().enumerate() {
                latent[token * width + row] = sum;
            }
            row += 1;
        }
    }
}

/// The products of each of `R` rows with each of `T` others, added up in 16 lanes.
#[inline(always)]
fn dots<V: Vector<16>, const R: usize, const T: usize>(
    rows: [&[f32]; R],
    others: [&[f32]; T],
) -> [[f32; T]; R] {
    let mut sums = [[V::splat(0.0); T]; R];
    let (row_lanes, other_lanes) = (
        rows.map(|row| row.as_chunks::<LANES>()),
        others.map(|row| row.as_chunks::<LANES>()),
    );
    let whole = row_lanes[0].0.len();
    for at in 0..whole {
        let other = other_lanes.map(|(lanes, _)| V::load(&lanes[at]));
        for (sums, (lanes, _)) in sums.iter_mut().zip(&row_lanes) {
            let row = V::load(&lanes[at]);
            for (sum, &other) in sums.iter_mut().zip(&other) {
                *sum = row.multiply_add(other, *sum);
            }
        }
    }
    if !row_lanes[0].1.is_empty() {
        let other = other_lanes.map(|(_, rest)| V::load(&padded(rest)));
        for (sums, (_, rest)) in sums.iter_mut().zip(&row_lanes) {
            let row = V::load(&padded(rest));
            for (sum, &other) in sums.iter_mut().zip(&other) {
                *sum = row.multiply_add(other, *sum);
            }
        }
    }
    sums.map(|sums| sums.map(total))
}

/// With zeros after it.
#[inline(always)]
fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    lanes[..rest.len()].copy_from_slice(rest);
    lanes
}

/// The sum of all lanes.
#[inline(always)]
fn total<V: Vector<16>>(sums: V) -> f32 {
    let mut lanes = [0.0; LANES];
    sums.store(&mut lanes);
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds `B latent` to `out`, output by output in the order of B's columns.
#[inline(always)]
fn expand<V: Vector<16>, const N: usize>(adapter: &Adapter<'_>, latent: &[f32], out: &mut [f32]) {
    for (rows, columns) in adapter.parts() {
        let factors = &latent[rows];
        let mut at = columns.start;
        while at < columns.end {
            let left = columns.end - at;
            if left >= N * LANES {
                columns_of::<V, N>(adapter, factors, at, out);
                at += N * LANES;
            } else if left >= LANES {
                columns_of::<V, 1>(adapter, factors, at, out);
                at += LANES;
            } else {
                let mut sum = out[at];
                for (row, &factor) in factors.iter().enumerate() {
                    sum = adapter.up[row * adapter.outputs + at].mul_add(factor, sum);
                }
                out[at] = sum;
                at += 1;
            }
        }
    }
}

/// `C` vectors of outputs from `at` on.
#[inline(always)]
fn columns_of<V: Vector<16>, const C: usize>(
    adapter: &Adapter<'_>,
    factors: &[f32],
    at: usize,
    out: &mut [f32],
) {
    let (out, _) = out[at..].as_chunks_mut::<LANES>();
    let mut sums: [V; C] = std::array::from_fn(|number| V::load(&out[number]));
    for (row, &factor) in factors.iter().enumerate() {
        let (lanes, _) = adapter.up[row * adapter.outputs + at..].as_chunks::<LANES>();
        let factor = V::splat(factor);
        for (sum, lanes) in sums.iter_mut().zip(lanes) {
            *sum = V::load(lanes).multiply_add(factor, *sum);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        sum.store(out);
    }
}
