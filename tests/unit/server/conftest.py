"""One small engine for all tests of the server; each test leaves nothing of it behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyengine.async_engine import AsyncEngine
from tests.support.serving import Client, assert_nothing_runs, make_client, open_small_engine


@pytest.fixture(scope="package")
def small_engine(small_model: Path) -> Iterator[AsyncEngine]:
    with open_small_engine(small_model) as engine:
        yield engine


@pytest.fixture
def engine(small_engine: AsyncEngine) -> Iterator[AsyncEngine]:
    yield small_engine
    assert_nothing_runs(small_engine)


@pytest.fixture
def client(engine: AsyncEngine) -> Iterator[Client]:
    client = make_client(engine)
    yield client
    assert client.context.live == {} and client.context.num_open == 0
