//! Commit: what the step has computed becomes content.
//!
//! Each block that became full is looked up once more (late merge), so a content never has two
//! registered blocks.

use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, PlanKey};
use crate::manager::BlockManager;
use crate::plan::{Entry, More, Plan, Redirect};
use crate::trace::{Call, accepted};
use crate::tree::Step;

impl BlockManager {
    /// Takes the step as computed: `sampled` holds one token per sampling row, in plan order.
    ///
    /// Registers every block that became full, or merges it into the block that held the content
    /// first, and reports the latter. Appends the sampled tokens to their sequences. In a plan with
    /// drafts use [`BlockManager::commit_accepted`].
    pub fn commit(&mut self, plan: PlanKey, sampled: &[u32]) -> Result<Vec<Redirect>, Error> {
        self.read_mail();
        let entries = &self.oldest_plan(plan)?.entries;
        let expected = entries.iter().filter(|entry| entry.samples).count();
        if sampled.len() != expected {
            return Err(Error::SampleCount {
                expected,
                given: sampled.len(),
            });
        }
        Ok(self.close_oldest(sampled, None))
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
        Ok(self.close_oldest(tokens, Some(counts)))
    }

    /// `counts: None`: one token for each sampling sequence.
    fn close_oldest(&mut self, tokens: &[u32], counts: Option<&[usize]>) -> Vec<Redirect> {
        let Plan {
            key,
            mut entries,
            copies,
            fenced,
            ..
        } = self.open.remove(0);
        self.shared.close_plan(key);
        let mut redirects = Vec::new();
        // First: what a later entry announced may be the parent of what an earlier one registers.
        for entry in &entries {
            if let Some(more) = &entry.more {
                self.tell_announced(entry.slot, more);
            }
        }
        let (mut rest, mut sampling) = (tokens, 0);
        let mut dropped = Vec::new();
        for entry in &entries {
            let mut accepted = &[][..];
            if entry.samples {
                let count = counts.map_or(1, |counts| counts[sampling]);
                (accepted, rest) = rest.split_at(count);
                sampling += 1;
            }
            self.commit_entry(entry, accepted, key.serial as u32, &mut redirects);
            if self.close_entry(entry) {
                dropped.push(entry.slot);
            }
        }
        // Afterwards: a dropped sequence's blocks are there for the whole batch to merge into.
        for slot in dropped {
            self.drop_sequence(slot);
        }
        entries.clear();
        self.spare_entries = entries;
        self.lift_fence(fenced);
        self.stats.copied_blocks += copies.len() as u64;
        self.stats.committed_steps += 1;
        self.note(
            |_| Call::commit(key.serial, tokens, counts.map_or(&[][..], accepted)),
            &redirects,
        );
        redirects
    }

    /// A committed plan does not hold the sequence any more. Whether that was all that did.
    #[inline]
    fn close_entry(&mut self, entry: &Entry) -> bool {
        let seq = self.sequences.at_mut(entry.slot);
        seq.planned -= 1;
        if let Some(more) = &entry.more {
            seq.cached += more.adopted;
            if !more.drafts.is_empty() {
                seq.speculating = false;
                seq.ahead = seq.computed;
            }
        }
        if seq.planned == 0 {
            seq.last_plan = 0;
        }
        seq.planned == 0 && seq.dropped
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
            let drafts = &entry.more().drafts;
            let fits = (1..=drafts.len() + 1).contains(&accepted);
            if !fits || mine[..accepted - 1] != drafts[..accepted - 1] {
                return Err(Error::Accepted {
                    sequence: self.sequences.at(entry.slot).id,
                    accepted,
                    drafts: drafts.len(),
                });
            }
        }
        Ok(())
    }

    /// Appends what the sequence accepted and registers what became full.
    #[inline]
    fn commit_entry(
        &mut self,
        entry: &Entry,
        accepted: &[u32],
        step: u32,
        redirects: &mut Vec<Redirect>,
    ) {
        let seq = self.sequences.at_mut(entry.slot);
        seq.computed = entry.start + entry.len;
        if let [token] = accepted {
            seq.tokens.push(*token);
            seq.pending -= 1;
        } else if !accepted.is_empty() {
            seq.tokens.extend_from_slice(accepted);
            seq.pending -= 1;
        }
        self.stats.computed_tokens += entry.len as u64;
        if let Some(more) = &entry.more {
            self.commit_more(entry, more, accepted.len());
        }
        let seq = self.sequences.at(entry.slot);
        let full = self.groups.row_of(seq.computed);
        if full > seq.chain.blocks && !seq.chain.private && self.config.prefix_caching {
            for row in seq.chain.blocks..full {
                if !self.register(entry.slot, row, step, redirects) {
                    break;
                }
            }
        }
        self.stats.slid_blocks += self.slide(entry.slot);
    }

    /// What only prefills and drafts do; `accepted` tokens.
    fn commit_more(&mut self, entry: &Entry, more: &More, accepted: usize) {
        let stats = &mut self.stats;
        stats.in_flight_blocks += more.in_flight as u64;
        stats.present_blocks += more.present.len() as u64;
        if more.prefill {
            stats.prompt_tokens += (more.adopted + entry.len) as u64;
            stats.cached_tokens += more.adopted as u64;
            stats.hit_blocks += more.matched_blocks as u64;
            stats.slid_blocks += more.unseen.len() as u64;
        }
        if !more.drafts.is_empty() {
            stats.draft_tokens += more.drafts.len() as u64;
            stats.accepted_draft_tokens += accepted as u64 - 1;
            let seq = self.sequences.at_mut(entry.slot);
            seq.computed -= more.drafts.len() + 1 - accepted;
        }
    }

    /// Contents that the entry announced are there now.
    fn tell_announced(&mut self, slot: u32, more: &More) {
        let groups = self.groups.len();
        if more.present.is_empty() && !self.config.events {
            self.stats.registered_blocks += more.announced as u64;
            return;
        }
        for row in more.announce_from..more.announce_from + more.announced {
            // A content of which a block was there before is no news.
            let entries = row * groups..(row + 1) * groups;
            if entries.clone().any(|at| more.is_present(at)) {
                continue;
            }
            self.stats.registered_blocks += 1;
            if self.config.events {
                let table = &self.sequences.at(slot).table[..];
                // The plan after this one may have put it out of sight.
                let newest = self.open.last();
                let table = newest.map_or(table.into(), |plan| plan.table_before(slot, table));
                let node = self.blocks[table[entries.start].at()].node;
                self.tell_stored(slot, node);
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
        let found = self.tree.step(tip, tokens, seq.hashes.get(row).copied());
        let hash = found.hash(&self.tree);
        let seq = self.sequences.at_mut(slot);
        seq.note_hash(row, hash); // also where this is asked again
        let tokens = &seq.tokens[row * block_size..][..block_size];
        let node = match found {
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
            self.blocks[mine.at()].used_again |= self.blocks[first.at()].used_again;
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
