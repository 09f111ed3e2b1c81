"""What needs no model answers at once: neither torch nor transformers is imported."""

import sys
from pathlib import Path

import pytest

from tests.support.docs import ROOT
from tests.support.processes import run_program

MOST_SECONDS = 2.0
"""Of processor time; an idle machine takes a third of it."""

CODE = """
import atexit, sys, time
def end():
    heavy = {"torch", "transformers"} & sys.modules.keys()
    print("ended", time.process_time(), *heavy)
atexit.register(end)
from pyengine.cli import main
sys.argv[0] = "pyengine"
main()
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["list"], 0),
        (["explain", "a.txt", "b.txt"], 0),
        (["generate", "Hi", "--dtype", "bf16"], 1),
        (["chat", "--quantization", "int3"], 1),
        (["serve", "--eviction", "fifo"], 1),
        (["generate", "Hi", "--temprature", "1"], 2),
        (["info", "--max-num-seqs", "many"], 2),
        (["genrate"], 2),
        (["help", "serve"], 0),
        (["-V"], 0),
    ],
)
def test_it_answers_at_once(arguments: list[str], status: int, tmp_path: Path) -> None:
    for name, text in (("a.txt", "What is a cat?"), ("b.txt", "What is a dog?")):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{CODE}"]
    done = run_program([*command, *arguments], status=status, cwd=tmp_path)
    _, seconds, *heavy = done.stdout.splitlines()[-1].split()
    assert heavy == []
    assert float(seconds) < MOST_SECONDS
    assert "Traceback" not in done.stderr


def test_python_runs_the_package_like_the_command() -> None:
    done = run_program([sys.executable, "-m", "pyengine", "genrate"], status=2)
    assert "generate" in done.stderr
    assert "Traceback" not in done.stderr
