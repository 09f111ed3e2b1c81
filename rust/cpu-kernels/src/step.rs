//! The rows of a step and the blocks that they attend to.

use std::ops::Range;

use crate::error::Error;

/// Keys that are scored before their values are read: keys and values of a head stay in the L1 cache from one
/// query to the next.
pub(crate) const TILE: usize = 32;

/// Rows of one sequence that are computed together: they read each key once.
const RUN_ROWS: usize = 64;

/// The sizes of a cache `[num_blocks, block_size, kv_heads, dim]`, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheShape {
    /// Number of blocks, empty ones included.
    pub num_blocks: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Numbers of a key.
    pub dim_k: usize,
    /// Numbers of a value.
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

    /// Checks the lengths of the cache's keys and values. `width` is the number of elements that a head of so many
    /// numbers takes.
    pub(crate) fn check(
        &self,
        keys: usize,
        values: usize,
        width: fn(usize) -> usize,
    ) -> Result<(), Error> {
        for (name, size) in [
            ("block_size", self.block_size),
            ("the number of KV heads", self.kv_heads),
            ("the dimension of keys", self.dim_k),
            ("the dimension of values", self.dim_v),
        ] {
            above_zero(name, size)?;
        }
        let slots = self.num_slots()?;
        let expected = Self::elements(slots, self.kv_heads, width(self.dim_k))?;
        same_length("the cache's keys", expected, keys)?;
        let expected = Self::elements(slots, self.kv_heads, width(self.dim_v))?;
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

pub(crate) fn same_length(name: &'static str, expected: usize, len: usize) -> Result<(), Error> {
    match expected == len {
        true => Ok(()),
        false => Err(Error::Length {
            name,
            expected,
            found: len,
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

/// Keys of a part, the unit of work. A part shared by runs is read once for all of them.
pub(crate) const PART: usize = 256;

/// Consecutive rows of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) sequence: usize,
    /// The first row of the step, and how many.
    pub(crate) first_row: usize,
    pub(crate) count: usize,
    /// Position of the first row in its sequence.
    pub(crate) position: usize,
    /// Where the sequence's block ids stand in [`Step::blocks`].
    pub(crate) blocks: Range<usize>,
    /// Its first parts, which are those of [`Step::groups`].
    pub(crate) shared_parts: usize,
}

/// The leading blocks that sequences of a step have in common, as the block manager reports them.
#[derive(Clone, Copy, Debug)]
pub struct SharedPrefixes<'a> {
    /// `[B]`: the sequences, ordered so that those that share blocks are adjacent.
    pub order: &'a [i32],
    /// `[P, 5]`: first place in `order` and the one after the last; first block and the one after the
    /// last; parent, -1 for none. Parents come first, and the blocks of a prefix begin where its
    /// parent's end.
    pub prefixes: &'a [i32],
}

/// Runs that have the blocks of these parts in common: none of them needs a mask there.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) parts: Range<usize>,
    pub(crate) runs: Vec<usize>,
}

/// A step that was checked: every block it refers to is one of the cache.
#[derive(Clone, Debug)]
pub struct Step {
    pub(crate) num_rows: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) runs: Vec<Run>,
    pub(crate) blocks: Vec<u32>,
    pub(crate) groups: Vec<Group>,
}

impl Step {
    /// Takes the sequences of a step.
    ///
    /// # Errors
    ///
    /// Arrays that contradict each other, or a block id beyond `num_blocks`.
    pub fn new(
        sequences: &Sequences<'_>,
        num_blocks: usize,
        block_size: usize,
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
            groups: vec![],
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
            let blocks = begin..step.blocks.len();
            for done in (0..new).step_by(RUN_ROWS) {
                step.runs.push(Run {
                    sequence,
                    first_row: first_row + done,
                    count: RUN_ROWS.min(new - done),
                    position: length - new + done,
                    blocks: blocks.clone(),
                    shared_parts: 0,
                });
            }
        }
        Ok(step)
    }

    /// Reads each part that several sequences share once for all of them. The result of a row keeps its bits.
    ///
    /// # Errors
    ///
    /// Prefixes that contradict themselves or the sequences' block tables.
    pub fn share(mut self, shared: &SharedPrefixes<'_>) -> Result<Self, Error> {
        let num_rows = shared.order.len();
        let mut runs_of = vec![0..0; num_rows];
        for (at, run) in self.runs.iter().enumerate() {
            let runs = runs_of.get_mut(run.sequence).ok_or(Error::Length {
                name: "order",
                expected: run.sequence + 1,
                found: num_rows,
            })?;
            *runs = if runs.start == runs.end {
                at..at + 1
            } else {
                runs.start..at + 1
            };
        }
        let (prefixes, rest) = shared.prefixes.as_chunks::<5>();
        same_length(
            "prefixes",
            prefixes.len() * 5,
            prefixes.len() * 5 + rest.len(),
        )?;
        let part_of = |block: usize| block.saturating_mul(self.block_size) / PART;
        let mut bounds: Vec<[usize; 4]> = vec![];
        for (prefix, &[first, end, from, to, parent]) in prefixes.iter().enumerate() {
            let refused = Error::Prefix { prefix };
            let [first, end, from, to] =
                [first, end, from, to].map(|number| usize::try_from(number).unwrap_or(usize::MAX));
            let outer = match usize::try_from(parent) {
                Ok(parent) => *bounds.get(parent).ok_or(refused.clone())?,
                Err(_) => [0, num_rows, 0, 0],
            };
            if first < outer[0] || end > outer[1] || first >= end || from != outer[3] || from >= to
            {
                return Err(refused);
            }
            bounds.push([first, end, from, to]);
            let mut runs = vec![];
            for &sequence in &shared.order[first..end] {
                let sequence = usize::try_from(sequence).unwrap_or(usize::MAX);
                runs.extend(runs_of.get(sequence).ok_or(refused.clone())?.clone());
            }
            let parts = part_of(from)..part_of(to);
            let table = |run: &Run| self.blocks[run.blocks.clone()].get(from..to);
            let model = runs.first().map(|&run| table(&self.runs[run]));
            for &run in &runs {
                let run = &self.runs[run];
                // A row sees its own position, too: that of a full hit ends its last block.
                let is_before = to.saturating_mul(self.block_size) <= run.position + 1;
                if !is_before || table(run).is_none() || Some(table(run)) != model {
                    return Err(refused);
                }
            }
            for &run in &runs {
                let run = &mut self.runs[run];
                // Else it is in two prefixes side by side.
                if std::mem::replace(&mut run.shared_parts, parts.end) != parts.start {
                    return Err(refused);
                }
            }
            if !parts.is_empty() {
                self.groups.push(Group { parts, runs });
            }
        }
        Ok(self)
    }

    /// Rows of the step.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }
}
