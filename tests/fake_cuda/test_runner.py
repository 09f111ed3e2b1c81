"""The runner on a CUDA device that is not there: every family with every backend.

Real are the model, the pool, the input buffers, the metadata of steps and of graphs, the sampler,
and the Python code of flashinfer, flash-attn and torch. Their kernels check their arguments.
"""

import pytest

from tests.fake_cuda.forks import run_forked
from tests.fake_cuda.releases import torch_obstacle, with_newest
from tests.fake_cuda.steps import MORE, WITH_STATES
from tests.gpu.models import FAMILIES
from tests.support.kernels import run_apart

STEPS = "tests.fake_cuda.steps"
BACKENDS = ("flashinfer", "flash-attn-3", "flash-attn", "cudnn", "varlen", "flex", "gather")
SERVED_BY_CUDNN = {"llama", "qwen3", "phi3", "olmo2", "granite", "smollm3"}
REFUSED = {
    "cudnn": set(FAMILIES) - SERVED_BY_CUDNN,
    "flash-attn-3": {"deepseek_v3"},
    "flash-attn": {"deepseek_v3"},
    "flashinfer": {"deepseek_v3"},
    "varlen": {"deepseek_v3", "gemma2"},
}
"""Families that a backend does not serve; `torch_obstacle`: none, with this torch."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_step_makes_the_host_wait(backend: str) -> None:
    """Nor does it mix devices; every size of batch has its graph."""
    reason = torch_obstacle(backend)
    if reason is not None:
        run_forked(STEPS, "refused", backend, reason, *FAMILIES)
        return
    refused = REFUSED.get(backend, set())
    run_forked(STEPS, "run", backend, *(family for family in FAMILIES if family not in refused))
    if refused:
        run_forked(STEPS, "refused", backend, "", *refused)


@pytest.mark.parametrize("family", MORE)
def test_nor_with_other_families(family: str) -> None:
    """Experts in groups, layers that share keys, positions that are learned; and a fallback."""
    run_forked(STEPS, "run", "gather", family)


@pytest.mark.parametrize("family", WITH_STATES)
def test_nor_with_states(family: str) -> None:
    """Recurrent layers of each kind; graphs of decodes are captured over the slots of states."""
    run_forked(STEPS, "run", "flex", family)


@pytest.mark.parametrize("backend", ["flashinfer", "flash-attn"])
def test_nor_with_the_newest_release(backend: str) -> None:
    served = [family for family in FAMILIES if family not in REFUSED[backend]]
    run_apart(STEPS, "run", backend, *served, **with_newest())


def test_nor_where_prompts_share_blocks() -> None:
    run_forked(STEPS, "run_sharing", "llama", "gpt_oss", "gemma2")


def test_a_run_compiles_one_module_of_flashinfer_for_each_kind_of_layer() -> None:
    """And the one that merges. Modules that are built ahead are then complete."""
    run_forked(STEPS, "needed_modules")


def test_nor_more_with_the_newest_release() -> None:
    run_apart(STEPS, "needed_modules", **with_newest())


@pytest.mark.parametrize("backend", ["flashinfer", "gather"])
def test_nor_with_an_8_bit_cache(backend: str) -> None:
    run_forked(STEPS, "run_in_8_bits", backend, "llama", "qwen3", "gemma2")


def test_nor_with_weights_in_8_bit_floats() -> None:
    """Of linear layers and of experts."""
    families = ("llama", "qwen3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3")
    run_forked(STEPS, "run_with_weights_in_fp8", "gather", *families)


def test_nor_with_a_flash_attn_that_reads_lengths() -> None:
    """From 2.8.4 on, its paged decode reads the longest length on the host.

    A graph cannot be captured then, and each layer of a decode step waits for the device.
    """
    run_forked(STEPS, "run_release", "2.8.4", "llama", "gemma2", "gpt_oss", "mistral")


STEPS = "tests.fake_cuda.steps"
