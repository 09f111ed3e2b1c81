"""`LLM` and `AsyncEngine` as they are, around the fake runner: no model, no files."""

import gc
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from weakref import ref

from pyengine.async_engine import AsyncEngine
from pyengine.config import EngineSettings
from pyengine.cpu.threads import compute_threads
from pyengine.engine import client as frontend_module
from pyengine.engine.builder import BuiltEngine
from pyengine.engine.client import EngineClientBase
from pyengine.llm import LLM
from pyengine.models.pooling import PoolingConfig
from pyengine.sampling_params import SamplingParams
from tests.support.engines import Bench, make_bench


class _Loaded:
    def __init__(self, tokenizer: Any) -> None:
        self.path = Path("nowhere")
        self.gguf = None
        self.tokenizer = tokenizer
        self.pooling, self.hidden_size = PoolingConfig(), 4


class FakeModel:
    """A built engine, with access to its internals."""

    def __init__(self, patch: Any, *, tokenizer: Any = None, **settings: Any) -> None:
        self.bench: Bench = make_bench(tokenizer=tokenizer, **settings)
        self._built = BuiltEngine(
            loaded=_Loaded(tokenizer),  # type: ignore[arg-type]
            manager=self.bench.manager,
            engine=self.bench.engine,
            input_processor=self.bench.processor,
            pins=self.bench.scheduler.pins,
            offloader=None,
            verifier=None,
            weights=None,  # type: ignore[arg-type]
            adapters=None,
            inbox=SimpleQueue(),
            worker_group=None,
            threads=compute_threads(None),
            default_params=SamplingParams(temperature=0, max_tokens=4),
            description={},
        )
        self.made: list[tuple[ref[EngineClientBase], Thread]] = []
        patch.setattr(frontend_module, "build_engine", self._build)

    def _build(self, settings: EngineSettings, *, populate: bool) -> BuiltEngine:
        """The engine; those that had it before must be dropped, and their threads end first."""
        if self.made:
            gc.collect()
        for client, thread in self.made:
            if client() is None:
                thread.join(10)
        return self._built

    def close(self) -> None:
        """End the threads of engines that the steps of a test refer to, which are never dropped."""
        for client, thread in self.made:
            if (engine := client()) is not None:
                engine.close()
            thread.join(10)

    def fail_on(self, token: int) -> None:
        """Let steps with this token raise."""
        run = self.bench.runner.run

        def poisoned(sizes: Any, *step: Any) -> Any:
            if token in self.bench.runner.arrays["input_ids"][: sizes[0]]:
                raise ValueError(f"token {token}")
            return run(sizes, *step)

        self.bench.runner.run = poisoned  # type: ignore[method-assign]

    def llm(self, **settings: Any) -> LLM:
        llm = LLM(**settings)
        self.made.append((ref(llm), llm._engine_loop._thread))
        return llm

    def async_engine(self, **settings: Any) -> AsyncEngine:
        engine = AsyncEngine(**settings)
        self.made.append((ref(engine), engine._engine_loop._thread))
        return engine


class Gate:
    """Holds up steps of a bench: the next one after `close`, or after so many."""

    def __init__(self, bench: Bench, num_steps: int | None = None) -> None:
        self.is_open, self.is_held = Event(), Event()
        self.num_left = num_steps
        if num_steps is None:
            self.is_open.set()
        run = bench.runner.run

        def gated(*step: Any) -> Any:
            if self.num_left:
                self.num_left -= 1
            elif not self.is_open.is_set():
                self.is_held.set()
                assert self.is_open.wait(10)
            return run(*step)

        bench.runner.run = gated  # type: ignore[method-assign]

    def close(self) -> None:
        """Hold up the next step, and wait until it is there."""
        self.is_held.clear()
        self.is_open.clear()
        assert self.is_held.wait(10)
