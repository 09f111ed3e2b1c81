"""The merges of vocabularies of words against a dictionary of their tokens."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyengine.models.tokenizer import word_merges
from pyengine.models.tokenizer.word_merges import merges_of_words

WORDS = st.lists(st.text("ab\u2581\u00e9", min_size=1, max_size=7), unique=True, min_size=1)


def by_dictionary(texts: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs, each token's with the longest beginning first; the best tokens first."""
    ranked = []
    for text, score in zip(texts, scores, strict=True):
        for cut in range(1, len(text)):
            if text[:cut] in texts and text[cut:] in texts:
                ranked.append(((-score, -cut, cut - len(text)), (text[:cut], text[cut:])))
    return [pair for _, pair in sorted(ranked, key=lambda pair: pair[0])]


@given(WORDS)
def test_by_their_places(texts: list[str]) -> None:
    assert merges_of_words(texts) == by_dictionary(texts, [float(-at) for at in range(len(texts))])


@given(WORDS, st.integers(0, 99))
def test_by_scores_of_which_some_are_equal(texts: list[str], seed: int) -> None:
    scores = np.random.default_rng(seed).integers(-3, 0, len(texts)).astype(np.float32)
    actual, expected = merges_of_words(texts, scores), by_dictionary(texts, scores.tolist())
    assert sorted(actual) == sorted(expected)
    order = {text: score for text, score in zip(texts, scores.tolist(), strict=True)}
    ranks = [(-order[a + b], -len(a), -len(b)) for a, b in actual]
    assert ranks == sorted(ranks)


def test_many_tokens_are_looked_at_in_parts() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [*letters, *(a + b for a in letters for b in letters)]
    texts += [a + b for a in texts[26:] for b in letters]
    assert len(texts) > 2 * word_merges._CHUNK
    expected = [(text[:cut], text[cut:]) for text in texts for cut in range(len(text) - 1, 0, -1)]
    assert merges_of_words(texts) == expected
