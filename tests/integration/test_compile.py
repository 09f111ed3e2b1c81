"""`LLM(compile=True)`: any number of engines in a process, and what it says if torch cannot."""

import os
import sys
from functools import partialmethod
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from pyengine import LLM, SamplingParams
from pyengine.engine import builder
from pyengine.errors import ConfigurationError
from pyengine.executor.model_runner import ModelRunner
from tests.support.checkpoints import save_tiny
from tests.support.graphs import record_eagerly
from tests.support.models import BY_TORCH
from tests.support.processes import run_python

PROMPTS = [[5, 6, 7], [9, 3, 8, 4, 30, 11]]
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, detokenize=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path, initializer_range=0.5)
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


_COUNT_THREADS = """
import os, sys
os.cpu_count = lambda: 64  # a container may use two of them
import torch
torch.set_num_threads(2)
from pyengine import LLM, SamplingParams
from pyengine.cpu.threads import ComputeThreads
from pyengine.engine import builder, loop

used, kept = [], []

class Threads(loop.StepThreads):
    def __init__(self, threads):
        super().__init__(threads)
        used.append(self)

def of_openmp():
    started = {str(each.native_id) for each in loop.threading.enumerate()}
    return len(set(os.listdir("/proc/self/task")) - started)

loop.StepThreads = Threads
builder.compute_threads = lambda *_: ComputeThreads(2, "", adapts=True)
llm = LLM(sys.argv[1], device="cpu", dtype="float32", num_blocks=32, compile=True)
[governor] = used
assert governor._threads.adapts, "compiled steps use a fixed number of threads"
params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, logprobs=3)
prompts = [[5, 6, 7], list(range(2, 30))]
for count in 1, 2:
    governor._adapt = lambda *_: None
    governor.count = count
    before = of_openmp()
    found = [llm.generate([each], params)[0].outputs[0].logprobs for each in prompts]
    print(of_openmp() - before, end=" ")
    kept.append(repr(found))
print(kept[0] == kept[1])
os._exit(0 if sys.stdout.flush() is None else 1)
"""
"""Prints how many OpenMP threads one and two threads start; then whether results have same bits."""


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_compiled_steps_use_the_threads_of_the_moment_and_have_the_same_bits(
    tmp_path: Path,
) -> None:
    """Layers so wide that torch's compiler divides a row's sum."""
    sizes = {"hidden_size": 8192, "head_dim": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    save_tiny(tmp_path, **sizes)
    variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    assert run_python(_COUNT_THREADS, tmp_path, env=variables).stdout.split() == ["0", "1", "True"]
    sources = [file.read_text() for file in (tmp_path / "cache").rglob("*.cpp")]
    regions = [each for each in sources if "#pragma omp parallel" in each]
    assert regions and not [each for each in regions if "num_threads(" in each]
