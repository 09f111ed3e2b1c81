"""Paged attention: one interface, one file per backend, one function that transformers calls."""

from pyengine.attention.interface import (
    AttentionBackend,
    AttentionOptions,
    AttentionPlan,
    GraphPlan,
)
from pyengine.attention.metadata import PagedContext, StepInputs
from pyengine.attention.needs import AttentionNeeds, LayerNeeds, needs_of
from pyengine.attention.registry import (
    ATTENTION_NAME,
    Choice,
    choose_backend,
    explain_backends,
    register_paged_attention,
    select_backend,
)

__all__ = [
    "ATTENTION_NAME",
    "AttentionBackend",
    "AttentionNeeds",
    "AttentionOptions",
    "AttentionPlan",
    "Choice",
    "GraphPlan",
    "LayerNeeds",
    "PagedContext",
    "StepInputs",
    "choose_backend",
    "explain_backends",
    "needs_of",
    "register_paged_attention",
    "select_backend",
]
