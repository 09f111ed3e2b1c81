"""A child for untrusted input is bounded in time and in what it sends, whatever it does."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pyengine.utils.child_process import ChildProcess, idle_child

ECHOES = "answer(question)"
ENDS_AT_ONCE = "import os; os._exit(3)"
SENDS_TOO_MUCH = "answer(bytes(1001))"
CLAIMS_TOO_MUCH = "import os; os.write(0, bytes([255] * 8))"
SENDS_A_PART = "import os; os.write(0, (100).to_bytes(8) + b'part'); os._exit(0)"
SENDS_NOTHING = "import time; time.sleep(60)"
DRIPS = """
    import os, time
    os.write(0, (1000).to_bytes(8))
    while True:
        os.write(0, b'x'); time.sleep(0.01)"""
READS_NOTHING = """
def serve(questions, answer):
    import time; time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], ChildProcess]:
    def started(code: str) -> ChildProcess:
        file = tmp_path / "worker.py"
        if "def serve" not in code:
            code = f"def serve(questions, answer):\n  for question in questions:\n    {code}\n"
        file.write_text(code)
        child = ChildProcess(str(file), memory=1 << 30, stack=1 << 20)
        return child

    return started


def test_it_answers_each_question(start: Callable[[str], ChildProcess]) -> None:
    child = start(ECHOES)
    for question in (b"", b"a\nb\0", bytes(5_000_000)):
        assert child.exchange(question, 60, len(question)) == question
    assert child.is_alive
    child.kill()
    assert not child.is_alive
    assert child._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "code", [ENDS_AT_ONCE, SENDS_TOO_MUCH, CLAIMS_TOO_MUCH, SENDS_A_PART, "fails", "def serve("]
)
def test_a_child_that_ends_or_sends_too_much(
    code: str, start: Callable[[str], ChildProcess]
) -> None:
    child = start(code)
    with pytest.raises(ChildProcessError):
        child.exchange(b"?", 60, 1000)
    assert not child.is_alive
    assert child._process.returncode is not None


@pytest.mark.parametrize("code", [SENDS_NOTHING, DRIPS, READS_NOTHING])
def test_a_child_that_takes_too_long(code: str, start: Callable[[str], ChildProcess]) -> None:
    child = start(code)
    with pytest.raises(TimeoutError):
        child.exchange(bytes(10_000_000), 1, 1000)
    assert not child.is_alive


def test_it_ends_with_its_last_reference(start: Callable[[str], ChildProcess]) -> None:
    child = start(ECHOES)
    process = child._process
    del child
    assert process.returncode == -signal.SIGKILL


def test_those_that_ended_are_not_taken(start: Callable[[str], ChildProcess]) -> None:
    first, second = start(ECHOES), start(ECHOES)
    second.kill()
    idle = [first, second]
    assert idle_child(idle) is first
    assert idle_child(idle) is None
    assert idle == []
