//! Sequences and the pool together: what changes a sequence's blocks outside a step.

#[path = "state/check.rs"]
mod check;

use crate::config::Config;
use crate::contents::Spot;
use crate::error::Error;
use crate::groups::Groups;
use crate::ids::{BlockId, SeqKey};
use crate::matching::{Match, Wanted};
use crate::pin::Pin;
use crate::pool::Pool;
use crate::sequence::{Registered, Seats, Sequence, Sequences};
use crate::table::BlockTable;

/// What steps work on.
pub(crate) struct State {
    pub(crate) groups: Groups,
    pub(crate) pool: Pool,
    pub(crate) seqs: Sequences,
    /// Whether contents are registered, matched and merged at all.
    pub(crate) caching: bool,
    /// Whether they are shared before they are there.
    pub(crate) sharing: bool,
    /// Whether a block is copied for the tokens that it has in common with another one.
    pub(crate) lending: bool,
    /// The match under way; kept to save the allocation.
    pub(crate) matched: Match,
    /// Blocks on their way to their tables; kept for the same reason.
    pub(crate) taken: Vec<BlockId>,
}

impl State {
    pub(crate) fn new(config: &Config, groups: Groups, pool: Pool, seqs: Sequences) -> Self {
        Self {
            groups,
            pool,
            seqs,
            caching: config.prefix_caching,
            sharing: config.prefix_caching && config.in_flight_sharing,
            lending: config.prefix_caching && config.partial_reuse,
            matched: Match::NOTHING,
            taken: Vec::new(),
        }
    }

    /// The sequence behind a key, which no open plan may hold.
    pub(crate) fn at_rest(&self, key: SeqKey) -> Result<&Sequence, Error> {
        let seq = self.seqs.get(key)?;
        match seq.plans {
            Seats::NONE => Ok(seq),
            _ => Err(Error::InPlan { sequence: seq.id }),
        }
    }

    /// Blocks for the table to have `rows` rows. The caller has counted that there are as many.
    #[inline]
    pub(crate) fn allocate(&mut self, slot: u32, rows: usize) {
        let table = &mut self.seqs.at_mut(slot).table;
        let missing = rows.saturating_sub(table.rows()) * table.groups();
        if missing == 0 {
            return;
        }
        if table.groups() == 1 {
            self.pool.take(missing, table.tail_of_one());
        } else {
            let mut taken = Vec::new();
            self.pool.take(missing, &mut taken);
            table.push_rows(&taken);
        }
    }

    /// One block more, which is nobody's table entry yet.
    pub(crate) fn allocate_one(&mut self) -> BlockId {
        let mut taken = Vec::new();
        self.pool.take(1, &mut taken);
        taken[0]
    }

    /// Shortens a table to `rows` rows, last entry first, so that prefixes outlive continuations.
    pub(crate) fn shorten(&mut self, slot: u32, rows: usize) {
        let seq = self.seqs.at_mut(slot);
        let end = seq.table.rows();
        if rows < end {
            seq.table_version += 1;
            let pool = &mut self.pool;
            match seq.table.groups() {
                1 => seq.table.cut_one(rows, |blocks| pool.release_all(blocks)),
                _ => seq.table.take_rows(rows..end, |block| pool.release(block)),
            }
        }
    }

    /// The rows of which a sequence needs the windows: those computed, and registered if they ever are.
    pub(crate) fn settled_rows(&self, seq: &Sequence) -> usize {
        let full = self.groups.row_of(seq.computed);
        if self.caching {
            full.min(seq.registered.rows())
        } else {
            full
        }
    }

    /// Gives back what no later token of the sequence can see: the rows before the windows of its
    /// last full row. Rows that are yet to be registered wait.
    #[inline]
    pub(crate) fn slide(&mut self, slot: u32) {
        if self.groups.have_windows() {
            let gone = self.slide_windows(slot);
            self.pool.stats.slid_blocks += gone;
        }
    }

    /// How many blocks that gave back.
    fn slide_windows(&mut self, slot: u32) -> u64 {
        let rows = self.settled_rows(self.seqs.at(slot));
        let mut given_back = 0;
        for group in 0..self.groups.len() {
            let start = self.groups.first_row(group, rows);
            let pool = &mut self.pool;
            self.seqs.at_mut(slot).table.slide(group, start, |block| {
                given_back += 1;
                pool.release(block);
            });
        }
        self.seqs.at_mut(slot).table_version += u32::from(given_back > 0);
        given_back
    }

    /// The table and the end of a pin on the longest prefix of a sequence's registered rows whose KV
    /// is there and of which no window has slid; how many rows that are.
    pub(crate) fn pin_on(&self, key: SeqKey) -> Result<(BlockTable, Spot, usize), Error> {
        let seq = self.seqs.get(key)?;
        let is_there = |row: usize| seq.table.row(row).all(|block| self.pool.is_ready(block));
        let first = (0..self.groups.len())
            .map(|group| seq.table.start(group))
            .min();
        let first = first.unwrap_or(0).min(seq.registered.rows());
        let missing = (first..seq.registered.rows()).find(|&row| !is_there(row));
        let rows = missing.unwrap_or(seq.registered.rows());
        // Of fewer rows a window would begin even earlier.
        let prefix = seq
            .table
            .prefix(rows, |group| self.groups.first_row(group, rows));
        Ok(match prefix {
            Some(table) if rows > 0 => {
                let Registered { tip, .. } = seq.registered;
                let tip = self.pool.contents.back(tip, seq.registered.rows() - rows);
                (table, tip, rows)
            }
            _ => self.no_pin(),
        })
    }

