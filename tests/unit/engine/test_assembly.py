"""What an engine is told about itself."""

import pytest

from pyengine.engine import assembly


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise assembly.PackageNotFoundError(name)

    monkeypatch.setattr(assembly, "version", missing)
    assert assembly.package_version() == "unknown"
