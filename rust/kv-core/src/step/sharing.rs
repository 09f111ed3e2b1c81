//! Rows of a batch that share leading blocks, for kernels that read a shared block once for all of its rows.
//!
//! Registered blocks of two tables are the same block if they are the same block of the radix tree. So sequences share
//! what their paths through the tree have in common, which is compared node by node. Blocks that are shared without
//! being registered (forks without a cache) are compared one by one.
//!
//! Nothing is compared while a batch stays the same: `fill` keeps a version of the tables.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use super::cascade::{SharedPrefix, prefixes};
use super::inputs::{ArraysVersion, IntArray, StepArrays, TableRows, check_sizes};
use super::plan::{Entry, Plan};
use crate::error::Error;
use crate::ids::{BlockId, NodeId, NodePosition, PlanKey};
use crate::radix::RadixTree;
use crate::sequence::Sequence;
use crate::state::State;
use crate::table::BlockTable;

/// Arrays that have got a version.
static NUM_ARRAYS: AtomicU64 = AtomicU64::new(0);

/// Shared prefixes of the rows of a batch, in one layer group: a tree.
///
/// A prefix ends at or before the first position that any of its rows computes, so no row needs a mask in it.
#[derive(Debug)]
pub struct SharedPrefixes {
    group: usize,
    min_blocks: usize,
    min_rows: usize,
    order: Vec<u32>,
    own: Vec<u32>,
    prefixes: Vec<SharedPrefix>,
    version: u64,
    /// The tables that they were computed from; `None` if rows may share more once they have advanced.
    source: Option<Source>,
    paths: Paths,
    /// How many leading blocks each row of the order has in common with the one before.
    common: Vec<u32>,
}

/// The tables that prefixes were computed from.
#[derive(Clone, Copy, Debug)]
struct Source {
    tables: ArraysVersion,
    /// The step: in an earlier one, rows may begin earlier.
    step: u64,
}

/// The paths of a batch's rows through the radix tree, as (node, blocks of the row up to where it leaves the node).
#[derive(Debug, Default)]
struct Paths {
    parts: Vec<(NodeId, u32)>,
    /// Where each row's path ends in `parts`.
    ends: Vec<usize>,
}

impl Paths {
    fn clear(&mut self) {
        self.parts.clear();
        self.ends.clear();
    }

    /// Adds the path of the next row, whose first `depth` blocks end at `last`.
    fn push(&mut self, tree: &RadixTree, mut last: NodePosition, mut depth: u32) {
        let begin = self.parts.len();
        loop {
            self.parts.push((last.node, depth));
            depth -= last.offset;
            match tree.parent_of(last.node) {
                Some(parent) => last = parent,
                None => break,
            }
        }
        self.parts[begin..].reverse();
        self.ends.push(self.parts.len());
    }

    fn of(&self, row: u32) -> &[(NodeId, u32)] {
        let row = row as usize;
        let begin = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.parts[begin..self.ends[row]]
    }

    /// Leading blocks that two rows have in common.
    fn common(&self, a: u32, b: u32) -> u32 {
        let mut common = 0;
        for (a, b) in self.of(a).iter().zip(self.of(b)) {
            if a.0 == b.0 {
                common = a.1.min(b.1);
            }
            if a != b {
                break;
            }
        }
        common
    }
}

/// Arrays for [`SharedPrefixes::write`]. B: sequences of the step.
#[derive(Clone, Copy, Debug)]
pub struct PrefixArrays<'a> {
    /// `[>= B]`: the rows of the batch, ordered so that rows with shared blocks are neighbours.
    pub order: IntArray<'a>,
    /// `[>= B]`: by row of the batch, the first entry of its block table that is in no prefix.
    pub own_blocks: IntArray<'a>,
    /// `[>= B - 1, 5]`: first row (in `order`) and the one after the last, first block and the one after
    /// the last, parent (-1: none). Parents come first, level by level.
    pub prefixes: IntArray<'a>,
}

