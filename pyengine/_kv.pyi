"""The KV-cache block manager, the KV store and guesses at what comes next, written in Rust (the
crates in `rust/`, bound by `rust/kv-py`).
"""

from collections.abc import Sequence as ListLike
from os import PathLike
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

__all__ = [
    "BlockChange",
    "BlockManager",
    "BufferError",
    "Cleared",
    "Computing",
    "ConfigError",
    "Divergence",
    "Evicted",
    "Explanation",
    "Extended",
    "HandleError",
    "InvariantError",
    "KVBlocks",
    "KVStore",
    "KvError",
    "Loading",
    "Lost",
    "NoBudget",
    "NoRoom",
    "Pin",
    "PinError",
    "PlanError",
    "PoolSnapshot",
    "PoolUsage",
    "Prefilled",
    "Remapping",
    "Removed",
    "ReplayReport",
    "ReplayedOperation",
    "ReplayedSequence",
    "ReplicaIndex",
    "Sequence",
    "SharedPrefixes",
    "StateUsage",
    "Stats",
    "StepBuffers",
    "StepPlan",
    "StoreError",
    "Stored",
    "StoredPrefix",
    "SuffixIndex",
    "TokenError",
    "TraceError",
    "TracePlayer",
    "Transfer",
    "__version__",
    "kv_fingerprint",
    "replay",
]

__version__: str