    /// The table of a pin on the longest cached prefix of `tokens`, as `pin_on`.
    pub(crate) fn match_prefix(&mut self, tokens: &[u32], root: Spot) -> (BlockTable, Spot, usize) {
        self.matched.walk(
            &mut self.pool,
            &self.groups,
            tokens,
            (root, 0),
            Wanted::Ready,
        );
        let Match { tip, rows, .. } = &self.matched;
        match rows {
            0 => self.no_pin(),
            _ => (
                BlockTable::of_match(&self.matched, 0, &self.groups),
                *tip,
                *rows,
            ),
        }
    }

    pub(crate) fn no_pin(&self) -> (BlockTable, Spot, usize) {
        (BlockTable::new(self.groups.len()), Spot::NONE, 0)
    }

    /// Puts a pin's blocks into the table of a sequence that has none.
    pub(crate) fn attach(&mut self, key: SeqKey, pin: &Pin) -> Result<(), Error> {
        let seq = self.at_rest(key)?;
        if !seq.table.is_empty() {
            return Err(Error::NotFresh {
                blocks: seq.table.len(),
            });
        }
        let Some(tip) = pin.end() else {
            return Ok(());
        };
        let tokens = seq.tokens.get(..pin.num_tokens());
        if !tokens.is_some_and(|tokens| self.pool.contents.leads_to(seq.root, tokens, tip)) {
            return Err(Error::PinMismatch {
                pin_tokens: pin.num_tokens(),
                sequence_tokens: seq.tokens.len(),
            });
        }
        let seq = self.seqs.at_mut(key.slot);
        seq.table = pin.table().clone();
        let rows = seq.table.rows();
        seq.registered = Registered::new(tip, rows);
        seq.set_computed(pin.num_tokens().min(seq.tokens.len() - 1));
        seq.cached = seq.computed;
        for group in 0..self.groups.len() {
            self.pool.hold_all(pin.table().blocks_of(group));
        }
        Ok(())
    }

    /// A new sequence of the first `num_tokens` tokens of another one, on the same blocks; without
    /// blocks where a window has slid past its end.
    pub(crate) fn fork(&mut self, key: SeqKey, num_tokens: usize) -> Result<SeqKey, Error> {
        let seq = self.at_rest(key)?;
        if num_tokens == 0 || num_tokens > seq.tokens.len() {
            return Err(Error::ForkLength {
                num_tokens,
                sequence_tokens: seq.tokens.len(),
            });
        }
        let mut computed = seq.computed.min(num_tokens);
        let full = self.groups.row_of(computed);
        let (tip, rows) = (seq.registered.tip, seq.registered.rows());
        let tip = self.pool.contents.back(tip, rows.saturating_sub(full));
        let mut registered = Registered::new(tip, rows.min(full));
        // What is yet to be registered is kept too.
        let settled = if self.caching {
            registered.rows()
        } else {
            full
        };
        let needed = |group| self.groups.first_row(group, settled);
        let has_all = (0..self.groups.len())
            .all(|group| seq.table.start(group) <= self.groups.first_row(group, full));
        let table = seq.table.prefix(self.groups.rows(computed), needed);
        let table = table.filter(|_| has_all).unwrap_or_else(|| {
            computed = 0;
            registered = Registered::at_root(seq.root);
            BlockTable::new(self.groups.len())
        });
        let tokens = seq.tokens[..num_tokens].to_vec();
        let (root, read_cache, cached) = (seq.root, seq.read_cache, seq.cached.min(computed));
        for group in 0..self.groups.len() {
            self.pool.hold_all(table.blocks_of(group));
        }
        self.pool.contents.share_root(root);
        let shared_rows = self.groups.rows(computed) as u32;
        let parent = self.seqs.at_mut(key.slot);
        parent.shared_rows = parent.shared_rows.max(shared_rows);
        let key = self.seqs.insert(tokens, root, read_cache);
        let fork = self.seqs.at_mut(key.slot);
        (fork.table, fork.registered, fork.shared_rows) = (table, registered, shared_rows);
        fork.set_computed(computed);
        fork.cached = cached;
        Ok(key)
    }

    /// Gives back the blocks past the first `num_tokens` tokens; how many.
    pub(crate) fn trim(&mut self, key: SeqKey, num_tokens: usize) -> Result<usize, Error> {
        let seq = self.at_rest(key)?;
        if num_tokens < seq.computed {
            return Err(Error::TrimBelowComputed {
                num_tokens,
                computed: seq.computed,
            });
        }
        let before = seq.table.rows();
        let keep = self.groups.rows(num_tokens);
        let keep = keep.max(seq.registered.rows()).min(before);
        self.shorten(key.slot, keep);
        Ok((before - keep) * self.groups.len())
    }

    /// Takes a sequence's blocks away and keeps its tokens.
    pub(crate) fn reset(&mut self, key: SeqKey) -> Result<(), Error> {
        self.at_rest(key)?;
        self.shorten(key.slot, 0);
        let seq = self.seqs.at_mut(key.slot);
        seq.table = BlockTable::new(self.groups.len());
        seq.set_computed(0);
        (seq.cached, seq.shared_rows) = (0, 0);
        seq.registered = Registered::at_root(seq.root);
        Ok(())
    }

    /// Ends a sequence, unless an open plan holds it: then its plan does.
    pub(crate) fn end_sequence(&mut self, slot: u32) {
        let seq = self.seqs.at_mut(slot);
        seq.dropped = true;
        if seq.plans != Seats::NONE {
            return;
        }
        self.shorten(slot, 0);
        let (stood, root) = self.seqs.remove(slot);
        self.pool.contents.rest(stood.tip.run);
        self.pool.contents.release_root(root);
    }
}
