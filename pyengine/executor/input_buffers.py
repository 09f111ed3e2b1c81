"""The inputs of a step: allocated once, filled in place by the block manager.

On the CPU a step is the used parts of the host's arrays. If the device has separate memory, those
are packed and copied there in one go. The tables on the host can hold the longest possible
sequence; the copy is as wide as the longest table in the step::

    host, filled in place     staging, pinned, packed      device, packed
    input_ids [T_max]    ->   [T]                     ->   [T]
    ...                       ...                          ...
    [G, S, max_blocks]   ->   [G, B, width]           ->   [G, B, width]

If the attention backend reads tables on the host, they are not copied.

Where layers share a tensor of the pool, the block manager fills slots and tables of G groups apart,
and the step has those of each part (`PartTables`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.attention.backend import AttentionBackend, SharedRows, StepInputs
from pyengine.executor.states import StepStates
from pyengine.kv_cache import SharedPrefixes, StepBuffers
from pyengine.kv_cache.layer_groups import Table
from pyengine.kv_cache.part_tables import PartTables
from pyengine.utils.devices import Device, for_torch
from pyengine.utils.host_copy import upload
from pyengine.utils.tensors import tensor_of

if TYPE_CHECKING:
    import torch


class Plan(Protocol):
    """The part of `StepPlan` that the runner needs."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step."""

    @property
    def num_sequences(self) -> int:
        """Sequences that these tokens belong to."""

    @property
    def num_samples(self) -> int:
        """Rows of logits to compute."""

    def copies(self) -> list[tuple[int, int]]:
        """Blocks to copy before the step, (source, destination)."""

    def fill(self, buffers: StepBuffers, /, *, shared: SharedPrefixes | None = None) -> None:
        """Write the step's inputs into the arrays that `buffers` was made over.

        Shared prefixes go into the arrays of `shared`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The largest step: tokens, sequences, blocks of one table; and tables of one sequence.

    `rows_per_seq` is the most rows of logits of a sequence: one, and one for each draft. With
    `has_states` the model has recurrent layers, with `has_adapters` tables of adapters. `tables`
    are those of a pool whose tensors have several layers of a group; empty: that of each group.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_blocks_per_seq: int
    num_groups: int = 1
    rows_per_seq: int = 1
    has_states: bool = False
    has_adapters: bool = False
    tables: tuple[Table, ...] = ()

    @property
    def max_num_samples(self) -> int:
        """The most rows of logits of a step."""
        num_rows = self.max_num_seqs * self.rows_per_seq
        return max(self.max_num_seqs, min(num_rows, self.max_num_batched_tokens))


@dataclass(frozen=True, slots=True)
class HostArrays:
    """NumPy views of the host buffers, at full capacity (shapes as in `StepInputs`)."""

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logits_indices: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of a decode step for a graph: sequences of length 1, in the null block."""

    num_sequences: int
    null_block: int


_WIDTHS = 64
"""Tables are cut to a multiple of this many blocks, so that steps of one size share views."""

_STATE_ARRAYS = ("state_sources", "state_slots")
"""The arrays of a step of a model with recurrent layers: see `StepInputs`."""

_ADAPTER_ARRAY = "adapter_slots"

_ALIGNMENT = 64
"""Bytes: kernels are compiled anew for addresses that are no multiples of 16."""

Wait: TypeAlias = Callable[[], object]

Upload: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], Wait | None]"
"""Copies a source on the host to its target on the device, in the order of the device's queue.
The returned function waits until the source may be written to again; None: it may at once."""


def upload_in_stream(source: "torch.Tensor", target: "torch.Tensor") -> Wait:
    """Queue a copy from pinned memory on the current CUDA stream. See `Upload`."""
    import torch

    target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def upload_at_once(source: "torch.Tensor", target: "torch.Tensor") -> None:
    """Copy on the host: there is nothing to wait for. See `Upload`."""
    target.copy_(source)


