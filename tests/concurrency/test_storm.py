"""Random calls of eight threads, with hostile arguments and finalizers: no crash, no deadlock."""

import sys

import pytest

from tests.support.processes import run_program


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_eight_threads_of_anything(seconds: int) -> None:
    storm = [sys.executable, "-X", "faulthandler", "-m", "tests.concurrency.storm", str(seconds)]
    assert "kinds succeeded" in run_program(storm, timeout=seconds + 60).stdout
