//! The life of sequences and leases: made, forked, lengthened, shortened, reset, freed.

use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, SeqKey};
use crate::manager::BlockManager;
use crate::matching::{Match, Prompt};
use crate::sequence::{Chain, Sequence};
use crate::shared::{Lease, SeqHandle};
use crate::trace::Call;

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
        check_namespace(namespace)?;
        let root = self.tree.hold_root(namespace);
        let key = self.sequences.insert(tokens, root, read_cache);
        self.note(|it| it.creation(key, namespace), key.id);
        Ok(SeqHandle::new(&self.shared, key))
    }

    /// A lease on the longest cached prefix of `tokens`, in whole blocks; perhaps on none.
    pub fn match_prefix(&mut self, tokens: &[u32], namespace: &[u8]) -> Result<Lease, Error> {
        self.read_mail();
        check_namespace(namespace)?;
        let Some(root) = self.tree.root(namespace) else {
            self.note(|_| Call::match_prefix(tokens, namespace), 0_usize);
            return Ok(self.grant(Box::default(), NodeIdx::NONE, 0));
        };
        let prompt = Prompt {
            tokens,
            tip: root,
            rows: 0,
            hashes: None,
        };
        let mut found = std::mem::replace(&mut self.matched, Match::NOTHING);
        let (blocks, open) = (&self.blocks, self.open_steps());
        let is_ready = |block: BlockId| blocks[block.at()].is_ready(open);
        found.walk(&mut self.tree, &self.groups, prompt, is_ready);
        let lease = self.grant(found.blocks.as_slice().into(), found.tip, found.rows);
        self.matched = found;
        self.note(
            |_| Call::match_prefix(tokens, namespace),
            lease.num_blocks(),
        );
        Ok(lease)
    }

    /// A lease on the longest prefix of a sequence's registered blocks whose KV is there, and of which
    /// no window lacks a block that a token after it sees; perhaps on none.
    pub fn lease(&mut self, key: SeqKey) -> Result<Lease, Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        let rows = self.whole_rows(seq);
        let mut path = std::iter::successors(Some(seq.chain.tip), |&node| self.tree.parent(node));
        let end = path.nth(seq.chain.blocks - rows);
        let groups = self.groups.len();
        let mut table: Box<[BlockId]> = seq.table[..rows * groups].into();
        for (at, entry) in table.iter_mut().enumerate() {
            if at / groups < self.groups.first_row(at % groups, rows) {
                *entry = BlockId::NONE; // no token after the prefix sees it
            }
        }
        let lease = self.grant(table, end.expect("inside the chain"), rows);
        self.note(|_| Call::lease(key.id), lease.num_blocks());
        Ok(lease)
    }

    /// The most registered rows that another sequence could go on from: those that are there, if no
    /// window of the last of them has slid. Of fewer rows a window would begin even earlier.
    fn whole_rows(&self, seq: &Sequence) -> usize {
        let registered = &seq.table[..seq.chain.blocks * self.groups.len()];
        let is_there = |&block: &BlockId| block == BlockId::NONE || self.is_ready(block);
        let first = registered.iter().position(|block| !is_there(block));
        let rows = first.unwrap_or(registered.len()) / self.groups.len();
        if self.has_windows_of(seq, rows) {
            rows
        } else {
            0
        }
    }

    /// Whether a sequence has every row of the windows at the end of its first `rows` rows.
    fn has_windows_of(&self, seq: &Sequence, rows: usize) -> bool {
        let groups = self.groups.len();
        // Nothing is missing after the first block of a group.
        (0..groups).all(|group| {
            let first = self.groups.first_row(group, rows);
            seq.table.get(first * groups + group) != Some(&BlockId::NONE)
        })
    }

    fn grant(&mut self, table: Box<[BlockId]>, end: NodeIdx, rows: usize) -> Lease {
        for block in table.iter().copied().filter_map(BlockId::some) {
            self.blocks[block.at()].used_again = true;
            self.leave_queue(block);
        }
        let end = if rows == 0 { NodeIdx::NONE } else { end };
        let num_tokens = rows * self.config.block_size;
        let serial = self.next_lease();
        Lease::over(&self.shared, serial, table, end, num_tokens)
    }

    /// Puts a lease's blocks into the table of a sequence that has none. The lease stays in force.
    pub fn attach(&mut self, key: SeqKey, lease: &Lease) -> Result<(), Error> {
        self.read_mail();
        let seq = self.sequences.get(key)?;
        if lease.manager() != self.shared.manager {
            return Err(Error::ForeignLease {
                tokens: lease.num_tokens(),
            });
        }
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        if !seq.table.is_empty() {
            return Err(Error::NotFresh {
                blocks: seq
                    .table
                    .iter()
                    .filter(|block| block.some().is_some())
                    .count(),
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
        let rows = lease.num_tokens() / self.config.block_size;
        let path = std::iter::successors(Some(end), |&node| self.tree.parent(node));
        let mut hashes: Vec<u128> = path.take(rows).map(|node| self.tree.hash(node)).collect();
        hashes.reverse();
        let seq = self.sequences.at_mut(key.slot);
        if seq.hashes.len() < hashes.len() {
            seq.hashes = hashes;
        }
        seq.table.extend_from_slice(lease.table());
        seq.chain = Chain {
            tip: end,
            blocks: rows,
            private: false,
        };
        seq.stand(lease.num_tokens().min(seq.tokens.len() - 1));
        seq.cached = seq.computed;
        for block in lease.blocks() {
            self.hold_for_sequence(block);
        }
        self.note(|_| Call::attach(key.id, lease.serial()), ());
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
    /// (see [`BlockManager::copies`]); the last holder writes in place. Where a window has slid past
    /// the end of the fork, it begins without blocks and finds again what is cached.
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
        let (block_size, groups) = (self.config.block_size, self.groups.len());
        let computed = seq.computed.min(num_tokens);
        let computed = if self.can_end(seq, computed) {
            computed
        } else {
            0
        };
        let full = computed / block_size;
        let mut chain = seq.chain;
        while chain.blocks > full {
            chain.tip = self.tree.parent(chain.tip).expect("inside the chain");
            chain.blocks -= 1;
        }
        chain.private &= full > chain.blocks;
        let table = seq.table[..computed.div_ceil(block_size) * groups].to_vec();
        let tokens = seq.tokens[..num_tokens].to_vec();
        let hashes = seq.hashes[..seq.hashes.len().min(num_tokens / block_size)].to_vec();
        let sequence = seq.id;
        let (root, read_cache, cached) = (seq.root, seq.read_cache, seq.cached.min(computed));
        let parent = key.slot;
        let key = self.sequences.insert(tokens, root, read_cache);
        self.tree.hold(root);
        for block in table.iter().copied().filter_map(BlockId::some) {
            self.hold_for_sequence(block);
        }
        let shared_rows = self.groups.rows(computed);
        let parent = self.sequences.at_mut(parent);
        parent.shared_rows = parent.shared_rows.max(shared_rows);
        let fork = self.sequences.at_mut(key.slot);
        fork.shared_rows = shared_rows;
        (fork.table, fork.hashes, fork.chain) = (table, hashes, chain);
        fork.stand(computed);
        fork.cached = cached;
        self.slide(key.slot);
        self.note(|_| Call::fork(sequence, num_tokens), key.id);
        Ok(SeqHandle::new(&self.shared, key))
    }

    /// Whether the sequence still has every block that a token after its first `computed` sees.
    fn can_end(&self, seq: &Sequence, computed: usize) -> bool {
        computed == 0 || self.has_windows_of(seq, computed / self.config.block_size)
    }

    /// Adds known tokens to the end of a sequence: the next turn of a conversation, a fork's own token.
    pub fn append(&mut self, key: SeqKey, tokens: &[u32]) -> Result<(), Error> {
        self.read_mail();
        let seq = self.sequences.get_mut(key)?;
        if seq.planned > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        seq.tokens.extend_from_slice(tokens);
        self.note(|_| Call::append(key.id, tokens), ());
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
        let groups = self.groups.len();
        let (before, keep) = (seq.table.len(), num_tokens.div_ceil(self.config.block_size));
        let keep = keep.max(seq.chain.blocks).min(before / groups);
        self.release_table(key.slot, keep);
        let given_back = before - keep * groups;
        self.note(|_| Call::trim(key.id, num_tokens), given_back);
        Ok(given_back)
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
        (seq.cached, seq.shared_rows) = (0, 0);
        seq.chain = Chain::at_root(seq.root);
        self.note(|_| Call::reset(key.id), ());
        Ok(())
    }

    /// Ends a sequence. One that an open plan holds lives in the plan until that is closed.
    pub fn free(&mut self, key: SeqKey) -> Result<(), Error> {
        self.read_mail();
        self.sequences.get(key)?;
        self.note(|_| Call::free(key.id), ());
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

/// Bytes of a namespace.
const LONGEST_NAMESPACE: usize = 65_536;

pub(crate) fn check_namespace(namespace: &[u8]) -> Result<(), Error> {
    match namespace.len() {
        ..=LONGEST_NAMESPACE => Ok(()),
        bytes => Err(Error::Namespace { bytes }),
    }
}
