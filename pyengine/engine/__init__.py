"""The loop that joins the rooms; `LLM`, its offline face, and `AsyncEngine` for many callers."""

from pyengine.core.openmp import wait_briefly

wait_briefly()  # before torch is imported

from pyengine.engine.async_engine import AsyncEngine
from pyengine.engine.chat import ChatOptions, render_chat, template_reads, unread_keys
from pyengine.engine.engine import Engine, EngineObserver, EngineStats, StepResult
from pyengine.engine.executor import Executor
from pyengine.engine.foreign import encode_text, tokenizer_errors
from pyengine.engine.intake import Intake, ModelFacts
from pyengine.engine.llm import LLM
from pyengine.engine.prompt_logprobs import PromptLogprobCache
from pyengine.engine.prompts import Prompt
from pyengine.engine.request import OutputSink, RequestState, Sample
from pyengine.engine.stream import OutputStream
from pyengine.engine.view import EngineView, RequestView

__all__ = [
    "LLM",
    "AsyncEngine",
    "ChatOptions",
    "Engine",
    "EngineObserver",
    "EngineStats",
    "EngineView",
    "Executor",
    "Intake",
    "ModelFacts",
    "OutputSink",
    "OutputStream",
    "Prompt",
    "PromptLogprobCache",
    "RequestState",
    "RequestView",
    "Sample",
    "StepResult",
    "encode_text",
    "render_chat",
    "template_reads",
    "tokenizer_errors",
    "unread_keys",
]
