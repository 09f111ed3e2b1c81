"""Tokens to text, one at a time: whole characters only, and stop strings found on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES_PER_CHARACTER = 4
"""The longest UTF-8 character; so many tokens without a whole one hold bytes that are none."""
_LONGEST_WINDOW = 24
_KEPT_TOKENS = 12
"""How much a window keeps when it is shortened; a multiple of every length of a character, so
that a text spelled byte by byte is not cut inside one over and over."""


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> Any:
        """Return the text of ``token_ids``: a ``str`` for a flat list."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found; the text has been cut there."""

    stop: str


class IncrementalDetokenizer:
    """The text of one growing completion.

    ``text`` holds every character that is complete. ``stable_text`` leaves out an end that may
    yet turn out to be the beginning of a stop string: it only ever grows, so it is what may be
    streamed. ``finish`` makes the two equal.

    Stop strings end the text where they begin, or behind them with
    ``include_stop_str_in_output``. Of several, the one that is complete first counts, whatever
    the tokens' borders; of those, the longest. One whose last character comes with the first
    ``min_tokens`` tokens doesn't count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._decoder = _WindowDecoder(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._text = ""
        self._num_searched = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """All complete characters so far."""
        return self._text

    @property
    def stable_text(self) -> str:
        """The part of ``text`` that no stop string can take back."""
        if self._is_finished or self._includes_stop:
            return self._text
        return self._text[: len(self._text) - _length_held_back(self._text, self._stop)]

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def append_many(self, token_ids: Sequence[int]) -> StopMatch | None:
        for token in token_ids:
            match = self.append(token)
            if match is not None:
                return match
        return None

    def append(self, token_id: int) -> StopMatch | None:
        """Add one token; say which stop string it completed, if any.

        Raises ``RuntimeError`` after a match or :meth:`finish`: the text has ended.
        """
        if self._is_finished:
            raise RuntimeError(f"token {token_id} comes after the end of the text")
        self._num_tokens += 1
        self._text += self._decoder.push(token_id)
        if self._num_tokens <= self._min_tokens:
            self._num_searched = len(self._text)
            return None
        return self._cut_at_stop()

    def finish(self) -> None:
        """End the text; bytes that never became a character appear as U+FFFD.

        May be called more than once, and after a match, where it changes nothing.
        """
        if not self._is_finished:
            self._text += self._decoder.flush()
            self._is_finished = True

    def _cut_at_stop(self) -> StopMatch | None:
        found = _first_match(self._text, self._stop, self._num_searched)
        self._num_searched = len(self._text)
        if found is None:
            return None
        start, stop = found
        self._text = self._text[: start + len(stop) if self._includes_stop else start]
        self._is_finished = True
        return StopMatch(stop)


class _WindowDecoder:
    """Decodes a few tokens again for each new one, so that the cost stays linear.

    A token's text depends on its neighbours: characters are spread over tokens, and some
    tokenizers drop the space in front of the first word. So the latest tokens are decoded
    together, and what is new at the end of their text is given out. Where a text does not end
    in a whole character, ``decode`` says U+FFFD; that is held back as long as further bytes may
    complete it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._window_text = ""
        self._num_given = 0  # characters of the window's text that were given out
        self._num_waiting = 0  # tokens since the text ended in a whole character

    def push(self, token_id: int) -> str:
        """Return the characters that are complete now and were not before."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._window_text and not self._decode([token_id, token_id]):
            self._window.pop()  # a token without text wherever it stands, as special ones
            return ""
        self._window_text = text
        settled = self._settled_length(text)
        piece = text[self._num_given : settled]
        self._num_given = max(self._num_given, settled)
        if len(self._window) > _LONGEST_WINDOW:
            self._shorten_window()
        return piece

    def flush(self) -> str:
        """Return what was held back."""
        piece = self._window_text[self._num_given :]
        self._num_given = len(self._window_text)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        # Cleaning up would change text that was given out: "Hello ," to "Hello,".
        return str(
            self._tokenizer.decode(
                token_ids,
                skip_special_tokens=self._skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def _settled_length(self, text: str) -> int:
        """Return how many characters of ``text`` no further token can change."""
        settled = len(text.rstrip(_REPLACEMENT))
        if settled == len(text):
            self._num_waiting = 0
        else:
            self._num_waiting += 1
            if self._num_waiting >= _BYTES_PER_CHARACTER:
                return len(text) - 1  # invalid bytes; only the last may begin a character
        return settled

    def _shorten_window(self) -> None:
        """Forget the oldest tokens, if the text of the others stays what it is without them.

        Where the cut falls inside a character, its remaining bytes show as U+FFFD in front;
        they do no harm if a whole character follows. Otherwise a later cut will do.
        """
        tail = self._window[-_KEPT_TOKENS:]
        tail_text = self._decode(tail)
        common = tail_text.lstrip(_REPLACEMENT)
        if not common and self._num_waiting >= _BYTES_PER_CHARACTER:
            common = tail_text
        num_held_back = len(self._window_text) - self._num_given
        if len(common) > num_held_back and self._window_text.endswith(common):
            self._window, self._window_text = tail, tail_text
            self._num_given = len(tail_text) - num_held_back


def _first_match(text: str, stops: Sequence[str], num_searched: int) -> tuple[int, str] | None:
    """Return start and stop string of the match that ends first, behind ``num_searched``."""
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, num_searched - len(stop) + 1))
        if start >= 0:
            matches.append((start + len(stop), start, stop))
    if not matches:
        return None
    _, start, stop = min(matches)
    return start, stop


def _length_held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` with which a stop string begins."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0
