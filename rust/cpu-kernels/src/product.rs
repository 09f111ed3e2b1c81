//! Rows times a packed weight, by tiles whose sums stay in registers.
//!
//! Every sum is the same sequence of multiply-adds, in the order of the inputs, whatever the tile: a row has the same
//! bits in every batch and at every level of instructions.

use crate::lanes::{Vector, fetch_line};
use crate::lines::{Line, Lines, WIDTH};

/// Rows of a tile at most: six by two vectors of 8 fill AVX2's registers, six by four of 16 those of AVX-512.
const TILE_ROWS: usize = 6;

/// Panels of a tile at most.
const MAX_PANELS: usize = 8;

/// Inputs of a tile's panels that are multiplied with several tiles of rows before the next ones: they stay in the second
/// cache. Sums are loaded and stored once a block, which costs more than what the first cache would save.
const BLOCK: usize = 1024;

/// Rows for which bfloat16 is widened in registers by every tile, where a vector is half a line.
const WIDENED_ROWS: usize = 2 * TILE_ROWS;

/// Bytes by which a single pass over a weight is read ahead.
const AHEAD: usize = 2048;

/// Bytes of a line.
const LINE: usize = size_of::<Line<f32>>();

/// Some outputs of some rows, as a thread takes them.
pub(crate) struct Columns<'a, 'b, I, O> {
    /// `[rows, in_features]`.
    pub(crate) rows: &'a [I],
    /// The panel of the first output.
    pub(crate) first: usize,
    /// The outputs of each row, the same ones.
    pub(crate) out: Vec<&'b mut [O]>,
}

/// How elements of rows are multiplied with the lines of a weight: in parts, each with one vector of weights.
pub(crate) trait Terms<V, const L: usize> {
    /// Of a row.
    type Element: Copy;
    /// Of a line: the weights of one output.
    type Lane: Copy;
    /// Elements of a row for a part of a line, in every lane.
    type Inputs: Copy;
    /// A vector of a part of a line.
    type Weights: Copy;
    /// Elements of a row that a line has weights for.
    const PER_LINE: usize;
    /// Parts of a line: of one element each, or one part of all.
    const PARTS: usize;

    /// `elements` are those of the line; at the end of a row there may be fewer.
    fn inputs(elements: &[Self::Element], part: usize) -> Self::Inputs;
    fn weights(line: &[Self::Lane; L], part: usize) -> Self::Weights;
    fn add(weights: Self::Weights, inputs: Self::Inputs, sum: V) -> V;
}

/// Floats with floats.
pub(crate) struct Floats;

impl<V: Vector<L>, const L: usize> Terms<V, L> for Floats {
    type Element = f32;
    type Lane = f32;
    type Inputs = V;
    type Weights = V;
    const PER_LINE: usize = 1;
    const PARTS: usize = 1;

    #[inline(always)]
    fn inputs(elements: &[f32], _: usize) -> V {
        V::splat(elements[0])
    }

    #[inline(always)]
    fn weights(line: &[f32; L], _: usize) -> V {
        V::load(line)
    }

    #[inline(always)]
    fn add(weights: V, input: V, sum: V) -> V {
        weights.multiply_add(input, sum)
    }
}

/// Floats with bfloat16, which is widened: the bits are those of [`Floats`] over the same numbers.
struct Widened;

impl<V: Vector<L>, const L: usize> Terms<V, L> for Widened {
    type Element = f32;
    type Lane = u32;
    type Inputs = V;
    type Weights = V;
    const PER_LINE: usize = 2;
    const PARTS: usize = 2;

    #[inline(always)]
    fn inputs(elements: &[f32], part: usize) -> V {
        V::splat(elements[part])
    }

    #[inline(always)]
    fn weights(line: &[u32; L], part: usize) -> V {
        V::widened(line)[part]
    }

    #[inline(always)]
    fn add(weights: V, input: V, sum: V) -> V {
        weights.multiply_add(input, sum)
    }
}

/// Inputs that are multiplied before the next ones, and what is read ahead meanwhile.
#[derive(Clone, Copy)]
struct Inputs {
    first: usize,
    count: usize,
    /// Bytes from the first line of a panel to what is asked for first.
    ahead: usize,
    /// Where that is the end of the panel, and the bytes from there to where the panel goes on that is multiplied next.
    end: usize,
    beyond: usize,
    /// Lines for each that is asked for: asking costs as much as a multiplication.
    step: usize,
}

