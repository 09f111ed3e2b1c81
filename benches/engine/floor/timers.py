"""Timers around the parts of a running engine.

They replace attributes of its objects: the products and the attention of each layer, the kernel
set, scheduler, runner and sampler. The engine's own code has none. `Timers.off` puts everything
back, so steps with timers and without them are compared in one engine.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any

import numpy as np

from benches.engine.floor.parts import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    INPUTS,
    NORMS,
    OTHER,
    ROTATION,
    SAMPLING,
    SCHEDULING,
    FloorError,
    layer_parts,
    products,
)
from pyengine.cpu import limit_threads
from pyengine.executor import executor as executor_module
from pyengine.models.decoder.model import DecoderModel

_THREAD = "pyengine-engine"
_OPERATIONS = {"norm": NORMS, "add_norm": NORMS, "angles": ROTATION}
"""The part of an operation of the kernel set; others are `OTHER`."""


@dataclass(slots=True)
class TimedStep:
    """A step: nanoseconds by part; its start, its end and the processor time of the process."""

    spent: dict[str, int]
    start: int
    end: int
    processor: int
    num_tokens: int
    num_rows: int


@dataclass(slots=True)
class _Timed:
    """An object whose methods are timed as a part of the step."""

    inner: Any
    spent: dict[str, int]
    parts: dict[str, str]
    other: str = OTHER
    made: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name not in self.made:
            part = self.parts.get(name, self.other)
            self.made[name] = _timed(getattr(self.inner, name), self.spent, part)
        return self.made[name]


def _timed(call: Callable[..., Any], spent: dict[str, int], part: str) -> Callable[..., Any]:
    def timer(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter_ns()
        try:
            return call(*args, **kwargs)
        finally:
            spent[part] = spent.get(part, 0) + perf_counter_ns() - start

    return timer


class Timers:
    """The timers of an `LLM`, whose steps are recorded in `steps`.

    Raises `FloorError` unless its decoder and its attention are the CPU kernels'.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm._engine
        self._runner = self._engine._executor.runner
        check_engine(llm, self._runner)
        self._decoder = self._runner._model._decoder
        self.spent: dict[str, int] = {}
        self.steps: list[TimedStep] = []
        self._put_back: list[Callable[[], None]] = []
        self._runner.pool.populate()  # a first write allocates memory, which is not of a part
        self._one_thread = False
        self._step = self._engine.step
        self._engine.step = self._recorded_step

    def _recorded_step(self) -> Any:
        self.spent.clear()
        if self._one_thread:
            limit_threads(1)  # the loop sets its limit again for the next step
        processor, start = process_time_ns(), perf_counter_ns()
        result = self._step()
        end = perf_counter_ns()
        processor = process_time_ns() - processor
        rows, tokens = len(result.rows), result.num_tokens
        self.steps.append(TimedStep(dict(self.spent), start, end, processor, tokens, rows))
        return result

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the parts are timed."""
        self._install()
        try:
            yield
        finally:
            self.off()

    def off(self) -> None:
        """Put everything back, except the recording of whole steps."""
        while self._put_back:
            self._put_back.pop()()

    @contextmanager
    def without_writes(self) -> Iterator[None]:
        """Inside, attention neither rotates nor writes keys and values: the answers are wrong."""
        attentions = [layer._mixer._attention for layer in self._decoder._layers]
        before = [(attention._spec, attention._weights) for attention in attentions]
        backend = self._runner._backend
        metadata = backend.metadata

        def metadata_without_slots(inputs: Any) -> Any:
            nowhere = np.full_like(inputs.slot_mapping, -1)
            return metadata(replace(inputs, slot_mapping=nowhere))

        for attention, (spec, weights) in zip(attentions, before, strict=True):
            attention._spec = replace(spec, rotary=None)
            attention._weights = replace(weights, head_norms=None)
        backend.metadata = metadata_without_slots
        try:
            yield
        finally:
            del backend.metadata
            for attention, (spec, weights) in zip(attentions, before, strict=True):
                attention._spec, attention._weights = spec, weights

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Inside, steps are computed by one thread."""
        self._one_thread = True
        try:
            yield
        finally:
            self._one_thread = False

    def close(self) -> None:
        """Stop recording."""
        self.off()
        vars(self._engine).pop("step", None)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        was_own = name in getattr(owner, "__dict__", {}) or hasattr(type(owner), "__slots__")

        def put_back() -> None:
            if was_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        setattr(owner, name, value)
        self._put_back.append(put_back)

    def _wrap(
        self, owner: Any, name: str, parts: dict[str, str] | None = None, other: str = OTHER
    ) -> None:
        """Time the methods of the object that `owner` holds."""
        self._replace(owner, name, _Timed(getattr(owner, name), self.spent, parts or {}, other))

    def _time(self, owner: Any, name: str, part: str) -> None:
        """Time a method, or a function of a module."""
        self._replace(owner, name, _timed(getattr(owner, name), self.spent, part))

    def _install(self) -> None:
        decoder, engine = self._decoder, self._engine
        for part, linear in products(decoder):
            self._wrap(linear, "product", other=part)
        for part in layer_parts(decoder):
            if hasattr(part, "_attention"):
                self._wrap(part, "_attention", other=ATTENTION)
            if hasattr(part, "_kernels"):
                self._wrap(part, "_kernels", _OPERATIONS)
        tables = {"gather": EMBEDDING, "multiply": HEAD}
        self._wrap(decoder, "kernels", _OPERATIONS)
        self._wrap(decoder, "_head", tables)
        self._wrap(decoder, "_embedding", tables)
        if decoder._positions is not None:
            self._wrap(decoder, "_positions", tables)
        for name in ("schedule", "commit"):
            self._time(engine._scheduler, name, SCHEDULING)
        self._time(self._runner, "prepare", INPUTS)
        self._time(self._runner._backend, "metadata", INPUTS)
        self._time(executor_module, "sample", SAMPLING)


def check_engine(llm: Any, runner: Any) -> None:
    """Raise `FloorError` unless the engine's decoder and attention are the CPU kernels'."""
    about = llm.describe()
    model = getattr(runner, "_model", None)
    if about["device"] != "cpu":
        raise FloorError(f"the engine runs on {about['device']}: only CPUs have these parts")
    if not isinstance(model, DecoderModel) or not model.takes_arrays:
        raise FloorError(
            f"the model runs in {about['decoder']} with torch's operations, not with the CPU "
            f"kernels: its family or dtype ({about['dtype']}) has none, or it is compiled"
        )
    if about["attention_backend"] != "cpu":
        raise FloorError(
            f"attention is computed by {about['attention_backend']!r}, not by the CPU kernels: "
            f"{about['attention_reason']}"
        )


def waiting_seconds() -> tuple[float, float]:
    """Seconds that the engine's thread, and all others, waited for a processor; 0: not counted."""
    engine = {str(thread.native_id) for thread in threading.enumerate() if thread.name == _THREAD}
    own = others = 0
    tasks = Path("/proc/self/task")
    for folder in tasks.iterdir() if tasks.exists() else ():
        try:
            waited = int((folder / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended; another format
            continue
        if folder.name in engine:
            own += waited
        else:
            others += waited
    return own / 1e9, others / 1e9
