//! `Explanation`: why tokens of a prompt are not cached.

use kv_core::{EvictedBy, Explanation as CoreExplanation, Miss, MissReason, PastEviction};
use pyo3::prelude::*;

/// The tokens of a prompt that are reused, by source, and why the others are not.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Explanation {
    core: CoreExplanation,
    block_size: usize,
    groups: usize,
}

impl Explanation {
    pub(crate) fn new(core: CoreExplanation, config: &kv_core::Config) -> Self {
        Self {
            core,
            block_size: config.block_size,
            groups: config.groups.len(),
        }
    }

    fn reason_of_miss(&self) -> Option<&MissReason> {
        self.core.miss.as_ref().map(|Miss { reason, .. }| reason)
    }

    fn eviction(&self) -> Option<&PastEviction> {
        match self.reason_of_miss()? {
            MissReason::Evicted(eviction) => eviction.as_ref(),
            _ => None,
        }
    }
}

#[pymethods]
impl Explanation {
    /// Tokens in whole blocks that are cached.
    #[getter]
    fn num_pool_tokens(&self) -> usize {
        self.core.num_pool_tokens
    }

    /// Tokens in whole blocks that an open step computes for another sequence.
    #[getter]
    fn num_in_flight_tokens(&self) -> usize {
        self.core.num_in_flight_tokens
    }

    /// Tokens whose KV is copied from the beginning of a cached block.
    #[getter]
    fn num_copied_tokens(&self) -> usize {
        self.core.num_copied_tokens
    }

    /// Position of the first token after the reused blocks; None if every whole block is reused.
    #[getter]
    fn position(&self) -> Option<usize> {
        self.core.miss.as_ref().map(|miss| miss.position)
    }

    /// Why the block that begins there is not reused: "new", "diverged", "evicted", "not_yet_computed", "loading",
    /// "reads_disabled", "below_one_block" or "no_snapshot"; None if every whole block is reused.
    #[getter]
    fn reason(&self) -> Option<&'static str> {
        Some(match self.reason_of_miss()? {
            MissReason::New => "new",
            MissReason::Diverged { .. } => "diverged",
            MissReason::Evicted(_) => "evicted",
            MissReason::NotYetComputed => "not_yet_computed",
            MissReason::Loading => "loading",
            MissReason::ReadsDisabled => "reads_disabled",
            MissReason::BelowOneBlock => "below_one_block",
            MissReason::NoSnapshot { .. } => "no_snapshot",
        })
    }

    /// The end of the cached blocks, if the reason is "no_snapshot": the state of the layers that keep one was not kept
    /// later than at `position`.
    #[getter]
    fn cached_to(&self) -> Option<usize> {
        match self.reason_of_miss()? {
            MissReason::NoSnapshot { cached_to } => Some(*cached_to),
            _ => None,
        }
    }

    /// Position of the first token that the nearest cached prefix has otherwise, if the reason is "diverged".
    #[getter]
    fn diverged_at(&self) -> Option<usize> {
        match self.reason_of_miss()? {
            MissReason::Diverged { position, .. } => Some(*position),
            _ => None,
        }
    }

    /// The cached tokens from there to the end of their block.
    #[getter]
    fn diverged_tokens(&self) -> Vec<u32> {
        match self.reason_of_miss() {
            Some(MissReason::Diverged { tokens, .. }) => tokens.clone(),
            _ => Vec::new(),
        }
    }

    /// The cause of the eviction, if it is remembered: "lru", "2q", "evict_all" for a call, or "weights_changed".
    #[getter]
    fn evicted_by(&self) -> Option<&'static str> {
        Some(match self.eviction()?.by {
            EvictedBy::Policy(policy) => policy.name(),
            EvictedBy::EvictAll => "evict_all",
            EvictedBy::WeightsChanged => "weights_changed",
        })
    }

    /// Tokens of the same namespace that were evicted since, its own block included: with a pool larger by about so
    /// many tokens, it would still be cached.
    #[getter]
    fn num_evicted_since(&self) -> Option<u64> {
        let blocks = self.eviction()?.num_blocks_since;
        Some(blocks * self.block_size as u64 / self.groups as u64)
    }

    fn __repr__(&self) -> String {
        let CoreExplanation {
            num_pool_tokens,
            num_in_flight_tokens,
            num_copied_tokens,
            ..
        } = self.core;
        let quoted = |reason| format!("'{reason}'");
        let reason = self.reason().map_or_else(|| "None".to_owned(), quoted);
        format!(
            "Explanation(num_pool_tokens={num_pool_tokens}, num_in_flight_tokens={num_in_flight_tokens}, \
             num_copied_tokens={num_copied_tokens}, reason={reason})"
        )
    }
}
