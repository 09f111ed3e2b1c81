//! Products of bfloat16 with a packed weight by AMX: 16 rows by 16 outputs at once, 32 inputs each.
//!
//! A panel's lines are the rows of a tile as they lie, and so are the rows of a layer. A sum begins with zero. For each 32
//! inputs, the products of even and of odd ones are added up apart, then to each other, then to the sum. The order does
//! not depend on the number of rows: tiles multiply a single row, too, with its bits in any batch.

use std::arch::x86_64::{_mm256_loadu_si256, _mm256_storeu_si256};
use std::cell::Cell;
use std::ops::Range;

use crate::activation::Activation;
use crate::element::{Element, widen};
use crate::lanes::{fetch_line, fetch_line_later};
use crate::lines::{self, Lines};
use crate::product::Columns;
use crate::tiles::{
    Line, ROWS, Rows, STRIDE, Shape, TILES, Tiles, WIDTH, load, multiply_add, store, zero,
};

/// Rows that are multiplied at once: two tiles.
const GROUP: usize = 2 * ROWS;

/// Tiles of sums, for any group of rows: 4 by 1 or 2 by 2.
const SUMS: usize = 4;

/// Lines of all tiles of sums.
const SUM_LINES: usize = SUMS * ROWS;

/// Inputs whose products are added up before those of the next ones, where a panel meets several groups of rows: it stays
/// in the second cache.
const BLOCK: usize = 1024;

/// Bytes of a tile of weights.
const TILE: usize = ROWS * STRIDE;

/// Bytes by which a single pass over a weight is read ahead.
const AHEAD: usize = 2048;

thread_local! {
    /// Sums of a task, from one to the next.
    static KEPT: Cell<Vec<Line<f32>>> = Cell::default();
}

/// A product of rows with a weight, and what becomes of its sums.
pub(crate) struct Product<'a> {
    pub(crate) weight: &'a Lines<u32>,
    /// What is added to the sums.
    pub(crate) bias: Option<&'a [u16]>,
    /// Sums are multiplied with the activations of the products with it.
    pub(crate) gate: Option<(&'a Lines<u32>, Activation)>,
}

/// Writes `product` of the rows to `columns.out`. Only for [`crate::Isa::Amx`].
pub(crate) fn multiply(columns: Columns<'_, '_, u16, u16>, product: &Product<'_>) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn multiply(mut columns: Columns<'_, '_, u16, u16>, product: &Product<'_>) {
        let (size, count) = (product.weight.in_features(), columns.out.len());
        let num_whole = count / GROUP * GROUP;
        for (from, to) in [(0, num_whole), (num_whole, count)] {
            if from < to {
                let part = Part {
                    rows: &columns.rows[from * size..to * size],
                    product,
                    first: columns.first,
                };
                part.multiply(&mut columns.out[from..to]);
            }
        }
    }
    // SAFETY: every machine with AMX has these instructions.
    unsafe { multiply(columns, product) };
}

/// Rows that are whole groups, or fewer than one.
struct Part<'a> {
    /// `[rows, in_features]`.
    rows: &'a [u16],
    product: &'a Product<'a>,
    /// The panel of the first output.
    first: usize,
}

