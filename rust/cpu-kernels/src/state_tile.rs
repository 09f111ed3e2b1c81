//! The recurrence that delta rules and Mamba-2 share: a head's state decays, adds the outer product of a key and a
//! value, and is read by a query, token by token.
//!
//! A lane is a number of a value: nothing is added up across lanes. Sums over a key go from its first number to its
//! last, so the bits of a token do not depend on how tokens are divided into calls.

use std::cell::RefCell;

use crate::builds::{InLanes, best_lanes};
use crate::isa::Isa;
use crate::lanes::{Vector, fetch_line};

/// Tokens that are computed while a tile of the state is in the processor's first cache.
pub(crate) const TOKENS: usize = 32;

const LANES: usize = 16;
/// Distance of prefetches, in numbers of a state.
const AHEAD: usize = 512;

/// Some tokens of a head, in float32.
#[derive(Debug, Default)]
pub(crate) struct HeadTokens {
    /// `[count, key_dim]`.
    pub(crate) keys: Vec<f32>,
    /// `[count, key_dim]`.
    pub(crate) queries: Vec<f32>,
    /// `[count, key_dim]`: factors of the state's rows.
    pub(crate) decays: Vec<f32>,
    /// `[count, value_dim]`.
    pub(crate) values: Vec<f32>,
    /// `[count]`: how far the state's answer to a key moves towards the value; of delta rules.
    pub(crate) betas: Vec<f32>,
    /// `[count, value_dim]`: the state's answers to the queries.
    pub(crate) out: Vec<f32>,
    /// `[count, key_dim]`: keys times decays.
    decayed: Vec<f32>,
    key_dim: usize,
    value_dim: usize,
}

thread_local! {
    /// Memory for the tokens of a thread's heads, one after the other.
    static TOKENS_OF_THREAD: RefCell<HeadTokens> = RefCell::default();
}

impl HeadTokens {
    /// Runs `compute` with memory for `count` tokens, but for at most [`TOKENS`]. It has any numbers.
    pub(crate) fn with<R>(
        key_dim: usize,
        value_dim: usize,
        count: usize,
        compute: impl FnOnce(&mut Self) -> R,
    ) -> R {
        TOKENS_OF_THREAD.with_borrow_mut(|tokens| {
            tokens.resize(key_dim, value_dim, count.min(TOKENS));
            compute(tokens)
        })
    }

    fn resize(&mut self, key_dim: usize, value_dim: usize, count: usize) {
        let Self {
            keys,
            queries,
            decays,
            values,
            betas,
            out,
            decayed,
            ..
        } = self;
        for of_keys in [keys, queries, decays, decayed] {
            of_keys.resize(count * key_dim, 0.0);
        }
        for of_values in [values, out] {
            of_values.resize(count * value_dim, 0.0);
        }
        betas.resize(count, 0.0);
        (self.key_dim, self.value_dim) = (key_dim, value_dim);
    }

    /// Advances a state `[key_dim, value_dim]` by the first `count` tokens: `state = decay * state + key * value` for
    /// each, and `out = query * state`.
    pub(crate) fn accumulate(&mut self, isa: Isa, count: usize, state: &mut [f32]) {
        best_lanes(
            isa,
            Advance::<false> {
                tokens: self,
                count,
                state,
            },
        );
    }

    /// As `accumulate`, by the delta rule: what is added for a key is `beta * (value - key * decay * state)`.
    pub(crate) fn correct(&mut self, isa: Isa, count: usize, state: &mut [f32]) {
        best_lanes(
            isa,
            Advance::<true> {
                tokens: self,
                count,
                state,
            },
        );
    }
}

struct Advance<'a, const IS_DELTA: bool> {
    tokens: &'a mut HeadTokens,
    count: usize,
    state: &'a mut [f32],
}

impl<const IS_DELTA: bool> InLanes for Advance<'_, IS_DELTA> {
    #[inline(always)]
    fn run<V: Vector<16>, const N: usize>(self) {
        let (tokens, count) = (self.tokens, self.count);
        if IS_DELTA {
            let used = count * tokens.key_dim;
            let pairs = tokens.keys[..used].iter().zip(&tokens.decays[..used]);
            for (decayed, (key, decay)) in tokens.decayed.iter_mut().zip(pairs) {
                *decayed = key * decay;
            }
        }
        let mut first = 0;
        while first < tokens.value_dim {
            first += match tokens.value_dim - first {
                rest if rest >= N * LANES => {
                    tile::<V, N, IS_DELTA>(tokens, count, self.state, first)
                }
                rest if rest >= 2 * LANES => {
                    tile::<V, 2, IS_DELTA>(tokens, count, self.state, first)
                }
                rest if rest >= LANES => tile::<V, 1, IS_DELTA>(tokens, count, self.state, first),
                _ => lane::<IS_DELTA>(tokens, count, self.state, first),
            };
        }
    }
}

