"""Adapters of linear layers by torch, and by the grouped product of CUDA: see `adapters`."""

from collections.abc import Mapping, Sequence

import torch

from pyengine.models.adapters import AdapterLimits, Matrices
from pyengine.models.decoder.adapters import block_matrices
from pyengine.models.decoder.grouped import group_pairs, grouped_linear


class TorchAdapterTable:
    """See `AdapterTable`. Tensors stay where they are, for CUDA graphs.

    A further slot of zeros is that of tokens without an adapter.
    """

    def __init__(
        self,
        place: tuple[torch.device, torch.dtype],
        ends: Sequence[int],
        inputs: int,
        limits: AdapterLimits,
    ) -> None:
        device, dtype = place
        slots, width = limits.max_loras + 1, len(ends) * limits.max_rank
        self._ends, self._max_rank = list(ends), limits.max_rank
        self._down = torch.zeros((slots, width, inputs), dtype=dtype, device=device)
        self._up = torch.zeros((slots, ends[-1], width), dtype=dtype, device=device)

    def write(self, slot: int, parts: Mapping[int, Matrices]) -> None:
        """See `AdapterTable.write`."""
        inputs = self._down.shape[2]
        first, second = block_matrices(parts, self._ends, inputs, self._max_rank)
        self._down[slot].copy_(torch.from_numpy(first))
        self._up[slot].copy_(torch.from_numpy(second))

    def add(
        self, result: torch.Tensor, rows: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """See `AdapterTable.add`; `slots` are the tokens by slot, and where each slot ends."""
        latent = grouped_linear(rows.to(self._down.dtype), self._down, *slots)
        return result + grouped_linear(latent, self._up, *slots).to(result.dtype)


def adapter_slots(slots: torch.Tensor, max_loras: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens by slot, and where each slot ends, for `slots` int32 `[T]`, -1: none."""
    own = torch.where(slots < 0, max_loras, slots)
    return group_pairs(own[:, None], max_loras + 1)
