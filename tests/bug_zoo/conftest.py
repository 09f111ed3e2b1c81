"""Pools whose operations are recorded."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyengine.kv_cache import BlockManager, replay
from tests.bug_zoo.simulation import Pool
from tests.support.docs import ROOT

RECORDINGS = ROOT / "target" / "bug_zoo"


@pytest.fixture
def new_pool(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pool]]:
    """Makes the pool of a case and records it: `pyengine trace view target/bug_zoo/NAME.kvtrace`.

    At the end the manager is sound, and a replay of the recording gives the same answers.
    """
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    path = Path(RECORDINGS, request.node.name.removeprefix("test_")).with_suffix(".kvtrace")
    made: list[BlockManager] = []

    def make(num_blocks: int, block_size: int = 4, **settings: Any) -> Pool:
        assert not made, "one pool for each case"
        made.append(BlockManager(num_blocks, block_size, **settings))
        made[0].record(path)
        return Pool(made[0])

    yield make
    [manager] = made
    manager.check()
    manager.stop_recording()
    report = replay(path)
    assert (report.divergence, report.failed_check, report.is_complete) == (None, None, True)
    assert report.usage == manager.usage()
