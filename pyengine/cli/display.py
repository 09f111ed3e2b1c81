"""What people see: answers, notes beside them, tables, and the one line of figures at the end.

Answers go to standard output as they are. A terminal gets no control character of theirs: an
escape sequence in a prompt, an answer or a file's name is written out instead.
"""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TextIO

from pyengine.cli.backend import Engine, ended
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]

_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
"""ANSI sequences for a terminal."""


def printable(text: str) -> str:
    """`text` with its control characters written out, but for line ends and tabs."""
    return text.translate(_CONTROLS)


def write(text: str, *, bold: bool = False) -> None:
    """Write to standard output, at once."""
    _write(sys.stdout, text, _BOLD if bold else "")


def note(text: str, *, dim: bool = False) -> None:
    """Write a line to standard error."""
    _write(sys.stderr, f"{text}\n", _DIM if dim else "")


def _write(stream: TextIO, text: str, style: str) -> None:
    if stream.isatty():
        text = printable(text)
        if style and not os.environ.get("NO_COLOR"):
            text = f"{style}{text}{_PLAIN}"
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        error.filename = stream.name
        raise


def print_rows(title: str, rows: Mapping[str, object]) -> None:
    """A title, and a line for each row; nested ones stay as they are, behind the name above."""
    flat = dict(_flatten(rows))
    width = max(map(len, flat), default=0)
    write(f"{title}\n", bold=True)
    write("".join(f"  {key:<{width}}  {value}\n" for key, value in flat.items()))


def _flatten(rows: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in rows.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            yield from ((f"{name}: {key}", of_it) for key, of_it in value.items())
        else:
            yield name, value


@dataclass
class Meter:
    """What a run costs: counters as they were before it, and its results' tokens and times.

    As text it is the closing line. `tok/s` is the rate of decodes alone: the tokens after the first
    of each answer, over the time in which any answer had its first token and not yet its last.
    `shared` are blocks in a step, `merged` after it. Where there were drafts it says how many were
    right, and how many tokens a decode with drafts gave.
    """

    engine: Engine
    counters: Mapping[str, int]
    num_drafts: int
    tokens: dict[str, int] = field(
        default_factory=lambda: {"prompt": 0, "cached": 0, "new": 0, "decoded": 0}, init=False
    )
    decoding: list[tuple[float, float]] = field(default_factory=list, init=False)
    """For each result the times of its first and of its last token."""

    @classmethod
    def start(cls, engine: Engine) -> Self:
        """Read the engine's counters."""
        stats = engine.stats()
        return cls(engine, dict(stats.counters), stats.num_drafts)

    def add(self, result: RequestOutput) -> None:
        """Count a result that is finished or was cut short."""
        self.tokens["prompt"] += len(result.prompt_token_ids)
        self.tokens["cached"] += result.num_cached_tokens
        num_new = [len(out.token_ids) for out in result.outputs]
        self.tokens["new"] += sum(num_new)
        first, last = result.metrics.first_token_time, result.metrics.finished_time
        if first is not None:
            self.tokens["decoded"] += sum([max(0, count - 1) for count in num_new])
            self.decoding.append((first, time.monotonic() if last is None else last))

    def __str__(self) -> str:
        """The closing line."""
        stats, tokens = self.engine.stats(), self.tokens
        blocks = {name: stats.counters[name] - before for name, before in self.counters.items()}
        parts = [
            f"{tokens['prompt']} prompt tokens ({tokens['cached']} cached)",
            f"{tokens['new']} new tokens",
            *self._rate(),
            f"{blocks['allocated_blocks']} blocks used",
            f"{blocks['in_flight_blocks']} shared in flight",
            f"{blocks['merged_blocks']} merged",
        ]
        num_drafts = stats.num_drafts - self.num_drafts
        if num_drafts:
            right, drafted = blocks["accepted_draft_tokens"], blocks["draft_tokens"]
            parts.append(f"{right} of {drafted} drafts right")
            parts.append(f"{1 + right / num_drafts:.2f} tokens per decode with drafts")
        return " · ".join(parts)

    def _rate(self) -> list[str]:
        """The rate of decodes in words; empty where no answer has a second token."""
        seconds, end = 0.0, -math.inf
        for first, last in sorted(self.decoding):
            seconds += max(0.0, last - max(first, end))
            end = max(end, last)
        count = self.tokens["decoded"]
        return [f"{count / max(seconds, 1e-9):.1f} tok/s"] if count else []


@dataclass(frozen=True)
class Answer:
    """The text that was shown, the line of what it cost, and whether Ctrl-C cut it short."""

    text: str
    figures: str
    interrupted: bool


def stream_answer(engine: Engine, prompt: Any, params: SamplingParams) -> Answer:
    """Write the answer to standard output token by token; Ctrl-C ends it, not the program."""
    meter = Meter.start(engine)
    shown = ""
    last: RequestOutput | None = None
    interrupted = False
    try:
        with ended(engine.stream(prompt, params)) as outputs:
            for last in outputs:
                text = last.outputs[0].text
                write(text[len(shown) :])
                shown = text
    except KeyboardInterrupt:
        interrupted = True
    write("\n")
    if last is not None:
        meter.add(last)
    return Answer(shown, str(meter), interrupted)
