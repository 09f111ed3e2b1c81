//! The gated delta rule (Yang et al., 2024, arXiv:2412.06464) and Kimi's delta attention, whose decays differ from number
//! to number of a key (Kimi Team, 2025, arXiv:2510.26692).
//!
//! Tokens are computed one after another: chunked forms are faster where matrices are multiplied by tensor cores, but
//! their bits depend on where chunks begin.

use crate::activation::Function;
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
    /// Heads of values and states, a multiple of those of keys: consecutive ones share a head of keys.
    pub value_heads: usize,
    /// Numbers of a key.
    pub key_dim: usize,
    /// Numbers of a value.
    pub value_dim: usize,
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
    /// `[rows, value_heads]`: how far a value replaces what the state has for its key, mostly from 0 to 1.
    pub beta: Rows<'a, E>,
    /// `[rows, value_heads]`, or `[rows, value_heads, key_dim]` for a decay of each number of a key: natural logarithms
    /// of decays, at most 0.
    pub log_decay: &'a [f32],
}

/// Options of a layer.
#[derive(Clone, Copy, Debug)]
pub struct DeltaOptions {
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
    /// S = exp(log_decay) * S
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
        options: &DeltaOptions,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let layout = shape.check(step, rows, states.len(), out.len())?;
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
        self.advance(work, tasks, |task| task.run(self, shape, rows, options));
        Ok(())
    }

    /// `out` `[rows, dt_bias.len()]` becomes `-rate * softplus(numbers + dt_bias)`: logarithms of decays. `rate` has a
    /// number for each of `dt_bias`, or for each group of as many consecutive ones as it divides them into.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match; nothing is written.
    pub fn log_decays<E: Element>(
        &self,
        numbers: Rows<'_, E>,
        dt_bias: &[f32],
        rate: &[f32],
        out: &mut [f32],
    ) -> Result<(), Error> {
        above_zero("the length of rate", rate.len())?;
        above_zero("the length of dt_bias", dt_bias.len())?;
        let group = dt_bias.len() / rate.len();
        same_length(
            "dt_bias",
            (group * rate.len()).max(rate.len()),
            dt_bias.len(),
        )?;
        let width = if numbers.len() == 0 {
            dt_bias.len()
        } else {
            numbers.width()
        };
        same_length("a row", dt_bias.len(), width)?;
        let expected = CacheShape::elements(1, numbers.len(), dt_bias.len())?;
        same_length("out", expected, out.len())?;
        let chunk = (TASK / width).max(1);
        let tasks: Vec<_> = out
            .chunks_mut(chunk * width)
            .enumerate()
            .map(|(number, out)| LogDecays {
                numbers,
                first: number * chunk,
                dt_bias,
                rate,
                out,
            })
            .collect();
        let num_threads = self.threads().count().min(tasks.len());
        self.threads()
            .share_out(num_threads, tasks, |task| best_build(self.isa(), task));
        Ok(())
    }
}

/// Numbers of a task of functions, about.
const TASK: usize = 6_000;

