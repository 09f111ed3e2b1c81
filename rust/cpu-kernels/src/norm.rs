//! Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), in one pass over each row.

use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::element::Element;
use crate::error::Error;
use crate::step::{above_zero, same_length};

/// Squares that are added up side by side: the same for all builds.
const LANES: usize = 16;

/// Numbers that a thread normalises at a time, about.
const MANY: usize = 6_000;

impl Attention {
    /// `out` becomes `row / sqrt(mean(row ^ 2) + epsilon) * weight` for each of `rows` `[rows, weight.len()]`. Sums are
    /// float32. What is multiplied with the weight is rounded to the weight's type before: transformers does so for
    /// Llama, and multiplies in float32 for Gemma.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit each other: nothing is written then.
    pub fn rms_norm<E: Element, W: Element>(
        &self,
        rows: &[E],
        weight: &[W],
        epsilon: f32,
        out: &mut [E],
    ) -> Result<(), Error> {
        above_zero("the length of the weight", weight.len())?;
        same_length("out", rows.len(), out.len())?;
        let whole = rows.len() / weight.len() * weight.len();
        same_length("rows", whole, rows.len())?;
        let size = (MANY / weight.len()).max(1) * weight.len();
        let tasks: Vec<_> = rows.chunks(size).zip(out.chunks_mut(size)).collect();
        let num_threads = self.threads().count().min(tasks.len());
        self.threads().each(num_threads, tasks, |(rows, out)| {
            let work = Normalise {
                rows,
                weight,
                epsilon,
                out,
            };
            best_build(self.isa(), work);
        });
        Ok(())
    }
}

struct Normalise<'a, E, W> {
    rows: &'a [E],
    weight: &'a [W],
    epsilon: f32,
    out: &'a mut [E],
}

impl<E: Element, W: Element> InEachBuild for Normalise<'_, E, W> {
    #[inline(always)]
    fn run(self) {
        let size = self.weight.len();
        let rows = self.rows.chunks_exact(size);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(size)) {
            let mean = sum_of_squares(row) / size as f32;
            let scale = 1.0 / (mean + self.epsilon).sqrt();
            for ((out, element), weight) in out.iter_mut().zip(row).zip(self.weight) {
                let normal = W::narrow(element.widen() * scale).widen();
                *out = E::narrow(normal * weight.widen());
            }
        }
    }
}

#[inline(always)]
pub(crate) fn sum_of_squares<E: Element>(row: &[E]) -> f32 {
    let mut squares = [0.0f32; LANES];
    let (wide, rest) = row.as_chunks::<LANES>();
    for elements in wide {
        for lane in 0..LANES {
            let float = elements[lane].widen();
            squares[lane] = float.mul_add(float, squares[lane]);
        }
    }
    for (square, element) in squares.iter_mut().zip(rest) {
        *square = element.widen().mul_add(element.widen(), *square);
    }
    squares.iter().sum()
}
