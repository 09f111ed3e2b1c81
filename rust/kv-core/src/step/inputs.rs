//! Filling the inputs of a step into the caller's arrays.
//!
//! Other code may read the arrays (a NumPy array, a pinned tensor) while they are written, so each element is a relaxed
//! atomic.

use std::borrow::Cow;

use super::plan::{Entry, Plan, PrefillWork};
use crate::elements::{SharedI32, SharedI64};
use crate::error::Error;
use crate::groups::BlockSize;
use crate::ids::PlanKey;
use crate::sequence::{SampleRow, Sequence};
use crate::state::State;
use crate::table::BlockTable;

/// An array of the caller, of 32 or 64 bits.
#[derive(Clone, Copy, Debug)]
pub enum IntArray<'a> {
    /// int32
    I32(&'a [SharedI32]),
    /// int64
    I64(&'a [SharedI64]),
}

impl IntArray<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            IntArray::I32(elements) => elements.len(),
            IntArray::I64(elements) => elements.len(),
        }
    }

    /// Writes element `at`.
    #[inline]
    fn put(&self, at: usize, value: i64) {
        self.write(at, std::iter::once(value));
    }

    /// Writes `values` from element `at` on.
    #[inline]
    pub(super) fn write(&self, at: usize, values: impl Iterator<Item = i64>) {
        match self {
            IntArray::I32(elements) => {
                let targets = elements[at..].iter().zip(values);
                targets.for_each(|(element, value)| element.set(value as i32));
            }
            IntArray::I64(elements) => {
                let targets = elements[at..].iter().zip(values);
                targets.for_each(|(element, value)| element.set(value));
            }
        }
    }
}

/// The arrays of one step. T: tokens, B: sequences, S: sampling rows.
#[derive(Clone, Copy, Debug)]
pub struct StepArrays<'a> {
    /// `[>= T]`: the tokens to compute; a pending one as `-1 - row`, the row of the previous step's logits that samples
    /// it.
    pub input_ids: IntArray<'a>,
    /// `[>= T]`: their positions in their sequences.
    pub positions: IntArray<'a>,
    /// `[groups, >= T]`: where their KV is written, `block * block_size + offset`; -1: it exists already.
    pub slot_mapping: IntArray<'a>,
    /// Columns of `slot_mapping`; with one group its length.
    pub slots_width: usize,
    /// `[>= B + 1]`: sequence `i` has the tokens `query_start_loc[i]..query_start_loc[i + 1]`.
    pub query_start_loc: IntArray<'a>,
    /// `[>= B]`: positions of the sequence whose KV exists once the step has run.
    pub seq_lens: IntArray<'a>,
    /// `[groups, >= B, width]`, row-major: block tables. Released entries hold the null block, `num_blocks`. Entries
    /// past the end of a row keep their values.
    pub block_tables: IntArray<'a>,
    /// Rows of `block_tables` per group.
    pub table_rows: usize,
    /// Columns of `block_tables`.
    pub table_width: usize,
    /// `[>= S]`: the rows of the token arrays whose logits are sampled.
    pub logits_indices: IntArray<'a>,
}

/// Versions of the block tables in a set of arrays, so that only changes are written.
#[derive(Debug, Default)]
pub struct TableRows {
    /// The manager of the tables.
    manager: Option<u32>,
    /// By row, the version that was written.
    rows: Vec<Written>,
    /// Rows to write again.
    changed: Vec<u32>,
    /// Rows of the last batch.
    batch: usize,
    /// Set once shared prefixes are computed. It changes when rows may share other blocks, not when a row grows by unshared
    /// blocks.
    pub(super) version: Option<ArraysVersion>,
}

/// A version of the block tables in numbered arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArraysVersion {
    pub(super) arrays: u64,
    pub(super) changes: u64,
}

/// A version of a sequence's table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Written {
    /// 0: no sequence.
    id: u64,
    version: u32,
    num_indices: u32,
}

impl Written {
    #[inline]
    fn of(seq: &Sequence) -> Self {
        Self {
            id: seq.id,
            version: seq.table_version,
            num_indices: seq.table.end() as u32,
        }
    }
}

impl TableRows {
    /// Finds the rows that change. Returns the number of columns of the longest one.
    fn find_changed(&mut self, manager: u32, state: &State, entries: &[Entry]) -> u32 {
        if self.manager.replace(manager) != Some(manager) {
            self.rows.clear();
        }
        if self.rows.len() < entries.len() {
            self.rows.resize(entries.len(), Written::default());
        }
        self.changed.clear();
        let mut columns = 0;
        for ((row, entry), written) in (0..).zip(entries).zip(&self.rows) {
            let now = Written::of(state.seqs.at(entry.seq_idx));
            if now != *written {
                self.changed.push(row);
                columns = columns.max(now.num_indices);
            }
        }
        columns
    }
}

