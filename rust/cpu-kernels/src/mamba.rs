//! Selective state spaces: Mamba (Gu and Dao, 2023, arXiv:2312.00752) and Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060).
//!
//! In both, a state has the numbers of a head or channel innermost, so that lanes are outputs and nothing is added up
//! across them. Tokens are computed one after another.

use crate::activation::{Function, Silu};
use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::divided::Part;
use crate::element::{Element, widen};
use crate::error::Error;
use crate::lanes::exp2;
use crate::softplus::Softplus;
use crate::state_tile::{HeadTokens, TOKENS};
use crate::states::{StatePart, StateShape, StateStep};
use crate::step::{CacheShape, above_zero, same_length};
use crate::write::Rows;

/// Channels of a task of Mamba: with 16 numbers each, their states stay in the processor's first cache.
const CHANNELS: usize = 512;

/// The heads of a layer of Mamba-2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mamba2Shape {
    /// Heads.
    pub heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Groups of heads, which divide them evenly: consecutive heads share `b` and `c`.
    pub groups: usize,
    /// Numbers of a state for each number of a head.
    pub state_size: usize,
}

/// The new tokens of a layer.
#[derive(Clone, Copy, Debug)]
pub struct MambaRows<'a, E> {
    /// `[rows, heads, head_dim]`, or `[rows, channels]`: inputs.
    pub x: Rows<'a, E>,
    /// `[rows, heads]`, or `[rows, channels]`: time steps before their bias and softplus.
    pub dt: Rows<'a, E>,
    /// `[rows, groups, state_size]`, or `[rows, state_size]`: what takes inputs into the state.
    pub b: Rows<'a, E>,
    /// Likewise: what reads the state.
    pub c: Rows<'a, E>,
    /// As `x`: outputs are multiplied by its SiLU.
    pub gate: Option<Rows<'a, E>>,
}

/// The parameters of a layer.
#[derive(Clone, Copy, Debug)]
pub struct MambaWeights<'a> {
    /// `[heads]`, or `[state_size, channels]`: rates of growth, negative.
    pub a: &'a [f32],
    /// `[heads]`, or `[channels]`: added to time steps.
    pub dt_bias: &'a [f32],
    /// `[heads]`, or `[channels]`: factors of inputs that are added to outputs.
    pub d: &'a [f32],
    /// The least and the largest time step.
    pub dt_limits: (f32, f32),
}

impl Attention {
    /// Advances each sequence's state by its tokens, as Mamba-2 does; `out` is `[rows, heads, head_dim]`. `states` are
    /// `[num_slots, heads, state_size, head_dim]`. For each token, with `S` the state:
    ///
    /// ```text
    /// dt = clamp(softplus(dt + dt_bias), dt_limits)
    /// S = exp(dt * a) * S + b * dt * x
    /// out = (c S + d * x) * silu(gate)
    /// ```
    ///
    /// A token has the same bits in every batch, in whatever calls its sequence is computed.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match, and slots that the states do not have; nothing is written.
    pub fn mamba2<E: Element>(
        &self,
        step: &StateStep,
        shape: &Mamba2Shape,
        rows: &MambaRows<'_, E>,
        weights: &MambaWeights<'_>,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let layout = shape.check(step, rows, weights, states.len(), out.len())?;
        let width = shape.heads * shape.head_dim;
        let outs = step.divide_rows(out, width, shape.head_dim);
        let tasks = step.divide(states, layout).into_iter().zip(outs);
        let tasks = tasks.enumerate().map(|(number, (state, out))| HeadTask {
            head: number % shape.heads,
            state,
            out,
        });
        let work = step.num_rows() * width * shape.state_size;
        self.advance(work, tasks.collect(), |task| {
            task.run(self, shape, rows, weights);
        });
        Ok(())
    }

    /// The same as Mamba does: `out` is `[rows, channels]`, and `states` are `[num_slots, state_size, channels]`. Each
    /// channel is a head of one number, with a time step of its own, and decays differ from number to number of a state.
    ///
    /// # Errors
    ///
    /// As [`Attention::mamba2`].
    pub fn mamba<E: Element>(
        &self,
        step: &StateStep,
        rows: &MambaRows<'_, E>,
        weights: &MambaWeights<'_>,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let channels = weights.d.len();
        above_zero("the length of d", channels)?;
        let state_size = weights.a.len() / channels;
        above_zero("the number of a's rows", state_size)?;
        same_length("a", state_size * channels, weights.a.len())?;
        same_length("dt_bias", channels, weights.dt_bias.len())?;
        rows.check(step, [channels, channels, state_size])?;
        let expected = CacheShape::elements(1, step.num_rows(), channels)?;
        same_length("out", expected, out.len())?;
        let layout = StateShape {
            rows: state_size,
            width: channels,
            columns: CHANNELS,
        };
        step.check(states.len(), layout)?;
        let outs = step.divide_rows(out, channels, CHANNELS);
        let tasks = step.divide(states, layout).into_iter().zip(outs);
        let tasks = tasks.map(|(state, out)| ChannelTask {
            rows,
            weights,
            state,
            out,
        });
        let work = step.num_rows() * state_size * channels;
        self.advance(work, tasks.collect(), |task| best_build(self.isa(), task));
        Ok(())
    }
}

