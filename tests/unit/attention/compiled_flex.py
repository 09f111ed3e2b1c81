"""FlexAttention as torch's C++ compiler makes it: it reads block masks, as kernels on CUDA do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pyengine.attention.flex import FlexBackend, FlexMetadata, Tiles
from pyengine.kv_cache.pool import KVPool
from tests.unit.attention.steps import Shape

SHAPE = Shape(dim_k=16, dim_v=16, block_size=16)
"""Sizes that the compiler accepts."""
CASES = ("plain", "window", "own position", "softcap")
"""Families that it serves: it returns no log-sum-exp, which sinks need."""


class _WideMetadata(FlexMetadata):
    def _tiles(self, group: int, window: int | None) -> Tiles:
        """The tiles, with as many partial pages as the pool has."""
        tiles = super()._tiles(group, window)
        counts, pages = tiles.in_part
        missing = self._backend.pool.num_blocks + 1 - pages.shape[1]
        return replace(tiles, in_part=(counts, np.pad(pages, ((0, 0), (0, missing)))))


@contextmanager
def compiled_backend() -> Iterator[Any]:
    """A backend whose kernels are compiled, for masks with room for a pool and fixed sizes."""
    library = pytest.importorskip("torch.nn.attention.flex_attention")
    torch._dynamo.reset()
    kernel = torch.compile(library.flex_attention, dynamic=False, fullgraph=True)

    class Compiled(FlexBackend):
        def __init__(self, pool: KVPool) -> None:
            super().__init__(pool)
            self.attend = kernel

        def metadata(self, inputs: Any) -> FlexMetadata:
            return _WideMetadata(self, inputs, self.pool.num_blocks + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
        yield Compiled
    torch._dynamo.reset()
