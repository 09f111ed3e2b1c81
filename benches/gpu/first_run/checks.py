"""Some of the project's checks on the device: tests/gpu."""

from pathlib import Path

import pytest

from benches.gpu.first_run.context import Context

_NOTHING = pytest.ExitCode.NO_TESTS_COLLECTED


def run(context: Context, wanted: str) -> None:
    """The checks that `pytest -k` selects with `wanted`; a line for each is in checks.md."""
    report = Path(context.folder) / "checks.md"
    options = ["--device", context.device, "--report", str(report)]
    status = pytest.main(["tests/gpu", "-q", *options, "-k", wanted, "--maxfail", "8"])
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    counts = {
        word: sum(line.startswith(f"- {word}") for line in lines)
        for word in ("passed", "failed", "skipped")
    }
    failed = counts.pop("failed")
    context.record(checks=wanted, wrong=failed, **counts)
    if not failed and status not in {pytest.ExitCode.OK, _NOTHING}:
        context.record(failed=f"pytest ended with status {int(status)}")