/// Adds to `columns.out` the products of its rows with the weight, by vectors of `L` floats.
#[inline(always)]
pub(crate) fn add_products<T: Terms<V, L>, V: Vector<L>, const L: usize>(
    columns: &mut Columns<'_, '_, T::Element, f32>,
    weight: &Lines<T::Lane>,
) {
    let (size, num_rows) = (weight.in_features(), columns.out.len());
    let tile_rows = if V::IS_PLAIN { 1 } else { TILE_ROWS };
    let num_tiles = num_rows.div_ceil(tile_rows).max(1);
    let wide = match num_rows.div_ceil(num_tiles) {
        _ if V::IS_PLAIN => WIDTH / L,
        1 if L < WIDTH => 8,
        1..=3 => 4,
        _ if L == WIDTH => 4,
        _ => WIDTH / L,
    };
    let per_panel = WIDTH / L;
    let step = wide / per_panel;
    let block = match num_tiles {
        1 => size,
        _ => BLOCK,
    };
    let width = columns.out.first().map_or(0, |out| out.len());
    for first in (0..size).step_by(block) {
        let count = block.min(size - first);
        let lines = count.div_ceil(T::PER_LINE * num_tiles);
        let mut panel = 0;
        while panel * WIDTH < width {
            let mut vectors = wide;
            while vectors > per_panel && (panel * WIDTH + vectors * L) > width {
                vectors /= 2;
            }
            for number in 0..num_tiles {
                let [from, to] = [number, number + 1].map(|at| at * num_rows / num_tiles);
                let inputs = Inputs {
                    first,
                    count,
                    ahead: match num_tiles {
                        1 => AHEAD,
                        // Each tile asks for its part of the next panels.
                        _ => step * size_of_val(weight.panel(0)) + number * lines * LINE,
                    },
                    end: size_of_val(weight.panel(0)),
                    beyond: match num_tiles {
                        1 => (vectors / per_panel - 1) * size_of_val(weight.panel(0)),
                        _ => 0,
                    },
                    step: num_tiles,
                };
                let tile = Tile {
                    weight,
                    rows: &columns.rows[from * size..to * size],
                    panel: columns.first + panel,
                    column: panel * WIDTH,
                    out: &mut columns.out[from..to],
                };
                match vectors {
                    _ if V::IS_PLAIN => tile.add::<T, V, L, 1, 2>(&inputs),
                    8 => tile.add::<T, V, L, 1, 8>(&inputs),
                    4 => tile.add_four::<T, V, L>(&inputs),
                    2 => tile.add_few::<T, V, L, 2>(&inputs),
                    _ => tile.add_few::<T, V, L, 1>(&inputs),
                }
            }
            panel += vectors * L / WIDTH;
        }
    }
}

/// [`add_products`] of floats with bfloat16. Where registers are few and rows are many, a panel is widened once for all of
/// them.
#[inline(always)]
pub(crate) fn add_widened_products<V: Vector<L>, const L: usize>(
    columns: &mut Columns<'_, '_, f32, f32>,
    weight: &Lines<u32>,
) {
    if L == WIDTH || columns.out.len() <= WIDENED_ROWS {
        return add_products::<Widened, V, L>(columns, weight);
    }
    let width = columns.out[0].len();
    let mut floats = Lines::panel_of_zeros(weight.in_features());
    for (number, begin) in (0..width).step_by(WIDTH).enumerate() {
        let pairs = weight.panel(columns.first + number);
        for (pairs, lines) in pairs.iter().zip(floats.first_panel_mut().chunks_mut(2)) {
            for (part, pairs) in pairs.as_chunks::<L>().0.iter().enumerate() {
                for (line, vector) in lines.iter_mut().zip(V::widened(pairs)) {
                    vector.store(&mut line.as_chunks_mut::<L>().0[part]);
                }
            }
        }
        add_panel::<V, L>(columns, begin, &floats);
    }
}

/// [`add_products`] of the outputs of one panel, which begin at `begin` of the columns.
#[inline(always)]
pub(crate) fn add_panel<V: Vector<L>, const L: usize>(
    columns: &mut Columns<'_, '_, f32, f32>,
    begin: usize,
    panel: &Lines<f32>,
) {
    let end = columns.out[0].len().min(begin + WIDTH);
    let out = columns.out.iter_mut().map(|out| &mut out[begin..end]);
    let mut columns = Columns {
        rows: columns.rows,
        first: 0,
        out: out.collect(),
    };
    add_products::<Floats, V, L>(&mut columns, panel);
}

/// Rows and outputs whose sums are in registers.
struct Tile<'a, 'b, 'c, E, W> {
    weight: &'a Lines<W>,
    rows: &'a [E],
    panel: usize,
    /// Of `out`, where the first panel begins.
    column: usize,
    out: &'b mut [&'c mut [f32]],
}

