//! Linear layers with quantised weights: rows are quantised to 8 bits, then multiplied with panels of the weight.

use std::cell::Cell;
use std::iter::repeat_n;
use std::mem::take;
use std::ops::Range;

use crate::activation::Activation;
use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::divided::divided;
use crate::dots::{Build, Dots, InIntegers};
use crate::element::{Element, widen};
use crate::error::Error;
use crate::isa::Isa;
use crate::linear::{check_gate, check_rows, own_rows};
use crate::lines::WIDTH;
use crate::quantized_format::{BLOCK, Offset};
use crate::quantized_product::add_products;
use crate::quantized_rows::{Quantize, RowBlocks, RowMemory, RowTile, tiles};
#[cfg(target_arch = "x86_64")]
use crate::quantized_tiles;
use crate::quantized_weight::QuantizedWeight;
use crate::step::same_length;

/// Multiplications that one thread computes: a few microseconds of work.
const SMALL: usize = 150_000;

/// The least multiplications of a task, unless threads would be idle.
const TASK: usize = 200_000;

/// Elements that one thread quantises: a few microseconds of work.
const FEW: usize = 8_192;

/// Tasks per thread, so that a thread on a busy processor does fewer of them.
const TASKS: usize = 8;

/// The most bytes of a task's rows: they stay in the L2 cache.
const ROW_BYTES: usize = 512 * 1024;

/// The most panels of a task with several tiles of rows.
const MAX_PANELS: usize = 16;

/// Rows of sums, about, that are computed before they are written: they stay in the L1 cache.
const MAX_SUMS: usize = 256;

/// The most tiles of rows of a task.
const MAX_TILES: usize = 16;

/// The most bytes of buffers that a thread keeps for its next product.
const MAX_KEPT: usize = 16 << 20;

thread_local! {
    /// Buffers of a thread, reused: allocating them would cost as much as quantising the rows.
    static KEPT: Cell<RowMemory> = Cell::default();
}

fn keep(memory: RowMemory) {
    if memory.size() <= MAX_KEPT {
        KEPT.set(memory);
    }
}

