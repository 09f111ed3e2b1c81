"""Log-probabilities in the formats of completions, chats and prompts."""

from collections.abc import Mapping, Sequence

from pyengine.outputs import Logprob
from pyengine.server.schemas.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobInfo,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Entries = Sequence[Mapping[int, Logprob] | None]
"""For each token: the token itself, then the most likely ones."""


def _value(entry: Logprob) -> float:
    return max(_MIN_LOGPROB, entry.logprob)  # in this order it is no NaN


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
    logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token, candidates in zip(token_ids, entries, strict=True):
        chosen = None if candidates is None else candidates[token]
        entry = chosen or Logprob(0, 0, first)
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(_name(token, entry, as_ids))
        logprobs.token_logprobs.append(None if chosen is None else _value(chosen))
        logprobs.top_logprobs.append(None if candidates is None else _by_text(candidates, as_ids))
        offset += num_characters(entry)
    return logprobs


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
    content = []
    for token, candidates in zip(token_ids, entries, strict=True):
        assert candidates is not None
        ranked = sorted(candidates.items(), key=lambda item: item[1].rank)[:top]
        chosen = _top(token, candidates[token], as_ids)
        others = [_top(other, entry, as_ids) for other, entry in ranked]
        content.append(
            TokenLogprob(
                token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=others
            )
        )
    return ChatLogprobs(content=content)


def _top(token: int, entry: Logprob, as_ids: bool | None) -> TopLogprob:
    return TopLogprob(
        token=_text(token, entry, as_ids), logprob=_value(entry), bytes=list(_bytes(entry))
    )


def prompt_logprobs(entries: Entries) -> PromptLogprobs:
    """Log-probabilities of a prompt's tokens, by token id."""
    return [
        None if candidates is None else {token: _info(entry) for token, entry in candidates.items()}
        for candidates in entries
    ]


def _info(entry: Logprob) -> LogprobInfo:
    """A token of a prompt, with its bytes if its text does not have them."""
    text = entry.decoded_token
    info = LogprobInfo(logprob=_value(entry), rank=entry.rank, decoded_token=text)
    if text is not None and _REPLACEMENT in text and _bytes(entry) != text.encode():
        info.bytes = list(_bytes(entry))
    return info
