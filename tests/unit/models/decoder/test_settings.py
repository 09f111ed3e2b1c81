"""A configuration is read key by key, and unread keys are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.loading import (
    fallback_reason,
    family_of,
    open_model,
    read_spec,
    spec_of,
)
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import Attention

_LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2}


def test_values_defaults_and_nulls() -> None:
    settings = Settings({"a": 3, "c": None}, "config.json", {"b": 2.5, "c": 7, "d": None})
    assert settings.integer("a") == 3
    assert settings.number("b") == 2.5
    assert settings.optional_integer("c") is None  # null in the file is no default
    assert settings.optional_integer("d") is None
    with pytest.raises(ModelLoadError, match="lacks e"):
        settings.integer("e")
    settings.finish()


def test_sections_are_finished_too() -> None:
    settings = Settings({"inner": {"x": 1, "y": 2}}, "config.json")
    inner = settings.section("inner")
    assert inner is not None and inner is settings.section("inner")
    assert inner.integer("x") == 1
    with pytest.raises(ModelLoadError, match=r"config\.json, inner, says y=2"):
        settings.finish()


def test_aliases_are_other_names() -> None:
    settings = Settings({"n_embd": 8}, "config.json", {"hidden_size": 3}, {"n_embd": "hidden_size"})
    assert settings.integer("hidden_size") == 8
    settings.finish()
    with pytest.raises(ModelLoadError, match="n_embd=8: and hidden_size=9"):
        Settings({"n_embd": 8, "hidden_size": 9}, "config.json", {}, {"n_embd": "hidden_size"})
    wrong = Settings({"n_embd": "8"}, "config.json", {}, {"n_embd": "hidden_size"})
    with pytest.raises(ModelLoadError, match="n_embd='8'"):
        wrong.integer("hidden_size")


def test_a_key_may_have_one_value_only() -> None:
    settings = Settings({"a": True, "b": 1}, "config.json")
    settings.only("a", True, why="it is so")
    settings.only("missing", 5, why="it is so")
    with pytest.raises(ModelLoadError, match="b=1: it is so; only True is supported"):
        settings.only("b", True, why="it is so")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads=4"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000"),
        ({"hidden_act": "swoosh"}, "hidden_act='swoosh': known are silu"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({"pruned_heads": {"1": [0]}}, "pruned_heads"),
        ({"torch_dtype": "int8"}, "torch_dtype='int8'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ({"model_type": "deepseek_v3", "topk_group": 9}, "topk_group=9"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"model_type": "gemma4_text", "enable_moe_block": True}, "enable_moe_block=True"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gpt2", "n_head": 7}, "n_head=7"),
    ],
)
def test_what_no_model_of_the_table_is_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        spec_of({**_LLAMA, **changes}, "config.json")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "bert"}, "'bert' is not in the table"),
        ({"model_type": "gemma4_text", "enable_moe_block": True}, "enable_moe_block=True"),
        ({**_LLAMA, "hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
        ({**_LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, "quant_method='mxfp4'"),
        ({**_LLAMA, "quantization_config": {"quant_method": "awq", "bits": 8}}, "bits=8"),
    ],
)
def test_what_transformers_has_and_no_row_says_is_left_to_it_by_name(
    values: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert named in (fallback_reason(tmp_path) or "")


@pytest.mark.parametrize(
    "values",
    [
        _LLAMA,
        {**_LLAMA, "attention_temperature": 2},
        {**_LLAMA, "hidden_act": 5},
        {"model_type": "gemma4_text", "enable_moe_block": "yes"},
        {**_LLAMA, "quantization_config": {"quant_method": "awq", "nobody_knows": 8}},
    ],
)
def test_what_is_unknown_is_no_reason_for_the_fallback(
    values: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert fallback_reason(tmp_path) is None


def test_a_layer_that_would_ignore_its_norms_cannot_be_described() -> None:
    layer = spec_of(_LLAMA, "config.json").layers[0]
    replace(layer, is_parallel=True)
    with pytest.raises(ModelLoadError, match="parallel"):
        replace(layer, is_parallel=True, after_mixer=layer.before_mixer)


def test_layers_share_keys_with_an_earlier_one_that_says_so() -> None:
    spec = spec_of(_LLAMA, "config.json")
    first, second = spec.layers
    assert isinstance(second.mixer, Attention)
    sharing = replace(second, mixer=replace(second.mixer, shares=0))
    with pytest.raises(ModelLoadError, match="layer 1 reads keys and values of layer 0"):
        replace(spec, layers=(first, sharing))


def test_every_family_has_a_spec_by_its_defaults_alone() -> None:
    for family in TABLE:
        needed = {"layer_types": ["conv"] * 32} if family == "lfm2_moe" else {}
        assert spec_of({"model_type": family, **needed}, "config.json").family == family


def test_folders_without_a_model_of_the_table(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be used"):
        read_spec(tmp_path)
    path = tmp_path / "config.json"
    for text, named in (("{", "cannot be used"), ("[]", "no object"), ("{}", "model_type=None")):
        path.write_text(text)
        with pytest.raises(ModelLoadError, match=named):
            read_spec(tmp_path)
    path.write_text(json.dumps({"model_type": "bert"}))
    assert family_of(tmp_path) is None
    with pytest.raises(ModelLoadError, match=r"model_type=.bert.*there are cohere2"):
        read_spec(tmp_path)
    path.write_text(json.dumps(_LLAMA))
    assert family_of(tmp_path) is TABLE["llama"]
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        open_model(tmp_path)
