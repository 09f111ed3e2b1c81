"""Instruction levels of the processor: the switches hold, the model answers the same at each."""

import os

import pytest
import torch

from pyengine import LLM, SamplingParams
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.needs import AttentionNeeds, LayerNeeds
from pyengine.cpu import ConfigError, CpuAttention
from pyengine.models.placement import bfloat16_instructions

pytestmark = pytest.mark.levels

SWITCH = "PYENGINE_CPU_ISA"
NAMES = ["plain", "neon", "avx2", "avx512", "avx512_bf16", "amx"]
NEEDS = AttentionNeeds(
    device=torch.device("cpu"),
    layers=(LayerNeeds(query_heads=8, kv_heads=4, head_dim_k=32, head_dim_v=32),),
    dtype="float32",
    torch_version=(2, 15),
)


def test_the_level_is_the_one_that_the_switches_name():
    assert CpuAttention.isa() in NAMES
    if named := os.environ.get(SWITCH):
        assert CpuAttention.isa() == named
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    if capability in ("default", "avx2"):
        assert torch.backends.cpu.get_cpu_capability() == capability.upper()
        assert bfloat16_instructions() is None


def test_the_switch_lowers_the_level(monkeypatch):
    monkeypatch.setenv(SWITCH, "plain")
    assert CpuAttention.isa() == "plain"
    monkeypatch.setenv(SWITCH, "")
    assert CpuAttention.isa() in NAMES


@pytest.mark.parametrize("name", ["AVX2", "sse", "amx,avx2", "1"])
def test_a_level_that_is_not_known_is_refused_by_name(monkeypatch, name):
    monkeypatch.setenv(SWITCH, name)
    words = f'{SWITCH}="{name}" is not known: use plain, neon, avx2, avx512, avx512_bf16, amx'
    for call in (lambda: CpuAttention(1), CpuAttention.isa, CpuAttention.is_fast):
        with pytest.raises(ConfigError, match=words):
            call()


def test_a_level_that_the_processor_lacks_is_refused_by_name(monkeypatch):
    lacking = "avx2" if CpuAttention.isa() == "neon" else "neon"
    monkeypatch.setenv(SWITCH, lacking)
    with pytest.raises(ConfigError, match=f"this processor has no {lacking}: the best level"):
        CpuAttention(1)


def test_without_vectors_the_kernel_leaves_its_place_to_another(monkeypatch):
    monkeypatch.setenv(SWITCH, "plain")
    if CpuAttention.is_fast():
        pytest.skip("plain loops have an instruction that rounds once here")
    assert CpuBackend.obstacle(NEEDS) == "this processor has no AVX2 with FMA"


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_answer_is_the_same_at_each_level(quantization):
    llm = LLM(num_blocks=64, max_num_seqs=2, quantization=quantization)
    params = SamplingParams(temperature=0, max_tokens=12)
    (answer,) = llm.generate(["The capital of Japan is"], params, use_tqdm=False)
    assert answer.outputs[0].text.startswith(" Tokyo")
