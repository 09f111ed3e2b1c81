from typing import Any

import numpy as np
import pytest

from pyengine.errors import InvalidRequestError
from pyengine.sampling.state import SamplingState, TokenCounts, tokens_of_words
from pyengine.sampling_params import SamplingParams
from tests.support.tokenizers import Fast, byte_level, metaspace


def state(params: SamplingParams, prompt: Any = (), **settings: object) -> SamplingState:
    return SamplingState(params, prompt, seed=0, vocab_size=10, **settings)  # type: ignore[arg-type]


def test_counts_hold_the_prompt_and_grow_beyond_their_first_size() -> None:
    counts = TokenCounts([7, 3, 7])
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {3: 0, 7: 0}
    expected = {3: 0, 7: 0}
    for token in [*range(300), 7, *range(100)]:
        counts.add(token)
        expected[token] = expected.get(token, 0) + 1
    got = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert got == expected


def test_counts_are_kept_only_for_penalties() -> None:
    assert state(SamplingParams(), (1, 2)).counts is None
    presence = state(SamplingParams(presence_penalty=1), (1, 2))
    assert presence.counts is not None
    assert presence.counts.ids.tolist() == []
    presence.append(4)
    assert presence.counts.ids.tolist() == [4]
    repetition = state(SamplingParams(repetition_penalty=2), (2, 1))
    assert repetition.counts is not None
    assert repetition.counts.ids.tolist() == [1, 2]


def test_output_is_counted() -> None:
    sampling_state = state(SamplingParams())
    for expected in (1, 2, 3):
        sampling_state.append(5)
        assert sampling_state.num_output == expected


def test_stop_tokens_are_barred_until_min_tokens() -> None:
    sampling_state = state(SamplingParams(min_tokens=2, stop_token_ids=[4]), stop_ids=[9, 4])
    assert sampling_state.stop_ids.tolist() == [4, 9]
    assert not state(SamplingParams(), stop_ids=[9]).may_change_logits
    assert not state(SamplingParams(min_tokens=2)).may_change_logits


def test_something_must_be_left_to_draw() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens=1 .* all 10 tokens"):
        state(SamplingParams(min_tokens=1), stop_ids=range(10))


def test_the_vocabulary_is_checked() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias=10"):
        state(SamplingParams(logit_bias={10: 1.0}))


def test_stop_tokens_outside_the_vocabulary_are_nobodys() -> None:
    sampling_state = state(SamplingParams(min_tokens=2), stop_ids=[-1, 3, 10, 10**30])
    assert sampling_state.stop_ids.tolist() == [3]
    assert not state(SamplingParams(min_tokens=2), stop_ids=[10]).may_change_logits


def test_only_bad_words_of_several_tokens_depend_on_the_output() -> None:
    single = state(SamplingParams(), bad_words=[(3,), (5,), (3,)])
    assert single.barred_ids.tolist() == [3, 5]
    assert not single.depends_on_output
    several = state(SamplingParams(), bad_words=[(3,), (4, 5), (6, 5), (4, 7)])
    assert several.depends_on_output
    assert several.barred_by_output().tolist() == []
    several.append(4)
    assert several.barred_by_output().tolist() == [5, 7]


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        (SamplingParams(allowed_token_ids=[3, 4]), {"bad_words": [(3,), (4,)]}),
        (SamplingParams(allowed_token_ids=[3], min_tokens=1), {"stop_ids": [3]}),
        (SamplingParams(), {"bad_words": [(index,) for index in range(10)]}),
    ],
)
def test_what_is_allowed_must_not_be_barred(
    params: SamplingParams, settings: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequestError, match="leave nothing to draw"):
        state(params, **settings)


def test_a_sibling_shares_what_stays_the_same() -> None:
    params = SamplingParams(repetition_penalty=2, logit_bias={1: 2.0})
    sampling_state = state(params, (2, 1))
    other = sampling_state.sibling(seed=-1)
    assert (other.seed, other.params) == (2**64 - 1, params)
    assert other.bias_ids is sampling_state.bias_ids
    other.append(5)
    assert (sampling_state.token_ids, other.token_ids) == ([], [5])
    assert sampling_state.counts is not None
    assert other.counts is not None
    assert (sampling_state.counts.ids.tolist(), other.counts.ids.tolist()) == ([1, 2], [1, 2, 5])
    with pytest.raises(ValueError, match="1 tokens were generated"):
        other.sibling(seed=0)


def test_a_prompt_may_be_an_array_and_is_read_for_repetition_only() -> None:
    sampling_state = state(SamplingParams(repetition_penalty=2), np.array([4, 2, 4]))
    assert sampling_state.counts is not None
    assert sampling_state.counts.ids.tolist() == [2, 4]

    class Unread:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"the prompt was read: {name}")

    for params in (SamplingParams(), SamplingParams(presence_penalty=1), SamplingParams(n=2)):
        state(params, Unread())


def test_words_as_tokens() -> None:
    """In the middle of a text and at its beginning, whatever the tokenizer makes of a space."""
    merges = Fast(byte_level(400))
    spelled = tokens_of_words([" France", "zz", "France"], merges)
    assert spelled == [tuple(merges.encode(text)) for text in ("France", " France", "zz", " zz")]
    marked = Fast(metaspace())
    assert {tuple(marked.encode(text)) for text in ("of", " of")} == {
        *tokens_of_words(["of"], marked)
    }
    assert tokens_of_words([], None) == []
    with pytest.raises(InvalidRequestError, match=r"bad_words=\['a'\] needs a tokenizer"):
        tokens_of_words(["a"], None)


def test_states_ahead_are_those_after_the_drafts() -> None:
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2)
    state = SamplingState(params, [1, 2], seed=0, vocab_size=50, bad_words=[[7, 8, 9]])
    state.append(7)
    states = state.ahead([8, 3])
    assert states[0] is state
    assert [item.token_ids for item in states] == [[7], [7, 8], [7, 8, 3]]
    assert [item.barred_by_output().tolist() for item in states] == [[], [9], []]
    expected = SamplingState(params, [1, 2], seed=0, vocab_size=50, bad_words=[[7, 8, 9]])
    for token in (7, 8, 3):
        expected.append(token)
    assert states[2].counts is not None and expected.counts is not None
    assert states[2].counts.ids.tolist() == expected.counts.ids.tolist()
    assert states[2].counts.counts.tolist() == expected.counts.counts.tolist()
    assert state.counts is not None and len(state.counts) == 3
    plain = SamplingState(SamplingParams(), [1], seed=0, vocab_size=50)
    assert plain.ahead([4, 5]) == [plain] * 3
