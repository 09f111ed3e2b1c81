//! Linear layers in float32 and bfloat16: rows times a packed weight, for decodes of a few rows as for prefills.

use std::ops::Range;

use crate::activation::Activation;
use crate::attention::Attention;
use crate::dispatch::Attend;
use crate::divided::divided;
use crate::error::Error;
use crate::linear_task::Multiply;
use crate::lines::{Features, WIDTH};
use crate::packed_weight::PackedWeight;
use crate::product::Columns;
use crate::step::same_length;

/// Multiplications below which no other thread is woken: about ten microseconds of work.
const SMALL: usize = 100_000;

/// Multiplications of a task at least.
const TASK: usize = 50_000;

/// Tasks per thread, so that a thread on a busy processor does less.
const TASKS: usize = 8;

/// Rows whose sums stay in registers.
const FEW_ROWS: usize = 6;

/// Maximum rows of a task: they and their sums stay in a core's L2 cache.
const MAX_ROWS: usize = 96;

/// Rows of two AMX tiles; no other level has more.
const TILES_OF_ROWS: usize = 32;

/// Rows of each thread from which on threads divide the rows and not the outputs: each reads all weights then, and the rows
/// that it has written itself.
const OWN_ROWS: usize = 192;

/// Maximum panels of a task of more than a few rows.
const MAX_PANELS: usize = 16;

impl Attention {
    /// `out` `[rows, out_features]` becomes `rows` `[rows, in_features]` times the transposed weight, plus `bias`
    /// `[out_features]`. Each sum begins with the bias and adds the products in the order of the inputs, rounded once
    /// each: a row has the same bits in every batch, with any number of threads and at every level. In bfloat16 the sum is
    /// rounded at the end; levels with an instruction for its products have their own bits, and AMX adds the bias last.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match; nothing is written.
    pub fn linear<E: Attend>(
        &self,
        rows: &[E],
        weight: &PackedWeight,
        bias: Option<&[E]>,
        out: &mut [E],
    ) -> Result<(), Error> {
        check_rows(weight.features(), rows.len(), out.len())?;
        if let Some(bias) = bias {
            same_length("bias", weight.out_features(), bias.len())?;
        }
        self.by_columns(rows, weight, out, |columns| {
            let work = Multiply {
                columns,
                weight,
                bias,
                gate: None,
            };
            E::multiply(self.isa(), work);
        });
        Ok(())
    }

    /// `out` becomes `activation(rows * gate) * (rows * up)`, for weights of one shape. As [`Attention::linear`]
    /// otherwise.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match; nothing is written.
    pub fn gated_linear<E: Attend>(
        &self,
        rows: &[E],
        gate: &PackedWeight,
        activation: Activation,
        up: &PackedWeight,
        out: &mut [E],
    ) -> Result<(), Error> {
        check_rows(up.features(), rows.len(), out.len())?;
        check_gate(up.features(), gate.features())?;
        self.by_columns(rows, up, out, |columns| {
            let work = Multiply {
                columns,
                weight: up,
                bias: None,
                gate: Some((gate, activation)),
            };
            E::multiply(self.isa(), work);
        });
        Ok(())
    }

    /// Calls `work` with all outputs of all rows, some at a time.
    fn by_columns<E: Attend>(
        &self,
        rows: &[E],
        weight: &PackedWeight,
        out: &mut [E],
        work: impl Fn(Columns<'_, '_, E, E>) + Sync,
    ) {
        let (size, width) = (weight.in_features(), weight.out_features());
        let count = rows.len() / size;
        let products = rows.len().saturating_mul(width);
        let num_threads = match products > SMALL {
            true => self.threads().count(),
            false => 1,
        };
        let num_panels = width.div_ceil(WIDTH);
        let tasks = (products / TASK).clamp(1, TASKS * num_threads);
        let mut panels = num_panels.div_ceil(tasks);
        if count > FEW_ROWS {
            panels = panels.min(MAX_PANELS);
        }
        panels = balanced(num_panels, panels, num_threads);
        let own = own_rows(count, num_threads);
        let chunks: Vec<_> = (0..count)
            .step_by(own)
            .flat_map(|first| chunks(first..count.min(first + own), MAX_ROWS))
            .collect();
        let mut parts = divided(out, width, panels * WIDTH, &chunks);
        parts.sort_by_key(|part| part.rows.start / own);
        self.threads().share_out(num_threads, parts, |part| {
            work(Columns {
                rows: &rows[part.rows.start * size..part.rows.end * size],
                first: part.columns.start / WIDTH,
                out: part.into_rows(),
            });
        });
    }
}

/// Rows that a thread has for itself; all of them where threads divide the outputs.
pub(crate) fn own_rows(count: usize, num_threads: usize) -> usize {
    match count.div_ceil(num_threads) {
        own @ OWN_ROWS.. => own.next_multiple_of(TILES_OF_ROWS),
        _ => count.max(1),
    }
}

/// The range in pieces of `size`.
fn chunks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range
        .step_by(size)
        .map(move |first| first..end.min(first + size))
}

/// Panels of a task, about `panels`: an even number, four at best, and such that threads have equally many tasks.
fn balanced(num_panels: usize, panels: usize, num_threads: usize) -> usize {
    let step = match num_panels / num_threads {
        8.. => 4,
        4.. => 2,
        _ => return panels,
    };
    let first = panels.next_multiple_of(step);
    let is_even = |panels: &usize| num_panels.div_ceil(*panels).is_multiple_of(num_threads);
    (first..=2 * first)
        .step_by(2)
        .find(is_even)
        .unwrap_or(first)
}

/// Checks the numbers of elements of rows and of their products, for a weight of these features.
pub(crate) fn check_rows(
    Features { inputs, outputs }: Features,
    rows: usize,
    out: usize,
) -> Result<(), Error> {
    let count = rows / inputs;
    same_length("rows", count * inputs, rows)?;
    let expected = count.checked_mul(outputs);
    same_length("out", expected.ok_or(Error::TooLarge)?, out)
}

/// Checks that a gate has the features of the weight that it gates.
pub(crate) fn check_gate(up: Features, gate: Features) -> Result<(), Error> {
    same_length("the inputs of gate", up.inputs, gate.inputs)?;
    same_length("the outputs of gate", up.outputs, gate.outputs)
}
