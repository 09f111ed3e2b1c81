//! Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467) with a gate before or after it, of the
//! outputs of recurrent layers.

use crate::activation::{Function, Sigmoid, Silu};
use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::element::{Element, widen};
use crate::error::Error;
use crate::norm::sum_of_squares;
use crate::step::{CacheShape, above_zero, same_length};
use crate::write::Rows;

/// Numbers of a task, about.
const MANY: usize = 6_000;

/// A norm over each group of numbers, and its gate.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm<'a, E> {
    /// One or several groups; repeated for the whole row.
    pub weight: &'a [E],
    /// Numbers of a group.
    pub group_size: usize,
    /// Added under the root.
    pub epsilon: f32,
    /// The function of gates.
    pub gate: GateFunction,
    /// True: `norm(x) * function(gate)`; false: `norm(x * function(gate))`.
    pub is_norm_first: bool,
}

/// The function of a norm's gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    /// `x / (1 + e ^ -x)`.
    Silu,
    /// `1 / (1 + e ^ -x)`.
    Sigmoid,
}

impl Attention {
    /// `out` becomes the gated norm of `rows`, both `[rows, width]` like `gates`. It is computed in float32 and rounded
    /// once.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match; nothing is written.
    pub fn gated_norm<E: Element>(
        &self,
        rows: Rows<'_, E>,
        gates: Rows<'_, E>,
        norm: &GatedNorm<'_, E>,
        out: &mut [E],
    ) -> Result<(), Error> {
        above_zero("the group size", norm.group_size)?;
        let groups = norm.weight.len() / norm.group_size;
        above_zero("the number of the weight's groups", groups)?;
        same_length("weight", groups * norm.group_size, norm.weight.len())?;
        let width = rows.width();
        same_length(
            "a row",
            width / norm.weight.len() * norm.weight.len(),
            width,
        )?;
        gates.check("the gates", rows.len(), width)?;
        let expected = CacheShape::elements(1, rows.len(), width)?;
        same_length("out", expected, out.len())?;
        let chunk = (MANY / width.max(1)).max(1);
        let tasks = out.chunks_mut((chunk * width).max(1)).enumerate();
        let tasks = tasks.map(|(number, out)| GatedRows {
            rows,
            gates,
            first: number * chunk,
            norm,
            out,
        });
        let tasks: Vec<_> = tasks.collect();
        let num_threads = self.threads().count().min(tasks.len());
        self.threads()
            .share_out(num_threads, tasks, |task| best_build(self.isa(), task));
        Ok(())
    }
}

/// Some rows from `first` on.
struct GatedRows<'a, E> {
    rows: Rows<'a, E>,
    gates: Rows<'a, E>,
    first: usize,
    norm: &'a GatedNorm<'a, E>,
    out: &'a mut [E],
}

impl<E: Element> InEachBuild for GatedRows<'_, E> {
    #[inline(always)]
    fn run(self) {
        match self.norm.gate {
            GateFunction::Silu => self.normalise(Silu),
            GateFunction::Sigmoid => self.normalise(Sigmoid),
        }
    }
}

impl<E: Element> GatedRows<'_, E> {
    #[inline(always)]
    fn normalise(self, function: impl Function) {
        let (norm, size) = (self.norm, self.norm.group_size);
        let mut numbers = vec![0.0f32; size];
        let mut factors = vec![0.0f32; size];
        for (at, out) in self.out.chunks_exact_mut(self.rows.width()).enumerate() {
            let row = self.rows.row(self.first + at).chunks_exact(size);
            let gates = self.gates.row(self.first + at).chunks_exact(size);
            let weights = norm.weight.chunks_exact(size).cycle();
            let groups = row.zip(gates).zip(weights);
            for (((group, gates), weights), out) in groups.zip(out.chunks_exact_mut(size)) {
                widen(group, &mut numbers);
                for (factor, gate) in factors.iter_mut().zip(gates) {
                    *factor = function.of(gate.widen());
                }
                if !norm.is_norm_first {
                    for (number, factor) in numbers.iter_mut().zip(&mut factors) {
                        *number *= std::mem::replace(factor, 1.0);
                    }
                }
                let mean = sum_of_squares(&numbers) / size as f32;
                let scale = 1.0 / (mean + norm.epsilon).sqrt();
                let terms = numbers.iter().zip(&factors).zip(weights);
                for (out, ((number, factor), weight)) in out.iter_mut().zip(terms) {
                    *out = E::narrow(number * scale * weight.widen() * factor);
                }
            }
        }
    }
}
