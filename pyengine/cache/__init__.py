"""The KV cache: the block manager and what it hands out, and (beside it) the KV tensors.

`CpuAttention`, with its `CpuCache` (the keys and values of a layer) and `CpuStep` (the sequences of
a step), attends over such tensors in Rust.

This room is the only importer of the Rust extension `pyengine._kv`. Importing it needs NumPy
only; the tensors live in `pyengine.cache.kv_pool`, which imports torch when it is used.
"""

from pyengine._kv import (
    BlockManager,
    BufferError,
    Cleared,
    ConfigError,
    CpuAttention,
    CpuCache,
    CpuStep,
    Divergence,
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
    ReplayReport,
    Sequence,
    Stats,
    StepBuffers,
    StepPlan,
    Stored,
    Survey,
    TokenError,
    TraceError,
    replay,
)

__all__ = [
    "BlockManager",
    "BufferError",
    "Cleared",
    "ConfigError",
    "CpuAttention",
    "CpuCache",
    "CpuStep",
    "Divergence",
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
    "ReplayReport",
    "Sequence",
    "Stats",
    "StepBuffers",
    "StepPlan",
    "Stored",
    "Survey",
    "TokenError",
    "TraceError",
    "replay",
]
