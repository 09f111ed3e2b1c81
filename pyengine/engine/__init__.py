"""The loop that joins the rooms; `LLM`, its offline face, and `AsyncEngine` for many callers."""

from pyengine.engine.async_engine import AsyncEngine
from pyengine.engine.chat import ChatOptions, render_chat
from pyengine.engine.engine import Engine, EngineObserver, EngineStats, StepResult
from pyengine.engine.executor import Executor
from pyengine.engine.intake import ModelFacts
from pyengine.engine.llm import LLM
from pyengine.engine.prompts import Prompt
from pyengine.engine.request import OutputSink, RequestState
from pyengine.engine.stream import OutputStream

__all__ = [
    "LLM",
    "AsyncEngine",
    "ChatOptions",
    "Engine",
    "EngineObserver",
    "EngineStats",
    "Executor",
    "ModelFacts",
    "OutputSink",
    "OutputStream",
    "Prompt",
    "RequestState",
    "StepResult",
    "render_chat",
]
