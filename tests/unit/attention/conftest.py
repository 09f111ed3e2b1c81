"""Small models run fastest on one thread, and leave the other cores to others."""

from collections.abc import Iterator

import pytest

from pyengine.utils.openmp import torch_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield
