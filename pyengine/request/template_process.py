"""Renders chat templates in child processes: a template is untrusted code.

A template that never ends, allocates without bound or crashes its interpreter costs its caller an
error and the child its life. The next call starts another child.

All threads share the children: a call takes an idle one or starts one, so no call waits for the
template of another. (With a child for each thread, every short-lived thread would start one.)
"""

import json
import marshal
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from pyengine.errors import ContextLengthError, InvalidRequestError, PyEngineError
from pyengine.models.tokenizer import chat
from pyengine.request.untrusted_calls import out_of_time
from pyengine.utils.child_process import ChildProcess, idle_child

_MEMORY, _STACK = 512 << 20, 8 << 20
"""Bytes of a child."""
_SECONDS_TO_BEGIN = 60.0
_MAX_IDLE = 4
"""Children that are kept for later calls."""
_LONGEST = 16 << 20
"""The most characters that a template may write."""
_BYTES_PER_CHARACTER, _BYTES_BESIDE = 12, 1 << 16
"""Bounds of an answer in JSON, whose longest escape is that of a surrogate pair."""


class TemplateError(Exception):
    """A template does not take a conversation, for this reason."""


def refusal(reason: object) -> InvalidRequestError:
    """The error for a conversation that the template rejects."""
    return InvalidRequestError(
        f"the model's chat template does not take this conversation: {reason}"
    )


class _Renderer(ChildProcess):
    """A process that runs `serve` of `pyengine/models/tokenizer/chat.py`."""

    def __init__(self) -> None:
        super().__init__(chat.__file__, memory=_MEMORY, stack=_STACK)
        try:
            self.exchange(b"", _SECONDS_TO_BEGIN, 0)
        except (TimeoutError, ChildProcessError) as error:
            raise PyEngineError(
                "the process that renders chat templates does not begin: it needs jinja2, and "
                f"{_MEMORY >> 20} MiB of address space"
            ) from error


_idle: list[_Renderer] = []


class TimedTemplate:
    """A chat template, and the time that is left for its renderings."""

    def __init__(self, text: str, seconds: float) -> None:
        self.text = text
        self._seconds = self._left = seconds

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        longest: int | None = None,
    ) -> str:
        """The text of a conversation; `options` are those of `chat.render`.

        Raises `TemplateError` if the template does not take it, `InvalidRequestError` when the time
        is up or the child ended, and `ContextLengthError` for more than `longest` characters.
        """
        longest = _LONGEST if longest is None else min(longest, _LONGEST)
        try:
            question = marshal.dumps(chat.plain((longest, self.text, messages, options)))
        except Exception as error:  # of values that are nested too deeply, or have bad keys
            raise TemplateError(chat.words(error)) from error
        child = idle_child(_idle) or _Renderer()
        max_bytes = longest * _BYTES_PER_CHARACTER + _BYTES_BESIDE
        begin = monotonic()  # of a child that is ready
        try:
            answer = json.loads(child.exchange(question, self._left, max_bytes))
        except TimeoutError:
            raise out_of_time("the chat template", self._seconds) from None
        except (ChildProcessError, ValueError):  # it may have been taken over
            answer = {"type": "MemoryError"}
        self._left -= monotonic() - begin
        if answer.get("type") == "MemoryError":
            child.kill()
            raise refusal(f"it needs more than {_MEMORY >> 20} MiB of memory, or crashes")
        if len(_idle) < _MAX_IDLE:
            _idle.append(child)
        if "error" in answer:
            raise TemplateError(answer["error"])
        if "length" in answer:
            raise ContextLengthError(
                f"the conversation has {answer['length']} characters as the chat template writes "
                f"it; no text of more than {longest} fits into the model's maximum context length: "
                "shorten it"
            )
        text: str = answer["text"]
        return text
