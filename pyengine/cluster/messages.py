"""Messages from replicas to a router: identity, numbered cache events, snapshots."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The inputs of block hashes. Hashes of replicas are comparable only if these are equal."""

    model: str
    block_size: int
    """Tokens per block."""
    hash_seed: int


@dataclass(frozen=True, slots=True)
class SharedStore:
    """The folder in which a replica keeps KV, and from which others on the machine restore it."""

    folder: str
    """The same text for all replicas that have this folder."""
    num_blocks: int
    """Maximum number of blocks that it holds."""
    is_writer: bool
    """True for the one replica that stores there; the others read."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica that joins."""

    name: str
    kind: CacheFormat
    num_blocks: int
    store: SharedStore | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a replica, and its totals of prompt tokens."""

    num_running: int = 0
    """Sequences that hold blocks."""
    num_waiting: int = 0
    """Waiting requests."""
    num_active: int = 0
    """Blocks in block tables."""
    num_evictable: int = 0
    """Cached blocks that are not in use."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restore_cost: float = 1.0
    """The time to restore a token relative to the time to compute it, at most 1."""


@dataclass(frozen=True, slots=True)
class Events:
    """Cache events of a replica in order, in the format of `BlockManager.take_packed_events`.

    `kinds` has one byte per event, `hashes` 16. The events are numbered from `first` without gaps.
    A restarted cache begins a new `epoch`, with numbers from 0.
    """

    epoch: str
    first: int
    kinds: bytes
    hashes: bytes
    load: Load = Load()

    @property
    def end(self) -> int:
        """The number of the next event."""
        return self.first + len(self.kinds)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The hashes of all cached blocks before the event `next` of the epoch, 16 bytes each."""

    epoch: str
    next: int
    hashes: bytes
    load: Load = Load()
