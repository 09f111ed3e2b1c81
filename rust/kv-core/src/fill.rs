//! Filling a step's inputs into the caller's arrays.
//!
//! The arrays are cells, so that they may be views of memory that other code can also see (a NumPy
//! array, a pinned tensor), without copies and without `unsafe`.

use std::borrow::Cow;
use std::cell::Cell;

use crate::error::Error;
use crate::ids::{BlockId, PlanKey};
use crate::manager::BlockManager;
use crate::plan::{Entry, Plan};

/// An array of the caller, 32 or 64 bits wide.
#[derive(Clone, Copy, Debug)]
pub enum IntArray<'a> {
    /// int32
    I32(&'a [Cell<i32>]),
    /// int64
    I64(&'a [Cell<i64>]),
}

impl IntArray<'_> {
    fn len(&self) -> usize {
        match self {
            IntArray::I32(cells) => cells.len(),
            IntArray::I64(cells) => cells.len(),
        }
    }

    /// Writes `values` from element `at` on.
    #[inline]
    fn write(&self, at: usize, values: impl Iterator<Item = i64>) {
        match self {
            IntArray::I32(cells) => cells[at..]
                .iter()
                .zip(values)
                .for_each(|(c, v)| c.set(v as i32)),
            IntArray::I64(cells) => cells[at..].iter().zip(values).for_each(|(c, v)| c.set(v)),
        }
    }
}

/// The arrays of one step. T: tokens, B: sequences, S: sampling rows.
#[derive(Clone, Copy, Debug)]
pub struct StepArrays<'a> {
    /// `[>= T]`: the tokens to compute. A pending one is written as `-1 - row`, the row of the logits of
    /// the step before that gives it.
    pub input_ids: IntArray<'a>,
    /// `[>= T]`: their positions in their sequences.
    pub positions: IntArray<'a>,
    /// `[groups, >= T]`: where their KV goes, `block * block_size + offset`; -1: it is there already.
    pub slot_mapping: IntArray<'a>,
    /// Columns of `slot_mapping`; its length where there is one group.
    pub slots_width: usize,
    /// `[>= B + 1]`: sequence `i` has the tokens `query_start_loc[i]..query_start_loc[i + 1]`.
    pub query_start_loc: IntArray<'a>,
    /// `[>= B]`: positions of the sequence whose KV is there once the step has run.
    pub seq_lens: IntArray<'a>,
    /// `[groups, >= B, width]`, row-major: block tables. An entry that was given back holds the trash
    /// block, `num_blocks`. Past a row's end, what was there before stays.
    pub block_tables: IntArray<'a>,
    /// Rows of `block_tables` for each group.
    pub table_rows: usize,
    /// Columns of `block_tables`.
    pub table_width: usize,
    /// `[>= S]`: the rows of the token arrays whose logits give a token.
    pub logits_indices: IntArray<'a>,
}

/// What a set of arrays holds in each row of its block tables, so that only changes are written.
#[derive(Debug, Default)]
pub struct TableRows {
    /// Manager, sequence, table version, entries written.
    rows: Vec<(u32, u64, u32, usize)>,
}

/// What no table has.
const NOTHING_WRITTEN: (u32, u64, u32, usize) = (u32::MAX, 0, 0, 0);

impl StepArrays<'_> {
    fn check(&self, plan: &Plan, groups: usize, width: usize) -> Result<(), Error> {
        let (tokens, sequences) = (plan.num_tokens, plan.entries.len());
        let groups_of = |cells: usize, of_one: usize| cells.checked_div(of_one).unwrap_or(groups);
        let slots = groups_of(self.slot_mapping.len(), self.slots_width);
        let table = self.table_rows * self.table_width;
        let tables = groups_of(self.block_tables.len(), table);
        for (name, needed, given) in [
            ("input_ids", tokens, self.input_ids.len()),
            ("positions", tokens, self.positions.len()),
            ("slot_mapping (groups)", groups, slots),
            ("slot_mapping", tokens, self.slots_width),
            ("query_start_loc", sequences + 1, self.query_start_loc.len()),
            ("seq_lens", sequences, self.seq_lens.len()),
            ("block_tables (groups)", groups, tables),
            ("block_tables (rows)", sequences, self.table_rows),
            ("block_tables (columns)", width, self.table_width),
            (
                "logits_indices",
                plan.num_samples,
                self.logits_indices.len(),
            ),
        ] {
            if needed > given {
                return Err(Error::BufferTooSmall {
                    name,
                    needed,
                    given,
                });
            }
        }
        Ok(())
    }
}

