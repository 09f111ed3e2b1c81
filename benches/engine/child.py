"""Engines and servers in separate processes, which answer line by line."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any, Self

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-peers/bin/python"
LLAMA_PYTHON = Path(os.environ.get("LLAMA_PYTHON", ROOT / ".venv-llama/bin/python"))
MISTRAL_PYTHON = Path(os.environ.get("MISTRAL_PYTHON", ROOT / ".venv-mistral/bin/python"))
VLLM_SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
}
"""Environment variables for vLLM, which by default leaves one core free."""
_BEGUN = perf_counter()


def say(text: str) -> None:
    """Print progress with the time."""
    print(f"{perf_counter() - _BEGUN:6.0f} s  {text}", file=sys.stderr, flush=True)


class Child:
    """A process and its children, which end with the context; errors quote its output.

    It answers on standard output, unless it `serves`: then standard output is part of its log,
    since an unread pipe would block it after 64 KiB.
    """

    serves = False

    def __init__(self, command: list[str], **environment: str) -> None:
        self._log = TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=VLLM_SETTINGS | os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=self._log if self.serves else subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def ask(self, question: Any) -> Any:
        """Send a line of JSON, and return the answer. Raises `RuntimeError` without one."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next line of JSON. Raises `RuntimeError` without one."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise self.failed()
        return json.loads(line)

    def log(self) -> list[str]:
        """The lines of its log so far."""
        self._log.seek(0)
        return [line.strip() for line in self._log if line.strip()]

    def failed(self) -> RuntimeError:
        """An error with the first exception in the log, or else its last lines."""
        lines = self.log()
        errors = [line for line in lines if re.search(r"\w+Error: ", line)]
        return RuntimeError(
            f"ended with {self.process.wait()}: {' / '.join(errors[:1] or lines[-3:])}"
        )

    def peak_bytes(self) -> int:
        """The largest resident memory so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return int(peak) * 1024

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with suppress(ProcessLookupError):  # its children, and itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self._log.close()
