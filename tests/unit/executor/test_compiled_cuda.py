"""The forward pass, compiled for a GPU that is not there: its kernels become machine code."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.models import FAMILIES
from tests.support.kernels import needs_triton, run_apart

needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA")
LAYERS = 2
BEYOND = 1 << 23
"""Tokens of a step whose hidden states have more numbers than 32 bits count."""


def lower(family: str) -> None:
    """Lower both graphs of a family; steps of every size go by them."""
    from tests.support.cuda_lowering import Lowering, pretend_cuda

    pretend_cuda()

    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_inductor_cache
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benches.gpu.decoders import unfilled_decoder
    from benches.gpu.launches import Counting
    from pyengine.attention.context import PagedContext
    from pyengine.executor.compiled import CompiledForward
    from tests.gpu.models import _BASE, FAMILIES, VOCABULARY

    lowering, stats = Lowering(), counters["stats"]
    settings = {**_BASE, **FAMILIES[family], "num_hidden_layers": LAYERS}

    def step(num_tokens: int, num_rows: int) -> None:
        ids = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
        inputs: Any = SimpleNamespace(input_ids=ids, positions=ids, logits_indices=ids[:num_rows])
        logits = compiled(inputs, PagedContext(Counting(), [None] * LAYERS))
        assert logits.shape == (num_rows, VOCABULARY)

    with fresh_inductor_cache(), FakeTensorMode(allow_non_fake_inputs=True):
        model, _ = unfilled_decoder(family, settings, torch.device("cuda:0"))
        compiled = CompiledForward(model, LAYERS, lowering)  # type: ignore[arg-type]
        assert stats["unique_graphs"] == 2
        assert len(lowering.kernels) > 5
        assert all(code.startswith(b"\x7fELF") for code in lowering.kernels.values())
        for num_tokens, num_rows in ((1, 1), (2, 1), (7, 7), (64, 3), (4096, 1024)):
            step(num_tokens, num_rows)
        assert stats["unique_graphs"] == 2
        if family == "llama":
            step(BEYOND, 4)
            assert stats["unique_graphs"] == 3


@pytest.mark.slow
@needs_triton
@needs_cuda_build
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES if name != "llama"),
    ],
)
def test_two_graphs_serve_steps_of_every_size_on_cuda(family: str, tmp_path: Any) -> None:
    run_apart(__name__, "lower", family, TRITON_CACHE_DIR=str(tmp_path))
