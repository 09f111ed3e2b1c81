"""Which replica a prompt is best sent to, by what each of them has cached.

A replica's events say exactly what it holds, so nothing is guessed: a prompt's blocks are looked up
by the names that the block managers give them. A request costs a replica the blocks that it would
have to compute, after those that others wait for there, beside the blocks that run (the rule of
NVIDIA Dynamo's router, over exact sets); the least cost wins. What was sent and has not ended
counts as cached where it was sent, as its blocks cannot go before it does: a burst of equal prompts
stays together. No replica gets many more requests than the mean (Mirrokni, Thorup, Zadimoghaddam:
Consistent hashing with bounded loads, 2016).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.cache import ReplicaIndex
from pyengine.cluster.messages import CacheKind, Events, Load, ReplicaInfo, Snapshot
from pyengine.core.errors import ConfigurationError, NoReplicaError

MOST_REPLICAS = 128
"""Of a router, at once: one bit each."""
RUNNING_WEIGHT = 0.05
"""What a block that runs costs beside one that is computed: a delay to others, not more work."""
_NAME = 16
_STORED = b"\x01"

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


class Taken(Enum):
    """What became of events that a router was given."""

    APPLIED = "applied"
    KNOWN = "known"
    """It had them before: they changed nothing."""
    GAP = "gap"
    """Some before them are missing: they changed nothing, and only a snapshot helps."""
    UNKNOWN = "unknown"
    """There is no such replica: it has left, or has not joined yet."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica for a prompt of `num_blocks` blocks, of which it has the first `num_hits`."""

    replica: str
    num_blocks: int
    num_hits: int
    names: bytes = field(repr=False)
    """Of the prompt's full blocks."""


@dataclass(slots=True)
class Ticket:
    """A request that was sent to a replica and has not ended."""

    choice: Choice
    replica: "_Replica"
    is_pending: bool = True
    """Whether its prompt is not computed yet."""
    has_ended: bool = False


@dataclass(slots=True)
class RouterStats:
    """What a router has counted so far. Hits are tokens."""

    num_routed: int = 0
    prompt_tokens: int = 0
    expected_hits: int = 0
    real_hits: int = 0
    num_events: int = 0
    num_known: int = 0
    """Batches of events that it had before."""
    num_gaps: int = 0
    num_snapshots: int = 0
    num_refused: int = 0
    """Replicas that were not let in."""
    num_diverted: int = 0
    """Requests that did not go to the least cost, because too many ran there."""


@dataclass(slots=True)
class ReplicaState:
    """A replica as a router sees it."""

    name: str
    num_blocks: int
    num_held: int
    is_current: bool
    """Whether its contents are known: it has sent a snapshot, and no event is missing since."""
    num_routed: int
    num_requests: int
    """Sent to it and not ended."""
    load: Load


class _Replica:
    """What is known of a replica; `slot` is its bit."""

    __slots__ = (
        *("info", "is_current", "last", "life", "load", "next", "num_expected", "num_held"),
        *("num_pending", "num_requests", "num_routed", "slot"),
    )

    def __init__(self, info: ReplicaInfo, slot: int) -> None:
        self.info = info
        self.slot = slot
        self.life = ""
        self.next = 0
        self.is_current = False
        self.num_held = 0
        self.num_expected = 0
        """Distinct blocks of prompts that run or wait there."""
        self.num_pending = 0
        """Blocks that those have to compute whose prompt is not computed yet."""
        self.num_requests = self.num_routed = 0
        self.last = 0
        """When it was last chosen, in requests."""
        self.load = Load()

    @property
    def num_running(self) -> int:
        """Blocks that run there: by what was sent from here, or by its own word."""
        return max(self.num_expected - self.num_pending, self.load.num_active)


