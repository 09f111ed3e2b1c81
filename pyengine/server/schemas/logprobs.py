"""Log-probabilities as clients read them: of completions, of chats, of prompts."""

from collections.abc import Mapping, Sequence

from pyengine.core.outputs import Logprob
from pyengine.server.schemas.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobInfo,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_LEAST = -9999.0
"""For what has no probability at all: JSON knows no infinity."""

Entries = Sequence[Mapping[int, Logprob] | None]
"""For each token the one that is there first, then the likeliest."""


def _value(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)


def _text(token: int, entry: Logprob, as_ids: bool | None) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token or ""


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Entries,
    *,
    offset: int = 0,
    first: str = "",
    as_ids: bool | None,
) -> CompletionLogprobs:
    """Of tokens whose text begins at `offset`.

    The first token of a prompt, which nothing precedes, has no entry; `first` is its text.
    """
    found = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token, several in zip(token_ids, entries, strict=True):
        own = None if several is None else several[token]
        text = _text(token, own or Logprob(0, 0, first), as_ids)
        found.text_offset.append(offset)
        found.tokens.append(text)
        found.token_logprobs.append(None if own is None else _value(own))
        found.top_logprobs.append(None if several is None else _by_text(several, as_ids))
        offset += len(text)
    return found


def _by_text(several: Mapping[int, Logprob], as_ids: bool | None) -> dict[str, float]:
    """Values by text: of tokens with the same one, parts of a character say, the likeliest."""
    found: dict[str, float] = {}
    for token, entry in several.items():
        text, value = _text(token, entry, as_ids), _value(entry)
        found[text] = max(value, found.get(text, value))
    return found


def chat_logprobs(
    token_ids: Sequence[int], entries: Entries, *, top: int, as_ids: bool | None
) -> ChatLogprobs:
    """Of an answer's tokens, each with the `top` likeliest."""
    content = []
    for token, several in zip(token_ids, entries, strict=True):
        assert several is not None
        ranked = sorted(several.items(), key=lambda item: item[1].rank)[:top]
        own = _top(token, several[token], as_ids)
        others = [_top(other, entry, as_ids) for other, entry in ranked]
        content.append(
            TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=others)
        )
    return ChatLogprobs(content=content)


def _top(token: int, entry: Logprob, as_ids: bool | None) -> TopLogprob:
    text = entry.decoded_token or ""
    return TopLogprob(
        token=_text(token, entry, as_ids),
        logprob=_value(entry),
        bytes=list(text.encode(errors="replace")),
    )


def prompt_logprobs(entries: Entries) -> PromptLogprobs:
    """Of a prompt's tokens, by token id."""
    return [
        None
        if several is None
        else {
            token: LogprobInfo(
                logprob=_value(entry), rank=entry.rank, decoded_token=entry.decoded_token
            )
            for token, entry in several.items()
        }
        for several in entries
    ]
