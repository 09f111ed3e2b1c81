"""`LLM(compile=True)`: any number of engines in a process, and what it says if torch cannot."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from pyengine import LLM, SamplingParams
from pyengine.engine import builder
from pyengine.errors import ConfigurationError
from pyengine.executor.model_runner import ModelRunner
from tests.support.graphs import record_eagerly
from tests.support.models import BY_TORCH
from tests.unit.models.tiny import save_tiny_model

PROMPTS = [[5, 6, 7], [9, 3, 8, 4, 30, 11]]
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, detokenize=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, initializer_range=0.5)
    return tmp_path


def llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", num_blocks=32, max_num_seqs=4, **settings)


def tokens(engine: LLM) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compile_by(monkeypatch: pytest.MonkeyPatch, compiler: Any) -> None:
    monkeypatch.setattr(ModelRunner, "compile", partialmethod(ModelRunner.compile, compiler))


@pytest.mark.slow
def test_seven_engines_of_a_process_are_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by(monkeypatch, "eager")
    expected = tokens(llm(folder, compile=False))
    engines = [llm(folder, compile=True) for _ in range(7)]
    assert [engine.describe()["compile"] for engine in engines] == [True] * 7
    assert tokens(engines[-1]) == tokens(engines[0]) == expected


def test_an_engine_that_torch_cannot_compile_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error if it is set; else, where it is the default, a warning and `describe`."""

    def broken(_graph: object, _inputs: object) -> None:
        raise RuntimeError("no such instruction")

    compile_by(monkeypatch, broken)
    with pytest.raises(ConfigurationError, match=r"no such instruction.*; set compile=False"):
        llm(folder, compile=True)
    monkeypatch.setattr(builder, "_recorder", lambda *_: record_eagerly)  # as on CUDA
    monkeypatch.setattr(builder, "kernel_settings", lambda *_, **__: BY_TORCH)
    monkeypatch.setattr(ModelRunner, "capture", lambda _: None)
    monkeypatch.setattr(ModelRunner, "capture_piecewise", lambda *_: None)
    with caplog.at_level("WARNING"):
        engine = llm(folder)
    assert engine.describe()["compile"] is False
    (said,) = [record.message for record in caplog.records if record.name.startswith("pyengine")]
    assert "no such instruction" in said
    assert said.startswith("the model runs uncompiled, which is slower: ")
