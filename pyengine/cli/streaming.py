"""Printing one answer while it is generated."""

from dataclasses import dataclass
from typing import Any

import typer

from pyengine.cli.backend import Engine
from pyengine.cli.figures import Figures, Meter
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class Answer:
    """The text that was shown, what it cost, and whether Ctrl-C cut it short."""

    text: str
    figures: Figures
    interrupted: bool


def stream_answer(engine: Engine, prompt: Any, params: SamplingParams) -> Answer:
    """Write the answer to standard output token by token; Ctrl-C ends it, not the program."""
    meter = Meter.start(engine)
    shown = ""
    last: RequestOutput | None = None
    interrupted = False
    stream = engine.stream(prompt, params)
    try:
        for last in stream:
            text = last.outputs[0].text
            typer.echo(text[len(shown) :], nl=False)
            shown = text
    except KeyboardInterrupt:
        interrupted = True
    finally:
        close = getattr(stream, "close", None)  # a generator's: the engine aborts the request
        if close is not None:
            close()
    typer.echo()
    return Answer(shown, meter.read([last] if last is not None else []), interrupted)
