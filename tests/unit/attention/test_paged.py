"""Page tables in compressed rows, and sinks from the sum under the softmax."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyengine.attention.paged import PageLayout, apply_sinks, leading_decodes, window_left

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(lens=lengths, size=st.sampled_from([1, 4, 16]))
def test_a_page_table_leads_to_the_slot_of_every_token(lens, size):
    width = -(-max(lens) // size) + 1
    tables = np.random.default_rng(0).permutation(len(lens) * width).reshape(-1, width)
    tables = tables.astype(np.int32)
    pages = PageLayout.of(np.array(lens, dtype=np.int32), tables.shape[1], size).pages(tables)
    assert pages.indptr.dtype == pages.indices.dtype == pages.last_page_len.dtype == np.int32
    for row, length in enumerate(lens):
        own = pages.indices[pages.indptr[row] : pages.indptr[row + 1]]
        slots = (own[:, None] * size + np.arange(size)).ravel()
        slots = slots[: (len(own) - 1) * size + pages.last_page_len[row]]
        assert slots.tolist() == [
            int(tables[row, p // size]) * size + p % size for p in range(length)
        ]
    assert pages.indptr[-1] == len(pages.indices)


def test_no_sequences_have_no_pages():
    pages = PageLayout.of(np.zeros(0, np.int32), 3, 4).pages(np.zeros((0, 3), np.int32))
    assert (pages.indptr.tolist(), len(pages.indices), len(pages.last_page_len)) == ([0], 0, 0)


def test_decodes_lead_until_a_longer_sequence():
    def leading(*new_tokens):
        return leading_decodes(np.cumsum([0, *new_tokens], dtype=np.int32))

    assert leading(1, 1, 1) == 3
    assert leading(1, 1, 4, 1) == 2
    assert leading(4, 1) == 0
    assert leading() == 0


def test_a_window_counts_the_query_kernels_do_not():
    assert [window_left(window) for window in (None, 1, 128)] == [-1, 0, 127]


def test_sinks_take_their_share():
    torch.manual_seed(0)
    scores, values, sinks = torch.randn(5, 3, 7), torch.randn(5, 3, 7, 4), torch.randn(3)
    without = torch.einsum("thk,thkd->thd", scores.softmax(-1), values)
    weights = torch.cat([scores, sinks.expand(5, 3)[..., None]], -1).softmax(-1)[..., :7]
    expected = torch.einsum("thk,thkd->thd", weights, values)
    got = apply_sinks(without, scores.logsumexp(-1), sinks)
    torch.testing.assert_close(got, expected)
