"""Routes each prompt to the replica with the best cost, by the cached blocks of each replica.

Cache events give the exact set of block hashes of each replica, and a prompt's blocks are looked up
by the same hashes. The cost of a replica is the number of blocks to compute, for this request and
those queued there, plus a small weight for blocks in use: the rule of NVIDIA Dynamo's router, over
exact sets. A block that the replica can restore from a folder costs a part of a computed one.
Prompts in progress count as cached where they were sent, so a burst of equal prompts stays
together. The load of a replica is bounded by a multiple of the mean (Mirrokni, Thorup,
Zadimoghaddam: Consistent hashing with bounded loads, 2016).
"""

import math
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.cluster.messages import CacheFormat, Events, Load, ReplicaInfo, Snapshot
from pyengine.cluster.stored_blocks import StoredBlocks
from pyengine.errors import ConfigurationError, NoReplicaError
from pyengine.kv_cache import ReplicaIndex

MAX_REPLICAS = 128
"""Limit of a router: each replica is one bit."""
RUNNING_WEIGHT = 0.05
"""Cost of a block in use relative to a block to compute."""
_HASH_BYTES = 16
_STORED = b"\x01"

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


class UpdateResult(Enum):
    """Result of applying events or a snapshot."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """They were applied before: no change."""
    GAP = "gap"
    """Earlier events are missing: no change, and the router needs a snapshot."""
    UNKNOWN_REPLICA = "unknown replica"
    """The replica has left or has not joined yet."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica chosen for a prompt of `num_blocks` blocks, the first `num_hits` cached there.

    The replica can restore the next `num_restorable` blocks.
    """

    replica: str
    num_blocks: int
    num_hits: int
    hashes: bytes = field(repr=False)
    """Hashes of the prompt's full blocks."""
    num_restorable: int = 0
    restore_cost: float = 1.0
    """Cost of a block to restore relative to a block to compute."""

    @property
    def num_to_compute(self) -> int:
        """Blocks to compute, and those to restore at their cost, rounded."""
        saved = self.num_restorable * (1 - self.restore_cost)
        return self.num_blocks - self.num_hits - round(saved)


@dataclass(slots=True)
class Ticket:
    """A request in progress at a replica."""

    choice: Choice
    replica: "_Replica"
    is_pending: bool = True
    """True until its prompt is computed."""
    has_ended: bool = False


@dataclass(slots=True)
class RouterStats:
    """Counters of a router. Hits are tokens, restored ones included."""

    num_routed: int = 0
    prompt_tokens: int = 0
    expected_hits: int = 0
    real_hits: int = 0
    num_events: int = 0
    num_duplicates: int = 0
    """Batches of events and snapshots received twice."""
    num_gaps: int = 0
    num_snapshots: int = 0
    num_refused: int = 0
    """Replicas that were refused."""
    num_diverted: int = 0
    """Requests not sent to the cheapest replica, due to its load."""


@dataclass(slots=True, eq=False)
class ReplicaState:
    """State of a replica in a router."""

    name: str
    num_blocks: int
    num_cached_blocks: int = 0
    is_current: bool = False
    """True if the router has its snapshot and all events since."""
    num_routed: int = 0
    num_requests: int = 0
    """Requests in progress."""
    load: Load = field(default_factory=Load)