impl<E: Copy, W: Copy> Tile<'_, '_, '_, E, W> {
    /// [`Tile::add`] for four vectors.
    #[inline(always)]
    fn add_four<T, V: Vector<L>, const L: usize>(self, inputs: &Inputs)
    where
        T: Terms<V, L, Element = E, Lane = W>,
    {
        match self.out.len() {
            1 => self.add::<T, V, L, 1, 4>(inputs),
            2 => self.add::<T, V, L, 2, 4>(inputs),
            3 => self.add::<T, V, L, 3, 4>(inputs),
            4 if L == WIDTH => self.add::<T, V, L, 4, 4>(inputs),
            5 if L == WIDTH => self.add::<T, V, L, 5, 4>(inputs),
            _ if L == WIDTH => self.add::<T, V, L, 6, 4>(inputs),
            _ => unreachable!("more rows have fewer vectors"),
        }
    }

    /// [`Tile::add`] for one vector or two.
    #[inline(always)]
    fn add_few<T, V: Vector<L>, const L: usize, const C: usize>(self, inputs: &Inputs)
    where
        T: Terms<V, L, Element = E, Lane = W>,
    {
        match self.out.len() {
            1 => self.add::<T, V, L, 1, C>(inputs),
            2 => self.add::<T, V, L, 2, C>(inputs),
            3 => self.add::<T, V, L, 3, C>(inputs),
            4 => self.add::<T, V, L, 4, C>(inputs),
            5 => self.add::<T, V, L, 5, C>(inputs),
            _ => self.add::<T, V, L, TILE_ROWS, C>(inputs),
        }
    }

    /// Adds the products of `R` rows with `C` vectors of outputs.
    #[inline(always)]
    fn add<T, V: Vector<L>, const L: usize, const R: usize, const C: usize>(self, inputs: &Inputs)
    where
        T: Terms<V, L, Element = E, Lane = W>,
    {
        let size = self.weight.in_features();
        let &Inputs { first, count, .. } = inputs;
        let rows: [&[E]; R] = std::array::from_fn(|row| &self.rows[row * size + first..][..count]);
        let mut panels: [&[Line<W>]; MAX_PANELS] = [&[]; MAX_PANELS];
        for number in 0..C * L / WIDTH {
            let panel = self.weight.panel(self.panel + number);
            panels[number] = &panel[first / T::PER_LINE..][..count.div_ceil(T::PER_LINE)];
        }
        let columns = (self.out[0].len() - self.column).min(C * L);
        let mut sums: [[V; C]; R] =
            std::array::from_fn(|row| load(&self.out[row][self.column..][..columns]));
        let mut ahead = inputs.ahead;
        let num_whole = count / T::PER_LINE;
        let mut left = inputs.step;
        for at in 0..num_whole {
            let elements = |row: usize| &rows[row][at * T::PER_LINE..][..T::PER_LINE];
            for part in 0..T::PARTS {
                add_part::<T, V, L, R, C>(&panels, at, elements, part, &mut sums);
            }
            left -= 1;
            if left == 0 {
                left = inputs.step;
                if ahead == inputs.end {
                    ahead += inputs.beyond;
                }
                for panel in &panels[..C * L / WIDTH] {
                    fetch_line(panel.as_ptr().wrapping_byte_add(ahead));
                }
                ahead += LINE;
            }
        }
        let last = num_whole * T::PER_LINE;
        for part in 0..T::PARTS.min(count - last) {
            let elements = |row: usize| &rows[row][last..];
            add_part::<T, V, L, R, C>(&panels, num_whole, elements, part, &mut sums);
        }
        for row in 0..R {
            store(sums[row], &mut self.out[row][self.column..][..columns]);
        }
    }
}

/// Adds the products of a part of the line `at` of each panel.
#[inline(always)]
fn add_part<'a, T, V: Vector<L>, const L: usize, const R: usize, const C: usize>(
    panels: &[&[Line<T::Lane>]; MAX_PANELS],
    at: usize,
    elements: impl Fn(usize) -> &'a [T::Element],
    part: usize,
    sums: &mut [[V; C]; R],
) where
    T: Terms<V, L, Element: 'a>,
{
    let line = |c: usize| &panels[c * L / WIDTH][at].as_chunks::<L>().0[c % (WIDTH / L)];
    if R < C {
        // All inputs and one weight at a time are in registers; else the other way round.
        let inputs: [T::Inputs; R] = std::array::from_fn(|row| T::inputs(elements(row), part));
        for c in 0..C {
            let weights = T::weights(line(c), part);
            for row in 0..R {
                sums[row][c] = T::add(weights, inputs[row], sums[row][c]);
            }
        }
    } else {
        let weights: [T::Weights; C] = std::array::from_fn(|c| T::weights(line(c), part));
        for row in 0..R {
            let inputs = T::inputs(elements(row), part);
            for c in 0..C {
                sums[row][c] = T::add(weights[c], inputs, sums[row][c]);
            }
        }
    }
}

/// `C` vectors, of which the last ones may be incomplete.
#[inline(always)]
fn load<V: Vector<L>, const L: usize, const C: usize>(from: &[f32]) -> [V; C] {
    if from.len() == C * L {
        let (vectors, _) = from.as_chunks::<L>();
        return std::array::from_fn(|c| V::load(&vectors[c]));
    }
    let mut floats = [[0.0; L]; C];
    floats.as_flattened_mut()[..from.len()].copy_from_slice(from);
    std::array::from_fn(|c| V::load(&floats[c]))
}

/// The same the other way.
#[inline(always)]
fn store<V: Vector<L>, const L: usize, const C: usize>(vectors: [V; C], to: &mut [f32]) {
    if to.len() == C * L {
        let (floats, _) = to.as_chunks_mut::<L>();
        for c in 0..C {
            vectors[c].store(&mut floats[c]);
        }
        return;
    }
    let mut floats = [[0.0; L]; C];
    for c in 0..C {
        vectors[c].store(&mut floats[c]);
    }
    let count = to.len();
    to.copy_from_slice(&floats.as_flattened()[..count]);
}
