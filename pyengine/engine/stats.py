"""A look at the whole engine between two steps: the pool, who runs and who waits."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pyengine.engine.request import RequestState
from pyengine.kv_cache import BlockManager, Survey
from pyengine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from pyengine.engine.core import EngineStats


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
    """Everything of one moment: the counts of `pool` are those of `stats.ledger`.

    `requests` are those that run, in their order, then as many that wait as were asked for, in the
    order in which they came.
    """

    stats: "EngineStats"
    pool: Survey
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
    states = [sequence for sequence in running if isinstance(sequence, RequestState)]
    room = max(0, most_requests - len(states))
    waiting = islice((sample for sample in unfinished if sample not in running), room)
    requests = [_view(state, is_running=True) for state in states[:most_requests]]
    requests += [_view(request, is_running=False) for request in waiting]
    return EngineView(stats, manager.survey(), requests)


def _view(state: RequestState, *, is_running: bool) -> RequestView:
    num_prompt, samples = len(state.prompt_token_ids), state.samples
    first = samples[0]
    if len(samples) == 1 or first.num_slots > 1:
        num_output = first.num_tokens - num_prompt
    else:
        num_output = sum([sample.num_tokens - num_prompt for sample in samples])
    return RequestView(
        state=state,
        is_running=is_running,
        num_prompt=num_prompt,
        num_cached=state.num_cached_tokens,
        num_computed=first.num_computed,
        num_output=num_output,
        max_output=sum([sample.max_output for sample in samples]),
        num_preemptions=state.num_preemptions,
        arrival_time=state.arrival_time,
        first_token_time=state.first_token_time,
    )
