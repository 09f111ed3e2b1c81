"""Chat templates: rendered by Jinja in a sandbox, with what transformers offers to them.

A template is untrusted code: it sees plain JSON values only. Names and filters are those of
https://huggingface.co/docs/transformers/main/en/chat_templating.

The engine renders in child processes, which load this file by its path and run `serve`. So it
imports only the standard library and Jinja.
"""

import json
import marshal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

Templates: TypeAlias = str | Mapping[str, str] | None
"""A chat template, several by name, or none."""

_MAX_COMPILED = 32
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first or the second."""
_LONGEST_REASON = 2000
"""The most characters of an error that are passed on."""
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the last message, while a template renders it."""


def chosen_template(
    templates: Templates, name_or_text: str | None = None, *, has_tools: bool = False
) -> str | None:
    """The text of the template to use: that of this name, this text, or the model's default.

    Of several templates, "tool_use" is the default with tools. Raises `ValueError` if several
    templates have no default.
    """
    if not isinstance(templates, Mapping):
        return name_or_text or templates
    if name_or_text is not None:
        return templates.get(name_or_text, name_or_text)
    names = (*(["tool_use"] if has_tools else []), "default")
    chosen = next((templates[name] for name in names if name in templates), None)
    if chosen is None and templates:
        raise ValueError(
            f"the model has the chat templates {', '.join(sorted(templates))}, and none is the "
            "default: name one of them"
        )
    return chosen


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation by a template; `variables` are seen by it.

    With `continue_final_message`, the text ends with the content of the last message. Raises
    `ValueError`, `TypeError`, and whatever the template raises.
    """
    compiled = _compiled(template)
    shown = [_plain_message(message) for message in messages]
    values = {"documents": None, "add_generation_prompt": False, **plain(variables)}
    values |= {"messages": shown, "tools": plain(tools)}
    if not continue_final_message:
        return str(compiled.render(**values))
    if not shown or shown[-1].get("content") is None:
        raise ValueError("the final message has no content to continue")
    end = _mark_end(shown[-1]).strip()
    text, mark = str(compiled.render(**values)), _END_MARK.strip()
    if end not in text or mark not in text:
        raise ValueError(
            "the chat template does not write the final message as it is, so it cannot be continued"
        )
    start = text.rindex(mark)
    # A template that strips messages has removed the end of the mark, too.
    is_whole = text.startswith(_END_MARK, start)
    return text[:start] if is_whole else text[:start].rstrip()


def serve(questions: Iterator[bytes], answer: Callable[[bytes], None]) -> None:
    """Render for a parent process; the first question only asks whether this is ready.

    A question is marshalled: the longest text to send, and the arguments of `render`. The answer is
    JSON: the text, its length if that is larger, or the error with its type.
    """
    _environment()
    next(questions)
    answer(b"")
    for question in questions:
        answer(json.dumps(_answer_to(*marshal.loads(question))).encode())


def _answer_to(longest: int, template: str, messages: Any, options: Any) -> dict[str, Any]:
    try:
        text = render(template, messages, **options)
    except Exception as error:
        return {"error": words(error), "type": type(error).__name__}
    return {"text": text} if len(text) <= longest else {"length": len(text)}


def words(error: Exception) -> str:
    """What an error says, or else its name."""
    text = str(error) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."


def _mark_end(message: dict[str, Any]) -> str:
    """Add the mark to a message's last text; returns the text without it."""
    content = message["content"]
    if not isinstance(content, list | tuple):
        message["content"] = content + _END_MARK
        return str(content)
    for part in reversed(content):
        if "text" in part:
            text = part["text"]
            part["text"] = text + _END_MARK
            return str(text)
    raise ValueError("the final message has no text to continue")


def _plain_message(message: Any) -> dict[str, Any]:
    """A message without keys of None, and its reasoning by the names that templates read."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a mapping, not {message!r}")
    known = {key: value for key, value in plain(message).items() if value is not None}
    reasoning = next((known[key] for key in _REASONING if key in known), None)
    if reasoning is None:
        return known
    return {"thinking": reasoning, **known, "reasoning_content": reasoning}


def plain(value: Any) -> Any:
    """The value made of JSON types only; other objects become text that names their type."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):  # subclasses have methods that the sandbox does not know
        if isinstance(value, kind):
            return value if type(value) is kind else getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=_MAX_COMPILED)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> Any:
    """Jinja's sandbox with the names, filters and tags of chat templates."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks answers for training: only its content counts here."""

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    Generation.tags = {"generation"}

    def check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no name that begins with _: {name!r}")

    class SafeNamespace(Namespace):
        """A namespace without names that begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` is allowed
            own, *rest = args
            values = dict(*rest, **kwargs)
            for name in values:
                check_name(name)
            Namespace.__init__(own, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    class SafeDict:
        """Python's `dict` without its attributes."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        {
            "raise_exception": raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": SafeDict(),
            "namespace": SafeNamespace,
        }
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The value as JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
