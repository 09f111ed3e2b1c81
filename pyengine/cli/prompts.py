"""Prompts from the command line and from files, checked before anything runs."""

import codecs
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from pyengine.cli.backend import Engine
from pyengine.errors import InvalidRequestError

SHOWN_PROBLEMS = 5
LONGEST_LINE = 64 << 20
"""Limit of a line in bytes (`/dev/zero` has no line end)."""

Message: TypeAlias = dict[str, Any]
"""`role`, and `content` (text, or a list of parts) or `tool_calls`, as `LLM.chat` takes them."""


class Template(StrEnum):
    """How to turn a text prompt into tokens."""

    CHAT = "chat"
    """Render it as a user message with the model's chat template."""
    RAW = "raw"
    """Tokenize it unchanged."""
    AUTO = "auto"
    """`chat` if the model has a chat template, else `raw`."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, of the kind that is its key in files.

    `prompt`: a text, rendered according to `Template`. `prompt_token_ids`: used unchanged.
    `messages`: a conversation, always rendered with the chat template.
    """

    content: Any
    """A text, or a tuple of token ids or of messages."""
    id: str | int | None = None
    kind: str = "prompt"


def read_prompts(path: Path) -> list[Prompt]:
    """Read one prompt per line, as UTF-8; empty lines and a byte order mark are skipped.

    `.jsonl`: each line is a string, or an object with one of `prompt`, `prompt_token_ids` and
    `messages`, and an optional `id` that is repeated in the result. Any other file: a text per
    line.

    Raises InvalidRequestError with the numbers of the first five invalid lines.
    """
    parse: Callable[[str], Prompt] = _parse_json if path.suffix == ".jsonl" else _parse_text
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, raw in enumerate(_lines(path), start=1):
        if not raw.strip():
            continue
        try:
            prompts.append(parse(raw.decode("utf-8")))
        except ValueError as error:  # includes errors of JSON and UTF-8
            problems.append(f"{path}, line {number}: {error}")
        except RecursionError:
            problems.append(f"{path}, line {number}: nested too deeply")
    if problems:
        num_more = len(problems) - SHOWN_PROBLEMS
        tail = [f"... and {num_more} more"] if num_more > 0 else []
        raise InvalidRequestError(
            "\n".join(["nothing was run:", *problems[:SHOWN_PROBLEMS], *tail])
        )
    if not prompts:
        raise InvalidRequestError(f"{path} contains no prompts")
    return prompts


def read_text(path: Path, limit: int) -> str:
    """The text of a file: one character more than the limit, if it is longer."""
    try:
        with path.open("rb") as file:
            return file.read(limit + 1).decode()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text: {error.reason}") from None


def read_standard_input() -> str:
    """Read standard input to its end, as one prompt; a line end at its end is dropped."""
    text = sys.stdin.read(LONGEST_LINE + 1)
    if len(text) > LONGEST_LINE:
        raise InvalidRequestError(
            f"standard input has more than {LONGEST_LINE >> 20} Mi characters: no prompt"
        )
    return text.removesuffix("\n").removesuffix("\r")


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their ends; only `\\n`, `\\r` and `\\r\\n` end one."""
    try:
        with path.open("rb") as file:
            line = file.readline(LONGEST_LINE)
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise InvalidRequestError(
                    f"{path} is UTF-16 text: give it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
                )
            line = line.removeprefix(codecs.BOM_UTF8)
            while line:
                if len(line) >= LONGEST_LINE:
                    raise InvalidRequestError(
                        f"{path} has a line of {LONGEST_LINE >> 20} MiB or more: no prompts"
                    )
                yield from line.splitlines()
                line = file.readline(LONGEST_LINE)
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error


def to_engine(engine: Engine, prompts: Sequence[Prompt], template: Template) -> list[Any]:
    """Convert prompts to the engine's format: texts and `prompt_token_ids` dicts."""
    has_template = getattr(engine.tokenizer, "chat_template", None) is not None
    if template is Template.CHAT and not has_template:
        raise InvalidRequestError("the model has no chat template; use --raw")
    chat = template is Template.CHAT or (template is Template.AUTO and has_template)
    result: list[Any] = []
    for prompt in prompts:
        match prompt.kind:
            case "prompt_token_ids":
                result.append({"prompt_token_ids": list(prompt.content)})
            case "messages":
                messages = list(prompt.content)
                try:
                    ids_of = engine.apply_chat_template(messages)
                except InvalidRequestError as error:
                    reason = f"the prompt {_short(messages)} is invalid: {error}"
                    raise InvalidRequestError(f"nothing was run: {reason}") from error
                result.append({"prompt_token_ids": ids_of})
            case _ if chat:
                ids_of = engine.apply_chat_template([{"role": "user", "content": prompt.content}])
                result.append({"prompt_token_ids": ids_of})
            case _:
                result.append(prompt.content)
    return result


def _parse_text(line: str) -> Prompt:
    if "\0" in line:
        raise ValueError("contains a NUL character: is this a text file?")
    return Prompt(line)


def _parse_json(line: str) -> Prompt:
    value = json.loads(line)
    check_encodable(json.dumps(value, ensure_ascii=False))
    if isinstance(value, str):
        return Prompt(_checked_text(value))
    if not isinstance(value, dict):
        raise ValueError(f"expected a string or an object, found {_short(value)}")
    unknown = sorted(value.keys() - {*KINDS, "id"})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(KINDS)} and id")
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        raise ValueError(
            f"exactly one of {', '.join(KINDS)} is required, found {' and '.join(kinds) or 'none'}"
        )
    name = value.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise ValueError(f"id must be a string or an integer, found {_short(name)}")
    return Prompt(KINDS[kinds[0]](value[kinds[0]]), name, kinds[0])


def check_encodable(text: str) -> None:
    """Raise InvalidRequestError for text with a lone surrogate, which has no encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise InvalidRequestError(f"contains {surrogate!r}, a lone surrogate") from error


def _checked_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"prompt must be a string, found {_short(value)}")
    if not value.strip():
        raise ValueError("prompt is empty")
    return value


def _checked_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"prompt_token_ids must be a list of token ids, found {_short(value)}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"prompt_token_ids contains {_short(token)}, which is not a token id")
    return tuple(value)


def _checked_messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list of messages, found {_short(value)}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message is an object with a role: {_short(message)}")
        content, calls = message.get("content"), message.get("tool_calls")
        has_content = isinstance(content, str) or (isinstance(content, list) and bool(content))
        has_calls = isinstance(calls, list) and bool(calls) and content is None
        if not has_content and not has_calls:
            raise ValueError(
                "a message needs content (text or a list of parts) or tool_calls (a list): "
                f"{_short(message)}"
            )
    return tuple(value)


KINDS: Mapping[str, Callable[[object], Any]] = {
    "prompt": _checked_text,
    "prompt_token_ids": _checked_token_ids,
    "messages": _checked_messages,
}


def text_of(message: Message) -> str:
    """The text of a message, or its tool calls, for display."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return _short(message["tool_calls"])
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return " ".join(text for text in texts if isinstance(text, str))


def _short(value: object, limit: int = 40) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."
