//! Panels of weights: 16 outputs side by side, in the order in which products read them.

use crate::error::Error;
use crate::weight_memory::{Number, WeightMemory};

/// Outputs of a panel: their weights for one input are a line of the processor's cache.
pub(crate) const WIDTH: usize = 16;

/// The size of a weight: elements of a row that is multiplied, and of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
}

/// The weights of a panel's outputs for one input, or for two in bfloat16: the first of them in the lower half.
pub(crate) type Line<T> = [T; WIDTH];

/// Lines that are packed at a time: they stay in the processor's first cache.
const PACKED_LINES: usize = 64;

/// `[panels, lines]`. Outputs beyond the last one have weights of 0, and inputs too.
#[derive(Debug)]
pub(crate) struct Lines<T> {
    elements: WeightMemory<T>,
    per_panel: usize,
    in_features: usize,
    out_features: usize,
}

impl<T: Number> Lines<T> {
    /// Calls `put` with every element, its lane, and its place among the `per_line` of that.
    pub(crate) fn pack<E>(
        weight: &[E],
        in_features: usize,
        per_line: usize,
        put: impl Fn(&mut T, usize, &E),
    ) -> Result<Self, Error> {
        let out_features = weight.len() / in_features;
        let per_panel = in_features.div_ceil(per_line);
        let size = per_panel
            .checked_mul(WIDTH)
            .and_then(|size| size.checked_mul(out_features.div_ceil(WIDTH)))
            .ok_or(Error::TooLarge)?;
        let mut elements = WeightMemory::zeros(size)?;
        let panels = elements
            .elements_mut()
            .chunks_exact_mut(per_panel * WIDTH)
            .zip(weight.chunks(in_features * WIDTH));
        for (panel, weight) in panels {
            let (lines, _) = panel.as_chunks_mut::<WIDTH>();
            for (number, lines) in lines.chunks_mut(PACKED_LINES).enumerate() {
                let first = number * PACKED_LINES * per_line;
                for (output, row) in weight.chunks_exact(in_features).enumerate() {
                    for (line, elements) in lines.iter_mut().zip(row[first..].chunks(per_line)) {
                        for (at, element) in elements.iter().enumerate() {
                            put(&mut line[output], at, element);
                        }
                    }
                }
            }
        }
        Ok(Self {
            elements,
            per_panel,
            in_features,
            out_features,
        })
    }
}

impl Lines<f32> {
    /// One panel.
    #[inline(always)]
    pub(crate) fn panel_of_zeros(in_features: usize) -> Self {
        Self {
            elements: WeightMemory::alone(in_features * WIDTH),
            per_panel: in_features,
            in_features,
            out_features: WIDTH,
        }
    }

    #[inline(always)]
    pub(crate) fn first_panel_mut(&mut self) -> &mut [Line<f32>] {
        let size = self.per_panel * WIDTH;
        self.elements.elements_mut()[..size].as_chunks_mut().0
    }
}

impl<T> Lines<T> {
    #[inline(always)]
    pub(crate) fn in_features(&self) -> usize {
        self.in_features
    }

    #[inline(always)]
    pub(crate) fn out_features(&self) -> usize {
        self.out_features
    }

    /// The lines of the panel of this number.
    #[inline(always)]
    pub(crate) fn panel(&self, number: usize) -> &[Line<T>] {
        let size = self.per_panel * WIDTH;
        self.elements.elements()[number * size..][..size]
            .as_chunks::<WIDTH>()
            .0
    }
}
