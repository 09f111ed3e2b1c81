"""Engines over random weights (`load_format="dummy"`): calls, command line, server, KV store."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pyengine import LLM, SamplingParams
from pyengine.cli import bench
from pyengine.cli.app import app
from pyengine.config import EngineSettings
from pyengine.engine import offloading
from pyengine.errors import ConfigurationError
from tests.support import chat
from tests.support.checkpoints import save_random
from tests.support.tokenizers import save_tokenizer
from tests.support.without_torch import needs_torch
from tests.unit.models.test_dummy_weights import EXPERTS, SIZES, write_config

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHAPE = {"vocab_size": 300, "intermediate_size": 128, "max_position_embeddings": 1024}
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "load_format": "dummy"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json alone."""
    return write_config(tmp_path_factory.mktemp("models") / "shape", **SHAPE)


def tokens(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_restored_tokens


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=needs_torch)]
)
def test_thousands_of_steps_have_finite_logits(tmp_path: Path, dtype: str) -> None:
    write_config(tmp_path, max_position_embeddings=4096)
    params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True, logprobs=1)
    with LLM(tmp_path, **SETTINGS | {"dtype": dtype}) as llm:
        assert llm.describe()["load_format"] == "dummy"
        (output,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    (completion,) = output.outputs
    assert len(completion.token_ids) == 3000 and completion.logprobs is not None
    assert all(isfinite(item.logprob) for step in completion.logprobs for item in step.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "none"},
        {"speculation": "ngram"},
        {"kv_cache_dtype": "int8"},
        {"async_scheduling": True},
    ],
    ids=str,
)
def test_other_settings_work_as_with_weights(folder: Path, settings: dict[str, Any]) -> None:
    with LLM(folder, **SETTINGS, **settings) as llm:
        assert len(tokens(llm, [3, 4, 5])[0]) == 8


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_drawn_in_parts(folder: Path, dtype: str) -> None:
    settings = SETTINGS | {"dtype": dtype, "num_blocks": 64}
    with LLM(folder, **settings) as llm:
        expected = tokens(llm, [3, 4, 5])
    with LLM(folder, **settings, tensor_parallel_size=2) as llm:
        assert tokens(llm, [3, 4, 5]) == expected


@needs_torch
def test_a_module_of_transformers_is_not_drawn_in_parts(tmp_path: Path) -> None:
    write_config(tmp_path, "olmoe", **EXPERTS)
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_size=2 .* leave one of them"):
        LLM(tmp_path, **SETTINGS, tensor_parallel_size=2)


def test_a_draft_model_is_drawn_too(folder: Path, tmp_path: Path) -> None:
    small = write_config(tmp_path, vocab_size=300, num_hidden_layers=1)
    with LLM(folder, **SETTINGS) as llm:
        expected = tokens(llm, [3, 4, 5])
    with LLM(folder, **SETTINGS, speculation="draft", draft_model=small) as llm:
        assert tokens(llm, [3, 4, 5]) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"load_format": "pt"}, "load_format='pt' is not known: use one of auto, dummy"),
        ({"load_format": ""}, "load_format='' is not known"),
        ({"load_format": None}, "load_format=None: it must be a text"),
        (
            {"load_format": "dummy", "speculation": "mtp"},
            "cannot be combined with speculation='mtp'",
        ),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        EngineSettings("shape", **settings)


def test_stored_kv_is_that_of_random_weights_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_SHORT", 8)
    prompt, store = list(range(3, 103)), {"kv_cache_dir": tmp_path / "kv"}
    with LLM(folder, **SETTINGS, **store) as llm:
        expected, restored = tokens(llm, prompt)
        assert restored == 0
    with LLM(folder, **SETTINGS, **store) as llm:
        found, restored = tokens(llm, prompt)
        assert found == expected and restored >= 80
    save_random(tmp_path / "real", "llama", **{**SIZES, **SHAPE})
    real = SETTINGS | {"load_format": "auto"}
    with LLM(tmp_path / "real", **real, **store) as llm:
        _, restored = tokens(llm, prompt)
        assert restored == 0


def generate(folder: Path, *options: str) -> Any:
    def factory(settings: EngineSettings) -> LLM:
        return LLM(**asdict(settings))

    arguments = ["--model", str(folder), "--ignore-eos", "--max-tokens", "5", *options]
    return CliRunner().invoke(app, ["generate", *arguments], obj=factory)


def test_the_command_line_generates_from_token_ids(folder: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 4, 5]}\n')
    options = ["--file", str(prompts), "--output", str(output)]
    result = generate(folder, *options, "--load-format", "dummy")
    assert result.exit_code == 0, result.output
    assert len(json.loads(output.read_text())["token_ids"]) == 5
    refused = generate(folder, *options, "--resume")  # answers of random weights are no others
    assert refused.exit_code != 0
    assert "holds no .safetensors file" in generate(folder, "--file", str(prompts)).stderr


def test_the_command_line_generates_from_text_with_a_tokenizer(tmp_path: Path) -> None:
    write_config(tmp_path, vocab_size=chat.VOCAB_SIZE)
    save_tokenizer(tmp_path, chat.chat_tokenizer(chat.CHATML))
    result = generate(tmp_path, "--load-format", "dummy", "hello")
    assert result.exit_code == 0, result.output
    assert " 5 new tokens " in result.stderr


def test_bench_measures_a_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyengine.cli.backend import open_llm

    monkeypatch.setattr(bench, "SECONDS", 0.01)
    monkeypatch.setattr(bench, "BUFFER", 1 << 20)
    options = ["--json", "--dtype", "float32", "--load-format", "dummy"]
    result = CliRunner().invoke(app, ["bench", str(folder), *options], obj=open_llm)
    figures = json.loads(result.stdout)
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 128 + 2 * 128
    assert figures["weights"] == 2 * layer + 128 + 300 * 128
    assert figures["decode"] > 0 < figures["prefill"]


@pytest.mark.slow
def test_a_server_says_that_its_weights_are_random(folder: Path) -> None:
    code = "from pyengine.cli import main; main()"
    options = ["--load-format", "dummy", "--device", "cpu", "--num-blocks", "64", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(folder), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stderr is not None
    try:
        said: list[str] = []
        while not said or not said[-1].startswith("  store"):
            said.append(process.stderr.readline())
            assert said[-1], said
        (where,) = (line.split()[-1] for line in said if line.startswith("serving on"))
        (model,) = (line for line in said if line.startswith("  model"))
        assert "shape: " in model and "random weights (load_format: dummy)" in model
        (known,) = _call(f"{where}/v1/models")["data"]
        assert known["id"] == "shape"
        body = {"model": "shape", "prompt": [3, 4, 5], "max_tokens": 4, "ignore_eos": True}
        assert _call(f"{where}/v1/completions", body)["usage"]["completion_tokens"] == 4
        with pytest.raises(urllib.error.HTTPError) as refused:
            messages = [{"role": "user", "content": "hi"}]
            _call(f"{where}/v1/chat/completions", {"model": "shape", "messages": messages})
        assert refused.value.code == 400
        assert "no tokenizer" in refused.value.read().decode()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return json.load(response)
