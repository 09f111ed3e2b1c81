//! Causal convolutions of a few positions, channel by channel: of Mamba, of gated delta nets, and of LFM2 with its gates
//! (Liquid AI, 2025, arXiv:2511.23404).

use std::ops::Range;

use crate::activation::Activation;
use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::divided::Part;
use crate::element::{Element, widen};
use crate::error::Error;
use crate::states::{StatePart, StateShape, StateStep};
use crate::step::{CacheShape, above_zero, same_length};
use crate::write::Rows;

/// Channels of a task.
const CHANNELS: usize = 512;

/// Positions that are computed at a time: they stay in the processor's first cache.
const POSITIONS: usize = 8;

/// The parameters of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ShortConv<'a> {
    /// `[kernel_size, channels]`, the newest position last.
    pub weight: &'a [f32],
    /// Positions that an output depends on, at least 2.
    pub kernel_size: usize,
    /// `[channels]`.
    pub bias: Option<&'a [f32]>,
    /// Of the sums.
    pub activation: Option<Activation>,
}

/// The new tokens, `[rows, channels]`.
#[derive(Clone, Copy, Debug)]
pub struct ConvRows<'a, E> {
    /// Inputs.
    pub x: Rows<'a, E>,
    /// Factors of inputs and of outputs, as in LFM2.
    pub gates: Option<[Rows<'a, E>; 2]>,
}

impl Attention {
    /// Convolves each sequence's tokens into `out` `[rows, channels]`. The state of a sequence is its last inputs, with
    /// their gate: `states` are `[num_slots, kernel_size - 1, channels]`, the newest one last.
    ///
    /// A token has the same bits in every batch, in whatever calls its sequence is computed.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match, and slots that the states do not have; nothing is written.
    pub fn short_conv<E: Element>(
        &self,
        step: &StateStep,
        conv: &ShortConv<'_>,
        rows: &ConvRows<'_, E>,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let layout = conv.check(step, rows, states.len(), out.len())?;
        let outs = step.divide_rows(out, layout.width, layout.columns);
        let tasks = step.divide(states, layout).into_iter().zip(outs);
        let tasks = tasks.map(|(state, out)| ConvTask {
            conv,
            rows,
            state,
            out,
        });
        let work = step.num_rows() * layout.width;
        self.advance(work, tasks.collect(), |task| best_build(self.isa(), task));
        Ok(())
    }
}

impl ShortConv<'_> {
    /// Checks the arrays; the layout of the states.
    fn check<E: Element>(
        &self,
        step: &StateStep,
        rows: &ConvRows<'_, E>,
        states: usize,
        out: usize,
    ) -> Result<StateShape, Error> {
        let before = self.kernel_size.saturating_sub(1);
        above_zero("the kernel size less 1", before)?;
        let channels = self.weight.len() / self.kernel_size;
        above_zero("the number of channels", channels)?;
        same_length("weight", channels * self.kernel_size, self.weight.len())?;
        same_length("bias", channels, self.bias.map_or(channels, <[f32]>::len))?;
        let count = step.num_rows();
        rows.x.check("x", count, channels)?;
        for gate in rows.gates.iter().flatten() {
            gate.check("a gate", count, channels)?;
        }
        same_length("out", CacheShape::elements(1, count, channels)?, out)?;
        let layout = StateShape {
            rows: before,
            width: channels,
            columns: CHANNELS,
        };
        step.check(states, layout)?;
        Ok(layout)
    }
}

/// Some channels of a sequence.
struct ConvTask<'a, E> {
    conv: &'a ShortConv<'a>,
    rows: &'a ConvRows<'a, E>,
    state: StatePart<'a>,
    out: Part<'a, E>,
}

impl<E: Element> InEachBuild for ConvTask<'_, E> {
    #[inline(always)]
    fn run(self) {
        let Self {
            conv, rows, out, ..
        } = self;
        let (channels, first) = (out.columns.clone(), out.rows.start);
        let (size, before) = (channels.len(), conv.kernel_size - 1);
        let mut scratch = vec![];
        let mut state = self.state.into_rows(&mut scratch);
        let mut out = out.into_rows();
        let mut inputs = vec![0.0f32; (before + out.len().min(POSITIONS)) * size];
        let mut sums = vec![0.0f32; size];
        for (input, state) in inputs.chunks_exact_mut(size).zip(&state) {
            input.copy_from_slice(state);
        }
        for (number, out) in out.chunks_mut(POSITIONS).enumerate() {
            let new = inputs.chunks_exact_mut(size).skip(before);
            for (at, input) in new.take(out.len()).enumerate() {
                let row = first + number * POSITIONS + at;
                rows.read(row, channels.clone(), input);
            }
            for (at, out) in out.iter_mut().enumerate() {
                match conv.bias {
                    Some(bias) => sums.copy_from_slice(&bias[channels.clone()]),
                    None => sums.fill(0.0),
                }
                let weights = conv
                    .weight
                    .chunks_exact(conv.weight.len() / conv.kernel_size);
                let inputs = inputs[at * size..].chunks_exact(size);
                for (weight, input) in weights.zip(inputs) {
                    let terms = weight[channels.clone()].iter().zip(input);
                    for (sum, (weight, input)) in sums.iter_mut().zip(terms) {
                        *sum = weight.mul_add(*input, *sum);
                    }
                }
                let row = first + number * POSITIONS + at;
                conv.write(rows, row, (channels.clone(), &mut sums), out);
            }
            inputs.copy_within(out.len() * size..(out.len() + before) * size, 0);
        }
        for (input, state) in inputs.chunks_exact(size).zip(&mut state) {
            state.copy_from_slice(input);
        }
    }
}

impl<E: Element> ConvRows<'_, E> {
    /// The inputs of a row.
    #[inline(always)]
    fn read(&self, row: usize, channels: Range<usize>, input: &mut [f32]) {
        let x = &self.x.row(row)[channels.clone()];
        match &self.gates {
            None => widen(x, input),
            Some([gate, _]) => {
                let terms = x.iter().zip(&gate.row(row)[channels]);
                for (input, (x, gate)) in input.iter_mut().zip(terms) {
                    *input = x.widen() * gate.widen();
                }
            }
        }
    }
}

impl ShortConv<'_> {
    /// The outputs of a row, whose sums these are.
    #[inline(always)]
    fn write<E: Element>(
        &self,
        rows: &ConvRows<'_, E>,
        row: usize,
        (channels, sums): (Range<usize>, &mut [f32]),
        out: &mut [E],
    ) {
        if let Some(activation) = self.activation {
            activation.map(sums);
        }
        match &rows.gates {
            None => {
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = E::narrow(*sum);
                }
            }
            Some([_, gate]) => {
                let terms = sums.iter().zip(&gate.row(row)[channels]);
                for (out, (sum, gate)) in out.iter_mut().zip(terms) {
                    *out = E::narrow(sum * gate.widen());
                }
            }
        }
    }
}
