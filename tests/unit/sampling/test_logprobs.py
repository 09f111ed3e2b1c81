import gc
import math
import weakref
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.cpu import limit_threads
from pyengine.outputs import Logprob
from pyengine.sampling.logprobs import PendingLogprobs, TokenLogprobs
from pyengine.utils.dtypes import Rows, widened
from tests.support.logits import in_type, normal, tensor_of

ROW = [1.0, 3.0, 3.0, 0.0, 2.0]
NORMALISER = math.log(sum(math.exp(x) for x in ROW))


def reference(row: list[float], token: int, top: int) -> TokenLogprobs:
    normaliser = math.log(sum(math.exp(x) for x in row))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return TokenLogprobs(
        token_id=token,
        logprob=row[token] - normaliser,
        rank=order.index(token) + 1,
        top_ids=tuple(order[:top]),
        top_logprobs=tuple(row[i] - normaliser for i in order[:top]),
    )


def token_logprobs(logits: Rows, token_ids: Any, top: Sequence[int]) -> list[TokenLogprobs]:
    return PendingLogprobs(logits, token_ids, top).result()


def prompt_logprobs(logits: Any, next_ids: list[int], top: int) -> list[TokenLogprobs]:
    tokens = np.array(next_ids, dtype=np.int64)
    return token_logprobs(np.array(logits, dtype=np.float32), tokens, [top] * len(next_ids))


