"""`pyengine bench`: the verdict, and a run on a small random model."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pyengine.cli import bench
from pyengine.cli.app import app
from pyengine.cli.bench import Limits, Speed, verdict
from pyengine.config import EngineSettings
from pyengine.errors import ModelLoadError
from tests.support.checkpoints import save_weights
from tests.unit.cli.fakes import FakeEngine
from tests.unit.models.tiny_gguf import write_tiny_gguf

LIMITS = Limits(bandwidth=20e9, operations=100e9, steadiness=0.95)
SPEED = Speed(decode=50, prefill=301, weights=100_000_000, weight_bytes=200_000_000)


def test_shares_are_those_of_the_limits() -> None:
    assert SPEED.decode_share(LIMITS) == pytest.approx(0.5)
    assert SPEED.prefill_share(LIMITS) == pytest.approx(0.602)
    assert verdict(LIMITS, SPEED, (0.5, 0.6)) == []


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(20e9, 100e9, 0.5), "had 50% of the speed of the fastest"),
        (Limits(200e9, 100e9, 0.95), "decoding reaches 5% of what the machine allows"),
        (Limits(20e9, 1000e9, 0.95), "a prompt reaches 6% of what the machine allows"),
    ],
)
def test_what_is_slow_is_said(limits: Limits, words: str) -> None:
    (slow,) = verdict(limits, SPEED, (0.4, 0.4))
    assert words in slow


class DescribedEngine(FakeEngine):
    def describe(self) -> dict[str, object]:
        return {"model": "a", "device": "cpu", "dtype": "bfloat16", "num_threads": 2}


def run(monkeypatch: pytest.MonkeyPatch, limits: Limits, *options: str) -> tuple[int, str]:
    monkeypatch.setattr(bench, "measure_limits", lambda dtype: limits)
    monkeypatch.setattr(bench, "measure_speed", lambda engine: SPEED)
    result = CliRunner().invoke(app, ["bench", *options], obj=DescribedEngine().open)
    return result.exit_code, result.stdout


def test_the_last_line_and_the_status_are_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    status, shown = run(monkeypatch, LIMITS)
    assert (status, shown.splitlines()[-1]) == (0, "as fast as it should be")
    assert "20.0 GB/s" in shown and "50.0 tokens/s, 50% of what memory allows" in shown
    status, shown = run(monkeypatch, Limits(200e9, 100e9, 0.95))
    assert (status, shown.splitlines()[-1]) == (1, "slower than it should be")
    assert "slow: decoding reaches 5%" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_json_has_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    status, shown = run(monkeypatch, LIMITS, "--json")
    figures = json.loads(shown)
    assert status == 0
    assert (figures["model"], figures["bandwidth"], figures["slow"]) == ("a", 20e9, [])
    assert (figures["decode"], figures["prefill"]) == (50, 301)


SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
WEIGHTS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64) + 64 + 256 * 64


def test_without_the_default_model_a_random_one_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyengine.cli.backend import open_llm

    def factory(settings: EngineSettings) -> object:
        if settings.model is None:
            raise ModelLoadError("not installed")
        return open_llm(settings)

    monkeypatch.setattr(bench, "RANDOM_MODEL", SMALL)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "SECONDS", 0.01)
    monkeypatch.setattr(bench, "BUFFER", 1 << 20)
    result = CliRunner().invoke(app, ["bench", "--json", "--dtype", "float32"], obj=factory)
    assert "random weights" in result.stderr, result.output
    figures = json.loads(result.stdout)
    assert figures["weights"] == WEIGHTS
    assert figures["weight_bytes"] == 4 * WEIGHTS
    assert figures["bandwidth"] > 0 < figures["operations"]
    assert figures["decode"] > 0 < figures["prefill"]
    assert result.exit_code == int(bool(figures["slow"]))


def test_a_type_without_a_least_share_is_refused() -> None:
    assert CliRunner().invoke(app, ["bench", "--dtype", "float16"]).exit_code == 2


def test_a_model_that_is_named_has_to_be_there() -> None:
    def factory(settings: EngineSettings) -> object:
        raise ModelLoadError("there is no model at 'x'")

    result = CliRunner().invoke(app, ["bench", "x"], obj=factory)
    assert result.exit_code == 1
    assert result.stderr == "error: there is no model at 'x'\n"


@pytest.mark.parametrize("name", ["snapshot", "a.gguf"])
def test_a_mixture_of_experts_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix == ".gguf":
        write_tiny_gguf(path, architecture="qwen3moe", experts=4)
    else:
        path.mkdir()
        weights = {"model.layers.0.mlp.experts.0.up_proj.weight": np.ones((2, 2), np.float32)}
        save_weights(path / "model.safetensors", weights)

    class Experts(DescribedEngine):
        @property
        def model_path(self) -> Path:
            return path

    result = CliRunner().invoke(app, ["bench"], obj=Experts().open)
    assert result.exit_code == 2
    assert "a is a mixture of experts" in result.stderr
