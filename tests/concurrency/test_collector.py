"""Finalizers that the garbage collector runs in the middle of a call may call the manager.

A Python object that is made under the manager's lock can start the collector there, and a finalizer
that calls the manager then waits for its own thread: one that does not come back is a failure.
"""

import sys
from pathlib import Path

from tests.support.processes import run_program


def test_finalizers_may_call_the_manager_in_every_call(tmp_path: Path) -> None:
    walk = [sys.executable, "-X", "faulthandler", "-m", "tests.concurrency.collector_walk"]
    assert "members" in run_program([*walk, tmp_path], timeout=60).stdout
