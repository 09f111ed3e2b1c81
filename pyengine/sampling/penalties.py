"""Penalties of counted tokens: a table on the device that follows the counts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.sampling.operations import operations_of
from pyengine.sampling.state import SamplingState
from pyengine.utils.devices import CPU, Device
from pyengine.utils.host_copy import upload

if TYPE_CHECKING:
    import torch

_Ids: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float32]

LARGEST = float(np.finfo(np.float32).max)
"""The limit of logits: a row with an infinite logit has no distribution."""


class Penalties:
    """Repetition first, then frequency and presence.

    Repetition as in CTRL (Keskar et al. 2019), with the sign taken into account so that a
    penalised logit always falls; frequency and presence as in OpenAI's API.

    A table has a cell for each counted token of each row: its flat index (row * vocabulary +
    token), and its divisor and offset as two float32. It is uploaded once. Then each step uploads
    the cells that changed, one for each row. The logits may be an array: then nothing is uploaded.
    """

    def __init__(self, states: Mapping[int, SamplingState]) -> None:
        penalised = {row: item for row, item in states.items() if item.counts is not None}
        params = [item.params for item in penalised.values()]
        self._rows: _Ids = np.array([*penalised], dtype=np.int64)
        self._counts = [item.counts for item in penalised.values() if item.counts is not None]
        self._repetition = np.array([p.repetition_penalty for p in params], dtype=np.float32)
        self._frequency = np.array([p.frequency_penalty for p in params], dtype=np.float32)
        self._presence = np.array([p.presence_penalty for p in params], dtype=np.float32)
        self._vocab_size = 0
        self._size = 0
        self._table: _Ids = np.empty((2, 0), dtype=np.int64)
        self._uploaded: Any = None
        self._device: Device | torch.device | None = None
        # By penalised row: its first cell, how many follow that, the cells of later tokens, and
        # the number of generated tokens that are in the table.
        self._first: list[int] = []
        self._length: list[int] = []
        self._later: list[list[int]] = []
        self._done: list[int] = []

    @property
    def is_due(self) -> bool:
        """True if any token has been counted."""
        return any(map(len, self._counts))

    def apply(self, flat: Any, vocab_size: int) -> None:
        """Change the logits of the counted tokens in place; `flat` is float32 [B * V].

        Raises `ValueError` for counted ids outside the vocabulary.
        """
        if not self.is_due:
            return
        operations = operations_of(flat)
        table = self._current_table(vocab_size, operations.device)[:, : self._size]
        figures = table[1].view(flat.dtype).reshape(-1, 2)
        index, divisor, offset = table[0], figures[:, 0], figures[:, 1]
        values = flat[index]
        with np.errstate(over="ignore"):
            penalised = operations.where(values > 0, values / divisor, values * divisor)
            flat[index] = operations.clamp_max(penalised - offset, LARGEST)

    def _current_table(self, vocab_size: int, device: "Device | torch.device") -> Any:
        """The table on `device`, int64 [2, capacity], with all counts so far."""
        changed = None  # all cells
        if vocab_size == self._vocab_size:
            changed = self._update()
        else:
            self._fill(vocab_size)
        if device is CPU:
            return self._table
        known = self._uploaded
        is_same = known is not None and self._device == device and known.shape == self._table.shape
        if changed is None or not is_same:
            self._device, self._uploaded = device, upload(self._table, device)
        elif len(changed):
            cells = upload(np.concatenate([changed[None], self._table[:, changed]]), device)
            known.index_copy_(1, cells[0], cells[1:])
        return self._uploaded

    def _fill(self, vocab_size: int) -> None:
        """Build the table, with spare cells."""
        self._vocab_size = vocab_size
        lengths = [len(count) for count in self._counts]
        self._size = sum(lengths)
        self._first = (np.cumsum(lengths) - lengths).tolist()
        self._length, self._later = lengths, [[] for _ in lengths]
        self._done = [len(count.added) for count in self._counts]
        self._table = np.zeros((2, 2 * self._size + len(lengths)), dtype=np.int64)
        self._set(
            np.arange(self._size),
            np.repeat(np.arange(len(lengths)), lengths),
            np.concatenate([count.ids for count in self._counts]),
            np.concatenate([count.counts for count in self._counts]),
        )

    def _update(self) -> _Ids:
        """Add the tokens counted since the last update; returns the cells that changed."""
        changed: dict[int, tuple[int, int]] = {}
        for number, count in enumerate(self._counts):
            added, length, later = count.added, self._length[number], self._later[number]
            for index in added[self._done[number] :]:
                if index == length + len(later):
                    later.append(self._size)
                    self._size += 1
                cell = self._first[number] + index if index < length else later[index - length]
                changed[cell] = number, index
            self._done[number] = len(added)
        spare = self._table.shape[1] - self._size
        if spare < 0:
            self._table = np.pad(self._table, ((0, 0), (0, self._size)))
        cells = np.array([*changed], dtype=np.int64)
        if len(cells):
            indices = [(self._counts[number], index) for number, index in changed.values()]
            self._set(
                cells,
                np.array([number for number, _ in changed.values()]),
                np.array([count.ids[index] for count, index in indices]),
                np.array([count.counts[index] for count, index in indices]),
            )
        return cells

    def _set(self, cells: _Ids, numbers: _Ids, ids: _Ids, times: _Floats) -> None:
        """Write cells of the table, from penalised rows, token ids and counts."""
        vocab_size = self._vocab_size
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            self._vocab_size = 0  # it has no table
            raise ValueError(f"token ids {ids.min()} to {ids.max()} in rows of {vocab_size} logits")
        figures = self._table[1].view(np.float32).reshape(-1, 2)
        self._table[0, cells] = self._rows[numbers] * vocab_size + ids
        figures[cells, 0] = self._repetition[numbers]
        figures[cells, 1] = self._frequency[numbers] * times + self._presence[numbers] * (times > 0)
