//! Weights in floats of 8 bits with scales for blocks of inputs, and products with them.
//!
//! A block's products are added up first, as those of float32 with the same numbers, and then multiplied with its scale.

use crate::error::Error;
use crate::lanes::{Vector, widen_byte};
use crate::lines::{Lines, WIDTH};
use crate::product::{Columns, Terms, add_panel, add_products};
use crate::step::{above_zero, same_length};

/// Weights of one output in a number.
const PER_LINE: usize = 4;

/// Rows for which weights are widened in registers by every tile; for more, a panel is widened once.
const WIDENED_ROWS: usize = 6;

/// A weight in E4M3, in panels for each block of inputs.
#[derive(Debug)]
pub(crate) struct Float8 {
    blocks: Vec<Lines<u32>>,
    /// `[blocks, out_features]`.
    scales: Vec<f32>,
    in_features: usize,
    out_features: usize,
}

impl Float8 {
    /// As [`crate::PackedWeight::pack_float8`].
    pub(crate) fn pack(
        weight: &[u8],
        scales: &[f32],
        block: usize,
        in_features: usize,
        out_features: usize,
    ) -> Result<Self, Error> {
        above_zero("in_features", in_features)?;
        above_zero("out_features", out_features)?;
        above_zero("block", block)?;
        if !in_features.is_multiple_of(PER_LINE) || !block.is_multiple_of(PER_LINE) {
            return Err(Error::Inputs {
                in_features,
                block: PER_LINE,
            });
        }
        let num_blocks = in_features.div_ceil(block);
        let size = in_features.checked_mul(out_features);
        same_length("weight", size.ok_or(Error::TooLarge)?, weight.len())?;
        same_length("scales", num_blocks * out_features, scales.len())?;
        let is_infinite = |&byte: &u8| byte & 0x7f == 0x7f;
        if let Some(at) = weight.iter().position(is_infinite) {
            return Err(Error::Weight {
                output: at / in_features,
                input: at % in_features,
            });
        }
        if let Some(at) = scales.iter().position(|scale| !scale.is_finite()) {
            return Err(Error::Scale {
                output: at / num_blocks,
                input: at % num_blocks * block,
            });
        }
        let mut blocks = vec![];
        let mut part = vec![];
        for first in (0..in_features).step_by(block) {
            let count = block.min(in_features - first);
            part.clear();
            let bytes = count * out_features;
            part.try_reserve_exact(bytes)
                .map_err(|_| Error::OutOfMemory { bytes })?;
            for row in weight.chunks_exact(in_features) {
                part.extend_from_slice(&row[first..][..count]);
            }
            blocks.push(Lines::<u32>::pack(
                &part,
                count,
                PER_LINE,
                |four, at, &byte| {
                    *four |= u32::from(byte) << (8 * at);
                },
            )?);
        }
        let scale = |at: usize| scales[at % out_features * num_blocks + at / out_features];
        Ok(Self {
            blocks,
            scales: (0..scales.len()).map(scale).collect(),
            in_features,
            out_features,
        })
    }

    pub(crate) fn in_features(&self) -> usize {
        self.in_features
    }

    pub(crate) fn out_features(&self) -> usize {
        self.out_features
    }

    /// The weights of one output.
    pub(crate) fn row(&self, output: usize) -> impl Iterator<Item = f32> {
        let (panel, lane) = (output / WIDTH, output % WIDTH);
        let scales = self.scales[output..].iter().step_by(self.out_features);
        self.blocks
            .iter()
            .zip(scales)
            .flat_map(move |(lines, scale)| {
                let fours = lines.panel(panel).iter().map(move |line| line[lane]);
                fours.flat_map(move |four| four.to_le_bytes().map(|byte| widen_byte(byte) * scale))
            })
    }
}

/// Floats with E4M3, which is widened.
struct WidenedBytes;

impl<V: Vector<L>, const L: usize> Terms<V, L> for WidenedBytes {
    type Element = f32;
    type Lane = u32;
    type Inputs = V;
    type Weights = V;
    const PER_LINE: usize = PER_LINE;
    const PARTS: usize = PER_LINE;

    #[inline(always)]
    fn inputs(elements: &[f32], part: usize) -> V {
        V::splat(elements[part])
    }

    #[inline(always)]
    fn weights(line: &[u32; L], part: usize) -> V {
        V::widened_bytes(line)[part]
    }

    #[inline(always)]
    fn add(weights: V, input: V, sum: V) -> V {
        weights.multiply_add(input, sum)
    }
}

/// Adds to `columns.out` the products of its rows with the weight, by vectors of `L` floats.
#[inline(always)]
pub(crate) fn add_scaled_products<V: Vector<L>, const L: usize>(
    columns: &mut Columns<'_, '_, f32, f32>,
    weight: &Float8,
) {
    let (size, count) = (weight.in_features, columns.out.len());
    let width = columns.out.first().map_or(0, |out| out.len());
    let (mut sums, mut part) = (vec![0.0; count * width], vec![]);
    let mut first = 0;
    for (lines, scales) in weight
        .blocks
        .iter()
        .zip(weight.scales.chunks(weight.out_features))
    {
        let inputs = lines.in_features();
        let rows = match count {
            1 => &columns.rows[first..][..inputs],
            _ if inputs == size => columns.rows,
            _ => {
                part.clear();
                for row in columns.rows.chunks_exact(size) {
                    part.extend_from_slice(&row[first..][..inputs]);
                }
                &part[..]
            }
        };
        sums.fill(0.0);
        let mut block = Columns {
            rows,
            first: columns.first,
            out: sums.chunks_mut(width.max(1)).collect(),
        };
        match count <= WIDENED_ROWS {
            true => add_products::<WidenedBytes, V, L>(&mut block, lines),
            false => add_widened_panels::<V, L>(&mut block, lines),
        }
        let scales = &scales[columns.first * WIDTH..][..width];
        for (out, sums) in columns.out.iter_mut().zip(sums.chunks(width.max(1))) {
            for ((out, sum), scale) in out.iter_mut().zip(sums).zip(scales) {
                *out += sum * scale;
            }
        }
        first += inputs;
    }
}

/// The same without scales, by panels that are widened once for all rows.
#[inline(always)]
fn add_widened_panels<V: Vector<L>, const L: usize>(
    columns: &mut Columns<'_, '_, f32, f32>,
    weight: &Lines<u32>,
) {
    let width = columns.out[0].len();
    let mut floats = Lines::panel_of_zeros(weight.in_features());
    for (number, begin) in (0..width).step_by(WIDTH).enumerate() {
        let fours = weight.panel(columns.first + number);
        for (fours, lines) in fours
            .iter()
            .zip(floats.first_panel_mut().chunks_mut(PER_LINE))
        {
            for (part, fours) in fours.as_chunks::<L>().0.iter().enumerate() {
                for (line, vector) in lines.iter_mut().zip(V::widened_bytes(fours)) {
                    vector.store(&mut line.as_chunks_mut::<L>().0[part]);
                }
            }
        }
        add_panel::<V, L>(columns, begin, &floats);
    }
}
