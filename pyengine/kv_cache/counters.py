"""Descriptions of the counters of `BlockManager.stats()`, for `/metrics` and the documentation."""

from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Prefill tokens planned: cached and computed.",
    "cached_tokens": "Of the prefill tokens, those reused and not computed.",
    "computed_tokens": "Tokens computed, prefill and decode.",
    "hit_blocks": "Cached blocks reused: matched at admission or at a later block boundary.",
    "in_flight_blocks": "Blocks shared while an open step computed them.",
    "already_cached_blocks": "Blocks cached already while their tokens were computed again.",
    "rematches": "Prefills that matched something although their sequences had begun before.",
    "partial_hits": "Prefills that began inside a block, after copied tokens.",
    "partial_tokens": "Tokens that partial hits copied; `cached_tokens` counts them too.",
    "allocated_blocks": "Blocks allocated.",
    "registered_blocks": "Blocks cached for the first time, or again after an eviction.",
    "evicted_blocks": "Evictable blocks evicted.",
    "slid_blocks": "Blocks released because no later token sees them.",
    "merged_blocks": "Duplicates released at a commit.",
    "taken_over_blocks": "Evictable blocks replaced by one that computed the same prefix again.",
    "copied_blocks": "Blocks copied, for forks and for partial hits.",
    "draft_tokens": "Drafts computed.",
    "accepted_draft_tokens": "Of the drafts, those accepted.",
    "collisions": "Cached blocks without a hash because another one has it.",
    "hashed_blocks": "Blocks hashed, for events or for a lookup.",
    "committed_steps": "Steps committed.",
    "rolled_back_steps": "Steps rolled back.",
}
"""In the order of `Stats.as_dict()`."""
