"""Shared by all comparisons with vLLM."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of a run are written."""
    return tmp_path_factory.mktemp("models")
