"""Layer groups: a table for each, windows that slide, matches that need no more than they read."""

import numpy as np
import pytest

from pyengine.kv_cache import (
    BlockManager,
    BufferError,
    ConfigError,
    Prefilled,
    Sequence,
    StepBuffers,
)
from tests.support.blocks import compute, step_arrays

BLOCK = 4
NULL = 64


def pool(*groups: int | None, blocks: int = NULL) -> BlockManager:
    return BlockManager(blocks, BLOCK, groups=groups)


def run(manager: BlockManager, sequence: Sequence, tokens: int, chunk: int = 8) -> None:
    """Prefill in chunks, then decode until `tokens` are computed."""
    while sequence.num_computed_tokens < tokens:
        plan = manager.begin_step(chunk)
        answer = plan.prefill(sequence, chunk)
        assert isinstance(answer, Prefilled)
        plan.commit([7] if answer.samples else [])
        manager.check()


def held(table: list[int]) -> list[int]:
    """The rows in which there is a block."""
    return [row for row, block in enumerate(table) if block != NULL]


@pytest.mark.parametrize("window", [1, 4, 6, 8, 11])
def test_a_window_keeps_what_the_next_token_sees(window: int) -> None:
    manager = pool(None, window)
    sequence = manager.sequence(range(3))
    for tokens in range(3, 40):
        run(manager, sequence, tokens)
        full, sliding = sequence.block_tables
        rows = -(-tokens // BLOCK)
        assert held(full) == list(range(rows))
        first = max(0, tokens // BLOCK - -(-window // BLOCK))
        assert held(sliding) == list(range(first, rows))
        assert first * BLOCK <= max(0, tokens + 1 - window)
    stats = manager.stats()
    assert stats.slid_blocks == 10 - len(held(sliding))
    assert manager.usage().active == len(held(full)) + len(held(sliding))


def test_one_usage_and_no_block_in_two_groups() -> None:
    manager = pool(None, 4, None)
    sequence = manager.sequence(range(20))
    run(manager, sequence, 20)
    tables = sequence.block_tables
    blocks = [block for table in tables for block in table if block != NULL]
    assert len(set(blocks)) == len(blocks) == manager.usage().active
    assert sequence.block_table == tables[0]
    assert manager.groups == (None, 4, None)


def test_a_match_needs_the_windows_blocks_only() -> None:
    manager = pool(None, 8)
    first = manager.sequence(range(20))
    run(manager, first, 20)
    first.free()
    # Blocks that left the window are released; those in the window at the end stay.
    slid = [manager.sequence(range(1000 + at, 1000 + at + BLOCK)) for at in range(0, 400, 100)]
    for block in slid:
        compute(manager, block)
    again = manager.sequence([*range(20), 5])
    plan = manager.begin_step(64)
    answer = plan.prefill(again, 64)
    assert isinstance(answer, Prefilled)
    assert (answer.num_cached_tokens, answer.num_tokens) == (20, 1)
    plan.commit([0])
    assert held(again.block_tables[1]) == [3, 4, 5]
    manager.check()


def test_without_the_windows_blocks_it_is_computed_again_and_stored_once() -> None:
    manager = pool(None, 4, blocks=12)
    first = manager.sequence(range(16))
    run(manager, first, 16)
    assert held(first.block_tables[1])[-1] == 3
    manager.evict_all()  # what slid out of the window is gone, the rest is in use
    second = manager.sequence(range(8))
    plan = manager.begin_step(64)
    answer = plan.prefill(second, 64)
    assert isinstance(answer, Prefilled)
    assert (answer.num_cached_tokens, answer.num_tokens) == (0, 8)
    assert second.block_tables[0] == first.block_tables[0][:2]  # there already: not written
    plan.commit([0])
    assert manager.stats().already_cached_blocks == 2
    assert manager.stats().merged_blocks == 0
    manager.check()


def test_a_fork_behind_the_window_begins_anew() -> None:
    manager = pool(4)
    parent = manager.sequence(range(20))
    run(manager, parent, 20)
    near, far = parent.fork(20), parent.fork(6)
    assert (near.num_computed_tokens, far.num_computed_tokens) == (20, 0)
    assert held(near.block_table) == [4]
    assert far.block_table == []
    manager.check()


def test_a_pin_holds_what_a_match_needs() -> None:
    manager = pool(None, 4)
    sequence = manager.sequence(range(18))
    run(manager, sequence, 18)
    pin = sequence.pin()
    sequence.free()
    assert pin.num_tokens == 16
    assert len(pin.blocks) == 4 + 1
    assert manager.usage().pinned == 5
    again = manager.sequence(range(18))
    again.attach(pin)
    assert again.num_computed_tokens == 16
    run(manager, again, 18)
    pin.release()
    manager.check()


def test_arrays_have_a_row_per_group() -> None:
    manager = pool(None, 4)
    arrays = step_arrays(filler=-9)
    arrays["slot_mapping"] = np.full((2, 32), -9, np.int64)
    arrays["block_tables"] = np.full((2, 4, 8), -9, np.int64)
    buffers = StepBuffers(**arrays)
    sequence = manager.sequence(range(14))
    run(manager, sequence, 8)
    plan = manager.begin_step(64)
    plan.prefill(sequence, 64)
    plan.fill(buffers)
    for group, table in enumerate(sequence.block_tables):
        assert arrays["block_tables"][group, 0, :4].tolist() == table
        slots = [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(8, 14)]
        assert arrays["slot_mapping"][group, :6].tolist() == slots
    assert arrays["block_tables"][1, 0, 0] == NULL
    assert set(arrays["block_tables"][:, 1:].ravel().tolist()) == {-9}
    plan.commit([0])


@pytest.mark.parametrize("name", ["slot_mapping", "block_tables"])
def test_arrays_of_fewer_groups(name: str) -> None:
    manager = pool(None, 4)
    arrays = step_arrays()
    arrays["slot_mapping"] = np.zeros((2, 32), np.int64)
    arrays["block_tables"] = np.zeros((2, 4, 8), np.int64)
    arrays[name] = arrays[name][:1].copy()
    plan = manager.begin_step(64)
    plan.prefill(manager.sequence(range(6)), 64)
    with pytest.raises(BufferError, match=rf"{name} \(groups\).* 1 .*needs 2"):
        plan.fill(StepBuffers(**arrays))


def test_blocks_for_is_what_a_sequence_takes() -> None:
    for windows in ((None,), (4,), (None, 6), (None, 8, 3)):
        for chunk in (1, 3, 8, 64):
            manager = pool(*windows)
            sequence = manager.sequence(range(30))
            peak = 0
            while sequence.num_computed_tokens < 30:
                plan = manager.begin_step(chunk)
                answer = plan.prefill(sequence, chunk)
                assert isinstance(answer, Prefilled)
                peak = max(peak, manager.usage().active)
                plan.commit([7] if answer.samples else [])
            assert peak <= manager.blocks_for(30, chunk)
            small = pool(*windows, blocks=manager.blocks_for(30, chunk))
            plan = small.begin_step(chunk)
            assert isinstance(
                plan.prefill(small.sequence(range(30)), chunk, spare_blocks=0), Prefilled
            )


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ((), "layer groups must be 1 to 64, got 0"),
        ((None,) * 65, "got 65"),
        ((None, 0), "window must be at least 1"),
        ((-1,), "groups=-1"),
        ((2**64,), "groups=18446744073709551616"),
    ],
)
def test_groups_that_cannot_be(groups: tuple[int | None, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BlockManager(4, BLOCK, groups=groups)


@pytest.mark.parametrize("windows", [(None,), (None, 8), (5, 13), (4,)])
def test_blocks_to_come_are_those_beyond_what_a_sequence_holds(
    windows: tuple[int | None, ...],
) -> None:
    manager = BlockManager(1, 4, groups=windows)
    for num_tokens in range(1, 60):
        for computed in range(num_tokens + 1):
            indices = -(-computed // 4)
            passed = sum(max(0, computed - window + 1) // 4 for window in windows if window)
            new = (-(-num_tokens // 4) - indices) * len(windows)
            most = manager.blocks_for(num_tokens, 8) - (indices * len(windows) - passed)
            expected = min(new, most) if computed else manager.blocks_for(num_tokens, 8)
            assert manager.blocks_for(num_tokens, 8, computed=computed) == expected
    with pytest.raises(ConfigError, match=r"computed=6: there are 5 tokens"):
        manager.blocks_for(5, 8, computed=6)
