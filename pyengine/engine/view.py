"""A look at the whole engine between two steps: the pool, who runs and who waits."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pyengine.cache import BlockManager, PoolSnapshot
from pyengine.engine.request import RequestState
from pyengine.scheduler import Scheduler

if TYPE_CHECKING:
    from pyengine.engine.engine import EngineStats


class RequestView(NamedTuple):
    """How far a request has come. Times are seconds of `time.monotonic`; counts are tokens.

    `num_computed` are those of the prompt (after a preemption: of all) whose KV is in the pool;
    `num_output` and `max_output` are those of all its samples. Tokens that a step samples which
    still runs are counted.
    """

    state: RequestState
    is_running: bool
    num_prompt: int
    num_cached: int
    num_computed: int
    num_output: int
    max_output: int
    num_preemptions: int
    arrival_time: float
    first_token_time: float | None


@dataclass(frozen=True, slots=True)
class EngineView:
    """Everything of one moment: the counts of `pool` are those of `stats.usage`.

    `requests` are those that run, in their order, then as many that wait as were asked for, in the
    order in which they came.
    """

    stats: "EngineStats"
    pool: PoolSnapshot
    requests: list[RequestView]


def view_of(
    stats: "EngineStats",
    manager: BlockManager,
    scheduler: Scheduler,
    unfinished: Iterable[RequestState],
    most_requests: int,
) -> EngineView:
    """Look, in the thread that runs the steps. O(blocks + requests shown + requests that run)."""
    running = dict.fromkeys([job.request for job in scheduler.running])
    states = [one for one in running if isinstance(one, RequestState)]
    room = max(0, most_requests - len(states))
    waiting = islice((one for one in unfinished if one not in running), room)
    requests = [_view(one, is_running=True) for one in states[:most_requests]]
    requests += [_view(one, is_running=False) for one in waiting]
    return EngineView(stats, manager.snapshot(), requests)


def _view(state: RequestState, *, is_running: bool) -> RequestView:
    num_prompt, samples = len(state.prompt_token_ids), state.samples
    first = samples[0]
    if len(samples) == 1 or first.num_seats > 1:
        num_output = first.num_tokens - num_prompt
    else:
        num_output = sum([one.num_tokens - num_prompt for one in samples])
    return RequestView(
        state=state,
        is_running=is_running,
        num_prompt=num_prompt,
        num_cached=state.num_cached_tokens,
        num_computed=first.num_computed,
        num_output=num_output,
        max_output=sum([one.max_output for one in samples]),
        num_preemptions=state.num_preemptions,
        arrival_time=state.arrival_time,
        first_token_time=state.first_token_time,
    )
