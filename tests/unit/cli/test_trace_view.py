"""`pyengine trace view`: the address, Ctrl-C, files that are none."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyengine.cli.app import app
from pyengine.kv_cache import BlockManager
from tests.support.blocks import computed
from tests.support.docs import ROOT

MAIN = "from pyengine.cli import main; main()"
BARE = f"import sys; sys.modules.update(typer=None, torch=None, fastapi=None); {MAIN}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    manager = BlockManager(64, 4)
    manager.record(tmp_path / "a.kvtrace")
    for _ in range(4):
        computed(manager, range(10)).free()
    manager.stop_recording()
    return tmp_path / "a.kvtrace"


@pytest.mark.parametrize("code", [MAIN, BARE], ids=["typer", "bare"])
def test_it_serves_until_ctrl_c(file: Path, code: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", code, "trace", "view", str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:")
    assert process.stdout.readline() == "21 operations; Ctrl-C ends it\n"
    with urllib.request.urlopen(f"{url}frame?at=21", timeout=10) as answer:
        assert json.load(answer)["usage"]["free"] == 62
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    process.stdout.close()


def test_a_file_that_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for name, message in (("text", "not a recording"), ("missing", "cannot read")):
        result = CliRunner().invoke(app, ["trace", "view", str(tmp_path / name)])
        assert result.exit_code == 2
        assert message in result.output
