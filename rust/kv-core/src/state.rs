//! Sequences and the pool: calls that change a sequence's blocks outside a step.

mod check;
mod explain;
mod versions;

use crate::config::Config;
use crate::error::Error;
use crate::groups::Groups;
use crate::handles::{Pin, PrefixBlocks};
use crate::ids::{BlockId, NodePosition, PlanKey, SeqKey};
use crate::open_transfers::Transfers;
use crate::pool::{Pool, Purpose};
use crate::radix::Match;
use crate::sequence::{PlanSet, Registered, Sequence, Sequences, StateTrack};
use crate::step::state_work::StateWork;
use crate::step::steps::Steps;
use crate::switch::Labelled;
use crate::table::BlockTable;

/// The state that steps change.
pub(crate) struct State {
    pub(crate) groups: Groups,
    pub(crate) pool: Pool,
    pub(crate) seqs: Sequences,
    pub(crate) steps: Steps,
    pub(crate) transfers: Transfers,
    /// Whether blocks are registered, matched and merged.
    pub(crate) caching: bool,
    /// Whether blocks are shared before they are computed.
    pub(crate) sharing: bool,
    /// Whether a match that ends inside a block copies its beginning.
    pub(crate) partial_reuse: bool,
    /// The current match; kept to save the allocation.
    pub(crate) matched: Match,
    /// Scratch for allocated blocks.
    pub(crate) taken: Vec<BlockId>,
    /// The snapshots that open steps load and write.
    pub(crate) state_work: Vec<StateWork>,
}

impl State {
    pub(crate) fn new(config: &Config, groups: Groups, pool: Pool, manager: u32) -> Self {
        Self {
            seqs: Sequences::new(manager, groups.len()),
            steps: Steps::new(manager),
            transfers: Transfers::new(manager),
            groups,
            pool,
            caching: config.prefix_caching,
            sharing: config.prefix_caching && config.in_flight_sharing,
            // A state begins at a block boundary, so copied tokens would be computed all the same.
            partial_reuse: config.prefix_caching && config.partial_reuse && config.state.is_none(),
            matched: Match::default(),
            taken: Vec::new(),
            state_work: Vec::new(),
        }
    }

    pub(crate) fn begin_step(&mut self, token_budget: usize) -> Result<PlanKey, Error> {
        let key = self.steps.begin(token_budget)?;
        self.pool.set_open_steps(self.steps.open_steps());
        Ok(key)
    }

    /// The sequence of a key; an error if an open plan holds it.
    pub(crate) fn at_rest(&self, key: SeqKey) -> Result<&Sequence, Error> {
        let seq = self.seqs.get(key)?;
        match seq.plans {
            PlanSet::NONE => Ok(seq),
            _ => Err(Error::InPlan { sequence: seq.id }),
        }
    }

    /// Allocates blocks until the table has `indices` logical blocks. The caller has checked that they are available.
    pub(crate) fn allocate(&mut self, seq_idx: u32, indices: usize) {
        let seq = self.seqs.at_mut(seq_idx);
        let missing = indices.saturating_sub(seq.table.end()) * seq.table.groups();
        if missing == 0 {
            return;
        }
        if seq.table.groups() == 1 {
            self.pool.take(missing, seq.tail_of_one());
        } else {
            let mut taken = Vec::new();
            self.pool.take(missing, &mut taken);
            seq.push_indices(&taken);
        }
    }

    /// Allocates a block that is in no table yet.
    pub(crate) fn allocate_one(&mut self) -> BlockId {
        let mut taken = Vec::new();
        self.pool.take(1, &mut taken);
        taken[0]
    }

    /// Replaces a block of a table; returns the old one.
    pub(crate) fn replace_block(
        &mut self,
        seq_idx: u32,
        group: usize,
        index: usize,
        block: BlockId,
    ) -> BlockId {
        let seq = self.seqs.at_mut(seq_idx);
        seq.change_table(|table| table.replace(group, index, block))
    }

