"""The prompt as context, many tokens at once, and the library's stream against the window."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.request.detokenizer import IncrementalDetokenizer
from tests.support.tokenizers import CORPUS, Decoder, Fast, byte_fallback, byte_level, metaspace

REPLACEMENT = "\ufffd"
SLOW = {
    "bytes": byte_level(257),
    "merges": byte_level(400),
    "fallback": byte_fallback(),
    "metaspace": metaspace(),
}
EVERY = [
    pytest.param(item if kind == "slow" else Fast(item), id=f"{kind} {name}")
    for name, item in SLOW.items()
    for kind in ("slow", "fast")
]
SPACED = [item for item in EVERY if "fallback" in str(item.id) or "metaspace" in str(item.id)]


def added_text(tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """The text that the output's tokens add to the prompt's, by decoding all at once."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    if not whole.startswith(before):
        before = before.rstrip(REPLACEMENT)  # the output completes the prompt's last character
    assert whole.startswith(before)
    return whole[len(before) :]


def incremental(
    tokenizer: Any, prompt: Sequence[int], parts: list[list[int]], **settings: Any
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt, **settings)
    got = []
    for part in parts:
        assert detokenizer.append(part) is None
        got.append(detokenizer.take_new_text())
        assert "".join(got) == detokenizer.stable_text
    detokenizer.finish()
    got.append(detokenizer.take_new_text())
    assert "".join(got) == detokenizer.text == detokenizer.stable_text
    return got


@pytest.mark.parametrize("tokenizer", SPACED)
def test_the_first_space_of_an_answer_stays(tokenizer: Any) -> None:
    backend = tokenizer.tokenizer if isinstance(tokenizer, Decoder) else tokenizer.backend_tokenizer
    words = [backend.token_to_id(word) for word in ("▁of", "▁Paris")]
    prompt = tokenizer.encode("The capital")
    output = tokenizer.encode("of Paris") if None in words else words
    assert "".join(incremental(tokenizer, prompt, [[item] for item in output])) == " of Paris"
    assert "".join(incremental(tokenizer, prompt, [output])) == " of Paris"
    assert "".join(incremental(tokenizer, [], [output])) == "of Paris"


@pytest.mark.parametrize("tokenizer", SPACED)
def test_tokens_without_text_are_no_context(tokenizer: Any) -> None:
    special = tokenizer.encode("<s>")[-1:]
    assert tokenizer.decode(special) == ""
    output = tokenizer.encode("of Paris")[-4:]
    text = " " + tokenizer.decode(output).lstrip()
    for num_special in (1, 5, 6, 7, 100):
        prompt = [*tokenizer.encode("The capital"), *special * num_special]
        assert "".join(incremental(tokenizer, prompt, [output])).strip() == text.strip()
        assert "".join(incremental(tokenizer, prompt, [output])) == added_text(
            tokenizer, prompt, output
        )
    assert "".join(incremental(tokenizer, special, [output])) == added_text(
        tokenizer, special, output
    )


def cut(tokens: list[int], borders: list[int]) -> list[list[int]]:
    places = sorted({0, len(tokens), *(border for border in borders if border < len(tokens))})
    return [tokens[a:b] for a, b in pairwise(places)]


borders = st.lists(st.integers(0, 60), max_size=12)


@pytest.mark.parametrize("tokenizer", EVERY[:4])
@given(data=st.data(), borders=borders, skip=st.booleans())
@settings(max_examples=250)
def test_any_tokens_after_any_prompt(
    tokenizer: Any, data: st.DataObject, borders: list[int], skip: bool
) -> None:
    backend = tokenizer.tokenizer if isinstance(tokenizer, Decoder) else tokenizer.backend_tokenizer
    token = st.integers(0, backend.get_vocab_size() + 1)  # the last ones are unknown
    prompt = data.draw(st.lists(token, max_size=30))
    output = data.draw(st.lists(token, max_size=60))
    got = incremental(tokenizer, prompt, cut(output, borders), skip_special_tokens=skip)
    assert "".join(got) == added_text(tokenizer, prompt, output, skip=skip)


