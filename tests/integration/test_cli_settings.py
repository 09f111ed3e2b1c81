"""Settings at their extremes on the command line, with a real engine: served, or a sentence."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pyengine import LLM
from pyengine.cli.app import app
from pyengine.config import EngineSettings
from tests.support.checkpoints import save_tiny
from tests.support.without_torch import needs_torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, dtype="float32")
    (path / "prompts.jsonl").write_text('{"prompt_token_ids": [3, 4, 5]}\n')
    return path


def generate(folder: Path, *options: str) -> Result:
    def factory(settings: EngineSettings) -> LLM:
        return LLM(**asdict(settings))

    arguments = ["--file", str(folder / "prompts.jsonl"), "--model", str(folder), "--ignore-eos"]
    return CliRunner().invoke(
        app, ["generate", *arguments, "--max-tokens", "5", *options], obj=factory
    )


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ("", 5),
        ("--num-blocks 1", 5),
        ("--num-blocks 1 --block-size 4", 1),
        ("--max-model-len 4", 1),
        ("--block-size 1", 5),
        ("--block-size 7", 5),
        ("--block-size 65536", 5),
        ("--block-size auto", 5),
        ("--dtype auto", 5),
        ("--dtype float32", 5),
        ("--dtype bfloat16", 5),
        pytest.param("--dtype float16", 5, marks=needs_torch),
        pytest.param("--kv-cache-dtype fp8", 5, marks=needs_torch),
        ("--max-num-seqs 1 --max-num-batched-tokens 1", 5),
        ("--kv-cache-gib 0.0001", 5),
        ("--gpu-memory-utilization 1", 5),
        ("--no-prefix-caching --no-in-flight-sharing --no-layer-groups", 5),
        ("--async-scheduling --eviction 2q --enforce-eager", 5),
        (f"--seed {'9' * 40}", 5),
        ("--seed -1", 5),
        ("--max-tokens 99999999999", 61),
    ],
)
def test_it_is_served(folder: Path, options: str, tokens: int) -> None:
    result = generate(folder, *options.split())
    assert result.exit_code == 0, result.output
    assert f" {tokens} new tokens " in result.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--num-blocks 0", "--num-blocks 0"),
        ("--num-blocks -1", "--num-blocks -1"),
        ("--num-blocks 1000000000000", "at most --num-blocks"),
        (f"--num-blocks {'9' * 40}", "--num-blocks is an integer of 133 bits"),
        ("--num-blocks 1 --block-size 1", "the KV pool holds 1 blocks of 1 tokens"),
        ("--kv-cache-gib 1e-9", "hold no KV pool"),
        ("--kv-cache-gib 1e8", "at most --num-blocks"),
        ("--kv-cache-gib nan", "--kv-cache-gib nan"),
        ("--num-blocks 3 --kv-cache-gib 1", "give one of them"),
        ("--max-model-len 1", "--max-model-len 1"),
        ("--max-model-len 2", "the prompt has 3 tokens"),
        ("--max-model-len 65", "has 64 positions"),
        ("--block-size 0", "--block-size 0"),
        ("--block-size 65537", "1 to 65536"),
        (f"--block-size {'9' * 40}", "--block-size is an integer of 133 bits"),
        ("--max-num-seqs 0", "--max-num-seqs 0"),
        ("--max-num-batched-tokens 255", "--max-num-seqs 256"),
        ("--max-num-batched-tokens 1000000000", "at most --max-num-batched-tokens"),
        ("--max-num-batched-tokens 1000000000000", "at most --max-num-batched-tokens"),
        (f"--max-num-batched-tokens {'9' * 40}", "--max-num-batched-tokens is an integer of 133"),
        ("--max-num-seqs 1000000000 --max-num-batched-tokens 1000000000", "fewer --max-num-seqs"),
        ("--dtype float64", "--dtype float64"),
        ("--dtype int8", "--dtype int8"),
        ("--dtype float8_e4m3fn", "--dtype float8_e4m3fn"),
        ("--dtype x", "--dtype x"),
        ("--kv-cache-dtype int3", "--kv-cache-dtype int3"),
        ("--device meta", "--device meta"),
        ("--device abacus", "--device abacus"),
        ("--device cuda:99", "--device cuda:99"),
        ("--attention-backend magic", "--attention-backend magic"),
        ("--eviction fifo", "fifo"),
        ("--gpu-memory-utilization 2", "--gpu-memory-utilization 2.0"),
        ("--generation-config mine", "--generation-config mine"),
        ("--tensor-parallel-size 0", "--tensor-parallel-size 0"),
        ("--tensor-parallel-size 3", "--tensor-parallel-size 3"),
        ("--tensor-parallel-size 100", "--tensor-parallel-size 100"),
        ("--tensor-parallel-size 2 --compile", "--compile"),
        ("--temperature nan", "--temperature nan"),
        ("--temperature 1e400", "--temperature inf"),
        ("--top-k -2", "--top-k -2"),
        ("--stop x", "needs a tokenizer"),
        ("--model /dev/null", "/dev/null"),
        (f"--model {'x' * 5000}", "xxx"),
        ("--chat", "no chat template"),
        ("--record /no/such/folder/file", "cannot write"),
        ("--record /dev/full", "cannot write"),
    ],
    ids=lambda text: text[:60],
)
def test_it_is_refused_in_a_sentence(folder: Path, options: str, complaint: str) -> None:
    result = generate(folder, *options.split())
    assert result.exit_code in (1, 2), repr(result.exception)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stdout == ""
    assert re.match(r"error: ", result.stderr) and complaint in result.stderr


def test_what_is_told_of_the_engine_holds_no_token(folder: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["info", "--model", str(folder), "--token", "hf_secret", "--generation-config", "none"],
        obj=lambda settings: LLM(**asdict(settings)),
    )
    assert result.exit_code == 0, result.output
    assert "hf_secret" not in result.output
    assert re.search(r"generation config +none: the defaults of SamplingParams", result.stdout)