impl BlockManager {
    /// Whether everything that could be too large for an int32 array fits.
    fn check_width(&self, plan: &Plan, arrays: &StepArrays<'_>) -> Result<(), Error> {
        let fits = |name, value: u64| match i32::try_from(value) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::BufferTooNarrow { name, value }),
        };
        if matches!(arrays.slot_mapping, IntArray::I32(_)) {
            let slots = (self.config.num_blocks * self.config.block_size) as u64;
            fits("slot_mapping", slots - 1)?;
        }
        if matches!(arrays.input_ids, IntArray::I32(_)) {
            for entry in &plan.entries {
                let tokens = self.entry_tokens(entry);
                fits("input_ids", u64::from(tokens.max().unwrap_or(0)))?;
            }
        }
        Ok(())
    }

    /// The tokens that an entry computes: known ones, then its drafts.
    fn entry_tokens<'a>(&'a self, entry: &'a Entry) -> impl Iterator<Item = u32> + 'a {
        let seq = self.sequences.at(entry.slot);
        let known = seq.tokens[entry.start..].iter().chain(&entry.more().drafts);
        known.take(entry.len).copied()
    }

    /// Writes the inputs of an open plan, entries in plan order. On an error nothing is written.
    pub fn fill(
        &self,
        plan: PlanKey,
        arrays: &StepArrays<'_>,
        written: &mut TableRows,
    ) -> Result<(), Error> {
        let plan = self.open_plan(plan)?;
        let groups = self.groups.len();
        let tables = plan.entries.iter();
        let tables = tables.map(|entry| self.sequences.at(entry.slot).table.len());
        let widest = tables.max().unwrap_or(0) / groups;
        arrays.check(plan, groups, widest)?;
        self.check_width(plan, arrays)?;
        let sequences = plan.entries.len();
        if written.rows.len() < sequences {
            written.rows.resize(sequences, NOTHING_WRITTEN);
        }
        let (mut at, mut sample) = (0, 0);
        arrays.query_start_loc.write(0, std::iter::once(0));
        for (row, entry) in plan.entries.iter().enumerate() {
            self.fill_tokens(entry, at, arrays);
            at += entry.len;
            let end = (entry.start + entry.len) as i64;
            let (bound, rows) = (at as i64, entry.rows());
            arrays
                .query_start_loc
                .write(row + 1, std::iter::once(bound));
            arrays.seq_lens.write(row, std::iter::once(end));
            arrays
                .logits_indices
                .write(sample, bound - rows as i64..bound);
            sample += rows;
            let table = self.table_of(plan, entry);
            self.fill_slots(entry, &table, at - entry.len, arrays);
            if let Cow::Owned(_) = table {
                written.rows[row] = NOTHING_WRITTEN; // it is no version of its sequence's
            }
            self.fill_table(entry, &table, row, arrays, &mut written.rows[row]);
            if let Cow::Owned(_) = table {
                written.rows[row] = NOTHING_WRITTEN;
            }
        }
        Ok(())
    }

    /// A sequence's table as the plan has it: with what a match of the plan after it put out of sight.
    #[inline]
    pub(crate) fn table_of(&self, plan: &Plan, entry: &Entry) -> Cow<'_, [BlockId]> {
        let table = &self.sequences.at(entry.slot).table[..];
        match self.open.last() {
            Some(newest) if newest.key != plan.key && self.groups.have_windows() => {
                newest.table_before(entry.slot, table)
            }
            _ => Cow::Borrowed(table),
        }
    }

    /// What the tokens of an entry are and where they stand.
    #[inline]
    fn fill_tokens(&self, entry: &Entry, at: usize, arrays: &StepArrays<'_>) {
        let seq = self.sequences.at(entry.slot);
        let (start, end) = (entry.start, entry.start + entry.len);
        let tokens = self.entry_tokens(entry).map(i64::from);
        // A pending token: -1 - (its row among the logits of the step before).
        let is_pending = end > seq.tokens.len() + entry.more().drafts.len();
        let pending = entry.pending_row.filter(|_| is_pending);
        let pending = pending.map(|row| -1 - row as i64);
        arrays.input_ids.write(at, tokens.chain(pending));
        arrays.positions.write(at, start as i64..end as i64);
    }

    /// Where the KV of an entry's tokens goes.
    #[inline]
    fn fill_slots(&self, entry: &Entry, table: &[BlockId], at: usize, arrays: &StepArrays<'_>) {
        let (block_size, groups) = (self.config.block_size, self.groups.len());
        let (start, end) = (entry.start, entry.start + entry.len);
        for group in 0..groups {
            let slots = (start..end).map(|position| {
                let place = self.groups.row_of(position) * groups + group;
                if position < entry.write_from || entry.more().is_present(place) {
                    return -1;
                }
                (table[place].at() * block_size + position % block_size) as i64
            });
            arrays
                .slot_mapping
                .write(group * arrays.slots_width + at, slots);
        }
    }

    /// The block tables of an entry: what has grown, or everything if entries have changed.
    #[inline]
    fn fill_table(
        &self,
        entry: &Entry,
        table: &[BlockId],
        row: usize,
        arrays: &StepArrays<'_>,
        written: &mut (u32, u64, u32, usize),
    ) {
        let groups = self.groups.len();
        let seq = self.sequences.at(entry.slot);
        let len = table.len();
        let now = (self.shared.manager, seq.id, seq.table_version, len);
        let then = std::mem::replace(written, now);
        let same = (then.0, then.1, then.2) == (now.0, now.1, now.2);
        let from = if same { then.3.min(len) } else { 0 };
        let trash = self.config.num_blocks as i64;
        let id = |block: &BlockId| block.some().map_or(trash, |block| i64::from(block.get()));
        for group in 0..groups {
            let blocks = table[from..].iter().skip(group).step_by(groups);
            let place = group * arrays.table_rows + row;
            let place = place * arrays.table_width + from / groups;
            arrays.block_tables.write(place, blocks.map(id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// Arrays of one element each, the slots in 32 bits.
    fn slots_in_32_bits(manager: &BlockManager, plan: PlanKey) -> Result<(), Error> {
        let (cells, slots) = ([0; 2].map(Cell::new), [Cell::new(0)]);
        let array = IntArray::I64(&cells);
        let arrays = StepArrays {
            input_ids: array,
            positions: array,
            slot_mapping: IntArray::I32(&slots),
            slots_width: 1,
            query_start_loc: array,
            seq_lens: array,
            block_tables: array,
            table_rows: 1,
            table_width: 1,
            logits_indices: array,
        };
        manager.fill(plan, &arrays, &mut TableRows::default())
    }

    /// The pool says that it is larger than it is: nobody has the memory for a real one.
    #[test]
    fn the_last_slot_that_32_bits_hold() {
        let mut manager = BlockManager::new(Config::new(4, 4)).expect("valid");
        let seq = manager.sequence(vec![1], b"", true).expect("a token");
        let open = manager.begin_step(1).expect("none open");
        let plan = open.key();
        let answer = manager.prefill(plan, seq.key(), 1, None);
        answer.expect("room for one");
        manager.config.num_blocks = 1 << 29;
        assert_eq!(slots_in_32_bits(&manager, plan), Ok(()));
        manager.config.num_blocks += 1;
        let error = Error::BufferTooNarrow {
            name: "slot_mapping",
            value: (1 << 31) + 3,
        };
        assert_eq!(slots_in_32_bits(&manager, plan), Err(error));
    }
}
