"""The distribution's name is the same everywhere, and no text names another project."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from pyengine.errors import ConfigurationError
from pyengine.utils import packaging as distribution

ROOT = Path(__file__).parents[3]


def test_the_name_is_the_one_of_pyproject() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["name"] == distribution.DISTRIBUTION


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_oldest_version_is_written_once(name: str) -> None:
    """pyproject.toml requires the versions that the page on dependencies explains."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (version,) = [
        item.removeprefix(f"{name}>=")
        for item in settings["project"]["optional-dependencies"]["torch"]
        if item.startswith(f"{name}>")
    ]
    page = (ROOT / "docs/explanation/dependencies.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `torch` | {name} |")]
    assert re.findall(r"from ([\d.]+),", row) == [version]


def test_what_needs_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    distribution.require_torch("this family", "transformers")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigurationError) as raised:
        distribution.require_torch("compile=True")
    assert str(raised.value) == distribution.needs_extra("torch", "compile=True", "torch")
    assert "compile=True needs torch, of the extra 'torch'" in str(raised.value)
    assert "whl[engine,torch]'" in str(raised.value)


def test_the_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 7")
    assert distribution.package_version() == "pyengine-kv 7"


def test_sources_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert distribution.package_version() == "unknown"


def test_no_hint_names_a_distribution_of_somebody_else() -> None:
    folders = ("pyengine", "docs", "benches", "tools")
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    files += [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    texts = {path: path.read_text() for path in files if path.suffix in {".py", ".md", ""}}
    wrong = [
        f"{path}: {line}"
        for path, text in texts.items()
        for line in text.splitlines()
        if re.search(r"""\bpyengine\[|pip install ['"]?pyengine\b(?!-kv|_kv)""", line)
        or re.search(r"""version\(['"]pyengine['"]\)""", line)
    ]
    assert len(texts) > 60
    assert wrong == []
