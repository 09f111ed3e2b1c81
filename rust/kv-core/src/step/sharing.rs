//! Which rows of a batch share which leading blocks, for kernels that read a shared block once for all
//! of its rows.
//!
//! Registered rows of two tables hold the same block if they hold the same content, so the way of each
//! sequence through the contents says what it shares, run by run, however long the prefix is. Blocks
//! that are shared without being registered (forks without a cache) are compared one by one.
//!
//! While a batch stays the same nothing of this is done: `fill` notices what changes (see `Watch`).

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use super::cascade::{SharedPrefix, prefixes};
use super::inputs::{IntArray, StepArrays, TableRows, check_sizes};
use super::plan::{Entry, Plan};
use super::trie::Trie;
use super::{State, Steps};
use crate::error::Error;
use crate::ids::{BlockId, PlanKey};
use crate::sequence::Sequence;
use crate::table::BlockTable;

/// What the block tables of a set of arrays have become: a new version whenever rows that were there
/// before may share something else than they did. A row that grows by blocks which nobody else holds does not.
#[derive(Debug)]
pub(super) struct Watch {
    id: u64,
    version: u64,
}

static WATCHES: AtomicU64 = AtomicU64::new(0);

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            id: WATCHES.fetch_add(1, Ordering::Relaxed),
            version: 0,
        }
    }

    pub(super) fn changed(&mut self) {
        self.version += 1;
    }
}

/// Groups of rows of a batch that have leading blocks in common, in one layer group: a tree.
///
/// A prefix counts as far as every row sees it as a whole, so that no row needs a mask there: its last
/// position comes before the first one that a row computes, or is it.
#[derive(Debug)]
pub struct SharedPrefixes {
    group: usize,
    min_blocks: usize,
    min_rows: usize,
    order: Vec<u32>,
    own: Vec<u32>,
    prefixes: Vec<SharedPrefix>,
    version: u64,
    /// What it was made of, unless the next fill may find more in the same tables.
    seen: Option<Seen>,
    trie: Trie,
    /// How many leading blocks each row of the order has in common with the one before.
    common: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    /// The tables, and their version.
    watch: (u64, u64),
    /// The step: in one before it rows may begin earlier.
    step: u64,
}

/// Arrays for [`SharedPrefixes::write`]. B: sequences of the step.
#[derive(Clone, Copy, Debug)]
pub struct PrefixArrays<'a> {
    /// `[>= B]`: the rows of the batch, in an order in which those that share stand side by side.
    pub order: IntArray<'a>,
    /// `[>= B]`: by row of the batch, the first entry of its block table that is in no prefix.
    pub own_blocks: IntArray<'a>,
    /// `[>= B - 1, 5]`: first row (in `order`) and the one after the last, first block and the one after
    /// the last, parent (-1: none). Parents come first, level by level.
    pub prefixes: IntArray<'a>,
}

impl PrefixArrays<'_> {
    /// Numbers of a prefix in an array.
    pub const WIDTH: usize = 5;

    /// Whether they hold what a step of so many sequences may share.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`]
    pub fn check(&self, sequences: usize) -> Result<(), Error> {
        let most = sequences.saturating_sub(1);
        check_sizes(&[
            ("order", sequences, self.order.len()),
            ("own_blocks", sequences, self.own_blocks.len()),
            ("prefixes (rows)", most, self.prefixes.len() / Self::WIDTH),
        ])
    }
}

impl SharedPrefixes {
    /// For one layer group: prefixes of at least `min_blocks` blocks that at least `min_rows` rows share. What is
    /// shorter belongs to those in it, or to the rows themselves. In a group with a window there are none:
    /// what its rows see moves on with every token.
    ///
    /// # Errors
    /// [`Error::TooFew`] for no blocks, or less than two rows.
    pub fn new(group: usize, min_blocks: usize, min_rows: usize) -> Result<Self, Error> {
        for (name, least, given) in [("min_blocks", 1, min_blocks), ("min_rows", 2, min_rows)] {
            if given < least {
                return Err(Error::TooFew { name, least, given });
            }
        }
        Ok(Self {
            group,
            min_blocks,
            min_rows,
            order: Vec::new(),
            own: Vec::new(),
            prefixes: Vec::new(),
            version: 0,
            seen: None,
            trie: Trie::default(),
            common: Vec::new(),
        })
    }

    /// Rows of the batch, in an order in which those that share stand side by side.
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

    /// Grows whenever the above have changed.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Writes all of it into arrays that are large enough (see [`PrefixArrays::check`]).
    pub fn write(&self, arrays: &PrefixArrays<'_>) {
        let wide =
            |values: &[u32]| -> Vec<i64> { values.iter().map(|&it| i64::from(it)).collect() };
        arrays.order.write(0, wide(&self.order).into_iter());
        arrays.own_blocks.write(0, wide(&self.own).into_iter());
        for (at, prefix) in self.prefixes.iter().enumerate() {
            let parent = prefix.parent.map_or(-1, |parent| parent as i64);
            let (rows, blocks) = (&prefix.rows, &prefix.blocks);
            let ends = [rows.start, rows.end, blocks.start, blocks.end];
            let numbers = ends.into_iter().map(|end| end as i64).chain([parent]);
            arrays.prefixes.write(at * PrefixArrays::WIDTH, numbers);
        }
    }

