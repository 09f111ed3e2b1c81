//! Commit: caches the blocks that the step has filled.
//!
//! Each block that became full is looked up once more (late merge), so no prefix has two cached blocks.

use super::answers::Remapping;
use super::draft::total;
use super::plan::{Details, Entry, Plan, PrefillWork, Work};
use crate::error::Error;
use crate::ids::{BlockId, NodePosition, PlanKey};
use crate::sequence::{PlanSet, Registered};
use crate::state::State;

impl State {
    /// Commits the oldest step with one token for each sampling sequence.
    pub(crate) fn commit(
        &mut self,
        plan: PlanKey,
        sampled: &[u32],
    ) -> Result<Vec<Remapping>, Error> {
        let expected = self.steps.runnable_plan(plan)?.num_sampling();
        let given = sampled.len();
        if given != expected {
            return Err(Error::SampleCount { expected, given });
        }
        Ok(self.close_oldest(sampled, None))
    }

    /// As `commit`, with `counts` tokens for each sampling sequence.
    pub(crate) fn commit_accepted(
        &mut self,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<Vec<Remapping>, Error> {
        self.check_accepted(plan, tokens, counts)?;
        Ok(self.close_oldest(tokens, Some(counts)))
    }

    fn check_accepted(&self, plan: PlanKey, tokens: &[u32], counts: &[usize]) -> Result<(), Error> {
        let plan = self.steps.runnable_plan(plan)?;
        let of_tokens = (total(counts), tokens.len());
        for (expected, given) in [(plan.num_sampling(), counts.len()), of_tokens] {
            if expected != given {
                return Err(Error::SampleCount { expected, given });
            }
        }
        let mut rest = tokens;
        let sampling = plan.entries.iter().filter(|entry| entry.samples());
        for (entry, &accepted) in sampling.zip(counts) {
            let (mine, others) = rest.split_at(accepted);
            rest = others;
            let drafts = entry.drafts();
            let fits = (1..=drafts.len() + 1).contains(&accepted);
            if !fits || mine[..accepted - 1] != drafts[..accepted - 1] {
                return Err(Error::Accepted {
                    sequence: self.seqs.at(entry.seq_idx).id,
                    accepted,
                    drafts: drafts.len(),
                });
            }
        }
        Ok(())
    }

    /// Closes the oldest step. `counts` of `None`: one token for each sampling sequence.
    fn close_oldest(&mut self, tokens: &[u32], counts: Option<&[usize]>) -> Vec<Remapping> {
        let plan = self.steps.open.remove(0);
        self.pool.shared().close_plan(plan.key);
        self.pool.set_open_steps(self.steps.open_steps());
        let (step, copies, serial) = (plan.step(), plan.copies().len(), plan.key.serial);
        let Plan {
            mut entries,
            decodes,
            pinned,
            num_tokens,
            bit,
            ..
        } = plan;
        let (mut remappings, mut dropped) = (Vec::new(), Vec::new());
        let (first, others) = entries.split_at(decodes);
        // First: a logical block that a later entry registered may be the parent of one that an earlier entry registers
        // now.
        for entry in others {
            if let Some(prefill) = entry.prefill() {
                self.emit_preregistered(entry.seq_idx, prefill);
            }
        }
        let (sampled, mut rest) = tokens.split_at(decodes);
        let mut full = std::mem::take(&mut self.steps.full);
        if decodes > 0 {
            self.close_decodes(bit, first.iter().zip(sampled), &mut full, &mut dropped);
        }
        if self.has_state() && self.groups.have_windows() {
            // Windows move on before the last registered block, too, while tokens are computed again for a state.
            full.clear();
            full.extend(first.iter().map(|entry| entry.seq_idx));
        }
        for seq_idx in full.drain(..) {
            self.finish_computed(seq_idx, step, &mut remappings);
        }
        self.steps.full = full;
        let mut sampling = decodes;
        for entry in others {
            let mut accepted = &[][..];
            if entry.samples() {
                let count = counts.map_or(1, |counts| counts[sampling]);
                (accepted, rest) = rest.split_at(count);
                sampling += 1;
            }
            if self.close_entry(bit, entry, accepted) {
                dropped.push(entry.seq_idx);
            }
            self.finish_computed(entry.seq_idx, step, &mut remappings);
        }
        self.pool.stats.computed_tokens += num_tokens as u64;
        if self.has_state() {
            self.close_state_work(serial, step);
        }
        // Last, so that the whole batch can merge into the blocks of a dropped sequence.
        for seq_idx in dropped {
            self.end_sequence(seq_idx);
        }
        if !entries.is_empty() {
            clear(&mut entries);
        }
        self.steps.spare_entries = entries;
        for block in pinned {
            self.pool.unpin(block);
        }
        self.pool.stats.copied_blocks += copies as u64;
        self.pool.stats.committed_steps += 1;
        remappings
    }

    /// Registers what a sequence has computed, and releases blocks that no later token reads.
    fn finish_computed(&mut self, seq_idx: u32, step: u32, remappings: &mut Vec<Remapping>) {
        self.register_full(seq_idx, step, remappings);
        self.slide(seq_idx);
    }

    /// Registers the logical blocks that became full, or merges them into the blocks that were cached first.
    pub(super) fn register_full(
        &mut self,
        seq_idx: u32,
        step: u32,
        remappings: &mut Vec<Remapping>,
    ) {
        let seq = self.seqs.at(seq_idx);
        let full = self.groups.index_of(seq.computed);
        if seq.is_private {
            self.seqs.at_mut(seq_idx).unshare_indices(full);
            return;
        }
        if !self.caching || seq.registered.end() >= full {
            return;
        }
        for index in seq.registered.end()..full {
            let block_size = self.groups.block_size();
            let seq = self.seqs.at(seq_idx);
            let tokens = &seq.tokens[index * block_size..][..block_size];
            match { &mut self.pool }.next(seq.registered.last, tokens, seq.label(index)) {
                None => {
                    self.append_indices(seq_idx, index..full, step);
                    let Registered { last, .. } = self.seqs.at(seq_idx).registered;
                    self.pool.emit_stored(last, full - index);
                    return;
                }
                // An open step computes it and may be rolled back: it is looked up again later.
                Some(cached) if !self.pool.are_ready(cached) => return,
                Some(cached) => self.merge_block(seq_idx, index, cached, step, remappings),
            }
        }
    }

    /// Late merge of one logical block.
    fn merge_block(
        &mut self,
        seq_idx: u32,
        index: usize,
        cached: NodePosition,
        step: u32,
        remappings: &mut Vec<Remapping>,
    ) {
        if !self.pool.tree().is_held(cached) {
            self.pool.emit_stored(cached, 1);
        }
        for group in 0..self.groups.len() {
            let block = self.seqs.at(seq_idx).table.at(group, index);
            match self.pool.tree().block(cached, group) {
                // This group has lost its block.
                None => self.pool.store(cached, group, block, step),
                // A fork shares the block and was first.
                Some(first) if first == block => {}
                // An evictable block (a dangling mapping): the new one takes over.
                Some(first) if self.pool.is_queued(first) => {
                    self.pool.take_over(first, group, block, step);
                }
                // In use: the first one wins.
                Some(first) => {
                    self.pool.hold(first);
                    self.remap(seq_idx, group, index, first, remappings);
                }
            }
        }
        let registered = Registered::new(cached, index + 1);
        self.seqs.at_mut(seq_idx).register(registered);
    }

    /// Remaps a table entry to the block that was cached first.
    fn remap(
        &mut self,
        seq_idx: u32,
        group: usize,
        index: usize,
        first: BlockId,
        remappings: &mut Vec<Remapping>,
    ) {
        let duplicate = self.replace_block(seq_idx, group, index, first);
        remappings.push(Remapping {
            sequence: self.seqs.at(seq_idx).id,
            group,
            index,
            old_block: duplicate,
            new_block: first,
        });
        // A step that is planned already may still read the duplicate.
        if !self.steps.open.is_empty() {
            self.pin(duplicate);
        }
        self.pool.release(duplicate);
        self.pool.stats.merged_blocks += 1;
    }
}

/// Drops the entries of a closed plan and keeps their memory.
#[inline(never)] // as `close_decodes`
fn clear(entries: &mut Vec<Entry>) {
    entries.clear();
}

impl State {
    /// Emits the logical blocks that an entry has preregistered.
    fn emit_preregistered(&mut self, seq_idx: u32, prefill: &PrefillWork) {
        let groups = self.groups.len();
        let from = prefill.preregister_from;
        let indices = from..from + prefill.preregistered;
        if indices.is_empty() {
            return;
        }
        if prefill.already_cached.is_empty() {
            self.emit_indices(seq_idx, indices);
            return;
        }
        for index in indices {
            // A logical block of which a block was cached before is not stored again.
            let mut entries = index * groups..(index + 1) * groups;
            if !entries.any(|entry| prefill.is_already_cached(entry)) {
                self.emit_indices(seq_idx, index..index + 1);
            }
        }
    }

