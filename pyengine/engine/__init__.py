"""The loop that joins the rooms; `LLM`, its offline face, and `AsyncEngine` for many callers."""

from pyengine.engine.async_engine import AsyncEngine
from pyengine.engine.engine import Engine, EngineObserver, EngineStats, StepResult
from pyengine.engine.executor import Executor
from pyengine.engine.intake import ModelFacts
from pyengine.engine.llm import LLM
from pyengine.engine.prompts import Prompt
from pyengine.engine.request import OutputSink, RequestState

__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "EngineObserver",
    "EngineStats",
    "Executor",
    "ModelFacts",
    "OutputSink",
    "Prompt",
    "RequestState",
    "StepResult",
]
