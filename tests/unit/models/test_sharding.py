"""What divides and what does not, by configurations alone."""

from typing import Any

import pytest
from transformers import AutoConfig

from pyengine.core.errors import ConfigurationError
from pyengine.models.sharding import check_tensor_parallel, kv_shards

LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
MOE: dict[str, Any] = {**LLAMA, "moe_intermediate_size": 30, "num_experts": 4}


def config(family: str, **settings: Any) -> Any:
    return AutoConfig.for_model(family, **settings)


@pytest.mark.parametrize(
    ("family", "settings", "size"),
    [
        ("llama", LLAMA, 1),
        ("llama", LLAMA, 2),
        ("llama", LLAMA, 4),
        ("llama", SMOLLM2, 3),
        ("llama", {**LLAMA, "vocab_size": 97}, 1),
        ("qwen3_moe", MOE, 2),
    ],
)
def test_what_divides_is_taken(family: str, settings: dict[str, Any], size: int) -> None:
    check_tensor_parallel(config(family, **settings), size)


@pytest.mark.parametrize(
    ("settings", "size", "words"),
    [
        (SMOLLM2, 2, ["9 query heads", "3 KV heads", "use 3"]),
        (SMOLLM2, 9, ["divide 3 KV heads", "use 3"]),
        (LLAMA, 8, ["divide 4 KV heads", "use 2 or 4"]),
        (LLAMA, 3, ["4 KV heads", "8 query heads", "use 2 or 4"]),
        ({**LLAMA, "vocab_size": 97}, 2, ["97 tokens in the vocabulary", "only", "=1 does"]),
        ({**LLAMA, "intermediate_size": 90}, 4, ["90 of intermediate_size", "use 2"]),
    ],
)
def test_what_does_not_divide_is_named(
    settings: dict[str, Any], size: int, words: list[str]
) -> None:
    with pytest.raises(ConfigurationError, match=f"tensor_parallel_size={size}") as caught:
        check_tensor_parallel(config("llama", **settings), size)
    for word in words:
        assert word in str(caught.value)


def test_experts_count_too() -> None:
    with pytest.raises(ConfigurationError, match="30 of moe_intermediate_size"):
        check_tensor_parallel(config("qwen3_moe", **MOE), 4)


@pytest.mark.parametrize("size", [0, -2])
def test_less_than_one_process_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"={size}: it must be at least 1"):
        check_tensor_parallel(config("llama", **LLAMA), size)


def test_a_family_without_a_plan_is_refused() -> None:
    opt = config("opt", hidden_size=64, num_attention_heads=4, vocab_size=96)
    check_tensor_parallel(opt, 1)
    with pytest.raises(ConfigurationError, match="no tensor-parallel plan for models of type opt"):
        check_tensor_parallel(opt, 2)


@pytest.mark.parametrize(
    ("family", "shards"), [("llama", 2), ("qwen3", 2), ("gemma3_text", 2), ("olmo2", 1), ("opt", 1)]
)
def test_kv_heads_are_divided_where_the_plan_divides_the_keys(family: str, shards: int) -> None:
    assert kv_shards(config(family), 2) == shards
    assert kv_shards(config(family), 1) == 1
