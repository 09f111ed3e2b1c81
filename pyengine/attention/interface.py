"""The interface between transformers' layers and a paged attention backend."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from pyengine.attention.metadata import StepInputs


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of attention, beyond causality.

    - `scaling`: factor on the products of queries and keys.
    - `sliding_window`: a query sees its own position and the `sliding_window - 1` before it.
    - `softcap`: scores become `softcap * tanh(score / softcap)` before the softmax (Gemma 2).
    - `sinks`: `[query_heads]`, one more score per head that takes part in the softmax and has
      no value (GPT-OSS).
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionPlan(Protocol):
    """One step, prepared: index tensors that every layer of the step shares."""

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend.

        `query` is `[T, query_heads, head_dim_k]`, `key` `[T, kv_heads, head_dim_k]`, `value`
        `[T, kv_heads, head_dim_v]`, any strides. Returns `[T, query_heads, head_dim_v]`.
        The keys and values of the whole step are written before any of them is read, so that
        a sequence may read blocks which another one computes in the same step.
        """
        ...


class AttentionBackend(Protocol):
    """A way to attend over the blocks of one KV pool."""

    @property
    def name(self) -> str:
        """The name under which `choose_backend` knows it."""
        ...

    def plan(self, inputs: "StepInputs") -> AttentionPlan:
        """Prepare a step: called once, before the first layer."""
        ...
