"""`pyengine generate`: answer one prompt as a stream, or many as a batch."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from pyengine.cli.backend import ended, factory_of
from pyengine.cli.display import Meter, note_reduced, stream_answer
from pyengine.cli.options import Verbose, command
from pyengine.cli.prompts import (
    Prompt,
    Template,
    check_encodable,
    read_prompts,
    read_standard_input,
    to_engine,
)
from pyengine.cli.results import Batch, Printed, Results, opened
from pyengine.cli.sampling import in_options
from pyengine.cli.status import FAILED, INTERRUPTED
from pyengine.cli.terminal import note
from pyengine.config import EngineSettings
from pyengine.errors import InvalidRequestError
from pyengine.sampling_params import SamplingParams
from pyengine.utils.progress import progress_bar

_MODEL_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?|\S+\.gguf")

RECORDING = b"kvtrace\n"
"""The first bytes of a recording of the block manager."""


@command()
def generate(
    context: typer.Context,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="One or more prompts; - is the text on standard input."),
    ] = None,
    *,
    text: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt; repeatable.", allow_from_autoenv=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Prompts, one per line: a text file or .jsonl.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write results to this new file, as lines of JSON.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an earlier run: append to its --output.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Record the blocks to this new file, for `pyengine trace replay`."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Render prompts with the model's chat template, or not; default: if it has one.",
        ),
    ] = None,
    verbose: Verbose = False,
    params: SamplingParams,
    settings: EngineSettings,
) -> None:
    """Stream the answer to one prompt, or answer several as a batch, with a summary at the end."""
    if resume and output is None:
        raise InvalidRequestError("--resume needs --output: the file to continue")
    if file is None and output is None:
        _note_doubts(prompt or [])
    prompt = [*(prompt or []), *(text or [])]
    if prompt.count("-") > 1:
        raise InvalidRequestError("standard input is one prompt: give - once")
    _check_apart({"--file": file, "--output": output, "--record": record})
    _check_recording(record)
    template = {None: Template.AUTO, True: Template.CHAT, False: Template.RAW}[chat]
    batch = Batch(_collect(prompt, file), template, params, settings)
    target = nullcontext(Printed(batch)) if output is None else opened(output, batch, resume=resume)
    with target as results:
        remaining = [index for index in range(len(batch.prompts)) if index not in results.done]
        if not remaining:
            note(results.summary(failed=False))
            return
        engine = factory_of(context)(settings)
        ready = to_engine(engine, [batch.prompts[index] for index in remaining], template)
        ids = [prompt["prompt_token_ids"] for prompt in ready if isinstance(prompt, dict)]
        note_reduced(engine, params, [len(prompt) for prompt in ids])
        with nullcontext() if record is None else engine.recording(record):
            meter = Meter.start(engine, is_verbose=verbose)
            if len(batch.prompts) == 1 and output is None:
                _answer_one(meter, ready[0], params)
            else:
                _answer_many(meter, batch, dict(zip(remaining, ready, strict=True)), results)


def _note_doubts(arguments: Sequence[str]) -> None:
    """Note that a prompt may be one without quotes, or the name of a model."""
    if len(arguments) > 1 and all(len(text.split()) == 1 and text != "-" for text in arguments):
        whole = shlex.quote(" ".join(arguments))
        note(
            f"{len(arguments)} prompts of one word each; if you mean one prompt, put quotes around "
            f"it: pyengine generate {whole}"
        )
    for text in arguments:
        if _MODEL_NAME.fullmatch(text):
            note(f"{text} is a prompt here; to name a model: -m {text}")


def _collect(arguments: Sequence[str], file: Path | None) -> list[Prompt]:
    texts = [read_standard_input() if text == "-" else text for text in arguments]
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise InvalidRequestError(f"prompt {number} is empty")
        try:
            check_encodable(text)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {number} {error}: it must be UTF-8") from None
    prompts: list[Prompt] = [Prompt(text) for text in texts]
    if file is not None:
        prompts += read_prompts(file)
    if not prompts:
        raise InvalidRequestError("no prompt: give a PROMPT or --file; - is standard input")
    return prompts


def _check_apart(files: Mapping[str, Path | None]) -> None:
    paths = [(option, path) for option, path in files.items() if path is not None]
    for (name, path), (other, same) in combinations(paths, 2):
        if os.path.realpath(path) == os.path.realpath(same):
            raise InvalidRequestError(f"{name} and {other} are the same file: {path}")


def _check_recording(path: Path | None) -> None:
    """Check that a recording can be written and overwrites no file."""
    if path is None:
        return
    is_new = not os.path.lexists(path)
    try:
        if not is_new and not path.is_file():
            raise InvalidRequestError(f"cannot write {path}: not a regular file")
        with path.open("ab+") as file:
            file.seek(0)
            start = file.read(len(RECORDING))
        if is_new:
            path.unlink()
    except OSError as error:
        raise InvalidRequestError(
            f"cannot write {path}: {error.strerror}; give a file in an existing folder"
        ) from None
    if start:
        kind = "is a recording already" if start == RECORDING else "is not a recording"
        raise InvalidRequestError(f"{path} {kind} and is not overwritten: give another file")


def _answer_one(meter: Meter, prompt: object, params: SamplingParams) -> None:
    answer = stream_answer(meter, prompt, params)
    note(answer.figures, dim=True)
    if answer.interrupted:
        note("interrupted")
        raise typer.Exit(INTERRUPTED)


def _answer_many(meter: Meter, batch: Batch, ready: Mapping[int, Any], results: Results) -> None:
    """Answer prompts, given by position. Results are kept even if the run fails."""
    engine = meter.engine
    indices, params = list(ready), [batch.params_of(index) for index in ready]
    failures = 0
    try:
        with (
            nullcontext() if sys.stdout.isatty() else progress_bar(len(indices)) as bar,
            ended(engine.generate_iter(list(ready.values()), params)) as outputs,
        ):
            for result in outputs:
                index = indices[result.index]
                results.put(index, result)
                meter.add(result)
                if result.error is not None:
                    failures += 1
                    note(f"prompt {index + 1} failed: {in_options(result.error)}")
                if bar is not None:  # else the answers on the terminal are the progress
                    bar.update()
    except BaseException:
        _close(results, meter, failed=True)
        raise
    _close(results, meter, failed=failures > 0)
    if failures:
        raise typer.Exit(FAILED)


def _close(results: Results, meter: Meter, *, failed: bool) -> None:
    summary = results.summary(failed)
    if summary:
        note(summary)
    if not failed or meter.tokens["new"]:
        note(str(meter), dim=True)