impl PrefixArrays<'_> {
    /// Numbers per prefix.
    pub const WIDTH: usize = 5;

    /// Checks that they are large enough for a step of this many sequences.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`]
    pub fn check(&self, sequences: usize) -> Result<(), Error> {
        let max_prefixes = sequences.saturating_sub(1);
        check_sizes(&[
            ("order", sequences, self.order.len()),
            ("own_blocks", sequences, self.own_blocks.len()),
            (
                "prefixes (rows)",
                max_prefixes,
                self.prefixes.len() / Self::WIDTH,
            ),
        ])
    }
}

impl SharedPrefixes {
    /// Prefixes of one layer group, of at least `min_blocks` blocks that at least `min_rows` rows share. Shorter ones
    /// belong to the prefixes in them, or to the rows themselves. A group with a window has none: its
    /// windows move with every token.
    ///
    /// # Errors
    /// [`Error::TooFew`] for no blocks, or less than two rows.
    pub fn new(group: usize, min_blocks: usize, min_rows: usize) -> Result<Self, Error> {
        for (name, min, given) in [("min_blocks", 1, min_blocks), ("min_rows", 2, min_rows)] {
            if given < min {
                return Err(Error::TooFew { name, min, given });
            }
        }
        Ok(Self::empty(group, min_blocks, min_rows))
    }

    fn empty(group: usize, min_blocks: usize, min_rows: usize) -> Self {
        Self {
            group,
            min_blocks,
            min_rows,
            order: Vec::new(),
            own: Vec::new(),
            prefixes: Vec::new(),
            version: 0,
            source: None,
            paths: Paths::default(),
            common: Vec::new(),
        }
    }

    /// Rows of the batch, ordered so that rows with shared blocks are neighbours.
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    /// By row of the batch: the first entry of its block table that is in no prefix.
    pub fn own_blocks(&self) -> &[u32] {
        &self.own
    }

    /// The prefixes, level by level: parents come first.
    pub fn prefixes(&self) -> &[SharedPrefix] {
        &self.prefixes
    }

    /// Incremented whenever any of these changes.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Writes them into arrays that are large enough (see [`PrefixArrays::check`]).
    pub fn write(&self, arrays: &PrefixArrays<'_>) {
        let wide = |&value: &u32| i64::from(value);
        arrays.order.write(0, self.order.iter().map(wide));
        arrays.own_blocks.write(0, self.own.iter().map(wide));
        for (at, prefix) in self.prefixes.iter().enumerate() {
            let parent = prefix.parent.map_or(-1, |parent| parent as i64);
            let (rows, blocks) = (&prefix.rows, &prefix.blocks);
            let ends = [rows.start, rows.end, blocks.start, blocks.end];
            let numbers = ends.into_iter().map(|end| end as i64).chain([parent]);
            arrays.prefixes.write(at * PrefixArrays::WIDTH, numbers);
        }
    }

    /// Forgets all prefixes; the next fill computes them anew. For a fill that panicked.
    pub fn reset(&mut self) {
        let version = self.version + 1;
        *self = Self {
            version,
            ..Self::empty(self.group, self.min_blocks, self.min_rows)
        };
    }

    /// Computes the prefixes from the order and the common blocks of neighbours.
    fn build(&mut self) {
        let mut own = Vec::new();
        self.prefixes = prefixes(&self.common, self.min_blocks, self.min_rows, &mut own);
        self.own.clear();
        self.own.resize(self.order.len(), 0);
        for (&row, &own) in self.order.iter().zip(&own) {
            self.own[row as usize] = own;
        }
        self.version += 1;
    }

    /// Orders the rows, and compares neighbours.
    fn sort_rows(
        &mut self,
        rows: usize,
        compare: impl Fn(u32, u32) -> std::cmp::Ordering,
        common: impl Fn(u32, u32) -> u32,
    ) {
        self.order.clear();
        self.order.extend(0..rows as u32);
        self.order.sort_by(|&one, &other| compare(one, other));
        self.common.clear();
        self.common.extend(self.order.first().map(|_| 0));
        let pairs = self.order.windows(2).map(|pair| common(pair[0], pair[1]));
        self.common.extend(pairs);
    }
}

