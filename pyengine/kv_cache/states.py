"""The states of recurrent layers: what a layer keeps per sequence, the pool, a step's indices.

A state stands for all tokens before a position and has a fixed size. A *slot* holds one state of
every layer: the live one of a running sequence, or a snapshot. The arrays of a pool::

    [num_slots, *shape]

A step says for each sequence which slot its first token continues from, and which slot gets the
state after its last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from pyengine.errors import ConfigurationError
from pyengine.kv_cache.pool_memory import PoolMemory
from pyengine.utils.devices import Device
from pyengine.utils.dtypes import DType, itemsize


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a layer's state: its shape per slot, and its element type."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """Bytes per slot."""
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of one layer.

    - `conv`: the last inputs of its convolution, `[positions, channels]`, the newest last.
    - `recurrent`: the state of its recurrence; None: it only has a convolution.
    """

    conv: StateArray
    recurrent: StateArray | None = None

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """All of them."""
        return (self.conv,) if self.recurrent is None else (self.conv, self.recurrent)

    @property
    def num_bytes(self) -> int:
        """Bytes per slot."""
        return sum(array.num_bytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class LayerState:
    """The arrays of one layer, `[num_slots, *shape]`: NumPy's, or tensors on a device."""

    conv: Any
    recurrent: Any = None


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The states that a step of B sequences reads and writes.

    Arrays on the CPU, tensors on another device:

    - `query_starts`: int32 `[B + 1]`, where each sequence's tokens begin; the last is T.
    - `sources`: int64 `[B]`, the slot of the state before a sequence's first token; -1: zeros.
    - `slots`: int64 `[B]`, the slot for the state after its last token; -1: it is not kept.
    - `layers`: the arrays of every layer that keeps a state, in order.

    A slot is written by one sequence at most, and what one sequence writes no other one reads. A
    sequence may continue in place (`sources[i] == slots[i]`).
    """

    query_starts: Any
    sources: Any
    slots: Any
    layers: Sequence[LayerState]


def state_bytes(specs: Sequence[StateSpec]) -> int:
    """Bytes of one state of these layers."""
    return sum(spec.num_bytes for spec in specs)


class StatePool:
    """The states of every layer, zeros at first.

    Raises `ConfigurationError` if the memory cannot be allocated.
    """

    def __init__(self, specs: Sequence[StateSpec], num_slots: int, device: Device) -> None:
        self.specs, self.num_slots, self.device = tuple(specs), num_slots, device
        arrays = [array for spec in self.specs for array in spec.arrays]
        try:
            shapes = [(array.shape, array.dtype) for array in arrays]
            self._memory = PoolMemory(shapes, num_slots, device)
        except (RuntimeError, MemoryError) as error:  # torch's own on a device, NumPy's here
            raise ConfigurationError(
                f"{num_slots} states of {self.bytes_per_slot} bytes could not be allocated on "
                f"{device}: {error}"
            ) from error

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one state of all layers."""
        return state_bytes(self.specs)

    @cached_property
    def layers(self) -> list[LayerState]:
        """The arrays of each layer in the host's memory; for the CPU."""
        return self._by_layer(self._memory.arrays)

    @cached_property
    def tensors(self) -> list[LayerState]:
        """The tensors of each layer, for torch; on the CPU over the memory of `layers`."""
        return self._by_layer(self._memory.tensors)

    def give_back(self) -> None:
        """Give the memory back to the system."""
        self._memory.give_back()

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states of all layers, (source, destination): all are read before any is written."""
        if copies and self.specs:
            self._memory.copy_blocks(copies)

    def bytes_of(self, slot: int) -> Any:
        """A copy of a state: uint8 `[bytes_per_slot]`."""
        return self._memory.bytes_of([slot])

    def write_bytes(self, slot: int, data: Any) -> None:
        """Write a state, as `bytes_of` has it."""
        self._memory.write_bytes([slot], data)

    def _by_layer(self, arrays: Sequence[Any]) -> list[LayerState]:
        left = iter(arrays)
        return [LayerState(*(next(left) for _ in spec.arrays)) for spec in self.specs]
