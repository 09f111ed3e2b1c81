"""The pieces of a step cover each row once and exactly the keys it may see."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.attention import gather
from pyengine.attention.gather import StepLayout

sequences = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 40)),  # new tokens, tokens before them
    min_size=1,
    max_size=6,
)


def step(new_and_context: list[tuple[int, int]], block_size: int) -> StepLayout:
    """Block `i` of sequence `s` has the id `100 * s + i`."""
    lens = np.array([n + c for n, c in new_and_context], dtype=np.int32)
    starts = np.cumsum([0, *(n for n, _ in new_and_context)], dtype=np.int32)
    width = -(-int(lens.max()) // block_size)
    tables = np.full((len(lens), width), -1, dtype=np.int32)
    for s, length in enumerate(lens):
        used = -(-int(length) // block_size)
        tables[s, :used] = 100 * s + np.arange(used)
    return StepLayout(starts, lens, tables, block_size)


def expected_sight(new_and_context, window):
    """For every row of the step: its sequence and the key positions it sees."""
    rows = []
    for s, (new, context) in enumerate(new_and_context):
        for position in range(context, context + new):
            first = 0 if window is None else max(0, position - window + 1)
            rows.append((s, set(range(first, position + 1))))
    return rows


def sight(pieces: StepLayout, window, max_blocks):
    """The same, read from the pieces."""
    size, rows = pieces.block_size, {}
    for span in pieces.spans(window):
        for i in range(span.count):
            position = span.position + i
            first = 0 if window is None else max(0, position - window + 1)
            keys = {span.first_key + k for k in range(span.num_keys)}
            (sequence,) = {int(b) // 100 for b in span.blocks}
            assert int(span.blocks[0]) % 100 * size == span.first_key
            assert len(span.blocks) == -(-span.num_keys // size)
            assert span.start + i not in rows
            rows[span.start + i] = (sequence, keys & set(range(first, position + 1)))
    for batch in pieces.batches(window, max_blocks):
        assert len(batch.rows) == 1 or batch.blocks.size <= max_blocks
        for row, blocks, low, high in zip(
            batch.rows, batch.blocks, batch.lows, batch.highs, strict=True
        ):
            keys = [int(blocks[k // size]) % 100 * size + k % size for k in range(low, high)]
            (sequence,) = {int(b) // 100 for b in blocks}
            assert int(row) not in rows
            rows[int(row)] = (sequence, set(keys))
    return [rows[row] for row in sorted(rows)]


@pytest.mark.parametrize("span_rows", [4, 512])
@given(
    lengths=sequences,
    window=st.none() | st.integers(1, 20),
    block_size=st.integers(1, 5),
    max_blocks=st.integers(1, 40),
)
def test_pieces_cover_every_row_and_exactly_its_keys(
    span_rows, lengths, window, block_size, max_blocks
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "MAX_SPAN_ROWS", span_rows)
        pieces = step(lengths, block_size)
        assert sight(pieces, window, max_blocks) == expected_sight(lengths, window)


def test_rows_of_one_length_need_no_mask():
    (batch,) = step([(1, 7), (1, 7), (1, 7)], 4).batches(None, 100)
    assert batch.is_uniform
    (batch,) = step([(1, 7), (1, 6)], 4).batches(None, 100)
    assert not batch.is_uniform
    (batch,) = step([(1, 7), (1, 7)], 4).batches(3, 100)
    assert batch.is_uniform
    (batch,) = step([(1, 7), (1, 6)], 4).batches(3, 100)
    assert not batch.is_uniform


@given(lengths=sequences, window=st.none() | st.integers(1, 20), size=st.integers(1, 5),
       first_key=st.integers(0, 3))  # fmt: skip
def test_slots_that_no_row_sees_are_known(lengths, window, size, first_key):
    """Those of a row's own blocks; blocks that pad it are its first one."""
    decodes = [(1, context) for _, context in lengths]
    for batch in step(decodes, size).batches(window, 100, first_key=first_key):
        expected = []
        for row, (low, high) in enumerate(zip(batch.lows, batch.highs, strict=True)):
            for column in range(batch.blocks.shape[1]):
                own = column if column < -(-high // size) else 0
                positions = range(own * size, own * size + size)
                expected += [
                    (row * batch.blocks.shape[1] + column) * size + position % size
                    for position in positions
                    if not low <= position < high
                ]
        assert batch.unseen(size).tolist() == expected


def test_a_window_leaves_the_blocks_behind_it_alone():
    (span,) = step([(2, 30)], 4).spans(5)
    assert span.first_key == 24
    assert span.blocks.tolist() == [6, 7]
    (batch,) = step([(1, 30)], 4).batches(5, 100)
    assert batch.blocks.tolist() == [[6, 7]]


def test_short_sequences_are_not_padded_to_the_longest():
    batches = list(step([(1, 100), (1, 3), (1, 3), (1, 3)], 4).batches(None, 30))
    assert [b.blocks.shape for b in batches] == [(3, 1), (1, 26)]
