"""Parses prompts of every form into token ids."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pyengine.errors import InvalidRequestError
from pyengine.models.adapters import AppliedAdapter
from pyengine.pooling_params import PoolingParams
from pyengine.request.untrusted_calls import raise_tokenizer_error, tokenizer_errors, within
from pyengine.sampling_params import SamplingParams
from pyengine.utils import validation
from pyengine.utils.validation import is_integer

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
PromptLike: TypeAlias = str | TokenIds | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` (text) or `prompt_token_ids`, and `cache_salt`."""
_Params = TypeVar("_Params", SamplingParams, PoolingParams)

_LONGEST_TRUSTED = 1000
"""Maximum length of a text that needs no time limit, in characters: the tokenizers library stops
after 10^7 tries at one position, a fifth of a second."""
_SECONDS, _SECONDS_PER_CHARACTER = 10.0, 100e-6
"""The time limit for longer texts: a hundred times the usual time."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class StrippedThinking:
    """The tokens of a prompt and its answer that the chat template omits from the next turn."""

    begin: int
    end: int
    """The tokens around thinking."""
    call: int | None = None
    """An answer with this token is kept: the results of its tool call follow with its thinking."""
    num_prompt_tail: int = 0
    """The tokens of a prompt from its first token of thinking on; 0 if the answer begins it."""

    def num_kept(self, num_prompt: int, token_ids: Sequence[int]) -> int | None:
        """The tokens of prompt and answer before the thinking; None if the next turn has all."""
        if self.call is not None and self.call in token_ids:
            return None
        if self.num_prompt_tail:
            return num_prompt - self.num_prompt_tail
        if self.begin in token_ids and self.end in token_ids:
            return num_prompt + token_ids.index(self.begin)
        return None


class BlockSpace(TypedDict):
    """The namespace of a prompt's blocks, and its switch: see `BlockManager.sequence`."""

    namespace: bytes
    switch: tuple[int, bytes] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A parsed prompt.

    `token_ids` are a list or an int64 array `[T]`; `text` is their source, if that was text.
    Prompts of different `namespace`s share no blocks; with a `switch`, from its position on their
    blocks are shared only under its name, too. `thinking` is the part of prompt and answer
    that the next turn of a conversation leaves out. `adapter` changes the model for it.
    """

    token_ids: Sequence[int]
    text: str | None = None
    namespace: bytes = b""
    switch: tuple[int, bytes] | None = None
    thinking: StrippedThinking | None = None
    adapter: AppliedAdapter | None = None

    @property
    def space(self) -> BlockSpace:
        """The namespace of its blocks, and its switch."""
        return {"namespace": self.namespace, "switch": self.switch}


def as_list(prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    """One or several prompts, as a list."""
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


def parse_prompt(prompt: PromptLike, tokenizer: Any) -> Prompt:
    """The token ids of one prompt.

    Raises `InvalidRequestError` for another form, for unknown keys, for invalid text, and for text
    without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, tokenizer)
    if isinstance(prompt, str):
        return Prompt(token_ids=_as_ids(tokens_of(prompt, tokenizer)), text=prompt)
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
            f"'prompt' is {shown(text)}: it must be text; token ids go into 'prompt_token_ids'"
        )
    if text is None and ids is None:
        raise InvalidRequestError(
            "a prompt given as a mapping has 'prompt' or 'prompt_token_ids', "
            f"this one has {sorted(prompt)}"
        )
    namespace = salt_namespace(prompt.get("cache_salt"))
    token_ids = _as_ids(tokens_of(text or "", tokenizer)) if ids is None else _token_ids(ids)
    return Prompt(token_ids=token_ids, text=text, namespace=namespace)


def salt_namespace(cache_salt: Any) -> bytes:
    """The namespace of a `cache_salt`: only requests with the same one share blocks."""
    if cache_salt is None:
        return b""
    if not isinstance(cache_salt, str) or not cache_salt:
        raise InvalidRequestError(
            f"cache_salt={shown(cache_salt)}: it must be text of at least one character, or None"
        )
    try:
        return cache_salt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"cache_salt={cache_salt!a} is no valid Unicode") from error


