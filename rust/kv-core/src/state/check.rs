//! The validator's part that sees sequences: what their tables hold, how far they are, where they
//! stand among the contents.

use std::collections::{BTreeMap, HashSet};

use super::State;
use crate::check::ensure;
use crate::contents::Spot;
use crate::sequence::Sequence;

/// What tables say of a block: how many hold it, as which entry.
#[derive(Clone, Copy, Default)]
struct Held {
    times: u32,
    at: (usize, usize),
}

impl State {
    /// Recounts sequences and the contents under them. Table entries per block.
    pub(crate) fn check(&self) -> Result<Vec<u32>, String> {
        let mut roots: BTreeMap<Spot, u32> = BTreeMap::new();
        for seq in self.seqs.iter() {
            *roots.entry(seq.root).or_default() += 1;
        }
        self.pool.contents.check(&roots)?;
        let mut held = vec![Held::default(); self.pool.num_blocks()];
        let mut ids = HashSet::new();
        for seq in self.seqs.iter() {
            ensure(ids.insert(seq.id), || {
                format!("two sequences are number {}", seq.id)
            })?;
            self.check_table(seq, &mut held)?;
            self.check_progress(seq)?;
            self.check_windows(seq)?;
            self.check_registered(seq)?;
        }
        for seq in self.seqs.iter() {
            self.check_unshared(seq, &held)?;
        }
        Ok(held.iter().map(|block| block.times).collect())
    }

    /// Whole rows of blocks that there are, each in the same place of every table that holds it, in the
    /// column of its content's group.
    fn check_table(&self, seq: &Sequence, held: &mut [Held]) -> Result<(), String> {
        let id = seq.id;
        seq.table
            .check()
            .map_err(|what| format!("sequence {id} has {what}"))?;
        for group in 0..seq.table.groups() {
            let rows = seq.table.start(group)..;
            for (row, &block) in rows.zip(seq.table.blocks_of(group)) {
                let Some(place) = held.get_mut(block.at()) else {
                    return Err(format!("sequence {id} holds {block:?}: there is none"));
                };
                let (at, before) = ((row, group), place.at);
                ensure(place.times == 0 || before == at, || {
                    format!("sequence {id} holds {block:?} at {at:?}, it is at {before:?} already")
                })?;
                place.times += 1;
                place.at = at;
                let of = self
                    .pool
                    .content_of(block)
                    .map_or(group, |content| content.1);
                ensure(of == group, || {
                    format!("sequence {id} holds {block:?} of group {of} in column {group}")
                })?;
            }
        }
        Ok(())
    }

    fn check_progress(&self, seq: &Sequence) -> Result<(), String> {
        let (id, computed, end) = (seq.id, seq.computed, seq.planned_end);
        let (block_size, tokens) = (self.groups.block_size(), seq.tokens.len());
        let rows = seq.table.rows();
        ensure(computed <= tokens && computed <= rows * block_size, || {
            format!("sequence {id}: {computed} computed of {tokens} tokens in {rows} rows")
        })?;
        ensure(computed <= end, || {
            format!("sequence {id} is planned to {end}, behind its {computed} computed tokens")
        })?;
        ensure(seq.cached <= computed, || {
            let cached = seq.cached;
            format!("sequence {id}: {cached} cached of {computed} computed tokens")
        })?;
        // The last token of a full hit is computed again.
        let registered = seq.registered.rows * block_size;
        ensure(registered <= end + 1, || {
            format!("sequence {id} is planned to {end} with {registered} registered tokens")
        })?;
        ensure(self.caching || seq.registered.rows == 0, || {
            format!("sequence {id} has registered blocks, and caching is off")
        })?;
        ensure(!seq.dropped || seq.num_plans > 0, || {
            format!("sequence {id} was dropped and lives on")
        })
    }

    /// Every row that a token to come sees, and none of those that slid out of a window.
    fn check_windows(&self, seq: &Sequence) -> Result<(), String> {
        let (id, computed) = (seq.id, seq.computed);
        let rows = self.groups.row_of(computed).max(seq.registered.rows);
        let settled = self.settled_rows(seq);
        for group in 0..self.groups.len() {
            let start = seq.table.start(group);
            let seen = self.groups.first_row(group, rows);
            ensure(start <= seen, || {
                format!(
                    "sequence {id} of {computed} computed tokens begins in row {start} of group {group}, {seen} is seen"
                )
            })?;
            let unseen = self.groups.first_row(group, settled);
            ensure(start >= unseen.min(seq.table.rows()), || {
                format!(
                    "sequence {id} begins in row {start} of group {group}, nothing before {unseen} is seen"
                )
            })?;
        }
        Ok(())
    }

    /// Rows that are yet to be written are its own, unless a fork has shared them.
    fn check_unshared(&self, seq: &Sequence, held: &[Held]) -> Result<(), String> {
        let full = self.groups.row_of(seq.computed);
        let from = full.max(seq.registered.rows).max(seq.shared_rows);
        for block in (from..seq.table.rows()).flat_map(|row| seq.table.row(row)) {
            let times = held[block.at()].times;
            ensure(times == 1 && self.pool.content(block).is_none(), || {
                let id = seq.id;
                format!("sequence {id} would write on {block:?} of {times} tables")
            })?;
        }
        Ok(())
    }

    /// Its first rows hold the contents on the path from its namespace to its tip.
    fn check_registered(&self, seq: &Sequence) -> Result<(), String> {
        let (id, contents) = (seq.id, &self.pool.contents);
        let (mut spot, rows) = (seq.registered.tip, seq.registered.rows);
        let tokens = seq.tokens.get(..rows * self.groups.block_size());
        let is_path = contents.lives(spot)
            && tokens.is_some_and(|tokens| contents.leads_to(seq.root, tokens, spot));
        ensure(is_path, || {
            format!("sequence {id} does not stand on its first {rows} rows")
        })?;
        for row in (0..rows).rev() {
            let is_its = |group: &usize| match seq.table.get(*group, row) {
                Some(block) => contents.block(spot, *group) == Some(block),
                None => true,
            };
            ensure((0..self.groups.len()).all(|group| is_its(&group)), || {
                format!("sequence {id}: row {row} is not its content's")
            })?;
            spot = contents.parent(spot).unwrap_or(Spot::NONE);
        }
        Ok(())
    }
}
