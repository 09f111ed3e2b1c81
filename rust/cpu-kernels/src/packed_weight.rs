//! The weight of a linear layer, laid out in the order in which products read it.

use crate::element::Element;
use crate::error::Error;
use crate::float8_weight::Float8;
use crate::lines::{Features, Lines, WIDTH};
use crate::step::{above_zero, same_length};

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
        in_features: usize,
        out_features: usize,
    ) -> Result<Self, Error> {
        let float8 = Float8::pack(weight, scales, block, in_features, out_features)?;
        Ok(Self {
            panels: Panels::Bytes(float8),
        })
    }

    pub(crate) fn features(&self) -> Features {
        Features {
            inputs: self.in_features(),
            outputs: self.out_features(),
        }
    }

    /// Elements of a row that is multiplied.
    #[must_use]
    pub fn in_features(&self) -> usize {
        match &self.panels {
            Panels::Floats(lines) => lines.in_features(),
            Panels::Halves(lines) => lines.in_features(),
            Panels::Bytes(float8) => float8.in_features(),
        }
    }

    /// Elements of a product.
    #[must_use]
    pub fn out_features(&self) -> usize {
        match &self.panels {
            Panels::Floats(lines) => lines.out_features(),
            Panels::Halves(lines) => lines.out_features(),
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
