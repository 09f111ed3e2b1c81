//! The weight of a linear layer, laid out in the order in which products read it.

use crate::error::Error;
use crate::lanes::Scratch;
use crate::step::{above_zero, same_length};

/// Outputs of a panel: their weights for one input are a line of the processor's cache.
pub(crate) const WIDTH: usize = 16;

/// The weights of a panel's outputs for one input.
pub(crate) type Line = [f32; WIDTH];

/// Inputs that are packed at a time: their lines stay in the processor's first cache.
const PACKED_INPUTS: usize = 64;

/// The weight of a linear layer, copied into panels of 16 outputs, `[panels, in_features, 16]`. Outputs beyond the last
/// one have weights of 0.
#[derive(Debug)]
pub struct PackedWeight {
    floats: Scratch,
    in_features: usize,
    out_features: usize,
}

impl PackedWeight {
    /// Copies `weight` `[out_features, in_features]`.
    ///
    /// # Errors
    ///
    /// A size of 0, or another number of elements.
    pub fn pack(weight: &[f32], in_features: usize, out_features: usize) -> Result<Self, Error> {
        above_zero("in_features", in_features)?;
        above_zero("out_features", out_features)?;
        let size = in_features
            .checked_mul(WIDTH)
            .and_then(|size| size.checked_mul(out_features.div_ceil(WIDTH)))
            .ok_or(Error::TooLarge)?;
        same_length("weight", in_features * out_features, weight.len())?;
        let mut floats = Scratch::zeros(size);
        ask_for_large_pages(floats.floats_mut());
        let panels = floats.floats_mut().chunks_exact_mut(in_features * WIDTH);
        for (panel, weight) in panels.zip(weight.chunks(in_features * WIDTH)) {
            let (lines, _) = panel.as_chunks_mut::<WIDTH>();
            for (number, lines) in lines.chunks_mut(PACKED_INPUTS).enumerate() {
                let first = number * PACKED_INPUTS;
                for (output, row) in weight.chunks_exact(in_features).enumerate() {
                    for (line, &element) in lines.iter_mut().zip(&row[first..]) {
                        line[output] = element;
                    }
                }
            }
        }
        Ok(Self {
            floats,
            in_features,
            out_features,
        })
    }

    /// Elements of a row that is multiplied.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Elements of a product.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Copies the weights of some outputs, `[outputs, in_features]`, as a lookup in an embedding does.
    ///
    /// # Errors
    ///
    /// An output that there is not, or another length of `out`: nothing is written then.
    pub fn gather(&self, outputs: &[i64], out: &mut [f32]) -> Result<(), Error> {
        let expected = outputs.len().checked_mul(self.in_features);
        same_length("out", expected.ok_or(Error::TooLarge)?, out.len())?;
        let known = |&output: &i64| usize::try_from(output).is_ok_and(|it| it < self.out_features);
        if let Some(at) = outputs.iter().position(|output| !known(output)) {
            return Err(Error::Output {
                at,
                output: outputs[at],
                num_outputs: self.out_features,
            });
        }
        for (&output, out) in outputs.iter().zip(out.chunks_exact_mut(self.in_features)) {
            let output = output as usize;
            let lines = self.panel(output / WIDTH);
            for (element, line) in out.iter_mut().zip(lines) {
                *element = line[output % WIDTH];
            }
        }
        Ok(())
    }

    /// The lines of the panel of this number.
    #[inline(always)]
    pub(crate) fn panel(&self, number: usize) -> &[Line] {
        let size = self.in_features * WIDTH;
        self.floats.floats()[number * size..][..size]
            .as_chunks::<WIDTH>()
            .0
    }
}

/// Asks Linux for pages of 2 MiB under memory that is not written yet. A product of a few rows reads each weight once, so
/// misses in the TLB cost it most.
pub(crate) fn ask_for_large_pages<T>(memory: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let bytes = memory.as_mut_ptr_range();
        let first = (bytes.start as usize).next_multiple_of(PAGE);
        let size = (bytes.end as usize).saturating_sub(first) / PAGE * PAGE;
        let first = bytes.start.with_addr(first).cast();
        // SAFETY: whole pages of a slice that we have alone; the advice changes no byte of them.
        #[allow(unsafe_code)]
        unsafe {
            libc::madvise(first, size, libc::MADV_HUGEPAGE); // without such pages it fails: nothing is lost
        }
    }
    let _ = memory;
}
