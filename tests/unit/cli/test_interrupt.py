"""Ctrl-C while libraries are imported ends the process at once; what is ignored stays ignored."""

import pytest

from tests.support.processes import run_python

CODE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.{before})
from pyengine.cli.status import interruptible_imports
with interruptible_imports():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # as C extensions catch it
        pass
    print("through")
print(signal.getsignal(signal.SIGINT) is signal.{before})
"""


def run(before: str, status: int) -> str:
    """The output of both streams."""
    done = run_python(CODE.replace("{before}", before), status=status)
    return done.stdout + done.stderr


def test_the_process_ends_at_once_without_a_traceback() -> None:
    assert run("default_int_handler", status=130) == "\ninterrupted\n"


def test_what_is_ignored_stays_ignored() -> None:
    assert run("SIG_IGN", status=0) == "through\nTrue\n"


@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_a_command_that_is_interrupted_while_it_imports(module: str) -> None:
    """Ctrl-C comes when this module is looked for, and the one who looks ignores exceptions."""
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass
sys.meta_path.insert(0, Finder())
sys.argv = ["pyengine", "list"]
from pyengine.cli import main
main()
"""
    done = run_python(code, status=130)
    assert (done.stdout, done.stderr) == ("", "\ninterrupted\n")
