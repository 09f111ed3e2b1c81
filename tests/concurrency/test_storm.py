"""Random calls of eight threads, with hostile arguments and finalizers: no crash, no deadlock."""

import sys
from pathlib import Path

import pytest

from tests.support.processes import run_program

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_eight_threads_of_anything(seconds: int) -> None:
    storm = [sys.executable, "-X", "faulthandler", "-m", "tests.concurrency.storm", str(seconds)]
    done = run_program(storm, cwd=ROOT, timeout=seconds + 60)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "kinds succeeded" in done.stdout
