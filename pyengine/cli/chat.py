"""`pyengine chat`: a conversation whose earlier turns are in the KV cache."""

import sys
from typing import Annotated

import typer

from pyengine.cli.backend import Engine, factory_of
from pyengine.cli.display import note, stream_answer, write
from pyengine.cli.options import command
from pyengine.cli.prompts import Message, check_encodable
from pyengine.config import EngineSettings
from pyengine.errors import InvalidRequestError
from pyengine.sampling_params import SamplingParams

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@command(max_tokens=512)
def chat(
    context: typer.Context,
    *,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    params: SamplingParams,
    settings: EngineSettings,
) -> None:
    """Chat with the model. Earlier turns are cache hits: each answer shows how many tokens."""
    engine = factory_of(context)(settings)
    if getattr(engine.tokenizer, "chat_template", None) is None:
        raise InvalidRequestError(
            f"{engine.describe()['model']} has no chat template; use `pyengine generate --raw`"
        )
    _converse(engine, params, [{"role": "system", "content": system}] if system else [])


def _converse(engine: Engine, params: SamplingParams, opening: list[Message]) -> None:
    note(f"{engine.describe()['model']}: {HELP}", dim=True)
    messages = list(opening)
    while (line := _ask()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                messages = list(opening)
                note("a new conversation", dim=True)
                continue
            case text if text.startswith("/"):
                note(f"unknown: {text}; {HELP}", dim=True)
                continue
        messages = _take_turn(engine, params, [*messages, {"role": "user", "content": line}])


def _take_turn(engine: Engine, params: SamplingParams, messages: list[Message]) -> list[Message]:
    """Answer the last message. An error leaves the conversation unchanged."""
    try:
        check_encodable(messages[-1]["content"])
        prompt = {"prompt_token_ids": engine.apply_chat_template(messages)}
        answer = stream_answer(engine, prompt, params)
    except InvalidRequestError as error:
        note(f"error: {error}\nthe conversation may be too long: /reset")
        return messages[:-1]
    stopped = "stopped · " if answer.interrupted else ""
    note(f"{stopped}{answer.figures}", dim=True)
    return [*messages, {"role": "assistant", "content": answer.text}]


def _ask() -> str | None:
    """The user's next line, or None at the end of the input or on Ctrl-C."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  line editing for input()
    try:
        return input("> " if interactive else "")
    except (EOFError, KeyboardInterrupt):
        if interactive:
            write("\n")
        return None