impl Part<'_> {
    #[inline(always)]
    fn multiply(&self, out: &mut [&mut [u16]]) {
        let Product { weight, gate, .. } = self.product;
        let (size, count) = (weight.in_features(), out.len());
        let heights = [count.min(ROWS), count.saturating_sub(ROWS).min(ROWS)];
        let _tiles = Tiles::of_shapes(&shapes(heights));
        let num_panels = out[0].len().div_ceil(lines::WIDTH);
        let max_panels = if count > ROWS { 2 } else { SUMS };
        let step = num_panels.div_ceil(num_panels.div_ceil(max_panels));
        let num_groups = count.div_ceil(GROUP);
        let num_blocks = match num_groups {
            1 => 1, // a single pass
            _ => size.div_ceil(BLOCK),
        };
        let block = size.div_ceil(num_blocks).next_multiple_of(WIDTH);
        let kept = match num_blocks {
            1 => num_groups,
            _ => num_panels.div_ceil(step) * num_groups,
        };
        let mut memory = KEPT.take();
        let half = kept * SUM_LINES; // the sums of the gates are behind those of the weight
        if memory.len() < 2 * half {
            memory.resize(2 * half, Line([0.0; ROWS]));
        }
        let (sums, gates) = memory.split_at_mut(half);
        for first in (0..size).step_by(block) {
            let inputs = first..size.min(first + block);
            for (number, panel) in (0..num_panels).step_by(step).enumerate() {
                let panels = panel..num_panels.min(panel + step);
                let from = number * num_groups % kept * SUM_LINES;
                let (sums, gates) = (&mut sums[from..], &mut gates[from..]);
                if let Some((gate, _)) = gate {
                    for (group, gates) in gates.chunks_mut(SUM_LINES).take(num_groups).enumerate() {
                        self.tile(gate, inputs.clone(), panels.clone(), group, num_groups)
                            .add(panels.len(), gates);
                    }
                }
                for (group, out) in out.chunks_mut(GROUP).enumerate() {
                    let tile_lines = group * SUM_LINES..(group + 1) * SUM_LINES;
                    let sums = &mut sums[tile_lines.clone()];
                    self.tile(weight, inputs.clone(), panels.clone(), group, num_groups)
                        .add(panels.len(), sums);
                    if inputs.end == size {
                        self.finish(sums, &gates[tile_lines], panels.clone(), max_panels, out);
                    }
                }
            }
        }
        KEPT.set(memory);
    }

    /// Writes the outputs of a group of rows for these panels; at most `max_panels` have tiles.
    #[inline(always)]
    fn finish(
        &self,
        sums: &[Line<f32>],
        gates: &[Line<f32>],
        panels: Range<usize>,
        max_panels: usize,
        out: &mut [&mut [u16]],
    ) {
        for (number, column) in panels.map(|panel| panel * lines::WIDTH).enumerate() {
            let mut bias = [0.0; lines::WIDTH];
            if let Some(all) = self.product.bias {
                widen(&all[self.first * lines::WIDTH + column..], &mut bias);
            }
            for (row, out) in out.iter_mut().enumerate() {
                let line = (row / ROWS * max_panels + number) * ROWS + row % ROWS;
                let mut floats = sums[line].0;
                for (float, bias) in floats.iter_mut().zip(bias) {
                    *float += bias;
                }
                let rounded = match self.product.gate {
                    None => floats.map(u16::narrow), // in registers
                    Some((_, activation)) => {
                        activation.apply(&mut floats, &gates[line].0);
                        floats.map(u16::narrow)
                    }
                };
                let out = &mut out[column..];
                match out.first_chunk_mut::<{ lines::WIDTH }>() {
                    // SAFETY: 32 bytes are read and written; every machine with AMX has these instructions. The compiler
                    // would call a function for both cases.
                    Some(out) => unsafe {
                        let rounded = _mm256_loadu_si256(rounded.as_ptr().cast());
                        _mm256_storeu_si256(out.as_mut_ptr().cast(), rounded);
                    },
                    None => out.copy_from_slice(&rounded[..out.len()]),
                }
            }
        }
    }

    /// What is multiplied at once: some inputs of a group of rows and of some panels.
    #[inline(always)]
    fn tile<'t>(
        &'t self,
        weight: &'t Lines<u32>,
        inputs: Range<usize>,
        panels: Range<usize>,
        group: usize,
        num_groups: usize,
    ) -> Tile<'t> {
        let size = weight.in_features();
        let rows = &self.rows[group * GROUP * size..];
        let rows = &rows[..rows.len().min(GROUP * size)];
        let rows = [rows, &rows[rows.len().min(ROWS * size)..]];
        let mut lines: [&[lines::Line<u32>]; SUMS] = [&[]; SUMS];
        for (lines, number) in lines.iter_mut().zip(panels.clone()) {
            let panel = weight.panel(self.first + number);
            *lines = &panel[inputs.start / 2..inputs.end.div_ceil(2)];
        }
        let each = ROWS.div_ceil(num_groups);
        Tile {
            rows,
            size,
            first: inputs.start,
            count: inputs.len(),
            panels: lines,
            each,
            ahead: match num_groups {
                1 => AHEAD,
                _ => {
                    let next = panels.len() * size_of_val(weight.panel(0));
                    next + group * inputs.len().div_ceil(WIDTH) * each * STRIDE
                }
            },
            beyond: match num_groups {
                1 => (panels.len() - 1) * size_of_val(weight.panel(0)),
                _ => 0,
            },
        }
    }
}