impl Attention {
    /// Sets `out` `[rows, out_features]` to `rows` `[rows, in_features]` times the transposed weight, plus `bias`
    /// `[out_features]`.
    ///
    /// Rows are quantised to 8 bits in blocks of 32, as in llama.cpp; beside float32's rounding, this is the only error.
    /// The products of a block are added as integers, and blocks in the order of the inputs. A row has the same bits in
    /// every batch, with any number of threads and at every instruction level. If a row has a NaN or infinity, its
    /// products are not finite.
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
        check_rows(weight.features(), rows.len(), out.len())?;
        if let Some(bias) = bias {
            same_length("bias", weight.out_features(), bias.len())?;
        }
        let isa = self.isa();
        let tiles = tiles_of(rows, weight, isa);
        let mut memory = KEPT.take();
        let blocks = self.quantize(rows, weight, &tiles, &mut memory);
        let work = Multiply {
            isa,
            tiles: &tiles,
            up: Factor { weight, blocks },
            bias,
            gate: None,
        };
        self.by_panels(out, &work);
        keep(memory);
        Ok(())
    }

    /// Sets `out` to `activation(rows * gate) * (rows * up)`, in float32 and rounded once. Both weights have one shape.
    /// Otherwise as [`Attention::quantized_linear`].
    ///
    /// # Errors
    ///
    /// Arrays that do not fit each other: nothing is written then.
    pub fn quantized_gated_linear<E: Element>(
        &self,
        rows: &[E],
        gate: &QuantizedWeight,
        activation: Activation,
        up: &QuantizedWeight,
        out: &mut [E],
    ) -> Result<(), Error> {
        check_rows(up.features(), rows.len(), out.len())?;
        check_gate(up.features(), gate.features())?;
        let isa = self.isa();
        let tiles = tiles_of(rows, up, isa);
        let (mut memory, mut other) = (KEPT.take(), RowMemory::default());
        let blocks = self.quantize(rows, up, &tiles, &mut memory);
        let gate_blocks = match offset_of(gate) == offset_of(up) {
            true => blocks,
            false => self.quantize(rows, gate, &tiles, &mut other),
        };
        let work = Multiply {
            isa,
            tiles: &tiles,
            up: Factor { weight: up, blocks },
            bias: None,
            gate: Some((
                Factor {
                    weight: gate,
                    blocks: gate_blocks,
                },
                activation,
            )),
        };
        self.by_panels(out, &work);
        keep(memory);
        Ok(())
    }

    /// Quantises the rows of these tiles.
    fn quantize<'m, E: Element>(
        &self,
        rows: &[E],
        weight: &QuantizedWeight,
        tiles: &[RowTile],
        memory: &'m mut RowMemory,
    ) -> RowBlocks<'m> {
        let in_features = weight.in_features();
        let size = tiles.last().map_or(0, |tile| tile.blocks.end);
        let (mut numbers_left, mut factors_left) = memory.buffers(size);
        let mut tasks = vec![];
        for tile in tiles {
            let (numbers, rest) = take(&mut numbers_left).split_at_mut(tile.blocks.len());
            numbers_left = rest;
            let (factors, rest) = take(&mut factors_left).split_at_mut(tile.blocks.len());
            factors_left = rest;
            tasks.push(Quantize {
                rows: &rows[tile.rows.start * in_features..tile.rows.end * in_features],
                in_features,
                offset: offset_of(weight),
                width: tile.width,
                numbers,
                factors,
            });
        }
        let num_threads = match rows.len() > FEW {
            true => self.threads().count().min(tasks.len()),
            false => 1,
        };
        let isa = self.isa();
        self.threads()
            .share_out(num_threads, tasks, |task| task.run_at(isa));
        memory.blocks()
    }

    /// Divides the outputs of all rows into tasks and runs them.
    fn by_panels<E: Element>(&self, out: &mut [E], work: &Multiply<'_>) {
        let (weight, tiles) = (work.up.weight, work.tiles);
        let width = weight.out_features();
        let (products, out_rows) = (
            out.len().saturating_mul(weight.in_features()),
            out.len() / width,
        );
        let num_threads = match products > SMALL {
            true => self.threads().count(),
            false => 1,
        };
        let num_panels = width.div_ceil(WIDTH);
        let tasks = (products / TASK).clamp(num_threads, TASKS * num_threads);
        let mut panels = num_panels.div_ceil(tasks);
        if tiles.len() > 1 {
            panels = panels.next_multiple_of(2).min(MAX_PANELS); // AMX multiplies two at once
        }
        let tile_bytes = tiles
            .first()
            .map_or(1, |tile| tile.blocks.len() * RowBlocks::BYTES);
        let max_tiles = (ROW_BYTES / tile_bytes).clamp(1, MAX_TILES);
        let num_groups = tiles.len().div_ceil(max_tiles);
        let tiles_each = tiles.len().div_ceil(num_groups.max(1)).max(1);
        let groups: Vec<_> = tiles.chunks(tiles_each).collect();
        let rows: Vec<_> = groups
            .iter()
            .map(|tiles| tiles[0].rows.start..tiles[tiles.len() - 1].rows.end)
            .collect();
        let parts = divided(out, width, panels * WIDTH, &rows);
        let mut parts: Vec<_> = parts.into_iter().zip(groups.iter().cycle()).collect();
        let own = own_rows(out_rows, num_threads);
        parts.sort_by_key(|(part, _)| part.rows.start / own);
        self.threads()
            .share_out(num_threads, parts, |(part, tiles)| {
                work.run(Part {
                    tiles,
                    first_panel: part.columns.start / WIDTH,
                    out: part.into_rows(),
                });
            });
    }
}

fn tiles_of<E>(rows: &[E], weight: &QuantizedWeight, isa: Isa) -> Vec<RowTile> {
    let in_features = weight.in_features();
    tiles(
        rows.len() / in_features,
        in_features / BLOCK,
        Build::at(isa).max_rows(),
    )
}

fn offset_of(weight: &QuantizedWeight) -> Offset {
    weight.kind().offset()
}

/// A task: some outputs of some rows.
struct Part<'a, 'b, E> {
    tiles: &'a [RowTile],
    /// The panel of the first output.
    first_panel: usize,
    /// The same range of outputs of each row of the tiles.
    out: Vec<&'b mut [E]>,
}

/// A weight, and the rows quantised for it.
#[derive(Clone, Copy)]
struct Factor<'a> {
    weight: &'a QuantizedWeight,
    blocks: RowBlocks<'a>,
}

/// Sets the outputs of a part to products of its tiles.
struct Multiply<'a> {
    isa: Isa,
    /// Of all rows.
    tiles: &'a [RowTile],
    up: Factor<'a>,
    /// Initial values of the sums.
    bias: Option<&'a [f32]>,
    /// The weight whose activated products the sums are multiplied with.
    gate: Option<(Factor<'a>, Activation)>,
}

