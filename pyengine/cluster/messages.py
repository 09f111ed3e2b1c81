"""What replicas tell a router of their caches: who they are, numbered events, whole pictures."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheKind:
    """What contents' names follow from: replicas that differ in it mean other things by a name."""

    model: str
    block_size: int
    """Tokens per block."""
    hash_seed: int


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica that joins. It holds at most one content for each of its blocks."""

    name: str
    kind: CacheKind
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Load:
    """How much a replica has to do, and what it has computed and found in its cache so far."""

    num_running: int = 0
    """Samples that hold blocks."""
    num_waiting: int = 0
    """Requests."""
    num_active: int = 0
    """Blocks in the tables of sequences."""
    num_evictable: int = 0
    """Blocks that are cache."""
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Events:
    """What became of a replica's contents, in order, as `BlockManager.take_packed_events` says it.

    `kinds` has a byte for each, `names` 16. They are numbered from `first` on without a gap, in the
    `life` of the cache that they are of: a restarted one begins another life, and again at 0.
    """

    life: str
    first: int
    kinds: bytes
    names: bytes
    load: Load = Load()

    @property
    def end(self) -> int:
        """The number of the event that comes next."""
        return self.first + len(self.kinds)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a replica holds, 16 bytes a name, before the event numbered `next` of that life."""

    life: str
    next: int
    names: bytes
    load: Load = Load()
