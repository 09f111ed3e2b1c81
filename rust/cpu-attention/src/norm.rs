//! Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), in one pass over each row.

use crate::attention::Attention;
use crate::element::Element;
use crate::error::Error;
use crate::isa::normalise;
use crate::step::{above_zero, same_length};

/// Squares that are added up side by side: the same for all builds.
const LANES: usize = 16;

/// Numbers that a thread normalises at a time, about.
const MANY: usize = 20_000;

impl Attention {
    /// `out` becomes `row / sqrt(mean(row ^ 2) + epsilon) * weight` for each of `rows` `[rows, weight.len()]`. Sums are
    /// float32; what is multiplied with the weight is rounded before, as transformers does.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit each other: nothing is written then.
    pub fn rms_norm<E: Element>(
        &self,
        rows: &[E],
        weight: &[E],
        epsilon: f32,
        out: &mut [E],
    ) -> Result<(), Error> {
        above_zero("the length of the weight", weight.len())?;
        same_length("out", rows.len(), out.len())?;
        let whole = rows.len() / weight.len() * weight.len();
        same_length("rows", whole, rows.len())?;
        let size = (MANY / weight.len()).max(1) * weight.len();
        let tasks: Vec<_> = rows.chunks(size).zip(out.chunks_mut(size)).collect();
        self.each(self.num_threads().min(tasks.len()), tasks, |(rows, out)| {
            normalise(self.isa(), (rows, weight, epsilon), out);
        });
        Ok(())
    }
}

#[inline(always)]
pub(crate) fn normalise_rows<E: Element>(
    (rows, weight, epsilon): (&[E], &[E], f32),
    out: &mut [E],
) {
    let size = weight.len();
    for (row, out) in rows.chunks_exact(size).zip(out.chunks_exact_mut(size)) {
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
        let mean = squares.iter().sum::<f32>() / size as f32;
        let scale = 1.0 / (mean + epsilon).sqrt();
        for ((out, element), weight) in out.iter_mut().zip(row).zip(weight) {
            let normal = E::narrow(element.widen() * scale).widen();
            *out = E::narrow(normal * weight.widen());
        }
    }
}
