//! The gated delta rule (Yang et al., 2024, arXiv:2412.06464) and Kimi's delta attention, whose decays differ from number
//! to number of a key (Kimi Team, 2025, arXiv:2510.26692).
//!
//! Tokens are computed one after another: chunked forms are faster where matrices are multiplied by tensor cores, but
//! their bits depend on where chunks begin.

use crate::activation::{Function, Sigmoid};
use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::divided::Part;
use crate::element::{Element, widen};
use crate::error::Error;
use crate::lanes::exp2;
use crate::norm::sum_of_squares;
use crate::softplus::Softplus;
use crate::state_tile::{HeadTokens, TOKENS};
use crate::states::{StatePart, StateShape, StateStep};
use crate::step::{CacheShape, above_zero, same_length};
use crate::write::Rows;

/// The heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values and states, a multiple of those of keys.
    pub value_heads: usize,
    /// Numbers of a key.
    pub key_dim: usize,
    /// Numbers of a value.
    pub value_dim: usize,
    /// The heads of values that share a head of keys.
    pub sharing: KeySharing,
}

/// The heads of values that share a head of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySharing {
    /// Consecutive ones: head `h` has that of keys `h / (value_heads / key_heads)`.
    Consecutive,
    /// Head `h` has that of keys `h % key_heads`.
    Tiled,
}

/// The new tokens.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRows<'a, E> {
    /// `[rows, key_heads, key_dim]`
    pub query: Rows<'a, E>,
    /// `[rows, key_heads, key_dim]`
    pub key: Rows<'a, E>,
    /// `[rows, value_heads, value_dim]`
    pub value: Rows<'a, E>,
    /// `[rows, value_heads]`, or `[rows, value_heads, key_dim]` for a decay of each number of a key.
    pub decay_gate: Rows<'a, E>,
    /// `[rows, value_heads]`
    pub beta_gate: Rows<'a, E>,
}

/// The parameters of a layer.
#[derive(Clone, Copy, Debug)]
pub struct DeltaLayer<'a> {
    /// `[value_heads]`: logarithms of decays for a step of 1, negative.
    pub rate: &'a [f32],
    /// `[value_heads]`, or `[value_heads, key_dim]`: added to the gates of decays.
    pub dt_bias: &'a [f32],
    /// Factor on the sigmoids of `beta_gate`: with 2, a token may more than replace what the state has for its key.
    pub beta_scale: f32,
    /// Factor on the queries.
    pub scaling: f32,
    /// If given, queries and keys are divided by `sqrt(sum of squares + epsilon)` first.
    pub epsilon: Option<f32>,
}

impl Attention {
    /// Advances each sequence's state by its tokens; `out` `[rows, value_heads, value_dim]` becomes the states' answers
    /// to the queries. `states` are `[num_slots, value_heads, key_dim, value_dim]`. For each token, with `S` the state:
    ///
    /// ```text
    /// decay = exp(rate * softplus(decay_gate + dt_bias))
    /// beta = beta_scale * sigmoid(beta_gate)
    /// S = decay * S
    /// S = S + key * beta * (value - key S)
    /// out = scaling * query S
    /// ```
    ///
    /// A token has the same bits in every batch, in whatever calls its sequence is computed.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match, and slots that the states do not have; nothing is written.
    pub fn gated_delta<E: Element>(
        &self,
        step: &StateStep,
        shape: &DeltaShape,
        rows: &DeltaRows<'_, E>,
        layer: &DeltaLayer<'_>,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let layout = shape.check(step, rows, layer, states.len(), out.len())?;
        let width = shape.value_heads * shape.value_dim;
        let outs = step.divide_rows(out, width, shape.value_dim);
        let tasks = step.divide(states, layout).into_iter().zip(outs);
        let tasks = tasks.enumerate().map(|(number, (state, out))| DeltaTask {
            head: number % shape.value_heads,
            state,
            out,
        });
        let tasks: Vec<_> = tasks.collect();
        let work = step.num_rows() * shape.value_heads * shape.key_dim * shape.value_dim;
        self.advance(work, tasks, |task| task.run(self, shape, rows, layer));
        Ok(())
    }
}

impl DeltaShape {
    /// Checks the arrays; the layout of the states.
    fn check<E: Element>(
        &self,
        step: &StateStep,
        rows: &DeltaRows<'_, E>,
        layer: &DeltaLayer<'_>,
        states: usize,
        out: usize,
    ) -> Result<StateShape, Error> {
        let Self {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            sharing: _,
        } = *self;
        for (name, size) in [
            ("the number of key heads", key_heads),
            ("the number of value heads", value_heads),
            ("the dimension of keys", key_dim),
            ("the dimension of values", value_dim),
        ] {
            above_zero(name, size)?;
        }
        if !value_heads.is_multiple_of(key_heads) {
            return Err(Error::Groups {
                heads: value_heads,
                groups: key_heads,
            });
        }
        let count = step.num_rows();
        let of_keys = CacheShape::elements(1, key_heads, key_dim)?;
        let of_values = CacheShape::elements(1, value_heads, value_dim)?;
        let of_decays = match layer.dt_bias.len() == value_heads {
            true => value_heads,
            false => CacheShape::elements(1, value_heads, key_dim)?,
        };
        for (name, array, width) in [
            ("query", rows.query, of_keys),
            ("key", rows.key, of_keys),
            ("value", rows.value, of_values),
            ("decay_gate", rows.decay_gate, of_decays),
            ("beta_gate", rows.beta_gate, value_heads),
        ] {
            array.check(name, count, width)?;
        }
        same_length("rate", value_heads, layer.rate.len())?;
        same_length("dt_bias", of_decays, layer.dt_bias.len())?;
        same_length(
            "out",
            CacheShape::elements(count, value_heads, value_dim)?,
            out,
        )?;
        let size = CacheShape::elements(1, key_dim, value_dim)?;
        let layout = StateShape {
            rows: 1,
            width: CacheShape::elements(1, value_heads, size)?,
            columns: size,
        };
        step.check(states, layout)?;
        Ok(layout)
    }
}

