"""Prompts in every form that callers give them, to token ids."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from pyengine.core.errors import InvalidRequestError
from pyengine.core.sampling_params import SamplingParams
from pyengine.engine.engine import Prompt

PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` (text) or `prompt_token_ids`."""
Message: TypeAlias = Mapping[str, Any]
"""One turn of a conversation: `role` and `content`."""


def as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or several, as several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = list(prompts)
    if several and all(isinstance(item, Integral) for item in several):
        return [several]
    return several


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or several, as several."""
    several: list[Any] = list(messages)
    if all(isinstance(item, Mapping) for item in several):
        return [several]
    return several


def parse_prompt(prompt: PromptLike, tokenizer: Any) -> Prompt:
    """The token ids of one prompt.

    Raises `InvalidRequestError` for another form, and for text without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        if prompt.get("prompt_token_ids") is not None:
            text = prompt.get("prompt")
            return Prompt(token_ids=_token_ids(prompt["prompt_token_ids"]), text=text)
        if "prompt" not in prompt:
            raise InvalidRequestError(
                f"a prompt given as a mapping has 'prompt' or 'prompt_token_ids', "
                f"this one has {sorted(prompt)}"
            )
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        return Prompt(token_ids=_token_ids(prompt))
    if tokenizer is None:
        raise InvalidRequestError(
            f"the prompt {prompt[:40]!r} is text and this model has no tokenizer: give token ids"
        )
    return Prompt(token_ids=list(tokenizer.encode(prompt)), text=prompt)


def _token_ids(ids: Any) -> list[int]:
    try:
        ids = list(ids)
    except TypeError:
        ids = [ids]
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InvalidRequestError(
                f"a prompt is text or token ids; found {token!r} at position {position}"
            )
    return [int(token) for token in ids]


def match_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One set of sampling parameters per prompt."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    params = list(params)
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"{len(params)} sampling_params for {num_prompts} prompts: "
            "give one for all, or one for each"
        )
    return params


def render_chat(
    messages: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool
) -> list[int]:
    """The token ids of a conversation by the model's chat template."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError(
            "this model has no chat template: use generate with a prompt written out"
        )
    if not messages:
        raise InvalidRequestError("the conversation is empty: it needs at least one message")
    several: Sequence[Any] = messages
    for position, message in enumerate(several):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidRequestError(
                f"message {position} is {message!r}: a message has 'role' and 'content'"
            )
    ids: list[int] = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
    )
    return ids