class PrefixRouter:
    """Knows what replicas of one `kind` hold, and chooses among them. Any thread may call it.

    No replica gets a request as long as it has more than `imbalance` times the mean of what runs,
    and `slack` more. Memory is bounded by the replicas' blocks and the prompts on their way. There
    is no clock.
    """

    def __init__(
        self,
        kind: CacheKind,
        *,
        running_weight: float = RUNNING_WEIGHT,
        imbalance: float = 1.25,
        slack: int = 2,
    ) -> None:
        """`running_weight` is what a block that runs costs beside one that is computed."""
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
        self._replicas: dict[str, _Replica] = {}
        self._free = list(range(MOST_REPLICAS - 1, -1, -1))
        self._lock = Lock()

    def join(self, info: ReplicaInfo) -> None:
        """Let a replica in. Until its first snapshot nothing is known of what it holds.

        Raises `ConfigurationError` for one of another kind, a name that is taken, or one too many.
        """
        with self._lock:
            try:
                self._check(info)
            except ConfigurationError:
                self.stats.num_refused += 1
                raise
            self._replicas[info.name] = _Replica(info, self._free.pop())

    def _check(self, info: ReplicaInfo) -> None:
        for name in ("model", "block_size", "hash_seed"):
            ours, its = getattr(self.kind, name), getattr(info.kind, name)
            if ours != its:
                raise ConfigurationError(
                    f"replica {info.name!r} has {name}={its!r}, the others {name}={ours!r}: give "
                    "all the same"
                )
        if info.name in self._replicas:
            raise ConfigurationError(f"replica {info.name!r} is there already: let it leave first")
        if not self._free:
            raise ConfigurationError(
                f"replica {info.name!r} is one more than the {MOST_REPLICAS} that a router may "
                "have: use another router"
            )

    def leave(self, name: str) -> None:
        """Forget a replica; nothing, if there is none of this name. O(contents known)."""
        with self._lock:
            replica = self._replicas.pop(name, None)
            if replica is None:
                return
            self._index.clear(replica.slot)
            if replica.num_requests == 0:
                self._free.append(replica.slot)

    def apply(self, name: str, events: Events) -> Taken:
        """Take a replica's events. After a gap they wait for a snapshot.

        Raises `ConfigError` for bytes that are no events; nothing has changed then.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                return Taken.UNKNOWN
            if events.life != replica.life or events.first > replica.next:
                return self._lost(replica, events.life)
            if not replica.is_current:
                return Taken.GAP
            skipped = replica.next - events.first
            if skipped and skipped >= len(events.kinds):
                self.stats.num_known += 1
                return Taken.KNOWN
            replica.load = events.load
            kinds, names = events.kinds[skipped:], events.names[skipped * _NAME :]
            replica.num_held = self._index.apply(replica.slot, kinds, names)
            replica.next = events.end
            self.stats.num_events += len(kinds)
            if replica.num_held > replica.info.num_blocks:  # it cannot be: something was missed
                return self._lost(replica, "")
            return Taken.APPLIED

    def _lost(self, replica: _Replica, life: str) -> Taken:
        """Its picture is not right any more: of another life not at all, else nearly."""
        self.stats.num_gaps += replica.is_current
        replica.is_current = False
        if life != replica.life:
            self._index.clear(replica.slot)
            replica.num_held = 0
        return Taken.GAP

    def restore(self, name: str, snapshot: Snapshot) -> Taken:
        """Take a replica's snapshot: the events from its `next` on follow.

        An older one than what is known changes nothing. Raises `ConfigurationError` for more
        contents than the replica has blocks.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                return Taken.UNKNOWN
            is_known = replica.is_current and snapshot.life == replica.life
            if is_known and snapshot.next <= replica.next:
                self.stats.num_known += 1
                return Taken.KNOWN
            count = len(snapshot.names) // _NAME
            if count > replica.info.num_blocks:
                raise ConfigurationError(
                    f"replica {name!r} has {replica.info.num_blocks} blocks and says that it holds "
                    f"{count} contents"
                )
            self._index.clear(replica.slot)
            replica.is_current = False
            replica.num_held = self._index.apply(replica.slot, _STORED * count, snapshot.names)
            replica.life, replica.next, replica.load = snapshot.life, snapshot.next, snapshot.load
            replica.is_current = True
            self.stats.num_snapshots += 1
            return Taken.APPLIED

    def choose(
        self,
        token_ids: TokenIds,
        namespace: bytes = b"",
        *,
        among: Collection[str] | None = None,
    ) -> Choice:
        """The replica that a prompt is best sent to; `among` these, if given. O(blocks + replicas).

        Nothing has changed until `begin`. Raises `NoReplicaError` if there is none; `TokenError`.
        """
        names = self._index.block_hashes(token_ids, namespace=namespace)
        num_blocks = -(-len(token_ids) // self.kind.block_size)
        with self._lock:
            replicas = [
                one for name, one in self._replicas.items() if among is None or name in among
            ]
            if not replicas:
                raise NoReplicaError("no replica can take requests now: try again later")
            matched = self._index.matched_blocks(names)
            best = min(replicas, key=lambda one: self._cost(one, num_blocks, matched))
            least = self._least_loaded(replicas, best)
            if least is not replicas:
                best = min(least, key=lambda one: self._cost(one, num_blocks, matched))
            hits = matched[best.slot] if best.slot < len(matched) else 0
            return Choice(best.info.name, num_blocks, hits, names)

    def _cost(
        self, replica: _Replica, num_blocks: int, matched: list[int]
    ) -> tuple[float, int, int, float, int]:
        """Of equal costs hits come first: to compute twice gains nothing. Then load, then room."""
        hits = matched[replica.slot] if replica.slot < len(matched) else 0
        to_compute = num_blocks - hits + replica.num_pending
        return (
            to_compute + self._running_weight * replica.num_running,
            -hits,
            replica.num_requests,
            replica.num_held / replica.info.num_blocks,
            replica.last,
        )

    def _least_loaded(self, replicas: list[_Replica], best: _Replica) -> list[_Replica]:
        """The same replicas if `best` may have one more, else those that may."""
        total = sum([one.num_requests for one in replicas]) + 1
        most = math.ceil(self._imbalance * total / len(replicas)) + self._slack
        if best.num_requests < most:
            return replicas
        self.stats.num_diverted += 1
        return [one for one in replicas if one.num_requests < most]

    def begin(self, choice: Choice, replica: str | None = None) -> Ticket | None:
        """A prompt was sent where `choice` says, or to another `replica`. None: that has left."""
        with self._lock:
            its = self._replicas.get(choice.replica if replica is None else replica)
            if its is None:
                return None
            if its.info.name != choice.replica:
                matched = self._index.matched_blocks(choice.names)
                hits = matched[its.slot] if its.slot < len(matched) else 0
                choice = Choice(its.info.name, choice.num_blocks, hits, choice.names)
            its.last = self.stats.num_routed = self.stats.num_routed + 1
            its.num_requests += 1
            its.num_routed += 1
            its.num_pending += choice.num_blocks - choice.num_hits
            its.num_expected = self._index.add_request(its.slot, choice.names)
            return Ticket(choice, its)

    def begun(self, ticket: Ticket, num_prompt: int, num_cached: int) -> None:
        """The prompt of a request was computed, but for `num_cached` of its tokens."""
        with self._lock:
            if ticket.is_pending and not ticket.has_ended:
                self._computed(ticket)
                self.stats.prompt_tokens += num_prompt
                self.stats.real_hits += num_cached
                self.stats.expected_hits += ticket.choice.num_hits * self.kind.block_size

    def _computed(self, ticket: Ticket) -> None:
        ticket.is_pending = False
        choice = ticket.choice
        ticket.replica.num_pending -= choice.num_blocks - choice.num_hits

    def end(self, ticket: Ticket) -> None:
        """A request has ended, in whatever way. May be called more than once."""
        with self._lock:
            if ticket.has_ended:
                return
            if ticket.is_pending:
                self._computed(ticket)
            ticket.has_ended = True
            its = ticket.replica
            its.num_requests -= 1
            its.num_expected = self._index.remove_request(its.slot, ticket.choice.names)
            has_left = self._replicas.get(its.info.name) is not its
            if has_left and its.num_requests == 0:  # nothing is expected in its slot any more
                self._free.append(its.slot)

    def contents(self, name: str) -> set[bytes]:
        """The names of what a replica holds, as far as is known. O(contents known)."""
        with self._lock:
            return set(self._index.cached_blocks(self._replicas[name].slot))

    def replicas(self) -> list[ReplicaState]:
        """Every replica, in the order in which they joined."""
        with self._lock:
            return [
                ReplicaState(
                    name=name,
                    num_blocks=one.info.num_blocks,
                    num_held=one.num_held,
                    is_current=one.is_current,
                    num_routed=one.num_routed,
                    num_requests=one.num_requests,
                    load=one.load,
                )
                for name, one in self._replicas.items()
            ]

    @property
    def num_contents(self) -> int:
        """Different contents that are known."""
        return self._index.num_blocks

    @property
    def imbalance(self) -> float:
        """The most requests that run on a replica over the mean; 1 where they are level."""
        with self._lock:
            counts = [one.num_requests for one in self._replicas.values()]
        return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
