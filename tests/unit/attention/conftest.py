"""Small models run fastest on one thread, which leaves the other cores to other tests."""

from collections.abc import Iterator

import pytest

from pyengine.utils.openmp import torch_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield
