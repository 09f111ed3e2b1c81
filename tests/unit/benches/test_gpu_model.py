"""The arithmetic of the roofline against real parameters, tensors and hand-made numbers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benches.gpu.model import SHAPES, ModelSize, roofline_tokens_per_second
from pyengine.kv_cache.pool import bytes_per_block
from pyengine.models.decoder.loading import spec_of

SMALL = ModelSize(
    layers=2,
    hidden=8,
    intermediate=16,
    query_heads=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=10,
    tied=False,
)


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_the_matrices_of_the_model(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16)
    matrices = sum(
        parameter.numel()
        for key, parameter in model.named_parameters()
        if parameter.dim() == 2
        and not (key.endswith("embed_tokens.weight") and not shape.size.tied)
    )
    assert shape.size.weight_bytes == 2 * matrices


@pytest.mark.parametrize("name", SHAPES)
def test_kv_bytes_are_those_of_the_pool(name: str) -> None:
    shape = SHAPES[name]
    specs = spec_of(shape.config.to_dict(), name).cache_specs("bfloat16")
    assert 16 * shape.size.kv_bytes_per_token == bytes_per_block(specs, 16)


def test_the_shapes_have_the_sizes_of_their_names() -> None:
    assert SHAPES["Qwen3-0.6B"].size.weight_bytes / 2 == pytest.approx(0.596e9, rel=0.01)
    assert SHAPES["Llama-3.1-8B"].size.weight_bytes / 2 == pytest.approx(7.5e9, rel=0.01)


def test_bytes_of_a_decode_step() -> None:
    # a layer: q and o 8 x 8 each, k and v 8 x 4 each, three of 8 x 16; the output layer 10 x 8
    assert SMALL.layer_weights == 64 + 64 + 32 + 32 + 3 * 128
    assert SMALL.weight_bytes == 2 * (2 * 576 + 80)
    assert SMALL.kv_bytes_per_token == 2 * 2 * 4 * 2
    assert SMALL.decode_bytes(3, 100) == 2464 + 3 * 8 * 2 + 3 * 100 * 32


def test_the_roofline_is_batch_over_time() -> None:
    assert roofline_tokens_per_second(SMALL, 3, 100, 12_112.0) == pytest.approx(3.0)


def test_operations_of_a_prefill() -> None:
    # 6 visible keys in 3 rows, 2 layers, 2 heads of 4: scores and values, two operations each
    assert SMALL.prefill_flops(3) == 2 * 2 * 576 * 3 + 4 * 2 * 2 * 4 * 6 + 2 * 10 * 8
