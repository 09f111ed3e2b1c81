"""A model divided over processes gives the tokens of one; who fails, fails with all or ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pyengine import LLM, SamplingParams
from pyengine.engine.recovery import Verdict
from pyengine.errors import ConfigurationError, EngineClosedError, EngineDeadError, WorkerError
from pyengine.executor.tensor_parallel import distributed
from pyengine.executor.tensor_parallel.distributed import WORKER, WorkerGroup
from pyengine.models.decoder.families import TABLE
from pyengine.models.loaded import LoadedModel
from pyengine.models.loader import load_model
from pyengine.request.prompts import Prompt
from tests.support import faulty_worker
from tests.support.checkpoints import save_tiny
from tests.support.engines import add_request
from tests.support.processes import in_a_fork, listening, unix_names, workers_left, workers_of
from tests.support.soak import soak_cases, soak_only
from tests.unit.executor.hand_made import random_model
from tests.unit.executor.test_model_runner import FAMILIES

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12)
SETTINGS: dict[str, Any] = {
    "num_blocks": 96,
    "device": "cpu",
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
}
IN_TIME = 10.0
"""Seconds in which a death must be noticed."""
GIVEN_UP = 30.0
"""Seconds in which a worker must have stopped waiting for the others."""
INTERRUPTS = """
import os, signal, sys, time
for _ in range(int(sys.argv[2])):
    time.sleep(0.3)
    os.kill(int(sys.argv[1]), signal.SIGINT)
