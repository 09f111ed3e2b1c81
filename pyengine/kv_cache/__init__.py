"""The KV cache: the block manager, its handles, the KV tensors, and the store that outlives them.

`KVStore` keeps blocks in a folder or in memory. `StoredPrefix` finds those of a prompt, and moves
them from and to the tensors, `KVBlocks`.

`SuffixIndex` drafts tokens from earlier text.

This package is the only importer of the Rust module `pyengine._kv`. Importing it needs NumPy
only; the tensors live in `pyengine.kv_cache.pool`, which imports torch when it is used.
"""

from collections.abc import Mapping

from pyengine._kv import *  # noqa: F403

BLOCK_STATES = ("free", "evictable", "active", "pinned", "loading")
"""The states of a block, by their numbers in a snapshot; together they are the pool."""
COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Prefill tokens planned: cached, restored and computed.",
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
    "discarded_blocks": "Cached blocks that their sequence did not leave cached.",
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
    "reserved_blocks": "Blocks reserved for transfers.",
    "restored_blocks": "Of these, blocks cached when their transfer completed.",
    "restored_tokens": "Of the prefill tokens, those that a transfer of the sequence restored.",
    "failed_transfers": "Transfers that ended without any block.",
    "saved_snapshots": "Snapshots of states that became cached.",
    "loaded_snapshots": "Snapshots that committed steps loaded.",
    "merged_snapshots": "Snapshots released because their prefix had one already.",
    "evicted_snapshots": "Snapshots evicted, alone or with a block of their prefix.",
    "replayed_tokens": "Prefill tokens computed again although their blocks were cached.",
}
"""Descriptions of the counters of `BlockManager.stats()`, in the order of `Stats.as_dict()`."""
