"""The loop that joins the rooms, and `LLM`, its offline face."""

from pyengine.engine.engine import Engine, EngineStats, ModelFacts, Prompt, StepResult
from pyengine.engine.llm import LLM
from pyengine.engine.pipeline import Pipeline

__all__ = ["LLM", "Engine", "EngineStats", "ModelFacts", "Pipeline", "Prompt", "StepResult"]
