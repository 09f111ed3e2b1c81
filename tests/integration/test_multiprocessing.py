"""Processes that are started while an `LLM` is alive: refused in a sentence, the parent goes on."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_program, run_python

pytestmark = pytest.mark.slow

WAY_OUT = "the threads that compute are not in it: start the process by multiprocessing's 'spawn'"


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("fork", 1),
        pytest.param("spawn", 1, marks=SOAK),
        pytest.param("fork", 2, marks=SOAK),
        pytest.param("forkserver", 1, marks=SOAK),
        pytest.param("spawn", 2, marks=SOAK),
        pytest.param("forkserver", 2, marks=SOAK),
    ],
)
def test_processes_beside_a_live_llm(method: str, size: int, tiny_folder: Path) -> None:
    several = {**os.environ, "OMP_NUM_THREADS": "2"}  # a fork has none but the one that forked
    user = [sys.executable, "-m", "tests.support.multiprocessing_user", method, str(tiny_folder)]
    user.append(str(size))
    done = run_program(user, env=several)
    assert done.stderr == ""
    reply = json.loads(done.stdout)
    answer = reply.pop("parent")
    assert answer.startswith("[")
    assert reply.pop("stream") == reply.pop("parent again") == answer
    assert reply.pop("amid a stream") == "[]"
    own, argument = reply.pop("own"), reply.pop("argument")
    if method == "fork":
        assert WAY_OUT in own
        for said in (argument, *reply.values()):
            assert "EngineDeadError: this engine belongs to process" in said
            assert "'spawn', and make a new engine in it" in said
    else:
        assert own == answer
        assert "LLM cannot be pickled or copied" in argument
        assert not reply


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
def test_two_engines_in_one_process_and_its_end_in_the_middle_of_streams(
    size: int, tiny_folder: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.engines_at_the_end",
        str(tiny_folder),
        str(size),
    ]
    done = run_program(command, status=7)
    assert done.stderr == ""
    assert json.loads(done.stdout.lower()) == [True] * 8


def test_an_engine_may_be_dropped_just_before_the_process_ends() -> None:
    """Its thread frees the model meanwhile; C++ aborts where the interpreter ends first."""
    code = "from pyengine import LLM; print(LLM().describe())"
    done = run_python(code)
    assert done.stderr == ""