impl Multiply<'_> {
    fn run<E: Element>(&self, mut part: Part<'_, '_, E>) {
        let width = part.out.first().map_or(0, |out| out.len());
        let end = part.first_panel + width.div_ceil(WIDTH);
        let tiles = part.tiles;
        let num_rows = tiles.iter().map(|tile| tile.width).sum();
        let step = MAX_SUMS.div_ceil(num_rows).next_multiple_of(2);
        let (mut sums, mut gates) = (vec![], vec![]);
        for first in (part.first_panel..end).step_by(step) {
            let panels = first..end.min(first + step);
            gates.clear();
            if let Some((gate, _)) = self.gate {
                gates.resize(panels.len() * num_rows, [0.0; WIDTH]);
                self.add(gate, tiles, panels.clone(), &mut gates);
            }
            sums.clear();
            for panel in panels.clone() {
                sums.extend(repeat_n(self.begin(panel), num_rows));
            }
            self.add(self.up, tiles, panels, &mut sums);
            let work = Finish {
                sums: &mut sums,
                gates: self.gate.map(|(_, activation)| (&gates[..], activation)),
                tiles,
                column: (first - part.first_panel) * WIDTH,
                out: &mut part.out,
            };
            best_build(self.isa, work);
        }
    }

    /// The initial sums of a panel.
    fn begin(&self, panel: usize) -> [f32; WIDTH] {
        let mut sums = [0.0; WIDTH];
        if let Some(bias) = self.bias {
            widen(&bias[panel * WIDTH..], &mut sums);
            for sum in &mut sums {
                *sum += 0.0; // turns -0.0 into 0.0, as -0.0 plus a zero depends on the zero's sign
            }
        }
        sums
    }

    /// Adds products to `sums`, `[panels, rows of the tiles]`.
    fn add(
        &self,
        factor: Factor<'_>,
        tiles: &[RowTile],
        panels: Range<usize>,
        sums: &mut [[f32; WIDTH]],
    ) {
        #[cfg(target_arch = "x86_64")]
        if quantized_tiles::is_faster(self.isa, factor.weight, tiles) {
            let Factor { weight, blocks } = factor;
            return quantized_tiles::add_tile_products(weight, panels, tiles, blocks, sums);
        }
        Build::at(self.isa).run(Add {
            factor,
            tiles,
            panels,
            sums,
        });
    }
}

/// The work of [`Multiply::add`]. It is not generic over elements, so it is compiled once per instruction level.
struct Add<'a> {
    factor: Factor<'a>,
    tiles: &'a [RowTile],
    panels: Range<usize>,
    sums: &'a mut [[f32; WIDTH]],
}

impl InIntegers for Add<'_> {
    #[inline(always)]
    fn run<V: Dots<L>, const L: usize>(self) {
        let Factor { weight, blocks } = self.factor;
        let mut left = self.sums;
        for panel in self.panels {
            for tile in self.tiles {
                let (sums, rest) = left.split_at_mut(tile.width);
                add_products::<V, L>(weight, panel, tile, blocks, sums);
                left = rest;
            }
        }
    }
}

/// Multiplies sums with activated gates, if any, and writes them to the outputs from `column` on.
struct Finish<'a, 'b, E> {
    /// As in [`Add`].
    sums: &'a mut [[f32; WIDTH]],
    gates: Option<(&'a [[f32; WIDTH]], Activation)>,
    tiles: &'a [RowTile],
    column: usize,
    out: &'a mut [&'b mut [E]],
}

impl<E: Element> InEachBuild for Finish<'_, '_, E> {
    #[inline(always)]
    fn run(self) {
        if let Some((gates, activation)) = self.gates {
            activation.apply(self.sums.as_flattened_mut(), gates.as_flattened());
        }
        let num_rows: usize = self.tiles.iter().map(|tile| tile.width).sum();
        for (number, mut sums) in self.sums.chunks_exact(num_rows).enumerate() {
            let column = self.column + number * WIDTH;
            let mut rows = self.out.iter_mut();
            for tile in self.tiles {
                for (sums, out) in sums.iter().zip(rows.by_ref().take(tile.rows.len())) {
                    for (&sum, out) in sums.iter().zip(&mut out[column..]) {
                        *out = E::narrow(sum);
                    }
                }
                sums = &sums[tile.width..];
            }
        }
    }
}
