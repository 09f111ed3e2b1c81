"""`load_format="dummy"`: a model with random weights, from its config.json alone."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pyengine.models.quantization import with_quantization
from transformers import AutoConfig, Gemma3Config

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models import dummy_weights, source
from pyengine.models.loader import LoadedModel, load_model, model_properties
from pyengine.models.source import resolve_source
from tests.gpu.models import FAMILIES
from tests.unit.models.tiny import save_tiny_model, save_tiny_tokenizer

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_config(folder: Path, family: str = "llama", **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": family, **SIZES, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drawn(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(resolve_source(folder, load_format="dummy"), device="cpu", dtype=dtype)


def logits(loaded: LoadedModel, length: int = 200) -> torch.Tensor:
    ids = torch.arange(length)[None] * 7 % loaded.vocab_size
    with torch.no_grad():
        found: torch.Tensor = loaded.model(ids).logits
    return found


def assert_is_as_loaded(model: LoadedModel, folder: Path, dtype: str) -> None:
    """It is the model that the loader makes of a folder with these weights, in every bit."""
    model.model.save_pretrained(folder)
    loaded = load_model(folder, device="cpu", dtype=dtype)
    assert loaded.load_format == "auto"
    ours, theirs = model.model, loaded.model
    assert type(ours) is type(theirs) and not ours.training
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for kind in ("named_parameters", "named_buffers"):
        found, expected = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert found.keys() == expected.keys()  # a tied parameter has one name
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
    assert torch.equal(logits(model), logits(loaded))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_drawn_as_the_loader_would_load_it(tmp_path, family, dtype):
    settings = {**SIZES, **FAMILIES[family], "num_attention_heads": 4}
    if family != "deepseek_v3":
        settings["head_dim"] = 32
    config = AutoConfig.for_model(family, **settings)
    config.save_pretrained(tmp_path)
    model = drawn(tmp_path, dtype)
    assert (model.load_format, str(model.dtype)) == ("dummy", f"torch.{dtype}")
    found = logits(model).float()
    assert found.isfinite().all() and found.std() > 0.01
    assert_is_as_loaded(model, tmp_path, dtype)


def test_numbers_that_stay_in_float32_do(tmp_path):
    sizes = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    write_config(tmp_path, "glm4_moe", **sizes, n_group=1, topk_group=1, first_k_dense_replace=0)
    model = drawn(tmp_path, "bfloat16")
    types = {name: tensor.dtype for name, tensor in model.model.state_dict().items()}
    assert types["model.layers.0.mlp.gate.e_score_correction_bias"] == torch.float32
    assert types["model.layers.0.self_attn.q_proj.weight"] == torch.bfloat16
    assert_is_as_loaded(model, tmp_path, "bfloat16")


def test_a_multi_modal_model_is_drawn_with_its_tower(tmp_path):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {key: value for key, value in SIZES.items() if not key.endswith("_token_id")}
    Gemma3Config(
        text_config={**text, "head_dim": 32}, vision_config=vision, mm_tokens_per_image=1
    ).save_pretrained(tmp_path)
    model = drawn(tmp_path, "bfloat16")
    assert any("vision_tower" in name for name, _ in model.model.named_parameters())
    assert_is_as_loaded(model, tmp_path, "bfloat16")


def test_weights_are_as_the_configuration_says(tmp_path):
    settings = {"initializer_range": 0.05, "tie_word_embeddings": False}
    state = drawn(write_config(tmp_path, "qwen2", **settings)).model.state_dict()
    for name, tensor in state.items():
        if "norm" in name:
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        else:
            assert tensor.std() == pytest.approx(0.05, rel=0.05), name
            assert abs(tensor.mean()) < 0.002, name
    assert not torch.equal(state["model.embed_tokens.weight"], state["lm_head.weight"])


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_embeddings_stay_tied(tmp_path, is_tied):
    model = drawn(write_config(tmp_path, tie_word_embeddings=is_tied)).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is is_tied
    assert model.lm_head.weight.std() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_start_draws_the_same_and_leaves_torch_alone(tmp_path, dtype):
    settings = {"num_local_experts": 4, "num_attention_heads": 4, "head_dim": 32}
    write_config(tmp_path, "gpt_oss", **settings)  # its sinks are drawn, too
    torch.manual_seed(1)
    first = drawn(tmp_path, dtype).model.state_dict()
    is_over = threading.Event()

    def draw() -> None:
        while not is_over.is_set():
            torch.rand(100)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        torch.set_default_dtype(torch.float64)
        second = drawn(tmp_path, dtype).model.state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
        is_over.set()
        thread.join()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    third = drawn(tmp_path, dtype).model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) and torch.equal(tensor, third[name]), name
    assert first["model.layers.0.self_attn.sinks"].any()
    distinct = [tensor for tensor in first.values() if tensor.ndim > 1 and tensor.any()]
    assert len({tensor.flatten()[0].item() for tensor in distinct}) == len(distinct)


def test_a_start_in_another_process_draws_the_same(tmp_path):
    write_config(tmp_path)
    code = """
