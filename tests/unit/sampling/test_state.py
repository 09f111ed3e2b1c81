import pytest

from pyengine.core.errors import InvalidRequestError
from pyengine.core.sampling_params import SamplingParams
from pyengine.sampling.state import SamplingState, TokenCounts


def state(
    params: SamplingParams, prompt: tuple[int, ...] = (), **settings: object
) -> SamplingState:
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
    one = state(SamplingParams())
    for expected in (1, 2, 3):
        one.append(5)
        assert one.num_output == expected


def test_stop_tokens_are_barred_until_min_tokens() -> None:
    one = state(SamplingParams(min_tokens=2, stop_token_ids=[4]), stop_ids=[9, 4])
    assert one.stop_ids.tolist() == [4, 9]
    assert [one.must_go_on(position) for position in range(3)] == [True, True, False]
    assert not state(SamplingParams(), stop_ids=[9]).must_go_on(0)
    assert not state(SamplingParams(min_tokens=2)).changes_logits(0)


def test_something_must_be_left_to_draw() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens=1 .* all 10 tokens"):
        state(SamplingParams(min_tokens=1), stop_ids=range(10))


def test_the_vocabulary_is_checked() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias=10"):
        state(SamplingParams(logit_bias={10: 1.0}))


def test_stop_tokens_outside_the_vocabulary_are_nobodys() -> None:
    one = state(SamplingParams(min_tokens=2), stop_ids=[-1, 3, 10, 10**30])
    assert one.stop_ids.tolist() == [3]
    assert not state(SamplingParams(min_tokens=2), stop_ids=[10]).must_go_on(0)
