"""The inputs of a step, the options of a layer, and the interface of a backend.

Models normalise and rotate queries and keys before they attend. Our decoders leave that to the KV
write: one kernel does it on CUDA (`kernels/rotation.py`), the attention kernel on CPUs, and
elsewhere `paged.rotated`, the oracle of both. All compute in float32 and round once.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.attention.needs import AttentionNeeds
from pyengine.errors import ConfigurationError
from pyengine.kernels.rope import Rotation
from pyengine.kv_cache import SharedPrefixes
from pyengine.kv_cache.pool import KVPool
from pyengine.utils.tensors import tensor_of

if TYPE_CHECKING:
    import torch


Int32Array = npt.NDArray[np.int32]


class SharedRows:
    """The leading blocks that sequences of a step have in common, in one layer group.

    Arrays on the host, int32, which the block manager fills with each step (`buffers`): `order`
    as in `pyengine.SharedPrefixes`; P may be 0.
    """

    def __init__(self, group: int, sequences: int) -> None:
        """For steps of at most `sequences` sequences."""
        self.group = group
        self.order = np.zeros(sequences, np.int32)
        self.own_blocks = np.zeros(sequences, np.int32)
        self.rows = np.zeros((max(1, sequences - 1), 5), np.int32)
        self.buffers = SharedPrefixes(
            order=self.order, own_blocks=self.own_blocks, prefixes=self.rows, group=group
        )
        """The arrays as the block manager writes them."""
        self.prefixes = self.rows[:0]
        """The prefixes of the step: the first of `rows`."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The T tokens of B sequences of one step, flattened in plan order; G tables.

    The tables are those of `KVPool.tables`: one of each layer group, or of each part of a group
    whose layers share tensors.

    Arrays on the CPU, tensors on another device:

    - `input_ids`, `positions`: int64 `[T]`.
    - `slot_mapping`: int64 `[G, T]`, where a table's layers put a token's KV; -1: nowhere.
    - `query_start_loc`: int32 `[B + 1]`, where each sequence's tokens begin; the last is T.
    - `seq_lens`: int32 `[B]`, tokens of each sequence after this step.
    - `block_tables`: int32 `[G, B, W]`; a row is valid up to `ceil(seq_len / block_size)`.
      Where a group slides, blocks behind the window of the first new token are the null block.
    - `logits_indices`: int64 `[S]`, the rows of the T to sample from.
    - `state_sources`, `state_slots`: int64 `[B]`, as `StateInputs` has them; None: no layer keeps a
      state.
    - `adapter_slots`: int32 `[T]`, the slots of tokens in the tables of adapters, -1: none; None:
      the model has no such tables.

    The `host_` arrays hold the same numbers in host memory, so that `metadata` never waits for the
    device. They are valid until the next step is filled in. If the tensors stay in place for a
    graph, `block_tables` has room for the longest sequence, and `host_block_tables` is as wide as
    the longest of the step. `shared` has the shared blocks, for backends with a `shared_group`;
    `cascade` those of them that `sharing_graph_metadata` reads once.
    """

    input_ids: Any
    positions: Any
    slot_mapping: Any
    query_start_loc: Any
    seq_lens: Any
    block_tables: Any
    logits_indices: Any
    host_query_start_loc: Int32Array
    host_seq_lens: Int32Array
    host_block_tables: Int32Array
    shared: SharedRows | None = None
    cascade: Any = None
    """The `Cascade` of the step, if its shared blocks are read once."""
    state_sources: Any = None
    state_slots: Any = None
    adapter_slots: Any = None

    def tensors(self) -> "StepInputs":
        """The same step for torch: on the CPU tensors over the memory of the arrays.

        Those of states and adapters stay, for `ForwardPass`.
        """
        if not isinstance(self.input_ids, np.ndarray):
            return self
        return replace(
            self,
            input_ids=tensor_of(self.input_ids),
            positions=tensor_of(self.positions),
            slot_mapping=tensor_of(self.slot_mapping),
            query_start_loc=tensor_of(self.query_start_loc),
            seq_lens=tensor_of(self.seq_lens),
            block_tables=tensor_of(self.block_tables),
            logits_indices=tensor_of(self.logits_indices),
        )


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of a layer's attention, beyond causality.

    - `scaling`: factor on the products of queries and keys.
    - `sliding_window`: a query sees its own position and the `sliding_window - 1` before it.
    - `softcap`: scores become `softcap * tanh(score / softcap)` before the softmax (Gemma 2).
    - `sinks`: `[query_heads]`, one more score per head in the softmax, without value (GPT-OSS).
    - `rotation`: the rotation of queries and keys that the layer leaves to attention.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: "torch.Tensor | None" = None
    rotation: Rotation | None = None


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Those of `AttentionOptions` that the CPU kernel takes, without torch.

    `sinks` are float32, `[query_heads]`.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: npt.NDArray[np.float32] | None = None


QKV: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Query `[T, query_heads, head_dim_k]`, key `[T, kv_heads, head_dim_k]` and value `[T, kv_heads,
head_dim_v]` of a layer's step, any strides."""