import sys, torch
torch.manual_seed(5)
from pyengine.models.loader import load_model, model_properties
from pyengine.models.source import resolve_source
loaded = load_model(resolve_source(sys.argv[1], load_format="dummy"), device="cpu", dtype="float32")
print(sorted((name, value.hex()) for name, value in model_properties(loaded)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    ours = sorted((name, value.hex()) for name, value in model_properties(drawn(tmp_path)))
    assert done.stdout.strip() == str(ours)


def test_kv_is_never_shared_with_a_model_that_was_read(tmp_path):
    """Not even with one of the same weights."""
    model = drawn(write_config(tmp_path))
    model.model.save_pretrained(tmp_path)
    read = load_model(tmp_path, device="cpu", dtype="float32")
    ours, theirs = model_properties(model), model_properties(read)
    assert ours != theirs and ours == model_properties(drawn(tmp_path))
    assert ("weights", b"dummy") in ours and "weights" not in dict(theirs)
    assert {*theirs} - {*ours} <= {("config", dict(theirs)["config"])}


def test_the_rest_of_the_folder_is_read(tmp_path, caplog):
    write_config(tmp_path / "shape", eos_token_id=5, dtype="bfloat16")
    (tmp_path / "shape/generation_config.json").write_text('{"eos_token_id": [7, 9], "top_k": 3}')
    save_tiny_tokenizer(tmp_path / "shape")
    loaded = drawn(tmp_path / "shape", "auto")
    assert loaded.eos_token_ids == {3, 7, 9}
    assert dict(loaded.default_sampling) == {"top_k": 3}
    assert loaded.tokenizer.decode([4]) == "hello"
    assert (loaded.name, loaded.max_model_len, loaded.vocab_size) == ("shape", 256, 256)
    assert "saved" in loaded.dtype_reason
    assert "load_format: dummy: the weights of shape are random" in caplog.text


def test_a_config_alone_is_enough(tmp_path):
    loaded = drawn(write_config(tmp_path))
    assert loaded.tokenizer is None and loaded.eos_token_ids == {2}
    assert dict(loaded.default_sampling) == {}


def test_weights_in_the_folder_are_not_read(tmp_path):
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert logits(drawn(tmp_path), 20).isfinite().all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_drawn_weights_are_quantised(tmp_path, quantization):
    settings = {"hidden_size": 128, "intermediate_size": 128, "initializer_range": 0.1}
    write_config(tmp_path, **settings)
    loaded = with_quantization(drawn(tmp_path), quantization)
    assert (loaded.quantization, loaded.load_format) == (quantization, "dummy")
    plain, found = logits(drawn(tmp_path)), logits(loaded)
    assert torch.nn.functional.cosine_similarity(plain, found, dim=-1).mean() > 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: .* at most 256"),
        ({"hidden_size": 10**12}, "hidden_size=1000000000000: .* at most 16777216"),
        ({"num_hidden_layers": 0}, "has at least one layer"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"initializer_range": float("inf")}, "cannot be used: .*initializer_range"),
        ({"initializer_range": "wide"}, "cannot be used: .*initializer_range"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantization_config \(fp8\), and load_format='dummy' draws .* a copy of",
        ),
        ({"quantization_config": {"quant_method": "nonesuch"}}, "nonesuch"),
    ],
)
def test_a_config_that_cannot_be_drawn_is_refused(tmp_path, change, message):
    write_config(tmp_path, **change)
    with pytest.raises(ModelLoadError, match=f"(?s){message}"):
        drawn(tmp_path)


def test_weights_that_do_not_fit_are_refused_before_they_are_drawn(tmp_path):
    sizes = {"hidden_size": 65_536, "intermediate_size": 2**20, "num_hidden_layers": 200}
    write_config(tmp_path, **sizes)
    with pytest.raises(ConfigurationError, match=r"weights take \d+.* GB in torch.bfloat16, and"):
        drawn(tmp_path, "bfloat16")


@pytest.mark.parametrize("name", [None, "tiny.gguf"])
def test_a_gguf_file_is_refused(tmp_path, name):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigurationError, match=r"a GGUF file: give a folder with a config\.json"):
        resolve_source(name and tmp_path / name, load_format="dummy")


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_source(tmp_path, load_format="dummy")


def test_no_weights_of_a_hub_model_are_downloaded(monkeypatch, tmp_path):
    asked = {}

    def download(name: str, **settings: Any) -> str:
        asked.update(settings)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = resolve_source("owner/model", load_format="dummy")
    assert (found.folder, found.load_format) == (tmp_path, "dummy")
    assert set(asked["ignore_patterns"]) == {"*.safetensors", "*.safetensors.index.json"}
    resolve_source("owner/model")
    assert asked["ignore_patterns"] == source._HUB_COPIES


def test_shapes_are_known_without_the_weights(tmp_path):
    headers = dummy_weights.dummy_headers(write_config(tmp_path, tie_word_embeddings=True))
    model = drawn(tmp_path).model
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert {name: header.shape for name, header in headers.items()} == expected


PEAK = """
import resource, sys, torch
import transformers.models.llama.modeling_llama
from pyengine.models.loader import load_model
from pyengine.models.source import resolve_source
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_model(resolve_source(sys.argv[1], load_format="dummy"), device="cpu", dtype="bfloat16")
before = peak()
source = resolve_source(sys.argv[2], load_format="dummy")
model = load_model(source, device="cpu", dtype="bfloat16").model
print(peak() - before, sum(weight.nbytes for weight in model.parameters()))
"""


@pytest.mark.slow
def test_weights_are_made_in_place(tmp_path):
    small = write_config(tmp_path / "small")
    sizes = {"vocab_size": 32_768, "hidden_size": 1536, "intermediate_size": 6144}
    large = write_config(tmp_path / "large", **sizes, num_hidden_layers=7)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(small), str(large)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    taken, weights = map(int, done.stdout.split())
    assert weights > 500e6
    assert taken < 1.3 * weights