impl<E: Element> MambaRows<'_, E> {
    /// `widths`: of inputs, of time steps, of `b` and `c`.
    fn check(&self, step: &StateStep, widths: [usize; 3]) -> Result<(), Error> {
        let (count, [of_x, of_dt, of_b]) = (step.num_rows(), widths);
        self.x.check("x", count, of_x)?;
        self.dt.check("dt", count, of_dt)?;
        self.b.check("b", count, of_b)?;
        self.c.check("c", count, of_b)?;
        match self.gate {
            Some(gate) => gate.check("gate", count, of_x),
            None => Ok(()),
        }
    }
}

impl Mamba2Shape {
    /// Checks the arrays; the layout of the states.
    fn check<E: Element>(
        &self,
        step: &StateStep,
        rows: &MambaRows<'_, E>,
        weights: &MambaWeights<'_>,
        states: usize,
        out: usize,
    ) -> Result<StateShape, Error> {
        let Self {
            heads,
            head_dim,
            groups,
            state_size,
        } = *self;
        for (name, size) in [
            ("the number of heads", heads),
            ("the dimension of heads", head_dim),
            ("the number of groups", groups),
            ("the size of a state", state_size),
        ] {
            above_zero(name, size)?;
        }
        if !heads.is_multiple_of(groups) {
            return Err(Error::Groups { heads, groups });
        }
        let width = CacheShape::elements(1, heads, head_dim)?;
        let of_b = CacheShape::elements(1, groups, state_size)?;
        rows.check(step, [width, heads, of_b])?;
        for (name, vector) in [
            ("a", weights.a),
            ("dt_bias", weights.dt_bias),
            ("d", weights.d),
        ] {
            same_length(name, heads, vector.len())?;
        }
        same_length("out", CacheShape::elements(1, step.num_rows(), width)?, out)?;
        let size = CacheShape::elements(1, state_size, head_dim)?;
        let layout = StateShape {
            rows: 1,
            width: CacheShape::elements(1, heads, size)?,
            columns: size,
        };
        step.check(states, layout)?;
        Ok(layout)
    }
}

impl MambaWeights<'_> {
    /// The time step of a head or channel.
    #[inline(always)]
    fn time_step<E: Element>(&self, dt: E, at: usize) -> f32 {
        let (least, most) = self.dt_limits;
        let dt = Softplus.of(dt.widen() + self.dt_bias[at]);
        let dt = if dt < least { least } else { dt };
        if dt > most { most } else { dt }
    }
}

/// A head of a sequence, in Mamba-2.
struct HeadTask<'a, E> {
    head: usize,
    state: StatePart<'a>,
    out: Part<'a, E>,
}

impl<E: Element> HeadTask<'_, E> {
    fn run(
        self,
        attention: &Attention,
        shape: &Mamba2Shape,
        rows: &MambaRows<'_, E>,
        weights: &MambaWeights<'_>,
    ) {
        let mut scratch = vec![];
        let mut state = self.state.into_rows(&mut scratch);
        let state = &mut state[0];
        let first = self.out.rows.start;
        let mut out = self.out.into_rows();
        HeadTokens::with(shape.state_size, shape.head_dim, out.len(), |tokens| {
            for (number, out) in out.chunks_mut(TOKENS).enumerate() {
                let mut head = HeadRows {
                    shape,
                    rows,
                    weights,
                    head: self.head,
                    first: first + number * TOKENS,
                    tokens,
                };
                let count = out.len();
                best_build(attention.isa(), Read(&mut head, count));
                head.tokens.accumulate(attention.isa(), count, state);
                best_build(attention.isa(), Write(&head, out));
            }
        });
    }
}

/// Some tokens of a head.
struct HeadRows<'a, E> {
    shape: &'a Mamba2Shape,
    rows: &'a MambaRows<'a, E>,
    weights: &'a MambaWeights<'a>,
    head: usize,
    first: usize,
    tokens: &'a mut HeadTokens,
}

/// Reads so many tokens.
struct Read<'a, 'b, E>(&'a mut HeadRows<'b, E>, usize);

impl<E: Element> InEachBuild for Read<'_, '_, E> {
    #[inline(always)]
    fn run(self) {
        let Self(head, count) = self;
        let Mamba2Shape {
            heads,
            head_dim,
            groups,
            state_size,
        } = *head.shape;
        let group = head.head / (heads / groups);
        let of_group = group * state_size..(group + 1) * state_size;
        for at in 0..count {
            let row = head.first + at;
            let of_token = at * state_size..(at + 1) * state_size;
            let tokens = &mut *head.tokens;
            let dt = head
                .weights
                .time_step(head.rows.dt.row(row)[head.head], head.head);
            let decay = dt * head.weights.a[head.head] * std::f32::consts::LOG2_E;
            tokens.decays[of_token.clone()].fill(exp2(decay));
            widen(
                &head.rows.b.row(row)[of_group.clone()],
                &mut tokens.keys[of_token.clone()],
            );
            widen(
                &head.rows.c.row(row)[of_group.clone()],
                &mut tokens.queries[of_token],
            );
            let x = &head.rows.x.row(row)[head.head * head_dim..][..head_dim];
            let values = &mut tokens.values[at * head_dim..][..head_dim];
            for (value, x) in values.iter_mut().zip(x) {
                *value = x.widen() * dt;
            }
        }
    }
}

