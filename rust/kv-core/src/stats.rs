//! Figures to watch.

/// Where every block of the pool is. `free + evictable + active + pinned` is the pool, after every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PoolUsage {
    /// Blocks without content that nobody holds.
    pub free: usize,
    /// Blocks with a ready content that nobody holds: matchable, and evicted least recently used first.
    pub evictable: usize,
    /// Blocks in the tables of live sequences.
    pub active: usize,
    /// Blocks that only pins hold.
    pub pinned: usize,
}

impl PoolUsage {
    /// What admission may look at: blocks that an allocation can take.
    pub fn available(&self) -> usize {
        self.free + self.evictable
    }

    /// The pool.
    pub fn num_blocks(&self) -> usize {
        self.free + self.evictable + self.active + self.pinned
    }
}

/// Where one block is. The numbers are those of `PoolSnapshot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Nobody holds it, it has no content.
    Free,
    /// Nobody holds it, its content can be matched.
    Evictable,
    /// In the table of a live sequence.
    Active,
    /// In pins only.
    Pinned,
}

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Monotonic counters since the manager was made.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// Every counter with its name, in the order of the fields.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

stats! {
    /// Tokens of prefill work that committed steps have settled: cached + computed.
    prompt_tokens,
    /// Of these, tokens reused from the cache: prefill work saved.
    cached_tokens,
    /// Tokens whose KV was computed in committed steps, prefill and decode.
    computed_tokens,
    /// Blocks reused from the cache in committed steps.
    hit_blocks,
    /// Blocks shared while an open step computed them for another sequence: neither stored nor computed
    /// twice.
    in_flight_blocks,
    /// Blocks that held their content while its tokens were computed again, because something before
    /// them was missing: not stored twice.
    already_cached_blocks,
    /// Prefills that found something cached although their sequences had begun before: what others have
    /// computed meanwhile.
    rematches,
    /// Prefills that began inside a block, behind tokens copied from another one.
    partial_hits,
    /// Tokens that these copied instead of computing them; `cached_tokens` has them too.
    partial_tokens,
    /// Blocks handed out.
    allocated_blocks,
    /// Contents that were new to the tree or came back to it.
    registered_blocks,
    /// Evictable blocks whose content was given up for an allocation.
    evicted_blocks,
    /// Blocks given back because they slid out of their group's window: no later token sees them.
    slid_blocks,
    /// Late merges: duplicates given back because another block held the same content. Memory saved.
    merged_blocks,
    /// Contents moved from an evictable block to the block that computed them again.
    taken_over_blocks,
    /// Blocks copied: because a fork's holders part, or for a prefill that began inside a block.
    copied_blocks,
    /// Draft tokens computed in committed steps.
    draft_tokens,
    /// Of these, accepted ones.
    accepted_draft_tokens,
    /// Blocks kept private because another content has their hash.
    collisions,
    /// Blocks hashed, to name a content or to find a run.
    hashed_blocks,
    /// Steps committed.
    committed_steps,
    /// Steps rolled back.
    rolled_back_steps,
}
