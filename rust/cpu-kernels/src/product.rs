//! Rows times a packed weight, by tiles whose sums stay in registers.
//!
//! Every sum is the same sequence of multiply-adds, in the order of the inputs, whatever the tile: a row has the same
//! bits in every batch and at every level of instructions.

use crate::lanes::{Vector, fetch_line};
use crate::packed_weight::{Line, PackedWeight, WIDTH};

/// Rows of a tile at most: six by two vectors of 8 fill AVX2's registers, six by four of 16 those of AVX-512.
const TILE_ROWS: usize = 6;

/// Panels of a tile at most.
const MOST_PANELS: usize = 8;

/// Inputs of a tile's panels that are multiplied with several tiles of rows before the next ones: they stay in the second
/// cache. Sums are loaded and stored once a block, which costs more than what the first cache would save.
const BLOCK: usize = 1024;

/// Bytes by which a single pass over a weight is read ahead.
const AHEAD: usize = 2048;

/// Some outputs of some rows, as a thread takes them.
pub(crate) struct Columns<'a, 'b> {
    /// `[rows, in_features]`.
    pub(crate) rows: &'a [f32],
    /// The panel of the first output.
    pub(crate) first: usize,
    /// The outputs of each row, the same ones.
    pub(crate) out: Vec<&'b mut [f32]>,
}

/// Inputs that are multiplied before the next ones, and what is read ahead meanwhile.
#[derive(Clone, Copy)]
struct Inputs {
    first: usize,
    count: usize,
    /// Bytes from a line to what is asked for with it.
    ahead: usize,
    /// Bytes of that for each line.
    each: usize,
}

/// Adds to `columns.out` the products of its rows with the weight, by vectors of `L` floats.
#[inline(always)]
pub(crate) fn add_products<V: Vector<L>, const L: usize>(
    columns: &mut Columns<'_, '_>,
    weight: &PackedWeight,
) {
    let (size, count) = (weight.in_features(), columns.out.len());
    let num_tiles = count.div_ceil(TILE_ROWS);
    let wide = match count.div_ceil(num_tiles.max(1)) {
        1 if L < WIDTH => 8,
        1..=3 => 4,
        _ if L == WIDTH => 4,
        _ => WIDTH / L,
    };
    let least = WIDTH / L;
    let step = wide / least;
    let block = match num_tiles {
        1 => size,
        _ => BLOCK,
    };
    let width = columns.out.first().map_or(0, |out| out.len());
    for first in (0..size).step_by(block) {
        let mut panel = 0;
        while panel * WIDTH < width {
            let mut vectors = wide;
            while vectors > least && (panel * WIDTH + vectors * L) > width {
                vectors /= 2;
            }
            for number in 0..num_tiles {
                let (from, to) = (number * count / num_tiles, (number + 1) * count / num_tiles);
                let each = size_of::<Line>() / num_tiles;
                let inputs = Inputs {
                    first,
                    count: block.min(size - first),
                    ahead: match num_tiles {
                        1 => AHEAD,
                        _ => step * size * size_of::<Line>() + number * block * each,
                    },
                    each,
                };
                let tile = Tile {
                    weight,
                    rows: &columns.rows[from * size..to * size],
                    panel: columns.first + panel,
                    column: panel * WIDTH,
                    out: &mut columns.out[from..to],
                };
                match vectors {
                    8 => tile.add::<V, L, 1, 8>(&inputs),
                    4 => tile.add_four::<V, L>(&inputs),
                    2 => tile.add_few::<V, L, 2>(&inputs),
                    _ => tile.add_few::<V, L, 1>(&inputs),
                }
            }
            panel += vectors * L / WIDTH;
        }
    }
}

/// Rows and outputs whose sums are in registers.
struct Tile<'a, 'b, 'c> {
    weight: &'a PackedWeight,
    rows: &'a [f32],
    panel: usize,
    /// Of `out`, where the first panel begins.
    column: usize,
    out: &'b mut [&'c mut [f32]],
}

impl Tile<'_, '_, '_> {
    /// [`Tile::add`] for four vectors.
    #[inline(always)]
    fn add_four<V: Vector<L>, const L: usize>(self, inputs: &Inputs) {
        match self.out.len() {
            1 => self.add::<V, L, 1, 4>(inputs),
            2 => self.add::<V, L, 2, 4>(inputs),
            3 => self.add::<V, L, 3, 4>(inputs),
            4 if L == WIDTH => self.add::<V, L, 4, 4>(inputs),
            5 if L == WIDTH => self.add::<V, L, 5, 4>(inputs),
            _ if L == WIDTH => self.add::<V, L, 6, 4>(inputs),
            _ => unreachable!("more rows have fewer vectors"),
        }
    }

    /// [`Tile::add`] for one vector or two.
    #[inline(always)]
    fn add_few<V: Vector<L>, const L: usize, const C: usize>(self, inputs: &Inputs) {
        match self.out.len() {
            1 => self.add::<V, L, 1, C>(inputs),
            2 => self.add::<V, L, 2, C>(inputs),
            3 => self.add::<V, L, 3, C>(inputs),
            4 => self.add::<V, L, 4, C>(inputs),
            5 => self.add::<V, L, 5, C>(inputs),
            _ => self.add::<V, L, TILE_ROWS, C>(inputs),
        }
    }

    /// Adds the products of `R` rows with `C` vectors of outputs.
    #[inline(always)]
    fn add<V: Vector<L>, const L: usize, const R: usize, const C: usize>(self, inputs: &Inputs) {
        let size = self.weight.in_features();
        let &Inputs { first, count, .. } = inputs;
        let rows: [&[f32]; R] =
            std::array::from_fn(|row| &self.rows[row * size + first..][..count]);
        let mut panels: [&[Line]; MOST_PANELS] = [&[]; MOST_PANELS];
        for number in 0..C * L / WIDTH {
            panels[number] = &self.weight.panel(self.panel + number)[first..][..count];
        }
        let columns = (self.out[0].len() - self.column).min(C * L);
        let mut sums: [[V; C]; R] =
            std::array::from_fn(|row| load(&self.out[row][self.column..][..columns]));
        let mut ahead = inputs.ahead;
        for at in 0..count {
            let line = |c: usize| &panels[c * L / WIDTH][at].as_chunks::<L>().0[c % (WIDTH / L)];
            if R < C {
                // All inputs and one weight at a time are in registers; else the other way round.
                let inputs: [V; R] = std::array::from_fn(|row| V::splat(rows[row][at]));
                for c in 0..C {
                    let weights = V::load(line(c));
                    for row in 0..R {
                        sums[row][c] = weights.multiply_add(inputs[row], sums[row][c]);
                    }
                }
            } else {
                let weights: [V; C] = std::array::from_fn(|c| V::load(line(c)));
                for row in 0..R {
                    let input = V::splat(rows[row][at]);
                    for c in 0..C {
                        sums[row][c] = weights[c].multiply_add(input, sums[row][c]);
                    }
                }
            }
            for panel in &panels[..C * L / WIDTH] {
                fetch_line(panel.as_ptr().wrapping_byte_add(ahead));
            }
            ahead += inputs.each;
        }
        for row in 0..R {
            store(sums[row], &mut self.out[row][self.column..][..columns]);
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