/// Writes the outputs of the tokens.
struct Write<'a, 'b, 'c, E>(&'a HeadRows<'b, E>, &'a mut [&'c mut [E]]);

impl<E: Element> InEachBuild for Write<'_, '_, '_, E> {
    #[inline(always)]
    fn run(self) {
        let Self(head, out) = self;
        let head_dim = head.shape.head_dim;
        let of_head = head.head * head_dim..(head.head + 1) * head_dim;
        let d = head.weights.d[head.head];
        for (at, out) in out.iter_mut().enumerate() {
            let row = head.first + at;
            let x = &head.rows.x.row(row)[of_head.clone()];
            let answers = &head.tokens.out[at * head_dim..][..head_dim];
            match &head.rows.gate {
                None => {
                    for ((out, answer), x) in out.iter_mut().zip(answers).zip(x) {
                        *out = E::narrow(x.widen().mul_add(d, *answer));
                    }
                }
                Some(gate) => {
                    let terms = x.iter().zip(&gate.row(row)[of_head.clone()]);
                    for ((out, answer), (x, gate)) in out.iter_mut().zip(answers).zip(terms) {
                        let gate = Silu.of(gate.widen());
                        *out = E::narrow(x.widen().mul_add(d, *answer) * gate);
                    }
                }
            }
        }
    }
}

/// Some channels of a sequence, in Mamba.
struct ChannelTask<'a, E> {
    rows: &'a MambaRows<'a, E>,
    weights: &'a MambaWeights<'a>,
    state: StatePart<'a>,
    out: Part<'a, E>,
}

impl<E: Element> InEachBuild for ChannelTask<'_, E> {
    #[inline(always)]
    fn run(self) {
        let (rows, weights) = (self.rows, self.weights);
        let (channels, first) = (self.out.columns.clone(), self.out.rows.start);
        let width = weights.d.len();
        let mut scratch = vec![];
        let mut state = self.state.into_rows(&mut scratch);
        let [mut steps, mut inputs, mut sums] = [(); 3].map(|()| vec![0.0f32; channels.len()]);
        let mut bs = vec![0.0; state.len()];
        let mut cs = bs.clone();
        for (at, out) in self.out.into_rows().into_iter().enumerate() {
            let row = first + at;
            let x = &rows.x.row(row)[channels.clone()];
            let dts = &rows.dt.row(row)[channels.clone()];
            for (at, (step, dt)) in steps.iter_mut().zip(dts).enumerate() {
                *step = weights.time_step(*dt, channels.start + at);
            }
            for ((input, x), step) in inputs.iter_mut().zip(x).zip(&mut steps) {
                *input = x.widen() * *step;
                *step *= std::f32::consts::LOG2_E;
            }
            widen(rows.b.row(row), &mut bs);
            widen(rows.c.row(row), &mut cs);
            sums.fill(0.0);
            let terms = state.iter_mut().zip(bs.iter().zip(&cs));
            for (number, (state, (&b, &c))) in terms.enumerate() {
                let a = &weights.a[number * width..][channels.clone()];
                advance_channels(state, [a, &steps, &inputs], (b, c), &mut sums);
            }
            let d = &weights.d[channels.clone()];
            for ((sum, x), d) in sums.iter_mut().zip(x).zip(d) {
                *sum = x.widen().mul_add(*d, *sum);
            }
            match &rows.gate {
                None => {
                    for (out, sum) in out.iter_mut().zip(&sums) {
                        *out = E::narrow(*sum);
                    }
                }
                Some(gate) => {
                    let terms = sums.iter().zip(&gate.row(row)[channels.clone()]);
                    for (out, (sum, gate)) in out.iter_mut().zip(terms) {
                        *out = E::narrow(sum * Silu.of(gate.widen()));
                    }
                }
            }
        }
    }
}

/// One number of each channel's state, and its part of the outputs. All are of one length.
#[inline(always)]
fn advance_channels(
    state: &mut [f32],
    [a, steps, inputs]: [&[f32]; 3],
    (b, c): (f32, f32),
    sums: &mut [f32],
) {
    let size = state.len();
    let (a, steps, inputs) = (&a[..size], &steps[..size], &inputs[..size]);
    let sums = &mut sums[..size]; // so that the loop need not look
    for at in 0..size {
        let number = inputs[at].mul_add(b, state[at] * exp2(a[at] * steps[at]));
        state[at] = number;
        sums[at] = number.mul_add(c, sums[at]);
    }
}
