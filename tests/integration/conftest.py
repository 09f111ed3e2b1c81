"""Models that several of these tests load."""

from pathlib import Path

import pytest

from tests.support.checkpoints import save_tiny
from tests.support.tokenizers import save_words


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few kilobytes with a tokenizer; read-only by convention."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    save_words(folder)
    return folder
