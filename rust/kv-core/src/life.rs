//! The life of sequences and leases: made, forked, lengthened, shortened, reset, freed.

use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, SeqKey};
use crate::manager::BlockManager;
use crate::sequence::Chain;
use crate::shared::{Lease, SeqHandle};
use crate::trace::Call;
use crate::tree::Step;

impl BlockManager {
    /// A new sequence of at least one token. It holds no block until it is planned.
    ///
    /// With `read_cache` false nothing is adopted for it: every token gets computed, which is what
    /// a caller needs who wants the logits of all prompt tokens.
    pub fn sequence(
        &mut self,
        tokens: Vec<u32>,
        namespace: &[u8],
        read_cache: bool,
    ) -> Result<SeqHandle, Error> {
        self.read_mail();
        if tokens.is_empty() {
            return Err(Error::EmptySequence);
        }
        let root = self.tree.hold_root(namespace);
        let (key, id) = self.sequences.insert(tokens, root, read_cache);
        self.note(|it| it.creation(key, namespace), id);
        Ok(SeqHandle::new(&self.shared, key, id))
    }

    /// A lease on the longest cached prefix of `tokens`, in whole blocks; perhaps on none.
    pub fn match_prefix(&mut self, tokens: &[u32], namespace: &[u8]) -> Lease {
        self.read_mail();
        let mut end = NodeIdx::NONE;
        let mut blocks = Vec::new();
        if let Some(root) = self.tree.root(namespace) {
            let mut tip = root;
            for tokens in tokens.chunks_exact(self.config.block_size) {
                let Step::Found(node) = self.tree.step(tip, tokens, None) else {
                    break;
                };
                match self.tree.block(node) {
                    Some(block) if self.is_ready(node) => blocks.push(block),
                    _ => break,
                }
                (tip, end) = (node, node);
            }
        }
        self.note(|_| Call::match_prefix(tokens, namespace), blocks.len());
        self.grant(blocks, end)
    }

