"""The KV write: a step's keys and values into the pool, one call per layer.

On CUDA a Triton kernel (`kv_write_kernel`); elsewhere `KVPool.write`, which is also the oracle
that the kernel is tested against.
"""

import importlib.util

import torch

from pyengine.attention.needs import FLOAT8_DTYPES
from pyengine.cache.kv_pool import KVPool

_FLOAT8_CAPABILITY = (8, 9)
"""GPUs below convert to 8-bit floats in software, which torch does and Triton does not."""


class KVWriter:
    """Writes into the layers of one pool. Slot -1: the row is written nowhere."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._by_kernel = _kernel_serves(pool)

    def slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """The slots of a step as `write` takes them, to be asked for once per step.

        The kernel skips the slot -1. Torch's copy cannot: there such rows go to the trash block.
        """
        if self._by_kernel:
            return slot_mapping
        return torch.where(slot_mapping < 0, self._pool.trash_slot, slot_mapping)

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write `key` `[T, kv_heads, head_dim_k]` and `value` `[T, kv_heads, head_dim_v]`.

        Any strides; `slots` is a row of what `slots()` gave, int64 `[T]`. An 8-bit cache takes
        them divided by the layer's scale, and what is too large as the largest number.
        """
        if not self._by_kernel:
            self._pool.write(layer, key, value, slots)
            return
        from pyengine.attention.kv_write_kernel import write_rows

        spec = self._pool.specs[layer]
        write_rows(
            (key, value),
            (self._pool.keys[layer], self._pool.values[layer]),
            slots,
            (spec.scale_k, spec.scale_v),
        )

    def write_step(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """`write` by a step's `slot_mapping` `[groups, T]` as it is.

        A CUDA graph reads it anew at each replay: nothing made of it before would do there.
        """
        group = self._pool.groups.places[layer].group
        self.write(layer, key, value, self.slots(slot_mapping[group]))


def _kernel_serves(pool: KVPool) -> bool:
    if pool.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if any(spec.dtype in FLOAT8_DTYPES for spec in pool.specs):
        return torch.cuda.get_device_capability(pool.device) >= _FLOAT8_CAPABILITY
    return True
