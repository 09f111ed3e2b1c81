"""The compiled forward pass of every family, lowered to machine code, in steps over a fake device.

Its kernels are made and not launched. All else runs: the graphs call attention, and check the sizes
and strides of what it gives.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from pyengine.attention import dispatch
from pyengine.attention.backend import QKV
from pyengine.attention.context import PagedContext
from pyengine.attention.dispatch import running
from tests.fake_cuda.forks import run_forked
from tests.fake_cuda.releases import torch_obstacle
from tests.fake_cuda.steps import BROKEN, MORE, _attend_as_promised
from tests.gpu.models import FAMILIES

STEPS = "tests.fake_cuda.steps"
WITH_FLEX = {"llama", "mistral", "phi3", "gemma2", "gpt_oss", "deepseek_v3"}
"""One family for each kind of FlexAttention's kernels; other families have the same kinds."""


@pytest.mark.parametrize("family", FAMILIES)
def test_two_graphs_serve_every_step(family: str) -> None:
    """A range of sizes that the compiler narrows down would be an error of the engine."""
    run = "run_compiled" if family in WITH_FLEX else "run_compiled_without_flex"
    run_forked(STEPS, run, "90", "flex", family)


@pytest.mark.parametrize("family", MORE)
def test_nor_more_for_other_families(family: str) -> None:
    """Experts in groups, layers that share keys, positions that are learned; and a fallback."""
    run_forked(STEPS, "run_compiled_without_flex", "90", "gather", family)


@pytest.mark.parametrize("capability", [80, 100])
def test_for_other_gpus(capability: int) -> None:
    run_forked(STEPS, "run_compiled", str(capability), "flex", "llama")


def test_a_result_that_is_not_as_promised_is_noticed() -> None:
    """In the real steps; each way by itself below."""
    run_forked(STEPS, "run_broken", "heads first")


@pytest.mark.parametrize("way", BROKEN)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_each_way_to_break_a_promise_is_noticed(way: str, num_tokens: int) -> None:
    """A single token with heads first is the same: the stride of a size of 1 is not one."""

    class Metadata:
        def forward(self, _layer: int, qkv: QKV, _options: object) -> torch.Tensor:
            return qkv[0].clone()

    arguments: Any = (torch.zeros(num_tokens, 4, 8),) * 3
    arguments = (*arguments, None, 7, 0, 1.0, None, None, [], "", [], [])
    attend = dispatch._attend_opaquely
    with running(7, PagedContext(Metadata(), [None])):
        assert _attend_as_promised(*arguments).shape == (num_tokens, 4, 8)
        with patch.object(dispatch, "_attend_opaquely", lambda *given: BROKEN[way](attend(*given))):
            if (way, num_tokens) == ("heads first", 1):
                _attend_as_promised(*arguments)
                return
            with pytest.raises(AssertionError, match="a broken promise"):
                _attend_as_promised(*arguments)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_with_weights_in_8_bit_floats(family: str) -> None:
    run_forked(STEPS, "run_compiled_in_fp8", "90", "flex", family)


@pytest.mark.parametrize("backend", ["flashinfer", "flash-attn", "varlen"])
def test_with_other_backends(backend: str) -> None:
    reason = torch_obstacle(backend)
    if reason is None:
        run_forked(STEPS, "run_compiled", "90", backend, "gpt_oss")
    else:
        run_forked(STEPS, "refused", backend, reason, "gpt_oss")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_flex_attention_is_compiled_by_itself(family: str) -> None:
    """Windows and softcaps of gemma2; heads of 64 and sinks of gpt_oss."""
    run_forked(STEPS, "run_flex", "90", family)
