"""How the process of a command ends: everything closed and said, and nothing taken to pieces."""

import pytest

from tests.support.processes import run_python

CODE = """
import atexit, sys, threading, time, types
from pyengine.cli import main
from tests.unit.cli.fakes import FakeEngine

class Heavy:
    def __del__(self):
        print("taken to pieces")

def work():
    time.sleep(0.3)
    print("thread has ended")

heavy = Heavy()
loaded, *sys.argv[1:] = sys.argv[1:]
if loaded == "torch":
    sys.modules["torch"] = types.ModuleType("torch")
def open(settings):
    threading.Thread(target=work).start()
    atexit.register(print, "closed")
    return FakeEngine(chat_template="t").open(settings)
main(open)
"""


def ended(*arguments: str) -> tuple[int, list[str]]:
    done = run_python(CODE, *arguments, status=None)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.splitlines()[-3:]


def test_where_torch_was_loaded_it_ends_at_once_when_all_is_closed() -> None:
    status, said = ended("torch", "generate", "hi")
    assert (status, said[1:]) == (0, ["thread has ended", "closed"])


def test_else_as_ever() -> None:
    assert ended("none", "generate", "hi") == (0, ["thread has ended", "closed", "taken to pieces"])


@pytest.mark.parametrize(("arguments", "status"), [(("--no-such",), 2), (("--help",), 0)])
def test_the_status_is_the_commands(arguments: tuple[str, ...], status: int) -> None:
    assert ended("torch", "generate", *arguments)[0] == status
