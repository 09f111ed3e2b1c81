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

        Raises `ConfigurationError` for an option that the backend cannot honour.
        """
        ...


class GraphPlan(AttentionPlan, Protocol):
    """A plan whose `forward` can be captured in a CUDA graph, and replayed for other steps."""

    def refresh(self, inputs: "StepInputs") -> None:
        """Take over another step, of as many sequences, before its replay and outside the graph.

        `inputs` has the tensors the plan was made over, filled anew, and their host arrays.
        """
        ...


class AttentionBackend(Protocol):
    """A way to attend over the blocks of one KV pool."""

    @property
    def name(self) -> str:
        """The name under which `choose_backend` knows it."""
        ...

    @property
    def supports_graphs(self) -> bool:
        """Whether `graph_plan` can be called."""
        ...

    def plan(self, inputs: "StepInputs") -> AttentionPlan:
        """Prepare a step: called once, before the first layer."""
        ...

    def graph_plan(self, inputs: "StepInputs") -> GraphPlan:
        """Prepare a decode step, one token per sequence, that is to be captured.

        The tensors of `inputs` keep their storage and shapes while the graph lives: `forward`
        reads lengths and tables from them (or from memory that `refresh` fills), and what it
        launches depends on nothing else. The bound on a sequence is what its table holds.

        In order: `graph_plan`; one pass of the model without a capture, in which what is made at
        first use is made; the capture; then, for each step, the tensors are filled, `refresh` is
        called, and the graph is replayed. All of it under `torch.inference_mode`, or none of it.
        Rows that pad the batch have length 1, the trash block as their table, and the slot -1.

        Raises `ConfigurationError` where `supports_graphs` is false.
        """
        ...
