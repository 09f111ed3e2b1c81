"""Tests that import what is not installed are skipped; an import by the package is a failure."""

import sys

import pytest

from tests.support import without_torch


def raised(code: str, file: str) -> ModuleNotFoundError:
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(compile(code, file, "exec"), {})
    return caught.value


@pytest.mark.parametrize(
    ("file", "library", "why"),
    [
        ("tests/unit/test_a.py", "torch", "torch is not installed"),
        ("pyengine/engine/core.py", "torch", None),
        ("tests/unit/test_a.py", "torhc", None),
    ],
)
def test_the_importer_decides(
    file: str, library: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(without_torch, "MISSING", frozenset({"torch"}))
    error = raised(f"import {library}.nn", str(without_torch.ROOT / file))
    assert without_torch.reason(error) == why
    outer = RuntimeError("while a file was collected")
    outer.__cause__ = error
    assert without_torch.reason(outer) == why
    assert without_torch.reason(ValueError("another error")) is None