    /// Shortens a table to `indices` logical blocks, last entry first, so that prefixes outlive continuations.
    pub(crate) fn shorten(&mut self, seq_idx: u32, indices: usize) {
        let seq = self.seqs.at_mut(seq_idx);
        let end = seq.table.end();
        if indices < end {
            let pool = &mut self.pool;
            seq.change_table(|table| match table.groups() {
                1 => table.cut_one(indices, |blocks| pool.release_all(blocks)),
                _ => table.take_indices(indices..end, |block| pool.release(block)),
            });
        }
    }

    /// Logical blocks that are final: computed, and registered if caching is on. Windows are kept for these.
    pub(crate) fn final_indices(&self, seq: &Sequence) -> usize {
        let full = self.groups.index_of(seq.computed);
        match self.caching && !seq.is_private {
            true => full.min(seq.registered.end()),
            false => full,
        }
    }

    /// Releases the blocks that no later token of the sequence reads: those before the windows of its last final one.
    pub(crate) fn slide(&mut self, seq_idx: u32) {
        if self.groups.have_windows() {
            let num_slid = self.slide_windows(seq_idx);
            self.pool.stats.slid_blocks += num_slid;
        }
    }

    /// Returns how many blocks were released.
    fn slide_windows(&mut self, seq_idx: u32) -> u64 {
        let seq = self.seqs.at(seq_idx);
        let indices = self.final_indices(seq);
        let starts = |group| self.groups.first_index(group, indices).min(seq.table.end());
        if (0..self.groups.len()).all(|group| starts(group) <= seq.table.start(group)) {
            return 0;
        }
        let (pool, mut released) = (&mut self.pool, 0);
        self.seqs.at_mut(seq_idx).change_table(|table| {
            for group in 0..self.groups.len() {
                let start = self.groups.first_index(group, indices);
                table.slide(group, start, |block| {
                    released += 1;
                    pool.release(block);
                });
            }
        });
        released
    }

    /// The longest prefix of a sequence's registered logical blocks that is ready and of which no window has slid.
    pub(crate) fn ready_prefix(&self, key: SeqKey) -> Result<PrefixBlocks, Error> {
        let seq = self.seqs.get(key)?;
        let registered = seq.registered;
        let starts = (0..self.groups.len()).map(|group| seq.table.start(group));
        let first = starts.min().unwrap_or(0).min(registered.end());
        let is_ready = |index: usize| {
            seq.table
                .blocks_at(index)
                .all(|block| self.pool.is_ready(block))
        };
        let missing = (first..registered.end()).find(|&index| !is_ready(index));
        let indices = missing.unwrap_or(registered.end());
        // With fewer logical blocks, a window would begin earlier still.
        let needed = |group| self.groups.first_index(group, indices);
        let prefix = seq.table.prefix(indices, needed).filter(|_| indices > 0);
        let unused = registered.end() - indices;
        Ok(match prefix {
            Some(table) => {
                let end = self.pool.tree().ancestor(registered.last, unused);
                PrefixBlocks {
                    table,
                    end,
                    snapshot: self.last_snapshot(end, indices),
                }
            }
            None => PrefixBlocks::none(self.groups.len()),
        })
    }

    pub(crate) fn match_prefix(&mut self, tokens: Labelled<'_>, namespace: &[u8]) -> PrefixBlocks {
        let Some(root) = self.pool.tree().root(namespace) else {
            return PrefixBlocks::none(self.groups.len());
        };
        let (matched, groups, pool) = (&mut self.matched, &self.groups, &mut self.pool);
        let root = Registered::at_root(root);
        if pool.snapshots().is_some() {
            let limits = (0, tokens.tokens.len());
            pool.find_match_with_state(matched, groups, tokens, root, Purpose::Read, limits);
        } else {
            pool.find_match(matched, groups, tokens, root, Purpose::Read);
        }
        match matched.num_indices {
            0 => PrefixBlocks::none(groups.len()),
            indices => PrefixBlocks {
                table: BlockTable::of_match(matched, 0, groups),
                end: matched.last,
                snapshot: self.last_snapshot(self.matched.last, indices),
            },
        }
    }

