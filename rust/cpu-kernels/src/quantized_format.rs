//! Formats of quantised weights: ggml's blocks, and their layout in panels of 16 outputs.
//!
//! A panel stores codes and scales separately. A line of codes has 64 bytes, four for each output, so a vector holds four
//! consecutive inputs of every output. A block of 32 inputs takes four lines: the low nibbles are the first 16 inputs, the
//! high nibbles the others. The fifth and sixth bits take one or two more lines. 8-bit codes take eight lines.

use crate::dots::{power, widen_half};
use crate::lines::WIDTH;

/// Inputs of a block: their codes are adjacent in a panel, and an activation row has one scale for them.
pub(crate) const BLOCK: usize = 32;

/// Inputs of ggml's superblocks.
const SUPERBLOCK: usize = 256;

/// The codes of a block for 16 outputs.
pub(crate) type Codes = [[u8; BLOCK]; WIDTH];

/// Twice the weights that MXFP4's codes stand for, plus 16.
const MXFP4: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

/// A format of quantised weights in GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizedFormat {
    /// 4 bits, and a scale per 32 weights.
    Q4_0,
    /// 4 bits, and a scale and a minimum per 32 weights.
    Q4_1,
    /// 5 bits, and a scale per 32 weights.
    Q5_0,
    /// 5 bits, and a scale and a minimum per 32 weights.
    Q5_1,
    /// 8 bits, and a scale per 32 weights.
    Q8_0,
    /// 4 bits, and a 6-bit scale and minimum per 32 weights, with half-precision factors per 256.
    Q4K,
    /// As Q4_K with 5 bits.
    Q5K,
    /// 6 bits, and an 8-bit scale per 16 weights, with a half-precision factor per 256.
    Q6K,
    /// 4-bit floats, and a power of two per 32 weights. Panels hold the codes in 5 bits.
    Mxfp4,
}

impl QuantizedFormat {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Mxfp4,
    ];

    /// Its name in ggml.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// The format of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Weights per block.
    #[must_use]
    pub fn block_size(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Mxfp4 => BLOCK,
            Self::Q4K | Self::Q5K | Self::Q6K => SUPERBLOCK,
        }
    }

    /// Bytes of a block in the file.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Mxfp4 => 17,
        }
    }
}

/// Formats of a weight in panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ggml(QuantizedFormat),
    /// 4 bits, and a scale of half precision and a zero point for this many blocks.
    HalfGroups(usize),
    /// As `HalfGroups` with float32 scales.
    FloatGroups(usize),
}

use QuantizedFormat as F;

impl Kind {
    pub(crate) fn bits(self) -> usize {
        match self {
            Self::Ggml(F::Q8_0) => 8,
            Self::Ggml(F::Q6K) => 6,
            Self::Ggml(F::Q5_0 | F::Q5_1 | F::Q5K | F::Mxfp4) => 5,
            _ => 4,
        }
    }

    /// Bytes of a panel's codes for a block.
    pub(crate) fn code_bytes(self) -> usize {
        self.bits() * BLOCK * WIDTH / 8
    }

    /// Blocks per record of scales.
    pub(crate) fn record_blocks(self) -> usize {
        match self {
            Self::Ggml(format) => format.block_size() / BLOCK,
            Self::HalfGroups(blocks) | Self::FloatGroups(blocks) => blocks,
        }
    }

    /// Bytes of a panel's record of scales.
    pub(crate) fn record_bytes(self) -> usize {
        WIDTH
            * match self {
                Self::Ggml(F::Q4_0 | F::Q5_0 | F::Q8_0) => 2,
                Self::Ggml(F::Q4_1 | F::Q5_1) => 4,
                Self::Ggml(F::Q4K | F::Q5K) => 4 + 2 * SUPERBLOCK / BLOCK,
                Self::Ggml(F::Q6K) => 2 + SUPERBLOCK / 16,
                Self::Ggml(F::Mxfp4) => 1,
                Self::HalfGroups(_) => 3,
                Self::FloatGroups(_) => 5,
            }
    }

