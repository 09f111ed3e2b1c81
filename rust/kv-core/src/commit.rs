//! Commit: what the step has computed becomes content.
//!
//! Each block that became full is looked up once more (late merge), so a content never has two
//! registered blocks.

use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, PlanKey};
use crate::manager::BlockManager;
use crate::plan::{Entry, Plan, Redirect};
use crate::trace::{Call, accepted};
use crate::tree::Step;

impl BlockManager {
    /// Takes the step as computed: `sampled` holds one token per sampling row, in plan order.
    ///
    /// Registers every block that became full, or merges it into the block that held the content
    /// first, and reports the latter. Appends the sampled tokens to their sequences. In a plan with
    /// drafts use [`BlockManager::commit_accepted`].
    pub fn commit(&mut self, plan: PlanKey, sampled: &[u32]) -> Result<Vec<Redirect>, Error> {
        let entries = &self.oldest_plan(plan)?.entries;
        let expected = entries.iter().filter(|entry| entry.samples).count();
        if sampled.len() != expected {
            return Err(Error::SampleCount {
                expected,
                given: sampled.len(),
            });
        }
        self.commit_accepted(plan, sampled, &vec![1; expected])
    }

    /// Takes the step as computed: `counts` says how many tokens each sampling sequence accepted, in
    /// plan order, and `tokens` holds them, one sequence after the other.
    ///
    /// A sequence accepts the drafts that turned out right and one token after them.
    pub fn commit_accepted(
        &mut self,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<Vec<Redirect>, Error> {
        self.read_mail();
        self.check_accepted(plan, tokens, counts)?;
        let Plan {
            key,
            entries,
            copies,
            fenced,
            ..
        } = self.open.pop_front().expect("checked above");
        self.shared.close_plan(key);
        let mut redirects = Vec::new();
        let all = (tokens, counts);
        let (mut tokens, mut counts) = (tokens, counts.iter());
        // First: what a later entry announced may be the parent of what an earlier one registers.
        for entry in &entries {
            self.tell_announced(entry);
        }
        for entry in &entries {
            let mut end = entry.start + entry.len;
            if entry.samples
                && let Some(&count) = counts.next()
            {
                let (accepted, rest) = tokens.split_at(count);
                tokens = rest;
                let seq = self.sequences.at_mut(entry.slot);
                seq.tokens.extend_from_slice(accepted);
                seq.pending -= 1;
                end -= entry.drafts.len() + 1 - count;
                self.stats.draft_tokens += entry.drafts.len() as u64;
                self.stats.accepted_draft_tokens += count as u64 - 1;
            }
            self.commit_entry(entry, end, key.serial as u32, &mut redirects);
            self.close_entry(entry);
        }
        // Afterwards: a dropped sequence's blocks are there for the whole batch to merge into.
        for entry in &entries {
            let seq = self.sequences.at(entry.slot);
            if seq.dropped && seq.planned == 0 {
                self.drop_sequence(entry.slot);
            }
        }
        self.lift_fence(fenced);
        self.stats.copied_blocks += copies.len() as u64;
        self.stats.committed_steps += 1;
        self.note(
            |_| Call::commit(key.serial, all.0, accepted(all.1)),
            &redirects,
        );
        Ok(redirects)
    }

    /// A committed plan does not hold the sequence any more.
    fn close_entry(&mut self, entry: &Entry) {
        let seq = self.sequences.at_mut(entry.slot);
        seq.planned -= 1;
        seq.cached += entry.adopted;
        if !entry.drafts.is_empty() {
            seq.speculating = false;
            seq.ahead = seq.computed;
        }
        if seq.planned == 0 {
            seq.last_plan = 0;
        }
    }

    fn check_accepted(&self, plan: PlanKey, tokens: &[u32], counts: &[usize]) -> Result<(), Error> {
        let entries = &self.oldest_plan(plan)?.entries;
        let sampling = entries.iter().filter(|entry| entry.samples);
        let (expected, given) = (sampling.clone().count(), counts.len());
        if expected != given {
            return Err(Error::SampleCount { expected, given });
        }
        let total = counts
            .iter()
            .fold(0, |sum: usize, &count| sum.saturating_add(count));
        if total != tokens.len() {
            return Err(Error::SampleCount {
                expected: total,
                given: tokens.len(),
            });
        }
        let mut rest = tokens;
        for (entry, &accepted) in sampling.zip(counts) {
            let (mine, others) = rest.split_at(accepted);
            rest = others;
            let drafts = entry.drafts.len();
            let fits = (1..=drafts + 1).contains(&accepted);
            if !fits || mine[..accepted - 1] != entry.drafts[..accepted - 1] {
                return Err(Error::Accepted {
                    sequence: self.sequences.at(entry.slot).id,
                    accepted,
                    drafts,
                });
            }
        }
        Ok(())
    }

    #[inline]
    fn commit_entry(
        &mut self,
        entry: &Entry,
        end: usize,
        step: u32,
        redirects: &mut Vec<Redirect>,
    ) {
        let stats = &mut self.stats;
        stats.computed_tokens += entry.len as u64;
        stats.in_flight_blocks += entry.in_flight as u64;
        stats.present_blocks += entry.present.len() as u64;
        if entry.prefill {
            stats.prompt_tokens += (entry.adopted + entry.len) as u64;
            stats.cached_tokens += entry.adopted as u64;
            stats.hit_blocks += entry.matched_blocks as u64;
        }
        let seq = self.sequences.at_mut(entry.slot);
        seq.computed = end;
        let full = seq.computed / self.config.block_size;
        if full > seq.chain.blocks && !seq.chain.private && self.config.prefix_caching {
            for index in seq.chain.blocks..full {
                if !self.register(entry.slot, index, step, redirects) {
                    break;
                }
            }
        }
        self.slide(entry.slot, entry.before.rows);
    }

    /// Contents that the entry announced are there now.
    fn tell_announced(&mut self, entry: &Entry) {
        let groups = self.groups.len();
        let rows = entry.announce_from..entry.announce_from + entry.announced;
        for row in rows {
            // A content of which a block was there before is no news.
            let entries = row * groups..(row + 1) * groups;
            if entries.clone().any(|at| entry.is_present(at)) {
                continue;
            }
            self.stats.registered_blocks += 1;
            if self.config.events {
                let block = self.sequences.at(entry.slot).table[entries.start];
                self.tell_stored(entry.slot, self.blocks[block.at()].node);
            }
        }
    }

    /// Late merge of one row that became full. False if it has no name, for good or for now.
    fn register(
        &mut self,
        slot: u32,
        row: usize,
        step: u32,
        redirects: &mut Vec<Redirect>,
    ) -> bool {
        let block_size = self.config.block_size;
        let seq = self.sequences.at(slot);
        let tip = seq.chain.tip;
        let tokens = &seq.tokens[row * block_size..][..block_size];
        let node = match self.tree.step(tip, tokens, seq.hashes.get(row).copied()) {
            Step::Missing(hash) => self.tree.insert(tip, tokens, hash),
            Step::Found(node) => node,
            Step::Collision(_) => {
                self.sequences.at_mut(slot).chain.private = true;
                self.stats.collisions += 1;
                return false;
            }
        };
        // The step after this one is to compute it: it may yet be rolled back. Asked again later.
        if !self.tree.blocks(node).all(|block| self.is_ready(block)) {
            return false;
        }
        if !self.tree.has_block(node) {
            self.stats.registered_blocks += 1;
            if self.config.events {
                self.tell_stored(slot, node);
            }
        }
        for group in 0..self.groups.len() {
            let at = row * self.groups.len() + group;
            match self.tree.block(node, group) {
                // A content without a block for this group: new, or it had lost it.
                None => {
                    let mine = self.sequences.at(slot).table[at];
                    self.store(node, group, mine, step);
                }
                Some(first) => self.merge(slot, at, first, step, redirects),
            }
        }
        self.stand_on(slot, row, node);
        true
    }

    /// A table entry whose content `first` holds already.
    fn merge(
        &mut self,
        slot: u32,
        at: usize,
        first: BlockId,
        step: u32,
        redirects: &mut Vec<Redirect>,
    ) {
        let groups = self.groups.len();
        let (group, index) = (at % groups, at / groups);
        let seq = self.sequences.at(slot);
        let (sequence, mine) = (seq.id, seq.table[at]);
        if first == mine {
            // A fork shares the block and came first.
        } else if self.queue.contains(first) {
            // An idle block (a dangling mapping): the new one takes the content over.
            let node = std::mem::replace(&mut self.blocks[first.at()].node, NodeIdx::NONE);
            self.queue.unlink(self.blocks[first.at()].list, first);
            self.enter_queue(first);
            self.store(node, group, mine, step);
            self.stats.taken_over_blocks += 1;
        } else {
            // In use: the first one wins.
            self.hold_for_sequence(first);
            let seq = self.sequences.at_mut(slot);
            seq.table[at] = first;
            seq.table_version += 1;
            // A step that is planned already may still read the duplicate.
            if !self.open.is_empty() {
                self.fence(mine);
            }
            self.let_go_for_sequence(mine);
            self.stats.merged_blocks += 1;
            redirects.push(Redirect {
                sequence,
                group,
                index,
                old_block: mine,
                new_block: first,
            });
        }
    }
}
