"""The compiled forward pass of every family, lowered to machine code, in steps over a fake device.

Its kernels are made and not launched. All else runs: the graphs call attention, and check the sizes
and strides of what it gives.
"""

from pathlib import Path

import pytest

from tests.gpu.models import FAMILIES
from tests.support.kernels import run_apart

STEPS = "tests.fake_cuda.steps"


@pytest.mark.parametrize("family", FAMILIES)
def test_two_graphs_serve_every_step(family: str, tmp_path: Path) -> None:
    """A range of sizes that the compiler narrows down would be an error of the engine."""
    run_apart(STEPS, "run_compiled", "90", "flex", family, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("capability", [80, 100])
def test_for_other_gpus(capability: int, tmp_path: Path) -> None:
    run_apart(
        STEPS, "run_compiled", str(capability), "flex", "llama", TRITON_CACHE_DIR=str(tmp_path)
    )


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_with_weights_in_8_bit_floats(family: str, tmp_path: Path) -> None:
    run_apart(*(STEPS, "run_compiled_in_fp8", "90", "flex", family), TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("backend", ["flashinfer", "flash-attn", "varlen"])
def test_with_other_backends(backend: str, tmp_path: Path) -> None:
    run_apart(STEPS, "run_compiled", "90", backend, "gpt_oss", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize(
    ("capability", "family"),
    [(80, "llama"), (90, "llama"), (100, "llama"), (90, "gemma2"), (90, "gpt_oss")],
)
def test_flex_attention_is_compiled(capability: int, family: str, tmp_path: Path) -> None:
    """Windows and softcaps of gemma2; heads of 64 and sinks of gpt_oss."""
    run_apart(STEPS, "run_flex", str(capability), family, TRITON_CACHE_DIR=str(tmp_path))
