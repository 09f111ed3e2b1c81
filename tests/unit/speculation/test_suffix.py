"""The suffix drafter: own tokens, earlier answers, namespaces. The search is tested in Rust."""

import pytest

from pyengine.kv_cache import SuffixIndex, TokenError
from pyengine.speculation.drafters import Draft, SuffixDrafter
from tests.unit.speculation.test_ngram import Text


def text(prompt: list[int], namespace: bytes = b"") -> Text:
    made = Text(prompt)
    made.request.space = {"namespace": namespace, "switch": None}
    return made


def test_it_follows_the_request_s_own_tokens() -> None:
    drafter, context = SuffixDrafter(), text([1, 2, 3, 4, 5, 6, 1, 2])
    assert drafter.propose([context], [4]) == [Draft()]
    context.token_ids.append(3)
    assert drafter.propose([context], [3]) == [Draft([4, 5, 6], 3)]
    context.token_ids += [4, 5]
    assert drafter.propose([context], [1]) == [Draft([6], 5)]


def test_it_follows_earlier_answers_of_the_same_namespace_alone() -> None:
    drafter, first = SuffixDrafter(), text([1, 2, 3], b"a")
    drafter.propose([first], [3])
    first.token_ids += [4, 5, 6, 7]  # what came since it was last asked counts, too
    drafter.forget(first)
    same, other = text([9, 1, 2, 3], b"a"), text([9, 1, 2, 3], b"b")
    assert drafter.propose([same, other], [9, 9]) == [Draft([4, 5, 6, 7], 3), Draft()]
    drafter.forget(same)
    drafter.forget(same)
    drafter.forget(other)
    assert not drafter._texts and drafter._suffixes.num_sequences == 0


def test_the_oldest_answers_are_forgotten() -> None:
    drafter = SuffixDrafter(max_tokens=20)
    for at in range(30):
        context = text([100 * at, 100 * at + 1, 100 * at + 2])
        drafter.propose([context], [1])
        context.token_ids += [100 * at + 3] * 5
        drafter.forget(context)
        assert drafter._suffixes.num_archived <= 20
    assert drafter.propose([text([0, 1, 2]), text([2900, 2901, 2902])], [1, 1]) == [
        Draft(),
        Draft([2903], 3),
    ]


def test_misuse_is_named() -> None:
    index = SuffixIndex(10)
    with pytest.raises(TokenError):
        index.start([-1])
    name = index.start([1, 2])
    with pytest.raises(TokenError):
        index.extend(name, [2**40])
    assert index.extend(name + 1, [1]) is False
    assert index.draft(name + 1, 3) == ([], 0)
    index.finish(name + 1)
    assert index.num_sequences == 1
