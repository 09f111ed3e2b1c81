"""What a step looks like, what a layer asks of attention, and what a backend is."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.rotation import Rotation

Int32Array = npt.NDArray[np.int32]


class SharedRows(Protocol):
    """Which sequences of a step have which leading blocks in common, in one layer group.

    What the block manager wrote with the step, see `pyengine.SharedPrefixes`; int32, on the host.
    """

    @property
    def group(self) -> int:
        """The layer group."""
        ...

    @property
    def order(self) -> Int32Array:
        """`[B]`: the sequences, those that share side by side."""
        ...

    @property
    def prefixes(self) -> Int32Array:
        """`[P, 5]`; P may be 0."""
        ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The T tokens of B sequences of one step, flattened in plan order; G layer groups.

    Tensors, on the device of the model:

    - `input_ids`, `positions`: int64 `[T]`.
    - `slot_mapping`: int64 `[G, T]`, where the layers of a group put each token's keys and
      values; -1: nowhere.
    - `query_start_loc`: int32 `[B + 1]`, where each sequence's tokens begin; the last is T.
    - `seq_lens`: int32 `[B]`, tokens of each sequence after this step.
    - `block_tables`: int32 `[G, B, W]`; a row is valid up to `ceil(seq_len / block_size)`.
      Where a group slides, blocks behind the window of the sequence's first new token read as
      the null block.
    - `logits_indices`: int64 `[S]`, the rows of the T to sample from.

    The `host_` arrays hold the same numbers in host memory, so that planning never waits for the
    device. They are valid until the next step is filled in. Where the tensors stay in place for a
    graph, `block_tables` has room for the longest sequence, and `host_block_tables` is as wide as
    the longest of the step. `shared` says what sequences share, for backends that asked for it.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor
    host_query_start_loc: Int32Array
    host_seq_lens: Int32Array
    host_block_tables: Int32Array
    shared: SharedRows | None = None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of attention, beyond causality.

    - `scaling`: factor on the products of queries and keys.
    - `sliding_window`: a query sees its own position and the `sliding_window - 1` before it.
    - `softcap`: scores become `softcap * tanh(score / softcap)` before the softmax (Gemma 2).
    - `sinks`: `[query_heads]`, one more score per head that takes part in the softmax and has
      no value (GPT-OSS).
    - `rotation`: what the layer left to be done to queries and keys first.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    rotation: Rotation | None = None


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
        """Do what `options.rotation` asks for, write the step's keys and values, then attend.

        `query` is `[T, query_heads, head_dim_k]`, `key` `[T, kv_heads, head_dim_k]`, `value`
        `[T, kv_heads, head_dim_v]`, any strides. Returns `[T, query_heads, head_dim_v]`.
        The keys and values of the whole step are written before any of them is read, so that
        a sequence may read blocks which another one computes in the same step.

        Raises `ConfigurationError` for an option that the backend cannot honour.
        """
        ...


class GraphPlan(AttentionPlan, Protocol):
    """A plan whose `forward` can be captured in a CUDA graph, and replayed for other steps."""

    def refresh(self, inputs: StepInputs) -> None:
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

    @property
    def shared_group(self) -> int | None:
        """The layer group of which it wants to know what sequences share, to read that once."""
        ...

    @property
    def reads_tables(self) -> bool:
        """Whether it reads `StepInputs.block_tables`; else the host's serve, and those are a shape
        without contents."""
        ...

    def plan(self, inputs: StepInputs) -> AttentionPlan:
        """Prepare a step: called once, before the first layer."""
        ...

    def graph_plan(self, inputs: StepInputs) -> GraphPlan:
        """Prepare a decode step, one token per sequence, that is to be captured.

        The tensors of `inputs` keep their storage and shapes while the graph lives: `forward`
        reads lengths and tables from them (or from memory that `refresh` fills), and what it
        launches depends on nothing else. The bound on a sequence is what its table holds.

        In order: `graph_plan`; one pass of the model without a capture, in which what is made at
        first use is made; the capture; then, for each step, the tensors are filled, `refresh` is
        called, and the graph is replayed. All of it under `torch.inference_mode`, or none of it.
        Rows that pad the batch have length 1, the null block as their table, and the slot -1.

        Raises `ConfigurationError` where `supports_graphs` is false.
        """
        ...
