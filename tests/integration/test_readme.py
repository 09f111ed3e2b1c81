"""The README's code runs, prints what it says, and names commands that exist."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
    assert ["make", "hello"] in commands()
    assert ["make", "test"] in commands()


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
    asked = [words for words in commands() if words[0].endswith("pyengine")]
    assert asked
    for words in asked:
        shown = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, words
        for option in (word for word in words if word.startswith("--")):
            assert option in shown.output, words


def test_only_known_programs_are_shown() -> None:
    assert {Path(words[0]).name for words in commands()} <= {"git", "cd", "make", "pyengine", "pip"}