def salted(prompt: Prompt, cache_salt: Any) -> Prompt:
    """The prompt with a `cache_salt` that was given beside it; unchanged if that is None.

    Raises `InvalidRequestError` if the prompt has another one.
    """
    if cache_salt is None:
        return prompt
    namespace = salt_namespace(cache_salt)
    if prompt.namespace not in (b"", namespace):
        raise InvalidRequestError(
            f"cache_salt={cache_salt!r} and another one in the prompt: give it once"
        )
    return replace(prompt, namespace=namespace)


_as_ids: Callable[[Sequence[int]], Any] = partial(np.array, dtype=np.int64)
"""Token ids as int64 [T]."""


def tokens_of(text: str, tokenizer: Any, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text, with or without those that the tokenizer adds.

    Raises `InvalidRequestError` if it is no text, without a tokenizer, and where that fails on the
    text or seems to take for ever.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(f"{shown(text)} is no text")
    if tokenizer is None:
        raise InvalidRequestError(
            f"the prompt {text[:40]!r} is text and this model has no tokenizer: give token ids"
        )
    if not text.isascii():
        refuse_surrogates(text)
    encode = tokenizer.encode
    if not add_special_tokens:
        encode = partial(encode, add_special_tokens=False)
    try:
        if len(text) <= _LONGEST_TRUSTED:
            return cast(list[int], encode(text))
        seconds = _SECONDS + len(text) * _SECONDS_PER_CHARACTER
        return cast(list[int], within(seconds, partial(encode, text), "the model's tokenizer"))
    except BaseException as error:
        raise_tokenizer_error(error)


def text_from(token_ids: TokenIds, tokenizer: Any, *, skip_special_tokens: bool = False) -> str:
    """The text of token ids, spaces unchanged.

    Raises `InvalidRequestError` if they are no list of token ids, and without a tokenizer.
    """
    ids = np.asarray(_token_ids(token_ids))
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer, so its token ids have no text")
    if len(ids) and int(ids.min()) < 0:
        raise InvalidRequestError(f"token id {ids.min()} is outside of any vocabulary")
    with tokenizer_errors():
        text: str = tokenizer.decode(
            ids.tolist(),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
    return text


def refuse_surrogates(text: str) -> None:
    """Raise for invalid Unicode text: half a surrogate pair, which JSON can express."""
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
                    f"a prompt is text or token ids; found {shown(token)} at position {position}"
                )
    try:
        return cast(Sequence[int], _as_ids(several))
    except OverflowError:
        position = next(at for at, token in enumerate(several) if not -(2**63) <= token < 2**63)
        raise InvalidRequestError(
            f"token id {shown(several[position])} at position {position} of the prompt is outside "
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


def _no_prompt(prompt: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"{shown(prompt)} is no prompt: give text, a list or an array of token ids, or a mapping "
        "with 'prompt' or 'prompt_token_ids'"
    )


def shown(value: Any) -> str:
    """A value and its type, short enough for a message."""
    return f"{validation.shown(value)} ({type(value).__name__})"


def match_params(
    params: _Params | Sequence[_Params] | None, num_prompts: int, default: _Params
) -> list[_Params]:
    """One set of parameters per prompt, of the kind of `default`."""
    kind = type(default)
    name = "sampling_params" if kind.__name__ == "SamplingParams" else "pooling_params"
    if params is None:
        params = default
    if isinstance(params, kind):
        return [params] * num_prompts
    given: Any = params
    several: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for value in several:
        if not isinstance(value, kind):
            raise InvalidRequestError(
                f"{name} holds {shown(value)}: give {kind.__name__}(...), one for all "
                "prompts or one for each"
            )
    if len(several) != num_prompts:
        raise InvalidRequestError(
            f"{len(several)} {name} for {num_prompts} prompts: give one for all, or one for each"
        )
    return several


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of leading tokens that two prompts have in common."""
    pairs = zip(first, second, strict=False)
    different = (index for index, (one, other) in enumerate(pairs) if one != other)
    return next(different, min(len(first), len(second)))
