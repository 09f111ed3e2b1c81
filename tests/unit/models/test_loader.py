"""Local folders: what is read from them, and their errors."""

import json

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models import placement
from pyengine.models.loader import load_model
from tests.support.checkpoints import read_weights, save_tiny, save_weights, write_json
from tests.support.tokenizers import save_words
from tests.support.without_torch import needs_torch


def test_a_folder_is_loaded_with_what_the_engine_needs(tmp_path):
    save_tiny(tmp_path / "tiny")
    save_words(tmp_path / "tiny")
    loaded = load_model(tmp_path / "tiny", device="cpu", dtype="float32")
    assert loaded.name == "tiny"
    assert loaded.path == tmp_path / "tiny"
    assert (loaded.max_model_len, loaded.vocab_size) == (64, 32)
    assert loaded.eos_token_ids == {2, 3}
    assert (loaded.dtype, loaded.dtype_reason) == ("float32", "asked for")
    assert loaded.tokenizer.decode([4]) == "hello"
    assert loaded.model.origin == "pyengine (llama)"


def test_a_folder_in_several_files_is_loaded(tmp_path):
    save_tiny(tmp_path)
    weights = read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    files = {
        name: f"model-{at:05}-of-{len(weights):05}.safetensors" for at, name in enumerate(weights)
    }
    for name, file in files.items():
        save_weights(tmp_path / file, {name: weights[name]})
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    assert load_model(str(tmp_path), device="cpu").tokenizer is None


@pytest.mark.parametrize("instructions", ["AMX", None])
def test_by_itself_it_takes_what_was_saved_where_the_cpu_can(tmp_path, monkeypatch, instructions):
    monkeypatch.setattr(placement, "bfloat16_instructions", lambda: instructions)
    save_tiny(tmp_path, dtype="bfloat16")
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.dtype == ("bfloat16" if instructions else "float32")
    assert "saved" in loaded.dtype_reason


def test_the_dtype_is_followed(tmp_path):
    import torch

    save_tiny(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded_dtype = load_model(tmp_path, device="cpu", dtype=dtype).dtype
        assert loaded_dtype == str(dtype).removeprefix("torch.")


def test_every_eos_token_of_the_generation_config_counts(tmp_path):
    save_tiny(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [5, 7]}))
    assert load_model(tmp_path, device="cpu").eos_token_ids == {5, 7}


def test_a_model_without_eos_never_ends(tmp_path):
    save_tiny(tmp_path, eos_token_id=None)
    assert load_model(tmp_path, device="cpu").eos_token_ids == frozenset()


def test_positions_end_where_dynamic_scaling_would_change_frequencies(tmp_path):
    """Beyond the positions of the configuration, as in transformers."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    save_tiny(tmp_path, rope_parameters={**rope, "original_max_position_embeddings": 32})
    assert load_model(tmp_path, device="cpu").max_model_len == 64


def test_a_truncated_file_is_refused(tmp_path):
    save_tiny(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        pytest.param(
            {"model_type": "no_such_model"},
            r"config\.json cannot be used.*no_such_model",
            marks=needs_torch,
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path, change, message):
    save_tiny(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelLoadError, match=f"(?s){message}"):
        load_model(tmp_path, device="cpu")


def test_a_broken_config_is_refused(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be used"):
        load_model(tmp_path, device="cpu")


def test_a_broken_tokenizer_is_refused(tmp_path):
    save_tiny(tmp_path)
    save_words(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="tokenizer in"):
        load_model(tmp_path, device="cpu")


def test_loading_prints_nothing_and_restores_progress_bars(tmp_path, capfd):
    from transformers.utils import logging

    save_tiny(tmp_path)
    capfd.readouterr()
    before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    load_model(tmp_path, device="cpu")
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before
    assert capfd.readouterr() == ("", "")
