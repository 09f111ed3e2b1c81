"""Incremental text against the tokenizer's own decoding of everything at once."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.request.detokenizer import IncrementalDetokenizer
from tests.support.tokenizers import CORPUS, Decoder, Fast, byte_fallback, byte_level

REPLACEMENT = "\ufffd"
BYTES = byte_level(257)
MERGES = byte_level(400)
FALLBACK = byte_fallback()
FAST_BYTES, FAST_MERGES, FAST_FALLBACK = Fast(BYTES), Fast(MERGES), Fast(FALLBACK)
END = 0  # <|end|> of the byte-level tokenizers

texts = st.text(
    st.one_of(st.sampled_from("".join(CORPUS)), st.characters(exclude_categories=["Cs"])),
    max_size=60,
).filter(lambda text: "<|end|>" not in text)  # a special token has no text


def pieces(tokenizer: Any, tokens: list[int], **settings: object) -> Iterator[str]:
    """The pieces that a caller prints who streams ``stable_text``."""
    detokenizer = IncrementalDetokenizer(tokenizer, **settings)  # type: ignore[arg-type]
    shown = ""
    for token in tokens:
        match = detokenizer.append([token])
        assert detokenizer.text.startswith(detokenizer.stable_text)
        assert detokenizer.stable_text.startswith(shown)
        yield detokenizer.stable_text[len(shown) :]
        shown = detokenizer.stable_text
        if match is not None:
            break
    detokenizer.finish()
    assert detokenizer.stable_text == detokenizer.text
    assert detokenizer.text.startswith(shown)
    yield detokenizer.text[len(shown) :]


@pytest.mark.parametrize(
    "tokenizer",
    [BYTES, MERGES, FAST_BYTES, FAST_MERGES],
    ids=["bytes", "merges", "fast bytes", "fast merges"],
)
@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_pieces_of_a_text_are_whole_characters_and_add_up(
    tokenizer: Decoder | Fast, text: str
) -> None:
    tokens = tokenizer.encode(text)
    got = list(pieces(tokenizer, tokens))
    assert "".join(got) == tokenizer.decode(tokens) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in got)


@given(tokens=st.lists(st.integers(0, MERGES.tokenizer.get_vocab_size() - 1), max_size=80))
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_tokens_add_up(tokens: list[int]) -> None:
    for skip in (True, False):
        for tokenizer in (MERGES, FAST_MERGES):
            got = pieces(tokenizer, tokens, skip_special_tokens=skip)
            assert "".join(got) == MERGES.decode(tokens, skip_special_tokens=skip)


@given(
    st.lists(
        st.one_of(
            # A spelled-out U+FFFD looks like bytes that are still incomplete.
            st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT).map(
                lambda character: [1 + byte for byte in character.encode()]
            ),
            st.integers(257, FALLBACK.tokenizer.get_vocab_size() - 1).map(lambda token: [token]),
        ),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_pieces_add_up_with_byte_fallback_and_stripped_spaces(parts: list[list[int]]) -> None:
    tokens = [token for part in parts for token in part]
    for tokenizer in (FALLBACK, FAST_FALLBACK):
        assert "".join(pieces(tokenizer, tokens)) == FALLBACK.decode(tokens)


def test_a_character_appears_with_its_last_byte() -> None:
    for tokenizer in (BYTES, FAST_BYTES):
        assert list(pieces(tokenizer, BYTES.encode("a😀b"))) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_appears_only_at_the_end() -> None:
    for tokenizer in (BYTES, FAST_BYTES):
        tokens = BYTES.encode("a😀")[:-1]
        assert list(pieces(tokenizer, tokens)) == ["a", "", "", "", REPLACEMENT]


@pytest.mark.parametrize("tokenizer", [BYTES, FAST_BYTES], ids=["slow", "fast"])
def test_bytes_that_no_token_can_complete_are_not_held_back_for_ever(
    tokenizer: Decoder | Fast,
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    token = BYTES.encode("😀")[1]  # a continuation byte
    lengths = []
    BYTES.num_decoded = 0
    for _ in range(400):
        detokenizer.append([token])
        lengths.append(len(detokenizer.text))
    assert lengths[:4] == [0, 0, 0, 3]
    assert lengths[-1] == 399
    assert BYTES.num_decoded <= 30 * 400


def test_text_spelled_byte_by_byte_stays_whole_beyond_any_window() -> None:
    text = "😀日本語é" * 60
    tokens = [1 + byte for byte in text.encode()]
    for tokenizer in (FALLBACK, FAST_FALLBACK):
        assert "".join(pieces(tokenizer, tokens)) == text


@pytest.mark.parametrize("text", ["the capital " * 200, "日本語" * 200, "😀" * 200])
def test_the_cost_is_linear(text: str) -> None:
    for tokenizer in (BYTES, MERGES):
        tokens = tokenizer.encode(text)
        tokenizer.num_decoded = 0
        assert "".join(pieces(tokenizer, tokens)) == text
        assert tokenizer.num_decoded <= 30 * len(tokens)


class Chunks:
    """A tokenizer whose tokens are any byte strings."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks
        self.num_decoded = 0

    def decode(self, token_ids: list[int], **_settings: bool) -> str:
        self.num_decoded += len(token_ids)
        return b"".join(self.chunks[token] for token in token_ids).decode(errors="replace")


def test_tokens_that_always_end_inside_a_character() -> None:
    text = "a" + "é" * 500
    data = text.encode()
    tokenizer = Chunks([data[start : start + 2] for start in range(0, len(data), 2)])
    got = list(pieces(tokenizer, list(range(len(tokenizer.chunks)))))
    assert got == ["a", *["é"] * 500, ""]
    assert tokenizer.num_decoded <= 30 * len(tokenizer.chunks)


