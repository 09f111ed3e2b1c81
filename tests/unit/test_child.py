"""Functions in separate processes: a failure costs that call alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.child import Child, ChildError
from tests.support.processes import is_running, run_python, wait_for_end
from tests.support.without_torch import needs_torch

SOON = 60.0


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


def refuse(reason: str) -> None:
    raise ValueError(reason)


def unsendable() -> None:
    class Odd(Exception):
        pass

    raise Odd("no kernel image")


def break_the_device() -> str:
    """What CUDA does after an illegal access: every call raises from then on."""

    def synchronize() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]
    return "answered"


def start_another(file: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    file.write_text(str(other.pid))
    os._exit(3)


def test_a_process_serves_until_something_goes_wrong(child: Child) -> None:
    first = child.run(os.getpid, seconds=SOON)
    assert first != os.getpid()
    assert child.run(max, 3, 4, seconds=SOON) == 4
    with pytest.raises(ValueError, match="not today") as caught:
        child.run(refuse, "not today", seconds=SOON)
    assert "in refuse" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="Odd: no kernel image"):
        child.run(unsendable, seconds=SOON)
    assert child.run(os.getpid, seconds=SOON) == first


@pytest.mark.parametrize(
    ("call", "args", "seconds", "words"),
    [
        (time.sleep, (600,), 0.5, "ended by force: not done after 0.5 s"),
        (os._exit, (3,), SOON, "the process ended with status 3"),
        (signal.raise_signal, (signal.SIGSEGV,), SOON, "the process was ended by SIGSEGV"),
    ],
)
def test_what_does_not_come_back_is_named_and_replaced(
    child: Child, call: object, args: tuple[object, ...], seconds: float, words: str
) -> None:
    first = child.run(os.getpid, seconds=SOON)
    with pytest.raises(ChildError, match=words):
        child.run(call, *args, seconds=seconds)  # type: ignore[arg-type]
    assert child.run(os.getpid, seconds=SOON) != first


def test_a_device_that_answers_no_more_is_replaced(child: Child) -> None:
    first = child.run(os.getpid, seconds=SOON)
    assert child.run(break_the_device, seconds=SOON) == "answered"
    assert child.run(os.getpid, seconds=SOON) != first


def test_what_a_process_started_ends_with_it(child: Child, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(ChildError, match="status 3"):
        child.run(start_another, file, seconds=SOON)
    assert wait_for_end([int(file.read_text())], SOON) == []


def test_it_ends_with_whoever_started_it() -> None:
    code = (
        "import os, sys; from tests.support.child import Child\n"
        "if __name__ == '__main__':\n"
        "    print(Child().run(os.getpid, seconds=60), flush=True); os.kill(os.getpid(), 9)"
    )
    done = run_python(code, status=-signal.SIGKILL)
    assert wait_for_end([int(done.stdout)], SOON) == []
    assert not is_running(int(done.stdout))


@needs_torch
@pytest.mark.slow
def test_what_is_imported_before_a_fork_asks_for_no_device() -> None:
    """CUDA does not work in a process that was forked from one that has initialised it."""
    code = (
        "import importlib, torch; from tests.support.child import PRELOADED\n"
        "asked = []\n"
        "torch.cuda.is_available = lambda: bool(asked.append('is_available'))\n"
        "torch.cuda.device_count = lambda: asked.append('device_count') or 0\n"
        "for name in PRELOADED: importlib.import_module(name)\n"
        "print(asked, torch.cuda.is_initialized())"
    )
    done = run_python(code)
    assert done.stdout.strip() == "[] False", done.stdout + done.stderr
