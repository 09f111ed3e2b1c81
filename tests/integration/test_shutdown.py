"""SIGTERM while the disk of the KV cache is slow or hangs: the server ends within its bound."""

import json
import os
import shutil
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pyengine.engine.offloading import FLUSH_PATIENCE
from tests.support.docs import ROOT
from tests.support.processes import run_program
from tests.support.serving import save_small_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
CASES = list(product(("read", "write", "sync"), ("slow", "hung"), ("idle", "loading", "queued")))
SLACK = 5.0
"""Of docs/guides/keep-the-cache.md."""


def bound(operation: str, speed: str, state: str) -> tuple[float, float]:
    """`drain_timeout`, and the bound that the documentation says, without its five seconds."""
    if speed == "hung" and state == "idle":  # no request: only the disk is waited for
        return 60.0, FLUSH_PATIENCE
    return 4.0, 4.0


@cache
def seconds_to_end() -> dict[tuple[str, str, str], tuple[float, int]]:
    """Seconds from SIGTERM to the end, and the status, of all cases; they run side by side."""
    folder = Path(os.environ["SHUTDOWN_FOLDER"])
    library = folder / "faulty_disk.so"
    source = ROOT / "tests/support/faulty_disk.c"
    run_program(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"])
    model = save_small_model(folder / "model")
    asked = [
        {"operation": operation, "speed": speed, "state": state, "drain_timeout": bound(*case)[0]}
        for case in CASES
        for operation, speed, state in [case]
    ]
    done = run_program(
        [sys.executable, "-m", "tests.support.faulty_server", model, folder],
        input="\n".join(map(json.dumps, asked)),
        env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
    )
    items: list[dict[str, Any]] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    signals = {item["number"]: item["signal"] for item in items if "signal" in item}
    ends = {item["number"]: item for item in items if "end" in item}
    assert sorted(signals) == sorted(ends) == list(range(len(CASES))), done.stderr[-3000:]
    return {
        case: (ends[number]["end"] - signals[number], ends[number]["status"])
        for number, case in enumerate(CASES)
    }


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    os.environ["SHUTDOWN_FOLDER"] = str(tmp_path_factory.mktemp("shutdown"))
    yield
    del os.environ["SHUTDOWN_FOLDER"]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_server_ends_within_its_bound(case: tuple[str, str, str]) -> None:
    seconds, status = seconds_to_end()[case]
    assert status == 0
    assert seconds <= bound(*case)[1] + SLACK