impl State {
    /// As `fill`; also finds the shared prefixes of the rows. On an error nothing is written and `shared` is as it was.
    pub(crate) fn fill_shared(
        &self,
        plan: PlanKey,
        arrays: &StepArrays<'_>,
        written: &mut TableRows,
        shared: &mut SharedPrefixes,
    ) -> Result<(), Error> {
        let (group, groups) = (shared.group, self.groups.len());
        if group >= groups {
            return Err(Error::UnknownGroup { group, groups });
        }
        self.steps.open_plan(plan)?;
        let new_version = || ArraysVersion {
            arrays: NUM_ARRAYS.fetch_add(1, Ordering::Relaxed),
            changes: 0,
        };
        written.version.get_or_insert_with(new_version);
        self.fill(plan, arrays, written)?;
        let tables = written.version;
        let step = plan.serial;
        let is_known = |source: Source| Some(source.tables) == tables && source.step <= step;
        if shared.source.is_some_and(is_known) {
            return Ok(());
        }
        let is_final = self.compare_rows(self.steps.open_plan(plan)?, shared);
        let source = tables.map(|tables| Source { tables, step });
        shared.source = source.filter(|_| is_final);
        shared.build();
        Ok(())
    }

    /// Orders the rows and counts the common blocks of neighbours. False if rows of the same tables may share more once
    /// they have advanced.
    fn compare_rows(&self, plan: &Plan, shared: &mut SharedPrefixes) -> bool {
        let rows = plan.entries.len();
        if self.groups.is_window(shared.group) {
            shared.order = (0..rows as u32).collect();
            shared.common = vec![0; rows];
            return true;
        }
        let tree = self.pool.tree();
        let mut paths = std::mem::take(&mut shared.paths);
        paths.clear();
        let (mut is_final, mut registered) = (true, true);
        for entry in &plan.entries {
            let seq = self.seqs.at(entry.seq_idx);
            let (depth, max_depth) = (seq.registered.end(), full_indices_seen(self, entry));
            is_final &= depth <= max_depth;
            let last = tree.ancestor(seq.registered.last, depth.saturating_sub(max_depth));
            paths.push(tree, last, depth.min(max_depth) as u32);
            registered &= !self.shares_more(seq, shared.group, max_depth)
                && matches!(self.table_of(plan, entry), Cow::Borrowed(_));
        }
        if registered {
            let compare = |one, other| paths.of(one).cmp(paths.of(other));
            shared.sort_rows(rows, compare, |one, other| paths.common(one, other));
        } else {
            self.compare_tables(plan, shared);
        }
        shared.paths = paths;
        is_final
    }

    /// As `compare_rows`, block by block.
    #[cold]
    fn compare_tables(&self, plan: &Plan, shared: &mut SharedPrefixes) {
        let tables = plan.entries.iter().map(|entry| {
            let table = self.table_of(plan, entry);
            (full_indices_seen(self, entry), table)
        });
        let tables: Vec<(usize, Cow<'_, BlockTable>)> = tables.collect();
        let group = shared.group;
        let leading = |row: u32| -> &[BlockId] {
            let (max_depth, table) = &tables[row as usize];
            let blocks = table.blocks_of(group);
            &blocks[..blocks.len().min(*max_depth)]
        };
        let common = |one, other| {
            let pairs = leading(one).iter().zip(leading(other));
            pairs.take_while(|(one, other)| one == other).count() as u32
        };
        let compare = |one, other| leading(one).cmp(leading(other));
        shared.sort_rows(tables.len(), compare, common);
    }
}

/// The full blocks before or at the first position that an entry computes: all of its tokens see them entirely.
fn full_indices_seen(state: &State, entry: &Entry) -> usize {
    state.groups.index_of(entry.start + 1)
}

impl State {
    /// Whether a table shares a block after its registered ones, among the first `max_depth`.
    fn shares_more(&self, seq: &Sequence, group: usize, max_depth: usize) -> bool {
        let end = seq.registered.end();
        let next = seq.table.get(group, end).filter(|_| end < max_depth);
        next.is_some_and(|block| self.pool.seq_refs(block) > 1)
    }
}
