"""nano-vllm's BlockManager over ours, against a fake of its Sequence."""

import sys
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from pyengine.integrations import nano_vllm
from pyengine.integrations.nano_vllm import BlockManager


class Sequence:
    """The part that the manager reads."""

    numbers = count()

    def __init__(self, tokens: list[int], block_size: int = 4) -> None:
        self.seq_id = next(self.numbers)
        self.token_ids = list(tokens)
        self.block_size = block_size
        self.block_table: list[int] = []
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return -(-len(self.token_ids) // self.block_size)


def schedule(manager: BlockManager, seq: Sequence, budget: int = 1000) -> int:
    """Its first prefill; how many blocks were cached."""
    cached = manager.can_allocate(seq)
    if cached >= 0:
        manager.allocate(seq, cached)
        seq.num_scheduled_tokens = min(len(seq) - seq.num_cached_tokens, budget)
    return cached


def finish(manager: BlockManager, seq: Sequence, token: int | None = 9) -> None:
    """What `postprocess` does for a sequence; None: a chunk, which samples nothing."""
    manager.hash_blocks(seq)
    seq.num_cached_tokens += seq.num_scheduled_tokens
    seq.num_scheduled_tokens = 0
    if token is not None:
        seq.token_ids.append(token)


def decode(manager: BlockManager, seq: Sequence, token: int = 9) -> None:
    assert manager.can_append(seq)
    manager.may_append(seq)
    seq.num_scheduled_tokens = 1
    finish(manager, seq, token)


def held(manager: BlockManager) -> int:
    manager.kv.check()
    usage = manager.kv.usage()
    return usage.active + usage.pinned


def test_patch_changes_the_schedulers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(BlockManager=None)
    monkeypatch.setitem(sys.modules, "nanovllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nanovllm.engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nanovllm.engine.scheduler", module)
    nano_vllm.patch()
    assert module.BlockManager is BlockManager


def test_a_prompt_its_decodes_and_its_end() -> None:
    manager, seq = BlockManager(6, 4), Sequence(list(range(7)))
    assert schedule(manager, seq) == 0
    assert seq.block_table == [0, 1]
    finish(manager, seq)
    decode(manager, seq)
    assert seq.block_table == [0, 1]
    decode(manager, seq)
    assert seq.block_table == [0, 1, 2]
    manager.deallocate(seq)
    assert (seq.block_table, seq.num_cached_tokens, held(manager)) == ([], 0, 0)
    manager.deallocate(seq)
    again = Sequence([*range(7), 9, 9, 9])
    assert schedule(manager, again) == 2
    assert again.num_cached_tokens == 8


def test_two_prompts_of_one_batch_share() -> None:
    manager = BlockManager(8, 4)
    first, second = Sequence(list(range(10))), Sequence(list(range(10)))
    assert (schedule(manager, first), schedule(manager, second)) == (0, 2)
    assert second.block_table[:2] == first.block_table[:2]
    assert held(manager) == 4


def test_a_chunk_that_is_not_scheduled_is_not_shared() -> None:
    manager = BlockManager(8, 4)
    first, second = Sequence(list(range(12))), Sequence(list(range(12)))
    schedule(manager, first, budget=5)
    assert manager.can_allocate(second) == 1
    finish(manager, first, None)
    first.num_scheduled_tokens = 4
    assert manager.can_allocate(second) == 2
    finish(manager, first, None)
    first.num_scheduled_tokens = 3
    assert manager.can_allocate(second) == 2  # the last block is computed, whole as it is
    finish(manager, first)
    manager.deallocate(first)
    assert held(manager) == 0


def test_no_room_changes_nothing() -> None:
    manager = BlockManager(3, 4)
    first, second = Sequence(list(range(9))), Sequence(list(range(9)))
    assert schedule(manager, first) == 0
    assert schedule(manager, second) == -1
    assert (second.block_table, held(manager)) == ([], 3)
    finish(manager, first)
    decode(manager, first), decode(manager, first), decode(manager, first)
    assert not manager.can_append(first)
    manager.deallocate(first)
    assert schedule(manager, second) == 2


def test_a_look_up_that_leads_to_nothing_holds_nothing() -> None:
    manager = BlockManager(3, 4)
    first = Sequence(list(range(9)))
    schedule(manager, first)
    finish(manager, first)
    manager.deallocate(first)
    waits, runs = Sequence(list(range(9))), Sequence([1] * 5)
    assert manager.can_allocate(waits) == 2
    assert manager.can_append(runs)
    assert held(manager) == 0
    with pytest.raises(RuntimeError, match="call can_allocate before"):
        manager.allocate(waits, 2)


def test_equal_decodes_are_merged_in_the_table() -> None:
    manager = BlockManager(8, 4)
    first, second = Sequence([1, 2, 3, 4, 5]), Sequence([1, 2, 3, 4, 5])
    schedule(manager, first), schedule(manager, second)
    for seq in (first, second):
        finish(manager, seq)
    for _ in range(3):
        decode(manager, first), decode(manager, second)
    assert first.block_table[:2] == second.block_table[:2]
    assert manager.kv.stats().merged_blocks == 1
    assert held(manager) == 2


def test_preempted_with_output_and_resumed() -> None:
    manager, seq = BlockManager(8, 4), Sequence(list(range(6)))
    schedule(manager, seq)
    finish(manager, seq)
    for token in range(4):
        decode(manager, seq, token)
    manager.deallocate(seq)
    assert schedule(manager, seq) == 2
    finish(manager, seq)
    decode(manager, seq)
    assert seq.num_cached_tokens == len(seq) - 1


def test_blocks_of_one_token_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size=1: it must be at least 2"):
        BlockManager(8, 1)