/// `N` vectors of each of the state's rows from lane `first` on; their lanes.
#[inline(always)]
fn tile<V: Vector<16>, const N: usize, const IS_DELTA: bool>(
    tokens: &mut HeadTokens,
    count: usize,
    state: &mut [f32],
    first: usize,
) -> usize {
    let (key_dim, value_dim) = (tokens.key_dim, tokens.value_dim);
    let mut answers = [V::splat(0.0); N];
    if IS_DELTA {
        let key = &tokens.decayed[..key_dim];
        for (row, &key) in state.chunks_exact(value_dim).zip(key) {
            let row = lanes::<N>(&row[first..]);
            for n in 0..N {
                fetch_line(row[n].as_ptr().wrapping_add(AHEAD));
                answers[n] = V::load(&row[n]).multiply_add(V::splat(key), answers[n]);
            }
        }
    }
    for token in 0..count {
        let values = lanes::<N>(&tokens.values[token * value_dim + first..]);
        let mut added = *values;
        if IS_DELTA {
            let beta = tokens.betas[token];
            for n in 0..N {
                let mut answer = [0.0; LANES];
                answers[n].store(&mut answer);
                for (added, answer) in added[n].iter_mut().zip(answer) {
                    *added = (*added - answer) * beta;
                }
            }
        }
        let added: [V; N] = std::array::from_fn(|n| V::load(&added[n]));
        let of_token = token * key_dim..(token + 1) * key_dim;
        let next = match token + 1 < count {
            true => of_token.end..of_token.end + key_dim,
            false => of_token.clone(), // its answers are not used
        };
        let terms = tokens.keys[of_token.clone()].iter();
        let terms = terms.zip(&tokens.decays[of_token.clone()]);
        let terms = terms.zip(&tokens.queries[of_token]);
        let terms = terms.zip(&tokens.decayed[next]);
        let mut sums = [V::splat(0.0); N];
        answers = sums;
        for (row, (((&key, &decay), &query), &next)) in state.chunks_exact_mut(value_dim).zip(terms)
        {
            let row = lanes_mut::<N>(&mut row[first..]);
            let (key, decay) = (V::splat(key), V::splat(decay));
            let (query, next) = (V::splat(query), V::splat(next));
            for n in 0..N {
                if !IS_DELTA {
                    fetch_line(row[n].as_ptr().wrapping_add(AHEAD));
                }
                let number = V::load(&row[n]).multiply(decay);
                let number = key.multiply_add(added[n], number);
                number.store(&mut row[n]);
                sums[n] = number.multiply_add(query, sums[n]);
                if IS_DELTA {
                    answers[n] = number.multiply_add(next, answers[n]);
                }
            }
        }
        let out = lanes_mut::<N>(&mut tokens.out[token * value_dim + first..]);
        for n in 0..N {
            sums[n].store(&mut out[n]);
        }
    }
    N * LANES
}

/// The same for a single lane.
#[inline(always)]
fn lane<const IS_DELTA: bool>(
    tokens: &mut HeadTokens,
    count: usize,
    state: &mut [f32],
    lane: usize,
) -> usize {
    let (key_dim, value_dim) = (tokens.key_dim, tokens.value_dim);
    for token in 0..count {
        let of_token = token * key_dim..(token + 1) * key_dim;
        let mut added = tokens.values[token * value_dim + lane];
        if IS_DELTA {
            let key = &tokens.decayed[of_token.clone()];
            let mut answer = 0.0f32;
            for (number, key) in state[lane..].iter().step_by(value_dim).zip(key) {
                answer = number.mul_add(*key, answer);
            }
            added = (added - answer) * tokens.betas[token];
        }
        let terms = tokens.keys[of_token.clone()].iter();
        let terms = terms.zip(&tokens.decays[of_token.clone()]);
        let terms = terms.zip(&tokens.queries[of_token]);
        let mut sum = 0.0f32;
        for (number, ((key, decay), query)) in
            state[lane..].iter_mut().step_by(value_dim).zip(terms)
        {
            *number = key.mul_add(added, *number * decay);
            sum = number.mul_add(*query, sum);
        }
        tokens.out[token * value_dim + lane] = sum;
    }
    1
}

#[inline(always)]
fn lanes<const N: usize>(numbers: &[f32]) -> &[[f32; LANES]; N] {
    let (lanes, _) = numbers.as_chunks();
    lanes.first_chunk().expect("there are so many")
}

#[inline(always)]
fn lanes_mut<const N: usize>(numbers: &mut [f32]) -> &mut [[f32; LANES]; N] {
    let (lanes, _) = numbers.as_chunks_mut();
    lanes.first_chunk_mut().expect("there are so many")
}
