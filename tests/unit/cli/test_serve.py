"""`pyengine serve` where it cannot serve: a sentence, before a model is loaded."""

import sys

import pytest
from typer.testing import CliRunner

from pyengine.cli.app import app
from pyengine.utils.packaging import needs_extra
from tests.support.processes import run_python


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_its_libraries_it_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['pyengine', 'serve']; "
        "from pyengine.cli import main; main()"
    )
    done = run_python(code, status=1)
    assert (
        done.stderr == f"starting ...\nerror: {needs_extra('serve', 'pyengine serve', missing)}\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--port 65536", "--port 65536"),
        ("--host no.such.host.invalid", "cannot listen on --host no.such.host.invalid"),
        ("--uds /no/such/folder/socket", "cannot listen on --uds /no/such/folder/socket"),
        ("--ssl-keyfile x", "belong together"),
        ("--host 0.0.0.0", "--host 0.0.0.0 is reachable from other machines"),
        ("--host :: --port 0", "--insecure"),
        ("--max-num-waiting 0", "--max-num-waiting 0"),
    ],
)
def test_settings_that_cannot_be(options: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("pyengine.cli.serve.open_async_engine", never)
    result = CliRunner().invoke(app, ["serve", *options.split()])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ") and words in result.stderr


@pytest.mark.parametrize(
    ("replicas", "status", "words"),
    [
        ("0", 2, "greater than or equal to 1"),
        ("-1", 2, "greater than or equal to 1"),
        ("two", 2, "valid integer"),
        ("2", 1, "ray"),
        ("1000000", 2, "less than or equal to 64"),
    ],
)
def test_replicas_that_cannot_be(
    replicas: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--replicas", replicas])
    assert result.exit_code == status
    said = " ".join(result.stderr.replace("│", " ").split())
    assert words in said and "Traceback" not in said
