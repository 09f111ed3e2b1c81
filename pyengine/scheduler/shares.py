"""Shares of tenants in steps, sequences and blocks if several of them have requests.

A tenant alone may use everything. Beside others it is entitled to an equal share of each resource:

- Time. A step's seconds are charged to tenants by their tokens in it. Tenants that have used more
  than another one are left out of a step, if that makes it twice as fast: so a tenant with a few
  sequences does not wait for the rows and prompts of all others in each of its steps.
- Sequences and blocks. Sequences of a tenant above its share are preempted, the newest first, for a
  tenant below its own. Each tenant keeps its first sequence, and so does the request that arrived
  first of all, so that every request ends at last.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from pyengine.kv_cache import BlockManager
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.queue import WaitingQueue
from pyengine.utils.turns import Turns

_MAX_LAG = 1.0
"""Seconds of steps that a tenant may be behind the others: it catches up on no more."""
_QUANTUM = 0.05
"""Seconds of steps by which a tenant may be ahead before it is left out of any."""
_SLICE = 0.25
"""Seconds that prompts may add to a step of several tenants."""
_MIN_CHUNK = 64
"""Tokens of prompts that a step has in any case."""
_FORGOTTEN = 0.98
"""Factor of a mean that kept a step small, so that its size is tried again."""
_NEW = 0.25
"""Weight of the newest step in the mean time of steps of its size."""


class StepTimes:
    """Mean seconds of steps by their number of tokens, rounded up to powers of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a step."""
        size = num_tokens.bit_length()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + _NEW * (seconds - known)

    def is_twice_as_slow(self, num_tokens: int, fewer: int) -> bool:
        """True if a step takes twice as long as one of fewer tokens, or that is not known."""
        if num_tokens.bit_length() == fewer.bit_length():
            return False
        more = self._seconds.get(num_tokens.bit_length())
        less = self._seconds.get(fewer.bit_length())
        return more is None or less is None or more > 2 * less

    def largest_within(self, seconds: float, max_tokens: int) -> int:
        """The most tokens, up to `max_tokens`, of a step that is not expected to take longer."""
        for size in sorted(self._seconds):
            if (mean := self._seconds[size]) > seconds:
                self._seconds[size] *= _FORGOTTEN
                return min(max_tokens, int((1 << size - 1) * seconds / mean))
        return max_tokens


class TenantShares:
    """Decides between tenants. `running` is always the scheduler's list, in order."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.turns = Turns(_MAX_LAG)
        self.times = StepTimes()

    def charge(self, step: ScheduledStep, seconds: float) -> None:
        """Charge a step to the tenants of its tokens. Called for steps of several tenants."""
        num_tokens = step.num_tokens
        if not num_tokens:  # all of its requests were aborted
            return
        self.times.add(num_tokens, seconds)
        tokens: Counter[bytes] = Counter()
        for sequence in step.decodes:
            tokens[sequence.request.tenant] += 1
        for sequence, drafts in step.drafts.items():
            tokens[sequence.request.tenant] += len(drafts)
        for entry in step.chunks:
            tokens[entry.sequence.request.tenant] += entry.num_tokens
        for tenant, count in tokens.items():
            self.turns.charge(tenant, seconds * count / num_tokens)

    def charge_alone(self, step: ScheduledStep, seconds: float) -> None:
        """Charge a step of the only tenant. Of long times it decodes alone, no step is counted."""
        self.turns.charge_alone(seconds)
        if step.chunks:
            self.times.add(step.num_tokens, seconds)

    def left_out(
        self, running: Sequence[SequenceState], waiting: WaitingQueue, budget: int
    ) -> frozenset[bytes]:
        """Tenants without a share of the next step."""
        turns = self.turns
        tenants = turns.tenants
        limit = min([turns.used(tenant) for tenant in tenants]) + _QUANTUM
        ahead = frozenset([tenant for tenant in tenants if turns.used(tenant) > limit])
        if not ahead:
            return ahead
        tokens: Counter[bytes] = Counter()
        for sequence in running:
            tokens[sequence.request.tenant] += max(1, sequence.num_uncomputed)
        for tenant, queue in waiting.queues.items():
            tokens[tenant] += queue[0].num_tokens
        fewer = sum([count for tenant, count in tokens.items() if tenant not in ahead])
        is_slow = self.times.is_twice_as_slow(min(budget, tokens.total()), min(budget, fewer))
        return ahead if is_slow else frozenset()

    def budget(self, running: Sequence[SequenceState], max_tokens: int) -> int:
        """The tokens of the next step, up to `max_tokens`.

        Long prompts are computed in small chunks, so that other tenants need not wait for them.
        Called with several tenants.
        """
        min_tokens = len(running) + _MIN_CHUNK
        in_time = self.times.largest_within(_SLICE, max_tokens)
        return min(max_tokens, max(min_tokens, in_time))

    def for_seqs(
        self, running: Sequence[SequenceState], sequence: SequenceState, missing: int, max_seqs: int
    ) -> list[SequenceState] | None:
        """Sequences to preempt so that a waiting one may run: `missing` of `max_seqs` sequences.

        None if it would exceed its tenant's share; empty if no other tenant has enough sequences
        above its own.
        """
        share = max(1, max_seqs // len(self.turns.tenants))
        held = _held(running, _seqs_of)
        own = held[sequence.request.tenant]
        if own and own + sequence.num_seqs > share:
            return None
        return _victims(running, sequence, held, share, missing, _seqs_of)

    def for_blocks(
        self,
        running: Sequence[SequenceState],
        sequence: SequenceState,
        needed: int,
        missing: int,
    ) -> list[SequenceState] | None:
        """The same for the blocks of its prompt: it needs `needed`, and misses `missing`."""
        share = self._manager.num_blocks // len(self.turns.tenants)
        held = _held(running, self._blocks_of)
        own = held[sequence.request.tenant]
        if own and own + needed > share:
            return None
        return _victims(running, sequence, held, share, missing, self._blocks_of)

    def for_decode(
        self, running: Sequence[SequenceState], sequence: SequenceState
    ) -> SequenceState:
        """The sequence to preempt for the next block of a running one, perhaps itself.

        It is the newest that frees blocks of the tenant that holds most, and in its own tenant
        none before it. It is never of the request that arrived first of all.
        """
        oldest = min(running, key=_arrival_of)
        held = _held(running, self._blocks_of)
        for tenant in sorted(held, key=lambda name: -held[name]):
            for candidate in reversed(running):
                if candidate.request.tenant != tenant:
                    continue
                if candidate is sequence:
                    if candidate is oldest:
                        break
                    return sequence
                if candidate is not oldest and self._blocks_of(candidate) > 0:
                    return candidate
        return sequence

    def _blocks_of(self, sequence: SequenceState) -> int:
        """Blocks that its preemption frees."""
        return self._manager.preview(sequence.kv)


def _seqs_of(sequence: SequenceState) -> int:
    return sequence.num_seqs


def _arrival_of(sequence: SequenceState) -> int:
    return sequence.order[1]


def _held(
    running: Sequence[SequenceState], size_of: "Callable[[SequenceState], int]"
) -> Counter[bytes]:
    """Blocks or sequences that the sequences of each tenant hold."""
    held: Counter[bytes] = Counter()
    for sequence in running:
        held[sequence.request.tenant] += size_of(sequence)
    return held


def _victims(
    running: Sequence[SequenceState],
    sequence: SequenceState,
    held: Counter[bytes],
    share: int,
    missing: int,
    size_of: "Callable[[SequenceState], int]",
) -> list[SequenceState]:
    """The newest sequences of tenants above their share; empty if they hold too little above it.

    `held` is changed.
    """
    oldest = min(running, key=_arrival_of)
    candidates: dict[bytes, list[SequenceState]] = {}
    for other in running:
        candidates.setdefault(other.request.tenant, []).append(other)
    candidates.pop(sequence.request.tenant, None)
    victims = []
    while missing > 0 and candidates:
        tenant = max(candidates, key=lambda name: held[name])
        candidate = candidates[tenant].pop()
        size = size_of(candidate)
        if not candidates[tenant] or held[tenant] - size < share:  # the first one is kept
            del candidates[tenant]
        elif size > 0 and candidate is not oldest:
            victims.append(candidate)
            held[tenant] -= size
            missing -= size
    return victims if missing <= 0 else []