    /// A lease on the registered blocks of a sequence whose KV is there.
    pub fn lease(&mut self, key: SeqKey) -> Result<Lease, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        let Chain {
            mut tip,
            mut blocks,
            ..
        } = seq.chain;
        while blocks > 0 && !self.is_ready(tip) {
            tip = self.tree.parent(tip).expect("inside the chain");
            blocks -= 1;
        }
        let end = if blocks == 0 { NodeIdx::NONE } else { tip };
        let blocks = seq.table[..blocks].to_vec();
        self.note(|it| Call::lease(it.id(key)), blocks.len());
        Ok(self.grant(blocks, end))
    }

    /// Whether a content's KV is there: no open step is to compute it.
    pub(crate) fn is_ready(&self, node: NodeIdx) -> bool {
        let step = self.tree.step_of(node);
        self.open.iter().all(|plan| plan.step() != step)
    }

    fn grant(&mut self, blocks: Vec<BlockId>, end: NodeIdx) -> Lease {
        let num_tokens = blocks.len() * self.config.block_size;
        for &block in &blocks {
            self.blocks[block.at()].used_again = true;
            self.leave_queue(block);
        }
        let serial = self.next_lease();
        Lease::over(&self.shared, serial, blocks.into(), end, num_tokens)
    }

    /// Puts a lease's blocks into the table of a sequence that has none. The lease stays in force.
    pub fn attach(&mut self, key: SeqKey, lease: &Lease) -> Result<(), Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if lease.manager() != self.shared.manager {
            return Err(Error::Foreign("lease"));
        }
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        if !seq.table.is_empty() {
            return Err(Error::NotFresh {
                blocks: seq.table.len(),
            });
        }
        let Some(end) = lease.end() else {
            return Ok(());
        };
        if !self.leads_to(end, lease.num_tokens(), seq.root, &seq.tokens) {
            return Err(Error::LeaseMismatch {
                lease_tokens: lease.num_tokens(),
                sequence_tokens: seq.tokens.len(),
            });
        }
        let path = std::iter::successors(Some(end), |&node| self.tree.parent(node));
        let mut hashes: Vec<u128> = path
            .take(lease.blocks().len())
            .map(|node| self.tree.hash(node))
            .collect();
        hashes.reverse();
        let seq = self.sequences.at_mut(key.slot);
        if seq.hashes.len() < hashes.len() {
            seq.hashes = hashes;
        }
        seq.table.extend_from_slice(lease.blocks());
        seq.chain = Chain {
            tip: end,
            blocks: lease.blocks().len(),
            private: false,
        };
        seq.stand(lease.num_tokens().min(seq.tokens.len() - 1));
        seq.cached = seq.computed;
        for &block in lease.blocks() {
            self.hold_for_sequence(block);
        }
        self.note(|it| Call::attach(it.id(key), lease.serial()), ());
        Ok(())
    }

    /// Whether the path from `root` to `end` is `num_tokens` of exactly these tokens.
    fn leads_to(&self, end: NodeIdx, num_tokens: usize, root: NodeIdx, tokens: &[u32]) -> bool {
        let Some(tokens) = tokens.get(..num_tokens) else {
            return false;
        };
        let mut at = end;
        for tokens in tokens.rchunks_exact(self.config.block_size) {
            match self.tree.parent(at) {
                Some(parent) if self.tree.tokens(at) == tokens => at = parent,
                _ => return false,
            }
        }
        at == root
    }

    /// A new sequence of the first `num_tokens` tokens of this one, on the same blocks.
    ///
    /// Nothing is copied now. A partial last block is copied when one of several holders writes to it
    /// (see [`BlockManager::copies`]); the last holder writes in place.
    pub fn fork(&mut self, key: SeqKey, num_tokens: usize) -> Result<SeqHandle, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        if num_tokens == 0 || num_tokens > seq.tokens.len() {
            return Err(Error::ForkLength {
                num_tokens,
                sequence_tokens: seq.tokens.len(),
            });
        }
        let block_size = self.config.block_size;
        let computed = seq.computed.min(num_tokens);
        let full = computed / block_size;
        let mut chain = seq.chain;
        while chain.blocks > full {
            chain.tip = self.tree.parent(chain.tip).expect("inside the chain");
            chain.blocks -= 1;
        }
        chain.private &= full > chain.blocks;
        let table = seq.table[..computed.div_ceil(block_size)].to_vec();
        let tokens = seq.tokens[..num_tokens].to_vec();
        let hashes = seq.hashes[..seq.hashes.len().min(num_tokens / block_size)].to_vec();
        let sequence = seq.id;
        let (root, read_cache, cached) = (seq.root, seq.read_cache, seq.cached.min(computed));
        let (key, id) = self.sequences.insert(tokens, root, read_cache);
        self.tree.hold(root);
        for &block in &table {
            self.hold_for_sequence(block);
        }
        let fork = self.sequences.at_mut(key.slot);
        (fork.table, fork.hashes, fork.chain) = (table, hashes, chain);
        fork.stand(computed);
        fork.cached = cached;
        self.note(|_| Call::fork(sequence, num_tokens), id);
        Ok(SeqHandle::new(&self.shared, key, id))
    }

    /// Adds known tokens to the end of a sequence: the next turn of a conversation, a fork's own token.
    pub fn append(&mut self, key: SeqKey, tokens: &[u32]) -> Result<(), Error> {
        self.read_mail();
        let seq = self.sequences.get_mut(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        seq.tokens.extend_from_slice(tokens);
        self.note(|it| Call::append(it.id(key), tokens), ());
        Ok(())
    }

    /// Gives back the blocks past the first `num_tokens` tokens: slots reserved for a speculation that
    /// was rejected, to the block. Returns how many.
    pub fn trim(&mut self, key: SeqKey, num_tokens: usize) -> Result<usize, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        if num_tokens < seq.computed {
            return Err(Error::TrimBelowComputed {
                num_tokens,
                computed: seq.computed,
            });
        }
        let (before, keep) = (seq.table.len(), num_tokens.div_ceil(self.config.block_size));
        let keep = keep.max(seq.chain.blocks).min(before);
        self.release_table(key.slot, keep);
        self.note(|it| Call::trim(it.id(key), num_tokens), before - keep);
        Ok(before - keep)
    }

    /// Takes a sequence's blocks away and keeps its tokens: preemption by recomputation.
    ///
    /// Its registered blocks become idle, so it comes back cheaply.
    pub fn reset(&mut self, key: SeqKey) -> Result<(), Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        self.release_table(key.slot, 0);
        let seq = self.sequences.at_mut(key.slot);
        seq.stand(0);
        seq.cached = 0;
        seq.chain = Chain::at_root(seq.root);
        self.note(|it| Call::reset(it.id(key)), ());
        Ok(())
    }

    /// Ends a sequence. One that an open plan holds lives in the plan until that is closed.
    pub fn free(&mut self, key: SeqKey) -> Result<(), Error> {
        self.read_mail();
        self.sequences.get(key)?;
        self.note(|it| Call::free(it.id(key)), ());
        self.drop_sequence(key.slot);
        Ok(())
    }

    pub(crate) fn drop_sequence(&mut self, slot: u32) {
        let seq = self.sequences.at_mut(slot);
        seq.dropped = true;
        if seq.planned > 0 {
            return;
        }
        self.release_table(slot, 0);
        let seq = self.sequences.remove(slot);
        self.tree.unhold(seq.root);
    }
}