class Alternating(Chunks):
    """A tokenizer whose text depends on how many tokens came before."""

    def decode(self, token_ids: list[int], **_settings: bool) -> str:
        words = [self.chunks[token].decode() for token in token_ids]
        return "".join(word.upper() if i % 2 else word for i, word in enumerate(words))


def test_tokens_are_kept_where_forgetting_them_would_change_the_text() -> None:
    assert "".join(pieces(Alternating([b"a", b"b"]), [0, 1, 1] * 50)) == "aBbAbB" * 25


def test_special_tokens_cost_little_and_leave_no_trace() -> None:
    tokens = [*[END] * 500, *MERGES.encode("The"), *[END] * 500, *MERGES.encode(" capital")]
    MERGES.num_decoded = 0
    assert "".join(pieces(MERGES, tokens)) == "".join(pieces(FAST_MERGES, tokens)) == "The capital"
    assert MERGES.num_decoded <= 30 * len(tokens)


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    first, *rest = BYTES.encode("😀")
    for tokenizer in (BYTES, FAST_BYTES):
        assert "".join(pieces(tokenizer, [first, *[END] * 9, *rest])) == "😀"


def test_special_tokens_are_shown_if_wanted() -> None:
    tokens = [*MERGES.encode("The"), END]
    assert "".join(pieces(MERGES, tokens, skip_special_tokens=False)) == "The<|end|>"


def run(text: str, tokenizer: Any = BYTES, **settings: object) -> tuple[str, str | None, int]:
    """Feed ``text`` byte by byte; return the final text, the stop string, the tokens taken."""
    detokenizer = IncrementalDetokenizer(tokenizer, **settings)  # type: ignore[arg-type]
    match, taken = None, 0
    for token in BYTES.encode(text):
        match = detokenizer.append([token])
        taken += 1
        if match is not None:
            break
    detokenizer.finish()
    return detokenizer.text, match, taken


def test_a_stop_string_cuts_the_text_before_it() -> None:
    assert run("one. two. three", stop=(". t",)) == ("one", ". t", 6)


def test_a_stop_string_stays_if_wanted() -> None:
    got = run("one. two", stop=(". t",), include_stop_str_in_output=True)
    assert got == ("one. t", ". t", 6)


def test_text_behind_a_stop_string_in_the_same_token_is_cut() -> None:
    (token,) = MERGES.encode("The")
    for included, text in ((False, "T"), (True, "Th")):
        detokenizer = IncrementalDetokenizer(
            MERGES, stop=("h",), include_stop_str_in_output=included
        )
        assert detokenizer.append([token]) == "h"
        assert detokenizer.text == detokenizer.stable_text == text


def test_the_stop_string_that_is_complete_first_wins_in_any_order() -> None:
    for stop in (("abcd", "bc"), ("bc", "abcd")):
        detokenizer = IncrementalDetokenizer(MERGES, stop=stop)
        matches = [detokenizer.append([token]) for token in MERGES.encode("x")]
        assert matches == [None]
        assert run("xabcd", stop=stop) == ("xa", "bc", 4)


def test_of_stop_strings_complete_at_once_the_longest_wins() -> None:
    assert run("xabc", stop=("c", "abc", "bc")) == ("x", "abc", 4)


def test_the_beginning_of_a_stop_string_is_not_streamed() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=("<end>",))
    shown = []
    for token in BYTES.encode("a<en<end"):
        assert detokenizer.append([token]) is None
        shown.append(detokenizer.stable_text)
    assert shown == ["a", "a", "a", "a", "a<en", "a<en", "a<en", "a<en"]
    assert detokenizer.text == "a<en<end"
    detokenizer.finish()
    assert detokenizer.stable_text == "a<en<end"


def test_a_stop_string_that_came_too_early_is_streamed() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=("x", "abc"), min_tokens=9)
    assert detokenizer.append([BYTES.encode("x")[0]]) is None
    assert detokenizer.stable_text == "x"


def test_nothing_is_held_back_if_the_stop_string_stays_anyway() -> None:
    assert list(pieces(BYTES, BYTES.encode("a<e"), stop=("<e!",), include_stop_str_in_output=True))[
        :3
    ] == ["a", "<", "e"]


@pytest.mark.parametrize(("min_tokens", "text", "taken"), [(0, "", 1), (1, "x", 2), (2, "xx", 3)])
def test_a_stop_string_counts_after_min_tokens(min_tokens: int, text: str, taken: int) -> None:
    assert run("xxxxx", stop=("x",), min_tokens=min_tokens) == (text, "x", taken)


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    assert run("abc", stop=("bc",), min_tokens=2) == ("a", "bc", 3)
    assert run("abc", stop=("bc",), min_tokens=3) == ("abc", None, 3)


@given(
    text=st.text("ab€", max_size=20),
    stop=st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_against_a_search_of_every_beginning(text: str, stop: list[str]) -> None:
    expected: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            expected = (text[: end - len(longest)], longest)
            break
    for tokenizer in (BYTES, FAST_BYTES):
        got, match, _ = run(text, tokenizer, stop=tuple(stop))
        assert (got, match) == expected
    assert "".join(pieces(BYTES, BYTES.encode(text), stop=tuple(stop))) == got


def test_the_text_has_an_end() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=("b",))
    for token in BYTES.encode("ab"):
        match = detokenizer.append([token])
    assert match == "b"
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == "a"
    with pytest.raises(RuntimeError, match="token 5 comes after the end"):
        detokenizer.append([5])