@dataclass(slots=True, eq=False, kw_only=True)
class _Replica(ReplicaState):
    """Internal state of a replica; `bit` is its position in the index's bit sets."""

    info: ReplicaInfo
    bit: int
    epoch: str = ""
    next: int = 0
    num_used_blocks: int = 0
    """Distinct blocks of the prompts in progress."""
    num_pending: int = 0
    """Blocks of these prompts that are not computed yet; those to restore at their cost."""
    last: int = 0
    """Sequence number of the last request sent to it."""

    @property
    def num_running(self) -> int:
        """Blocks in use: by the requests sent to it, or by its own report if that is more."""
        return max(self.num_used_blocks - self.num_pending, self.load.num_active)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, and the number of its leading blocks that replicas, by bit, and folders have."""

    hashes: bytes
    num_blocks: int
    cached: list[int]
    stored: dict[str, int]

    def reuse(self, replica: _Replica) -> tuple[int, int]:
        """The blocks that a replica has cached, and those after them that it can restore."""
        hits = self.cached[replica.bit] if replica.bit < len(self.cached) else 0
        if not self.stored or replica.info.store is None:
            return hits, 0
        return hits, max(0, self.stored.get(replica.info.store.folder, 0) - hits)

    def choice(self, replica: _Replica) -> Choice:
        """This replica as the choice."""
        hits, restorable = self.reuse(replica)
        cost = replica.load.restore_cost
        return Choice(replica.name, self.num_blocks, hits, self.hashes, restorable, cost)


class PrefixRouter:
    """Tracks the cached blocks of replicas and chooses one for each prompt. Thread-safe.

    A replica gets no further request above `imbalance` times the mean load plus `slack`. Memory is
    bounded by the blocks of the replicas and the prompts in progress. It uses no clock.
    """

    def __init__(
        self,
        kind: CacheFormat,
        *,
        running_weight: float = RUNNING_WEIGHT,
        imbalance: float = 1.25,
        slack: int = 2,
    ) -> None:
        """`running_weight` is the cost of a block in use relative to a block to compute."""
        if not imbalance >= 1 or slack < 0 or not running_weight >= 0:
            raise ConfigurationError(
                f"imbalance={imbalance}, slack={slack}, running_weight={running_weight}: they must "
                "be at least 1, 0 and 0"
            )
        self.kind = kind
        self._running_weight = running_weight
        self.stats = RouterStats()
        self._imbalance = imbalance
        self._slack = slack
        self._index = ReplicaIndex(kind.block_size, hash_seed=kind.hash_seed)
        self._stored = StoredBlocks(ReplicaIndex(kind.block_size, hash_seed=kind.hash_seed))
        self._replicas: dict[str, _Replica] = {}
        self._free = list(range(MAX_REPLICAS - 1, -1, -1))
        self._lock = Lock()

    def join(self, info: ReplicaInfo) -> None:
        """Add a replica. Its cache counts as empty until its first snapshot.

        Raises `ConfigurationError` for another format, a duplicate name, or too many replicas.
        """
        with self._lock:
            try:
                self._check(info)
            except ConfigurationError:
                self.stats.num_refused += 1
                raise
            bit = self._free.pop()
            self._replicas[info.name] = _Replica(info.name, info.num_blocks, info=info, bit=bit)
            self._stored.join(info)

    def _check(self, info: ReplicaInfo) -> None:
        for name in ("model", "block_size", "hash_seed"):
            ours, theirs = getattr(self.kind, name), getattr(info.kind, name)
            if ours != theirs:
                raise ConfigurationError(
                    f"replica {info.name!r} has {name}={theirs!r}, others {name}={ours!r}: they "
                    "must be equal"
                )
        if info.name in self._replicas:
            raise ConfigurationError(f"replica {info.name!r} has joined already: leave() it first")
        if not self._free:
            raise ConfigurationError(
                f"replica {info.name!r} exceeds the limit of {MAX_REPLICAS} replicas per router: "
                "use another router"
            )

    def leave(self, name: str) -> None:
        """Remove a replica, if it has joined. O(known blocks)."""
        with self._lock:
            replica = self._replicas.pop(name, None)
            if replica is None:
                return
            self._index.clear(replica.bit)
            self._stored.leave(replica.info)
            if replica.num_requests == 0:
                self._free.append(replica.bit)

    def apply(self, name: str, events: Events) -> UpdateResult:
        """Apply a replica's events. After a gap, a snapshot is needed first.

        Raises `ConfigError` without a change for invalid bytes.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                return UpdateResult.UNKNOWN_REPLICA
            if events.epoch != replica.epoch or events.first > replica.next:
                return self._lost(replica, events.epoch)
            if not replica.is_current:
                return UpdateResult.GAP
            skipped = replica.next - events.first
            if skipped and skipped >= len(events.kinds):
                self.stats.num_duplicates += 1
                return UpdateResult.DUPLICATE
            replica.load = events.load
            kinds, hashes = events.kinds[skipped:], events.hashes[skipped * _HASH_BYTES :]
            replica.num_cached_blocks = self._apply(replica, kinds, hashes)
            replica.next = events.end
            self.stats.num_events += len(kinds)
            if replica.num_cached_blocks > replica.num_blocks:  # impossible: an event was lost
                return self._lost(replica, "")
            return UpdateResult.APPLIED

    def _apply(self, replica: _Replica, kinds: bytes, hashes: bytes) -> int:
        """Apply events to the indices; the number of blocks that the replica has cached then."""
        num_cached = self._index.apply(replica.bit, kinds, hashes)
        self._stored.apply(
            replica.info, kinds, hashes, lambda: self._index.cached_blocks(replica.bit)
        )
        return num_cached

    def _lost(self, replica: _Replica, epoch: str) -> UpdateResult:
        """Mark a replica as outdated. Its blocks are kept, unless the epoch has changed."""
        self.stats.num_gaps += replica.is_current
        replica.is_current = False
        if epoch != replica.epoch:
            self._index.clear(replica.bit)
            replica.num_cached_blocks = 0
        return UpdateResult.GAP

    def restore(self, name: str, snapshot: Snapshot) -> UpdateResult:
        """Apply a replica's snapshot. Events from its `next` on follow.

        An outdated one changes nothing. Raises `ConfigurationError` for too many hashes.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                return UpdateResult.UNKNOWN_REPLICA
            is_known = replica.is_current and snapshot.epoch == replica.epoch
            if is_known and snapshot.next <= replica.next:
                self.stats.num_duplicates += 1
                return UpdateResult.DUPLICATE
            count = len(snapshot.hashes) // _HASH_BYTES
            if count > replica.num_blocks:
                raise ConfigurationError(
                    f"replica {name!r} has {replica.num_blocks} blocks and sent {count} hashes"
                )
            self._index.clear(replica.bit)
            replica.is_current = False
            replica.num_cached_blocks = self._apply(replica, _STORED * count, snapshot.hashes)
            replica.epoch, replica.next, replica.load = snapshot.epoch, snapshot.next, snapshot.load
            replica.is_current = True
            self.stats.num_snapshots += 1
            return UpdateResult.APPLIED

    def choose(
        self,
        token_ids: TokenIds,
        namespace: bytes = b"",
        *,
        among: Collection[str] | None = None,
    ) -> Choice:
        """Choose a replica for a prompt, optionally `among` some. O(blocks + replicas).

        Changes no state; call `begin`. Raises `NoReplicaError` without replicas, and `TokenError`.
        """
        hashes = self._index.block_hashes(token_ids, namespace=namespace)
        num_blocks = -(-len(token_ids) // self.kind.block_size)
        with self._lock:
            replicas = [
                replica
                for name, replica in self._replicas.items()
                if among is None or name in among
            ]
            if not replicas:
                raise NoReplicaError("no replica is available: try again later")
            prompt = self._look_up(hashes, num_blocks)
            best = min(replicas, key=lambda replica: self._cost(replica, prompt))
            allowed = self._below_load_limit(replicas, best)
            if allowed is not replicas:
                best = min(allowed, key=lambda replica: self._cost(replica, prompt))
            return prompt.choice(best)

    def _look_up(self, hashes: bytes, num_blocks: int) -> "_Prompt":
        cached, stored = self._index.matched_blocks(hashes), self._stored.matched_blocks(hashes)
        return _Prompt(hashes, num_blocks, cached, stored)

    def _cost(self, replica: _Replica, prompt: "_Prompt") -> tuple[float, int, int, float, int]:
        """The cost; ties are broken by cache hits, then load, then cached blocks, then age."""
        hits, restorable = prompt.reuse(replica)
        to_compute = prompt.num_blocks - hits - restorable * (1 - replica.load.restore_cost)
        return (
            to_compute + replica.num_pending + self._running_weight * replica.num_running,
            -hits,
            replica.num_requests,
            replica.num_cached_blocks / replica.num_blocks,
            replica.last,
        )

    def _below_load_limit(self, replicas: list[_Replica], best: _Replica) -> list[_Replica]:
        """The same list if `best` is below the load limit, else the replicas below it."""
        total = sum([replica.num_requests for replica in replicas]) + 1
        limit = math.ceil(self._imbalance * total / len(replicas)) + self._slack
        if best.num_requests < limit:
            return replicas
        self.stats.num_diverted += 1
        return [replica for replica in replicas if replica.num_requests < limit]

    def begin(self, choice: Choice, replica: str | None = None) -> Ticket | None:
        """Record that a prompt was sent to the chosen or another `replica`.

        Returns None if the replica has left.
        """
        with self._lock:
            target = self._replicas.get(choice.replica if replica is None else replica)
            if target is None:
                return None
            if target.name != choice.replica:
                choice = self._look_up(choice.hashes, choice.num_blocks).choice(target)
            target.last = self.stats.num_routed = self.stats.num_routed + 1
            target.num_requests += 1
            target.num_routed += 1
            target.num_pending += choice.num_to_compute
            target.num_used_blocks = self._index.add_request(target.bit, choice.hashes)
            return Ticket(choice, target)

    def begun(self, ticket: Ticket, num_prompt: int, num_cached: int) -> None:
        """Record that a prompt is computed, and how many of its tokens were cached."""
        with self._lock:
            if ticket.is_pending and not ticket.has_ended:
                self._computed(ticket)
                self.stats.prompt_tokens += num_prompt
                self.stats.real_hits += num_cached
                num_hits = ticket.choice.num_hits + ticket.choice.num_restorable
                self.stats.expected_hits += num_hits * self.kind.block_size

    def _computed(self, ticket: Ticket) -> None:
        ticket.is_pending = False
        ticket.replica.num_pending -= ticket.choice.num_to_compute

    def end(self, ticket: Ticket) -> None:
        """Record the end of a request. Idempotent."""
        with self._lock:
            if ticket.has_ended:
                return
            if ticket.is_pending:
                self._computed(ticket)
            ticket.has_ended = True
            replica = ticket.replica
            replica.num_requests -= 1
            replica.num_used_blocks = self._index.remove_request(replica.bit, ticket.choice.hashes)
            has_left = self._replicas.get(replica.name) is not replica
            if has_left and replica.num_requests == 0:  # the bit is unused now
                self._free.append(replica.bit)

    def cached_hashes(self, name: str) -> set[bytes]:
        """Hashes of the known cached blocks of a replica. O(known blocks)."""
        with self._lock:
            return set(self._index.cached_blocks(self._replicas[name].bit))

    def replicas(self) -> list[ReplicaState]:
        """All replicas, in the order of joining."""
        with self._lock:
            return [copy(replica) for replica in self._replicas.values()]

    @property
    def num_hashes(self) -> int:
        """Number of distinct known block hashes."""
        return self._index.num_blocks

    @property
    def imbalance(self) -> float:
        """Requests of the busiest replica over the mean; 1 if the load is even."""
        with self._lock:
            counts = [replica.num_requests for replica in self._replicas.values()]
        return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