/// The shapes of the tiles for so many rows in the first tile of a group and in the second. Tiles 0 to 3 are sums. With one
/// tile of rows, that is tile 4, and the others are of weights. With two, they are 4 and 5, and sums 2 and 3 are the
/// second one's.
fn shapes(heights: [usize; 2]) -> [Shape; TILES] {
    let [first, second] = heights.map(|rows| Shape {
        rows,
        bytes: STRIDE,
    });
    let whole = Shape::WHOLE;
    match second.rows {
        0 => [first, first, first, first, first, whole, whole, whole],
        _ => [first, first, second, second, first, second, whole, whole],
    }
}

/// Some inputs of a group of rows and of some panels.
struct Tile<'a> {
    /// Of each tile, `[rows, size]`.
    rows: [&'a [u16]; 2],
    size: usize,
    /// The first input.
    first: usize,
    count: usize,
    /// The lines of these inputs.
    panels: [&'a [lines::Line<u32>]; SUMS],
    /// Bytes from a line to what is asked for with it.
    ahead: usize,
    /// Bytes from the end of a panel to where the one goes on that is multiplied next.
    beyond: usize,
    /// Lines of that for each tile of a panel.
    each: usize,
}

/// The last inputs where they do not fill a tile, with zeros beyond: no element of the next row is read.
struct Tail {
    rows: [[Line<u32>; ROWS]; 2],
    panels: [[lines::Line<u32>; ROWS]; SUMS],
}

impl Tile<'_> {
    /// Adds the products to `sums`, which begin with zero where the inputs do.
    #[inline(always)]
    fn add(&self, num_panels: usize, sums: &mut [Line<f32>]) {
        match (self.rows[1].is_empty(), num_panels) {
            (true, 1) => self.add_one::<1>(sums),
            (true, 2) => self.add_one::<2>(sums),
            (true, 3) => self.add_one::<3>(sums),
            (true, _) => self.add_one::<4>(sums),
            (false, 1) => self.add_two::<1>(sums),
            (false, _) => self.add_two::<2>(sums),
        }
    }

    /// One tile of rows by `P` panels: with four, a sum waits for the one before while three others are added to.
    #[inline(always)]
    fn add_one<const P: usize>(&self, sums: &mut [Line<f32>]) {
        self.begin(sums);
        let (rows, panels) = (self.row_tiles(0), self.panel_tiles());
        for at in 0..self.count / WIDTH {
            load!("tmm4", rows, at * STRIDE);
            load!("tmm5", panels[0], at * TILE);
            multiply_add!("tmm0", "tmm4", "tmm5");
            if P > 1 {
                load!("tmm6", panels[1], at * TILE);
                multiply_add!("tmm1", "tmm4", "tmm6");
            }
            if P > 2 {
                load!("tmm7", panels[2], at * TILE);
                multiply_add!("tmm2", "tmm4", "tmm7");
            }
            if P > 3 {
                load!("tmm5", panels[3], at * TILE);
                multiply_add!("tmm3", "tmm4", "tmm5");
            }
            self.fetch::<P>(at);
        }
        if let Some(tail) = self.tail() {
            load!("tmm4", Rows::of(&tail.rows[0]), 0);
            load!("tmm5", Rows::of(&tail.panels[0]), 0);
            multiply_add!("tmm0", "tmm4", "tmm5");
            load!("tmm6", Rows::of(&tail.panels[1]), 0);
            multiply_add!("tmm1", "tmm4", "tmm6");
            load!("tmm7", Rows::of(&tail.panels[2]), 0);
            multiply_add!("tmm2", "tmm4", "tmm7");
            load!("tmm5", Rows::of(&tail.panels[3]), 0);
            multiply_add!("tmm3", "tmm4", "tmm5");
        }
        end(sums);
    }

    /// Two tiles of rows by `P` panels: four tiles are loaded for four products.
    #[inline(always)]
    fn add_two<const P: usize>(&self, sums: &mut [Line<f32>]) {
        self.begin(sums);
        let rows = [self.row_tiles(0), self.row_tiles(1)];
        let panels = self.panel_tiles();
        for at in 0..self.count / WIDTH {
            load!("tmm4", rows[0], at * STRIDE);
            load!("tmm6", panels[0], at * TILE);
            multiply_add!("tmm0", "tmm4", "tmm6");
            load!("tmm5", rows[1], at * STRIDE);
            multiply_add!("tmm2", "tmm5", "tmm6");
            if P > 1 {
                load!("tmm7", panels[1], at * TILE);
                multiply_add!("tmm1", "tmm4", "tmm7");
                multiply_add!("tmm3", "tmm5", "tmm7");
            }
            self.fetch::<P>(at);
        }
        if let Some(tail) = self.tail() {
            load!("tmm4", Rows::of(&tail.rows[0]), 0);
            load!("tmm5", Rows::of(&tail.rows[1]), 0);
            load!("tmm6", Rows::of(&tail.panels[0]), 0);
            load!("tmm7", Rows::of(&tail.panels[1]), 0);
            multiply_add!("tmm0", "tmm4", "tmm6");
            multiply_add!("tmm1", "tmm4", "tmm7");
            multiply_add!("tmm2", "tmm5", "tmm6");
            multiply_add!("tmm3", "tmm5", "tmm7");
        }
        end(sums);
    }

    #[inline(always)]
    fn begin(&self, sums: &[Line<f32>]) {
        if self.first == 0 {
            zero!("tmm0", "tmm1", "tmm2", "tmm3");
        } else {
            load!("tmm0", Rows::of(sums), 0);
            load!("tmm1", Rows::of(&sums[ROWS..]), 0);
            load!("tmm2", Rows::of(&sums[2 * ROWS..]), 0);
            load!("tmm3", Rows::of(&sums[3 * ROWS..]), 0);
        }
    }

    /// The rows of a tile, from the first input on.
    #[inline(always)]
    fn row_tiles(&self, number: usize) -> Rows<'_> {
        Rows::every(
            &self.rows[number][self.first..],
            self.size * size_of::<u16>(),
        )
    }

    /// The weights of each panel, from the first input on.
    #[inline(always)]
    fn panel_tiles(&self) -> [Rows<'_>; SUMS] {
        let [first, second, third, fourth] = self.panels;
        [
            Rows::every(first, STRIDE),
            Rows::every(second, STRIDE),
            Rows::every(third, STRIDE),
            Rows::every(fourth, STRIDE),
        ]
    }

    /// Asks for weights that are multiplied later.
    #[inline(always)]
    fn fetch<const P: usize>(&self, at: usize) {
        let mut ahead = self.ahead + at * self.each * STRIDE;
        if self.each < ROWS {
            for panel in &self.panels[..P] {
                let first = panel.as_ptr().wrapping_byte_add(ahead);
                for line in 0..self.each {
                    fetch_line_later(first.wrapping_add(line));
                }
            }
            return;
        }
        if ahead >= size_of_val(self.panels[0]) {
            ahead += self.beyond;
        }
        for panel in &self.panels[..P] {
            let first = panel.as_ptr().wrapping_byte_add(ahead);
            for line in 0..ROWS {
                fetch_line(first.wrapping_add(line));
            }
        }
    }

    #[inline(always)]
    fn tail(&self) -> Option<Tail> {
        let whole = self.count / WIDTH * WIDTH;
        if whole == self.count {
            return None;
        }
        let mut tail = Tail {
            rows: [[Line([0; ROWS]); ROWS]; 2],
            panels: [[[0; lines::WIDTH]; ROWS]; SUMS],
        };
        for (copies, rows) in tail.rows.iter_mut().zip(self.rows) {
            for (copy, row) in copies.iter_mut().zip(rows.chunks_exact(self.size)) {
                for (at, &element) in row[self.first + whole..].iter().enumerate() {
                    copy.0[at / 2] |= u32::from(element) << (16 * (at % 2));
                }
            }
        }
        for (copy, panel) in tail.panels.iter_mut().zip(self.panels) {
            for (copy, line) in copy.iter_mut().zip(panel.iter().skip(whole / 2)) {
                *copy = *line;
            }
        }
        Some(tail)
    }
}

#[inline(always)]
fn end(sums: &mut [Line<f32>]) {
    store!("tmm0", sums);
    store!("tmm1", sums[ROWS..]);
    store!("tmm2", sums[2 * ROWS..]);
    store!("tmm3", sums[3 * ROWS..]);
}
