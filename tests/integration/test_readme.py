"""The README's code runs, prints what it says, and names commands that exist."""

import json
import re

import pytest
from typer.testing import CliRunner

from benches.engine import end_to_end
from benches.engine.end_to_end import Record
from benches.peers import pages
from benches.peers.report import RESULTS
from pyengine.cli.app import app
from tests.support import docs
from tests.support.docs import ROOT, printed, run


def blocks(language: str) -> list[str]:
    return docs.blocks("README.md", language)


def commands() -> list[list[str]]:
    return docs.commands("README.md")


def python_blocks() -> list[object]:
    marks = [[pytest.mark.slow] if "LLM" in code else [] for code in blocks("python")]
    return [
        pytest.param(code, marks=mark, id=str(number))
        for number, (code, mark) in enumerate(zip(blocks("python"), marks, strict=True))
    ]


def test_there_is_something_to_run() -> None:
    assert len(blocks("python")) >= 2
    assert any("BlockManager" in code for code in blocks("python"))
    assert any("LLM(" in code for code in blocks("python"))
    assert commands() == [["make", "hello"], ["make", "serve"]]


@pytest.mark.parametrize("code", python_blocks())
def test_python_block_prints_what_it_says(code: str) -> None:
    expected = printed(code)
    assert expected, "a block of the README prints nothing that could be checked"
    assert run(code).splitlines() == expected


def test_the_block_manager_needs_no_torch() -> None:
    code = next(code for code in blocks("python") if "BlockManager" in code)
    assert run(code + "\nimport sys; print('torch' in sys.modules)").splitlines()[-1] == "False"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [words[1] for words in commands() if words[0] == "make"]
    assert asked
    assert set(asked) <= targets


def test_pyengine_commands_and_options_exist() -> None:
    shown_on = ("docs/tutorial/run.md", "docs/tutorial/serve.md")
    found = [words for page in shown_on for words in docs.commands(page)]
    asked = [words for words in found if words[0].endswith("pyengine")]
    assert asked
    for words in asked:
        shown = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, words
        for option in (word for word in words if word.startswith("--")):
            assert option in shown.output, words


def test_it_is_one_screen_and_then_figures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    screen, _, figures = text.partition("\n## Figures\n")
    assert len(screen.splitlines()) <= 62
    assert "has not run on a GPU" in " ".join(screen.split())
    assert figures.count("\n|") > 10


def test_the_figures_of_the_benefits_are_those_of_the_results() -> None:
    screen = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    work = end_to_end.WORKS[6].name
    assert work == "32 x (512 identical in, 32 out)"
    found = Record(RESULTS / "end-to-end-epyc-avx512.json", keep=True)
    rows = [row.split("|") for row in end_to_end.summary(found) if row.startswith(f"| {work} ")]
    [[_, _, _, bfloat16, *_]] = rows
    assert f"give {bfloat16.strip()} times the tokens per second of vLLM in bfloat16" in screen
    inside = json.loads((RESULTS / "vllm-end-to-end-xeon-amx.json").read_text())
    assert inside["about"]["dtype"] == "float32"
    assert f"it gives {inside['rows'][work]['128']['ratio']:.2f} times the tokens" in screen
    peers = json.loads((RESULTS / "peers-xeon-amx.json").read_text())
    row = next(row for row in pages.readme([peers]) if row.startswith("| decode step"))
    ratio = row.split("|")[3].partition(";")[0].strip()
    assert f"takes 1/{ratio} of the time of vLLM's block manager" in screen
