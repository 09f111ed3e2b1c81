"""Settings of attention on a whole engine: the cache's dtype, the block size, a forced backend."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import LLM, RequestOutput, SamplingParams
from pyengine.cpu import CpuAttention
from pyengine.errors import ConfigurationError
from tests.support.checkpoints import read_weights, save_weights
from tests.support.without_torch import needs_torch

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LOGPROBS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9] * 5}, {"prompt_token_ids": [5, 6, 7, 8, 9, 1]}]


needs_kernel = pytest.mark.skipif(not CpuAttention.is_fast(), reason="no AVX2 with FMA")


def answer(output: RequestOutput) -> list[Any]:
    """Tokens and log-probabilities, to the bit."""
    [completion] = output.outputs
    assert completion.logprobs is not None
    bits = [{at: entry.logprob.hex() for at, entry in each.items()} for each in completion.logprobs]
    return [completion.token_ids, bits]


def open_llm(tiny_folder: Path, **settings: object) -> LLM:
    return LLM(tiny_folder, device="cpu", dtype="bfloat16", **settings)  # type: ignore[arg-type]


@needs_torch
def test_a_cache_in_8_bit_floats_holds_twice_the_blocks(tiny_folder: Path) -> None:
    wide, narrow = (
        open_llm(tiny_folder, kv_cache_memory=1 << 20, kv_cache_dtype=dtype)
        for dtype in ("auto", "fp8")
    )
    about = [llm.describe() for llm in (wide, narrow)]
    assert [item["kv_cache_dtype"] for item in about] == ["bfloat16", "float8_e4m3fn"]
    blocks = [int(str(item["num_blocks"])) + 1 for item in about]
    assert blocks[1] == 2 * blocks[0]
    for llm in (wide, narrow):
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]


@needs_torch
def test_a_cache_in_8_bit_floats_has_the_scales_of_the_checkpoint(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Keys and values that no 8-bit float holds, divided by a scale."""
    scaled = tmp_path / "scaled"
    shutil.copytree(tiny_folder, scaled)
    factor = 2.0**14
    [file] = scaled.glob("*.safetensors")
    tensors = read_weights(scaled)
    for name in list(tensors):
        if name.endswith(("v_proj.weight", "o_proj.weight")):
            tensors[name] = tensors[name] * np.float32(factor if "v_proj" in name else 1 / factor)
        if name.endswith("v_proj.weight"):
            tensors[name.replace("v_proj.weight", "v_scale")] = np.array(factor, np.float32)
    save_weights(file, tensors)

    def logprobs(where: Path, dtype: str) -> list[float]:
        llm = open_llm(where, num_blocks=64, kv_cache_dtype=dtype, attention_backend="gather")
        scales = str(llm.describe()["kv_cache_scales"])
        is_scaled = where == scaled and dtype == "fp8"
        assert scales == (f"of the checkpoint, {layers} layers" if is_scaled else "none")
        [completion] = llm.generate(PROMPTS[:1], LOGPROBS, use_tqdm=False)[0].outputs
        first = [next(iter(each.values())) for each in completion.logprobs or []]
        return [entry.logprob for entry in first]

    layers = json.loads((tiny_folder / "config.json").read_text())["num_hidden_layers"]
    assert logprobs(scaled, "fp8") == logprobs(tiny_folder, "fp8")  # a power of two
    assert logprobs(scaled, "auto") == logprobs(tiny_folder, "auto")


@needs_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_in_int8_holds_more_blocks_and_answers_the_same_in_every_batch(
    tiny_folder: Path, dtype: str
) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": "int8", "linear_backend": "pyengine"}
    wide = LLM(tiny_folder, dtype=dtype, kv_cache_memory=1 << 20)
    llm = LLM(tiny_folder, dtype=dtype, kv_cache_memory=1 << 20, **settings)
    about = llm.describe()
    assert (about["kv_cache_dtype"], about["attention_backend"]) == ("int8", "cpu")
    [few, many] = [int(str(each.describe()["num_blocks"])) + 1 for each in (wide, llm)]
    heads = {"float32": 4, "bfloat16": 2}[dtype] * 8 / (8 + 4)  # of 8 numbers, and a scale
    assert many == pytest.approx(few * heads, rel=0.01)
    unshared = LLM(tiny_folder, dtype=dtype, num_blocks=64, enable_prefix_caching=False, **settings)
    together = [answer(output) for output in unshared.generate(PROMPTS, LOGPROBS, use_tqdm=False)]
    for prompt, expected in zip(PROMPTS, together, strict=True):
        for _ in range(2):  # computed, then with what is cached
            assert answer(llm.generate([prompt], LOGPROBS, use_tqdm=False)[0]) == expected
    assert [answer(each) for each in llm.generate(PROMPTS, LOGPROBS, use_tqdm=False)] == together


@needs_kernel
def test_a_cache_in_int8_changes_log_probabilities_a_little(tiny_folder: Path) -> None:
    found = []
    for dtype in ("auto", "int8"):
        llm = LLM(tiny_folder, dtype="float32", num_blocks=64, kv_cache_dtype=dtype)
        [output] = llm.generate(PROMPTS[:1], LOGPROBS, use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        found.append([value.logprob for value in output.outputs[0].logprobs[0].values()])
    assert found[0] != found[1]
    assert sorted(found[1]) == pytest.approx(sorted(found[0]), abs=0.05)


def test_the_block_size_is_the_backends_unless_it_is_given(tiny_folder: Path) -> None:
    sizes = [
        open_llm(tiny_folder, num_blocks=8, block_size=size).describe()["block_size"]
        for size in (None, "auto", 8)
    ]
    assert sizes == [16, 16, 8]


def test_every_backend_says_why_it_was_chosen_or_not(tiny_folder: Path) -> None:
    verdicts = open_llm(tiny_folder, num_blocks=8).describe()["attention_backends"]
    assert isinstance(verdicts, dict)
    assert verdicts["flashinfer"] == "cannot serve: it runs on cuda, the device is cpu"
    assert [name for name, verdict in verdicts.items() if verdict == "chosen"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention_backend": "flashinfer"}, "'flashinfer' cannot serve: it runs on cuda"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype='fp4' is not known"),
        pytest.param(
            {"attention_backend": "flex", "kv_cache_dtype": "fp8"},
            "cache in float8_e4m3fn",
            marks=needs_torch,
        ),
        pytest.param(
            {"attention_backend": "flex", "kv_cache_dtype": "int8"},
            "KV cache in int8",
            marks=needs_torch,
        ),
        pytest.param(
            {"attention_backend": "gather", "kv_cache_dtype": "int8"},
            "KV cache in int8",
            marks=needs_torch,
        ),
        (
            {"speculation": "mtp", "kv_cache_dtype": "int8"},
            "cannot be combined with speculation='mtp'",
        ),
        ({"block_size": 0}, "block_size=0"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    tiny_folder: Path, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_llm(tiny_folder, num_blocks=8, **settings)
