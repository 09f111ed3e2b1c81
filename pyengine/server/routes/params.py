"""Fields of a request as sampling parameters, and the limits of the server."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from pyengine.request.request import Request
from pyengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputs
from pyengine.server.errors import FieldError
from pyengine.server.schemas.requests import (
    MAX_ITEMS,
    MAX_WORD_CHARACTERS,
    CompletionRequest,
    SamplingFields,
)
from pyengine.server.settings import ServerSettings
from pyengine.utils.validation import shown

_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "speculate",
    "cache_priority",
)
"""Fields of `SamplingParams` that have the same name in requests."""


def sampling_params(
    body: SamplingFields, default: SamplingParams, overrides: Mapping[str, Any]
) -> SamplingParams:
    """The sampling parameters of a request. Omitted and null fields have the values of `default`.

    `overrides` are parameters that the route computes. Raises `InvalidRequestError`.
    """
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    fields = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        fields["stop"] = [text for text in stops if text]  # an empty string has no effect
    _check_words(body.bad_words or ())
    if body.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    structured = _structured_outputs(body)
    if structured is not None:
        fields["structured_outputs"] = structured
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "stream_options needs stream: true")
    return replace(default, **{**fields, **overrides, "output_kind": kind})


def _check_words(words: Sequence[str]) -> None:
    length = sum(map(len, words))
    if length > MAX_WORD_CHARACTERS:
        message = f"bad_words have {length} characters in all: the limit is {MAX_WORD_CHARACTERS}"
        raise FieldError("bad_words", message)


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not re.fullmatch(r"0|[1-9][0-9]{0,18}", token):  # a canonical form: no id occurs twice
            message = f"logit_bias[{reprlib.repr(token)}]: its keys must be token ids, as text"
            raise FieldError("logit_bias", message)
    return {int(token): value for token, value in bias.items()}


def _structured_outputs(body: SamplingFields) -> StructuredOutputs | None:
    """The required form of the answer. Raises `InvalidRequestError` for an invalid one."""
    response_format, fields = body.response_format, body.structured_outputs
    if response_format is not None and response_format.type != "text":
        if fields is not None:
            message = "response_format and structured_outputs exclude each other: send one of them"
            raise FieldError("response_format", message)
        if response_format.type == "json_object":
            return StructuredOutputs(json_object=True)
        if response_format.json_schema is None:
            message = "response_format.json_schema is missing"
            raise FieldError("response_format.json_schema", message)
        return StructuredOutputs(json=response_format.json_schema.schema_)
    if fields is None:
        return None
    return StructuredOutputs(**fields.model_dump(by_alias=True, exclude_none=True))


def check_count(n: int | None, num_prompts: int) -> None:
    """Raise `ApiError` if a call asks for too many answers."""
    if (n or 1) * num_prompts > MAX_ITEMS:
        raise FieldError(
            "n",
            f"n={n or 1} answers to each of {num_prompts} prompts: the limit is {MAX_ITEMS} in all",
        )


def within_limit(body: SamplingFields, params: SamplingParams, limit: int | None) -> SamplingParams:
    """Apply the server's limit of tokens per answer.

    It is the default of `max_tokens`. Raises `ApiError` for a request of more tokens.
    """
    name, length = _length_field(body)
    if limit is None:
        return params
    if length is not None and length > limit:
        message = f"{name}={shown(length)}: this server's limit is {limit} tokens per answer"
        raise FieldError(name, message, code="max_answer_tokens")
    longest = limit if params.max_tokens is None else min(limit, params.max_tokens)
    return replace(params, max_tokens=longest)


def check_length(body: SamplingFields, request: Request) -> None:
    """Raise `ApiError` if prompt and requested answer exceed the context length."""
    (name, length), limit = _length_field(body), request.rules.max_output
    if length is not None and length > limit:
        num_prompt_tokens = len(request.prompt_token_ids)
        raise FieldError(
            name,
            f"{name}={shown(length)}: the prompt has {num_prompt_tokens} tokens and the context "
            f"{num_prompt_tokens + limit}, so the answer can have at most {limit} tokens",
            code="context_length_exceeded",
        )


def check_logprobs(
    body: SamplingFields, requests: Sequence[Request], settings: ServerSettings
) -> None:
    """Raise `ApiError` if a response could have too many log-probabilities.

    A completion repeats the prompt, its ids and log-probabilities in each of its `n` choices.
    """
    params = requests[0].params
    num_tokens = sum([len(request.prompt_token_ids) for request in requests])
    copies, top = params.n if isinstance(body, CompletionRequest) else 1, params.prompt_logprobs
    is_repeated = copies > 1 and bool(getattr(body, "echo", None) or body.return_token_ids)
    if top is not None or is_repeated:
        _check_product(
            {"prompt_tokens": num_tokens, "n": copies, "prompt_logprobs": max(1, top or 1)},
            "max_prompt_logprobs",
            settings.max_prompt_logprobs,
        )
    if params.logprobs is not None:
        longest = sum([request.rules.max_output for request in requests])
        _check_product(
            {"n": params.n, "answer_tokens": longest, "logprobs": max(1, params.logprobs)},
            "max_answer_logprobs",
            settings.max_answer_logprobs,
        )


def _check_product(factors: Mapping[str, int], name: str, limit: int) -> None:
    count = prod(factors.values())
    if count > limit:
        numbers = ", ".join(f"{factor}={number}" for factor, number in factors.items())
        raise FieldError(
            "prompt_logprobs" if name == "max_prompt_logprobs" else "logprobs",
            f"the response could have {count} log-probabilities or copies of tokens (the product "
            f"of {numbers}); this server's limit is {limit} (--{name.replace('_', '-')}): send "
            "fewer or shorter prompts at a time, or request less",
            code="too_many_logprobs",
        )


def _length_field(body: SamplingFields) -> tuple[str, int | None]:
    """Name and value of the field that limits the answer's length."""
    length = getattr(body, "max_completion_tokens", None)
    return ("max_tokens", body.max_tokens) if length is None else ("max_completion_tokens", length)


def check_priority(priority: float, limit: float) -> None:
    """Raise `ApiError` (400) if the absolute value of a priority exceeds the limit."""
    if abs(priority) <= limit:
        return
    allowed = f"from -{limit:g} to {limit:g}" if limit else "0, unless --max-priority is set"
    raise FieldError("priority", f"priority={priority:g}: this server allows {allowed}")
