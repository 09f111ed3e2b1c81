//! Linear layers on quantised weights: rows become integers of 8 bits, then panels are multiplied.

use std::mem::take;
use std::ops::Range;

use crate::attention::Attention;
use crate::dots::{Build, Dots, InIntegers};
use crate::element::Element;
use crate::error::Error;
use crate::linear::Shares;
use crate::linear_task::silu;
use crate::packed_weight::WIDTH;
use crate::quantized_format::{BLOCK, Offset};
use crate::quantized_product::add_products;
use crate::quantized_rows::{Quantize, RowBlock, RowTile, tiles};
use crate::quantized_weight::QuantizedWeight;
use crate::step::same_length;

/// Multiplications below which other threads are not woken: about ten microseconds of work.
const SMALL: usize = 400_000;

/// Multiplications of a task at least.
const TASK: usize = 200_000;

/// Tasks for each thread, so that one whose processor is busy with something else does less.
const TASKS: usize = 8;

/// Bytes of a task's rows at most: they stay in a core's second cache.
const ROW_BYTES: usize = 512 * 1024;

/// Panels of a task of several tiles of rows at most.
const MOST_PANELS: usize = 16;

impl Attention {
    /// `out` `[rows, out_features]` becomes `rows` `[rows, in_features]` times the transposed weight, plus `bias`
    /// `[out_features]`.
    ///
    /// Every 32 numbers of a row are rounded to a 127th of the largest of them, as llama.cpp rounds them: that is all of the
    /// error but for float32's. Products are then added up as integers, block by block in the order of the inputs. A row
    /// has the same bits in every batch, with any number of threads and at every level. Where a row has a number that is
    /// not finite, so are its products.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit each other: nothing is written then.
    pub fn quantized_linear<E: Element>(
        &self,
        rows: &[E],
        weight: &QuantizedWeight,
        bias: Option<&[f32]>,
        out: &mut [E],
    ) -> Result<(), Error> {
        check_rows(rows, weight, out)?;
        if let Some(bias) = bias {
            same_length("bias", weight.out_features(), bias.len())?;
        }
        let build = Build::at(self.isa());
        let tiles = tiles_of(rows, weight, build);
        let mut memory = vec![];
        let blocks = self.quantize(rows, weight, &tiles, &mut memory);
        self.by_panels(out, weight, &tiles, |part| {
            build.run(Compute {
                tiles: &tiles[part.tiles.clone()],
                part,
                sums: Multiply {
                    weight,
                    bias,
                    blocks,
                },
            });
        });
        Ok(())
    }

    /// `out` becomes `silu(rows * gate) * (rows * up)`, for weights of one shape, in float32 and rounded once. As
    /// [`Attention::quantized_linear`] otherwise.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit each other: nothing is written then.
    pub fn quantized_gated_linear<E: Element>(
        &self,
        rows: &[E],
        gate: &QuantizedWeight,
        up: &QuantizedWeight,
        out: &mut [E],
    ) -> Result<(), Error> {
        check_rows(rows, up, out)?;
        same_length("the inputs of gate", up.in_features(), gate.in_features())?;
        same_length(
            "the outputs of gate",
            up.out_features(),
            gate.out_features(),
        )?;
        let build = Build::at(self.isa());
        let tiles = tiles_of(rows, up, build);
        let (mut memory, mut other) = (vec![], vec![]);
        let blocks = self.quantize(rows, up, &tiles, &mut memory);
        let gate_blocks = match offset_of(gate) == offset_of(up) {
            true => blocks,
            false => self.quantize(rows, gate, &tiles, &mut other),
        };
        self.by_panels(out, up, &tiles, |part| {
            build.run(Compute {
                tiles: &tiles[part.tiles.clone()],
                part,
                sums: MultiplyGated {
                    weights: [gate, up],
                    blocks: [gate_blocks, blocks],
                },
            });
        });
        Ok(())
    }

    /// The rows as integers, in these tiles.
    fn quantize<'m, E: Element>(
        &self,
        rows: &[E],
        weight: &QuantizedWeight,
        tiles: &[RowTile],
        memory: &'m mut Vec<RowBlock>,
    ) -> &'m [RowBlock] {
        let in_features = weight.in_features();
        let size = tiles.last().map_or(0, |tile| tile.blocks.end);
        memory.resize(size, RowBlock::ZERO);
        let (mut left, mut tasks) = (&mut memory[..], vec![]);
        for tile in tiles {
            let (blocks, rest) = take(&mut left).split_at_mut(tile.blocks.len());
            left = rest;
            tasks.push(Quantize {
                rows: &rows[tile.rows.start * in_features..tile.rows.end * in_features],
                in_features,
                offset: offset_of(weight),
                width: tile.width,
                blocks,
            });
        }
        let num_threads = match rows.len() > SMALL {
            true => self.threads().count().min(tasks.len()),
            false => 1,
        };
        let isa = self.isa();
        self.threads()
            .each(num_threads, tasks, |task| task.run_at(isa));
        memory
    }

    /// Calls `work` with all outputs of all rows, some at a time.
    fn by_panels<E: Element>(
        &self,
        out: &mut [E],
        weight: &QuantizedWeight,
        tiles: &[RowTile],
        work: impl Fn(Part<'_, E>) + Sync,
    ) {
        let width = weight.out_features();
        let products = out.len().saturating_mul(weight.in_features());
        let num_threads = match products > SMALL {
            true => self.threads().count(),
            false => 1,
        };
        let num_panels = width.div_ceil(WIDTH);
        let tasks = (products / TASK).clamp(1, TASKS * num_threads);
        let mut panels = num_panels.div_ceil(tasks);
        if tiles.len() > 1 {
            panels = panels.min(MOST_PANELS);
        }
        let tile_bytes = tiles
            .first()
            .map_or(1, |tile| tile.blocks.len() * size_of::<RowBlock>());
        let tiles_each = (ROW_BYTES / tile_bytes).max(1);
        let mut rows: Vec<_> = out
            .chunks_mut(width)
            .map(|row| row.chunks_mut(panels * WIDTH))
            .collect();
        let mut parts = vec![];
        for first_panel in (0..num_panels).step_by(panels) {
            for first in (0..tiles.len()).step_by(tiles_each) {
                let numbers = first..tiles.len().min(first + tiles_each);
                let covered = tiles[first].rows.start..tiles[numbers.end - 1].rows.end;
                parts.push(Part {
                    tiles: numbers,
                    first_panel,
                    out: rows[covered]
                        .iter_mut()
                        .filter_map(Iterator::next)
                        .collect(),
                });
            }
        }
        let num_threads = num_threads.min(parts.len());
        let shares = Shares::new(parts, num_threads);
        let numbers = (0..num_threads).collect();
        self.threads().each(num_threads, numbers, |number| {
            while let Some(part) = shares.next(number) {
                work(part);
            }
        });
    }
}

