"""`pyengine chat`: a conversation whose earlier turns are in the KV cache."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from pyengine.cli.backend import Engine, factory_of
from pyengine.cli.display import Answer, Meter, note_reduced, stream_answer
from pyengine.cli.options import Verbose, command, source_of
from pyengine.cli.prompts import Message, check_encodable
from pyengine.cli.sampling import in_options
from pyengine.cli.terminal import note, write
from pyengine.config import EngineSettings
from pyengine.errors import InvalidRequestError
from pyengine.sampling_params import SamplingParams

DEMO_SAMPLING: Mapping[str, Any] = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
"""Defaults for the demo model, which repeats itself when it is greedy."""

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@command(max_tokens=512)
def chat(
    context: typer.Context,
    *,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    verbose: Verbose = False,
    params: SamplingParams,
    settings: EngineSettings,
) -> None:
    """Chat with the model. Earlier turns are cache hits: each answer shows how many tokens."""
    if settings.model is None:
        params = replace(
            params, **{k: v for k, v in DEMO_SAMPLING.items() if source_of(context, k) == "DEFAULT"}
        )
    engine = factory_of(context)(settings)
    if getattr(engine.tokenizer, "chat_template", None) is None:
        raise InvalidRequestError(
            f"{engine.describe()['model']} has no chat template; use `pyengine generate --raw`"
        )
    note_reduced(engine, params)
    note(f"{engine.describe()['model']}: {HELP}", dim=True)
    if settings.model is None:
        note("a demo model, often wrong; `pyengine help models` names larger ones", dim=True)

    def answer(prompt: object) -> Answer:
        return stream_answer(Meter.start(engine, is_verbose=verbose), prompt, params)

    _converse(engine, answer, [{"role": "system", "content": system}] if system else [])


def _converse(engine: Engine, answer: Callable[..., Answer], opening: list[Message]) -> None:
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
        messages = _take_turn(engine, answer, [*messages, {"role": "user", "content": line}])


def _take_turn(
    engine: Engine, answer_to: Callable[..., Answer], messages: list[Message]
) -> list[Message]:
    """Answer the last message. An error leaves the conversation unchanged."""
    try:
        check_encodable(messages[-1]["content"])
        prompt = {"prompt_token_ids": engine.apply_chat_template(messages)}
        answer = answer_to(prompt)
    except InvalidRequestError as error:
        note(f"error: {in_options(str(error))}\nthe conversation may be too long: /reset")
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
