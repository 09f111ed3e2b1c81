"""Models that a paged engine cannot serve are refused by name, not served wrongly."""

import json
import re

import pytest

from pyengine import LLM
from pyengine.errors import ModelLoadError
from pyengine.models.loader import load_model
from pyengine.models.unsupported import _BY_FAMILY
from tests.support.checkpoints import save_tiny
from tests.support.without_torch import needs_torch

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save(folder, family, **settings):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma4_text", {"use_bidirectional_attention": "all", "global_head_dim": 8}),
        ("llama", {"is_causal": False}),
        ("bert", {}),
    ],
)
def test_attention_that_is_not_causal_is_refused(tmp_path, family, settings):
    save(tmp_path, family, **settings)
    with pytest.raises(ModelLoadError, match="attends to later tokens too"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3_text", {}),
        ("gemma4_text", {"use_bidirectional_attention": "vision", "global_head_dim": 8}),
        ("qwen3", {}),
    ],
)
def test_the_same_families_are_loaded_where_they_are_causal(tmp_path, family, settings):
    save(tmp_path, family, **settings)
    assert load_model(tmp_path, device="cpu").vocab_size == 32


@needs_torch
@pytest.mark.parametrize("family", _BY_FAMILY)
def test_layers_that_are_missing_are_named(tmp_path, family):
    from transformers import CONFIG_MAPPING

    # Those that transformers must build to be known are small.
    sizes = {"hidden_size": 32, "num_hidden_layers": 2} if family in ("rwkv", "xlstm") else {}
    CONFIG_MAPPING[family](**sizes).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=f"pyengine has no {re.escape(_BY_FAMILY[family])}$"):
        LLM(tmp_path, device="cpu", load_format="dummy")


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True},
            "gptqmodel.*group_size=8",
            marks=needs_torch,
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 8},
            "(optimum|gptqmodel).*group_size=8",
            marks=needs_torch,
        ),
        pytest.param({"quant_method": "aqlm"}, "aqlm.*quant_method='aqlm'", marks=needs_torch),
        ({"quant_method": "compressed-tensors"}, "lacks format"),
    ],
)
def test_a_missing_quantiser_is_named_with_its_package_and_the_layout(
    tmp_path, quantisation, named
):
    save_tiny(tmp_path)
    set_config(tmp_path, quantization_config=quantisation)
    with pytest.raises(ModelLoadError, match=named):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("settings", [{"quant_method": "my-own"}, {}, {"bits": 4}, "awq", 4, [1]])
def test_an_unknown_quantisation_is_refused(tmp_path, settings):
    save_tiny(tmp_path)
    set_config(tmp_path, quantization_config=settings)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(tmp_path, device="cpu")


def set_config(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
