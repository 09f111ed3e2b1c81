"""`pyengine info`, the root command, and the door in front of them."""

import re

import pytest
from typer.testing import CliRunner

import pyengine
from pyengine.cli.app import app
from pyengine.errors import ConfigurationError
from pyengine.utils.packaging import needs_extra
from tests.support.processes import run_python
from tests.unit.cli.fakes import FakeEngine


def test_info_prints_versions_and_the_backend_with_its_reason() -> None:
    result = CliRunner().invoke(app, ["info"], obj=FakeEngine().open)
    assert result.exit_code == 0, result.output
    rows = dict(
        line.strip().split("  ", 1) for line in result.stdout.splitlines() if line.startswith("  ")
    )
    assert rows["pyengine"].strip() == pyengine.__version__
    assert rows["device"].strip() == "cpu"
    assert rows["attention: backend"].strip() == "gather"
    assert rows["attention: reason"].strip() == "the device is a CPU"
    assert rows["model path"].strip() == "models/fake"


def test_info_keeps_the_versions_when_no_engine_comes_up() -> None:
    def broken(options: object) -> FakeEngine:
        raise ConfigurationError("attention_backend='x' is unknown")

    result = CliRunner().invoke(app, ["info"], obj=broken)
    assert result.exit_code == 1
    assert "python" in result.stdout
    assert result.stderr == "error: --attention-backend x is unknown\n"


def test_version_and_help() -> None:
    version = CliRunner().invoke(app, ["--version"])
    assert (version.exit_code, version.stdout) == (0, f"pyengine {pyengine.__version__}\n")
    shown = CliRunner().invoke(app, ["--help"])
    assert all(name in shown.output for name in ("generate", "chat", "info"))


def test_help_is_a_command_too() -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.stdout

    assert said("-V") == said("--version")
    assert said("-h") == said("--help")
    assert said("help").startswith(said("--help"))
    assert said("help", "generate") == said("generate", "-h")
    assert said("help", "cache", "ls") == said("cache", "ls", "--help")
    models = said("help", "models").splitlines()[1:]
    assert len(models) == 3
    assert all(re.fullmatch(r"\S+/\S+:\S+\.gguf +[\d.]+ GB +\d+ GB", line) for line in models)


def test_help_names_the_address_that_the_distribution_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyengine.cli.app.documentation", lambda: "https://example.org/docs")
    assert "https://example.org/docs" in CliRunner().invoke(app, ["help"]).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "llama3"], "use `pyengine chat`, or `pyengine generate PROMPT`"),
        (["ls"], "use `pyengine list`"),
        (["genrate"], "Did you mean 'generate'?"),
        (["help", "genrate"], "Did you mean 'generate'?"),
        (["help", "run"], "use `pyengine chat`"),
    ],
)
def test_commands_that_are_none(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and said in result.stderr


def test_without_typer_the_extra_is_named() -> None:
    code = "import sys; sys.modules['typer'] = None; from pyengine.cli import main; main()"
    done = run_python(code, status=1)
    assert done.stderr == f"error: {needs_extra('engine', 'the command line', 'typer')}\n"
