//! Operations on a manager, as numbers from any source.

use kv_core::PrefillRequest;

#[derive(Clone, Debug)]
pub(crate) enum Op {
    New {
        namespace: u8,
        pattern: u8,
        len: usize,
        read_cache: bool,
    },
    Drop(usize),
    /// Which sequence, and how many of its tokens may stay cached.
    Free(usize, Option<usize>),
    Reset(usize),
    Match {
        namespace: u8,
        pattern: u8,
        len: usize,
    },
    Pin(usize),
    Attach(usize, usize),
    Fork(usize, usize),
    Append(usize, u8),
    DropPin(usize),
    Begin(usize),
    Prefill(usize, PrefillRequest),
    Decode(u8, usize),
    Speculate(usize, usize),
    Draft(u8, usize),
    Trim(usize, usize),
    Cancel(usize),
    Commit(u8),
    /// Steps that decode whoever can: as a rule the same ones.
    Decoding(u8),
    WrongCommit,
    Rollback,
    DropPlan(bool),
    Launch,
    EvictAll,
    Reuse(usize),
    Extend(usize, usize),
    Publish(usize, u8),
    Reserve(usize, usize),
    /// How many of the blocks have arrived, if it is not how it is lost.
    Complete(usize, u8),
    DropTransfer(usize),
    Abandon(usize),
    Evict(usize),
}

/// Few patterns with common prefixes, so that contents meet.
pub(crate) fn tokens(pattern: u8, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|at| {
            if at < 2 + u32::from(pattern) {
                at % 3
            } else {
                u32::from(pattern)
            }
        })
        .collect()
}