    /// Forgets all prefixes; the next fill finds them anew. For a fill that panicked half way.
    pub fn reset(&mut self) {
        let empty = Self {
            order: Vec::new(),
            own: Vec::new(),
            prefixes: Vec::new(),
            version: self.version + 1,
            seen: None,
            trie: Trie::default(),
            common: Vec::new(),
            ..*self
        };
        *self = empty;
    }

    /// Makes the tree of the order and of what neighbours in it have in common.
    fn grow(&mut self) {
        let least = (self.min_blocks, self.min_rows);
        let mut by_place = std::mem::take(&mut self.trie.numbers);
        self.prefixes = prefixes(&self.common, least, &mut by_place);
        self.own.clear();
        self.own.resize(self.order.len(), 0);
        for (&row, &own) in self.order.iter().zip(&by_place) {
            self.own[row as usize] = own;
        }
        self.trie.numbers = by_place;
        self.version += 1;
    }
}

impl Steps {
    /// As `fill`; says, too, which rows share what. On an error nothing is written, and `shared` is as it
    /// was.
    pub(crate) fn fill_shared(
        &self,
        state: &State,
        plan: PlanKey,
        arrays: &StepArrays<'_>,
        written: &mut TableRows,
        shared: &mut SharedPrefixes,
    ) -> Result<(), Error> {
        let (group, groups) = (shared.group, state.groups.len());
        if group >= groups {
            return Err(Error::UnknownGroup { group, groups });
        }
        self.open_plan(plan)?;
        written.watch.get_or_insert_with(Watch::new);
        self.fill(state, plan, arrays, written)?;
        let watch = written.watch.as_ref().map(|it| (it.id, it.version));
        let step = plan.serial;
        let is_known = |seen: Seen| Some(seen.watch) == watch && seen.step <= step;
        if shared.seen.is_some_and(is_known) {
            return Ok(());
        }
        let settled = self.compare_rows(state, self.open_plan(plan)?, shared);
        let seen = watch.map(|watch| Seen { watch, step });
        shared.seen = seen.filter(|_| settled);
        shared.grow();
        Ok(())
    }

    /// Finds an order of the rows, and what neighbours have in common. False if the same tables may have
    /// more in common once their rows have moved on.
    fn compare_rows(&self, state: &State, plan: &Plan, shared: &mut SharedPrefixes) -> bool {
        let rows = plan.entries.len();
        if state.groups.is_window(shared.group) {
            shared.order = (0..rows as u32).collect();
            shared.common = vec![0; rows];
            return true;
        }
        shared.trie.begin(rows);
        let (mut settled, mut registered) = (true, true);
        for (row, entry) in plan.entries.iter().enumerate() {
            let seq = state.seqs.at(entry.slot);
            let (depth, most) = (seq.registered.rows(), before(state, entry));
            settled &= depth <= most;
            let spot = state
                .pool
                .contents
                .back(seq.registered.tip, depth.saturating_sub(most));
            let place = (spot, depth.min(most));
            shared.trie.insert(&state.pool.contents, place, row as u32);
            registered &= !state.shares_more(seq, shared.group, most)
                && matches!(self.table_of(state, plan, entry), Cow::Borrowed(_));
        }
        if registered {
            shared.trie.walk(&mut shared.order, &mut shared.common);
        } else {
            self.compare_tables(state, plan, shared);
        }
        settled
    }

    /// The same, block by block.
    #[cold]
    fn compare_tables(&self, state: &State, plan: &Plan, shared: &mut SharedPrefixes) {
        let tables = plan.entries.iter().map(|entry| {
            let table = self.table_of(state, plan, entry);
            (before(state, entry), table)
        });
        let tables: Vec<(usize, Cow<'_, BlockTable>)> = tables.collect();
        let leading = |row: u32| -> &[BlockId] {
            let (most, table) = &tables[row as usize];
            let blocks = table.blocks_of(shared.group);
            &blocks[..blocks.len().min(*most)]
        };
        let mut order: Vec<u32> = (0..tables.len() as u32).collect();
        order.sort_by(|&one, &other| leading(one).cmp(leading(other)));
        let equal = |pair: &[u32]| {
            let pairs = leading(pair[0]).iter().zip(leading(pair[1]));
            pairs.take_while(|(one, other)| one == other).count() as u32
        };
        shared.common.clear();
        shared.common.extend(order.first().map(|_| 0));
        shared.common.extend(order.windows(2).map(equal));
        shared.order = order;
    }
}

/// The full blocks of a row before or at the first position that it computes: what all of its tokens see
/// as a whole.
#[inline]
fn before(state: &State, entry: &Entry) -> usize {
    state.groups.row_of(entry.start + 1)
}

impl State {
    /// Whether a table shares a block behind its registered ones, among the first `most`.
    #[inline]
    fn shares_more(&self, seq: &Sequence, group: usize, most: usize) -> bool {
        let row = seq.registered.rows();
        let next = seq.table.get(group, row).filter(|_| row < most);
        next.is_some_and(|block| self.pool.seq_refs(block) > 1)
    }
}