    /// The positions of the snapshots of the longest cached prefix that are not spare, in order.
    pub(crate) fn snapshot_positions(
        &mut self,
        tokens: Labelled<'_>,
        namespace: &[u8],
    ) -> Vec<usize> {
        let matched = self.match_prefix(tokens, namespace);
        let (mut at, mut length) = (matched.end, matched.table.end());
        let mut positions = Vec::new();
        while at != NodePosition::NONE
            && let Some((snapshot, indices)) = self.pool.last_snapshot(at, length)
        {
            if !self.pool.is_spare(snapshot) {
                positions.push(indices * self.groups.block_size());
            }
            let tree = self.pool.tree();
            (at, length) = (tree.ancestor(snapshot, 1), indices - 1);
        }
        positions.reverse();
        positions
    }

    /// The position and the blocks of the last snapshot of a prefix of `indices` logical blocks that ends at `end`.
    fn last_snapshot(&self, end: NodePosition, indices: usize) -> (usize, Vec<BlockId>) {
        let Some((at, length)) = self.pool.last_snapshot(end, indices) else {
            return (0, Vec::new());
        };
        let blocks = self.pool.snapshot_at(at).unwrap_or_default();
        (length * self.groups.block_size(), blocks.to_vec())
    }

    /// Puts a pin's blocks into the table of a sequence that has none.
    pub(crate) fn attach(&mut self, key: SeqKey, pin: &Pin) -> Result<(), Error> {
        let seq = self.at_rest(key)?;
        let (tokens, blocks) = (pin.num_tokens(), seq.table.len());
        if pin.manager() != key.manager {
            return Err(Error::PinOfAnotherManager { tokens });
        }
        let (pin_version, weights_version) = (pin.weights_version(), self.pool.weights_version());
        if pin_version != weights_version && pin.end().is_some() {
            return Err(Error::OldPin {
                tokens,
                pin_version,
                weights_version,
            });
        }
        if !seq.table.is_empty() {
            return Err(Error::NotFresh { blocks });
        }
        let Some(last) = pin.end() else {
            return Ok(());
        };
        let fits = tokens <= seq.tokens.len() && {
            let prefix = seq.labelled().first(tokens);
            self.pool.tree().leads_to(seq.root, prefix, last)
        };
        if !fits {
            return Err(Error::PinMismatch {
                pin_tokens: tokens,
                sequence_tokens: seq.tokens.len(),
            });
        }
        if self.has_state() {
            return Ok(()); // its first prefill matches them together with a snapshot
        }
        let computed = tokens.min(seq.tokens.len() - 1);
        let registered = Registered::new(last, pin.table().end());
        let seq = self.seqs.at_mut(key.seq_idx);
        seq.set_table(pin.table().clone(), registered, computed);
        seq.count_reused(computed, 0);
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
        let full = self.groups.index_of(computed);
        let (last, indices) = (seq.registered.last, seq.registered.end());
        let last = self
            .pool
            .tree()
            .ancestor(last, indices.saturating_sub(full));
        let mut registered = Registered::new(last, indices.min(full));
        // Logical blocks that are yet to be registered are kept, too.
        let final_indices = match self.caching && !seq.is_private {
            true => registered.end(),
            false => full,
        };
        let needed = |group| self.groups.first_index(group, final_indices);
        // A running state cannot be cut.
        let has_all = (0..self.groups.len())
            .all(|group| seq.table.start(group) <= self.groups.first_index(group, full))
            && (!self.has_state() || num_tokens >= seq.computed);
        let table = seq.table.prefix(self.groups.end_of(computed), needed);
        let table = table.filter(|_| has_all).unwrap_or_else(|| {
            computed = 0;
            registered = Registered::at_root(seq.root);
            BlockTable::new(self.groups.len())
        });
        let tokens = seq.tokens[..num_tokens].to_vec();
        let (root, read_cache, cached) = (
            seq.root,
            seq.read_cache,
            (seq.cached as usize).min(computed),
        );
        let restored = (seq.restored as usize).min(computed - cached);
        let old_weights = (seq.is_private && computed > 0).then_some(seq.weights_version);
        let state = seq.state.clone().filter(|_| computed > 0);
        let switch = seq.switch.clone();
        for group in 0..self.groups.len() {
            self.pool.hold_all(table.blocks_of(group));
        }
        self.pool.share_root(root);
        let shared_indices = self.groups.end_of(computed);
        self.seqs.at_mut(key.seq_idx).share_indices(shared_indices);
        let version = self.pool.weights_version();
        let key = self.seqs.insert(tokens, root, read_cache, version);
        let fork = self.seqs.at_mut(key.seq_idx);
        fork.set_switch(switch);
        if let Some(version) = old_weights {
            fork.go_on_with(version);
        }
        fork.set_table(table, registered, computed);
        fork.count_reused(cached, restored);
        fork.share_indices(shared_indices);
        if let Some(state) = state {
            *fork.track_mut() = StateTrack {
                answer: 0,
                ..*state
            };
        }
        Ok(key)
    }

