"""`make gpu-check` on a CPU: some of its checks, what it writes down, and docs/guides/gpu.md."""

import re
from pathlib import Path
from shutil import which

import pytest

from benches.gpu.model import SHAPES
from tests.gpu.models import FAMILIES
from tests.support.docs import ROOT, commands, table
from tests.support.gpu_checks import checked

DOCUMENT = "docs/guides/gpu.md"


@pytest.mark.gpu
@pytest.mark.slow
def test_the_checks_pass_on_a_cpu(tmp_path: Path) -> None:
    wanted = "gather-mistral or window or flashinfer-llama"
    status, page = checked("--device", "cpu", "-k", wanted, report=tmp_path / "out" / "checks.md")
    assert status == 0, page
    error, bound = figures(page, "gather-mistral]")
    assert 0 < error <= bound
    error, bound = figures(page, "test_a_window")
    assert error > bound
    assert re.search(r"^- skipped .*flashinfer-llama.*cannot serve: it runs on cuda", page, re.M)


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="torch's compiler needs a C++ compiler")
def test_the_default_configuration_is_right_on_a_cpu(tmp_path: Path) -> None:
    """Of one family, as it is compiled; `make gpu-tests` checks three."""
    wanted = "test_the_default_configuration and llama"
    status, page = checked("--device", "cpu", "-k", wanted, report=tmp_path / "checks.md")
    assert status == 0, page
    error, bound = figures(page, "oracle_up_to_rounding[llama]")
    assert 0 < error <= bound


def figures(page: str, check: str) -> tuple[float, float]:
    """The error of a check that passed, and its bound."""
    (line,) = re.findall(rf"^- passed .*{re.escape(check)}.*$", page, re.MULTILINE)
    error, bound = (re.findall(rf"\b{name} ([\d.]+)", line)[0] for name in ("error", "bound"))
    return float(error), float(bound)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_device_that_is_not_there_is_a_failure_that_is_written_down(tmp_path: Path) -> None:
    wanted = "test_the_first_use_of_a_backend and gather"
    status, page = checked("--device", "cuda:63", "-k", wanted, report=tmp_path / "checks.md")
    assert status == 1
    assert "- failed test_backends.py::test_the_first_use_of_a_backend[gather]" in page
    assert "Error" in page


def test_the_page_names_what_there_is() -> None:
    said = {row[0] for row in table(DOCUMENT, "tests/gpu", "what must hold")}
    assert said == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    text = (ROOT / DOCUMENT).read_text()
    _, _, families = text.partition("in bfloat16: ")
    assert set(re.findall(r"\w+", families.partition(".")[0])) == set(FAMILIES)
    for shape in ("Qwen3-0.6B", "Llama-3.1-8B"):
        assert shape in text and shape in SHAPES
    assert "Not yet run on a GPU" in text


def test_the_page_s_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    asked = commands(DOCUMENT)
    assert len(asked) == 5
    for words in asked:
        if words[0] == "make":
            assert words[1] in targets
        else:  # as make calls it
            command = " ".join(words[2:]).split("--device")[0]
            assert f"{command}--device $(DEVICE)" in makefile