/// Checks the sizes of arrays: name, needed, given.
pub(super) fn check_sizes(arrays: &[(&'static str, usize, usize)]) -> Result<(), Error> {
    match arrays.iter().find(|(_, needed, given)| needed > given) {
        None => Ok(()),
        Some(&(name, needed, given)) => Err(Error::BufferTooSmall {
            name,
            needed,
            given,
        }),
    }
}

impl StepArrays<'_> {
    fn check(&self, plan: &Plan, groups: usize, width: usize) -> Result<(), Error> {
        let (tokens, sequences) = (plan.num_tokens, plan.entries.len());
        let groups_of = |cells: usize, of_one: usize| cells.checked_div(of_one).unwrap_or(groups);
        let slots = groups_of(self.slot_mapping.len(), self.slots_width);
        let (table, logits) = (self.table_rows * self.table_width, &self.logits_indices);
        let tables = groups_of(self.block_tables.len(), table);
        check_sizes(&[
            ("input_ids", tokens, self.input_ids.len()),
            ("positions", tokens, self.positions.len()),
            ("slot_mapping (groups)", groups, slots),
            ("slot_mapping", tokens, self.slots_width),
            ("query_start_loc", sequences + 1, self.query_start_loc.len()),
            ("seq_lens", sequences, self.seq_lens.len()),
            ("block_tables (groups)", groups, tables),
            ("block_tables (rows)", sequences, self.table_rows),
            ("block_tables (columns)", width, self.table_width),
            ("logits_indices", plan.num_samples, logits.len()),
        ])
    }
}

impl State {
    /// A sequence's table as a plan has it, before the changes of the plan after it.
    #[inline]
    pub(super) fn table_of(&self, plan: &Plan, entry: &Entry) -> Cow<'_, BlockTable> {
        let table = &self.seqs.at(entry.seq_idx).table;
        match self.steps.displaces(plan) {
            Some(newest) => newest.table_before(entry.seq_idx, table),
            None => Cow::Borrowed(table),
        }
    }

    /// Checks that every value fits an int32 array.
    fn check_width(&self, plan: &Plan, arrays: &StepArrays<'_>) -> Result<(), Error> {
        let fits = |name, value: u64| match i32::try_from(value) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::BufferTooNarrow { name, value }),
        };
        if matches!(arrays.slot_mapping, IntArray::I32(_)) {
            let slots = (self.pool.num_blocks() * self.groups.block_size()) as u64;
            fits("slot_mapping", slots - 1)?;
        }
        if matches!(arrays.input_ids, IntArray::I32(_)) {
            for entry in &plan.entries {
                let tokens = entry_tokens(self, entry);
                fits("input_ids", u64::from(tokens.max().unwrap_or(0)))?;
            }
        }
        Ok(())
    }

    /// Writes the inputs of an open plan, entries in plan order. On an error nothing is written.
    pub(crate) fn fill(
        &self,
        plan: PlanKey,
        arrays: &StepArrays<'_>,
        written: &mut TableRows,
    ) -> Result<(), Error> {
        let plan = self.steps.open_plan(plan)?;
        let columns = written.find_changed(self.steps.manager, self, &plan.entries);
        arrays.check(plan, self.groups.len(), columns as usize)?;
        self.check_width(plan, arrays)?;
        let sequences = plan.entries.len();
        arrays.query_start_loc.put(0, 0);
        let decodes = match self.steps.displaces(plan) {
            None => plan.decodes,
            Some(_) => 0,
        };
        self.fill_decodes(&plan.entries[..decodes], arrays, written);
        let (mut at, mut sample) = (decodes, decodes);
        for (row, entry) in plan.entries.iter().enumerate().skip(decodes) {
            let table = self.table_of(plan, entry);
            fill_tokens(self, entry, at, arrays);
            fill_slots(self, entry, &table, at, arrays);
            at += entry.len();
            arrays.query_start_loc.put(row + 1, at as i64);
            arrays.seq_lens.put(row, entry.end() as i64);
            for row in at - entry.num_samples()..at {
                arrays.logits_indices.put(sample, row as i64);
                sample += 1;
            }
            let now = match &table {
                Cow::Borrowed(_) => Written::of(self.seqs.at(entry.seq_idx)),
                Cow::Owned(_) => Written::default(), // not a version of its sequence's table
            };
            fill_table(self, &table, now, row, arrays, written);
        }
        if let Some(version) = &mut written.version
            && written.batch != sequences
        {
            version.changes += 1;
        }
        written.batch = sequences;
        Ok(())
    }

    /// Writes the leading decodes, one token each, array by array: short loops whose reads from memory overlap.
    fn fill_decodes(&self, entries: &[Entry], arrays: &StepArrays<'_>, written: &mut TableRows) {
        let (count, size) = (entries.len() as i64, self.groups.size());
        let positions = entries.iter().map(|entry| entry.start as i64);
        arrays.positions.write(0, positions.clone());
        arrays.seq_lens.write(0, positions.map(|at| at + 1));
        arrays.query_start_loc.write(1, 1..count + 1);
        arrays.logits_indices.write(0, 0..count);
        let token = |entry: &Entry| decoded_token(self.seqs.at(entry.seq_idx), entry);
        arrays.input_ids.write(0, entries.iter().map(token));
        for group in 0..self.groups.len() {
            let slot =
                |entry: &Entry| decoded_slot(self.seqs.at(entry.seq_idx), entry, group, size);
            let slots = entries.iter().map(slot);
            arrays.slot_mapping.write(group * arrays.slots_width, slots);
        }
        let changed = std::mem::take(&mut written.changed);
        for row in changed.iter().map(|&row| row as usize) {
            let Some(entry) = entries.get(row) else { break };
            let seq = self.seqs.at(entry.seq_idx);
            let now = Written::of(seq);
            fill_table(self, &seq.table, now, row, arrays, written);
        }
        written.changed = changed;
    }
}

