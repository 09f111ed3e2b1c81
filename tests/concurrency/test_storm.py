"""Random calls of eight threads, with hostile arguments and finalizers: no crash, no deadlock."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_eight_threads_of_anything(seconds: int) -> None:
    storm = [sys.executable, "-X", "faulthandler", "-m", "tests.concurrency.storm", str(seconds)]
    done = subprocess.run(
        storm, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds + 60
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "kinds succeeded" in done.stdout
