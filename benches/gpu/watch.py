"""Where the time of a step goes, seen from the engine thread."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import Any
from unittest.mock import patch

from pyengine.engine.core import Engine
from pyengine.sampling.sampler import Sampled


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
def watched(engine: Engine) -> Iterator[Stopwatch]:
    """Times of the parts of a step: of the launch, what is not filling in the inputs."""
    watch, executor, scheduler = Stopwatch(), engine._executor, engine._scheduler
    targets: tuple[tuple[str, Any, str], ...] = (
        ("schedule", scheduler, "schedule"),
        ("fill", executor.runner, "prepare"),
        ("launch", executor, "_enqueue"),
        ("wait", Future, "result"),
        ("wait", Sampled, "wait"),
        ("commit", scheduler, "commit"),
    )
    with ExitStack() as stack:
        for name, owner, method in targets:
            call = watch.timed(name, getattr(owner, method))
            if isinstance(owner, type):  # a function that is called with the instance
                call = as_method(call)
            stack.enter_context(patch.object(owner, method, call))
        yield watch


def as_method(call: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function: in the place of a method it is called with the instance."""

    def method(self: Any) -> Any:
        return call(self)

    return method
