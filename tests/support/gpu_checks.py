"""The checks of tests/gpu, in a separate process."""

import sys
from pathlib import Path

from tests.support.processes import run_program


def checked(*arguments: str, report: Path) -> tuple[int, str]:
    """The exit status of the checks, and what is written down."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--report", str(report), *arguments]
    done = run_program(command, status=None)
    return done.returncode, report.read_text() if report.exists() else done.stdout
