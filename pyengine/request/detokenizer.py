"""Incremental detokenization: whole characters only, and stop strings."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from pyengine.request.untrusted_calls import is_failure

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_log = logging.getLogger(__name__)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES_PER_CHARACTER = 4
"""The longest UTF-8 character: as many tokens without a whole one hold invalid bytes."""
_LONGEST_WINDOW = 24
_KEPT_TOKENS = 12
"""Tokens that a shortened window keeps; a multiple of every length of a character, so that a text
of single bytes is not always cut inside a character."""
_SHORTEST_CONTEXT = 6  # earlier tokens that are decoded first as context

_Decode: TypeAlias = Callable[[list[int]], str]


class IncrementalDetokenizer:
    """The text of one growing completion of a prompt, by a Hugging Face tokenizer.

    ``text`` holds every complete character; it is what the tokens add to the text of the prompt.
    ``stable_text`` leaves out an end that may be the beginning of a stop string: it only grows, so
    it may be streamed. ``finish`` makes the two equal.

    Stop strings end the text where they begin, or after them with ``include_stop_str_in_output``.
    The first complete one counts, of several the longest; one that ends within the first
    ``min_tokens`` tokens is ignored.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder: _StreamDecoder | _WindowDecoder | None = None
        """None once the tokenizer has failed: the text ends there."""
        self._mark = _REPLACEMENT  # the text that a failure of the tokenizer adds, once
        try:
            self._decoder = _decoder(tokenizer, skip_special_tokens, prompt_token_ids)
        except BaseException as error:
            self._stop(error)
        self._stops = StopSearch(tuple(stop)) if stop else None
        self._includes_stop = include_stop_str_in_output
        self._may_be_cut = self._stops is not None and not include_stop_str_in_output
        """True if the end of the text may be the beginning of a stop string."""
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._length = 0
        self._num_taken = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """All complete characters so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stable_text(self) -> str:
        """The part of ``text`` that no stop string can remove."""
        text = self.text
        return text[: self._stable_length()] if self._may_be_cut else text

    def take_new_text(self) -> str:
        """The stable text since the last call, in time proportional to it."""
        wanted = self._length - self._num_taken
        stable = self._stable_length() if self._may_be_cut else self._length
        end: list[str] = []
        for piece in reversed(self._pieces):
            if wanted <= 0:
                break
            end.append(piece if len(piece) <= wanted else piece[-wanted:])
            wanted -= len(piece)
        new = "".join(reversed(end))[: max(0, stable - self._num_taken)]
        self._num_taken += len(new)
        return new

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Add tokens up to one that completes a stop string, which is returned, if any does.

        The text is cut there. Without stop strings all are decoded at once, to the same text.
        Raises ``RuntimeError`` after a match or :meth:`finish`: the text has ended.
        """
        if self._is_finished:
            raise RuntimeError(f"token {token_ids[0]} comes after the end of the text")
        if self._stops is None:
            self._extend(token_ids)
            return None
        for token in token_ids:
            piece = self._extend([token])
            self._num_tokens += 1
            match = self._stops.find(piece) if self._num_tokens > self._min_tokens else None
            if match is not None:
                stop, num_after = match
                self._length -= num_after + (0 if self._includes_stop else len(stop))
                self._pieces = [self.text[: self._length]]
                self._is_finished, self._may_be_cut = True, False
                return stop
            self._stops.skip(piece)
        return None

    def finish(self) -> None:
        """End the text; bytes that never became a character appear as U+FFFD.

        May be called more than once, and after a match, where it changes nothing.
        """
        if self._is_finished:
            return
        if self._decoder is not None:
            self._extend(None)
        self._is_finished, self._may_be_cut = True, False

    def _extend(self, token_ids: Sequence[int] | None) -> str:
        """Add the characters that are complete with these tokens, or all that are left for None.

        Returns them.
        """
        piece: str | None = None
        if (decoder := self._decoder) is not None:
            try:
                piece = decoder.flush() if token_ids is None else decoder.push(token_ids)
            except BaseException as error:
                self._stop(error)
        if piece is None:
            piece, self._mark = self._mark, ""
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)
        return piece

    def _stop(self, error: BaseException) -> None:
        """Decode no further after `error` of the tokenizer; raise other errors."""
        if not is_failure(error):
            raise error
        _log.warning("the tokenizer fails on tokens of an answer, whose text ends: %r", error)
        self._decoder = None

    def _stable_length(self) -> int:
        assert self._stops is not None
        return self._length - self._stops.length_held_back()


