"""`load_format="dummy"`: a model with random weights, from its config.json alone."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyengine.attention.cpu import CpuBackend
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models import placement, source
from pyengine.models.decoder.kernel_sets import KernelSettings
from pyengine.models.decoder.model import DecoderModel
from pyengine.models.loader import LoadedModel, dummy_weight_shapes, load_model, model_properties
from pyengine.models.source import resolve_source
from tests.support.checkpoints import save_tiny
from tests.support.processes import run_python
from tests.support.tokenizers import save_words
from tests.support.without_torch import needs_torch

if TYPE_CHECKING:
    import torch

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


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "olmoe": EXPERTS}
"""One in a decoder of ours, and one in transformers' module."""
MARKED_FAMILIES = ["llama", pytest.param("olmoe", marks=needs_torch)]


def write_config(folder: Path, family: str = "llama", **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": family, **SIZES, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drawn(folder: Path, dtype: str = "float32", **kernels: Any) -> LoadedModel:
    return load_model(
        resolve_source(folder, load_format="dummy"),
        device="cpu",
        dtype=dtype,
        kernels=KernelSettings(**kernels),
    )


def logits(loaded: LoadedModel, length: int = 40) -> "torch.Tensor":
    import torch

    from pyengine.models.fallback import FallbackModel
    from tests.unit.models.decoder.steps import Runner

    ids = [index * 7 % loaded.vocab_size for index in range(length)]
    if isinstance(loaded.model, FallbackModel):
        loaded.model.module.set_attn_implementation("eager")
        with torch.no_grad():
            of_module: torch.Tensor = loaded.model.module(torch.tensor([ids])).logits[0]
        return of_module
    assert isinstance(loaded.model, DecoderModel)
    assert loaded.dtype in ("float32", "bfloat16")
    runner = Runner(loaded.model._decoder, CpuBackend, loaded.dtype)
    sequence = runner.add(ids)
    runner.step((sequence, length))
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MARKED_FAMILIES)
def test_a_family_is_drawn_in_a_dtype(tmp_path: Path, family: str, dtype: str) -> None:
    import torch

    model = drawn(write_config(tmp_path, family, **FAMILIES[family]), dtype)
    assert (model.load_format, model.dtype) == ("dummy", dtype)
    actual = logits(model)
    assert actual.dtype == getattr(torch, dtype)
    assert actual.isfinite().all() and actual.float().std() > 0.01


def test_a_module_is_as_before_a_training(tmp_path: Path) -> None:
    import torch

    from pyengine.models.fallback import FallbackModel

    settings = {"initializer_range": 0.05, "tie_word_embeddings": False}
    loaded = drawn(write_config(tmp_path, "olmoe", **EXPERTS, **settings), "bfloat16").model
    assert isinstance(loaded, FallbackModel)
    module = loaded.module
    assert not module.training and not any(weight.requires_grad for weight in module.parameters())
    for name, tensor in module.named_parameters():
        assert tensor.dtype == torch.bfloat16
        if "norm" in name:
            assert (tensor == 1).all(), name
        else:
            assert tensor.float().std() == pytest.approx(0.05, rel=0.1), name
    assert not torch.equal(module.model.embed_tokens.weight, module.lm_head.weight)


def test_a_multi_modal_model_is_drawn_with_its_tower(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    from pyengine.models.fallback import FallbackModel

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
    assert isinstance(model.model, FallbackModel)
    assert any("vision_tower" in name for name, _ in model.model.module.named_parameters())
    assert logits(model, 20).isfinite().all()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", MARKED_FAMILIES)
def test_tied_embeddings_stay_tied(tmp_path: Path, family: str, is_tied: bool) -> None:
    from pyengine.models.fallback import FallbackModel

    settings = {**FAMILIES[family], "tie_word_embeddings": is_tied}
    model = drawn(write_config(tmp_path, family, **settings)).model
    assert ("lm_head.weight" in dummy_weight_shapes(tmp_path)) is not is_tied
    if isinstance(model, FallbackModel):
        module = model.module
        assert (module.lm_head.weight is module.model.embed_tokens.weight) is is_tied
    else:
        assert isinstance(model, DecoderModel)
        assert (model._decoder._head is model._decoder._embedding) is is_tied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MARKED_FAMILIES)
def test_every_start_draws_the_same_and_leaves_torch_alone(
    tmp_path: Path, family: str, dtype: str
) -> None:
    import torch

    write_config(tmp_path, family, **FAMILIES[family])
    torch.manual_seed(1)
    first = logits(drawn(tmp_path, dtype))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        model = drawn(tmp_path, dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(model), first)


