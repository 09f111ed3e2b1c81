"""Output for people: answers, tables, and the summary line."""

import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pyengine.cli.backend import Engine, ended
from pyengine.cli.terminal import note, write
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams

COLUMNS = 80
"""Of a terminal, for wrapped text."""


def note_reduced(engine: Engine, params: SamplingParams, lengths: Sequence[int] = ()) -> None:
    """Note that answers end with the context, before they have `max_tokens`.

    `lengths` are those of the prompts; empty if they are not known yet.
    """
    context = engine.describe().get("max_model_len")
    if not isinstance(context, int) or params.max_tokens is None:
        return
    left = [context - length for length in lengths] or [context - 1]
    if params.max_tokens > min(left) > 0:
        limit = f"{min(left):,}" if lengths else f"at most {min(left):,}"
        note(
            f"--max-tokens {params.max_tokens} is reduced to {limit}: prompt and answer together "
            f"have at most {context:,} tokens"
        )


def print_rows(title: str, rows: Mapping[str, object], *, is_wrapped: bool = False) -> None:
    """Print a title and a line per row; names of nested rows follow the name of their parent.

    `is_wrapped` breaks long values into lines of at most `COLUMNS`.
    """
    flat = dict(_flatten(rows))
    width = max(map(len, flat), default=0)
    lines = [f"  {key:<{width}}  {value}" for key, value in flat.items()]
    write(f"{title}\n", bold=True)
    if is_wrapped:
        lines = [wrapped(line, indent=width + 4) for line in lines]
    write("".join(f"{line}\n" for line in lines))


def wrapped(line: str, *, indent: int) -> str:
    """Break a line into lines of at most `COLUMNS`; all but the first are indented."""
    return textwrap.fill(
        line,
        COLUMNS,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def size_text(size: int) -> str:
    """A number of bytes for people, such as 1.5 MiB."""
    power = min(max(size.bit_length() - 1, 0) // 10, 3)
    unit = ("bytes", "KiB", "MiB", "GiB")[power]
    return f"{size:,} {unit}" if power == 0 else f"{size / 1024**power:,.1f} {unit}"


def _flatten(rows: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in rows.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            yield from ((f"{name}: {key}", nested) for key, nested in value.items())
        else:
            yield name, value


_TOKENS = ("prompt", "cached", "restored", "new", "decoded")


_BLOCKS = {
    "allocated_blocks": "blocks used",
    "in_flight_blocks": "shared in flight",
    "merged_blocks": "merged",
}


@dataclass
class Meter:
    """Measures a run: counters from before it, tokens and times of its results.

    `str()` is the summary line; counters of zero are left out unless it is verbose. `tok/s` is the
    decode rate: tokens after the first of each answer, over the time in which any answer was
    decoding. With drafts it also shows how many were accepted, and the tokens per decode with them.
    """

    engine: Engine
    counters: Mapping[str, int]
    num_drafts: int
    is_verbose: bool = False
    """Zeros are shown, too."""
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TOKENS, 0), init=False)
    decoding: list[tuple[float, float]] = field(default_factory=list, init=False)
    """Times of the first and the last token of each result."""

    @classmethod
    def start(cls, engine: Engine, *, is_verbose: bool = False) -> Self:
        """Start a measurement with the engine's current counters."""
        stats = engine.stats()
        return cls(engine, dict(stats.counters), stats.num_drafts, is_verbose)

    def add(self, result: RequestOutput) -> None:
        """Count a finished or interrupted result."""
        self.tokens["prompt"] += len(result.prompt_token_ids)
        self.tokens["cached"] += result.num_cached_tokens
        self.tokens["restored"] += result.num_restored_tokens
        num_new = [len(out.token_ids) for out in result.outputs]
        self.tokens["new"] += sum(num_new)
        first, last = result.metrics.first_token_time, result.metrics.finished_time
        if first is not None:
            self.tokens["decoded"] += sum([max(0, count - 1) for count in num_new])
            self.decoding.append((first, time.monotonic() if last is None else last))

    def __str__(self) -> str:
        """The summary line."""
        stats, tokens = self.engine.stats(), self.tokens
        blocks = {name: stats.counters[name] - before for name, before in self.counters.items()}
        restored = f", {tokens['restored']} of them restored" if tokens["restored"] else ""
        cached = f" ({tokens['cached']} cached{restored})"
        parts = [
            f"{tokens['prompt']} prompt tokens"
            + (cached if tokens["cached"] or self.is_verbose else ""),
            f"{tokens['new']} new tokens",
            *self._rate(),
        ]
        for name, words in _BLOCKS.items():
            if blocks[name] or self.is_verbose:
                parts.append(f"{blocks[name]} {words}")
        num_drafts = stats.num_drafts - self.num_drafts
        if num_drafts:
            accepted, drafted = blocks["accepted_draft_tokens"], blocks["draft_tokens"]
            parts.append(f"{accepted} of {drafted} drafts accepted")
            parts.append(f"{1 + accepted / num_drafts:.2f} tokens per decode with drafts")
        return " · ".join(parts)

    def _rate(self) -> list[str]:
        """The decode rate as text; empty if no answer has a second token."""
        seconds, end = 0.0, -math.inf
        for first, last in sorted(self.decoding):
            seconds += max(0.0, last - max(first, end))
            end = max(end, last)
        count = self.tokens["decoded"]
        return [f"{count / max(seconds, 1e-9):.1f} tok/s"] if count else []


@dataclass(frozen=True)
class Answer:
    """The displayed text, its summary line, and whether Ctrl-C interrupted it."""

    text: str
    figures: str
    interrupted: bool


def stream_answer(meter: Meter, prompt: Any, params: SamplingParams) -> Answer:
    """Write the answer to standard output token by token. Ctrl-C ends the answer only."""
    shown = ""
    last: RequestOutput | None = None
    interrupted = False
    try:
        with ended(meter.engine.stream(prompt, params)) as outputs:
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
