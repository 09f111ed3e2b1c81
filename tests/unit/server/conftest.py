"""One small engine for all tests of the server; each test leaves nothing of it behind."""

from collections.abc import Iterator

import pytest

from pyengine.async_engine import AsyncEngine
from tests.support.serving import (
    Client,
    assert_nothing_runs,
    make_client,
    open_small_engine,
    save_small_model,
)


@pytest.fixture(scope="package")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    folder = save_small_model(tmp_path_factory.mktemp("served"))
    with open_small_engine(folder) as engine:
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
