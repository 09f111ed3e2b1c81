"""Prompts and conversations in every form that callers give them, to token ids."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from pyengine.core.errors import InvalidRequestError
from pyengine.core.fields import is_integer
from pyengine.core.sampling_params import SamplingParams

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
PromptLike: TypeAlias = str | TokenIds | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` (text) or `prompt_token_ids`, and `cache_salt`."""
Message: TypeAlias = Mapping[str, Any]
"""One turn of a conversation: `role`, and `content` or `tool_calls`."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_MESSAGE_KEYS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
)
_RESERVED = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "tokenize",
        "return_dict",
        "return_tensors",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt in the form that the engine takes.

    `token_ids` are a list or an int64 array `[T]`; `text` is what they were made of, if it came
    as text. Prompts of different `namespace`s share no blocks.
    """

    token_ids: Sequence[int]
    text: str | None = None
    namespace: bytes = b""


def as_list(prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    """One prompt or several, as several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview | set | frozenset) or not (
        isinstance(prompts, Iterable)
    ):
        raise _no_prompt(prompts)
    if hasattr(prompts, "__array__"):
        array = _as_array(prompts)
        return [array] if array.ndim == 1 else list(array)
    several: list[Any] = list(prompts)
    if several and is_integer(several[0]):
        return [several]
    return several


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or several, as several."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequestError(
            f"{_shown(messages)} is no conversation: give a list of messages, each with 'role' "
            "and 'content'"
        )
    several: list[Any] = list(messages)
    if all(isinstance(item, Mapping) for item in several):
        return [several]
    return several


def parse_prompt(prompt: PromptLike, tokenizer: Any) -> Prompt:
    """The token ids of one prompt.

    Raises `InvalidRequestError` for another form, for keys that are not known, for text that no
    tokenizer could read, and for text without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, tokenizer)
    if isinstance(prompt, str):
        return Prompt(token_ids=_encode(prompt, tokenizer), text=prompt)
    return Prompt(token_ids=_token_ids(prompt))


def _parse_mapping(prompt: Mapping[str, Any], tokenizer: Any) -> Prompt:
    unknown = [key for key in prompt if key not in _PROMPT_KEYS]
    if unknown:
        raise InvalidRequestError(
            f"{unknown[0]!r} in a prompt is not known and would change nothing: leave it out; "
            f"known are {', '.join(map(repr, _PROMPT_KEYS))}"
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(
            f"'prompt' is {_shown(text)}: it must be text; token ids go into 'prompt_token_ids'"
        )
    if text is None and ids is None:
        raise InvalidRequestError(
            "a prompt given as a mapping has 'prompt' or 'prompt_token_ids', "
            f"this one has {sorted(prompt)}"
        )
    namespace = salt_namespace(prompt.get("cache_salt"))
    token_ids = _encode(text or "", tokenizer) if ids is None else _token_ids(ids)
    return Prompt(token_ids=token_ids, text=text, namespace=namespace)


def salt_namespace(cache_salt: Any) -> bytes:
    """The namespace of a `cache_salt`: only requests with the same one share blocks."""
    if cache_salt is None:
        return b""
    if not isinstance(cache_salt, str) or not cache_salt:
        raise InvalidRequestError(
            f"cache_salt={_shown(cache_salt)}: it must be text of at least one character, or None"
        )
    try:
        return cache_salt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"cache_salt={cache_salt!a} is no valid Unicode") from error


def _encode(text: str, tokenizer: Any) -> Sequence[int]:
    if tokenizer is None:
        raise InvalidRequestError(
            f"the prompt {text[:40]!r} is text and this model has no tokenizer: give token ids"
        )
    _refuse_surrogates(text)
    return cast(Sequence[int], np.array(tokenizer.encode(text), dtype=np.int64))


