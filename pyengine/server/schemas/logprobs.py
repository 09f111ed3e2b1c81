"""Log-probabilities in the formats of completions, chats and prompts."""

from collections.abc import Iterator, Mapping, Sequence

from pyengine.outputs import Logprob
from pyengine.server.schemas.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobInfo,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from pyengine.server.schemas.slices import items

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Entries = Sequence[Mapping[int, Logprob] | None]
"""For each token: the token itself, then the most likely ones."""


def _value(entry: Logprob) -> float:
    return max(_MIN_LOGPROB, entry.logprob)  # in this order it is not NaN


def _text(token: int, entry: Logprob, as_ids: bool | None) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token or ""


def _bytes(entry: Logprob) -> bytes:
    if entry.token_bytes is None:
        return (entry.decoded_token or "").encode(errors="replace")
    return entry.token_bytes


def _name(token: int, entry: Logprob, as_ids: bool | None) -> str:
    """The text of a token of a completion; parts of characters as in OpenAI's API."""
    text, data = _text(token, entry, as_ids), entry.token_bytes
    if as_ids or not data or _REPLACEMENT not in text or data == text.encode():
        return text
    return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])


def num_characters(entry: Logprob) -> int:
    """The characters that begin in this token: those of all tokens add up to their text's."""
    return sum([byte & 0xC0 != 0x80 for byte in _bytes(entry)])


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Entries,
    *,
    offset: int = 0,
    first: str = "",
    as_ids: bool | None,
) -> CompletionLogprobs:
    """Log-probabilities of tokens whose text begins at `offset`.

    The first token of a prompt has no entry; `first` is its text.
    """
    pairs = list(zip(token_ids, entries, strict=True))

    def tokens() -> Iterator[str]:
        for token, candidates in pairs:
            chosen = Logprob(0, 0, first) if candidates is None else candidates[token]
            yield _name(token, chosen, as_ids)

    def values() -> Iterator[float | None]:
        for token, candidates in pairs:
            yield None if candidates is None else _value(candidates[token])

    def tops() -> Iterator[dict[str, float] | None]:
        for _, candidates in pairs:
            yield None if candidates is None else _by_text(candidates, as_ids)

    def offsets() -> Iterator[int]:
        end = offset
        for token, candidates in pairs:
            yield end
            end += len(first) if candidates is None else num_characters(candidates[token])

    return CompletionLogprobs(
        text_offset=items(len(pairs), offsets),
        token_logprobs=items(len(pairs), values),
        tokens=items(len(pairs), tokens),
        top_logprobs=items(len(pairs), tops),
    )


def _by_text(candidates: Mapping[int, Logprob], as_ids: bool | None) -> dict[str, float]:
    """Values by text; if several tokens have the same text, the largest value."""
    values: dict[str, float] = {}
    for token, entry in candidates.items():
        text, value = _name(token, entry, as_ids), _value(entry)
        values[text] = max(value, values.get(text, value))
    return values


def chat_logprobs(
    token_ids: Sequence[int], entries: Entries, *, top: int, as_ids: bool | None
) -> ChatLogprobs:
    """Log-probabilities of an answer's tokens, each with the `top` most likely ones."""

    def content() -> Iterator[TokenLogprob]:
        for token, candidates in zip(token_ids, entries, strict=True):
            assert candidates is not None
            ranked = sorted(candidates.items(), key=lambda item: item[1].rank)[:top]
            chosen = _top(token, candidates[token], as_ids)
            tops = [_top(other, entry, as_ids) for other, entry in ranked]
            yield TokenLogprob(
                token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=tops
            )

    return ChatLogprobs(content=items(len(token_ids), content))


def _top(token: int, entry: Logprob, as_ids: bool | None) -> TopLogprob:
    return TopLogprob(
        token=_text(token, entry, as_ids), logprob=_value(entry), bytes=list(_bytes(entry))
    )


def prompt_logprobs(entries: Entries) -> PromptLogprobs:
    """Log-probabilities of a prompt's tokens, by token id."""

    def of_tokens() -> Iterator[dict[int, LogprobInfo] | None]:
        for candidates in entries:
            infos = {token: _info(entry) for token, entry in (candidates or {}).items()}
            yield None if candidates is None else infos

    of_prompt: PromptLogprobs = items(len(entries), of_tokens)
    return of_prompt


def _info(entry: Logprob) -> LogprobInfo:
    """A token of a prompt, with its bytes if its text does not have them."""
    text = entry.decoded_token
    info = LogprobInfo(logprob=_value(entry), rank=entry.rank, decoded_token=text)
    if text is not None and _REPLACEMENT in text and _bytes(entry) != text.encode():
        info.bytes = list(_bytes(entry))
    return info
