"""Results of steps, statistics, and a view of the engine between two steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from pyengine.kv_cache import BlockManager, PoolSnapshot, PoolUsage
from pyengine.request.request import Request, SequenceState
from pyengine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: new tokens, their sequences, and the requests that it ended."""

    num_new_tokens: int = 0
    finished: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens whose KV it computed, of prompts and decodes."""
    rows: Sequence[SequenceState] = ()
    """Sequences that got a token; the same object in steps that decode the same ones. Includes
    sequences that were aborted or ended in the step before, which got none."""
    begun: list[Request] = field(default_factory=list)
    """Requests whose prompt it completed: they have their first token, if any."""
    ended: list[SequenceState] = field(default_factory=list)
    """Samples that it ended, also of unfinished requests."""
    num_drafted: int = 0
    """New tokens that were accepted drafts: those beyond one for each sequence."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of the engine. `counters` only grow: the block manager's, and reuse by forks."""

    usage: PoolUsage
    counters: dict[str, int]
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_new_tokens: int
    """Tokens generated so far."""
    num_drafts: int = 0
    """Decodes with drafts so far. With the counters `draft_tokens` and `accepted_draft_tokens`, the
    acceptance rate is `accepted_draft_tokens / draft_tokens`, and such a decode gives
    `1 + accepted_draft_tokens / num_drafts` tokens."""
    store: Mapping[str, float] = field(default_factory=dict)
    """Counters of restores, writes and the store; empty without a store."""
    verification: Mapping[str, int] = field(default_factory=dict)
    """Counters of verified cache hits; empty without `verify_cache_hits`."""


class EngineObserver(Protocol):
    """An observer, for metrics. Called in the engine thread."""

    def on_arrival(self, request: Request) -> None:
        """A request was queued."""

    def on_step(self, result: StepResult) -> None:
        """A step was run."""

    def on_finish(self, request: Request) -> None:
        """A request has ended, for any reason; its times are those of `RequestMetrics`."""


class RequestView(NamedTuple):
    """The progress of a request. Times are seconds of `time.monotonic`; counts are tokens.

    `num_computed` are tokens of the prompt (after a preemption: of all) whose KV is in the pool;
    `num_output` and `max_output` are those of all its samples. Tokens that a running step samples
    are counted.
    """

    request: Request
    is_running: bool
    num_prompt: int
    num_cached: int
    num_computed: int
    num_output: int
    max_output: int
    num_preemptions: int
    arrival_time: float
    first_token_time: float | None


class TenantLoad(NamedTuple):
    """The load of one tenant: sequences that run, and requests that wait."""

    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """A consistent view: the counts of `pool` are those of `stats.usage`.

    `requests` are the running ones, in order, then waiting ones in order of arrival, up to the
    requested number.
    """

    stats: EngineStats
    pool: PoolSnapshot
    requests: list[RequestView]


def view_of(
    stats: EngineStats,
    manager: BlockManager,
    scheduler: Scheduler,
    unfinished: Iterable[Request],
    max_requests: int,
) -> EngineView:
    """Make the view, in the engine thread. O(blocks + requests shown + running requests)."""
    running = dict.fromkeys([sequence.request for sequence in scheduler.running])
    max_waiting = max(0, max_requests - len(running))
    waiting = islice((request for request in unfinished if request not in running), max_waiting)
    requests = [_view(request, is_running=True) for request in islice(running, max_requests)]
    requests += [_view(request, is_running=False) for request in waiting]
    return EngineView(stats, manager.snapshot(), requests)


def _view(request: Request, *, is_running: bool) -> RequestView:
    num_prompt, sequences = len(request.prompt_token_ids), request.sequences
    first = sequences[0]
    if len(sequences) == 1 or first.num_seqs > 1:
        num_output = first.num_tokens - num_prompt
    else:
        num_output = sum([sequence.num_tokens - num_prompt for sequence in sequences])
    return RequestView(
        request=request,
        is_running=is_running,
        num_prompt=num_prompt,
        num_cached=request.progress.num_cached_tokens,
        num_computed=first.num_computed,
        num_output=num_output,
        max_output=request.rules.max_output * len(sequences),
        num_preemptions=request.progress.num_preemptions,
        arrival_time=request.arrival_time,
        first_token_time=request.result.first_token_time,
    )
