"""Models that several of these tests load."""

from pathlib import Path

import pytest

from tests.unit.models.tiny import save_tiny_model, save_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few kilobytes with a tokenizer; read-only by convention."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    return folder
