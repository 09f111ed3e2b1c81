"""Without a plan: an engine that chooses its chunks, holds the tokens, and frees during a step."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from pyengine.kv_cache import (
    BlockManager,
    Extended,
    HandleError,
    KvError,
    NoRoom,
    PlanError,
    Sequence,
    TokenError,
    replay,
)
from tests.support.blocks import computed, unchanged

BLOCK = 4


def extended(sequence: Sequence, num_tokens: int) -> list[int]:
    answer = sequence.extend(num_tokens)
    assert isinstance(answer, Extended)
    assert answer.copies == []
    return answer.blocks[0]


class Request:
    """A scheduler's record of a request; it asks the manager where a block ends."""

    def __init__(self, manager: BlockManager, prompt: list[int]) -> None:
        self.tokens = list(prompt)
        self.sequence = manager.sequence(prompt)
        self.computed = self.sequence.reuse_cached()
        self.known = len(prompt)
        self.published = self.computed
        self.slots = len(self.sequence.block_table) * BLOCK
        self.calls = 0

    def schedule(self, num_tokens: int) -> bool:
        """True if there are slots for `num_tokens` more tokens."""
        if self.computed + num_tokens > self.slots:
            self.calls += 1
            self.sequence.publish(self.computed - self.published, self.tokens[self.known :])
            self.published, self.known = self.computed, len(self.tokens)
            answer = self.sequence.extend(num_tokens)
            if isinstance(answer, NoRoom):
                return False
            self.slots += len(answer.blocks[0]) * BLOCK
        self.computed += num_tokens
        return True


def test_a_scheduler_of_its_own() -> None:
    manager = BlockManager(32, BLOCK)
    first = Request(manager, list(range(10)))
    assert first.computed == 0
    assert first.schedule(6)
    assert first.schedule(4)
    for token in range(100, 110):
        first.tokens.append(token)
        assert first.schedule(1)
    assert first.calls == 4, "two chunks, and where a block ends"
    assert first.sequence.tokens() == first.tokens[:17]
    assert first.sequence.num_computed_tokens == 16

    second = Request(manager, [*first.tokens[:16], 7])
    assert (second.computed, second.sequence.num_cached_tokens) == (16, 16)
    assert second.schedule(1)
    assert second.sequence.block_table[:4] == first.sequence.block_table[:4]
    first.sequence.free()  # in the middle of a step
    third = Request(manager, [9] * 80)
    assert third.schedule(80)
    second.sequence.free()
    third.sequence.free()
    assert manager.usage().active == 0
    manager.check()


def test_no_room_and_back() -> None:
    manager = BlockManager(4, BLOCK)
    computed(manager, [1, 2, 3, 4]).free()
    sequence = manager.sequence([1, 2, 3, 4, *range(20)])
    assert sequence.reuse_cached() == 4
    with unchanged(manager):
        answer = sequence.extend(20)
    assert isinstance(answer, NoRoom)
    assert (answer.needed, answer.available) == (5, 3)
    sequence.reset()
    usage = manager.usage()
    assert (usage.free, usage.evictable) == (3, 1)


def test_merges_are_reported() -> None:
    manager = BlockManager(8, BLOCK)
    pair = [manager.sequence([1, 2, 3, 4, 5]) for _ in range(2)]
    assert [extended(sequence, 5) for sequence in pair] == [[0, 1], [2, 3]]
    assert pair[0].publish(5) == []
    [merge] = pair[1].publish(5)
    assert (merge.sequence_id, merge.index) == (pair[1].id, 0)
    assert (merge.old_block, merge.new_block) == (2, 0)
    assert [sequence.block_table for sequence in pair] == [[0, 1], [0, 3]]
    assert manager.stats().merged_blocks == 1


def test_a_fork_is_extended_before_it_is_written_to() -> None:
    manager = BlockManager(8, BLOCK)
    parent = manager.sequence(range(6))
    extended(parent, 6)
    parent.publish(6)
    fork = parent.fork(6)
    with unchanged(manager), pytest.raises(PlanError, match="block 1, which others hold too"):
        fork.publish(1, [9])
    answer = fork.extend(1)
    assert isinstance(answer, Extended)
    assert (answer.blocks, answer.copies) == ([[]], [(1, 2)])
    assert fork.publish(1, [9]) == []
    assert repr(answer) == "Extended(blocks=[[]], copies=[(1, 2)])"


def test_every_layer_group_gets_its_blocks() -> None:
    manager = BlockManager(12, BLOCK, groups=[None, 8])
    sequence = manager.sequence(range(12))
    answer = sequence.extend(12)
    assert isinstance(answer, Extended)
    assert answer.blocks == [[0, 2, 4], [1, 3, 5]] == sequence.block_tables


class Misuse(NamedTuple):
    call: Callable[["Scene"], object]
    error: type[KvError]
    message: str


class Scene:
    def __init__(self) -> None:
        self.manager = BlockManager(12, BLOCK)
        sequences = (self.manager.sequence([token] * 3) for token in range(3))
        self.ready, self.planned, self.freed = sequences
        extended(self.ready, 3)
        self.ready.publish(3)  # three tokens computed of three, one slot left
        self.freed.free()
        self.plan = self.manager.begin_step(8)
        self.plan.prefill(self.planned, 8)


MISUSES = {
    "slots": Misuse(lambda s: s.ready.publish(2, [1, 2]), PlanError, "slots for 4 tokens, 5"),
    "tokens": Misuse(lambda s: s.ready.publish(1), PlanError, "3 tokens of sequence 1 .* 4 cannot"),
    "bad tokens": Misuse(lambda s: s.ready.publish(1, [-1]), TokenError, "token id -1"),
    "negative": Misuse(lambda s: s.ready.extend(-1), KvError, "num_tokens=-1"),
    "reuse planned": Misuse(
        lambda s: s.planned.reuse_cached(), PlanError, "sequence 2 is in an open"
    ),
    "extend planned": Misuse(lambda s: s.planned.extend(1), PlanError, "sequence 2 is in an open"),
    "publish planned": Misuse(lambda s: s.planned.publish(0), PlanError, "2 is in an open"),
    "reuse freed": Misuse(lambda s: s.freed.reuse_cached(), HandleError, "sequence 3 was freed"),
    "extend freed": Misuse(lambda s: s.freed.extend(1), HandleError, "sequence 3 was freed"),
    "publish freed": Misuse(lambda s: s.freed.publish(0), HandleError, "sequence 3 was freed"),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_misuse_changes_nothing(misuse: Misuse) -> None:
    scene = Scene()
    before = scene.ready.tokens(), scene.ready.block_table
    with unchanged(scene.manager), pytest.raises(misuse.error, match=misuse.message):
        misuse.call(scene)
    assert (scene.ready.tokens(), scene.ready.block_table) == before


def test_it_is_recorded(tmp_path: object) -> None:
    path = f"{tmp_path}/a.kvtrace"
    manager = BlockManager(8, BLOCK)
    manager.record(path)
    for _ in range(2):
        sequence = manager.sequence(range(9))
        left = 9 - sequence.reuse_cached()
        extended(sequence, left)
        sequence.publish(left, [5])
        del sequence
    manager.stop_recording()
    report = replay(path)
    assert report.divergence is None
    assert [report.operations[name] for name in ("reuse_cached", "extend", "publish")] == [2, 2, 2]
    assert report.stats.cached_tokens == 8
    assert report.usage == manager.usage()