def text_of(tokenizer: Any, token: int) -> str:
    """The text of a single token; U+FFFD if the tokenizer fails on it."""
    try:
        return str(tokenizer.decode([token]))
    except BaseException as error:
        if not is_failure(error):
            raise
        return _REPLACEMENT


def rust_tokenizer(tokenizer: Any) -> "RustTokenizer | None":
    """The tokenizer of the tokenizers library behind another one; None if there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from tokenizers import Tokenizer

    return backend if isinstance(backend, Tokenizer) else None


def _decoder(
    tokenizer: Any, skip_special_tokens: bool, before: Sequence[int]
) -> "_StreamDecoder | _WindowDecoder":
    backend = rust_tokenizer(tokenizer)
    if backend is not None:
        return _StreamDecoder(backend, skip_special_tokens, before)
    # Cleaning up would change emitted text: "Hello ," to "Hello,".
    decode = partial(
        tokenizer.decode,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return _WindowDecoder(decode, _context(decode, before))


def _context(decode: _Decode, before: Sequence[int]) -> list[int]:
    """Return the last tokens of `before`, enough to decode later tokens in context.

    Some of their text must be whole characters. Usually a few tokens are enough.
    """
    count = _SHORTEST_CONTEXT
    while True:
        tail = [int(token) for token in before[-count:]]
        if count >= len(before) or decode(tail).strip(_REPLACEMENT):
            return tail
        count *= 2


class _StreamDecoder:
    """Text by the tokenizers library's stream, while it ends in whole characters.

    The stream holds text back until it does, for invalid bytes for ever. So if it returns no text,
    or fails, a window decoder replaces it until the text is whole again.
    """

    def __init__(
        self, backend: "RustTokenizer", skip_special_tokens: bool, before: Sequence[int]
    ) -> None:
        from tokenizers.decoders import DecodeStream

        self._new_stream = DecodeStream
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._decode: _Decode = partial(backend.decode, skip_special_tokens=skip_special_tokens)
        self._tokens = _context(self._decode, before)  # all tokens since some of the prompt
        self._stream = self._new_stream(self._tokens, skip_special_tokens)
        self._window: _WindowDecoder | None = None
        if self._decode(self._tokens).endswith(_REPLACEMENT):  # the stream would emit it again
            self._window = _WindowDecoder(self._decode, self._tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters that are complete now and were not before."""
        if self._window is None:
            try:
                piece = self._stream.step(
                    self._backend, token_ids[0] if len(token_ids) == 1 else token_ids
                )
            except Exception:  # these tokens changed the text so far
                piece = None
            if piece is not None:
                self._tokens += token_ids
                return piece
            self._window = _WindowDecoder(self._decode, _context(self._decode, self._tokens))
        piece = self._window.push(token_ids)
        self._tokens += token_ids
        if self._window.is_flushed:
            self._stream = self._new_stream(self._window.tokens, self._skip_special_tokens)
            self._window = None
        return piece

    def flush(self) -> str:
        """Return the characters that were held back."""
        return "" if self._window is None else self._window.flush()