/// A head of a sequence.
struct DeltaTask<'a, E> {
    head: usize,
    state: StatePart<'a>,
    out: Part<'a, E>,
}

impl<E: Element> DeltaTask<'_, E> {
    fn run(
        self,
        attention: &Attention,
        shape: &DeltaShape,
        rows: &DeltaRows<'_, E>,
        layer: &DeltaLayer<'_>,
    ) {
        let mut scratch = vec![];
        let mut state = self.state.into_rows(&mut scratch);
        let state = &mut state[0];
        let first = self.out.rows.start;
        let mut out = self.out.into_rows();
        HeadTokens::with(shape.key_dim, shape.value_dim, out.len(), |tokens| {
            for (number, out) in out.chunks_mut(TOKENS).enumerate() {
                let read = ReadTokens {
                    shape,
                    rows,
                    layer,
                    head: self.head,
                    first: first + number * TOKENS,
                    count: out.len(),
                    tokens,
                };
                best_build(attention.isa(), read);
                tokens.correct(attention.isa(), out.len(), state);
                for (out, answer) in out.iter_mut().zip(tokens.out.chunks_exact(shape.value_dim)) {
                    for (out, &number) in out.iter_mut().zip(answer) {
                        *out = E::narrow(number);
                    }
                }
            }
        });
    }
}

/// Reads a head's tokens from `first` on.
struct ReadTokens<'a, E> {
    shape: &'a DeltaShape,
    rows: &'a DeltaRows<'a, E>,
    layer: &'a DeltaLayer<'a>,
    head: usize,
    first: usize,
    count: usize,
    tokens: &'a mut HeadTokens,
}

impl<E: Element> InEachBuild for ReadTokens<'_, E> {
    #[inline(always)]
    fn run(self) {
        let DeltaShape {
            key_dim, value_dim, ..
        } = *self.shape;
        let (rows, layer, head, tokens) = (self.rows, self.layer, self.head, self.tokens);
        let key_head = self.shape.key_head(head);
        let is_per_head = layer.dt_bias.len() == layer.rate.len();
        for at in 0..self.count {
            let row = self.first + at;
            let of_key = at * key_dim..(at + 1) * key_dim;
            let queries = &mut tokens.queries[of_key.clone()];
            let query = head_of(rows.query, row, key_head, key_dim);
            layer.read(query, layer.scaling, queries);
            let keys = &mut tokens.keys[of_key.clone()];
            layer.read(head_of(rows.key, row, key_head, key_dim), 1.0, keys);
            let values = &mut tokens.values[at * value_dim..][..value_dim];
            widen(head_of(rows.value, row, head, value_dim), values);
            let gate = rows.beta_gate.row(row)[head].widen();
            tokens.betas[at] = Sigmoid.of(gate) * layer.beta_scale;
            let decays = &mut tokens.decays[of_key];
            let rate = layer.rate[head] * std::f32::consts::LOG2_E;
            match is_per_head {
                true => {
                    let gate = rows.decay_gate.row(row)[head].widen();
                    decays.fill(exp2(Softplus.of(gate + layer.dt_bias[head]) * rate));
                }
                false => {
                    let gates = head_of(rows.decay_gate, row, head, key_dim);
                    let biases = &layer.dt_bias[head * key_dim..][..key_dim];
                    for (number, (gate, bias)) in decays.iter_mut().zip(gates.iter().zip(biases)) {
                        *number = exp2(Softplus.of(gate.widen() + bias) * rate);
                    }
                }
            }
        }
    }
}

impl DeltaShape {
    /// The head of keys of a head of values.
    fn key_head(&self, head: usize) -> usize {
        match self.sharing {
            KeySharing::Consecutive => head / (self.value_heads / self.key_heads),
            KeySharing::Tiled => head % self.key_heads,
        }
    }
}

impl DeltaLayer<'_> {
    /// A query or a key, normalised if that is asked for, times `factor`.
    #[inline(always)]
    fn read<E: Element>(&self, head: &[E], factor: f32, floats: &mut [f32]) {
        widen(head, floats);
        let length = match self.epsilon {
            Some(epsilon) => 1.0 / (sum_of_squares(floats) + epsilon).sqrt(),
            None => 1.0,
        };
        for float in floats {
            *float = *float * length * factor;
        }
    }
}

#[inline(always)]
fn head_of<'a, E>(rows: Rows<'a, E>, row: usize, head: usize, dim: usize) -> &'a [E] {
    &rows.row(row)[head * dim..][..dim]
}