/// The tokens that an entry computes: known ones, then its drafts.
fn entry_tokens<'a>(state: &'a State, entry: &'a Entry) -> impl Iterator<Item = u32> + 'a {
    let seq = state.seqs.at(entry.seq_idx);
    let known = seq.tokens[entry.start..].iter().chain(entry.drafts());
    known.take(entry.len()).copied()
}

/// The token of a decode; a pending one as -1 - (its row in the previous step's logits).
#[inline]
fn decoded_token(seq: &Sequence, entry: &Entry) -> i64 {
    match seq.tokens.get(entry.start) {
        Some(&token) => i64::from(token),
        None => entry.pending_row.expect("pending").as_input(),
    }
}

/// The slot of a decode's token.
#[inline]
fn decoded_slot(seq: &Sequence, entry: &Entry, group: usize, size: BlockSize) -> i64 {
    let index = size.index_of(entry.start);
    if index < entry.indices_written as usize {
        return -1;
    }
    let block = seq.table.at(group, index);
    (size.start_of(block.at()) + entry.start - size.start_of(index)) as i64
}

#[inline]
fn fill_tokens(state: &State, entry: &Entry, at: usize, arrays: &StepArrays<'_>) {
    let seq = state.seqs.at(entry.seq_idx);
    let (start, end) = (entry.start, entry.end());
    let tokens = entry_tokens(state, entry).map(i64::from);
    let is_pending = end > seq.tokens.len() + entry.drafts().len();
    let pending = entry.pending_row.filter(|_| is_pending);
    let pending = pending.map(SampleRow::as_input);
    arrays.input_ids.write(at, tokens.chain(pending));
    arrays.positions.write(at, start as i64..end as i64);
}

/// Writes the slots of an entry, block by block, without a division per token.
#[inline]
fn fill_slots(
    state: &State,
    entry: &Entry,
    table: &BlockTable,
    at: usize,
    arrays: &StepArrays<'_>,
) {
    let (block_size, groups) = (state.groups.block_size(), state.groups.len());
    let write_from = entry.write_from(block_size);
    let prefill = entry.prefill();
    let partly_cached = prefill.filter(|prefill| !prefill.already_cached.is_empty());
    for group in 0..groups {
        let (mut position, end) = (entry.start, entry.end());
        while position < end {
            let index = state.groups.index_of(position);
            let is_cached =
                |prefill: &PrefillWork| prefill.is_already_cached(index * groups + group);
            let mut stop = end.min((index + 1) * block_size);
            let is_written = position < write_from || partly_cached.is_some_and(is_cached);
            if position < write_from {
                stop = stop.min(write_from);
            }
            let slots = group * arrays.slots_width + at + position - entry.start;
            if is_written {
                let none = std::iter::repeat_n(-1, stop - position);
                arrays.slot_mapping.write(slots, none);
            } else {
                let first =
                    table.at(group, index).at() * block_size + position - index * block_size;
                let new = first as i64..(first + stop - position) as i64;
                arrays.slot_mapping.write(slots, new);
            }
            position = stop;
        }
    }
}

impl State {
    /// Whether another sequence holds a block from index `from` on.
    #[cold]
    fn are_shared(&self, table: &BlockTable, from: usize) -> bool {
        let mut blocks = (from..table.end()).flat_map(|index| table.blocks_at(index));
        blocks.any(|block| self.pool.seq_refs(block) > 1)
    }
}

/// Writes the block tables of an entry: the new blocks, or all of them if other entries have changed.
#[inline]
fn fill_table(
    state: &State,
    table: &BlockTable,
    now: Written,
    row: usize,
    arrays: &StepArrays<'_>,
    written: &mut TableRows,
) {
    let then = std::mem::replace(&mut written.rows[row], now);
    let same = (then.id, then.version) == (now.id, now.version) && now.id != 0;
    let from = if same {
        then.num_indices.min(now.num_indices)
    } else {
        0
    } as usize;
    if from == table.end() {
        return;
    }
    if let Some(version) = &mut written.version
        && (!same || state.are_shared(table, from))
    {
        version.changes += 1;
    }
    let null = state.pool.num_blocks() as i64;
    for group in 0..table.groups() {
        let row_start = (group * arrays.table_rows + row) * arrays.table_width;
        let start = table.start(group);
        if from < start {
            let null = std::iter::repeat_n(null, start - from);
            arrays.block_tables.write(row_start + from, null);
        }
        let new = from.max(start);
        let blocks = table.blocks_of(group)[new - start..].iter();
        let blocks = blocks.map(|block| i64::from(block.get()));
        arrays.block_tables.write(row_start + new, blocks);
    }
}
