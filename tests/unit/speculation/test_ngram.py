"""Prompt look-up against a search of all positions."""

from random import Random

import pytest

from pyengine.core.request import Request
from pyengine.speculation import NgramDrafter


class Text:
    is_drawn = False

    def __init__(self, prompt: list[int], output: list[int] | None = None) -> None:
        self.request = Request(request_id="a", prompt_token_ids=prompt)
        self.token_ids = output or []


def searched(tokens: list[int], most: int, lengths: range) -> list[int]:
    """The same by looking everywhere."""
    for length in reversed(lengths):
        end = tokens[-length:]
        for start in reversed(range(len(tokens) - length)):
            if len(end) == length and tokens[start : start + length] == end:
                following = tokens[start + length :]
                return (following * most)[:most]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_finds(seed: int) -> None:
    random = Random(seed)
    shortest = random.randint(1, 3)
    lengths = range(shortest, shortest + random.randint(1, 3))
    drafter = NgramDrafter(shortest=lengths[0], longest=lengths[-1])
    texts = [Text([random.randrange(3) for _ in range(random.randint(1, 30))]) for _ in range(3)]
    found = 0
    for _ in range(40):
        most = [random.randint(0, 6) for _ in texts]
        drafts = drafter.propose(texts, most)
        for text, count, draft in zip(texts, most, drafts, strict=True):
            tokens = [*text.request.prompt_token_ids, *text.token_ids]
            assert list(draft.tokens) == searched(tokens, count, lengths)
            assert draft.support in (0, *lengths)
            found += len(draft.tokens) > 0
            text.token_ids += [random.randrange(3) for _ in range(random.randint(0, 3))]
    assert found > 10


def test_it_forgets() -> None:
    drafter, text = NgramDrafter(), Text([1, 2, 3, 1, 2])
    assert list(drafter.propose([text], [2])[0].tokens) == [3, 1]
    drafter.forget(text)
    drafter.forget(text)
    assert not drafter._seen
