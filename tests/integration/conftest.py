"""Models and engines that several of these tests use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyengine.async_engine import AsyncEngine
from tests.support.checkpoints import save_tiny
from tests.support.serving import open_small_engine
from tests.support.tokenizers import save_words


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[AsyncEngine]:
    """An engine for all tests of a file."""
    with open_small_engine(small_model) as engine:
        yield engine


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few kilobytes with a tokenizer; read-only by convention."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    save_words(folder)
    return folder
