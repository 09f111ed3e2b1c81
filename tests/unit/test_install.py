"""`tools/install.py`: the build of torch and the commands; uv.lock belongs to pyproject.toml."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest

from pyengine.utils.packaging import EMBEDDED_COMMAND
from tests.support.docs import ROOT
from tests.support.processes import run_program
from tools import install

LOCK = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("asked", "has_gpu", "answers", "build"),
    [
        ("auto", False, True, "cpu"),
        ("auto", False, False, "lock"),
        ("auto", True, True, "lock"),
        ("cpu", True, False, "cpu"),
        ("cuda", False, True, "lock"),
    ],
)
def test_the_build_of_torch(
    asked: str, has_gpu: bool, answers: bool, build: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Answer(SimpleNamespace):
        def __enter__(self) -> "Answer":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def urlopen(url: str, timeout: float) -> Answer:
        assert url.startswith("https://") and timeout <= 10
        if not answers:
            raise URLError("no such host")
        return Answer(status=200)

    monkeypatch.setattr(install, "urlopen", urlopen)
    driver = tmp_path if has_gpu else tmp_path / "none"
    assert install.torch_build(asked, driver) == build


def test_another_word_is_refused() -> None:
    with pytest.raises(SystemExit, match="TORCH=rocm: use auto, cpu or cuda"):
        install.torch_build("rocm")


def test_the_lock_is_installed_as_it_is(tmp_path: Path) -> None:
    (command,) = install.commands("uv", "serve", "lock", tmp_path / "r")
    assert command[:2] == ["uv", "sync"]
    assert {"--inexact", "--frozen", "--no-install-project", "--no-default-groups"} <= {*command}
    assert command[-1] == "serve" and "engine" in command and "embedded" in command


@pytest.mark.parametrize("wanted", ["engine", "serve", "dev-light", "docs"])
def test_torch_is_installed_only_where_it_is_wanted(wanted: str, tmp_path: Path) -> None:
    (command,) = install.commands("uv", wanted, "cpu", tmp_path / "r")
    assert "torch" not in command and "--torch-backend" not in command
    assert all("torch" in install.WANTED[each] for each in ("torch", "dev"))


def test_torch_for_cpus_has_the_version_of_the_lock(tmp_path: Path) -> None:
    export, rest, torch = install.commands("uv", "torch", "cpu", tmp_path / "r")
    assert export[:2] == ["uv", "export"] and export[-1] == str(tmp_path / "r")
    assert export[export.index("--prune") + 1] == "torch"
    assert rest[-2:] == ["-r", str(tmp_path / "r")]
    assert torch[-3:-1] == ["--torch-backend", "cpu"]
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", torch[-1])
    assert sys.executable in rest and sys.executable in torch


def test_the_commands_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], *, check: bool, cwd: Path, env: dict[str, str]) -> None:
        assert check and cwd == ROOT and env["UV_PROJECT_ENVIRONMENT"] == sys.prefix
        ran.append(command)

    monkeypatch.setattr(subprocess, "run", run)
    install.main(["dev", "--uv", "/uv", "--torch", "cuda"])
    install.main(["torch", "--uv", "/uv", "--torch", "cpu"])
    install.main(["engine", "--uv", "/uv", "--torch", "cpu"])
    assert [command[:2] for command in ran] == [
        ["/uv", "sync"],
        ["/uv", "export"],
        ["/uv", "pip"],
        ["/uv", "pip"],
        ["/uv", "sync"],
    ]


def test_the_lock_names_the_public_index_only() -> None:
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    hosts = set(re.findall(r"https?://([^/\"]+)", text))
    assert hosts == {"files.pythonhosted.org", "pypi.org"}


def test_the_lock_has_every_requirement_of_pyproject() -> None:
    """`make check` compares all of it (`uv lock --check`)."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = settings["project"]["optional-dependencies"] | settings["dependency-groups"]
    wanted = {
        re.split(r"[\[<>=;~ ]", line)[0].lower().replace("_", "-")
        for lines in groups.values()
        for line in lines
        if isinstance(line, str)
    }
    assert wanted <= {package["name"] for package in LOCK["package"]}


def test_the_default_model_is_named_once() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (embedded,) = settings["dependency-groups"]["embedded"]
    assert EMBEDDED_COMMAND.endswith(f" {embedded}")
    (metadata,) = settings["tool"]["uv"]["dependency-metadata"]
    assert embedded == f"{metadata['name']}=={metadata['version']}"


def test_installing_compiles_bytecode() -> None:
    """Where PYTHONDONTWRITEBYTECODE is set, each start would compile every module again."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["uv"]["compile-bytecode"]
    plan = run_program(["make", "-n", "-B", "hello"]).stdout
    compiling = plan.index("-m compileall -q pyengine")
    assert plan.index("maturin develop") < compiling < plan.index("pyengine generate")


def test_building_prints_no_line_for_each_library_of_an_extra() -> None:
    """maturin gives pip the libraries of all extras: it names what it leaves out, unless quiet."""
    plan = run_program(["make", "-n", "-B", ".venv/.built"])
    [line] = [each for each in plan.stdout.splitlines() if "maturin develop" in each]
    settings = dict(word.split("=", 1) for word in line.split() if re.match(r"[A-Z_]+=", word))

    install = [sys.executable, "-m", "pip", "--no-input", "install", "--no-index"]
    variables = os.environ | settings
    done = run_program([*install, "left-out; extra == 'bench'"], env=variables)
    assert (done.stdout, done.stderr) == ("", "")
    failed = run_program([*install, "there-is-no-such-distribution"], env=variables, status=1)
    assert "ERROR: No matching distribution" in failed.stderr
