//! Quantised weights of linear layers, packed in the order in which products read them.

use crate::dots::widen_half;
use crate::element::Element;
use crate::error::Error;
use crate::lines::{Features, WIDTH};
use crate::quantized_format::{
    BLOCK, Codes, Kind, QuantizedFormat, read_codes, unpack, write_codes,
};
use crate::step::{above_zero, same_length};
use crate::weight_memory::WeightMemory;

/// Inputs per scale, in weights that are not ggml's.
const GROUP_SIZES: [usize; 3] = [32, 64, 128];

/// The zero point of symmetric 4-bit codes.
const SYMMETRIC_ZERO: u8 = 8;

/// The quantised weight of a linear layer, packed into panels of 16 outputs. Codes, scales and minimums keep their values:
/// a product is that with the weights of [`QuantizedWeight::gather`].
#[derive(Debug)]
pub struct QuantizedWeight {
    kind: Kind,
    in_features: usize,
    out_features: usize,
    codes: WeightMemory<u8>,
    records: WeightMemory<u8>,
}

impl QuantizedWeight {
    /// Packs the blocks of a GGUF file, `[out_features, in_features]` weights.
    ///
    /// # Errors
    ///
    /// A size of 0, inputs that are not whole blocks, a wrong number of bytes, or a scale that is not finite.
    pub fn pack(
        format: QuantizedFormat,
        data: &[u8],
        in_features: usize,
        out_features: usize,
    ) -> Result<Self, Error> {
        let mut weight = Self::zeros(Kind::Ggml(format), in_features, out_features)?;
        let (size, bytes) = (format.block_size(), format.block_bytes());
        let row_bytes = in_features / size * bytes;
        let expected = row_bytes.checked_mul(out_features);
        same_length("data", expected.ok_or(Error::TooLarge)?, data.len())?;
        weight.fill(|output, number, codes, record, lane| {
            let block = &data[output * row_bytes + number * bytes..][..bytes];
            unpack(format, block, codes, record, lane)
        })?;
        Ok(weight)
    }

    /// Packs 4-bit weights `(code - zero) * scale`. `codes` are `[out_features, in_features / 2]`, the first of two inputs in
    /// the low nibble. Each group of `group_size` inputs, 32, 64 or 128, has a scale and a zero, both `[out_features,
    /// in_features / group_size]`; `zeros` of `None` are 8. Scales take 2 bytes if half precision represents all of them
    /// exactly, else 4.
    ///
    /// # Errors
    ///
    /// A size of 0, inputs that are not whole groups, a wrong size of groups or arrays, or a scale that is not finite.
    pub fn from_groups(
        codes: &[u8],
        scales: &[f32],
        zeros: Option<&[u8]>,
        group_size: usize,
        in_features: usize,
        out_features: usize,
    ) -> Result<Self, Error> {
        if !GROUP_SIZES.contains(&group_size) {
            return Err(Error::GroupSize(group_size));
        }
        let halves: Option<Vec<u16>> = scales.iter().map(|&scale| exact_half(scale)).collect();
        let blocks = group_size / BLOCK;
        let kind = match halves {
            Some(_) => Kind::HalfGroups(blocks),
            None => Kind::FloatGroups(blocks),
        };
        let mut weight = Self::zeros(kind, in_features, out_features)?;
        let too_large = || Error::TooLarge;
        let num_groups = in_features / group_size;
        let num_scales = num_groups.checked_mul(out_features).ok_or_else(too_large)?;
        same_length("codes", num_scales * group_size / 2, codes.len())?;
        same_length("scales", num_scales, scales.len())?;
        if let Some(zeros) = zeros {
            same_length("zeros", num_scales, zeros.len())?;
        }
        weight.fill(|output, number, blocks, record, lane| {
            let at = output * num_groups + number;
            let zero = zeros.map_or(SYMMETRIC_ZERO, |zeros| zeros[at]);
            let zeros_from = match &halves {
                Some(halves) => {
                    record[2 * lane..][..2].copy_from_slice(&halves[at].to_le_bytes());
                    2 * WIDTH
                }
                None => {
                    record[4 * lane..][..4].copy_from_slice(&scales[at].to_ne_bytes());
                    4 * WIDTH
                }
            };
            record[zeros_from + lane] = zero;
            let bytes = &codes[at * group_size / 2..][..group_size / 2];
            for (codes, bytes) in blocks.iter_mut().zip(bytes.chunks_exact(BLOCK / 2)) {
                for (pair, byte) in codes[lane].as_chunks_mut().0.iter_mut().zip(bytes) {
                    *pair = [byte & 15, byte >> 4];
                }
            }
            scales[at].is_finite()
        })?;
        Ok(weight)
    }

    fn zeros(kind: Kind, in_features: usize, out_features: usize) -> Result<Self, Error> {
        above_zero("in_features", in_features)?;
        above_zero("out_features", out_features)?;
        let block = kind.record_blocks() * BLOCK;
        if !in_features.is_multiple_of(block) {
            return Err(Error::Inputs { in_features, block });
        }
        let size = |inputs: usize, bytes: usize| {
            let panels = out_features.div_ceil(WIDTH);
            let size = (in_features / inputs).checked_mul(bytes)?;
            size.checked_mul(panels)
        };
        let codes = size(BLOCK, kind.code_bytes()).ok_or(Error::TooLarge)?;
        let records = size(block, kind.record_bytes()).ok_or(Error::TooLarge)?;
        Ok(Self {
            kind,
            in_features,
            out_features,
            codes: WeightMemory::zeros(codes)?,
            records: WeightMemory::zeros(records)?,
        })
    }

