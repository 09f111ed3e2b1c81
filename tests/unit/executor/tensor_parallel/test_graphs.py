"""Graphs of a divided model: on all ranks or on none. A replay makes the launches again here."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pyengine import LLM
from pyengine.engine import builder
from pyengine.errors import EngineDeadError, WorkerError
from pyengine.executor.tensor_parallel import distributed
from pyengine.executor.tensor_parallel.distributed import WorkerGroup
from tests.support import capturing_worker, faulty_worker
from tests.unit.executor.tensor_parallel.test_distributed import SETTINGS, Faults, save, tokens

Build = Callable[[str], Faults]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def build(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    control, built = tmp_path / "faults", []
    monkeypatch.setenv(faulty_worker.VARIABLE, str(control))
    worker_group = partial(WorkerGroup, module="tests.support.capturing_worker")
    monkeypatch.setattr(distributed, "WorkerGroup", worker_group)
    monkeypatch.setattr(builder, "_wants_graphs", lambda *_: True)
    capturing_worker.inject(monkeypatch.setattr)
    capturing_worker.replays.clear()

    def start(fault: str) -> Faults:
        control.write_text(fault)
        built.append(Faults(llama, control))
        return built[-1]

    yield start
    for faults in built:
        faults.llm.close()


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    return [item for (item,) in tokens(LLM(llama, **SETTINGS))]


def test_decodes_are_replayed_on_all_ranks(build: Build, expected: list[list[int]]) -> None:
    faults = build("calm")
    assert faults.llm.describe()["cuda_graphs"] == "batches of [1, 2, 4, 8]"
    assert faults.run() == (expected, [])
    assert len(capturing_worker.replays) > 5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_capture_that_fails_is_the_last_of_all_ranks(
    build: Build, expected: list[list[int]], rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    faults = build(f"capture {rank}")
    assert faults.llm.describe()["cuda_graphs"] == "batches of [4, 8]"
    reason = "on another rank" if rank else "InjectedError: while capturing"
    assert f"no CUDA graphs for batches of [1, 2], CaptureFailed: {reason}" in caplog.text
    assert faults.run() == (expected, [])
    assert set(capturing_worker.replays) <= {4, 8}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_cannot_be_replayed_on_a_rank_is_rolled_back_on_all(
    build: Build, expected: list[list[int]], rank: int
) -> None:
    faults = build("calm")
    faults.are(f"refresh {rank}")
    got, failures = faults.run()
    assert got == expected
    assert len(failures) > 2
    kind = WorkerError if rank else faulty_worker.InjectedError
    assert all(isinstance(failure, kind) for failure in failures)
    assert "while refreshing" in str(failures[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_before_a_capture_that_fails_ends_the_start(build: Build, rank: int) -> None:
    """The other rank waits in that pass."""
    kind = EngineDeadError if rank else faulty_worker.InjectedError
    with pytest.raises(kind, match="in layer 1"):
        build(f"pass {rank}")
