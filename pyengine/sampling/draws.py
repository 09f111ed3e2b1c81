"""The requests of a batch that draw their tokens, and their settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from pyengine.kernels import ALIGNED
from pyengine.utils.host_copy import OnDevices, upload

if TYPE_CHECKING:
    import torch


class DrawState(Protocol):
    """The inputs of a draw: see `SamplingState`."""

    seed: int
    draw_settings: tuple[float, float, int, float]


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """The settings of rows as columns `[R, 1]`; `None` if no row uses one.

    A `top_k` of 0 is no limit. `largest_k` is the largest limit (at least 1). `has_bare_top_p` is
    true if a row has top-p without top-k.
    """

    temperature: "torch.Tensor"
    min_p: "torch.Tensor | None"
    top_k: "torch.Tensor | None"
    top_p: "torch.Tensor | None"
    largest_k: int
    has_bare_top_p: bool


class DrawBatch:
    """The requests of a batch that draw their tokens; ``rows`` are their rows in it."""

    def __init__(self, states: Sequence[DrawState], rows: Sequence[int]) -> None:
        self.rows: npt.NDArray[np.int64] = np.array(rows, dtype=np.int64)
        self.seeds: npt.NDArray[np.uint64] = np.array(
            [states[row].seed for row in rows], dtype=np.uint64
        )
        settings = [states[row].draw_settings for row in rows]
        self.settings: npt.NDArray[np.float64] = np.array(settings, dtype=np.float64).T.copy()
        """Temperature, min-p, top-k, top-p: [4, R]; 0, or 1 for top-p, means off."""
        _, min_p, top_k, top_p = self.settings
        self.is_filtered = bool(((min_p > 0) | (top_k > 0) | (top_p < 1)).any())
        """True if a row has min-p, top-k or top-p."""
        self._columns: dict[tuple[int, int, torch.device], DrawSettings] = {}
        self.row_ids = OnDevices(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def table(self) -> OnDevices:
        """The settings of kernels on devices: [4, R], padded."""
        return OnDevices(np.pad(self.settings, ((0, 0), (0, -len(self) % ALIGNED))))

    def columns(self, rows: slice, device: "torch.device") -> DrawSettings:
        """The settings of these requests as tensors, made at first use."""
        key = (rows.start, rows.stop, device)
        if key not in self._columns:
            self._columns[key] = self._tensors(rows, device)
        return self._columns[key]

    def _tensors(self, rows: slice, device: "torch.device") -> DrawSettings:
        temperature, min_p, top_k, top_p = self.settings[:, rows, None]
        return DrawSettings(
            temperature=upload(temperature, device),
            min_p=upload(min_p, device) if (min_p > 0).any() else None,
            top_k=upload(top_k.astype(np.int64), device) if (top_k > 0).any() else None,
            top_p=upload(top_p, device) if (top_p < 1).any() else None,
            largest_k=int(top_k.max(initial=0)) or 1,
            has_bare_top_p=bool(((top_p < 1) & (top_k == 0)).any()),
        )
