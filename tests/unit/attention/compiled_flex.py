"""FlexAttention as torch's C++ compiler makes it: it reads block masks, as kernels on CUDA do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pyengine.attention.flex import FlexBackend, FlexPlan
from pyengine.kv_cache.pool import KVPool
from tests.unit.attention.steps import Shape

SHAPE = Shape(dim_k=16, dim_v=16, block_size=16)
"""Sizes that the compiler takes."""
CASES = ("plain", "window", "own position", "softcap")
"""Those that it serves: it returns no sum under the softmax, which sinks need."""


@contextmanager
def compiled_backend() -> Iterator[Any]:
    """A backend whose kernels are compiled; sizes are fixed, and each mask has room for a pool."""
    library = pytest.importorskip("torch.nn.attention.flex_attention")
    torch._dynamo.reset()
    kernel = torch.compile(library.flex_attention, dynamic=False, fullgraph=True)

    class Compiled(FlexBackend):
        def __init__(self, pool: KVPool) -> None:
            super().__init__(pool)
            self.attend = kernel

        def plan(self, inputs: Any) -> FlexPlan:
            return FlexPlan(self, inputs, self.pool.num_blocks + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
        yield Compiled
    torch._dynamo.reset()
