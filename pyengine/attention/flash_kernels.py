"""Shared by flash-attn, of version 2 and 3, and torch's copy of it: demands, lengths of keys."""

from typing import Any

import numpy as np
import torch

from pyengine.attention.backend import AttentionOptions, StepInputs
from pyengine.attention.needs import (
    AttentionNeeds,
    cache_dtype_obstacle,
    equal_dims_obstacle,
    half_obstacle,
    page_obstacle,
)
from pyengine.attention.paged import window_left

PAGE = 256
"""The tokens of a page are a multiple of this in version 2."""


def flash_kernel_obstacle(needs: AttentionNeeds, page: int = PAGE) -> str | None:
    """Why the kernels cannot serve; None: they can. A page has a multiple of `page` tokens."""
    for layer in needs.layers:
        if layer.head_dim_k > 256 or layer.head_dim_k % 8:
            return (
                f"its head sizes are the multiples of 8 up to 256, the model has {layer.head_dim_k}"
            )
    return (
        half_obstacle(needs)
        or equal_dims_obstacle(needs)
        or cache_dtype_obstacle(needs)
        or page_obstacle(needs, page)
    )


def flash_settings(options: AttentionOptions) -> dict[str, Any]:
    """The options of a layer, as both versions of the package call them."""
    left = window_left(options.sliding_window)
    return {
        "softmax_scale": options.scaling,
        "causal": True,
        "window_size": (left, -1 if left < 0 else 0),
        "softcap": options.softcap or 0.0,
    }


def longest_in(inputs: StepInputs) -> int:
    """Tokens of the longest sequence of this step."""
    return int(inputs.host_seq_lens.max())


def longest_ever(inputs: StepInputs, block_size: int) -> int:
    """Tokens that a block table of `inputs` can hold, for a graph."""
    return int(inputs.block_tables.shape[2]) * block_size


class Extents:
    """Where the rows and keys of sequences begin, for kernels that take any number of rows.

    The kernels take both from the device, and the largest from the host: `max_rows`, `max_keys`.
    """

    def __init__(self, inputs: StepInputs, max_keys: int) -> None:
        self.max_rows = int(np.diff(inputs.host_query_start_loc).max())
        self.max_keys = max_keys
        self.key_starts = torch.zeros_like(inputs.query_start_loc)
        """int32 `[B + 1]` on the device."""
        self.refresh(inputs)

    def refresh(self, inputs: StepInputs) -> None:
        """Compute `key_starts` again, in place."""
        torch.cumsum(inputs.seq_lens, 0, dtype=torch.int32, out=self.key_starts[1:])