def _refuse_surrogates(text: str) -> None:
    """Raise for what is no Unicode text: half a pair, as JSON can spell it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has {text[error.start]!a} at position {error.start}, half of a character "
            "that UTF-16 spells with two: remove it or complete it"
        ) from error


def _token_ids(ids: Any) -> Sequence[int]:
    """Token ids as int64 [T], a copy."""
    if isinstance(ids, str | bytes | bytearray | memoryview | set | frozenset | Mapping):
        raise _no_prompt(ids)
    if hasattr(ids, "__array__"):
        array = _as_array(ids)
        if array.ndim != 1:
            raise InvalidRequestError(
                f"token ids of shape {array.shape}: one prompt has one dimension"
            )
        return cast(Sequence[int], array.astype(np.int64))
    if not isinstance(ids, Iterable):
        raise _no_prompt(ids)
    several = list(ids)
    if set(map(type, several)) - {int}:  # NumPy's integers are fine, too; bools are not
        for position, token in enumerate(several):
            if not is_integer(token):
                raise InvalidRequestError(
                    f"a prompt is text or token ids; found {_shown(token)} at position {position}"
                )
    try:
        return cast(Sequence[int], np.array(several, dtype=np.int64))
    except OverflowError:
        position = next(at for at, token in enumerate(several) if not -(2**63) <= token < 2**63)
        raise InvalidRequestError(
            f"token id {_shown(several[position])} at position {position} of the prompt is outside "
            "of any vocabulary"
        ) from None


def _as_array(ids: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(ids)
    except (TypeError, RuntimeError, ValueError) as error:  # a tensor on a device, say
        raise InvalidRequestError(
            f"{type(ids).__name__} cannot be read as token ids: {error}"
        ) from (error)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise InvalidRequestError(
            f"an array of {array.dtype} and shape {array.shape} is no prompt: token ids are "
            "integers, one dimension for one prompt"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise InvalidRequestError(f"token id {array.max()} is outside of any vocabulary")
    return array


def _no_prompt(found: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"{_shown(found)} is no prompt: give text, a list or an array of token ids, or a mapping "
        "with 'prompt' or 'prompt_token_ids'"
    )


def _shown(value: Any) -> str:
    """A value and its type, short enough for a message."""
    try:
        text = repr(value)
    except Exception:
        text = "?"
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{text} ({type(value).__name__})"


def match_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    num_prompts: int,
    default: SamplingParams,
) -> list[SamplingParams]:
    """One set of sampling parameters per prompt."""
    if params is None:
        params = default
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    given: Any = params
    several: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for one in several:
        if not isinstance(one, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params holds {_shown(one)}: give SamplingParams(...), one for all "
                "prompts or one for each"
            )
    if len(several) != num_prompts:
        raise InvalidRequestError(
            f"{len(several)} sampling_params for {num_prompts} prompts: "
            "give one for all, or one for each"
        )
    return several


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    `tools` are JSON schemas of functions, `template` replaces the model's own, and `variables` are
    handed to it (vLLM's `chat_template_kwargs`). With `continue_final_message` the last message is
    left open and the model goes on with it.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    variables: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message=True goes on with the last message, and "
                "add_generation_prompt=True begins a new one: set one of them to False"
            )
        reserved = sorted(_RESERVED & set(self.variables or ()))
        if reserved:
            raise InvalidRequestError(
                f"{reserved[0]!r} cannot be set by chat_template_kwargs: it has a parameter of its "
                "own"
            )


DEFAULT_CHAT = ChatOptions()


def render_chat(
    messages: Sequence[Message], tokenizer: Any, options: ChatOptions = DEFAULT_CHAT
) -> list[int]:
    """The token ids of a conversation by the model's chat template, as transformers renders it.

    Raises `InvalidRequestError` for messages that no template takes, and with the template's own
    words for those that this one refuses.
    """
    from jinja2 import TemplateError

    template = options.template or getattr(tokenizer, "chat_template", None)
    if tokenizer is None or not template:
        raise InvalidRequestError(
            "this model has no chat template: use generate with a prompt written out"
        )
    given: Any = messages
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidRequestError(f"{_shown(given)} is no conversation: give a list of messages")
    several = [_message(at, one, str(template)) for at, one in enumerate(given)]
    if not several:
        raise InvalidRequestError("the conversation is empty: it needs at least one message")
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            several,
            tools=None if options.tools is None else [dict(tool) for tool in options.tools],
            chat_template=options.template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=True,
            return_dict=False,
            **(options.variables or {}),
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise InvalidRequestError(
            f"the model's chat template does not take this conversation: {error}"
        ) from error
    return ids


def _message(position: int, message: Any, template: str) -> dict[str, Any]:
    """A message as templates take it: text as text, arguments of tool calls as mappings."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"message {position} is {_shown(message)}: a message has 'role' and 'content'"
        )
    unknown = [one for one in message if one not in _MESSAGE_KEYS and str(one) not in template]
    if unknown:
        raise InvalidRequestError(
            f"message {position} has the key {unknown[0]!r}, which the chat template does not "
            f"read; known are {', '.join(sorted(_MESSAGE_KEYS))}"
        )
    plain = dict(message)
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None:
        if not calls:
            raise InvalidRequestError(
                f"message {position} has neither 'content' nor 'tool_calls': give one of them"
            )
        plain["content"] = ""  # templates add it to other text
    else:
        plain["content"] = _content(position, content)
    if calls:
        plain["tool_calls"] = [_tool_call(position, call) for call in calls]
    return plain


def _content(position: int, content: Any) -> str:
    """The text of a message; given in parts, as OpenAI's API takes it, a line for each."""
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            found = f"a part of type {kind!r}" if kind not in (None, "text") else _shown(content)
            raise InvalidRequestError(
                f"the content of message {position} is {found}: this engine takes text, as a "
                "string or as parts of type 'text'"
            )
        _refuse_surrogates(text)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(position: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"a tool call of message {position} is {_shown(call)}: it has 'function' with 'name' "
            "and 'arguments'"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's API gives them as JSON, templates read a mapping
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InvalidRequestError(
                f"the arguments of a tool call of message {position} are no JSON: {error}"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}
