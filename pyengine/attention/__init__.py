"""Paged attention: one interface, one file per backend, one function that transformers calls."""

from pyengine.attention.backend import (
    AttentionBackend,
    AttentionOptions,
    AttentionPlan,
    GraphPlan,
    StepInputs,
)
from pyengine.attention.choice import Choice, choose_backend, explain_backends, select_backend
from pyengine.attention.dispatch import ATTENTION_NAME, PagedContext, register_paged_attention
from pyengine.attention.needs import AttentionNeeds, LayerNeeds, needs_of

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
