"""`LLM` and `AsyncEngine` as they are, around the fake runner: no model, no files."""

from pathlib import Path
from typing import Any

from pyengine.async_engine import AsyncEngine
from pyengine.config import EngineSettings
from pyengine.engine import client as frontend_module
from pyengine.engine.builder import BuiltEngine
from pyengine.executor.cpu_threads import compute_threads
from pyengine.llm import LLM
from pyengine.sampling_params import SamplingParams
from tests.support.engines import Bench, make_bench


class _Loaded:
    def __init__(self, tokenizer: Any) -> None:
        self.path = Path("nowhere")
        self.tokenizer = tokenizer


class FakeModel:
    """A built engine, with access to its internals."""

    def __init__(self, patch: Any, *, tokenizer: Any = None, **settings: Any) -> None:
        self.bench: Bench = make_bench(tokenizer=tokenizer, **settings)
        self._built = BuiltEngine(
            loaded=_Loaded(tokenizer),  # type: ignore[arg-type]
            manager=self.bench.manager,
            engine=self.bench.engine,
            worker_group=None,
            threads=compute_threads(None),
            default_params=SamplingParams(temperature=0, max_tokens=4),
            description={},
        )
        patch.setattr(frontend_module, "build_engine", self._build)

    def _build(self, settings: EngineSettings) -> BuiltEngine:
        return self._built

    def llm(self, **settings: Any) -> LLM:
        return LLM(**settings)

    def async_engine(self, **settings: Any) -> AsyncEngine:
        return AsyncEngine(**settings)
