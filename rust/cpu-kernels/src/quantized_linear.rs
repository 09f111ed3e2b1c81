//! Linear layers on quantised weights: rows become integers of 8 bits, then panels are multiplied.

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

/// Multiplications below which one thread computes: a few microseconds of work.
const SMALL: usize = 150_000;

/// Multiplications of a task at least, where each thread has one.
const TASK: usize = 200_000;

/// Numbers of rows that one thread rounds: a few microseconds of work.
const FEW: usize = 8_192;

/// Tasks for each thread, so that one whose processor is busy with something else does less.
const TASKS: usize = 8;

/// Bytes of a task's rows at most: they stay in a core's second cache.
const ROW_BYTES: usize = 512 * 1024;

/// Panels of a task of several tiles of rows at most.
const MOST_PANELS: usize = 16;

/// Rows of panels whose sums are made before they are written, about: they stay in a core's first cache.
const MOST_SUMS: usize = 256;

/// Tiles of rows of a task at most.
const MOST_TILES: usize = 16;

/// Bytes of rows that a thread keeps for its next product at most.
const MOST_KEPT: usize = 16 << 20;

thread_local! {
    /// From product to product of a thread: new memory costs as much as the rounding.
    static KEPT: Cell<RowMemory> = Cell::default();
}

fn keep(memory: RowMemory) {
    if memory.size() <= MOST_KEPT {
        KEPT.set(memory);
    }
}

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

    /// `out` becomes `activation(rows * gate) * (rows * up)`, for weights of one shape, in float32 and rounded once.
    /// As [`Attention::quantized_linear`] otherwise.
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

    /// The rows as integers, in these tiles.
    fn quantize<'m, E: Element>(
        &self,
        rows: &[E],
        weight: &QuantizedWeight,
        tiles: &[RowTile],
        memory: &'m mut RowMemory,
    ) -> RowBlocks<'m> {
        let in_features = weight.in_features();
        let size = tiles.last().map_or(0, |tile| tile.blocks.end);
        let (mut numbers_left, mut factors_left) = memory.room(size);
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

    /// Does the work for all outputs of all rows, some at a time.
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
            panels = panels.next_multiple_of(2).min(MOST_PANELS); // tiles multiply two at once
        }
        let tile_bytes = tiles
            .first()
            .map_or(1, |tile| tile.blocks.len() * RowBlocks::BYTES);
        let most_tiles = (ROW_BYTES / tile_bytes).clamp(1, MOST_TILES);
        let num_groups = tiles.len().div_ceil(most_tiles);
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
        Build::at(isa).most_rows(),
    )
}

fn offset_of(weight: &QuantizedWeight) -> Offset {
    weight.kind().offset()
}

/// Some outputs of some rows, as a thread takes them.
struct Part<'a, 'b, E> {
    tiles: &'a [RowTile],
    /// The panel of the first output.
    first_panel: usize,
    /// The outputs of each row of the tiles, the same ones.
    out: Vec<&'b mut [E]>,
}

/// A weight, and the rows as it is multiplied with them.
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
    /// The sums begin with it.
    bias: Option<&'a [f32]>,
    /// Sums are multiplied with the activations of the products with it.
    gate: Option<(Factor<'a>, Activation)>,
}

impl Multiply<'_> {
    fn run<E: Element>(&self, mut part: Part<'_, '_, E>) {
        let width = part.out.first().map_or(0, |out| out.len());
        let end = part.first_panel + width.div_ceil(WIDTH);
        let tiles = part.tiles;
        let num_rows = tiles.iter().map(|tile| tile.width).sum();
        let step = MOST_SUMS.div_ceil(num_rows).next_multiple_of(2);
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

    /// The first values of the sums of a panel.
    fn begin(&self, panel: usize) -> [f32; WIDTH] {
        let mut sums = [0.0; WIDTH];
        if let Some(bias) = self.bias {
            widen(&bias[panel * WIDTH..], &mut sums);
            for sum in &mut sums {
                *sum += 0.0; // never minus zero: to that, zeros of both signs would not add alike
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
        if quantized_tiles::takes(self.isa, factor.weight, tiles) {
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

/// [`Multiply::add`]. It knows no type of elements, so that it is compiled once for each build.
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

/// Multiplies sums with the activations of their gates, if there are any, and writes them to the outputs from `column` on.
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