characters = st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT)


@pytest.mark.parametrize("tokenizer", SPACED)
@given(data=st.data(), borders=borders, skip=st.booleans())
@settings(max_examples=250)
def test_whole_characters_after_any_prompt(
    tokenizer: Any, data: st.DataObject, borders: list[int], skip: bool
) -> None:
    """Bytes that are no text change the text before them with these tokenizers."""
    backend = tokenizer.tokenizer if isinstance(tokenizer, Decoder) else tokenizer.backend_tokenizer
    spelled = characters.map(lambda item: [1 + byte for byte in item.encode()])
    word = st.integers(257, backend.get_vocab_size() - 1).map(lambda token: [token])
    parts = st.lists(st.one_of(spelled, word), max_size=20)
    prompt = [token for part in data.draw(parts) for token in part]
    output = [token for part in data.draw(parts) for token in part]
    got = incremental(tokenizer, prompt, cut(output, borders), skip_special_tokens=skip)
    assert "".join(got) == added_text(tokenizer, prompt, output, skip=skip)


@pytest.mark.parametrize("tokenizer", EVERY)
@given(text=st.lists(st.sampled_from(CORPUS), max_size=3).map(" ".join), borders=borders)
@settings(max_examples=60)
def test_texts_in_parts(tokenizer: Any, text: str, borders: list[int]) -> None:
    tokens = tokenizer.encode(text)
    for split in (0, len(tokens) // 3, len(tokens) // 2):
        prompt, output = tokens[:split], tokens[split:]
        got = incremental(tokenizer, prompt, cut(output, borders))
        assert "".join(got) == added_text(tokenizer, prompt, output)


@pytest.mark.parametrize("name", ["bytes", "merges"])
@given(data=st.data())
@settings(max_examples=200)
def test_the_stream_gives_each_character_when_the_window_does(
    name: str, data: st.DataObject
) -> None:
    slow = SLOW[name]
    token = st.one_of(st.integers(0, 256), st.integers(0, slow.tokenizer.get_vocab_size() - 1))
    prompt, output = (data.draw(st.lists(token, max_size=40)) for _ in range(2))
    parts = [[item] for item in output]
    assert incremental(Fast(slow), prompt, parts) == incremental(slow, prompt, parts)


def test_a_prompt_that_ends_inside_a_character() -> None:
    for tokenizer in (SLOW["bytes"], Fast(SLOW["bytes"])):
        whole = tokenizer.encode("a😀b")
        for split in range(1, len(whole)):
            got = incremental(tokenizer, whole[:split], [[item] for item in whole[split:]])
            assert "".join(got) == ("😀b" if split < 5 else "b")
        broken = [*tokenizer.encode("a"), whole[1]]
        assert incremental(tokenizer, broken, [tokenizer.encode("xy")]) == ["xy", ""]
        assert incremental(tokenizer, broken, [[], []]) == ["", "", ""]
        own = tokenizer.encode(f"a{REPLACEMENT}")
        assert incremental(tokenizer, own, [tokenizer.encode("x")]) == ["x", ""]


def test_a_long_prompt_costs_no_more_than_a_short_one() -> None:
    tokenizer = SLOW["merges"]
    prompt = tokenizer.encode("The capital of France is Paris. " * 1000)
    tokenizer.num_decoded = 0
    IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt)
    assert tokenizer.num_decoded <= 40
    output = tokenizer.encode(" The")
    assert incremental(Fast(tokenizer), np.array(prompt), [output])[0] == " The"