class _WindowDecoder:
    """Decodes the latest tokens together for each new one, so that the cost stays linear.

    A token's text depends on its neighbours: characters are spread over tokens, and some tokenizers
    drop the space in front of the first word. Where a text does not end in a whole character,
    ``decode`` returns U+FFFD, which is held back while further bytes may complete it.

    The window begins with earlier tokens, whose text is not emitted, except a character that they
    begin.
    """

    def __init__(self, decode: _Decode, before: list[int]) -> None:
        self._decode = decode
        self._window = list(before)
        self._window_text = decode(before)
        self._text_before = self._window_text  # until the first piece is emitted
        # characters of the window's text that were emitted
        self._num_given = len(self._window_text.rstrip(_REPLACEMENT))
        self._num_waiting = 0  # tokens since the text ended in a whole character

    @property
    def is_flushed(self) -> bool:
        """True if no characters are held back."""
        return self._num_given == len(self._window_text)

    @property
    def tokens(self) -> list[int]:
        """The tokens that the next ones are decoded with."""
        return self._window

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters that are complete now and were not before."""
        return "".join([self._push(token) for token in token_ids])

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = str(self._decode(self._window))
        if text == self._window_text and not self._decode([token_id, token_id]):
            self._window.pop()  # a token without text anywhere, as special ones
            return ""
        self._window_text = text
        final = self._final_length(text)
        if final > self._num_given:
            self._pass_what_came_before()
        piece = text[self._num_given : final]
        self._num_given = max(self._num_given, final)
        if len(self._window) > _LONGEST_WINDOW and not self._text_before:
            self._shorten_window()
        return piece

    def _pass_what_came_before(self) -> None:
        """If that ended in U+FFFD, see whether it was one, or a part of a character."""
        if self._window_text.startswith(self._text_before):
            self._num_given = max(self._num_given, len(self._text_before))
        self._text_before = ""

    def flush(self) -> str:
        """Return the characters that were held back."""
        self._pass_what_came_before()
        piece = self._window_text[self._num_given :]
        self._num_given = len(self._window_text)
        return piece

    def _final_length(self, text: str) -> int:
        """Return how many characters of ``text`` no further token can change."""
        final = len(text.rstrip(_REPLACEMENT))
        if final == len(text):
            self._num_waiting = 0
        else:
            self._num_waiting += 1
            if self._num_waiting >= _BYTES_PER_CHARACTER:
                return len(text) - 1  # invalid bytes; only the last may begin a character
        return final

    def _shorten_window(self) -> None:
        """Forget the oldest tokens, if the text of the others stays what it is without them.

        A cut inside a character shows its remaining bytes as U+FFFD: harmless if a whole character
        follows.
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


class StopSearch:
    """Searches for stop strings in a growing text, of which it keeps the end only.

    The cost per character grows with the number of different lengths, not of strings.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = _prepared(stops)
        self._tail = ""

    def skip(self, piece: str) -> None:
        """Add text in which matches are ignored."""
        longest = self._stops.lengths[0]
        self._tail = (self._tail + piece)[1 - longest :] if longest > 1 else ""

    def find(self, piece: str) -> tuple[str, int] | None:
        """Return the match that ends first in `piece`, and the number of characters after it."""
        stops, tail = self._stops, self._tail
        text = tail + piece
        for end in range(len(tail) + 1, len(text) + 1):
            if text[end - 1] in stops.last_characters:
                for length in stops.lengths:
                    if length <= end and text[end - length : end] in stops.strings:
                        return text[end - length : end], len(text) - end
        return None

    def length_held_back(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        tail, ordered = self._tail, self._stops.ordered
        for start, character in enumerate(tail):
            if character in self._stops.first_characters:
                end = tail[start:]
                at = bisect_left(ordered, end)
                if at < len(ordered) and ordered[at] == end:  # it came too early
                    at += 1
                if at < len(ordered) and ordered[at].startswith(end):
                    return len(end)
        return 0


@dataclass(frozen=True, slots=True)
class _StopStrings:
    strings: frozenset[str]
    ordered: list[str]
    lengths: list[int]
    """Distinct lengths, the longest first."""
    first_characters: frozenset[str]
    last_characters: frozenset[str]


@lru_cache(maxsize=8)
def _prepared(stops: tuple[str, ...]) -> _StopStrings:
    """Prepare the search; samples of a request, and equal requests, share the result."""
    strings = frozenset(stops)
    return _StopStrings(
        strings=strings,
        ordered=sorted(strings),
        lengths=sorted({len(stop) for stop in strings}, reverse=True),
        first_characters=frozenset(stop[0] for stop in strings),
        last_characters=frozenset(stop[-1] for stop in strings),
    )