class AttentionMetadata(Protocol):
    """The index tensors of one step, which all its layers share, and attention by them."""

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> "torch.Tensor":
        """Apply `options.rotation`, write the step's keys and values, then attend.

        Returns `[T, query_heads, head_dim_v]`. The keys and values of the whole step are written
        before any of them is read: a sequence may read blocks computed by another one in this step.

        Raises `ConfigurationError` for an option that the backend cannot honour.
        """


class GraphMetadata(AttentionMetadata, Protocol):
    """Metadata whose `forward` can be captured in a CUDA graph and replayed for other steps."""

    def refresh(self, inputs: StepInputs) -> None:
        """Prepare the next step, of the same number of sequences, outside the graph.

        `inputs` has the tensors that it was built over, filled anew, and their host arrays.
        """


class AttentionBackend(ABC):
    """A way to attend over the blocks of one KV pool."""

    name: str
    """The name for `choose_backend`."""
    strength: str
    """The reason that the log gives when "auto" chooses it."""
    auto_on: tuple[str, ...] = ("cpu", "cuda")
    """Devices on which "auto" considers it."""
    is_uncertain = False
    """True if it needs a package or compiles kernels: it is tried out first."""
    block_size = 16
    """Tokens of a KV block that it prefers."""
    supports_graphs = False
    """True if `graph_metadata` can be called."""
    shared_group: int | None = None
    """The layer group whose shared blocks it reads once; None: none."""
    takes_arrays = False
    """True if `metadata` takes arrays of a step on the CPU; else it takes `StepInputs.tensors`."""
    reads_tables = True
    """True if it reads `StepInputs.block_tables`; else only `host_block_tables` are filled."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """Why it cannot serve; None: it can."""
        if needs.device.type in ("cpu", "cuda"):
            return None
        return f"it runs on cpu and cuda, the device is {needs.device}"

    @abstractmethod
    def metadata(self, inputs: StepInputs) -> AttentionMetadata:
        """Build the metadata of a step: called once, before the first layer."""

    def cascade(self, _inputs: StepInputs) -> Any:
        """The `Cascade` of a step, if it is faster to read shared blocks once; None: it is not."""
        return None

    def sharing_graph_metadata(self, _inputs: StepInputs) -> GraphMetadata | None:
        """`graph_metadata` that reads shared blocks once; None: not for this batch."""
        return None

    def graph_metadata(self, inputs: StepInputs) -> GraphMetadata:
        """Prepare a decode step, one token per sequence, that is to be captured.

        The tensors of `inputs` keep their storage and shapes while the graph lives: `forward`
        reads lengths and tables from them (or from memory that `refresh` fills), and what it
        launches depends on nothing else. Its table bounds the length of a sequence.

        In order: `graph_metadata`; one pass of the model without a capture, which runs all
        first-use setup; the capture; then, for each step, the tensors are filled, `refresh` is
        called, and the graph is replayed. All of it under `torch.inference_mode`, or none of it.
        Rows that pad the batch have length 1, the null block as their table, and the slot -1.

        Raises `ConfigurationError` where `supports_graphs` is false.
        """
        raise ConfigurationError(
            f"attention_backend={self.name!r} cannot be captured in a CUDA graph: set "
            "enforce_eager=True"
        )
