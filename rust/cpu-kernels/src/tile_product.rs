//! Products of bfloat16 with a packed weight by AMX: 16 rows by 16 outputs at once, 32 inputs each.
//!
//! A panel's lines are the rows of a tile as they lie, and so are the rows of a layer. A sum begins with zero. For each 32
//! inputs, the products of even and of odd ones are added up apart, then to each other, then to the sum. The order does
//! not depend on the number of rows: tiles multiply a single row, too, with its bits in any batch.

use std::arch::x86_64::*;
use std::cell::Cell;
use std::ops::Range;

use crate::lanes::{Vector, fetch_line};
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

/// Bytes by which a single pass over a weight is read ahead.
const AHEAD: usize = 2048;

thread_local! {
    /// Rows of the tiles of a task, from one to the next.
    static KEPT: Cell<Vec<Line<u32>>> = Cell::default();
}

/// Adds to `columns.out` the products of its rows with the weight. Only for [`crate::Isa::Amx`].
pub(crate) fn add_tile_products(columns: &mut Columns<'_, '_, u16, f32>, weight: &Lines<u32>) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn add(columns: &mut Columns<'_, '_, u16, f32>, weight: &Lines<u32>) {
        let (size, count) = (weight.in_features(), columns.out.len());
        let num_whole = count / GROUP * GROUP;
        for (from, to) in [(0, num_whole), (num_whole, count)] {
            if from < to {
                let part = Part {
                    rows: &columns.rows[from * size..to * size],
                    weight,
                    first: columns.first,
                };
                part.add(&mut columns.out[from..to]);
            }
        }
    }
    // SAFETY: every machine with AMX has these instructions.
    unsafe { add(columns, weight) };
}

/// Rows that are whole groups, or fewer than one.
struct Part<'a> {
    /// `[rows, in_features]`.
    rows: &'a [u16],
    weight: &'a Lines<u32>,
    /// The panel of the first output.
    first: usize,
}