STATE = """
import sys, torch
torch.manual_seed(5)
from pathlib import Path
from tests.unit.models.test_dummy_weights import drawn, logits
print([value.hex() for value in logits(drawn(Path(sys.argv[1])), 2).flatten().tolist()])
"""


PLAIN = """
import sys
from pathlib import Path
from pyengine import LLM, SamplingParams
from pyengine.models.loader import dummy_weight_shapes
with LLM(sys.argv[1], device="cpu", load_format="dummy", num_blocks=16) as llm:
    llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)
assert dummy_weight_shapes(Path(sys.argv[1]))
print("transformers" in sys.modules)
"""


def test_a_family_of_the_table_needs_no_transformers(tmp_path: Path) -> None:
    done = run_python(PLAIN, write_config(tmp_path), timeout=120)
    assert done.stdout.strip() == "False"


@needs_torch
@pytest.mark.parametrize("family", MARKED_FAMILIES)
def test_a_start_in_another_process_draws_the_same(tmp_path: Path, family: str) -> None:
    write_config(tmp_path, family, **FAMILIES[family])
    done = run_python(STATE, tmp_path, timeout=120)
    ours = [value.hex() for value in logits(drawn(tmp_path), 2).flatten().tolist()]
    assert done.stdout.strip() == str(ours)


