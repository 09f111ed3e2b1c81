"""What the host does in a step beside waiting, and whether the device waits for it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from threading import get_ident
from time import perf_counter
from typing import Any
from unittest.mock import patch

from benches.gpu_check.rows import Part, Row, Setup, rounded
from benches.gpu_check.timing import (
    DecodeWork,
    build,
    decoding,
    load,
    release,
    seconds_per_step,
    shape_of,
    steps_needed,
    tokens_needed,
)
from pyengine import LLM
from pyengine.models import LoadedModel
from pyengine.runner import Work
from pyengine.sampling import PendingSample

_FULL, _TINY = (256, 512, 32), (4, 32, 2)
"""Requests, context, steps."""
_CHUNK = 8192


def parts(setup: Setup) -> list[Part]:
    """One step at a time, then with the next one in the queue."""
    model = cache(partial(load, setup))
    return [
        ("overlap off", lambda: _host(setup, model(), ahead=False)),
        ("overlap on", lambda: _host(setup, model(), ahead=True)),
    ]


@dataclass
class Stopwatch:
    """Seconds by the name of what took them, in this thread, each second counted once."""

    spent: dict[str, float] = field(default_factory=dict)
    _thread: int = field(default_factory=get_ident)
    _within: list[float] = field(default_factory=lambda: [0.0])
    """For each timed call that is under way: the time of those that it has made."""

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose time is added to `name`, but for that of timed calls within it."""
        self.spent.setdefault(name, 0.0)

        def timer(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:
                return call(*args, **kwargs)
            self._within.append(0.0)
            start = perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                whole = perf_counter() - start
                self.spent[name] += whole - self._within.pop()
                self._within[-1] += whole

        return timer


@contextmanager
def _watched(llm: LLM) -> Iterator[Stopwatch]:
    """Times of the parts of a step: of the launch, what is not filling in the inputs."""
    watch, engine = Stopwatch(), llm._engine
    executor, scheduler = engine._executor, engine._scheduler
    targets: tuple[tuple[str, Any, str], ...] = (
        ("schedule", scheduler, "schedule"),
        ("fill", executor.runner, "prepare"),
        ("launch", executor._queue, "submit"),
        ("wait", Work, "result"),
        ("wait", PendingSample, "result"),
        ("commit", scheduler, "commit"),
    )
    with ExitStack() as stack:
        for name, owner, method in targets:
            call = watch.timed(name, getattr(owner, method))
            if isinstance(owner, type):  # a function that is called with the instance
                stack.enter_context(patch.object(owner, method, _method(call)))
            else:
                stack.enter_context(patch.object(owner, method, call))
        yield watch


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any) -> Any:
        return call(self)

    return method


def _host(setup: Setup, loaded: LoadedModel, *, ahead: bool) -> Iterator[Row]:
    release(setup)
    count, context, steps = _FULL if setup.on_cuda else _TINY
    task = DecodeWork(count=count, context=context, chunk=_CHUNK, steps=steps_needed(steps) + steps)
    llm = build(
        setup,
        loaded,
        max_num_seqs=count,
        max_model_len=tokens_needed(task),
        max_num_batched_tokens=_CHUNK,
        async_scheduling=ahead,
    )
    with decoding(llm, shape_of(setup), task) as work:
        unwatched = seconds_per_step(work.engine, steps)
        with _watched(llm) as watch:
            start = perf_counter()
            for _ in range(steps):
                work.engine.step()
            whole = perf_counter() - start
    spent = {name: 1e6 * seconds / steps for name, seconds in watch.spent.items()}
    outputs = 1e6 * whole / steps - sum(spent.values())
    host = sum(spent[name] for name in ("schedule", "fill", "commit")) + outputs
    numbers = {
        "shape": shape_of(setup).name,
        "work": f"{count} decode, context {context}",
        "overlap": ahead,
        "step_us": rounded(1e6 * unwatched),
        "host_us": rounded(host),
        "outputs_us": rounded(outputs),
        **{f"{name}_us": rounded(value) for name, value in spent.items()},
        "host_share": rounded(host / (1e6 * whole / steps)),
    }
    yield Row(f"host work, overlap {'on' if ahead else 'off'}", "info", numbers)
