"""The states of recurrent layers: what a layer keeps per sequence, the pool, a step's indices.

A state stands for all tokens before a position and has a fixed size. A *slot* holds one state of
every layer: the live one of a running sequence, or a snapshot. The arrays of a pool::

    [num_slots, *shape]

A step says for each sequence which slot its first token continues from, and which slot gets the
state after its last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pyengine.errors import ConfigurationError
from pyengine.utils.devices import Device, for_torch
from pyengine.utils.dtypes import STORED, DType, itemsize, torch_dtype


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
    def num_bytes(self) -> int:
        """Bytes per slot."""
        return self.conv.num_bytes + (0 if self.recurrent is None else self.recurrent.num_bytes)


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


class StatePool:
    """The states of every layer: `layers[i]` has the arrays of `specs[i]`, zeros at first.

    In host memory they are NumPy's (`uint16` holds the bits of bfloat16), with `tensors` or on
    another device torch's. Raises `ConfigurationError` if the memory cannot be allocated.
    """

    def __init__(
        self, specs: Sequence[StateSpec], num_slots: int, device: Device, *, tensors: bool = False
    ) -> None:
        self.specs, self.num_slots, self.device = tuple(specs), num_slots, device
        self._has_tensors = tensors or device.type != "cpu"
        try:
            self.layers = [self._allocated(spec) for spec in self.specs]
        except (RuntimeError, MemoryError) as error:  # torch's own on a device, NumPy's here
            raise ConfigurationError(
                f"{num_slots} states of {self.bytes_per_slot} bytes could not be allocated on "
                f"{device}: {error}"
            ) from error

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one state of all layers."""
        return sum(spec.num_bytes for spec in self.specs)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states of all layers, (source, destination): all are read before any is written."""
        sources, destinations = map(list, zip(*copies, strict=True)) if copies else ([], [])
        for layer in self.layers:
            for array in (layer.conv, layer.recurrent):
                if array is not None and copies:
                    array[destinations] = array[sources]

    def _allocated(self, spec: StateSpec) -> LayerState:
        conv = self._zeros(spec.conv)
        return LayerState(conv, None if spec.recurrent is None else self._zeros(spec.recurrent))

    def _zeros(self, array: StateArray) -> Any:
        shape = (self.num_slots, *array.shape)
        if not self._has_tensors:
            return np.zeros(shape, STORED[array.dtype])
        import torch

        return torch.zeros(shape, dtype=torch_dtype(array.dtype), device=for_torch(self.device))
