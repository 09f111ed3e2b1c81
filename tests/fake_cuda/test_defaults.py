"""The default configuration compiled for the CPU, where it computes: the oracle's tokens."""

from pathlib import Path

import pytest

from tests.gpu.test_defaults import FAMILIES
from tests.support.gpu_checks import checked


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_configuration_is_right_on_a_cpu(family: str, tmp_path: Path) -> None:
    wanted = f"test_the_default_configuration and {family}]"
    status, page = checked("--device", "cpu", "-k", wanted, report=tmp_path / "checks.md")
    assert status == 0, page
    assert "- passed test_defaults.py::test_the_default_configuration_is_the_oracle" in page
