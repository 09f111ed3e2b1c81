"""The README's code runs, prints what it says, and names commands that exist."""

import json
import re

import pytest
from typer.testing import CliRunner

from benches.engine import end_to_end
from benches.engine.end_to_end import Record
from benches.peers import goals
from benches.peers.report import RESULTS
from pyengine.cli.app import app
from tests.support import docs
from tests.support.docs import ROOT, printed, run


def blocks(language: str) -> list[str]:
    return docs.blocks("README.md", language)


def commands() -> list[list[str]]:
    return docs.commands("README.md")


def test_it_names_two_commands() -> None:
    assert commands() == [["make", "hello"], ["make", "serve"]]


@pytest.mark.slow
def test_six_lines_of_code_print_what_they_say() -> None:
    [code] = blocks("python")
    assert len(code.splitlines()) == 6
    assert run(code).splitlines() == printed(code) == ["[False, True]"]


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


def test_it_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 62
    assert "has not run on a GPU" in " ".join(text.split())


def test_its_three_numbers_are_those_of_the_results() -> None:
    screen = (ROOT / "README.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^\| \*\*(?:1/)?([\d.]+)\*\* \|", screen, re.MULTILINE)
    work = end_to_end.WORKS[6].name
    assert work == "32 x (512 identical in, 32 out)"
    found = Record(RESULTS / "end-to-end-epyc-avx512.json", keep=True)
    rows = [row.split("|") for row in end_to_end.summary(found) if row.startswith(f"| {work} ")]
    [[_, _, _, bfloat16, *_]] = rows
    inside = json.loads((RESULTS / "vllm-end-to-end-xeon-amx.json").read_text())
    assert inside["about"]["dtype"] == "float32"
    small, default = (inside["rows"][work][size]["ratio"] for size in ("32", "128"))
    assert f"blocks of 128 ({small:.2f} with blocks of 32)" in screen
    peers = json.loads((RESULTS / "peers-xeon-amx.json").read_text())
    [step] = [
        goal for goal in goals.SPEED if goal.text.startswith("decode") and goal.peer == goals.VLLM
    ]
    decode = goals.speed(step, peers["works"]).measured.partition("x ")[0]
    assert numbers == [bfloat16.strip(), f"{default:.2f}", decode]
