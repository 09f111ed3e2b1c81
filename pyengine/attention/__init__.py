"""Paged attention: one interface, one file per backend, one function that transformers calls."""

from pyengine.attention.interface import (
    AttentionBackend,
    AttentionOptions,
    AttentionPlan,
    GraphPlan,
)
from pyengine.attention.metadata import PagedContext, StepInputs
from pyengine.attention.registry import (
    ATTENTION_NAME,
    AttentionNeeds,
    Choice,
    choose_backend,
    register_paged_attention,
)

__all__ = [
    "ATTENTION_NAME",
    "AttentionBackend",
    "AttentionNeeds",
    "AttentionOptions",
    "AttentionPlan",
    "Choice",
    "GraphPlan",
    "PagedContext",
    "StepInputs",
    "choose_backend",
    "register_paged_attention",
]
