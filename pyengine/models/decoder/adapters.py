"""The adapters of a decoder's linear layers: tables with a place for each slot of a step.

A `Linear` may be several modules of transformers (queries, keys and values): its outputs are in
parts then, and each part has its own adapter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.models.adapters import Adapter, AdapterLimits, Floats, Matrices, StepAdapters
from pyengine.models.decoder.names import Names, Stored

Parts: TypeAlias = tuple[tuple[int, npt.NDArray[np.intp]], ...]
"""Numbers of parts, and the outputs of a module that each has."""


class AdapterTable(Protocol):
    """The adapters of one linear layer in a kernel set's memory, slot by slot."""

    def write(self, slot: int, parts: Mapping[int, Matrices]) -> None:
        """Put matrices into a slot, by the number of their part; others have no effect there."""

    def add(self, result: Any, rows: Any, slots: Any) -> Any:
        """`result` `[T, outputs]` with what the adapters add for `rows` `[T, inputs]`.

        `slots` are those of `Kernels.adapter_slots`. `result` may be overwritten.
        """


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """A module of transformers: its place in the table of a linear layer.

    `parts` are the numbers of the table's parts, and the outputs of the module that each has.
    """

    table: AdapterTable
    inputs: int
    outputs: int
    parts: Parts

    def matrices(self, whole: Matrices) -> Iterator[tuple[int, Matrices]]:
        """The matrices of each part."""
        first, second = whole
        for part, rows in self.parts:
            yield part, (first, second[rows])


class AdapterTables:
    """The tables of all linear layers of a decoder, and the adapter in each slot."""

    def __init__(
        self,
        new_table: Callable[[Sequence[int], int, AdapterLimits], AdapterTable],
        limits: AdapterLimits,
        names: Names,
        pair_size: int | None = None,
    ) -> None:
        """`new_table` is `Kernels.adapter_table`; `names` are those of transformers.

        With a `pair_size`, the size of a head, the model has queries and keys in the order in which
        pairs rotate, as llama.cpp converts them.
        """
        self._new_table, self.limits = new_table, limits
        self._names, self._pair_size = names, pair_size
        self.modules: dict[str, AdapterModule] = {}
        """By the names of transformers."""
        self._tables: dict[tuple[str, int | None], AdapterTable] = {}
        """By the names and layers of linear layers."""
        self._contents: list[Adapter | None] = [None] * limits.max_loras

    def table(
        self,
        place: tuple[str, int | None],
        sizes: Sequence[int],
        inputs: int,
        groups: int = 1,
    ) -> AdapterTable:
        """A table for a linear layer with outputs of these sizes; `place` is its name and layer.

        Its modules are the tensors that a file of transformers may have for it. A layer that is
        laid out anew gets the table that it has.
        """
        if place in self._tables:
            return self._tables[place]
        prefix, options = self._names.of(*place)
        ends = list(accumulate(sizes))
        table = self._new_table(ends, inputs, self.limits)
        for stored in options:
            for name, outputs, parts in _modules_of(stored, sizes, groups):
                is_turned = place[0] == "qkv" and self._pair_size is not None
                own = _in_pairs(parts, self._pair_size or 1) if is_turned else parts
                module = AdapterModule(table, inputs, outputs, own)
                self.modules.setdefault(prefix + name, module)
        self._tables[place] = table
        return table

    def load(self, step: StepAdapters) -> None:
        """Write the adapters of a step into their slots, unless they are there.

        Call it in the order of steps, on the device's queue.
        """
        for slot, adapter in step.contents.items():
            before = self._contents[slot]
            if before is not None and before.digest == adapter.digest:
                continue
            self._contents[slot] = None
            by_table: dict[int, dict[int, Matrices]] = {}
            for name, matrices in adapter.matrices.items():
                module = self.modules[name]
                by_table.setdefault(id(module.table), {}).update(module.matrices(matrices))
            for table in self._tables.values():
                table.write(slot, by_table.get(id(table), {}))
            self._contents[slot] = adapter


def _modules_of(
    stored: Stored, sizes: Sequence[int], groups: int
) -> Iterator[tuple[str, int, Parts]]:
    """The tensors of a linear layer: their names, outputs, and the outputs of each kind."""
    if stored.weight != ".weight" or "{}" in "".join(stored.parts):
        return
    kinds = stored.kinds or (1,) * len(sizes)
    if not stored.kinds and len(stored.parts) != len(sizes):
        kinds = (len(sizes),)
    if len(kinds) != len(stored.parts) or sum(kinds) != len(sizes):
        return
    first = 0
    for name, count in zip(stored.parts, kinds, strict=True):
        own = sizes[first : first + count]
        outputs = sum(own)
        order = np.arange(outputs)
        if stored.is_interleaved:
            order = np.concatenate([order[0::2], order[1::2]])
        elif stored.is_grouped and groups > 1:
            of_group = np.cumsum([0, *(size // groups for size in own)])
            grouped = order.reshape(groups, -1)
            spans = pairwise(of_group)
            order = np.concatenate([grouped[:, start:end].reshape(-1) for start, end in spans])
        ends = np.cumsum(own)[:-1]
        parts = tuple((first + kind, rows) for kind, rows in enumerate(np.split(order, ends)))
        yield name, outputs, parts
        first += count


def _in_pairs(parts: Parts, size: int) -> Parts:
    """The same with queries and keys in the order in which pairs rotate."""
    order = np.arange(size).reshape(2, -1).T.reshape(-1)
    return tuple(
        (part, rows.reshape(-1, size)[:, order].reshape(-1) if part < 2 else rows)
        for part, rows in parts
    )


def block_matrices(
    parts: Mapping[int, Matrices], ends: Sequence[int], inputs: int, max_rank: int
) -> Matrices:
    """The matrices of all parts as one pair: A `[parts * max_rank, inputs]`, and B
    `[outputs, parts * max_rank]`, in which a part's outputs have its own columns only.
    """
    first: Floats = np.zeros((len(ends) * max_rank, inputs), np.float32)
    second: Floats = np.zeros((ends[-1], len(ends) * max_rank), np.float32)
    for part, (own_first, own_second) in parts.items():
        start, columns = ends[part - 1] if part else 0, part * max_rank
        first[columns : columns + len(own_first)] = own_first
        second[start : ends[part], columns : columns + len(own_first)] = own_second
    return first, second
