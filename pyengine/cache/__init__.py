"""The KV cache: the block manager and what it hands out, and (beside it) the KV tensors.

This room is the only importer of the Rust extension `pyengine._kv`. Importing it needs NumPy
only; the tensors live in `pyengine.cache.kv_pool`, which imports torch when it is used.
"""

from pyengine._kv import (
    BlockManager,
    BufferError,
    Cleared,
    ConfigError,
    HandleError,
    InvariantError,
    KvError,
    Lease,
    LeaseError,
    Ledger,
    NoBudget,
    NoRoom,
    PlanError,
    Prefilled,
    Redirect,
    Removed,
    Sequence,
    Stats,
    StepBuffers,
    StepPlan,
    Stored,
    TokenError,
)

__all__ = [
    "BlockManager",
    "BufferError",
    "Cleared",
    "ConfigError",
    "HandleError",
    "InvariantError",
    "KvError",
    "Lease",
    "LeaseError",
    "Ledger",
    "NoBudget",
    "NoRoom",
    "PlanError",
    "Prefilled",
    "Redirect",
    "Removed",
    "Sequence",
    "Stats",
    "StepBuffers",
    "StepPlan",
    "Stored",
    "TokenError",
]
