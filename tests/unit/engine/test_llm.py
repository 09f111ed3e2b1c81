"""What `LLM` says of itself."""

import importlib.metadata

import pytest

from pyengine.engine.llm import _package_version


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert _package_version() == "not installed"