@dataclass(frozen=True, slots=True)
class Packed:
    """A step's arrays one after the other: bytes in pinned memory, and their place on the device.

    `parts` are the arrays with their places in `source`.
    """

    source: "torch.Tensor"
    target: "torch.Tensor"
    parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]

    def pack(self) -> None:
        """Copy the arrays into `source`."""
        for array, target in self.parts:
            np.copyto(target, array)


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step in the host buffers. Without `packed` the device reads the host's memory."""

    inputs: StepInputs
    packed: Packed | None
    buffers: "InputBuffers"

    def upload(self) -> StepInputs:
        """Copy the step to the device, in the order of its queue."""
        if self.packed is not None:
            self.buffers.start_upload(self.packed)
        return self.inputs


class InputBuffers:
    """Host buffers of fixed capacity, and memory for their used parts on the device.

    On the CPU that is the host buffers themselves, and nothing is copied, unless it is
    wanted `apart`, as a graph's inputs must be: then it is tensors. A block has `block_size`
    tokens.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        block_size: int,
        device: Device,
        backend: AttentionBackend | None = None,
        *,
        apart: bool = False,
        beside: "InputBuffers | None" = None,
    ) -> None:
        """`backend` says which tables are copied, and whether steps report shared blocks.

        With `beside`, both share the device's side. So the next step can be filled in while the one
        before is still read from its host buffers; on the device they run one after the other.
        """
        self._limits = limits
        tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
        groups, self._max_width = limits.num_groups, limits.max_blocks_per_seq
        shapes = {
            "input_ids": ((tokens,), np.int64),
            "positions": ((tokens,), np.int64),
            "slot_mapping": ((groups, tokens), np.int64),
            "query_start_loc": ((sequences + 1,), np.int32),
            "seq_lens": ((sequences,), np.int32),
            "logits_indices": ((limits.max_num_samples,), np.int64),
        }
        self._pins = device.type == "cuda"
        self._host: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()
        }
        tables = np.zeros((groups, sequences, self._max_width), np.int32)
        self.arrays = HostArrays(**self._host, block_tables=tables)
        """Those that the block manager fills."""
        self._parts: PartTables | None = None
        if limits.tables:
            self._parts = PartTables(limits.tables, block_size)
            self._host["slot_mapping"] = np.zeros((len(limits.tables), tokens), np.int64)
            tables = np.zeros((len(limits.tables), sequences, self._max_width), np.int32)
        names = _STATE_ARRAYS if limits.has_states else ()
        self._host |= {name: np.full(sequences, -1, np.int64) for name in names}
        if limits.has_adapters:
            self._host[_ADAPTER_ARRAY] = np.full(tokens, -1, np.int32)
        self._tables, self._block_size, self._device = tables, block_size, device
        self.is_apart = device.type != "cpu" or apart
        """True if the step's inputs are tensors, apart from the host's arrays."""
        self._copies_tables = self.is_apart and (backend is None or backend.reads_tables)
        if self.is_apart:
            copied = [*self._host.values(), *([tables] if self._copies_tables else [])]
            self._make_memory(sum(_aligned(array.nbytes) for array in copied), beside)
        self._upload: Upload = upload_in_stream if self._pins else upload_at_once
        self._wait_for_upload: Wait | None = None
        group = None if backend is None else backend.shared_group
        self._shared = None if group is None else SharedRows(group, sequences)
        self._sizes: tuple[int, int, int, int] | None = None
        self._filled: FilledStep | None = None

    def _make_memory(self, num_bytes: int, beside: "InputBuffers | None") -> None:
        """Allocate the device's side, packed anew for each size of step."""
        import torch

        self._staging = torch.empty(0, dtype=torch.uint8)
        if beside is not None:
            self._memory: torch.Tensor = beside._memory
            return
        device = for_torch(self._device)
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    @cached_property
    def step_buffers(self) -> StepBuffers:
        """The same arrays for the block manager."""
        return StepBuffers(
            **{name: getattr(self.arrays, name) for name in HostArrays.__dataclass_fields__}
        )

    def fill(
        self,
        plan: Plan,
        padding: Padding | None = None,
        states: StepStates | None = None,
        adapter_slots: npt.NDArray[np.int32] | None = None,
    ) -> FilledStep:
        """Let `plan` write its step, padded with `padding`. Only the rows of this step are copied.

        `states` are those of a model with recurrent layers; None: no state is read or kept.
        `adapter_slots` are those of a model with adapters, int32 `[T]`; None: no token has one.
        Waits for the copy of the step before, which may still run if that step was rolled back or
        samples no tokens. A pending token is written as `-1 - row` (see `ModelRunner`). The result
        refers to the buffers: it is valid until the next call.
        """
        if self._wait_for_upload is not None:
            self._wait_for_upload()
            self._wait_for_upload = None
        if self._shared is None:
            plan.fill(self.step_buffers)
        else:
            plan.fill(self.step_buffers, shared=self._shared.buffers)
            self._shared.prefixes = self._shared.rows[: self._shared.buffers.num_prefixes]
        tokens, sequences, samples = plan.num_tokens, plan.num_sequences, plan.num_samples
        if self._parts is not None:
            self._fill_parts(self._parts, tokens, sequences)
        if self._limits.has_states:
            sources, slots = (self._host[name] for name in _STATE_ARRAYS)
            sources[:sequences] = -1 if states is None else states.sources
            slots[:sequences] = -1 if states is None else states.slots
        if self._limits.has_adapters:
            self._host[_ADAPTER_ARRAY][:tokens] = -1 if adapter_slots is None else adapter_slots
        if padding is not None:
            self._pad(sequences, padding)
            tokens = sequences = samples = padding.num_sequences
        width = self._width(sequences) if self._copies_tables else self._max_width
        sizes = (tokens, sequences, samples, width)
        if self._filled is None or sizes != self._sizes:
            self._filled, self._sizes = self._views(*sizes), sizes
        if self._filled.packed is not None:
            self._filled.packed.pack()
            if self._copies_tables and padding is not None:
                packed_tables = self._filled.inputs.host_block_tables
                packed_tables[:, plan.num_sequences :, 0] = self._null_blocks(padding)
        return self._filled

    def _fill_parts(self, parts: PartTables, tokens: int, sequences: int) -> None:
        """Write the step's slots and tables from those of the groups."""
        arrays, width = self.arrays, self._width(sequences)
        self._host["slot_mapping"][:, :tokens] = parts.slots(arrays.slot_mapping[:, :tokens])
        of_groups = arrays.block_tables[:, :sequences, :width]
        self._tables[:, :sequences, :width] = parts.block_tables(of_groups)

    def _null_blocks(self, padding: Padding) -> Any:
        """The null block in the tables: a number for all, or `[tables, 1]`."""
        return padding.null_block if self._parts is None else self._parts.blocks(padding.null_block)

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """The tables of the last step on the host, at full capacity."""
        return self._tables

    def start_upload(self, packed: Packed) -> None:
        """Copy to the device; the next `fill` waits for the copy."""
        self._wait_for_upload = self._upload(packed.source, packed.target)

    def fixed_inputs(self, padding: Padding) -> StepInputs:
        """A decode step of padding alone, on the device's side in memory that never moves.

        Its tables can hold the longest sequence; the host's are one block wide.
        """
        size = padding.num_sequences
        self._pad(0, padding)
        filled = self._views(size, size, size, 1)
        if filled.packed is not None:
            filled.packed.pack()
            self.start_upload(filled.packed)
        if self._wait_for_upload is not None:
            self._wait_for_upload()
        tables = self._fixed_tables[:, :size]
        if self._copies_tables:
            null = np.broadcast_to(self._null_blocks(padding), tables.shape[:2])
            tables[..., 0] = upload(null.astype(np.int32), for_torch(self._device))
        host = self._tables[:, :size, :1]
        return replace(filled.inputs, block_tables=tables, host_block_tables=host)

    @cached_property
    def _fixed_tables(self) -> "torch.Tensor":
        import torch

        if not self._copies_tables:
            return self._no_tables
        shape, device = self._tables.shape, for_torch(self._device)
        return torch.zeros(shape, dtype=torch.int32, device=device)

    @cached_property
    def _no_tables(self) -> "torch.Tensor":
        """Tables that are not read: a shape over one element."""
        import torch

        none = torch.zeros(1, dtype=torch.int32, device=for_torch(self._device))
        return none.expand(self._tables.shape)

    def _pad(self, count: int, padding: Padding) -> None:
        """Make the rows from `count` on padding, of length 1 and without slots.

        The host's tables stay: `plan.fill` writes only changed entries. The table of such a row
        names blocks that exist.
        """
        arrays, end = self.arrays, padding.num_sequences
        arrays.input_ids[count:end] = 0
        arrays.positions[count:end] = 0
        self._host["slot_mapping"][:, count:end] = -1
        arrays.seq_lens[count:end] = 1
        arrays.query_start_loc[count : end + 1] = range(count, end + 1)
        arrays.logits_indices[count:end] = range(count, end)
        for name in _STATE_ARRAYS if self._limits.has_states else ():
            self._host[name][count:end] = -1
        if self._limits.has_adapters:
            self._host[_ADAPTER_ARRAY][count:end] = -1

    def _width(self, sequences: int) -> int:
        """The columns of the longest table, rounded up, so that views can be reused."""
        longest = int(self.arrays.seq_lens[:sequences].max(initial=0))
        blocks = -(-longest // self._block_size)
        return min(self._max_width, max(1, -(-blocks // _WIDTHS)) * _WIDTHS)

    def _views(self, tokens: int, sequences: int, samples: int, width: int) -> FilledStep:
        """The buffers of a step of this size, and their places in packed memory.

        They are reused while decodes have the same size step after step. Tables come last: the
        places of other arrays do not depend on `width`.
        """
        sizes = {
            "input_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "query_start_loc": sequences + 1,
            "seq_lens": sequences,
            "logits_indices": samples,
        }
        if self._limits.has_states:
            sizes |= dict.fromkeys(_STATE_ARRAYS, sequences)
        if self._limits.has_adapters:
            sizes[_ADAPTER_ARRAY] = tokens
        views: dict[str, Any] = {name: self._host[name][..., :size] for name, size in sizes.items()}
        tables: Any = self._tables[:, :sequences, :width]
        packed: Packed | None = None
        host_tables = tables
        if self.is_apart:
            copied = [*views.values(), *([tables] if self._copies_tables else [])]
            packed, on_device = self._packed(copied)
            views = dict(zip(views, on_device, strict=False))
            if self._copies_tables:
                tables, host_tables = on_device[-1], packed.parts[-1][1]
            else:
                tables = self._no_tables[:, :sequences]
        inputs = StepInputs(
            **views,
            block_tables=tables,
            host_query_start_loc=self.arrays.query_start_loc[: sequences + 1],
            host_seq_lens=self.arrays.seq_lens[:sequences],
            host_block_tables=host_tables,
            shared=self._shared,
            cascade=None,
        )
        return FilledStep(inputs, packed, self)

    def _packed(self, arrays: Sequence[npt.NDArray[Any]]) -> "tuple[Packed, list[torch.Tensor]]":
        """Places for `arrays`, one after the other, and the same places on the device."""
        begins = [0]
        for array in arrays:
            begins.append(begins[-1] + _aligned(array.nbytes))
        source = self._staged(begins[-1])
        parts, on_device = [], []
        for begin, array in zip(begins, arrays, strict=False):
            end = begin + array.nbytes
            kind = tensor_of(array).dtype
            staged, twin = (
                memory[begin:end].view(kind).view(array.shape) for memory in (source, self._memory)
            )
            parts.append((array, staged.numpy()))
            on_device.append(twin)
        return Packed(source, self._memory[: begins[-1]], parts), on_device

    def _staged(self, size: int) -> "torch.Tensor":
        """So many bytes that the device can copy from."""
        import torch

        if size > len(self._staging):
            capacity = min(len(self._memory), 1 << (size - 1).bit_length())
            self._staging = torch.zeros(capacity, dtype=torch.uint8, pin_memory=self._pins)
        return self._staging[:size]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
