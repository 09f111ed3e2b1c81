"""A replica without a model: a real block manager, a queue, and a clock that a cost model moves."""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from pyengine.cluster.feed import EventLog
from pyengine.cluster.messages import Events, Load
from pyengine.kv_cache import BlockManager, Prefilled, Sequence

BUDGET = 2048
"""Tokens of prompts in a step at most."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a step takes, by what is in it. `measure.py` measures them."""

    step: float
    prompt_token: float
    """Of a prompt, computed."""
    prompt_context: float
    """The same, for each token before it, in millions of pairs."""
    row: float
    """A sequence that decodes."""
    row_context: float
    """The same, for each token before it, in thousands."""

    def seconds(self, prompt: int, context: int, rows: int, rows_context: float) -> float:
        """A step of `prompt` tokens behind `context`, and `rows` that decode."""
        return (
            self.step
            + self.prompt_token * prompt
            + self.prompt_context * prompt * (context + prompt / 2) / 1e6
            + self.row * rows
            + self.row_context * rows_context / 1e3
        )


@dataclass(eq=False, slots=True)
class SimRequest:
    """A request: when it came, and how far it is."""

    number: int
    arrival: float
    tokens: np.ndarray[Any, Any]
    output: float
    session: int
    sequence: Sequence | None = None
    cached: int = 0
    left: int = 0
    """Tokens of the prompt that are not computed yet, as far as is known."""
    first: float = math.nan
    """When its prompt was computed."""
    ticket: Any = None


class Later:
    """Future events, in order of their time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def at(self, time: float, do: Callable[[], object]) -> None:
        """Do it then."""
        heapq.heappush(self._heap, (time, next(self._numbers), do))

    def until(self, time: float) -> None:
        """Do all that was for this time and before."""
        while self._heap and self._heap[0][0] <= time:
            heapq.heappop(self._heap)[2]()


@dataclass(slots=True)
class Heard:
    """Callbacks of a replica: events after a step, a computed prompt, an answer's end."""

    events: Callable[[float, "SimReplica", Events], object]
    first: Callable[[float, SimRequest], object]
    end: Callable[[float, SimRequest], object]


@dataclass(slots=True)
class SimReplica:
    """Prompts one after the other, in chunks; whoever has its prompt decodes beside them."""

    name: str
    num_blocks: int
    block_size: int
    costs: Costs
    heard: Heard
    hash_seed: int = 0
    now: float = 0.0
    busy: float = 0.0
    """Seconds at work."""
    waiting: deque[SimRequest] = field(default_factory=deque)
    running: list[SimRequest] = field(default_factory=list)
    manager: BlockManager = field(init=False)
    log: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.manager = BlockManager(
            self.num_blocks, self.block_size, events=True, hash_seed=self.hash_seed
        )
        self.log = EventLog(self.manager)

    @property
    def queued(self) -> int:
        """Tokens of prompts that are to be computed, as far as is known."""
        return sum([request.left for request in self.waiting])

    def hits(self, tokens: np.ndarray[Any, Any]) -> int:
        """Tokens that it has cached now."""
        with self.manager.match_prefix(tokens) as pin:
            return min(pin.num_tokens, len(tokens) - 1)

    def take(self, request: SimRequest) -> None:
        """A request has come."""
        request.sequence = self.manager.sequence(request.tokens)
        request.left = len(request.tokens) - self.hits(request.tokens)
        self.now = max(self.now, request.arrival)
        self.waiting.append(request)

    def until(self, time: float) -> None:
        """Work until then; a step that has begun is done to its end."""
        while self.now < time and (self.waiting or self.running):
            before = self.now
            if not self.waiting or not self._prefill():
                self._decode(time)
            self.busy += self.now - before

    def _context(self) -> float:
        return sum([len(request.tokens) for request in self.running])

    def _prefill(self) -> bool:
        """One step with prompts in it; False if the next one does not fit."""
        plan, budget, done, computed, context = (
            self.manager.begin_step(BUDGET),
            BUDGET,
            list[SimRequest](),
            0,
            0,
        )
        while self.waiting and budget > 0:
            request = self.waiting[0]
            assert request.sequence is not None
            answer = plan.prefill(
                request.sequence, budget, spare_blocks=math.ceil(request.output / self.block_size)
            )
            if not isinstance(answer, Prefilled):
                break
            budget -= answer.num_tokens
            computed += answer.num_tokens
            context = request.sequence.num_computed_tokens
            request.left = len(request.tokens) - context - answer.num_tokens
            if not answer.samples:
                break
            self.waiting.popleft()
            done.append(request)
        if not computed:
            plan.rollback()
            return False
        plan.copies()
        plan.commit([0] * len(done))
        rows = len(self.running)
        self.now += self.costs.seconds(computed, context, rows, self._context())
        self.heard.events(self.now, self, self.log.take(Load()))
        self._advance(1.0)
        for request in done:
            assert request.sequence is not None
            request.first, request.cached = self.now, request.sequence.num_cached_tokens
            request.sequence.extend(math.ceil(request.output))  # its answer takes blocks, too
            request.left = 0
            self.heard.first(self.now, request)
            self.running.append(request)
        return True

    def _decode(self, time: float) -> None:
        """Steps of decodes alone, up to the next end or to `time`."""
        if not self.running:
            raise RuntimeError(f"{self.name} has no room for a prompt by itself: more blocks")
        step = self.costs.seconds(0, 0, len(self.running), self._context())
        steps = min(request.output for request in self.running)
        if self.now + steps * step > time:
            steps = (time - self.now) / step
        self.now += steps * step
        self._advance(steps)

    def _advance(self, steps: float) -> None:
        """Everybody who decodes has so many tokens more."""
        for request in self.running:
            request.output -= steps
        ended = [request for request in self.running if request.output <= 1e-9]
        for request in ended:
            self.running.remove(request)
            assert request.sequence is not None
            request.sequence.free()
            self.heard.end(self.now, request)