    /// Calls `unpack` with each output, the number of a record, its codes, the record, and the output's lane in the panel.
    /// It returns false if a scale is not finite.
    fn fill(
        &mut self,
        mut unpack: impl FnMut(usize, usize, &mut [Codes], &mut [u8], usize) -> bool,
    ) -> Result<(), Error> {
        let kind = self.kind;
        let (blocks, code_bytes) = (kind.record_blocks(), kind.code_bytes());
        let per_panel = self.in_features / BLOCK / blocks;
        let lines = self
            .codes
            .elements_mut()
            .chunks_exact_mut(code_bytes * blocks);
        let records = self.records.elements_mut();
        let records = records.chunks_exact_mut(kind.record_bytes());
        let mut codes = vec![[[0; BLOCK]; WIDTH]; blocks];
        for (number, (lines, record)) in lines.zip(records).enumerate() {
            let (panel, number) = (number / per_panel, number % per_panel);
            let outputs = WIDTH.min(self.out_features - panel * WIDTH);
            if outputs < WIDTH {
                codes.fill([[0; BLOCK]; WIDTH]);
            }
            for lane in 0..outputs {
                let output = panel * WIDTH + lane;
                if !unpack(output, number, &mut codes, record, lane) {
                    let input = number * blocks * BLOCK;
                    return Err(Error::Scale { output, input });
                }
            }
            for (codes, lines) in codes.iter().zip(lines.chunks_exact_mut(code_bytes)) {
                write_codes(kind.bits(), codes, lines);
            }
        }
        Ok(())
    }

    pub(crate) fn features(&self) -> Features {
        Features {
            inputs: self.in_features(),
            outputs: self.out_features(),
        }
    }

    /// Elements of an input row.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Elements of an output row.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// The ggml format; `None` for groups.
    #[must_use]
    pub fn format(&self) -> Option<QuantizedFormat> {
        match self.kind {
            Kind::Ggml(format) => Some(format),
            _ => None,
        }
    }

    /// Bytes of memory.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.codes.elements().len() + self.records.elements().len()
    }

    /// Dequantises the weights of some outputs, `[outputs, in_features]`, as an embedding lookup does. They have the bits
    /// of ggml's definition in float32, rounded for bfloat16.
    ///
    /// # Errors
    ///
    /// An output out of range, or a wrong length of `out`: nothing is written then.
    pub fn gather<E: Element>(&self, outputs: &[i64], out: &mut [E]) -> Result<(), Error> {
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
        let kind = self.kind;
        for (&output, out) in outputs.iter().zip(out.chunks_exact_mut(self.in_features)) {
            let (panel, lane) = (output as usize / WIDTH, output as usize % WIDTH);
            let records = self.records(panel);
            let lines = self.codes(panel).chunks_exact(kind.code_bytes());
            let (out, _) = out.as_chunks_mut::<BLOCK>();
            for (number, (out, lines)) in out.iter_mut().zip(lines).enumerate() {
                let (record, block) =
                    (number / kind.record_blocks(), number % kind.record_blocks());
                let record = &records[record * kind.record_bytes()..][..kind.record_bytes()];
                let codes = read_codes(kind.bits(), lines, lane);
                let halves = codes.chunks_exact(BLOCK / 2);
                for (half, (out, codes)) in out.chunks_exact_mut(BLOCK / 2).zip(halves).enumerate()
                {
                    let (scale, zero, minimum) = kind.scale(record, block, half, lane);
                    for (out, &code) in out.iter_mut().zip(codes) {
                        let steps = (i32::from(code) - zero) as f32;
                        *out = E::narrow(steps * scale + minimum);
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// The codes of a panel.
    #[inline(always)]
    pub(crate) fn codes(&self, panel: usize) -> &[u8] {
        let size = self.in_features / BLOCK * self.kind.code_bytes();
        &self.codes.elements()[panel * size..][..size]
    }

    /// The records of scales of a panel.
    #[inline(always)]
    pub(crate) fn records(&self, panel: usize) -> &[u8] {
        let kind = self.kind;
        let size = self.in_features / BLOCK / kind.record_blocks() * kind.record_bytes();
        &self.records.elements()[panel * size..][..size]
    }
}

/// The half-precision float of exactly this value.
fn exact_half(float: f32) -> Option<u16> {
    let sign = (float.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = float.abs();
    let half = match magnitude {
        0.0 => 0,
        _ if magnitude < f32::from_bits(0x3880_0000) => (magnitude * 16_777_216.0) as u16, // below 2^-14
        _ if magnitude < 65536.0 => ((magnitude.to_bits() >> 13) - (112 << 10)) as u16,
        _ => return None,
    };
    let half = sign | half;
    (widen_half(half).to_bits() == float.to_bits()).then_some(half)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_half_is_exact_and_nothing_between() {
        for half in 0..=u16::MAX {
            let float = widen_half(half);
            if float.is_finite() {
                assert_eq!(exact_half(float), Some(half));
                let next = f32::from_bits(float.to_bits() + 1);
                assert_eq!(exact_half(next), None, "{next:e}");
            }
        }
        for float in [65536.0, 1e9, f32::INFINITY, f32::NAN, 1e-9] {
            assert_eq!(exact_half(float), None);
        }
    }
}