impl Part<'_> {
    #[inline(always)]
    fn add(&self, out: &mut [&mut [f32]]) {
        let (size, count) = (self.weight.in_features(), out.len());
        let heights = [count.min(ROWS), count.saturating_sub(ROWS).min(ROWS)];
        let _tiles = Tiles::of_shapes(&shapes(heights));
        let num_panels = out[0].len().div_ceil(lines::WIDTH);
        let most = if count > ROWS { 2 } else { SUMS };
        let step = num_panels.div_ceil(num_panels.div_ceil(most));
        let num_groups = count.div_ceil(GROUP);
        let num_blocks = match num_groups {
            1 => 1, // a single pass
            _ => size.div_ceil(BLOCK),
        };
        let block = size.div_ceil(num_blocks).next_multiple_of(WIDTH);
        let kept = match num_blocks {
            1 => 1,
            _ => num_panels.div_ceil(step) * num_groups,
        };
        let mut sums = vec![Line([0.0; ROWS]); kept * SUM_LINES];
        let mut packed = KEPT.take();
        for first in (0..size).step_by(block) {
            let inputs = first..size.min(first + block);
            packed.clear();
            if num_groups > 1 {
                // SAFETY: every machine with AMX has these instructions.
                unsafe { self.pack(inputs.clone(), &mut packed) };
            }
            for (number, panel) in (0..num_panels).step_by(step).enumerate() {
                let panels = panel..num_panels.min(panel + step);
                for (group, out) in out.chunks_mut(GROUP).enumerate() {
                    let place = (number * num_groups + group) % kept;
                    let sums = &mut sums[place * SUM_LINES..][..SUM_LINES];
                    let tile = self.tile(
                        (inputs.start, inputs.end),
                        (panels.start, panels.end),
                        (group, num_groups),
                        &packed,
                    );
                    tile.add(panels.len(), sums);
                    if inputs.end == size {
                        finish(sums, panels.start, most, out);
                    }
                }
            }
        }
        KEPT.set(packed);
    }

    /// Copies rows as tiles have them, `[tiles, inputs / 32, 16]`: lines that lie as far apart as rows do would be in each
    /// other's way in the first cache. There are whole groups of rows; inputs that do not fill a tile are left out.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn pack(&self, inputs: Range<usize>, packed: &mut Vec<Line<u32>>) {
        let size = self.weight.in_features();
        for rows in self.rows.chunks_exact(ROWS * size) {
            for first in (inputs.start..inputs.end).step_by(WIDTH) {
                if inputs.end - first < WIDTH {
                    break;
                }
                for row in rows.chunks_exact(size) {
                    let mut line = Line([0; ROWS]);
                    let elements: &[u16; WIDTH] =
                        row[first..].first_chunk().expect("there are so many");
                    // SAFETY: 64 bytes are read and written.
                    unsafe {
                        let elements = _mm512_loadu_si512(elements.as_ptr().cast());
                        _mm512_store_si512(line.0.as_mut_ptr().cast(), elements);
                    }
                    packed.push(line);
                }
            }
        }
    }

    /// What is multiplied at once: some inputs of a group of rows and of some panels.
    #[inline(always)]
    fn tile<'t>(
        &'t self,
        (first, end): (usize, usize),
        (panel, panels_end): (usize, usize),
        (group, num_groups): (usize, usize),
        packed: &'t [Line<u32>],
    ) -> Tile<'t> {
        let size = self.weight.in_features();
        let rows = &self.rows[group * GROUP * size..];
        let rows = &rows[..rows.len().min(GROUP * size)];
        let rows = [rows, &rows[rows.len().min(ROWS * size)..]];
        let per_tile = (end - first) / WIDTH * ROWS;
        let packed = match packed {
            [] => None,
            packed => Some(&packed[2 * group * per_tile..][..2 * per_tile]),
        };
        let mut panels: [&[lines::Line<u32>]; SUMS] = [&[]; SUMS];
        for (panels, number) in panels.iter_mut().zip(panel..panels_end) {
            let lines = self.weight.panel(self.first + number);
            *panels = &lines[first / 2..end.div_ceil(2)];
        }
        let each = ROWS.div_ceil(num_groups);
        Tile {
            rows,
            packed,
            size,
            first,
            count: end - first,
            panels,
            each,
            ahead: match num_groups {
                1 => AHEAD,
                _ => {
                    let next = (panels_end - panel) * size_of_val(self.weight.panel(0));
                    next + group * (end - first).div_ceil(WIDTH) * each * STRIDE
                }
            },
            beyond: match num_groups {
                1 => (panels_end - panel - 1) * size_of_val(self.weight.panel(0)),
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
    /// Both tiles of rows in these inputs, copied.
    packed: Option<&'a [Line<u32>]>,
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
        for at in 0..self.count / WIDTH {
            load!("tmm4", self.row_tile(0, at), 0);
            load!("tmm5", self.panel_tile(0, at), 0);
            multiply_add!("tmm0", "tmm4", "tmm5");
            if P > 1 {
                load!("tmm6", self.panel_tile(1, at), 0);
                multiply_add!("tmm1", "tmm4", "tmm6");
            }
            if P > 2 {
                load!("tmm7", self.panel_tile(2, at), 0);
                multiply_add!("tmm2", "tmm4", "tmm7");
            }
            if P > 3 {
                load!("tmm5", self.panel_tile(3, at), 0);
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
        for at in 0..self.count / WIDTH {
            load!("tmm4", self.row_tile(0, at), 0);
            load!("tmm6", self.panel_tile(0, at), 0);
            multiply_add!("tmm0", "tmm4", "tmm6");
            load!("tmm5", self.row_tile(1, at), 0);
            multiply_add!("tmm2", "tmm5", "tmm6");
            if P > 1 {
                load!("tmm7", self.panel_tile(1, at), 0);
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

    /// The rows of a tile for the 32 inputs of this number.
    #[inline(always)]
    fn row_tile(&self, number: usize, at: usize) -> Rows<'_> {
        match self.packed {
            Some(packed) => Rows::of(&packed[number * packed.len() / 2 + at * ROWS..]),
            None => Rows::every(
                &self.rows[number][self.first + at * WIDTH..],
                self.size * size_of::<u16>(),
            ),
        }
    }

    /// The weights of a panel for the 32 inputs of this number.
    #[inline(always)]
    fn panel_tile(&self, number: usize, at: usize) -> Rows<'_> {
        Rows::of(&self.panels[number][at * ROWS..])
    }

    /// Asks for weights that are multiplied later.
    #[inline(always)]
    fn fetch<const P: usize>(&self, at: usize) {
        let mut ahead = self.ahead + at * self.each * STRIDE;
        if ahead >= size_of_val(self.panels[0]) {
            ahead += self.beyond;
        }
        for panel in &self.panels[..P] {
            let first = panel.as_ptr().wrapping_byte_add(ahead);
            for line in 0..self.each {
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

/// Adds the sums of a group, of so many panels from `panel` on, to its outputs.
#[inline(always)]
fn finish(sums: &[Line<f32>], panel: usize, step: usize, out: &mut [&mut [f32]]) {
    for (sums, out) in sums.chunks(step * ROWS).zip(out.chunks_mut(ROWS)) {
        for (number, sums) in sums.chunks(ROWS).enumerate() {
            let column = (panel + number) * lines::WIDTH;
            for (Line(sums), out) in sums.iter().zip(&mut *out) {
                let out = out.get_mut(column..).unwrap_or_default();
                match out.first_chunk_mut::<{ lines::WIDTH }>() {
                    // SAFETY: every machine with AMX has AVX-512.
                    Some(out) => unsafe {
                        _mm512_add_ps(__m512::load(out), __m512::load(sums)).store(out);
                    },
                    None => {
                        for (out, sum) in out.iter_mut().zip(sums) {
                            *out += sum;
                        }
                    }
                }
            }
        }
    }
}
