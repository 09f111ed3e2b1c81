"""Runs sections in processes of their own, so that a crash or a hang costs one part only."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

from benches.gpu_check.rows import Row, Setup

ROOT = Path(__file__).parents[2]
START_SECONDS = 150.0
"""How long a process may take until it has imported everything and knows its parts."""
_POLL_SECONDS = 0.05
_LOG_LINES = 8

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A module with a function `parts(setup)`.

    `share` of the time is planned for it; what is left over goes to those that follow. A part may
    take `part_seconds`. With `is_check`, a part that fails is a failed check.
    """

    name: str
    module: str
    share: float
    part_seconds: float
    is_check: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class PartResult:
    """What came of a part. `open`: it was never begun, or there was no time to end it."""

    name: str
    state: Literal["open", "done", "failed"] = "open"
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


@dataclass(slots=True)
class SectionResult:
    """What came of a section: its parts in order, or why it does not even know them."""

    section: Section
    parts: dict[str, PartResult] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def is_open(self) -> bool:
        """Whether there is something left to run."""
        if self.error:
            return False
        return not self.parts or any(part.state == "open" for part in self.parts.values())


class Run:
    """One run of a section, up to a point in time; it can be taken up again later."""

    def __init__(self, result: SectionResult, setup: Setup, say: Say) -> None:
        self._result = result
        self._setup = setup
        self._say = say
        self._lines = setup.path(f"{result.section.name.replace(' ', '-')}.lines")
        self._log = self._lines.with_suffix(".log")
        self._current: PartResult | None = None
        self._since = 0.0
        self._read = 0

    def until(self, end: float) -> None:
        """Run open parts until `end` of `monotonic`, with a new process after each that dies."""
        begun = monotonic()
        while self._result.is_open and monotonic() < end:
            before = sum(part.state != "open" for part in self._result.parts.values())
            self._one_process(end)
            after = sum(part.state != "open" for part in self._result.parts.values())
            if after == before and monotonic() < end and self._result.is_open:
                self._result.error = f"ended without a word\n{self._tail()}"
        self._result.seconds += monotonic() - begun

    def _one_process(self, end: float) -> None:
        done = [part.name for part in self._result.parts.values() if part.state != "open"]
        job = {
            "module": self._result.section.module,
            "setup": asdict(self._setup),
            "lines": str(self._lines),
            "done": done,
        }
        self._lines.touch()
        self._read = self._lines.stat().st_size
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benches.gpu_check.child"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
        self._current, self._since = None, monotonic()
        try:
            self._watch(process, end)
        finally:
            _end(process)

    def _watch(self, process: "subprocess.Popen[bytes]", end: float) -> None:
        """Follow a process until it ends, hangs, or the time is over."""
        while True:
            ended = process.poll()
            self._take_messages()
            now = monotonic()
            if ended is not None:
                self._has_ended(ended)
                return
            if now > end:
                if self._current is not None:
                    self._current.error = f"ended after {now - self._since:.0f} s: out of time"
                return
            limit = self._result.section.part_seconds if self._current else START_SECONDS
            if now - self._since > limit:
                self._fail(f"ended by force: not done after {limit:.0f} s")
                return
            sleep(_POLL_SECONDS)

    def _has_ended(self, status: int) -> None:
        if self._current is not None:
            self._fail(f"the process {_words(status)}")
        elif status and not self._result.parts:
            self._fail(f"the process {_words(status)} before it began")

    def _fail(self, why: str) -> None:
        why = f"{why}\n{self._tail()}".strip()
        if self._current is None:
            self._result.error = why
        else:
            self._close("failed", why)

    def _close(self, state: Literal["done", "failed"], error: str) -> None:
        part = self._current
        assert part is not None
        part.state, part.error = state, error
        part.seconds = monotonic() - self._since
        words: list[str] = [row.status for row in part.rows if row.status not in ("pass", "info")]
        verdict = "failed" if error or "fail" in words else (words or ["done"])[0]
        self._say(f"{self._result.section.name}: {part.name}: {verdict} ({part.seconds:.1f} s)")
        self._current, self._since = None, monotonic()

    def _take_messages(self) -> None:
        with open(self._lines, encoding="utf-8") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        for line in whole.splitlines():
            ((key, value),) = json.loads(line).items()
            self._take(key, value)

    def _take(self, key: str, value: Any) -> None:
        parts = self._result.parts
        if key == "parts":
            for name in value:
                parts.setdefault(name, PartResult(name))
            self._since = monotonic()
        elif key == "begin":
            self._current, self._since = parts[value], monotonic()
            self._current.rows, self._current.error = [], ""
        elif self._current is not None and key == "row":
            self._current.rows.append(Row(**value))
        elif self._current is not None and key == "error":
            self._current.error = value
        elif self._current is not None and key == "end":
            self._close("failed" if self._current.error else "done", self._current.error)

    def _tail(self) -> str:
        """The last lines that the process wrote."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-_LOG_LINES:])


def _words(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