def assert_same(got: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert (got.token_id, got.rank, got.top_ids) == (
        expected.token_id,
        expected.rank,
        expected.top_ids,
    )
    assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert got.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


# Few distinct values: equal logits everywhere, -0.0 among them.
rows = st.lists(
    st.lists(st.sampled_from([-2.5, -1.0, -0.0, 0.0, 1.5, 7.0]), min_size=40, max_size=40),
    min_size=1,
    max_size=4,
)


@given(rows=rows, data=st.data())
@settings(max_examples=150, deadline=None)
def test_against_sorting(rows: list[list[float]], data: st.DataObject) -> None:
    tokens = [data.draw(st.integers(0, 39)) for _ in rows]
    top = [data.draw(st.integers(0, 40)) for _ in rows]
    got = token_logprobs(np.array(rows, dtype=np.float32), np.array(tokens), top)
    for entry, row, token, count in zip(got, rows, tokens, top, strict=True):
        assert_same(entry, reference(row, token, count))


def test_more_equal_logits_than_candidates_looked_at() -> None:
    logits = np.random.default_rng(0).integers(8, size=(20, 1000)).astype(np.float32)
    entries = token_logprobs(logits, np.zeros(20, dtype=np.int64), [4] * 20)
    for row, entry in zip(logits, entries, strict=True):
        assert_same(entry, reference(row.tolist(), 0, 4))


def test_no_device_sorts_the_vocabulary() -> None:
    torch = pytest.importorskip("torch", reason="a device without numbers")
    from tests.support.operators import Sorts

    logits = torch.empty(100, 3000, dtype=torch.bfloat16, device="meta")
    with Sorts() as sorts:
        PendingLogprobs(logits, torch.empty(100, dtype=torch.int64, device="meta"), [3] * 100)
    assert sorts.seen == [("topk", 3000)] * 2


def test_chosen_rows_of_more() -> None:
    logits, rows = normal(0, 9, 40), np.array([1, 2, 6])
    tokens, top = np.array([3, 4, 5]), [2, 0, 5]
    got = PendingLogprobs(logits, tokens, top, rows).result()
    assert got == token_logprobs(logits[rows], tokens, top)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_many_rows_and_a_large_vocabulary(dtype: str) -> None:
    logits = in_type(normal(0, 60, 3000) * 3, dtype)
    tokens = np.random.default_rng(0).integers(3000, size=60)
    got = token_logprobs(logits, tokens, [5] * 60)
    for index in range(0, 60, 7):
        row = widened(logits[index]).tolist()
        assert_same(got[index], reference(row, int(tokens[index]), 5))


def test_chunks_of_a_device_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="devices compute some rows at a time")
    from pyengine.sampling import tensor_operations

    logits, tokens = tensor_of(normal(0, 11, 30)), tensor_of(np.arange(11))
    whole = PendingLogprobs(logits, tokens, range(11)).result()
    monkeypatch.setattr(tensor_operations, "_LOGPROB_ELEMENTS", 70)
    parts = PendingLogprobs(logits, tokens, range(11)).result()
    for got, expected in zip(parts, whole, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab_size", [31, 16384, 50257, 262144])
def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(
    vocab_size: int, dtype: str
) -> None:
    """Near 0, a normaliser shows the last bits of its sum."""
    num_rows = 4
    logits = 4 * normal(0, num_rows, vocab_size)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    logits = in_type(logits, dtype)
    token_ids, top = np.arange(num_rows), [3] * num_rows
    expected = token_logprobs(logits, token_ids, top)
    for threads, batch in product((1, 2, 3), (1, 2, 3, num_rows)):
        before = limit_threads(threads)
        actual = [
            entry
            for first in range(0, num_rows, batch)
            for entry in token_logprobs(
                logits[first : first + batch],
                token_ids[first : first + batch],
                top[first : first + batch],
            )
        ]
        limit_threads(before)
        assert actual == expected, (threads, batch)


def test_rows_with_infinities_have_no_figures() -> None:
    logits = np.zeros((3, 2000), dtype=np.float32)
    logits[0], logits[1, 3], logits[2, 5] = -math.inf, math.inf, math.nan
    nothing, everything, broken = token_logprobs(logits, np.array([1, 1, 1]), [4, 4, 4])
    assert math.isnan(nothing.logprob) and nothing.top_ids == (0, 1, 2, 3)
    assert everything.logprob == -math.inf and everything.top_ids == (3, 0, 1, 2)
    assert math.isnan(broken.logprob) and broken.top_ids == (5, 0, 1, 2)


def test_prompt_rows_speak_about_the_next_token() -> None:
    first, second = prompt_logprobs([ROW, ROW[::-1]], [4, 4], 2)
    assert_same(first, TokenLogprobs(4, 2 - NORMALISER, 3, (1, 2), (3 - NORMALISER,) * 2))
    assert_same(second, TokenLogprobs(4, 1 - NORMALISER, 4, (2, 3), (3 - NORMALISER,) * 2))
    (bare,) = prompt_logprobs([ROW], [1], 0)
    assert_same(bare, TokenLogprobs(1, 3 - NORMALISER, 1, (), ()))
    assert prompt_logprobs(np.empty((0, 5)), [], 3) == []


def test_several_prompts_of_a_step_at_once() -> None:
    logits = in_type(normal(0, 150, 50), "bfloat16")
    tokens = [*range(50), *range(20, 50), *[7] * 70]
    top = [3] * 50 + [50] * 30 + [0] * 70
    pending = PendingLogprobs(logits, np.array(tokens), top)
    rows = widened(logits).tolist()
    expected = [reference(*item) for item in zip(rows, tokens, top, strict=True)]
    logits[:] = 0  # they may be dropped: everything was read
    for entry, other in zip(pending.result(), expected, strict=True):
        assert_same(entry, other)


@pytest.mark.parametrize("top", [0, 5])
def test_only_what_is_reported_is_kept(top: int) -> None:
    logits = normal(0, 100, 4000)
    whole = weakref.ref(logits)
    pending = PendingLogprobs(logits, np.ones(100, dtype=np.int64), [top] * 100)
    del logits
    gc.collect()
    assert whole() is None
    assert [len(entry.top_ids) for entry in pending.result()] == [top] * 100


def test_the_users_form_has_the_token_first_and_each_token_once() -> None:
    outside = TokenLogprobs(7, -3.0, 9, (4, 2), (-0.5, -1.0))
    assert list(outside.as_dict().items()) == [
        (7, Logprob(-3.0, 9, None)),
        (4, Logprob(-0.5, 1, None)),
        (2, Logprob(-1.0, 2, None)),
    ]
    inside = TokenLogprobs(2, -1.0, 2, (4, 2), (-0.5, -1.0))
    assert list(inside.as_dict(lambda token: (f"<{token}>", b"x")).items()) == [
        (2, Logprob(-1.0, 2, "<2>", b"x")),
        (4, Logprob(-0.5, 1, "<4>", b"x")),
    ]