def test_kv_is_never_shared_with_a_model_that_was_read(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    dummy, files = resolve_source(tmp_path, load_format="dummy"), resolve_source(tmp_path)
    ours = model_properties(dummy, drawn(tmp_path))
    theirs = model_properties(files, load_model(tmp_path, device="cpu", dtype="float32"))
    assert ours == model_properties(dummy, drawn(tmp_path))
    assert ("load format", b"dummy") in ours and ("load format", b"dummy") not in theirs
    assert "weights" not in dict(ours) and "weights" in dict(theirs)


def test_the_rest_of_the_folder_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(tmp_path / "shape", eos_token_id=5, dtype="bfloat16")
    (tmp_path / "shape/generation_config.json").write_text('{"eos_token_id": [7, 9], "top_k": 3}')
    save_words(tmp_path / "shape")
    loaded = drawn(tmp_path / "shape", "auto")
    assert loaded.eos_token_ids == {3, 7, 9}
    assert dict(loaded.default_sampling) == {"top_k": 3}
    assert loaded.tokenizer.decode([4]) == "hello"
    assert (loaded.name, loaded.max_model_len, loaded.vocab_size) == ("shape", 256, 256)
    assert "saved" in loaded.dtype_reason
    assert "load_format: dummy: the weights of shape are random" in caplog.text


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    loaded = drawn(write_config(tmp_path))
    assert loaded.tokenizer is None and loaded.eos_token_ids == {2}
    assert dict(loaded.default_sampling) == {}


def test_weights_in_the_folder_are_not_read(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert logits(drawn(tmp_path), 20).isfinite().all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_drawn_weights_are_quantised(tmp_path: Path, quantization: str) -> None:
    import torch

    write_config(tmp_path, intermediate_size=128)
    loaded = drawn(tmp_path, quantization=quantization)
    assert (loaded.quantization, loaded.load_format) == (quantization, "dummy")
    plain, actual = logits(drawn(tmp_path)), logits(loaded)
    assert not torch.equal(plain, actual)
    assert torch.nn.functional.cosine_similarity(plain, actual, dim=-1).mean() > 0.9


def test_transformers_modules_are_not_quantised(tmp_path: Path) -> None:
    write_config(tmp_path, "olmoe", **EXPERTS)
    with pytest.raises(ConfigurationError, match=r"transformers' module .* leave quantization out"):
        drawn(tmp_path, quantization="int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: .* at most 256"),
        ({"hidden_size": 10**12}, "hidden_size=1000000000000: .* at most 16777216"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantization_config \('fp8'\), and load_format='dummy' draws .* a copy of",
        ),
        ({"quantization_config": {"quant_method": "nonesuch"}}, "nonesuch"),
        ({"quantization_config": ["fp8"]}, "fp8"),
    ],
)
@pytest.mark.parametrize("family", MARKED_FAMILIES)
def test_a_config_that_cannot_be_drawn_is_refused(
    tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    write_config(tmp_path, family, **{**FAMILIES[family], **change})
    with pytest.raises(ModelLoadError, match=f"(?s){message}"):
        drawn(tmp_path)
    with pytest.raises(ModelLoadError, match=f"(?s){message}"):
        dummy_weight_shapes(tmp_path)


@needs_torch
@pytest.mark.parametrize("spread", [float("inf"), "wide"])
def test_a_module_cannot_be_drawn_with_such_a_spread(tmp_path: Path, spread: Any) -> None:
    write_config(tmp_path, "olmoe", **EXPERTS, initializer_range=spread)
    with pytest.raises(ModelLoadError, match=r"config\.json .*initializer_range"):
        drawn(tmp_path)


def test_a_family_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no_such_model"):
        drawn(write_config(tmp_path, "no_such_model"))


@pytest.mark.parametrize("family", MARKED_FAMILIES)
def test_weights_that_do_not_fit_are_refused_before_they_are_drawn(
    tmp_path: Path, family: str
) -> None:
    sizes = {"hidden_size": 65_536, "intermediate_size": 2**20, "num_hidden_layers": 200}
    write_config(tmp_path, family, **FAMILIES[family], **sizes)
    with pytest.raises(ConfigurationError, match=r"weights take \d+.* GB at 16 bits each, and"):
        drawn(tmp_path, "bfloat16")


@pytest.mark.parametrize(
    ("saved", "dtype", "quantization", "bits"),
    [
        (None, "float32", None, 32),
        (None, "bfloat16", None, 16),
        ("bfloat16", "float32", None, 16),  # matrices stay as they are
        (None, "float32", "int8", 8),
        (None, "float32", "int4", 4),
    ],
)
def test_what_fits_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    saved: str | None,
    dtype: str,
    quantization: str | None,
    bits: int,
) -> None:
    write_config(tmp_path, intermediate_size=128, dtype=saved)
    count = sum(math.prod(shape) for shape in dummy_weight_shapes(tmp_path).values())
    monkeypatch.setattr(placement, "available_memory", lambda _device: count * bits // 8)
    drawn(tmp_path, dtype, quantization=quantization)
    monkeypatch.setattr(placement, "available_memory", lambda _device: count * bits // 8 - 1)
    with pytest.raises(ConfigurationError, match=f"the {count} weights take .* at {bits} bits"):
        drawn(tmp_path, dtype, quantization=quantization)


@pytest.mark.parametrize("name", [None, "tiny.gguf"])
def test_a_gguf_file_is_refused(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigurationError, match=r"a GGUF file: give a folder with a config\.json"):
        resolve_source(name and tmp_path / name, load_format="dummy")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_source(tmp_path, load_format="dummy")


def test_no_weights_of_a_hub_model_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = {}

    def download(name: str, **settings: Any) -> str:
        arguments.update(settings)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolved = resolve_source("owner/model", load_format="dummy")
    assert (resolved.folder, resolved.load_format) == (tmp_path, "dummy")
    assert set(arguments["ignore_patterns"]) == {"*.safetensors", "*.safetensors.index.json"}
    resolve_source("owner/model")
    assert arguments["ignore_patterns"] == source._HUB_COPIES


def test_shapes_of_a_module_are_known_without_the_weights(tmp_path: Path) -> None:
    from pyengine.models.fallback import FallbackModel

    shapes = dummy_weight_shapes(
        write_config(tmp_path, "olmoe", **EXPERTS, tie_word_embeddings=True)
    )
    model = drawn(tmp_path).model
    assert isinstance(model, FallbackModel)
    expected = {name: tuple(tensor.shape) for name, tensor in model.module.named_parameters()}
    assert shapes == expected


PEAK = """
import resource, sys
from pyengine.models.loader import load_model
from pyengine.models.source import resolve_source
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_model(resolve_source(sys.argv[1], load_format="dummy"), device="cpu", dtype="bfloat16")
before = peak()
model = load_model(
    resolve_source(sys.argv[2], load_format="dummy"), device="cpu", dtype="bfloat16"
)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("cohere", marks=needs_torch)])
def test_weights_are_made_in_place(tmp_path: Path, family: str) -> None:
    small = write_config(tmp_path / "small", family, dtype="bfloat16")
    sizes = {"vocab_size": 32_768, "hidden_size": 1536, "intermediate_size": 6144}
    large = write_config(tmp_path / "large", family, dtype="bfloat16", **sizes, num_hidden_layers=7)
    done = run_python(PEAK, small, large)
    weights = 2 * sum(math.prod(shape) for shape in dummy_weight_shapes(large).values())
    assert weights > 500e6
    assert int(done.stdout) < 1.3 * weights