"""


def prompts() -> list[list[int]]:
    """Three with a shared beginning, one that takes several chunks, one of a single token."""
    rnd = Random(1)
    shared = [rnd.randrange(3, 97) for _ in range(19)]
    return [[*shared, 5, 6], [*shared, 7], shared, [rnd.randrange(3, 97) for _ in range(40)], [9]]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return [[each_output.token_ids for each_output in output.outputs] for output in outputs]


def save(folder: Path, family: str, **settings: Any) -> Path:
    random_model(family, **{"vocab_size": 98, **settings}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(
    ("family", "vocabulary"),
    [
        *[("gemma3_text", 97), ("gemma", 98)],  # the latter as a module of transformers
        *soak_cases([("deepseek_v3", 98), ("gpt_oss", 97), ("olmo2", 98)]),
    ],
)
def test_two_processes_give_the_tokens_of_one(
    family: str, vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, family, **{**FAMILIES.get(family, {}), "vocab_size": vocabulary})
    expected = tokens(LLM(folder, **SETTINGS))
    ranks = []

    def load(*arguments: Any, **settings: Any) -> LoadedModel:
        ranks.append(os.environ.get("LOCAL_RANK"))
        return load_model(*arguments, **settings)

    monkeypatch.setattr(distributed, "load_model", load)
    with LLM(folder, **SETTINGS, tensor_parallel_size=2) as llm:
        assert tokens(llm) == expected
        assert (family in TABLE) == str(llm.describe()["decoder"]).startswith("pyengine")
        groups = llm.describe()["layer_groups"]
        assert ("window 6" in str(groups)) == (family in ("gemma3_text", "gpt_oss")), groups
    assert ranks == ["0"], "transformers takes the CUDA device of this number"
    assert workers_left(os.getpid(), IN_TIME) == []


def test_forks_log_probabilities_and_the_end_of_two_processes(llama: Path) -> None:
    forked = SamplingParams(n=3, seed=4, max_tokens=6, ignore_eos=True, logprobs=2)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    alone = LLM(llama, **SETTINGS)
    threads = torch.get_num_threads()
    parallel = LLM(llama, **SETTINGS, tensor_parallel_size=2)
    assert len(workers_of(os.getpid())) == 1
    assert parallel.describe()["tensor_parallel_size"] == 2
    assert parallel.describe()["kv_cache_bytes"] == alone.describe()["kv_cache_bytes"] // 2
    assert tokens(parallel) == tokens(alone)
    assert tokens(parallel, forked) == tokens(alone, forked)
    assert parallel.stats().counters["copied_blocks"] == alone.stats().counters["copied_blocks"] > 0
    (ours,), (theirs,) = (
        llm.generate([prompts()[3]], scored, use_tqdm=False) for llm in (alone, parallel)
    )
    assert ours.prompt_logprobs is not None and theirs.prompt_logprobs is not None
    for expected, got in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
        assert expected is not None and got is not None
        assert [o.logprob for o in expected.values()] == pytest.approx(
            [g.logprob for g in got.values()], abs=1e-4
        )
    with pytest.raises(ConfigurationError, match="one; close"):
        LLM(llama, **SETTINGS, tensor_parallel_size=2)

    parallel.close()
    parallel.close()
    assert workers_left(os.getpid(), IN_TIME) == []
    assert torch.get_num_threads() == threads
    assert not torch.distributed.is_initialized()
    with pytest.raises(EngineClosedError, match="was closed"):
        tokens(parallel)
    parallel._manager.check()


class Faults:
    """An LLM of two processes whose worker fails on request."""

    def __init__(self, folder: Path, control: Path) -> None:
        settings = {**SETTINGS, "attention_backend": "gather"}  # which is made to fail
        self.llm = LLM(folder, **settings, tensor_parallel_size=2)
        self._control = control
        self._rounds = count()

    def are(self, word: str) -> None:
        self._control.write_text(word)

    def run(self) -> tuple[list[list[int]], list[BaseException]]:
        """Tokens of every prompt, in spite of steps that fail; and what failed."""
        engine, failures, name = self.llm._engine, [], next(self._rounds)
        requests = [
            add_request(self.llm, f"{name}-{index}", Prompt(token_ids=prompt), GREEDY)
            for index, prompt in enumerate(prompts())
        ]
        go_on = engine.recovery.failed
        no_fault = Verdict()  # steps fail by chance, no request's fault

        def watched(sequences: Any, num_tokens: int, error: BaseException) -> Any:
            failures.append(error)
            if "forward" not in str(error) and self._control.read_text() == "forward":
                self.are("calm")
            engine.recovery.faults.failed = lambda _: no_fault
            return go_on(sequences, num_tokens, error)

        engine.recovery.failed = watched
        try:
            while engine.has_work:
                engine.step()
                self.llm._manager.check()
        finally:
            engine.recovery.failed = go_on
        return [request.output().outputs[0].token_ids for request in requests], failures


@pytest.fixture
def faults(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    control = tmp_path / "faults"
    control.write_text("calm")
    monkeypatch.setenv(faulty_worker.VARIABLE, str(control))
    worker_group = partial(WorkerGroup, module="tests.support.faulty_worker")
    monkeypatch.setattr(distributed, "WorkerGroup", worker_group)
    faults = Faults(llama, control)
    yield faults
    faults.llm.close()


def test_a_step_that_fails_is_rolled_back_on_all_ranks(
    faults: Faults, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [item for (item,) in tokens(LLM(llama, **SETTINGS))]

    faults.are("prepare")  # the worker, before the forward pass
    got, failures = faults.run()
    assert got == expected
    assert len(failures) > 3
    assert all(isinstance(failure, WorkerError) for failure in failures)
    assert "rank 1" in str(failures[0]) and "InjectedError: while preparing" in str(failures[0])
    assert "faulty_metadata" in str(failures[0]), "the traceback is the worker's"

    with monkeypatch.context() as patch:
        faulty_worker.inject(patch.setattr)
        faults.are("prepare")  # either rank, or both
        got, failures = faults.run()
        assert got == expected
        assert {type(failure) for failure in failures} == {WorkerError, faulty_worker.InjectedError}

        faults.are("forward")  # both at the same place
        got, failures = faults.run()
        assert got == expected
        assert [str(failure) for failure in failures] == ["in layer 1"]

    faults.are("forward")  # the worker alone, while rank 0 waits for it
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"(?s)rank 1.*InjectedError: in layer 1"):
        faults.run()
    assert time.monotonic() - started < GIVEN_UP
    with pytest.raises(EngineDeadError, match=r"(?s)rank 1.*InjectedError: in layer 1"):
        faults.run()
    assert workers_left(os.getpid(), IN_TIME) == []


def test_nobody_else_can_reach_the_processes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks meet by a file of this user's own, speak by gloo on the loopback, and take pickles from
    a pair of sockets without names."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LLM(llama, **SETTINGS, tensor_parallel_size=2) as llm:
        expected = tokens(llm)
        for rank in (os.getpid(), *workers_of(os.getpid())):
            doors = listening(rank)
            assert doors and all(address.is_loopback for address, _ in doors), doors
            for address, port in doors[:2]:  # what others on this machine may send does nothing
                with socket.create_connection((str(address), port), timeout=5) as other:
                    other.sendall(b"\0" * 64 + b"x" * 4096)
            assert unix_names(rank) == []
        (folder,) = tmp_path.iterdir()
        assert re.fullmatch(r"pyengine-\w{8}", folder.name)
        assert tokens(llm) == expected
        assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_is_killed_ends_the_engine(llama: Path) -> None:
    with LLM(llama, **SETTINGS, tensor_parallel_size=2) as llm:
        (worker,) = workers_of(os.getpid())
        stream = llm.stream([3, 4, 5], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(worker, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match=f"process {worker}.* SIGKILL.* new LLM"):
            list(stream)
        with pytest.raises(EngineDeadError, match=f"process {worker}.* SIGKILL"):
            tokens(llm)
        assert time.monotonic() - started < IN_TIME
        assert workers_left(os.getpid(), IN_TIME) == []
        usage = llm.stats().usage
        assert (usage.active, usage.pinned) == (0, 0)


def test_a_worker_that_cannot_start_ends_it_too(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        distributed, "WorkerGroup", partial(WorkerGroup, module=f"{WORKER}_missing")
    )
    with pytest.raises(EngineDeadError, match=r"rank 1 .* ended by itself with status 1"):
        LLM(llama, **SETTINGS, tensor_parallel_size=2)
    assert "No module named" in capfd.readouterr().err
    assert workers_left(os.getpid(), IN_TIME) == []
    assert not torch.distributed.is_initialized()


def test_a_fork_is_refused_and_its_parent_goes_on(llama: Path) -> None:
    with LLM(llama, **SETTINGS, tensor_parallel_size=2) as llm:
        expected = tokens(llm)

        def ask() -> str:
            said = []
            for _ in range(2):
                try:
                    said.append(str(tokens(llm)))
                except EngineDeadError as error:
                    said.append(str(error))
            llm.close()
            return "; ".join(said)

        said = in_a_fork(ask)
        assert said.count(f"belongs to process {os.getpid()}, which goes on") == 2, said
        assert "'spawn', and make a new engine in it" in said
        assert tokens(llm) == expected
        in_a_fork(lambda: "and again, without a word")
        assert tokens(llm) == expected


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("interrupts", [4, *soak_only([1])])
def test_ctrl_c_ends_the_wait_for_a_worker_that_was_stopped(
    llama: Path, monkeypatch: pytest.MonkeyPatch, python_handles_ctrl_c: None, interrupts: int
) -> None:
    monkeypatch.setattr("pyengine.engine.loop.PATIENCE", 1.0 if interrupts == 1 else 60.0)
    with LLM(llama, **SETTINGS, tensor_parallel_size=2) as llm:
        (worker,) = workers_of(os.getpid())
        stream = llm.stream([3, 4, 5], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(worker, signal.SIGSTOP)
        words = [sys.executable, "-c", INTERRUPTS, str(os.getpid()), str(interrupts)]
        started = time.monotonic()
        with subprocess.Popen(words) as terminal:
            try:
                with pytest.raises(KeyboardInterrupt):
                    list(stream)
            finally:
                while terminal.poll() is None:
                    with suppress(KeyboardInterrupt):
                        terminal.wait()
        assert time.monotonic() - started < IN_TIME
        assert workers_left(os.getpid(), IN_TIME) == []
        with pytest.raises(EngineDeadError, match=r"interrupted within a step.*new LLM"):
            tokens(llm)
        usage = llm.stats().usage
        assert (usage.active, usage.pinned) == (0, 0)


@pytest.mark.parametrize("size", [0, -1])
def test_less_than_one_process_is_refused(llama: Path, size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"tensor_parallel_size={size}: .* at least 1"):
        LLM(llama, **SETTINGS, tensor_parallel_size=size)


def test_nothing_is_started_for_a_size_that_does_not_divide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, num_attention_heads=2)
    monkeypatch.setattr("pyengine.executor.tensor_parallel.distributed.Workers", None)
    with pytest.raises(ConfigurationError, match=r"2 query heads.*: use 2"):
        LLM(tmp_path, device="cpu", tensor_parallel_size=4)
