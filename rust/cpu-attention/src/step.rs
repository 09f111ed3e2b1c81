//! A step: which rows attend, and over which blocks.

use std::ops::Range;

use crate::error::Error;

/// Rows of one sequence that are worked on together: they read each key once.
const RUN_ROWS: usize = 8;

/// The sizes of a cache `[num_blocks, block_size, kv_heads, dim]`, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheShape {
    /// Blocks, those that hold nothing included.
    pub num_blocks: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a key.
    pub dim_k: usize,
    /// Elements of a value.
    pub dim_v: usize,
}

impl CacheShape {
    /// Elements of `count` rows of `heads` times `dim`.
    pub(crate) fn elements(count: usize, heads: usize, dim: usize) -> Result<usize, Error> {
        let row = heads.checked_mul(dim).ok_or(Error::TooLarge)?;
        count.checked_mul(row).ok_or(Error::TooLarge)
    }

    pub(crate) fn num_slots(&self) -> Result<usize, Error> {
        self.num_blocks
            .checked_mul(self.block_size)
            .ok_or(Error::TooLarge)
    }

    /// Checks the lengths of the cache's keys and values.
    pub(crate) fn check(&self, keys: usize, values: usize) -> Result<(), Error> {
        for (name, size) in [
            ("block_size", self.block_size),
            ("the number of KV heads", self.kv_heads),
            ("the dimension of keys", self.dim_k),
            ("the dimension of values", self.dim_v),
        ] {
            above_zero(name, size)?;
        }
        let slots = self.num_slots()?;
        let expected = Self::elements(slots, self.kv_heads, self.dim_k)?;
        same_length("the cache's keys", expected, keys)?;
        let expected = Self::elements(slots, self.kv_heads, self.dim_v)?;
        same_length("the cache's values", expected, values)
    }
}

pub(crate) fn above_zero(name: &'static str, value: usize) -> Result<(), Error> {
    if value == 0 {
        Err(Error::Zero(name))
    } else {
        Ok(())
    }
}

pub(crate) fn same_length(name: &'static str, expected: usize, found: usize) -> Result<(), Error> {
    match expected == found {
        true => Ok(()),
        false => Err(Error::Length {
            name,
            expected,
            found,
        }),
    }
}

/// The B sequences of a step as the engine has them.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// `[B + 1]`: sequence `i` has the rows `starts[i]..starts[i + 1]`.
    pub starts: &'a [i32],
    /// `[B]`: tokens of each sequence, its new ones included.
    pub lens: &'a [i32],
    /// `[B, width]`, row-major: the ids of its blocks, valid up to `ceil(len / block_size)`.
    pub tables: &'a [i32],
    /// Columns of `tables`.
    pub width: usize,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// The first row of the step, and how many.
    pub(crate) first_row: usize,
    pub(crate) count: usize,
    /// Position of the first row in its sequence.
    pub(crate) position: usize,
    /// Where the sequence's block ids stand in [`Step::blocks`].
    pub(crate) blocks: Range<usize>,
}

/// A step that was checked: every block it refers to is one of the cache.
#[derive(Clone, Debug)]
pub struct Step {
    pub(crate) num_rows: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) runs: Vec<Run>,
    pub(crate) blocks: Vec<u32>,
}

impl Step {
    /// Takes the sequences that have at most `most_rows` new tokens; rows of the others are left to
    /// somebody else.
    ///
    /// # Errors
    ///
    /// Arrays that contradict each other, or a block id beyond `num_blocks`.
    pub fn new(
        sequences: &Sequences<'_>,
        num_blocks: usize,
        block_size: usize,
        most_rows: usize,
    ) -> Result<Self, Error> {
        above_zero("block_size", block_size)?;
        let Sequences {
            starts,
            lens,
            tables,
            width,
        } = *sequences;
        same_length("query_start_loc", lens.len() + 1, starts.len())?;
        let cells = lens.len().checked_mul(width).ok_or(Error::TooLarge)?;
        same_length("block_tables", cells, tables.len())?;
        if starts[0] != 0 {
            return Err(Error::Starts {
                at: 0,
                value: starts[0],
            });
        }
        let mut step = Self {
            num_rows: 0,
            num_blocks,
            block_size,
            runs: vec![],
            blocks: vec![],
        };
        for (sequence, (&len, bounds)) in lens.iter().zip(starts.windows(2)).enumerate() {
            if bounds[1] < bounds[0] {
                return Err(Error::Starts {
                    at: sequence + 1,
                    value: bounds[1],
                });
            }
            let (first_row, end) = (step.num_rows, bounds[1] as usize);
            step.num_rows = end;
            let new = end - first_row;
            let length = usize::try_from(len).unwrap_or(0);
            if length < new || len < 0 {
                return Err(Error::SeqLen { sequence, len, new });
            }
            let needed = length.div_ceil(block_size);
            if needed > width {
                return Err(Error::TableWidth {
                    sequence,
                    needed,
                    width,
                });
            }
            let begin = step.blocks.len();
            for &block in &tables[sequence * width..][..needed] {
                match u32::try_from(block) {
                    Ok(id) if (id as usize) < num_blocks => step.blocks.push(id),
                    _ => {
                        return Err(Error::Block {
                            sequence,
                            block,
                            num_blocks,
                        });
                    }
                }
            }
            if new > most_rows {
                step.blocks.truncate(begin);
                continue;
            }
            let blocks = begin..step.blocks.len();
            for done in (0..new).step_by(RUN_ROWS) {
                step.runs.push(Run {
                    first_row: first_row + done,
                    count: RUN_ROWS.min(new - done),
                    position: length - new + done,
                    blocks: blocks.clone(),
                });
            }
        }
        Ok(step)
    }

    /// Rows of the step, those of sequences that it leaves to others included.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }
}