    pub(crate) fn append(&mut self, key: SeqKey, tokens: &[u32]) -> Result<(), Error> {
        self.at_rest(key)?;
        self.seqs.at_mut(key.seq_idx).append(tokens);
        Ok(())
    }

    /// Releases the blocks after the first `num_tokens` tokens. Returns how many.
    pub(crate) fn trim(&mut self, key: SeqKey, num_tokens: usize) -> Result<usize, Error> {
        let seq = self.at_rest(key)?;
        let computed = seq.computed;
        if num_tokens < computed {
            return Err(Error::TrimBelowComputed {
                num_tokens,
                computed,
            });
        }
        let before = seq.table.end();
        let keep = self.groups.end_of(num_tokens);
        let keep = keep.max(seq.registered.end()).min(before);
        self.shorten(key.seq_idx, keep);
        Ok((before - keep) * self.groups.len())
    }

    /// Releases a sequence's blocks and keeps its tokens.
    pub(crate) fn reset(&mut self, key: SeqKey) -> Result<(), Error> {
        self.at_rest(key)?;
        self.shorten(key.seq_idx, 0);
        self.leave_snapshots(key.seq_idx);
        let seq = self.seqs.at_mut(key.seq_idx);
        let root = Registered::at_root(seq.root);
        seq.set_table(BlockTable::new(self.groups.len()), root, 0);
        seq.begin_with(self.pool.weights_version());
        Ok(())
    }

    /// Ends a sequence, of a caller's key.
    pub(crate) fn free(&mut self, key: SeqKey) -> Result<(), Error> {
        self.seqs.get(key)?;
        self.end_sequence(key.seq_idx);
        Ok(())
    }

    /// As `free`, but does not leave blocks after its first `num_tokens` tokens cached.
    pub(crate) fn free_keeping(&mut self, key: SeqKey, num_tokens: usize) -> Result<(), Error> {
        self.seqs.get(key)?;
        let indices = self.groups.index_of(num_tokens);
        self.seqs.at_mut(key.seq_idx).keep_indices(indices);
        self.end_sequence(key.seq_idx);
        Ok(())
    }

    /// Ends a sequence; one that an open plan holds ends with the plan.
    pub(crate) fn end_sequence(&mut self, seq_idx: u32) {
        let seq = self.seqs.at_mut(seq_idx);
        seq.set_dropped();
        if seq.plans != PlanSet::NONE {
            return;
        }
        if seq.registered.end() > seq.kept_indices as usize {
            self.discard_indices(seq_idx);
        }
        self.shorten(seq_idx, 0);
        self.leave_snapshots(seq_idx);
        let (registered, root) = self.seqs.remove(seq_idx);
        self.pool.release_root(root, registered.last);
    }

    /// Removes a sequence's registered blocks after `kept_indices` from the prefix index, except those with other
    /// references. Includes blocks that its windows have passed.
    #[cold]
    fn discard_indices(&mut self, seq_idx: u32) {
        let (seq, tree) = (self.seqs.at(seq_idx), self.pool.tree());
        let (kept, indices) = (seq.kept_indices as usize, seq.registered.end());
        let (mut end, mut discarded) = (seq.registered.last, Vec::new());
        for index in (kept..indices).rev() {
            for group in 0..self.groups.len() {
                let own = seq.table.get(group, index);
                let others = |block: BlockId| self.pool.refs(block) - u32::from(own == Some(block));
                discarded.extend(tree.block(end, group).filter(|&block| others(block) == 0));
            }
            end = tree.ancestor(end, 1);
        }
        self.pool.discard(&discarded);
        let kept = Registered::new(end, kept);
        self.seqs.at_mut(seq_idx).register(kept);
    }
}
