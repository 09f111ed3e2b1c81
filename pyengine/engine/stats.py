"""A view of the whole engine between two steps: the pool, running and waiting requests."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pyengine.engine.request import Request
from pyengine.kv_cache import BlockManager, PoolSnapshot
from pyengine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from pyengine.engine.core import EngineStats


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

    stats: "EngineStats"
    pool: PoolSnapshot
    requests: list[RequestView]


def view_of(
    stats: "EngineStats",
    manager: BlockManager,
    scheduler: Scheduler,
    unfinished: Iterable[Request],
    most_requests: int,
) -> EngineView:
    """Make the view, in the engine thread. O(blocks + requests shown + running requests)."""
    running = dict.fromkeys([sequence.request for sequence in scheduler.running])
    most_waiting = max(0, most_requests - len(running))
    waiting = islice((request for request in unfinished if request not in running), most_waiting)
    requests = [_view(request, is_running=True) for request in islice(running, most_requests)]
    requests += [_view(request, is_running=False) for request in waiting]
    return EngineView(stats, manager.snapshot(), requests)


def _view(request: Request, *, is_running: bool) -> RequestView:
    num_prompt, sequences = len(request.prompt_token_ids), request.sequences
    first = sequences[0]
    if len(sequences) == 1 or first.num_slots > 1:
        num_output = first.num_tokens - num_prompt
    else:
        num_output = sum([sequence.num_tokens - num_prompt for sequence in sequences])
    return RequestView(
        request=request,
        is_running=is_running,
        num_prompt=num_prompt,
        num_cached=request.num_cached_tokens,
        num_computed=first.num_computed,
        num_output=num_output,
        max_output=sum([sequence.max_output for sequence in sequences]),
        num_preemptions=request.num_preemptions,
        arrival_time=request.arrival_time,
        first_token_time=request.first_token_time,
    )
