import gc
import math
import weakref
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pyengine.outputs import Logprob
from pyengine.sampling import logprobs
from pyengine.sampling.logprobs import PendingLogprobs, TokenLogprobs
from pyengine.utils.openmp import torch_threads
from tests.support.operators import Sorts

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


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, top: Sequence[int]
) -> list[TokenLogprobs]:
    return PendingLogprobs(logits, token_ids, top).result()


def prompt_logprobs(logits: torch.Tensor, next_ids: list[int], top: int) -> list[TokenLogprobs]:
    tokens = torch.tensor(next_ids, dtype=torch.int64)
    return token_logprobs(logits, tokens, [top] * len(next_ids))


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
    got = token_logprobs(torch.tensor(rows), torch.tensor(tokens), top)
    for entry, row, token, count in zip(got, rows, tokens, top, strict=True):
        assert_same(entry, reference(row, token, count))


def test_more_equal_logits_than_candidates_looked_at() -> None:
    logits = torch.randint(8, (20, 1000), generator=torch.Generator().manual_seed(0)).float()
    for row, entry in zip(
        logits, token_logprobs(logits, torch.zeros(20).long(), [4] * 20), strict=True
    ):
        assert_same(entry, reference(row.tolist(), 0, 4))


@given(rows=rows, count=st.integers(0, 40))
def test_the_best_by_keys_of_devices_are_those_of_the_cpu(
    rows: list[list[float]], count: int
) -> None:
    logits = torch.tensor(rows)
    logits[:, 7] = -math.inf
    expected = logprobs._best_ids(logits, count)
    assert logprobs._best_by_keys(logits, count).tolist() == expected.tolist()


def test_no_device_sorts_the_vocabulary() -> None:
    logits = torch.empty(100, 3000, dtype=torch.bfloat16, device="meta")
    with Sorts() as sorts:
        PendingLogprobs(logits, torch.empty(100, dtype=torch.int64, device="meta"), [3] * 100)
    assert sorts.seen == [("topk", 3000)] * 2


def test_chosen_rows_of_more() -> None:
    torch.manual_seed(0)
    logits, rows = torch.randn(9, 40), torch.tensor([1, 2, 6])
    tokens, top = torch.tensor([3, 4, 5]), [2, 0, 5]
    got = PendingLogprobs(logits, tokens, top, rows).result()
    assert got == token_logprobs(logits[rows], tokens, top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_and_a_large_vocabulary(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(60, 3000) * 3).to(dtype)
    tokens = torch.randint(3000, (60,))
    got = token_logprobs(logits, tokens, [5] * 60)
    for index in range(0, 60, 7):
        row = logits[index].double().tolist()
        assert_same(got[index], reference(row, int(tokens[index]), 5))


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(11, 30), torch.randint(30, (11,))
    whole = token_logprobs(logits, tokens, range(11))
    monkeypatch.setattr("pyengine.sampling.logprobs._CHUNK_ELEMENTS", 70)
    for got, expected in zip(token_logprobs(logits, tokens, range(11)), whole, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [50257, 262144])
def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(
    vocab_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_rows = 4
    logits = (4 * torch.randn(num_rows, vocab_size)).to(dtype)
    token_ids, top = torch.arange(num_rows), [3] * num_rows
    with torch_threads(1):
        expected = token_logprobs(logits, token_ids, top)
    for threads, batch in product((1, 2, 3), (1, 2, 3, num_rows)):
        with torch_threads(threads):
            found = [
                entry
                for rows in torch.arange(num_rows).split(batch)
                for entry in token_logprobs(logits[rows], token_ids[rows], top[: len(rows)])
            ]
        assert found == expected, (threads, batch)


@pytest.mark.parametrize("vocab_size", [31, 16384, 49152, 50257, 262144])
def test_no_bit_of_a_normaliser_depends_on_the_batch_or_the_threads(vocab_size: int) -> None:
    """Near 0, a normaliser shows the last bits of its sum."""
    logits = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(0))
    logits -= logits.logsumexp(1, keepdim=True)
    with torch_threads(1):
        expected = logprobs._log_sum_exp(logits)
    for threads, batch in product((1, 2, 3), (1, 2, 5)):
        with torch_threads(threads):
            found = torch.cat([logprobs._log_sum_exp(rows) for rows in logits.split(batch)])
        assert torch.equal(found, expected), (threads, batch)
    assert expected.abs().max() < 1e-5


def test_normalisers_of_rows_with_infinities() -> None:
    nothing, everything = torch.full((2, 40), -math.inf)
    everything[3] = math.inf
    broken = torch.zeros(40)
    broken[5] = math.nan
    for row in (nothing, everything, broken):
        found, expected = logprobs._log_sum_exp(row[None]), row.logsumexp(0)
        assert found.item() == expected or (found.isnan() and expected.isnan())


def test_prompt_rows_speak_about_the_next_token() -> None:
    first, second = prompt_logprobs(torch.tensor([ROW, ROW[::-1]]), [4, 4], 2)
    assert_same(first, TokenLogprobs(4, 2 - NORMALISER, 3, (1, 2), (3 - NORMALISER,) * 2))
    assert_same(second, TokenLogprobs(4, 1 - NORMALISER, 4, (2, 3), (3 - NORMALISER,) * 2))
    (bare,) = prompt_logprobs(torch.tensor([ROW]), [1], 0)
    assert_same(bare, TokenLogprobs(1, 3 - NORMALISER, 1, (), ()))
    assert prompt_logprobs(torch.empty(0, 5), [], 3) == []


def test_several_prompts_of_a_step_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(150, 50, generator=generator).to(torch.bfloat16)
    tokens = [*range(50), *range(20, 50), *[7] * 70]
    top = [3] * 50 + [50] * 30 + [0] * 70
    pending = PendingLogprobs(logits, torch.tensor(tokens), top)
    rows = logits.double().tolist()
    expected = [reference(*item) for item in zip(rows, tokens, top, strict=True)]
    logits.fill_(0)  # they may be dropped: everything was read
    for entry, other in zip(pending.result(), expected, strict=True):
        assert_same(entry, other)


class Sizes(TorchDispatchMode):
    """Takes note of the tensors that are made, views of `given` left out."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given = given.data_ptr()
        self.largest = 0
        self.made: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else [made]:
            if isinstance(item, torch.Tensor) and not self.is_view(item):
                self.largest = max(self.largest, item.untyped_storage().nbytes())
                if not any(item is known for known in self.made):  # changed in place
                    self.made.add(item)
        return made

    def is_view(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.given


@pytest.mark.parametrize("top", [0, 5])
def test_memory_does_not_follow_the_length_of_the_prompt(top: int) -> None:
    vocab_size = 4000
    logits = torch.randn(1000, vocab_size).to(torch.bfloat16)
    whole = weakref.ref(logits)
    with Sizes(logits) as sizes:
        pending = PendingLogprobs(logits, torch.ones(1000, dtype=torch.int64), [top] * 1000)
    assert sizes.largest <= 64 * vocab_size * 4
    gc.collect()
    storages = {
        (item.untyped_storage().data_ptr(), item.untyped_storage().nbytes()) for item in sizes.made
    }
    assert sum(size for _, size in storages) <= 1000 * (8 + 4 + 8 + top * 12) + 4096
    del logits
    assert whole() is None
    assert len(pending.result()) == 1000


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
