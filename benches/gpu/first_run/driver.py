"""Runs parts as child processes, each with a time limit, and writes a line for each."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

from benches.gpu.first_run.parts import Part
from benches.gpu.first_run.results import append

ROOT = Path(__file__).parents[3]
_POLL, _GRACE, _LEAST = 0.05, 3.0, 8.0
"""Seconds: between two looks at the children, from SIGTERM to SIGKILL, and for a part at least."""
_ERROR = re.compile(r"error|assert|FAILED|killed", re.IGNORECASE)


@dataclass
class Running:
    """A part that runs, in a separate process group."""

    part: Part
    process: subprocess.Popen[bytes]
    begin: float
    limit: float
    log: Path

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return monotonic() - self.begin

    def end(self, grace: float = _GRACE) -> None:
        """End the process and all that it started, by SIGKILL after `grace` seconds."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def last_error(self) -> str:
        """The last line of the log that speaks of an error."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return next((line.strip()[:200] for line in reversed(lines) if _ERROR.search(line)), "")


@dataclass
class Driver:
    """A run: its device, its folders and its time."""

    device: str
    out: Path
    scratch: Path
    environment: Mapping[str, str]
    minutes: float
    jobs: int = 6
    slow: float = 1.0
    """A factor for the limits of parts."""
    failed: list[str] = field(default_factory=list)
    _begin: float = field(default_factory=monotonic)
    _running: list[Running] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        """The folder with a log for each part."""
        return self.scratch / "logs"

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return monotonic() - self._begin

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return 60 * self.minutes - self.seconds

    def note(self, words: str) -> None:
        """Add a line to summary.md, and print it."""
        line = f"- {self.seconds:4.0f} s  {words}"
        print(line, flush=True)
        append(self.out / "summary.md", line)

    def run(self, parts: Sequence[Part], after_each: Callable[[], None] = lambda: None) -> None:
        """Run parts in their order; none is left when it returns, or raises."""
        waiting, done = list(parts), set[str]()
        selected = {part.name for part in parts}
        try:
            while waiting or self._running:
                for running in [item for item in self._running if self._is_over(item)]:
                    self._running.remove(running)
                    done.add(running.part.name)
                    after_each()
                while waiting and self._may_start(waiting[0], done, selected):
                    part = waiting.pop(0)
                    if self.left < _LEAST:
                        self.note(f"not run  {part.name}: out of time")
                        done.add(part.name)
                    else:
                        self._start(part)
                sleep(_POLL)
        finally:
            for running in self._running:
                running.end(grace=0)
                self.note(f"cut off  {running.part.name} ({running.seconds:.0f} s)")
                self.failed.append(running.part.name)
            self._running.clear()

    def command(self, part: Part, folder: Path) -> list[str]:
        """The command of a part, whose own folder is `folder`."""
        program = [sys.executable, "-m", "benches.gpu.first_run.part"]
        return [*program, part.name, self.device, str(self.out), str(folder)]

    def _may_start(self, part: Part, done: set[str], selected: set[str]) -> bool:
        if part.alone or any(running.part.alone for running in self._running):
            return not self._running
        return len(self._running) < self.jobs and not (set(part.after) & selected) - done

    def _start(self, part: Part) -> None:
        folder = self.scratch / part.name
        folder.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{part.name}.log"
        environment = dict(self.environment)
        if part.is_interpreted and self.device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(part, folder),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        limit = min(part.seconds * self.slow, self.left)
        self._running.append(Running(part, process, monotonic(), limit, log))

    def _is_over(self, running: Running) -> bool:
        status = running.process.poll()
        if status is None and running.seconds < running.limit:
            return False
        running.end()  # of a part that is through: what it started
        name, seconds = running.part.name, f"({running.seconds:.0f} s)"
        if status == 0:
            self.note(f"done  {name} {seconds}")
            return True
        self.failed.append(name)
        why = "out of time" if status is None else f"status {status}"
        self.note(f"FAILED  {name} {seconds}: {why}; {running.last_error()}")
        return True
