"""The checks of tests/gpu, in a separate process."""

import subprocess
import sys
from pathlib import Path

from tests.support.docs import ROOT


def checked(*arguments: str, report: Path) -> tuple[int, str]:
    """The exit status of the checks, and what is written down."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--report", str(report), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.returncode, report.read_text() if report.exists() else done.stdout
