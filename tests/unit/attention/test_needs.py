"""The needs of models in attention, from their configurations and modules."""

import pytest
import torch

from pyengine.attention.needs import AttentionNeeds, LayerNeeds, needs_of, torch_version
from tests.unit.attention.families import MODELS, layers_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layers():
    return {name: needs_of(layers_of(name), CPU, "bfloat16").layers for name in MODELS}


def test_layers_say_what_they_need(layers):
    plain = {"query_heads": 4, "kv_heads": 2, "head_dim_k": 128, "head_dim_v": 128}
    assert layers["llama"] == (LayerNeeds(**plain),) * 2
    gemma = {**plain, "head_dim_k": 256, "head_dim_v": 256}
    assert layers["gemma3_text"] == (LayerNeeds(**gemma, window=8), LayerNeeds(**gemma))
    assert layers["gemma2"] == (
        LayerNeeds(**gemma, window=8, softcap=50.0),
        LayerNeeds(**gemma, softcap=50.0),
    )
    oss = {**plain, "head_dim_k": 64, "head_dim_v": 64, "sinks": True}
    assert layers["gpt_oss"] == (LayerNeeds(**oss, window=8), LayerNeeds(**oss))


def test_the_machine_is_described(layers):
    needs = needs_of(layers_of("llama"), CPU, "bfloat16", block_size=32)
    assert (needs.device, needs.block_size, needs.capability) == (CPU, 32, None)
    assert (needs.torch_version, needs.cudnn_version) == ((0, 0), 0)  # nothing here asks for them
    assert needs.cache_dtype == "bfloat16"


def test_the_cache_may_have_a_dtype_of_its_own():
    needs = AttentionNeeds(device=CPU, kv_dtype="float8_e4m3fn")
    assert needs.cache_dtype == "float8_e4m3fn"
    assert AttentionNeeds(device=CPU).cache_dtype == "float32"


def test_versions_of_torch_are_read():
    assert torch_version("2.15.0+cu132") == (2, 15)
    assert torch_version("2.9.1a0+git123") == (2, 9)
    assert torch_version("unknown") == (0, 0)
    assert torch_version(torch.__version__) >= (2, 9)
