"""Help fits a terminal of 80 columns; completion; standard input as a prompt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyengine.cli.app import app
from tests.support.docs import ROOT
from tests.unit.cli.fakes import FakeEngine

COMMANDS = [
    "",
    *(
        "bench",
        "cache",
        "cache ls",
        "cache prune",
        "cache verify",
        "chat",
        "doctor",
        "explain",
        "generate",
    ),
    *("info", "list", "pull", "serve", "trace", "trace replay"),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns(name: str) -> None:
    environment = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env=environment)
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    _, _, text = shown.stdout.partition("\n")  # after the usage, whose dots mean repetition
    assert "..." not in text.replace("prompt... <", "") and "…" not in text
    assert "[env var:" not in shown.stdout


def test_every_command_is_tested() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {str(group.typer_instance.info.name) for group in app.registered_groups}
    assert names <= set(COMMANDS)


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


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("pyengine d", {"doctor"}),
        ("pyengine generate --max-tok", {"--max-tokens"}),
        ("pyengine cache p", {"prune"}),
    ],
)
def test_bash_completes(typed: str, expected: set[str], tmp_path: Path) -> None:
    """By the script itself, in a bash without the user's configuration."""
    command = tmp_path / "pyengine"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pyengine.cli import main\n"
        "sys.argv[0] = 'pyengine'\nmain()\n"
    )
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    lines = [
        'eval "$(pyengine --completion bash)"',
        f"COMP_WORDS=({typed}); COMP_CWORD={len(typed.split()) - 1}",
        "_pyengine_completion pyengine",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert set(done.stdout.split()) == expected, done.stderr


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