def test_a_stream_that_fails_does_not_show() -> None:
    class Failing:
        def __init__(self, *_args: object) -> None: ...

        def step(self, *_args: object) -> str:
            raise Exception("Invalid prefix encountered")

    tokenizer = Fast(SLOW["merges"])
    prompt, output = tokenizer.encode(CORPUS[0]), tokenizer.encode(CORPUS[2])
    with patch("tokenizers.decoders.DecodeStream", Failing):
        assert "".join(incremental(tokenizer, prompt, [[item] for item in output])) == CORPUS[2]
    # With bytes that are no text this kind makes the stream fail by itself.
    fallback = Fast(SLOW["fallback"])
    paris = fallback.backend_tokenizer.token_to_id("▁Paris")
    broken = [*(1 + byte for byte in "日本".encode()), 1 + 0xE6, paris]
    assert "".join(incremental(fallback, [], [[sequence] for sequence in broken])).endswith(
        " Paris"
    )


@pytest.mark.parametrize("tokenizer", EVERY)
@given(
    text=st.text("ab€ T", max_size=30),
    stop=st.lists(st.text("ab€ ", min_size=1, max_size=4), min_size=1, max_size=3),
    included=st.booleans(),
    min_tokens=st.integers(0, 12),
    borders=borders,
)
@settings(max_examples=120)
def test_many_tokens_at_once_stop_where_single_ones_do(
    tokenizer: Any,
    text: str,
    stop: list[str],
    included: bool,
    min_tokens: int,
    borders: list[int],
) -> None:
    output = tokenizer.encode(text)
    results = []
    for parts in ([[token] for token in output], cut(output, borders), [output]):
        detokenizer = IncrementalDetokenizer(
            tokenizer, stop=stop, include_stop_str_in_output=included, min_tokens=min_tokens
        )
        match = None
        for part in parts:
            match = detokenizer.append(part) if part else None
            assert detokenizer.text.startswith(detokenizer.stable_text)
            if match is not None:
                break
        detokenizer.finish()
        results.append((detokenizer.text, match))
    assert results[0] == results[1] == results[2]


def test_many_and_long_stop_strings_cost_little() -> None:
    tokenizer = Fast(SLOW["bytes"])
    stop = [f"{number:x}!" for number in range(10**5)] + ["a" * 10**6]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stop)
    for token in tokenizer.encode("one two three " * 20 + "beef"):
        assert detokenizer.append([token]) is None
    assert detokenizer.text[len(detokenizer.stable_text) :] == "beef"
    assert detokenizer.append(tokenizer.encode("!?")) == "beef!"


def test_new_text_is_taken_once() -> None:
    tokenizer = Fast(SLOW["bytes"])
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["<end>"])
    detokenizer.append(tokenizer.encode("a<en"))
    assert [detokenizer.take_new_text() for _ in range(2)] == ["a", ""]
    detokenizer.append(tokenizer.encode("x<e"))
    assert detokenizer.text == "a<enx<e"
    assert detokenizer.take_new_text() == "<enx"
    detokenizer.append(tokenizer.encode("nd>zzz"))
    assert [detokenizer.take_new_text() for _ in range(2)] == ["", ""]
    assert detokenizer.text == "a<enx"


@pytest.mark.slow
def test_the_embedded_models_tokenizer() -> None:
    from pyengine.models.loader import tokenizer_of
    from pyengine.models.source import resolve_source

    tokenizer = tokenizer_of(resolve_source(None))
    assert hasattr(tokenizer, "backend_tokenizer")
    generator = np.random.default_rng(0)
    for text in CORPUS:
        tokens = tokenizer.encode(text)
        got = incremental(tokenizer, tokens[:5], [[token] for token in tokens[5:]])
        assert "".join(got) == added_text(tokenizer, tokens[:5], tokens[5:])
    for _ in range(300):
        tokens = generator.integers(0, len(tokenizer), 60).tolist()
        borders = generator.integers(0, 40, 8).tolist()
        for skip in (True, False):
            got = incremental(
                tokenizer, tokens[:20], cut(tokens[20:], borders), skip_special_tokens=skip
            )
            assert "".join(got) == added_text(tokenizer, tokens[:20], tokens[20:], skip=skip)
