"""From settings to an engine: what requests get by default, and what it tells of itself."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyengine.attention.choice import Choice
from pyengine.config import EngineSettings
from pyengine.engine import builder
from pyengine.engine.description import about_sampling
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.pool_size import PoolSettings
from pyengine.models.loader import load_model
from pyengine.sampling_params import SamplingParams
from pyengine.utils.devices import CPU
from tests.support.checkpoints import save_random


@dataclass
class Loaded:
    """As much of a loaded model as the defaults are read from."""

    default_sampling: dict[str, Any]


def test_requests_without_parameters_take_those_of_the_model() -> None:
    loaded: Any = Loaded({"temperature": 0.6, "top_p": 0.9})
    params = builder.default_params(EngineSettings(), loaded)
    assert params == SamplingParams(temperature=0.6, top_p=0.9)
    assert about_sampling(EngineSettings(), params) == "auto: temperature=0.6, top_p=0.9"


@pytest.mark.parametrize("value", ["none", "vllm"])
def test_or_our_own_if_that_was_asked_for(value: str) -> None:
    settings = EngineSettings(generation_config=value)
    loaded: Any = Loaded({"temperature": 0.6})
    params = builder.default_params(settings, loaded)
    assert params == SamplingParams()
    assert about_sampling(settings, params) == f"{value}: the defaults of SamplingParams"


class Runner:
    """A runner that compiles, or says why it cannot."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.calls = error, []  # type: ignore[var-annotated]

    def compile(self) -> None:
        self.calls.append("compile")
        if self.error is not None:
            raise self.error

    def capture(self) -> None:
        self.calls.append("capture")

    def capture_piecewise(self, record: object) -> None:
        self.calls.append(f"capture {record}")


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("can", [True, False])
def test_decode_steps_in_graphs_are_compiled_where_that_can_be_had(
    asked: bool | None, has_graphs: bool, can: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    runner = Runner(None if can else ConfigurationError("torch cannot"))
    recorder = SimpleNamespace(pieces="pieces")
    monkeypatch.setattr(builder, "ModelRunner", lambda *_, **__: runner)
    monkeypatch.setattr(builder, "_recorder", lambda *_: recorder if has_graphs else None)
    fake: Any = SimpleNamespace(
        device=SimpleNamespace(type="cuda", index=0),
        dtype=None,
        model=object(),
        pool=lambda _: SimpleNamespace(populate=lambda: populated.append(True)),
        build=lambda _: None,
        states=(),
    )
    populated: list[bool] = []

    def built() -> Any:
        return builder._runner(EngineSettings(compile=asked), fake, fake, fake, fake)

    if asked and not can:
        with pytest.raises(ConfigurationError, match="torch cannot"):
            built()
        return
    with caplog.at_level("WARNING"):
        assert built() is runner
    assert len(populated) == (asked is True)
    compiles = asked is True or (asked is None and has_graphs)
    captures = ["capture", *["capture pieces"] * has_graphs]
    assert runner.calls == [*["compile"] * compiles, *captures]
    assert ("the model runs uncompiled, which is slower: torch cannot" in caplog.text) == (
        compiles and not can
    )


def test_the_memory_of_graphs_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They exist while the rest of the memory is computed."""
    used, calls = 0, []

    def take(name: str, amount: int, keeps: bool) -> int:
        nonlocal used
        calls.append(name)
        used += amount if keeps else 0
        return amount

    monkeypatch.setattr(builder, "CudaMeter", lambda _device: None)
    monkeypatch.setattr(builder, "available_memory", lambda _device: 1000 - used)
    monkeypatch.setattr(
        builder, "activation_bytes", lambda *_: take("activations", 100, keeps=False)
    )
    monkeypatch.setattr(builder, "graph_bytes", lambda *_: take("graphs", 200, keeps=True))
    loaded = load_model(save_random(tmp_path, "llama"), device=CPU, dtype="float32")
    pool = PoolSettings(block_size=16, max_num_seqs=2, max_model_len=64)
    settings = EngineSettings(max_num_seqs=2, max_num_batched_tokens=32)
    left = builder._memory_left(settings, pool, Choice("cpu", ""), "float32", loaded)
    assert calls == ["activations", "graphs"]
    assert left == 1000 - 100 - 200
