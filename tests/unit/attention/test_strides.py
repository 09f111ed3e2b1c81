"""The strides of our operators' results, on which compiled graphs rely unchecked.

A graph is compiled for what an operator's fake gives, and reads the real result in that order. With
other strides it reads numbers that belong elsewhere, and says nothing.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from pyengine.attention.choice import _CANDIDATES
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.dispatch import CompiledModel, PagedContext, running
from pyengine.attention.flash_attn import FlashAttn3Backend, FlashAttnBackend
from pyengine.attention.flashinfer import FlashInferBackend
from pyengine.attention.flex import FlexBackend
from pyengine.attention.gather import GatherBackend
from pyengine.attention.needs import LayerNeeds
from pyengine.attention.varlen import CudnnBackend, VarlenBackend
from pyengine.executor.kv_cache_config import cache_specs
from pyengine.kv_cache.pool import KVPool
from tests.gpu.models import FAMILIES, random_model
from tests.support.models import as_loaded
from tests.unit.attention import fake_kernels
from tests.unit.attention.steps import CPU, NUM_BLOCKS, Lengths, Shape, make_step

BACKENDS: dict[str, Callable[[KVPool], Any]] = {
    "cpu": CpuBackend,
    "flashinfer": FlashInferBackend,
    "flash-attn-3": FlashAttn3Backend,
    "flash-attn": FlashAttnBackend,
    "cudnn": CudnnBackend,
    "varlen": VarlenBackend,
    "flex": FlexBackend,
    "gather": GatherBackend,
}
STAND_INS = ("flashinfer", "flash-attn-3", "flash-attn", "cudnn", "varlen")
"""Their kernels are ours, in tests: equal sizes of keys and values only."""
NUMBER = 77_000
"""The number of a compiled model that no other model has."""
STEPS: list[Lengths] = [
    [(1, 9), (1, 4), (1, 21)],
    [(7, 4)],
    [(1, 9), (7, 4), (2, 20)],
    [(1, 9)],
]


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    with pytest.MonkeyPatch.context() as modules:
        modules.setattr(varlen, "varlen_attn", fake_kernels.varlen_attn)
        modules.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


class Checked:
    """Calls an operator, and compares the result with what its fake gives for the same inputs."""

    def __init__(self, operator: Any) -> None:
        self.default = operator  # torch looks for it where the operator was
        self.num_compared = 0
        self.broken: list[str] = []

    def __call__(self, *args: Any) -> Any:
        result = self.default(*args)
        with FakeTensorMode() as mode:
            promised = self.default(*tree_map_only(torch.Tensor, mode.from_tensor, args))
        self.num_compared += 1
        if _layout(result) != _layout(promised):
            self.broken.append(f"{_layout(result)}, promised {_layout(promised)}")
        return result


def _layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides; the stride of a single element is not one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride if size > 1 else 0) for size, stride in pairs]


def test_every_backend_is_here() -> None:
    assert set(BACKENDS) == set(_CANDIDATES)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_attention_gives_the_strides_that_its_fake_promises(family: str) -> None:
    """Queries come as the family's layers make them."""
    loaded = as_loaded(random_model(family, num_hidden_layers=2).float())
    specs = cache_specs(loaded, "float32")
    broken, num_compared = [], 0
    for name, build in BACKENDS.items():
        if not _stand_in_serves(name, loaded.layers[0]):
            continue
        for lengths in STEPS:
            inputs = make_step(lengths, Shape()).inputs
            pool = KVPool(specs, NUM_BLOCKS, Shape().block_size, CPU)
            with pytest.MonkeyPatch.context() as modules:  # for long, transformers would see them
                modules.setitem(sys.modules, "flashinfer", fake_kernels.flashinfer)
                modules.setitem(sys.modules, "flash_attn", fake_kernels.flash_attn)
                modules.setitem(sys.modules, "flash_attn_interface", fake_kernels.flash_attn_3)
                backend = build(pool)
            context = PagedContext(backend.metadata(inputs), [None] * len(specs))
            ids = torch.arange(len(inputs.positions))
            checked = Checked(torch.ops.pyengine.paged_attention.default)
            with (
                running(NUMBER, context),
                patch.object(torch.ops.pyengine, "paged_attention", checked),
            ):
                loaded.model(ids, inputs.positions, ids, CompiledModel(NUMBER))
            num_compared += checked.num_compared
            broken += [f"{name}, {lengths}: {sequence}" for sequence in checked.broken]
    assert not broken
    assert num_compared >= 3 * len(STEPS) * len(specs)


def _stand_in_serves(name: str, layer: LayerNeeds) -> bool:
    if name not in STAND_INS:
        return True
    return layer.head_dim_k == layer.head_dim_v and not (
        name in ("cudnn", "varlen") and layer.softcap is not None
    )