class _Tensor(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

_Array: TypeAlias = npt.NDArray[np.integer[Any]] | Buffer | _Tensor
_AnyArray: TypeAlias = npt.NDArray[Any] | Buffer | _Tensor
_TokenIds: TypeAlias = ListLike[int] | _Array
_MissReason: TypeAlias = Literal[
    "new",
    "diverged",
    "evicted",
    "not_yet_computed",
    "loading",
    "reads_disabled",
    "below_one_block",
    "no_snapshot",
]
_BlockState: TypeAlias = Literal["free", "evictable", "active", "pinned", "loading"]

class KvError(Exception): ...
class ConfigError(KvError): ...
class TokenError(KvError): ...
class HandleError(KvError): ...
class PinError(KvError): ...
class PlanError(KvError): ...
class BufferError(KvError): ...
class TraceError(KvError): ...
class StoreError(KvError): ...
class InvariantError(KvError): ...

@final
class SuffixIndex:
    def __new__(cls, max_tokens: int) -> Self: ...
    def start(self, prompt: _TokenIds, *, namespace: bytes | None = None) -> int: ...
    def extend(self, sequence: int, tokens: _TokenIds) -> bool: ...
    def finish(self, sequence: int) -> None: ...
    def draft(self, sequence: int, max_tokens: int) -> tuple[list[int], int]: ...
    num_archived: Final[int]
    num_sequences: Final[int]

@final
class ReplicaIndex:
    def __new__(cls, block_size: int, *, hash_seed: int) -> Self: ...
    def block_hashes(self, tokens: _TokenIds, *, namespace: bytes | None = None) -> bytes: ...
    def apply(self, replica: int, kinds: bytes, hashes: bytes) -> int: ...
    def clear(self, replica: int) -> None: ...
    def add_request(self, replica: int, hashes: bytes) -> int: ...
    def remove_request(self, replica: int, hashes: bytes) -> int: ...
    def matched_blocks(self, hashes: bytes) -> list[int]: ...
    def cached_blocks(self, replica: int) -> list[bytes]: ...
    num_blocks: Final[int]

@final
class Stored:
    hash: Final[bytes]
    parent: Final[bytes | None]
    tokens: Final[list[int]]
    namespace: Final[bytes]
    switch: Final[tuple[int, bytes] | None]

@final
class Removed:
    hash: Final[bytes]

@final
class Cleared:
    weights_version: Final[int]

@final
class Lost:
    num_events: Final[int]

@final
class Explanation:
    num_pool_tokens: Final[int]
    num_in_flight_tokens: Final[int]
    num_copied_tokens: Final[int]
    position: Final[int | None]
    reason: Final[_MissReason | None]
    cached_to: Final[int | None]
    diverged_at: Final[int | None]
    diverged_tokens: Final[list[int]]
    evicted_by: Final[str | None]
    num_evicted_since: Final[int | None]

@final
class PoolUsage:
    free: Final[int]
    evictable: Final[int]
    active: Final[int]
    pinned: Final[int]
    loading: Final[int]
    available: Final[int]
    num_blocks: Final[int]
    def __eq__(self, other: object, /) -> bool: ...

@final
class Stats:
    prompt_tokens: Final[int]
    cached_tokens: Final[int]
    computed_tokens: Final[int]
    hit_blocks: Final[int]
    in_flight_blocks: Final[int]
    already_cached_blocks: Final[int]
    rematches: Final[int]
    partial_hits: Final[int]
    partial_tokens: Final[int]
    allocated_blocks: Final[int]
    registered_blocks: Final[int]
    evicted_blocks: Final[int]
    discarded_blocks: Final[int]
    slid_blocks: Final[int]
    merged_blocks: Final[int]
    taken_over_blocks: Final[int]
    copied_blocks: Final[int]
    draft_tokens: Final[int]
    accepted_draft_tokens: Final[int]
    collisions: Final[int]
    hashed_blocks: Final[int]
    committed_steps: Final[int]
    rolled_back_steps: Final[int]
    reserved_blocks: Final[int]
    restored_blocks: Final[int]
    restored_tokens: Final[int]
    failed_transfers: Final[int]
    saved_snapshots: Final[int]
    loaded_snapshots: Final[int]
    merged_snapshots: Final[int]
    evicted_snapshots: Final[int]
    replayed_tokens: Final[int]
    def as_dict(self) -> dict[str, int]: ...

@final
class Remapping:
    sequence_id: Final[int]
    group: Final[int]
    index: Final[int]
    old_block: Final[int]
    new_block: Final[int]

@final
class Prefilled:
    num_cached_tokens: Final[int]
    num_tokens: Final[int]
    samples: Final[bool]

@final
class Extended:
    blocks: Final[list[list[int]]]
    copies: Final[list[tuple[int, int]]]

@final
class NoRoom:
    needed: Final[int]
    available: Final[int]

@final
class NoBudget: ...

@final
class Loading:
    transfer: Final[int]

@final
class Computing: ...

@final
class StateUsage:
    snapshots: Final[int]
    blocks: Final[int]
    spare_blocks: Final[int]
    pending_blocks: Final[int]

@final
class Transfer:
    id: Final[int]
    first_index: Final[int]
    num_blocks: Final[int]
    blocks: Final[list[tuple[int, int, int]]]
    def complete(self, blocks: ListLike[tuple[int, int, int]] | None = None) -> int: ...
    def restored_tokens(self, blocks: ListLike[tuple[int, int, int]]) -> int: ...
    def fail(self) -> None: ...
    def abandon(self) -> None: ...

@final
class Evicted:
    block: Final[int]
    group: Final[int]
    hash: Final[bytes]
    parent: Final[bytes | None]
    tokens: Final[list[int]]
    namespace: Final[bytes]
    switch: Final[tuple[int, bytes] | None]

@final
class Divergence:
    operation: Final[int]
    call: Final[str]
    recorded: Final[str]
    obtained: Final[str]

@final
class ReplayReport:
    recorded_by: Final[str]
    settings: Final[dict[str, int | bool | str | tuple[int | None, ...]]]
    operations: Final[dict[str, int]]
    usage: Final[PoolUsage]
    stats: Final[Stats]
    failed_check: Final[str | None]
    is_complete: Final[bool]
    divergence: Final[Divergence | None]

@final
class PoolSnapshot:
    states: Final[bytes]
    refs: Final[bytes]
    seq_refs: Final[bytes]
    ages: Final[bytes]
    nodes: Final[bytes]
    node_indices: Final[bytes]
    parents: Final[bytes]
    parent_indices: Final[bytes]
    lengths: Final[bytes]
    namespaces: Final[list[tuple[int, bytes]]]

@final
class ReplayedOperation:
    number: Final[int]
    kind: Final[str]
    call: Final[str]
    answer: Final[str]

@final
class ReplayedSequence:
    id: Final[int]
    num_tokens: Final[int]
    num_computed_tokens: Final[int]
    num_cached_tokens: Final[int]
    block_table: Final[list[int]]

@final
class BlockChange:
    operation: Final[int]
    call: Final[str]
    state: Final[_BlockState]
    refs: Final[int]
    seq_refs: Final[int]
    sequences: Final[list[int]]
    is_registered: Final[bool]

@final
class TracePlayer:
    def __new__(cls, path: str | PathLike[str]) -> Self: ...
    recorded_by: Final[str]
    settings: Final[dict[str, int | bool | str | tuple[int | None, ...]]]
    position: Final[int]
    divergence: Final[Divergence | None]
    def advance(self) -> ReplayedOperation | None: ...
    def seek(self, position: int) -> int: ...
    def follow(self, block: int) -> list[BlockChange]: ...
    def snapshot(self) -> PoolSnapshot: ...
    def usage(self) -> PoolUsage: ...
    def stats(self) -> Stats: ...
    def sequences(self) -> list[ReplayedSequence]: ...

def kv_fingerprint(properties: ListLike[tuple[str, bytes]]) -> bytes: ...

@final
class KVBlocks:
    def __new__(cls, tensors: ListLike[_AnyArray], groups: ListLike[ListLike[int]]) -> Self: ...
    num_blocks: Final[int]
    def block_bytes(self, group: int) -> int: ...

@final
class StoredPrefix:
    num_blocks: Final[int]
    def needed_blocks(self, first: int, end: int) -> list[int]: ...
    def last_snapshot(self, first: int, end: int) -> int: ...
    def stored_blocks(
        self, first: int | None = None, group: int | None = None, *, most: int | None = None
    ) -> int: ...
    def contains(self, index: int, group: int | None = None) -> bool: ...
    def missing(self, blocks: ListLike[tuple[int, int, int]]) -> list[tuple[int, int, int]]: ...
    def store(
        self, memory: KVBlocks, blocks: ListLike[tuple[int, int, int]]
    ) -> list[tuple[int, int, int]]: ...
    def load(
        self, memory: KVBlocks, blocks: ListLike[tuple[int, int, int]]
    ) -> list[tuple[int, int, int]]: ...

@final
class KVStore:
    def __new__(
        cls,
        folder: str | PathLike[str],
        *,
        max_bytes: int,
        access: Literal["write", "read", "write_or_read"] | None = None,
        queue_bytes: int | None = None,
        segment_bytes: int | None = None,
        auth_key: bytes | None = None,
        stall_after: float | None = None,
        retry_after: float | None = None,
    ) -> Self: ...
    @staticmethod
    def in_memory(
        max_bytes: int,
        *,
        queue_bytes: int | None = None,
        segment_bytes: int | None = None,
        auth_key: bytes | None = None,
        stall_after: float | None = None,
        retry_after: float | None = None,
    ) -> KVStore: ...
    is_writer: Final[bool]
    def prefix(
        self,
        tokens: _TokenIds,
        block_size: int,
        *,
        fingerprints: ListLike[bytes],
        namespace: bytes | None = None,
        switch: tuple[int, bytes] | None = None,
        windows: ListLike[int | None] | None = None,
        state: tuple[bytes, int] | None = None,
    ) -> StoredPrefix: ...
    def stats(self) -> dict[str, int]: ...
    def take_notices(self) -> list[str]: ...
    def flush(self, timeout: float) -> bool: ...
    def sync(self) -> None: ...
    def refresh(self) -> int: ...
    def prune(
        self, *, fingerprints: ListLike[bytes] | None = None, older_than: float | None = None
    ) -> int: ...
    def verify(self) -> tuple[int, list[str]]: ...
    def fingerprints(self) -> list[tuple[bytes, int, int, int]]: ...
    def close(self, timeout: float) -> bool: ...

def replay(path: str | PathLike[str], /) -> ReplayReport: ...

@final
class Pin:
    num_tokens: Final[int]
    num_state_tokens: Final[int]
    state_blocks: Final[list[int]]
    blocks: Final[list[int]]
    indexed_blocks: Final[list[tuple[int, int, int]]]
    is_released: Final[bool]
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class Sequence:
    id: Final[int]
    is_live: Final[bool]
    num_tokens: Final[int]
    num_computed_tokens: Final[int]
    num_cached_tokens: Final[int]
    num_restored_tokens: Final[int]
    weights_version: Final[int]
    is_private: Final[bool]
    block_table: Final[list[int]]
    block_tables: Final[list[list[int]]]
    def tokens(self) -> list[int]: ...
    def explain(self) -> Explanation: ...
    def attach(self, pin: Pin) -> None: ...
    def pin(self) -> Pin: ...
    def fork(self, num_tokens: int) -> Sequence: ...
    def want_snapshots(self, positions: ListLike[int]) -> None: ...
    def append(self, tokens: _TokenIds) -> None: ...
    def trim(self, num_tokens: int) -> int: ...
    def reuse_cached(self) -> int: ...
    def reserve(self, num_tokens: int) -> Transfer | NoRoom | Loading | None: ...
    def extend(self, num_tokens: int) -> Extended | NoRoom: ...
    def keep_snapshot(self) -> Extended | NoRoom: ...
    def publish(self, num_tokens: int, tokens: _TokenIds | None = None) -> list[Remapping]: ...
    def reset(self) -> None: ...
    def free(self, *, keep: int | None = None) -> None: ...

@final
class StepBuffers:
    def __new__(
        cls,
        *,
        input_ids: _Array,
        positions: _Array,
        slot_mapping: _Array,
        query_start_loc: _Array,
        seq_lens: _Array,
        block_tables: _Array,
        logits_indices: _Array,
    ) -> Self: ...

@final
class SharedPrefixes:
    def __new__(
        cls,
        *,
        order: _Array,
        own_blocks: _Array,
        prefixes: _Array,
        group: int | None = None,
        min_blocks: int | None = None,
        min_rows: int | None = None,
    ) -> Self: ...
    num_prefixes: Final[int]
    version: Final[int]

@final
class StepPlan:
    num_tokens: Final[int]
    num_sequences: Final[int]
    num_samples: Final[int]
    budget_left: Final[int]
    is_open: Final[bool]
    def decode(
        self, sequences: ListLike[Sequence], *, lookahead: int | None = None
    ) -> list[int]: ...
    def speculate(self, sequence: Sequence, drafts: _TokenIds) -> Prefilled | NoRoom | NoBudget: ...
    def draft(
        self, sequences: ListLike[Sequence], drafts: _TokenIds, counts: ListLike[int]
    ) -> list[int]: ...
    def prefill(
        self,
        sequence: Sequence,
        max_tokens: int,
        *,
        spare_blocks: int | None = None,
        replay: int | None = None,
    ) -> Prefilled | NoRoom | NoBudget | Loading | Computing: ...
    def cancel(self, sequence: Sequence) -> list[int]: ...
    def copies(self) -> list[tuple[int, int]]: ...
    def state_loads(self) -> list[tuple[int, int, list[int]]]: ...
    def state_saves(self) -> list[tuple[int, int, list[int]]]: ...
    def fill(self, buffers: StepBuffers, *, shared: SharedPrefixes | None = None) -> None: ...
    def commit(
        self, sampled: _TokenIds, counts: ListLike[int] | None = None
    ) -> list[Remapping]: ...
    def rollback(self) -> None: ...

@final
class BlockManager:
    def __new__(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        groups: ListLike[int | None] | None = None,
        prefix_caching: bool = True,
        in_flight_sharing: bool = True,
        partial_reuse: bool = True,
        events: bool = False,
        keep_evicted: bool = False,
        explain: bool = False,
        eviction: str = "lru",
        hash_seed: int | None = None,
        hash_bits: int | None = None,
        state_blocks: int | None = None,
        snapshot_cadence: int | None = None,
        snapshot_min_tokens: int | None = None,
    ) -> Self: ...
    num_blocks: Final[int]
    block_size: Final[int]
    groups: Final[tuple[int | None, ...]]
    null_block: Final[int]
    weights_version: Final[int]
    def sequence(
        self,
        tokens: _TokenIds,
        *,
        namespace: bytes | None = None,
        read_cache: bool = True,
        switch: tuple[int, bytes] | None = None,
    ) -> Sequence: ...
    def match_prefix(
        self,
        tokens: _TokenIds,
        *,
        namespace: bytes | None = None,
        switch: tuple[int, bytes] | None = None,
    ) -> Pin: ...
    def snapshot_positions(
        self,
        tokens: _TokenIds,
        *,
        namespace: bytes | None = None,
        switch: tuple[int, bytes] | None = None,
    ) -> list[int]: ...
    def explain(
        self,
        tokens: _TokenIds,
        *,
        namespace: bytes | None = None,
        switch: tuple[int, bytes] | None = None,
    ) -> Explanation: ...
    def begin_step(self, token_budget: int) -> StepPlan: ...
    def usage(self) -> PoolUsage: ...
    def state_usage(self) -> StateUsage: ...
    def stats(self) -> Stats: ...
    def preview(self, sequence: Sequence) -> int: ...
    def blocks_for(
        self, num_tokens: int, max_tokens: int, *, computed: int | None = None
    ) -> int: ...
    def refs(self, block: int) -> int: ...
    def seq_refs(self, block: int) -> int: ...
    def state(self, block: int) -> _BlockState: ...
    def snapshot(self) -> PoolSnapshot: ...
    def advance_weights_version(self) -> int: ...
    def evict_all(self) -> int: ...
    def take_evicted(self) -> list[Evicted]: ...
    def evict(self, num_blocks: int) -> tuple[list[Evicted], Pin]: ...
    def take_events(self) -> list[Stored | Removed | Cleared | Lost]: ...
    def take_packed_events(self) -> tuple[bytes, bytes]: ...
    def cached_hashes(self) -> list[bytes]: ...
    def record(self, path: str | PathLike[str]) -> None: ...
    def stop_recording(self) -> None: ...
    def check(self) -> None: ...
