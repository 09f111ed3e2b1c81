"""Answers have the same bits in every way that `benches.engine.same_bits` knows."""

from pathlib import Path
from typing import Any

import pytest

from benches.engine.same_bits import WAYS, Requests, Way, requests, run_ways
from pyengine.cpu import CpuAttention
from pyengine.engine import builder
from pyengine.sampling import array_operations
from pyengine.speculation.policy import Curve, StepCosts
from tests.support.checkpoints import save_random

pytestmark = [
    pytest.mark.levels,
    pytest.mark.slow,
    pytest.mark.skipif(not CpuAttention.is_fast(), reason="no kernel multiplies here"),
]

VOCABULARY = 33_000
"""More logits than torch sums by one thread."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
}
WITH_STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}
FEW = ("alone, 1 thread", "24 at once, 3 threads", "chunks of 24 tokens, 2 threads")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family."""
    found = {}
    for family, settings in {**FAMILIES, **WITH_STATES}.items():
        size = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
        folder = tmp_path_factory.mktemp(family)
        found[family] = save_random(folder, family, **settings, **size)
    return found


def asked() -> Requests:
    """Few requests, among them a shared beginning and a repetition."""
    several = requests(48, VOCABULARY)
    chosen = [1, 2, 4, 5, 6, 7, 9, 14, 24, 27, 40, 47]
    return Requests(
        [several.prompts[number] for number in chosen],
        [several.params[number] for number in chosen],
    )


def differences(model: dict[str, Any], ways: tuple[Way, ...]) -> list[str]:
    """The ways that differ, or were not taken."""
    found = [comparison for comparison, _ in run_ways(model, asked(), ways, share=1)]
    assert all(each.answers == 12 for each in found)
    return [str(each) for each in found if not each.is_same]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way(dtype: str, folders: dict[str, Path]) -> None:
    model = {"model": folders["llama"], "dtype": dtype, "linear_backend": "pyengine"}
    assert differences(model, WAYS) == []


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"dtype": "float32", "quantization": "int8"}),
        ("llama", {"dtype": "bfloat16", "quantization": "int4"}),
        ("llama", {"dtype": "float32", "kv_cache_dtype": "int8"}),
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("gemma3_text", {"dtype": "float32"}),
        ("gemma3_text", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"dtype": "float32", "quantization": "int8"}),
        ("gpt_oss", {"dtype": "bfloat16"}),
    ],
)
def test_other_arithmetic(family: str, settings: dict[str, Any], folders: dict[str, Path]) -> None:
    ways = tuple(way for way in WAYS if way.name in FEW)
    assert len(ways) == len(FEW)
    backend = {} if "quantization" in settings else {"linear_backend": "pyengine"}
    model = {"model": folders[family], **settings, **backend}
    assert differences(model, ways) == []


@pytest.mark.parametrize("family", WITH_STATES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_keep_a_state(family: str, dtype: str, folders: dict[str, Path]) -> None:
    without = {
        "drafts",  # refused
        "merged late, blocks of 4",  # equal prompts wait for a state
        "preempted",  # in tests/integration/test_states.py: few states fit beside few blocks
    }
    ways = tuple(way for way in WAYS if way.name not in without)
    model = {"model": folders[family], "dtype": dtype, "linear_backend": "pyengine"}
    assert differences(model, ways) == []


def test_a_normaliser_by_the_batch_is_seen(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail."""
    right = array_operations.token_logprobs

    def by_the_batch(threads: Any, logits: Any, reported: Any, out: Any) -> None:
        right(threads, logits, reported, out)
        out[0][:] -= 4e-6 / len(out[0])
        out[3][:] -= 4e-6 / len(out[0])

    monkeypatch.setattr(array_operations, "token_logprobs", by_the_batch)
    ways = tuple(way for way in WAYS if way.name in FEW)
    assert len(differences({"model": folders["llama"], "dtype": "float32"}, ways)) == 2


def test_drafts_are_computed_on_a_slow_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = StepCosts(Curve([1, 2], [1.0, 100.0]))
    monkeypatch.setattr(builder, "measured_costs", lambda *_: dear)
    ways = tuple(way for way in WAYS if way.name in (FEW[0], "drafts"))
    assert differences({}, ways) == []


def test_the_embedded_model() -> None:
    assert differences({}, WAYS) == []
