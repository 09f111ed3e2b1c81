"""The needs of transformers' modules in attention, by their configurations."""

from types import SimpleNamespace
from typing import Any

import pytest

from pyengine.attention.needs import LayerNeeds
from pyengine.models.fallback import attending_layers
from tests.unit.kv_cache.test_layer_groups import every


def config(**fields: Any) -> Any:
    base = {"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 3, **fields}
    result: Any = SimpleNamespace(**base)
    result.get_text_config = lambda: result
    return result


def config_of(family: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **settings)


def module_of(config: Any) -> Any:
    return SimpleNamespace(config=config, modules=list)


def windows_of(config: Any) -> list[int | None]:
    return [layer.window for layer in attending_layers(module_of(config))]


def _sizes(layer: LayerNeeds) -> tuple[int, int, int]:
    return layer.kv_heads, layer.head_dim_k, layer.head_dim_v


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (8, 8, 8)),
        ({"num_key_value_heads": 2}, (2, 8, 8)),
        ({"head_dim": 32, "num_key_value_heads": 2}, (2, 32, 32)),
        ({"head_dim": 32, "v_head_dim": 16}, (8, 32, 16)),
        (
            {"kv_lora_rank": 4, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
            (8, 20, 10),
        ),
    ],
)
def test_heads_follow_the_configuration(
    fields: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    layers = attending_layers(module_of(config(**fields)))
    assert [_sizes(layer) for layer in layers] == [expected] * 3


def test_layers_may_differ() -> None:
    layers = [config(num_key_value_heads=2), config(head_dim=16)]
    mixed = config(is_heterogeneous=True, per_layer_config=layers)
    assert [_sizes(layer) for layer in attending_layers(module_of(mixed))] == [
        (2, 8, 8),
        (8, 16, 16),
    ]


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("llama", {"num_hidden_layers": 3}, [None] * 3),
        ("qwen3", {"num_hidden_layers": 2}, [None] * 2),
        ("qwen2", {"num_hidden_layers": 2, "sliding_window": 8}, [None] * 2),
        (
            "qwen2",
            {
                "num_hidden_layers": 4,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 3,
            },
            [None, None, None, 8],
        ),
        ("qwen3_moe", {"num_hidden_layers": 2, "sliding_window": 8}, [None] * 2),
        ("mistral", {"num_hidden_layers": 3, "sliding_window": 8}, [8] * 3),
        ("mistral", {"num_hidden_layers": 3, "sliding_window": None}, [None] * 3),
        ("mixtral", {"num_hidden_layers": 2, "sliding_window": 8}, [8] * 2),
        ("starcoder2", {"num_hidden_layers": 2, "sliding_window": 8}, [8] * 2),
        ("phi3", {"num_hidden_layers": 2, "sliding_window": 2047}, [2047] * 2),
        ("smollm3", {"num_hidden_layers": 2, "sliding_window": 8}, [None] * 2),
        ("gemma2", {"num_hidden_layers": 4, "sliding_window": 8}, every(2, 8, 4)),
        ("gemma3_text", {"num_hidden_layers": 26, "sliding_window": 512}, every(6, 512, 26)),
        ("gpt_oss", {"num_hidden_layers": 24, "sliding_window": 128}, every(2, 128, 24)),
        ("cohere2", {"num_hidden_layers": 8, "sliding_window": 8}, every(4, 8, 8)),
        ("olmo3", {"num_hidden_layers": 8, "sliding_window": 8}, every(4, 8, 8)),
        (
            "exaone4",
            {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2},
            every(2, 8, 4),
        ),
    ],
)
def test_windows_follow_the_configuration(
    family: str, settings: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows_of(config_of(family, **settings)) == expected


def test_the_text_part_of_a_larger_model_counts() -> None:
    inner = config_of("gemma3_text", num_hidden_layers=7, sliding_window=8)
    outer = SimpleNamespace(get_text_config=lambda: inner)
    assert windows_of(outer) == every(6, 8, 7)


def test_layers_of_their_own_configuration_have_their_own_windows() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = [config(sliding_window=w, layer_types=types) for w in (8, 8, 4)]
    assert windows_of(config(is_heterogeneous=True, per_layer_config=layers)) == [8, None, 4]


@pytest.mark.parametrize("window", [None, 0, -1, [8, 8]])
def test_what_is_no_window_is_none(window: Any) -> None:
    assert windows_of(config(num_hidden_layers=2, sliding_window=window)) == [None, None]