    /// The integer that is subtracted from every code.
    pub(crate) fn offset(self) -> Offset {
        match self {
            Self::Ggml(F::Q4_0) => Offset::OfBlock(8),
            Self::Ggml(F::Q5_0 | F::Mxfp4) => Offset::OfBlock(16),
            Self::Ggml(F::Q8_0) => Offset::OfBlock(128),
            Self::Ggml(F::Q6K) => Offset::OfHalves(32),
            _ => Offset::OfBlock(0),
        }
    }

    /// The scale, the zero point and the minimum of an output's weights in a half of a block.
    pub(crate) fn scale(
        self,
        record: &[u8],
        block: usize,
        half: usize,
        output: usize,
    ) -> (f32, i32, f32) {
        let float = |first: usize| {
            let at = first * WIDTH + 2 * output;
            widen_half(u16::from_le_bytes([record[at], record[at + 1]]))
        };
        let byte = |first: usize| record[first * WIDTH + output];
        match self {
            Self::Ggml(F::Q4_0) => (float(0), 8, 0.0),
            Self::Ggml(F::Q5_0) => (float(0), 16, 0.0),
            Self::Ggml(F::Q8_0) => (float(0), 128, 0.0),
            Self::Ggml(F::Q4_1 | F::Q5_1) => (float(0), 0, float(2)),
            Self::Ggml(F::Q4K | F::Q5K) => {
                let (scale, minimum) = (byte(4 + 2 * block), byte(5 + 2 * block));
                let minimum = float(2) * f32::from(minimum);
                (float(0) * f32::from(scale), 0, -minimum)
            }
            Self::Ggml(F::Q6K) => {
                let scale = byte(2 + 2 * block + half) as i8;
                (float(0) * f32::from(scale), 32, 0.0)
            }
            Self::Ggml(F::Mxfp4) => (power(byte(0)), 16, 0.0),
            Self::HalfGroups(_) => (float(0), i32::from(byte(2)), 0.0),
            Self::FloatGroups(_) => {
                let bytes = record[4 * output..].first_chunk().expect("a whole record");
                (f32::from_ne_bytes(*bytes), i32::from(byte(4)), 0.0)
            }
        }
    }
}

/// The integer that is subtracted from codes. Sums of products start with its product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offset {
    /// A block has one sum.
    OfBlock(i32),
    /// Each half of a block has a sum.
    OfHalves(i32),
}

/// Unpacks an output's block of a file into the codes and the record of a panel. False if a scale is not finite.
pub(crate) fn unpack(
    format: QuantizedFormat,
    data: &[u8],
    codes: &mut [Codes],
    record: &mut [u8],
    output: usize,
) -> bool {
    let mut is_finite = true;
    let mut float = |from: usize, first: usize| {
        let bytes = [data[from], data[from + 1]];
        is_finite &= u16::from_le_bytes(bytes) & 0x7c00 != 0x7c00;
        record[first * WIDTH + 2 * output..][..2].copy_from_slice(&bytes);
    };
    match format {
        F::Mxfp4 => {
            is_finite = data[0] != u8::MAX;
            record[output] = data[0];
            let codes = &mut codes[0][output];
            copy_nibbles(&data[1..], codes);
            for code in codes {
                *code = MXFP4[usize::from(*code)];
            }
        }
        F::Q4_0 => {
            float(0, 0);
            copy_nibbles(&data[2..], &mut codes[0][output]);
        }
        F::Q4_1 => {
            float(0, 0);
            float(2, 2);
            copy_nibbles(&data[4..], &mut codes[0][output]);
        }
        F::Q5_0 => {
            float(0, 0);
            copy_nibbles(&data[6..], &mut codes[0][output]);
            add_bits(&data[2..], &mut codes[0][output]);
        }
        F::Q5_1 => {
            float(0, 0);
            float(2, 2);
            copy_nibbles(&data[8..], &mut codes[0][output]);
            add_bits(&data[4..], &mut codes[0][output]);
        }
        F::Q8_0 => {
            float(0, 0);
            for (code, byte) in codes[0][output].iter_mut().zip(&data[2..]) {
                *code = byte ^ 0x80;
            }
        }
        F::Q4K | F::Q5K => {
            float(0, 0);
            float(2, 2);
            for block in 0..SUPERBLOCK / BLOCK {
                let (scale, minimum) = six_bits(&data[4..16], block);
                record[(4 + 2 * block) * WIDTH + output] = scale;
                record[(5 + 2 * block) * WIDTH + output] = minimum;
            }
            let (high, low) = data[16..].split_at(if format == F::Q5K { BLOCK } else { 0 });
            for (block, codes) in codes.iter_mut().enumerate() {
                let low = &low[block / 2 * BLOCK..][..BLOCK];
                let codes = &mut codes[output];
                for (code, low) in codes.iter_mut().zip(low) {
                    *code = low >> (block % 2 * 4) & 15;
                }
                for (code, high) in codes.iter_mut().zip(high) {
                    *code |= (high >> block & 1) << 4;
                }
            }
        }
        F::Q6K => {
            float(208, 0);
            for (at, &scale) in data[192..208].iter().enumerate() {
                record[(2 + at) * WIDTH + output] = scale;
            }
            for (block, codes) in codes.iter_mut().enumerate() {
                let (half, quarter) = (block / 4, block % 4);
                let low = &data[half * 64 + quarter % 2 * BLOCK..][..BLOCK];
                let high = &data[128 + half * BLOCK..][..BLOCK];
                for (code, (low, high)) in codes[output].iter_mut().zip(low.iter().zip(high)) {
                    *code = low >> (quarter / 2 * 4) & 15 | (high >> (2 * quarter) & 3) << 4;
                }
            }
        }
    }
    is_finite
}

