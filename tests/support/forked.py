"""Children that have torch and transformers from the start, where these are installed.

They are forks of a process that imported them.

For code that needs a new process but no new interpreter: importing both takes
seconds. These libraries read the environment of the tests when they are imported.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, ended_with


def run_forked(
    code: str,
    *arguments: str,
    input: str = "",
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    status: int | None = 0,
) -> "subprocess.CompletedProcess[str]":
    """Run `code` as `run_python` does; one that takes longer is killed (status -9)."""
    parent = _parent()
    assert parent.stdin is not None and parent.stdout is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "0").write_text(input)
        asked = {
            "code": code,
            "arguments": arguments,
            "env": dict(os.environ if env is None else env),
            "folder": name,
            "timeout": timeout,
        }
        print(json.dumps(asked), file=parent.stdin, flush=True)
        reached = int(parent.stdout.readline())
        output, errors = (folder / "1").read_text(), (folder / "2").read_text()
    done = subprocess.CompletedProcess([code, *arguments], reached, output, errors)
    return ended_with(status, done)


@cache
def _parent() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )

    def end() -> None:
        process.communicate()

    atexit.register(end)
    return process


def _serve() -> None:
    """Fork for each line of standard input, and answer with the status."""
    import pyengine.models.loader

    if find_spec("torch") is not None:
        import safetensors.torch  # noqa: F401
        import torch._dynamo  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

        import pyengine.executor.tensor_parallel.distributed  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _be_child(asked)
        print(_status(child, asked["timeout"]), flush=True)


def _be_child(asked: dict[str, Any]) -> None:
    """Run the code on files in place of the standard streams; does not return."""
    status = 1
    try:
        for number in range(3):
            flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
            file = os.open(f"{asked['folder']}/{number}", flags, 0o600)
            os.dup2(file, number)
            os.close(file)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.argv = ["-c", *asked["arguments"]]
        os.environ.clear()
        os.environ.update(asked["env"])
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(child: int, timeout: float) -> int:
    """The exit status of a child, as `subprocess` has it."""
    end = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


if __name__ == "__main__":
    _serve()
