//! Explanations: where the match of a prompt ends, and why.

use super::State;
use crate::explain::{Explanation, Miss, MissReason};
use crate::ids::NodePosition;
use crate::pool::{Pool, Purpose};
use crate::sequence::{Registered, Sequence, Sequences};
use crate::switch::Labelled;

/// A prompt of which a prefix was matched.
struct Prompt<'a> {
    tokens: Labelled<'a>,
    namespace: &'a [u8],
    /// The block after the match.
    position: usize,
    end: usize,
    /// The id of the sequence that has it, or 0.
    sequence: u64,
}

impl State {
    /// Explains a prompt. It changes nothing.
    pub(crate) fn explain(&mut self, prompt: Labelled<'_>, namespace: &[u8]) -> Explanation {
        let block_size = self.groups.block_size();
        let mut explanation = Explanation::default();
        let miss = |indices, reason| {
            let position = indices * block_size;
            Some(Miss { position, reason })
        };
        if !self.caching {
            explanation.miss = miss(0, MissReason::ReadsDisabled);
            return explanation;
        }
        self.matched.begin(NodePosition::NONE, 0);
        let mut ready = 0;
        if self.has_state() {
            return self.explain_with_state(prompt, namespace);
        }
        let (matched, groups) = (&mut self.matched, &self.groups);
        if let Some(root) = self.pool.tree().root(namespace) {
            let (pool, root) = (&mut self.pool, Registered::at_root(root));
            pool.find_match(matched, groups, prompt, root, Purpose::Read);
            ready = matched.num_indices;
            let purpose = Purpose::Prefill { replay: 0 };
            pool.find_match(matched, groups, prompt, root, purpose);
        }
        explanation.num_pool_tokens = ready * block_size;
        let is_loading = self.pool.any_loading() && {
            let matched = self.matched_blocks_after(0);
            self.pool.transfer_of(matched).is_some()
        };
        if is_loading {
            explanation.miss = miss(ready, MissReason::Loading);
            return explanation;
        }
        explanation.num_in_flight_tokens = (self.matched.num_indices - ready) * block_size;
        if self.matched.last != NodePosition::NONE {
            explanation.num_copied_tokens = self.num_copied(prompt);
        }
        if self.matched.num_indices * block_size == prompt.tokens.len() {
            let last = match explanation.num_in_flight_tokens {
                0 => &mut explanation.num_pool_tokens,
                _ => &mut explanation.num_in_flight_tokens,
            };
            *last = last.saturating_sub(1);
        }
        let position = self.matched.num_indices * block_size;
        let prompt = Prompt {
            tokens: prompt,
            namespace,
            position,
            end: position + block_size,
            sequence: 0,
        };
        explanation.miss = find_miss(&mut self.pool, &self.seqs, self.matched.last, prompt);
        explanation
    }

    /// As `explain`, for a model with state layers: it reuses the tokens before the last snapshot.
    fn explain_with_state(&mut self, prompt: Labelled<'_>, namespace: &[u8]) -> Explanation {
        let num_tokens = prompt.tokens.len();
        let block_size = self.groups.block_size();
        let mut explanation = Explanation::default();
        let mut ready = 0;
        (self.matched.snapshot, self.matched.start) = (NodePosition::NONE, 0);
        if let Some(root) = self.pool.tree().root(namespace) {
            let (matched, groups, pool) = (&mut self.matched, &self.groups, &mut self.pool);
            let (root, limits) = (Registered::at_root(root), (0, num_tokens.saturating_sub(1)));
            pool.find_match_with_state(matched, groups, prompt, root, Purpose::Read, limits);
            (ready, explanation.num_pool_tokens) = (matched.num_indices, matched.start);
            let purpose = Purpose::Prefill { replay: 0 };
            pool.find_match_with_state(matched, groups, prompt, root, purpose, limits);
        }
        let matched = || self.matched_blocks_after(0);
        let reason = if self.pool.any_loading() && self.pool.transfer_of(matched()).is_some() {
            Some(MissReason::Loading)
        } else if matched().any(|block| !self.pool.is_ready(block)) {
            Some(MissReason::NotYetComputed)
        } else {
            None
        };
        let position = self.matched.num_indices * block_size;
        explanation.miss = match reason {
            Some(reason) => Some(Miss {
                position: ready * block_size,
                reason,
            }),
            None => self.no_snapshot(num_tokens, position).or_else(|| {
                let prompt = Prompt {
                    tokens: prompt,
                    namespace,
                    position,
                    end: position + block_size,
                    sequence: 0,
                };
                find_miss(&mut self.pool, &self.seqs, self.matched.last, prompt)
            }),
        };
        explanation
    }

    /// The end of the reuse, if the current match of `cached_to` tokens goes further than its last snapshot.
    fn no_snapshot(&self, num_tokens: usize, cached_to: usize) -> Option<Miss> {
        let last = self.groups.index_of(num_tokens.saturating_sub(1)) * self.groups.block_size();
        let position = self.matched.start;
        let reason = MissReason::NoSnapshot { cached_to };
        (self.has_state() && position < cached_to.min(last)).then_some(Miss { position, reason })
    }

    /// Records why a sequence computes tokens, given its match, before it computes any.
    pub(crate) fn explain_prefill(&mut self, seq_idx: u32) {
        let (seq, block_size) = (self.seqs.at(seq_idx), self.groups.block_size());
        if seq.planned_end > (seq.cached + seq.restored) as usize || seq.is_private {
            return;
        }
        let indices = seq.registered.end() + self.matched.num_indices;
        let position = indices * block_size;
        let miss = if !self.caching || !seq.read_cache {
            let reason = MissReason::ReadsDisabled;
            Some(Miss { position, reason })
        } else if let Some(miss) = self.no_snapshot(seq.tokens.len(), position) {
            Some(miss)
        } else if indices > 0 && position + block_size > seq.tokens.len() {
            None
        } else {
            let prompt = Prompt {
                tokens: seq.labelled(),
                namespace: &self.pool.tree().namespace(seq.root),
                position,
                end: position + block_size,
                sequence: seq.id,
            };
            find_miss(&mut self.pool, &self.seqs, self.matched.last, prompt)
        };
        self.seqs.at_mut(seq_idx).set_miss(miss.map(Box::new));
    }
}

/// Where and why a match, which ends at `last`, ends before the last whole block of a prompt.
fn find_miss(
    pool: &mut Pool,
    seqs: &Sequences,
    last: NodePosition,
    prompt: Prompt<'_>,
) -> Option<Miss> {
    let Prompt {
        tokens: labelled,
        position,
        end,
        ..
    } = prompt;
    let (tokens, index) = (labelled.tokens, position / (end - position));
    let switch = labelled.switch_before(index + 1);
    let Some(block) = tokens.get(position..end) else {
        let reason = MissReason::BelowOneBlock;
        return (position == 0).then_some(Miss { position, reason });
    };
    let root = pool.tree().root(prompt.namespace);
    let is_to_come = |seq: &Sequence| {
        let computes = seq.id != prompt.sequence && seq.planned_end > 0 && seq.computed < end;
        computes
            && !seq.is_private
            && Some(seq.root) == root
            && seq.labelled().switch_before(index + 1) == switch
            && seq.tokens.get(position..end) == Some(block)
            && seq.tokens[..position] == tokens[..position]
    };
    let reason = if seqs.iter().any(is_to_come) {
        MissReason::NotYetComputed
    } else {
        let block = (block, labelled.label(index));
        pool.explain_block(last, block, prompt.namespace, position)
    };
    Some(Miss { position, reason })
}