    /// Emits registered logical blocks of a sequence.
    fn emit_indices(&mut self, seq_idx: u32, indices: std::ops::Range<usize>) {
        let registered = self.seqs.at(seq_idx).registered;
        let tree = self.pool.tree();
        let end = tree.ancestor(registered.last, registered.end() - indices.end);
        self.pool.emit_stored(end, indices.len());
    }

    /// Appends the token of each decode of a committed plan. Adds sequences with a logical block to register to `full`,
    /// and those that end to `dropped`.
    #[inline(never)] // inlined into a commit, its loop would spill registers
    fn close_decodes<'a>(
        &mut self,
        plan: PlanSet,
        sampled: impl Iterator<Item = (&'a Entry, &'a u32)>,
        full: &mut Vec<u32>,
        dropped: &mut Vec<u32>,
    ) {
        let size = self.groups.size();
        for (entry, &token) in sampled {
            let seq = self.seqs.at_mut(entry.seq_idx);
            seq.push_sampled(token);
            if seq.commit(plan, entry.start + 1) {
                dropped.push(entry.seq_idx);
            }
            if entry.start + 1 >= size.start_of(seq.registered.end() + 1) {
                full.push(entry.seq_idx);
            }
        }
    }

    /// As `close_decodes`, for any entry, with the tokens that it accepted. True if its sequence ends.
    fn close_entry(&mut self, plan: PlanSet, entry: &Entry, accepted: &[u32]) -> bool {
        let seq = self.seqs.at_mut(entry.seq_idx);
        if let Some(&token) = accepted.first() {
            seq.push_sampled(token);
        }
        let ends = seq.commit(plan, entry.end());
        if let Some(details) = &entry.details {
            self.close_work(entry, details, accepted);
        }
        ends
    }

