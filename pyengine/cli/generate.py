"""`pyengine generate`: answer one prompt as a stream, or many as a batch."""

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from pyengine.cli.backend import Engine, factory_of
from pyengine.cli.figures import Meter
from pyengine.cli.guard import INTERRUPTED
from pyengine.cli.options import command
from pyengine.cli.prompts import (
    AnyPrompt,
    MessagesPrompt,
    Template,
    TextPrompt,
    TokenPrompt,
    read_prompts,
    to_engine,
)
from pyengine.cli.streaming import stream_answer
from pyengine.core.errors import InvalidRequestError
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams
from pyengine.core.settings import EngineSettings


@command()
def generate(
    context: typer.Context,
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more prompts.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Prompts, one per line: a text file or .jsonl.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results here, as JSONL.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Record the block manager here, for `pyengine trace replay`."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Frame texts with the model's chat template, or not; "
            "by default where the model has one.",
        ),
    ] = None,
    params: SamplingParams,
    settings: EngineSettings,
) -> None:
    """Answer one prompt as it comes, or many in one batch, and close with one line of figures."""
    prompts = _collect(prompt or [], file)
    _check_writable(output)
    _check_writable(record)
    engine = factory_of(context)(settings)
    template = {None: Template.AUTO, True: Template.CHAT, False: Template.RAW}[chat]
    ready = to_engine(engine, prompts, template)
    with nullcontext() if record is None else engine.recording(record):
        if len(prompts) == 1 and output is None:
            _answer_one(engine, ready[0], params)
        else:
            _answer_many(engine, prompts, ready, params, output)


def _collect(texts: Sequence[str], file: Path | None) -> list[AnyPrompt]:
    prompts: list[AnyPrompt] = [TextPrompt(text) for text in texts]
    if file is not None:
        prompts += read_prompts(file)
    if not prompts:
        raise InvalidRequestError("nothing to generate: give a PROMPT or --file")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise InvalidRequestError(f"prompt {number} is empty: write what is to be answered")
    return prompts


def _check_writable(output: Path | None) -> None:
    if output is None:
        return
    folder = output.resolve().parent
    if output.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidRequestError(f"cannot write {output}: give a file in a folder that exists")


def _answer_one(engine: Engine, prompt: object, params: SamplingParams) -> None:
    answer = stream_answer(engine, prompt, params)
    typer.secho(str(answer.figures), err=True, dim=True)
    if answer.interrupted:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED)


def _answer_many(
    engine: Engine,
    prompts: Sequence[AnyPrompt],
    ready: list[object],
    params: SamplingParams,
    output: Path | None,
) -> None:
    meter = Meter.start(engine)
    results = engine.generate(ready, params, use_tqdm=True)
    figures = meter.read(results)
    pairs = list(zip(prompts, results, strict=True))
    if output is None:
        for number, (prompt, result) in enumerate(pairs, start=1):
            typer.secho(f"[{number}] {_title(prompt)}", bold=True)
            typer.echo(result.outputs[0].text.strip("\n") + "\n")
    else:
        lines = [_as_json(index, *pair) + "\n" for index, pair in enumerate(pairs)]
        output.write_text("".join(lines), encoding="utf-8")
        typer.echo(f"{len(lines)} results in {output}", err=True)
    typer.secho(str(figures), err=True, dim=True)


def _title(prompt: AnyPrompt) -> str:
    match prompt:
        case TextPrompt(text=text):
            line = " ".join(text.split())
        case TokenPrompt(token_ids=ids):
            line = f"{len(ids)} token ids"
        case MessagesPrompt(messages=messages):
            line = " ".join(messages[-1]["content"].split())
    return line if len(line) <= 76 else line[:73] + "..."


def _as_json(index: int, prompt: AnyPrompt, result: RequestOutput) -> str:
    record: dict[str, object] = {"index": index}
    if prompt.id is not None:
        record["id"] = prompt.id
    match prompt:
        case TextPrompt(text=text):
            record["prompt"] = text
        case TokenPrompt(token_ids=ids):
            record["prompt_token_ids"] = ids
        case MessagesPrompt(messages=messages):
            record["messages"] = messages
    answer = result.outputs[0]
    record |= {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
    }
    return json.dumps(record, ensure_ascii=False)