fn check_rows<E>(rows: &[E], weight: &QuantizedWeight, out: &[E]) -> Result<(), Error> {
    let count = rows.len() / weight.in_features();
    same_length("rows", count * weight.in_features(), rows.len())?;
    let expected = count.checked_mul(weight.out_features());
    same_length("out", expected.ok_or(Error::TooLarge)?, out.len())
}

fn tiles_of<E>(rows: &[E], weight: &QuantizedWeight, build: Build) -> Vec<RowTile> {
    let in_features = weight.in_features();
    tiles(
        rows.len() / in_features,
        in_features / BLOCK,
        build.most_rows(),
    )
}

fn offset_of(weight: &QuantizedWeight) -> Offset {
    weight.kind().offset()
}

/// Some outputs of some rows, as a thread takes them.
struct Part<'b, E> {
    tiles: Range<usize>,
    /// The panel of the first output.
    first_panel: usize,
    /// The outputs of each row of the tiles, the same ones.
    out: Vec<&'b mut [E]>,
}

/// Rows of a tile at most.
const MOST_ROWS: usize = 16;

/// Sums of a panel's outputs for a tile's rows, in each build: closures would not take the caller's instructions.
trait Sums {
    /// Adds to zeros. Inlined, as [`InIntegers::run`].
    fn add<V: Dots<L>, const L: usize>(
        &self,
        panel: usize,
        tile: &RowTile,
        sums: &mut [[f32; WIDTH]],
    );
}

/// Sets the outputs of a part to their sums.
struct Compute<'a, 'b, E, S> {
    part: Part<'b, E>,
    tiles: &'a [RowTile],
    sums: S,
}

impl<E: Element, S: Sums> InIntegers for Compute<'_, '_, E, S> {
    #[inline(always)]
    fn run<V: Dots<L>, const L: usize>(mut self) {
        let width = self.part.out.first().map_or(0, |out| out.len());
        for number in 0..width.div_ceil(WIDTH) {
            let columns = number * WIDTH..width.min((number + 1) * WIDTH);
            let mut rows = self.part.out.iter_mut();
            for tile in self.tiles {
                let mut found = [[0.0; WIDTH]; MOST_ROWS];
                let found = &mut found[..tile.width];
                let panel = self.part.first_panel + number;
                self.sums.add::<V, L>(panel, tile, found);
                for (sums, out) in found.iter().zip(rows.by_ref().take(tile.rows.len())) {
                    for (sum, out) in sums.iter().zip(&mut out[columns.clone()]) {
                        *out = E::narrow(*sum);
                    }
                }
            }
        }
    }
}

struct Multiply<'a> {
    weight: &'a QuantizedWeight,
    bias: Option<&'a [f32]>,
    blocks: &'a [RowBlock],
}

impl Sums for Multiply<'_> {
    #[inline(always)]
    fn add<V: Dots<L>, const L: usize>(
        &self,
        panel: usize,
        tile: &RowTile,
        sums: &mut [[f32; WIDTH]],
    ) {
        if let Some(bias) = self.bias {
            let bias = &bias[panel * WIDTH..];
            let count = bias.len().min(WIDTH);
            for sums in &mut *sums {
                sums[..count].copy_from_slice(&bias[..count]);
            }
        }
        add_products::<V, L>(self.weight, panel, (tile, self.blocks), sums);
    }
}

/// The weights and rows of the gate, and the others.
struct MultiplyGated<'a> {
    weights: [&'a QuantizedWeight; 2],
    blocks: [&'a [RowBlock]; 2],
}

impl Sums for MultiplyGated<'_> {
    #[inline(always)]
    fn add<V: Dots<L>, const L: usize>(
        &self,
        panel: usize,
        tile: &RowTile,
        sums: &mut [[f32; WIDTH]],
    ) {
        let mut gates = [[0.0; WIDTH]; MOST_ROWS];
        let gates = &mut gates[..tile.width];
        for number in 0..2 {
            let rows = (tile, self.blocks[number]);
            let sums = if number == 0 { &mut *gates } else { &mut *sums };
            add_products::<V, L>(self.weights[number], panel, rows, sums);
        }
        let sums = sums.as_flattened_mut().iter_mut();
        for (sum, &gate) in sums.zip(gates.as_flattened()) {
            *sum *= silu(gate);
        }
    }
}