    /// The part of `close_entry` that depends on the work; counts it.
    fn close_work(&mut self, entry: &Entry, details: &Details, accepted: &[u32]) {
        let (seq, stats) = (self.seqs.at_mut(entry.seq_idx), &mut self.pool.stats);
        let cached_end = entry.write_from(self.groups.block_size());
        match &details.work {
            Work::Decode => {}
            Work::Prefill(prefill) => {
                let copied = prefill.copied_tokens;
                stats.prompt_tokens += (prefill.reused_tokens + details.len) as u64;
                stats.cached_tokens += prefill.reused_tokens as u64;
                let replayed = cached_end.min(entry.end()).saturating_sub(entry.start);
                stats.replayed_tokens += replayed as u64;
                stats.in_flight_blocks += prefill.in_flight as u64;
                stats.already_cached_blocks += prefill.already_cached.len() as u64;
                let matched = prefill.matched_indices > 0 || copied > 0;
                let had_started = entry.start > prefill.reused_tokens;
                stats.rematches += u64::from(matched && had_started);
                stats.partial_hits += u64::from(copied > 0);
                stats.partial_tokens += copied as u64;
                stats.hit_blocks += prefill.matched_blocks as u64;
                stats.slid_blocks += prefill.slid_blocks as u64;
                seq.count_reused(prefill.reused_tokens, 0);
                let whole = prefill.reused_tokens.saturating_sub(copied);
                let in_flight = prefill.matched_in_flight * self.groups.block_size();
                seq.count_sources(whole.min(in_flight / self.groups.len()), copied);
            }
            Work::Draft(drafts) => {
                stats.draft_tokens += drafts.len() as u64;
                stats.accepted_draft_tokens += accepted.len() as u64 - 1;
                seq.accept_drafts(&accepted[1..], drafts.len() + 1 - accepted.len());
            }
        }
    }
}