impl DeltaShape {
    /// Checks the arrays; the layout of the states.
    fn check<E: Element>(
        &self,
        step: &StateStep,
        rows: &DeltaRows<'_, E>,
        states: usize,
        out: usize,
    ) -> Result<StateShape, Error> {
        let Self {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
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
        for (name, array, width) in [
            (
                "query",
                rows.query,
                CacheShape::elements(1, key_heads, key_dim)?,
            ),
            (
                "key",
                rows.key,
                CacheShape::elements(1, key_heads, key_dim)?,
            ),
            (
                "value",
                rows.value,
                CacheShape::elements(1, value_heads, value_dim)?,
            ),
            ("beta", rows.beta, value_heads),
        ] {
            array.check(name, count, width)?;
        }
        let of_heads = CacheShape::elements(1, count, value_heads)?;
        let of_numbers = CacheShape::elements(count, value_heads, key_dim)?;
        if rows.log_decay.len() != of_heads {
            same_length("log_decay", of_numbers, rows.log_decay.len())?;
        }
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
        options: &DeltaOptions,
    ) {
        let mut scratch = vec![];
        let mut state = self.state.into_rows(&mut scratch);
        let state = &mut state[0];
        let first = self.out.rows.start;
        let mut out = self.out.into_rows();
        let mut tokens = HeadTokens::new(shape.key_dim, shape.value_dim, out.len());
        for (number, out) in out.chunks_mut(TOKENS).enumerate() {
            let read = ReadTokens {
                shape,
                rows,
                options,
                head: self.head,
                first: first + number * TOKENS,
                count: out.len(),
                tokens: &mut tokens,
            };
            best_build(attention.isa(), read);
            tokens.correct(attention.isa(), out.len(), state);
            for (out, answer) in out.iter_mut().zip(tokens.out.chunks_exact(shape.value_dim)) {
                for (out, &number) in out.iter_mut().zip(answer) {
                    *out = E::narrow(number);
                }
            }
        }
    }
}

/// Reads a head's tokens from `first` on.
struct ReadTokens<'a, E> {
    shape: &'a DeltaShape,
    rows: &'a DeltaRows<'a, E>,
    options: &'a DeltaOptions,
    head: usize,
    first: usize,
    count: usize,
    tokens: &'a mut HeadTokens,
}

impl<E: Element> InEachBuild for ReadTokens<'_, E> {
    #[inline(always)]
    fn run(self) {
        let DeltaShape {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
        } = *self.shape;
        let (rows, tokens) = (self.rows, self.tokens);
        let key_head = self.head / (value_heads / key_heads);
        let per_row = rows.log_decay.len() / rows.query.len();
        for at in 0..self.count {
            let row = self.first + at;
            let of_key = at * key_dim..(at + 1) * key_dim;
            let queries = &mut tokens.queries[of_key.clone()];
            let scaling = self.options.scaling;
            self.options.read(
                head_of(rows.query, row, key_head, key_dim),
                scaling,
                queries,
            );
            let keys = &mut tokens.keys[of_key.clone()];
            self.options
                .read(head_of(rows.key, row, key_head, key_dim), 1.0, keys);
            let values = &mut tokens.values[at * value_dim..][..value_dim];
            widen(head_of(rows.value, row, self.head, value_dim), values);
            tokens.betas[at] = rows.beta.row(row)[self.head].widen();
            let log_decay = &rows.log_decay[row * per_row..][..per_row];
            let decays = &mut tokens.decays[of_key];
            match per_row == value_heads {
                true => decays.fill(exp(log_decay[self.head])),
                false => {
                    let log_decay = &log_decay[self.head * key_dim..][..key_dim];
                    for (decay, &logarithm) in decays.iter_mut().zip(log_decay) {
                        *decay = exp(logarithm);
                    }
                }
            }
        }
    }
}

impl DeltaOptions {
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

/// `e ^ x` for `x` up to 0.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    exp2(x * std::f32::consts::LOG2_E)
}

struct LogDecays<'a, E> {
    numbers: Rows<'a, E>,
    first: usize,
    dt_bias: &'a [f32],
    rate: &'a [f32],
    out: &'a mut [f32],
}

impl<E: Element> InEachBuild for LogDecays<'_, E> {
    #[inline(always)]
    fn run(self) {
        let group = self.dt_bias.len() / self.rate.len();
        for (at, out) in self.out.chunks_exact_mut(self.dt_bias.len()).enumerate() {
            let terms = self.numbers.row(self.first + at).iter().zip(self.dt_bias);
            for (out, (number, bias)) in out.iter_mut().zip(terms) {
                *out = Softplus.of(number.widen() + bias);
            }
            for (out, rate) in out.chunks_exact_mut(group).zip(self.rate) {
                for out in out {
                    *out *= -rate;
                }
            }
        }
    }
}
