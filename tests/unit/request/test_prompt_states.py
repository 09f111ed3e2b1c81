"""The hidden states of prompts, chunk by chunk, and running sums by block."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from pyengine.request.prompt_entries import PromptEntryCache
from pyengine.request.prompt_states import AllStates, LastState, MeanState, States
from pyengine.request.prompts import Prompt

SIZE, HIDDEN = 4, 3


def states_of(tokens: list[int]) -> States:
    """States that depend on all tokens before them, as a model's do."""
    numbers = [
        np.random.default_rng(tokens[: end + 1]).standard_normal(HIDDEN)
        for end in range(len(tokens))
    ]
    return np.array(numbers, dtype=np.float32)


def compute(
    receiver: MeanState | AllStates | LastState, tokens: list[int], begin: int, chunk: int
) -> None:
    """Give it the states of all tokens from `begin` on, chunk by chunk."""
    states = states_of(tokens)
    for start in range(begin, len(tokens), chunk):
        wanted = receiver.wanted(start, min(start + chunk, len(tokens)))
        if wanted:
            receiver.extend(wanted.start, states[wanted.start : wanted.stop])


def mean(cache: PromptEntryCache, tokens: list[int], namespace: bytes = b"") -> MeanState:
    return MeanState(cache, Prompt(token_ids=tokens, namespace=namespace))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_every_receiver_has_its_result_after_the_last_token(chunk: int) -> None:
    tokens = list(range(1, 15))
    states = states_of(tokens)
    last, every = LastState(len(tokens)), AllStates(len(tokens))
    average = mean(PromptEntryCache(16, SIZE), tokens)
    for receiver, wanted in ((last, states[-1]), (every, states), (average, states.mean(axis=0))):
        assert receiver.result is None
        compute(receiver, tokens, 0, chunk)
        assert receiver.result is not None and receiver.result.dtype == np.float32
        assert np.allclose(receiver.result, wanted, atol=1e-6)


def test_a_preemption_repeats_positions() -> None:
    tokens = list(range(1, 15))
    states = states_of(tokens)
    every, average = AllStates(len(tokens)), mean(PromptEntryCache(16, SIZE), tokens)
    for receiver, wanted in ((every, states), (average, states.mean(axis=0))):
        receiver.extend(0, states[:10])
        compute(receiver, tokens, 0, 5)
        assert receiver.result is not None
        assert np.allclose(receiver.result, wanted, atol=1e-6)


def test_generated_tokens_are_no_part_of_a_prompt() -> None:
    cache = PromptEntryCache(16, SIZE)
    for receiver in (LastState(5), AllStates(5), mean(cache, [1, 2, 3, 4, 5])):
        assert receiver.wanted(0, 9).stop == 5
    assert list(LastState(5).wanted(2, 4)) == []


def test_random_prefixes_give_the_mean_of_all_tokens() -> None:
    random = Random(0)
    cache = PromptEntryCache(24, SIZE)
    for _ in range(400):
        tokens = [random.randint(1, 2) for _ in range(random.randint(1, 14))]
        average = mean(cache, tokens)
        readable = average.readable_tokens()
        assert 0 <= readable < len(tokens)
        # The pool may have evicted blocks; a full hit computes its last token alone
        begin = readable if random.random() < 0.5 else random.randrange(readable // SIZE + 1) * SIZE
        compute(average, tokens, begin, random.randint(1, 6))
        assert average.result is not None
        assert np.allclose(average.result, states_of(tokens).mean(axis=0), atol=1e-6)
        assert len(cache) <= 24


def test_namespaces_share_no_sums() -> None:
    cache, tokens = PromptEntryCache(16, SIZE), [1, 2, 3, 4, 5]
    compute(mean(cache, tokens), tokens, 0, 5)
    assert mean(cache, tokens).readable_tokens() == 4
    assert mean(cache, tokens, b"other").readable_tokens() == 0


def test_requests_wait_for_a_prefix_that_another_one_computes() -> None:
    cache, tokens = PromptEntryCache(16, SIZE), [1, 2, 3, 4, 5]
    first, second = mean(cache, tokens), mean(cache, [*tokens, 6])
    assert not second.awaits_prefix()
    first.pre_register(SimpleNamespace(is_running=True))
    assert second.awaits_prefix() and not first.awaits_prefix()
    compute(first, tokens, 0, 5)
    assert not second.awaits_prefix() and second.readable_tokens() == 4