/// Unpacks 16 bytes: the low nibbles are the first 16 codes.
fn copy_nibbles(bytes: &[u8], codes: &mut [u8; BLOCK]) {
    let (low, high) = codes.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// Adds the fifth bit of each code, from 4 bytes.
fn add_bits(bytes: &[u8], codes: &mut [u8; BLOCK]) {
    for (codes, byte) in codes.chunks_exact_mut(8).zip(bytes) {
        for (bit, code) in codes.iter_mut().enumerate() {
            *code |= (byte >> bit & 1) << 4;
        }
    }
}

/// The scale and minimum of a block, from the twelve bytes of a superblock.
fn six_bits(bytes: &[u8], block: usize) -> (u8, u8) {
    match block {
        0..4 => (bytes[block] & 63, bytes[block + 4] & 63),
        _ => (
            bytes[block + 4] & 15 | bytes[block - 4] >> 6 << 4,
            bytes[block + 4] >> 4 | bytes[block] >> 6 << 4,
        ),
    }
}

/// Writes the codes of a block, of `bits` bits each, as lines of a panel.
pub(crate) fn write_codes(bits: usize, codes: &Codes, lines: &mut [u8]) {
    let (lines, _) = lines.as_chunks_mut::<{ 4 * WIDTH }>();
    for (output, codes) in codes.iter().enumerate() {
        let (fours, _) = codes.as_chunks::<4>();
        let bytes = 4 * output..4 * output + 4;
        if bits == 8 {
            for (line, four) in lines.iter_mut().zip(fours) {
                line[bytes.clone()].copy_from_slice(four);
            }
            continue;
        }
        for at in 0..4 {
            for (byte, (low, high)) in lines[at][bytes.clone()]
                .iter_mut()
                .zip(fours[at].iter().zip(fours[at + 4]))
            {
                *byte = low & 15 | high << 4;
            }
        }
        for (number, four) in fours.iter().enumerate() {
            let (line, shift) = match bits {
                5 => (4, number),
                6 => (4 + number / 4, 2 * (number % 4)),
                _ => continue,
            };
            for (byte, code) in lines[line][bytes.clone()].iter_mut().zip(four) {
                *byte |= code >> 4 << shift;
            }
        }
    }
}

/// Reads the codes of one output back.
pub(crate) fn read_codes(bits: usize, lines: &[u8], output: usize) -> [u8; BLOCK] {
    let (lines, _) = lines.as_chunks::<{ 4 * WIDTH }>();
    std::array::from_fn(|input| {
        let (number, byte) = (input / 4, 4 * output + input % 4);
        if bits == 8 {
            return lines[number][byte];
        }
        let low = lines[number % 4][byte] >> (number / 4 * 4) & 15;
        low | match bits {
            5 => (lines[4][byte] >> number & 1) << 4,
            6 => (lines[4 + number / 4][byte] >> (2 * (number % 4)) & 3) << 4,
            _ => 0,
        }
    })
}
