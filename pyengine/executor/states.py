"""The states of a step: which slots its sequences continue, and the copies around it.

fork copies -> snapshots to slots -> forward pass -> slots to snapshots
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyengine.attention.backend import StepInputs
from pyengine.kv_cache.pool import KVPool
from pyengine.kv_cache.states import StateInputs, StatePool
from pyengine.utils.tensors import tensor_of


class StatePlan(Protocol):
    """The part of `StepPlan` that concerns states: (sequence id, tokens, blocks of a snapshot)."""

    def state_loads(self) -> list[tuple[int, int, list[int]]]:
        """The states that sequences begin with; without blocks: that of no token."""

    def state_saves(self) -> list[tuple[int, int, list[int]]]:
        """The snapshots to write after the step."""


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots of a step's sequences, in plan order, and their ids.

    `forks` are copies of slots, (source, destination), to make before the step.
    """

    sequence_ids: Sequence[int]
    slots: Sequence[int]
    forks: Sequence[tuple[int, int]] = ()


class StepStates:
    """The states of one step over a pool."""

    def __init__(self, plan: StatePlan, slots: StateSlots) -> None:
        """Reads everything from `plan`."""
        places = dict(zip(slots.sequence_ids, slots.slots, strict=True))
        loads = [(places[sequence], blocks) for sequence, _, blocks in plan.state_loads()]
        self._forks = slots.forks
        self._loads = [(slot, blocks) for slot, blocks in loads if blocks]
        self._saves = [(places[sequence], blocks) for sequence, _, blocks in plan.state_saves()]
        self.slots = np.array(slots.slots, np.int64)
        """int64 `[B]`, for the states after the step."""
        fresh = [slot for slot, blocks in loads if not blocks]
        self.sources = np.where(np.isin(self.slots, fresh), -1, self.slots)
        """int64 `[B]`, of the states before it; -1: zeros."""

    def before(self, pool: KVPool, slot_mapping: npt.NDArray[np.int64]) -> None:
        """Copy states to the slots, before keys and values go to `slot_mapping` `[G, T]`."""
        snapshots = pool.snapshots
        assert snapshots is not None
        snapshots.states.copy(self._forks)
        for slot, blocks in self._loads:
            snapshots.load(slot, blocks)
        snapshots.clear(slot_mapping[slot_mapping >= 0] // pool.block_size)

    def after(self, pool: KVPool) -> None:
        """Copy states to snapshots."""
        assert pool.snapshots is not None
        for slot, blocks in self._saves:
            pool.snapshots.save(slot, blocks)


class StateLayers:
    """The states of every layer, as a model reads and writes them."""

    def __init__(self, states: StatePool, *, takes_arrays: bool) -> None:
        """`takes_arrays`: the model computes over arrays of the host."""
        self._takes_arrays = takes_arrays
        self._layers = states.layers if takes_arrays else states.tensors

    def inputs(self, inputs: StepInputs) -> StateInputs:
        """Those of a step."""
        arrays = inputs.query_start_loc, inputs.state_sources, inputs.state_slots
        if not self._takes_arrays:
            starts, sources, slots = map(tensor_of, arrays)
            return StateInputs(starts, sources, slots, self._layers)
        return StateInputs(*arrays, self._layers)
