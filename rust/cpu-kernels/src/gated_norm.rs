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

/// A norm over each group of numbers.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm<'a> {
    /// One or several groups; repeated for the whole row.
    pub weight: &'a [f32],
    /// Numbers of a group.
    pub group_size: usize,
    /// Added under the root.
    pub epsilon: f32,
}

/// A gate, and a norm before or after it.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm<'a> {
    /// The norm, if there is one.
    pub norm: Option<GroupNorm<'a>>,
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
        norm: &GatedNorm<'_>,
        out: &mut [E],
    ) -> Result<(), Error> {
        let width = rows.width();
        if let Some(norm) = &norm.norm {
            norm.check(width)?;
        }
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

impl GroupNorm<'_> {
    /// `width`: numbers of a row.
    fn check(&self, width: usize) -> Result<(), Error> {
        above_zero("the group size", self.group_size)?;
        let groups = self.weight.len() / self.group_size;
        above_zero("the number of the weight's groups", groups)?;
        same_length("weight", groups * self.group_size, self.weight.len())?;
        same_length(
            "a row",
            width / self.weight.len() * self.weight.len(),
            width,
        )
    }
}

/// Some rows from `first` on.
struct GatedRows<'a, E> {
    rows: Rows<'a, E>,
    gates: Rows<'a, E>,
    first: usize,
    norm: &'a GatedNorm<'a>,
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
        let (width, is_norm_first) = (self.rows.width(), self.norm.is_norm_first);
        let mut numbers = vec![0.0f32; width];
        let mut factors = vec![0.0f32; width];
        for (at, out) in self.out.chunks_exact_mut(width).enumerate() {
            widen(self.rows.row(self.first + at), &mut numbers);
            let gates = self.gates.row(self.first + at);
            for (factor, gate) in factors.iter_mut().zip(gates) {
                *factor = function.of(gate.widen());
            }
            if !is_norm_first {
                multiply(&mut numbers, &factors);
            }
            if let Some(norm) = &self.norm.norm {
                norm.apply(&mut numbers);
            }
            if is_norm_first {
                multiply(&mut numbers, &factors);
            }
            for (out, number) in out.iter_mut().zip(&numbers) {
                *out = E::narrow(*number);
            }
        }
    }
}

impl GroupNorm<'_> {
    #[inline(always)]
    fn apply(&self, numbers: &mut [f32]) {
        let size = self.group_size;
        let weights = self.weight.chunks_exact(size).cycle();
        for (group, weights) in numbers.chunks_exact_mut(size).zip(weights) {
            let mean = sum_of_squares(group) / size as f32;
            let scale = 1.0 / (mean + self.epsilon).sqrt();
            for (number, weight) in group.iter_mut().zip(weights) {
                *number = *number * scale * weight;
            }
        }
    }
}

#[inline(always)]
fn multiply(numbers: &mut [f32], factors: &[f32]) {
    for (number, factor) in numbers.iter_mut().zip(factors) {
        *number *= factor;
    }
}
