//! The weight of a linear layer, laid out in the order in which products read it.

use crate::element::Element;
use crate::error::Error;
use crate::float8_weight::Float8;
use crate::lanes::Scratch;
use crate::step::{above_zero, same_length};

/// Outputs of a panel: their weights for one input are a line of the processor's cache.
pub(crate) const WIDTH: usize = 16;

/// The weights of a panel's outputs for one input, or for two in bfloat16: the first of them in the lower half.
pub(crate) type Line<T> = [T; WIDTH];

/// Lines that are packed at a time: they stay in the processor's first cache.
const PACKED_LINES: usize = 64;

/// The weight of a linear layer, copied into panels of 16 outputs. A weight whose numbers are all bfloat16, whatever
/// type they come in, is kept in 16 bits each, and floats of 8 bits with scales are kept in 8.
#[derive(Debug)]
pub struct PackedWeight {
    pub(crate) panels: Panels,
}

/// The panels, by what they hold.
#[derive(Debug)]
pub(crate) enum Panels {
    /// float32.
    Floats(Lines<f32>),
    /// bfloat16, the weights of two inputs in a number.
    Halves(Lines<u32>),
    /// Floats of 8 bits, with scales.
    Bytes(Float8),
}

/// `[panels, lines]`. Outputs beyond the last one have weights of 0, and inputs too.
#[derive(Debug)]
pub(crate) struct Lines<T> {
    elements: Scratch<T>,
    per_panel: usize,
    in_features: usize,
    out_features: usize,
}

impl PackedWeight {
    /// Copies `weight` `[out_features, in_features]`.
    ///
    /// # Errors
    ///
    /// A size of 0, or another number of elements.
    pub fn pack<E: Element>(
        weight: &[E],
        in_features: usize,
        out_features: usize,
    ) -> Result<Self, Error> {
        above_zero("in_features", in_features)?;
        above_zero("out_features", out_features)?;
        let size = in_features.checked_mul(out_features);
        same_length("weight", size.ok_or(Error::TooLarge)?, weight.len())?;
        let bits = |element: &E| element.widen().to_bits();
        let panels = match weight.iter().all(|element| bits(element) as u16 == 0) {
            true => Panels::Halves(Lines::pack(weight, in_features, 2, |pair, at, element| {
                *pair |= bits(element) >> 16 << (16 * at);
            })?),
            false => Panels::Floats(Lines::pack(weight, in_features, 1, |float, _, element| {
                *float = element.widen();
            })?),
        };
        Ok(Self { panels })
    }

    /// Copies floats of 8 bits (E4M3, without infinities) times scales: `weight` is `[out_features, in_features]`, and each
    /// `block` inputs of an output have one of `scales`, `[out_features, in_features / block]` rounded up. A product is
    /// added up block by block in float32, and each sum is multiplied with its scale.
    ///
    /// # Errors
    ///
    /// A size of 0, inputs or blocks that are not multiples of 4, another number of elements, or a weight or scale that is
    /// not finite.
    pub fn pack_float8(
        weight: &[u8],
        scales: &[f32],
        block: usize,
        (in_features, out_features): (usize, usize),
    ) -> Result<Self, Error> {
        let float8 = Float8::pack(weight, scales, block, (in_features, out_features))?;
        Ok(Self {
            panels: Panels::Bytes(float8),
        })
    }

    /// Elements of a row that is multiplied, and of a product.
    pub(crate) fn features(&self) -> (usize, usize) {
        (self.in_features(), self.out_features())
    }

    /// Elements of a row that is multiplied.
    #[must_use]
    pub fn in_features(&self) -> usize {
        match &self.panels {
            Panels::Floats(lines) => lines.in_features,
            Panels::Halves(lines) => lines.in_features,
            Panels::Bytes(float8) => float8.in_features(),
        }
    }

    /// Elements of a product.
    #[must_use]
    pub fn out_features(&self) -> usize {
        match &self.panels {
            Panels::Floats(lines) => lines.out_features,
            Panels::Halves(lines) => lines.out_features,
            Panels::Bytes(float8) => float8.out_features(),
        }
    }

    /// Copies the weights of some outputs, `[outputs, in_features]`, as a lookup in an embedding does.
    ///
    /// # Errors
    ///
    /// An output that there is not, or another length of `out`: nothing is written then.
    pub fn gather<E: Element>(&self, outputs: &[i64], out: &mut [E]) -> Result<(), Error> {
        let (in_features, num_outputs) = (self.in_features(), self.out_features());
        let expected = outputs.len().checked_mul(in_features);
        same_length("out", expected.ok_or(Error::TooLarge)?, out.len())?;
        let known = |&output: &i64| usize::try_from(output).is_ok_and(|it| it < num_outputs);
        if let Some(at) = outputs.iter().position(|output| !known(output)) {
            return Err(Error::Output {
                at,
                output: outputs[at],
                num_outputs,
            });
        }
        for (&output, out) in outputs.iter().zip(out.chunks_exact_mut(in_features)) {
            let (panel, lane) = (output as usize / WIDTH, output as usize % WIDTH);
            match &self.panels {
                Panels::Floats(lines) => {
                    for (element, line) in out.iter_mut().zip(lines.panel(panel)) {
                        *element = E::narrow(line[lane]);
                    }
                }
                Panels::Halves(lines) => {
                    for (elements, line) in out.chunks_mut(2).zip(lines.panel(panel)) {
                        let pair = [line[lane] << 16, line[lane] & 0xffff_0000];
                        for (element, bits) in elements.iter_mut().zip(pair) {
                            *element = E::narrow(f32::from_bits(bits));
                        }
                    }
                }
                Panels::Bytes(float8) => {
                    for (element, float) in out.iter_mut().zip(float8.row(output as usize)) {
                        *element = E::narrow(float);
                    }
                }
            }
        }
        Ok(())
    }
}

impl<T: Copy + Default> Lines<T> {
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
        let mut elements = Scratch::zeros(size);
        ask_for_large_pages(elements.elements_mut());
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
            elements: Scratch::zeros(in_features * WIDTH),
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

    /// The lines of the panel of this number.
    #[inline(always)]
    pub(crate) fn panel(&self, number: usize) -> &[Line<T>] {
        let size = self.per_panel * WIDTH;
        self.elements.elements()[number * size..][..size]
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
