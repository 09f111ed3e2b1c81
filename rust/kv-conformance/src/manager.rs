//! The calls of a block manager that this suite needs.

/// A block manager under test.
///
/// A sequence goes by the id that [`add`](Self::add) gives it. Calls belong to one step until [`commit`](Self::commit):
/// [`prefill`](Self::prefill) and [`decode`](Self::decode) plan sequences, each at most once. A planned sequence is not
/// appended to, forked, preempted or freed before the commit. Blocks are numbered from 0.
///
/// A panic counts as a difference.
pub trait BlockManager {
    /// Properties that are checked beyond correctness.
    fn promises(&self) -> Promises;

    /// Adds a sequence of at least one token. Sequences of different namespaces share no block.
    fn add(&mut self, id: u64, namespace: u8, tokens: &[u32]);

    /// Plans up to `max_tokens` of the uncomputed tokens, after it reuses cached blocks. At least one token is
    /// computed. `None`: too few blocks; nothing was changed.
    fn prefill(&mut self, id: u64, max_tokens: usize) -> Option<Prefilled>;

    /// Plans the one token that is left to compute. False: too few blocks; nothing was changed.
    fn decode(&mut self, id: u64) -> bool;

    /// Blocks that the step copies before it computes, as (source, destination), in order.
    fn copies(&mut self) -> Vec<(u32, u32)>;

    /// The states that planned sequences begin with, copied from blocks before the step computes; without blocks, the
    /// state of no token. A sequence that is not among them continues its running state, and a fork that of its parent.
    /// Called where [`Promises::state_blocks`] is not 0.
    fn state_loads(&mut self) -> Vec<StateCopy> {
        Vec::new()
    }

    /// The states that are copied to blocks after the step has computed: each of its sequence at the end of its tokens.
    fn state_saves(&mut self) -> Vec<StateCopy> {
        Vec::new()
    }

    /// Ends the step, which was computed. `sampled` has a token for each sequence whose last token was planned, in the
    /// order of planning; it is appended.
    fn commit(&mut self, sampled: &[(u64, u32)]);

    /// Appends known tokens, such as the next turn of a conversation.
    fn append(&mut self, id: u64, tokens: &[u32]);

    /// Adds a sequence with the tokens of another one, which may share its blocks. Called where
    /// [`Promises::forks`] says so.
    fn fork(&mut self, id: u64, child: u64);

    /// Releases the blocks of a sequence and keeps its tokens, which are computed again.
    fn preempt(&mut self, id: u64);

    /// Ends a sequence.
    fn free(&mut self, id: u64);

    /// The blocks of a sequence, first to last.
    fn table(&self, id: u64) -> Vec<u32>;

    /// How many of its tokens are computed, those of an open step not among them.
    fn num_computed(&self, id: u64) -> usize;

    /// Blocks that can be allocated: free ones, and cached ones that no sequence holds.
    fn available(&mut self) -> usize;
}

/// The answer to [`BlockManager::prefill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefilled {
    /// Tokens reused by this call.
    pub cached: usize,
    /// Tokens that the step computes after them.
    pub computed: usize,
}

/// A copy between the running state of a sequence and blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCopy {
    /// The sequence.
    pub id: u64,
    /// The tokens that the state stands for.
    pub position: usize,
    /// The blocks, in the order of the bytes of the state.
    pub blocks: Vec<u32>,
}

/// Properties that not every block manager has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Promises {
    /// A new sequence reuses the full blocks of a live one that begins with the same tokens.
    pub reuses_live_prefixes: bool,
    /// After a commit, live sequences hold equal full blocks once.
    pub deduplicates: bool,
    /// [`BlockManager::fork`] is implemented.
    pub forks: bool,
    /// Layers of the model keep one state per sequence, and a copy of it takes this many blocks; 0: they do not.
    pub state_blocks: usize,
}
