"""Help fits a terminal of 80 columns; completion; standard input as a prompt."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pyengine.cli.app import app
from pyengine.cli.options import PANELS
from tests.support.docs import ROOT
from tests.support.processes import run_program
from tests.unit.cli.fakes import FakeEngine


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a command and of all commands below it."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


@pytest.mark.parametrize("words", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_help_fits_80_columns(words: tuple[str, ...]) -> None:
    environment = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    shown = CliRunner().invoke(app, [*words, "--help"], env=environment)
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    _, _, text = shown.stdout.partition("\n")  # after the usage, whose dots mean repetition
    assert "..." not in text.replace("prompt... <", "") and "…" not in text
    assert "[env var:" not in shown.stdout


def test_options_are_below_headings_in_their_order() -> None:
    shown = CliRunner().invoke(app, ["serve", "-h"]).stdout
    headings = re.findall(r"^(\w+):$", shown, re.MULTILINE)
    assert headings == ["Arguments", *PANELS]
    assert "linear_backend" not in shown  # an option in the help of another


def test_help_is_as_wide_as_the_terminal() -> None:
    code = "from pyengine.cli import main; main()"
    widths = []
    for columns in (80, 110):
        environment = os.environ | {"COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, "info", "-h"]
        shown = subprocess.check_output(command, text=True, env=environment)
        widths.append(max(map(len, shown.splitlines())))
    assert widths[0] <= 80 < widths[1] <= 110


def test_an_option_may_be_in_the_environment() -> None:
    engine = FakeEngine()
    environment = {"PYENGINE_GENERATE_MAX_TOKENS": "7"}
    result = CliRunner().invoke(app, ["generate", "hi"], obj=engine.open, env=environment)
    assert result.exit_code == 0, result.output
    assert engine.params is not None and engine.params.max_tokens == 7


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script(shell: str) -> None:
    result = CliRunner().invoke(app, ["--completion", shell])
    assert result.exit_code == 0
    assert f"_PYENGINE_COMPLETE=complete_{shell}" in result.stdout


def test_another_shell_is_refused() -> None:
    assert CliRunner().invoke(app, ["--completion", "ksh"]).exit_code == 2


COMPLETIONS = pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("pyengine d", "doctor"),
        ("pyengine generate --max-tok", "--max-tokens"),
        ("pyengine generate --dtype bf", "bfloat16"),
        ("pyengine cache p", "prune"),
    ],
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where a shell finds `pyengine`."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "pyengine"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pyengine.cli import main\n"
        "sys.argv[0] = 'pyengine'\nmain()\n"
    )
    command.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def output_of(shell: str, *options: str, lines: list[str], environment: dict[str, str]) -> str:
    """The output of lines in a shell without the user's configuration."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = [shell, *options, "-c", "\n".join(lines)]
    return run_program(command, env=environment, timeout=60).stdout


@COMPLETIONS
def test_bash_completes(typed: str, expected: str, environment: dict[str, str]) -> None:
    lines = [
        'eval "$(pyengine --completion bash)"',
        f"COMP_WORDS=({typed}); COMP_CWORD={len(typed.split()) - 1}",
        "_pyengine_completion pyengine",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    assert output_of("bash", "--norc", lines=lines, environment=environment).split() == [expected]


@COMPLETIONS
def test_fish_completes(typed: str, expected: str, environment: dict[str, str]) -> None:
    lines = ["pyengine --completion fish | source", f"complete --do-complete '{typed}'"]
    shown = output_of("fish", "--no-config", lines=lines, environment=environment)
    (line,) = shown.splitlines()
    name, _, description = line.partition("\t")
    assert name == expected
    assert description  # of the command or option


@COMPLETIONS
def test_zsh_completes(typed: str, expected: str, environment: dict[str, str]) -> None:
    """Its completion needs a line editor: a second zsh in a terminal, where a tab is typed."""
    done = f"{typed.rpartition(' ')[0]} {expected} "
    lines = [
        "zmodload zsh/zpty",
        "zpty shell env TERM=dumb COLUMNS=200 zsh -f -i",
        r"""zpty -w shell 'PS1=; autoload -Uz compinit; compinit -D -u'""",
        r"""zpty -w shell 'eval "$(pyengine --completion zsh)"; echo rea""dy'""",
        r"zpty -r -m shell shown $'*ready\r\n*'",
        rf"zpty -w -n shell '{typed}'$'\t'",
        f"zpty -r -m shell shown '*{done}*' && print completed",
    ]
    assert output_of("zsh", "-f", lines=lines, environment=environment).split() == ["completed"]


def answered(*arguments: str, text: str) -> FakeEngine:
    engine = FakeEngine(chat_template=None)
    result = CliRunner().invoke(app, ["generate", *arguments], obj=engine.open, input=text)
    assert result.exit_code == 0, result.output
    return engine


def test_standard_input_is_one_prompt() -> None:
    assert answered("-", text="two\nlines\n").seen == ["two\nlines"]
    assert answered("-", text="no line end").seen == ["no line end"]
    assert answered("first", "-", text="second\r\n").seen == ["first", "second"]


@pytest.mark.parametrize(
    ("arguments", "text", "words"),
    [
        (["-"], "", "prompt 1 is empty"),
        (["-"], " \n", "prompt 1 is empty"),
        (["-", "-"], "a", "give - once"),
        ([], "a", "- is standard input"),
    ],
)
def test_standard_input_that_is_no_prompt(arguments: list[str], text: str, words: str) -> None:
    engine = FakeEngine()
    result = CliRunner().invoke(app, ["generate", *arguments], obj=engine.open, input=text)
    assert result.exit_code == 2
    assert words in result.stderr
    assert engine.settings is None


def test_too_much_on_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyengine.cli.prompts.LONGEST_LINE", 8)
    result = CliRunner().invoke(app, ["generate", "-"], obj=FakeEngine().open, input="a" * 9)
    assert result.exit_code == 2
    assert "standard input has more than" in result.stderr
