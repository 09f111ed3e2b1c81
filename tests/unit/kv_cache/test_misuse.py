"""Bad input, one row each: the exact exception, the offending value in it, nothing changed.

Every case runs in the same scene: blocks in all four states, two steps open, two steps closed, and
another manager beside it. "Nothing" is all that both managers and every handle show of themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pyengine.kv_cache import (
    BlockManager,
    ConfigError,
    HandleError,
    KvError,
    Pin,
    PlanError,
    Sequence,
    StepPlan,
    TokenError,
)
from tests.support.blocks import computed, leave_evictable, retain, snapshot

BLOCK = 4


def next_step(manager: BlockManager) -> int:
    """The number of the next step when none is open."""
    stats = manager.stats()
    return stats.committed_steps + stats.rolled_back_steps + 1


class Scene:
    def __init__(self) -> None:
        self.manager = manager = BlockManager(32, BLOCK, events=True)
        self.pin = retain(manager, [1, 2, 3, 4])
        leave_evictable(manager, [7] * BLOCK)
        self.running = computed(manager, [20] * 6)  # one token left to decode, in no plan
        self.freed = computed(manager, [5, 6])
        self.freed.free()
        self.drafted = computed(manager, [40] * 5)  # in the older plan with a draft, 3
        self.decoding = manager.sequence([50] * 6)  # in both plans, its token pending in the newer

        self.step_committed = next_step(manager)
        self.committed = manager.begin_step(10)
        self.committed.prefill(self.decoding, 10)
        self.committed.commit([51])
        self.step_rolled_back = next_step(manager)
        self.rolled_back = manager.begin_step(10)
        self.rolled_back.decode([self.decoding])
        self.rolled_back.rollback()

        self.sampling = manager.sequence([30] * 5)  # in the older plan: its next token is unknown
        self.chunked = manager.sequence([60] * 20)  # a chunk in the older plan, one in the newer
        self.step_older = next_step(manager)
        self.older = manager.begin_step(100)
        self.older.decode([self.decoding])
        self.older.prefill(self.sampling, 100)
        self.older.speculate(self.drafted, [3])
        self.older.prefill(self.chunked, 8)
        self.newer = manager.begin_step(100)
        self.newer.decode([self.decoding])
        self.newer.prefill(self.chunked, 8)
        self.waiting = manager.sequence([1, 2, 3, 4, 5])  # nothing computed, in no plan

        self.other_manager = BlockManager(8, BLOCK, events=True)
        self.other_pin = retain(self.other_manager, [1, 2, 3, 4])
        self.other = self.other_manager.sequence([1, 2, 3, 4, 5])
        self.other_plan = self.other_manager.begin_step(10)

    def handles(self, kind: type) -> list[Any]:
        return [value for value in vars(self).values() if isinstance(value, kind)]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def seen(scene: Scene) -> dict[str, list[Any]]:
    """All that can be seen of both managers and of every handle."""
    managers = scene.handles(BlockManager)
    return {
        "usage, stats, blocks": [snapshot(manager) for manager in managers],
        "contents": [sorted(manager.cached_hashes()) for manager in managers],
        "events": [manager.take_events() for manager in managers],
        "sequences": [
            (
                *(sequence.id, sequence.tokens(), sequence.block_table),
                *(sequence.num_computed_tokens, sequence.num_cached_tokens),
            )
            if sequence.is_live
            else "freed"
            for sequence in scene.handles(Sequence)
        ],
        "pins": [(pin.num_tokens, pin.blocks) for pin in scene.handles(Pin)],
        "plans": [
            (
                *(plan.num_tokens, plan.num_sequences, plan.num_samples),
                *(plan.budget_left, plan.copies()),
            )
            if plan.is_open
            else "closed"
            for plan in scene.handles(StepPlan)
        ],
    }


def carry_on(scene: Scene) -> None:
    """Both steps end well, and all blocks are free again."""
    assert scene.newer.decode([scene.running]) == []
    scene.older.commit([11, 12, 3, 13], [1, 1, 2])
    scene.newer.commit([14, 15])
    assert scene.decoding.tokens() == [*[50] * 6, 51, 11, 14]
    assert scene.sampling.tokens() == [*[30] * 5, 12]
    assert scene.drafted.tokens() == [*[40] * 5, 0, 3, 13]
    assert scene.running.tokens() == [*[20] * 6, 0, 15]
    assert scene.chunked.num_computed_tokens == 16
    scene.other_plan.rollback()
    for handle in scene.handles(Sequence):
        if handle.is_live:
            handle.free()
    for handle in scene.handles(Pin):
        handle.release()
    for manager in scene.handles(BlockManager):
        manager.check()
        assert manager.usage().available == manager.num_blocks


@dataclass
class Misuse:
    call: Callable[[Scene], object]
    error: type[KvError]
    says: str
    """Part of the message; `{s.running.id}` stands for what it is in the scene."""


CLOSED = "step {s.step_%s} was committed or rolled back already"
FREED = "sequence {s.freed.id} was freed"
OTHER_MANAGER = "sequence {s.other.id} belongs to another BlockManager"
PLANNED = "sequence {s.%s.id} is in an open plan"
TRIM = "6 tokens of this sequence are computed, it cannot be trimmed to %s"

MISUSES = {
    # ---- a plan that is closed
    "commit, committed": Misuse(
        lambda s: s.committed.commit([51]), PlanError, CLOSED % "committed"
    ),
    "commit of nothing, committed": Misuse(
        lambda s: s.committed.commit([]), PlanError, CLOSED % "committed"
    ),
    "rollback, committed": Misuse(
        lambda s: s.committed.rollback(), PlanError, CLOSED % "committed"
    ),
    "commit, rolled back": Misuse(
        lambda s: s.rolled_back.commit([51]), PlanError, CLOSED % "rolled_back"
    ),
    "rollback, rolled back": Misuse(
        lambda s: s.rolled_back.rollback(), PlanError, CLOSED % "rolled_back"
    ),
    "counts whose sum overflows": Misuse(
        lambda s: s.older.commit([11, 12, 3, 13], [1, 2**64 - 1, 4]),
        PlanError,
        "18446744073709551615",
    ),
    # ---- a handle of another manager
    "other sequence, prefill": Misuse(
        lambda s: s.newer.prefill(s.other, 9), HandleError, OTHER_MANAGER
    ),
    "other sequence, decode": Misuse(
        lambda s: s.newer.decode([s.running, s.other]), HandleError, OTHER_MANAGER
    ),
    "other sequence, speculate": Misuse(
        lambda s: s.newer.speculate(s.other, [1]), HandleError, OTHER_MANAGER
    ),
    "other sequence, cancel": Misuse(lambda s: s.newer.cancel(s.other), HandleError, OTHER_MANAGER),
    "other sequence, preview": Misuse(
        lambda s: s.manager.preview(s.other), HandleError, OTHER_MANAGER
    ),
    "planned sequence, other plan": Misuse(
        lambda s: s.other_plan.prefill(s.sampling, 9), HandleError, "belongs to another"
    ),
    "other pin, attach": Misuse(
        lambda s: s.waiting.attach(s.other_pin),
        HandleError,
        "belongs to another BlockManager",
    ),
    "pin, other attach": Misuse(
        lambda s: s.other.attach(s.pin), HandleError, "belongs to another BlockManager"
    ),
    # ---- a sequence in two plans, or twice in one
    "in the older, prefill": Misuse(
        lambda s: s.newer.prefill(s.sampling, 9), PlanError, PLANNED % "sampling"
    ),
    "in the older, speculate": Misuse(
        lambda s: s.newer.speculate(s.sampling, [1]), PlanError, PLANNED % "sampling"
    ),
    "drafts in the older, prefill": Misuse(
        lambda s: s.newer.prefill(s.drafted, 9), PlanError, PLANNED % "drafted"
    ),
    "drafts in the older, speculate": Misuse(
        lambda s: s.newer.speculate(s.drafted, [1]), PlanError, PLANNED % "drafted"
    ),
    "drafts in the older, decode": Misuse(
        lambda s: s.newer.decode([s.running, s.drafted]), PlanError, PLANNED % "drafted"
    ),
    "in the newer, into the older": Misuse(
        lambda s: s.older.decode([s.decoding]), PlanError, "step {s.step_older} is out of turn"
    ),
    "twice, decode": Misuse(
        lambda s: s.newer.decode([s.running, s.running]), PlanError, PLANNED % "running"
    ),
    "again, decode": Misuse(
        lambda s: s.newer.decode([s.decoding]), PlanError, PLANNED % "decoding"
    ),
    "again, prefill": Misuse(
        lambda s: s.newer.prefill(s.chunked, 9), PlanError, PLANNED % "chunked"
    ),
    # ---- a freed sequence
    "fork, freed": Misuse(lambda s: s.freed.fork(1), HandleError, FREED),
    "fork of nothing, freed": Misuse(lambda s: s.freed.fork(0), HandleError, FREED),
    # ---- trim below what is computed
    "trim by one": Misuse(lambda s: s.running.trim(5), PlanError, TRIM % 5),
    "trim below the last block": Misuse(lambda s: s.running.trim(4), PlanError, TRIM % 4),
    "trim to nothing": Misuse(lambda s: s.running.trim(0), PlanError, TRIM % 0),
    "trim to less than nothing": Misuse(lambda s: s.running.trim(-1), ConfigError, "-1"),
    # ---- policies that do not exist
    **{
        f"eviction={name!r}": Misuse(
            lambda s, name=name: BlockManager(8, BLOCK, eviction=name),
            ConfigError,
            f'eviction="{name}" is not known; the policies are lru, 2q',
        )
        for name in ("fifo", "", "LRU", "2q ", "lru,2q")
    },
}

TAKES_TOKENS: dict[str, Callable[[Scene, Any], object]] = {
    "sequence": lambda s, tokens: s.manager.sequence(tokens),
    "match_prefix": lambda s, tokens: s.manager.match_prefix(tokens),
    "append": lambda s, tokens: s.running.append(tokens),
    "speculate": lambda s, tokens: s.newer.speculate(s.running, tokens),
    "commit": lambda s, tokens: s.older.commit(tokens, [1, 1, 2]),
}


def held(kind: Any, tokens: list[int]) -> Any:
    return tokens if kind is list else np.array(tokens, kind)


LAST = (  # what holds the tokens, and the last of them, which does not fit
    *((list, bad) for bad in (-1, 2**32, 2**64, -(2**63), 2**63)),
    *((np.int64, bad) for bad in (-1, 2**32, -(2**63), 2**63 - 1)),
    *((np.uint64, bad) for bad in (2**32, 2**64 - 1)),
    (np.int32, -1),
)
MISUSES |= {
    f"{call}, {kind.__name__}, {bad}": Misuse(
        lambda s, call=call, kind=kind, bad=bad: TAKES_TOKENS[call](
            s, held(kind, [11, 12, 3, bad])
        ),
        TokenError,
        f"token id {bad} at position 3 ",
    )
    for call in TAKES_TOKENS
    for kind, bad in LAST
}


def refused(scene: Scene, call: Callable[[Scene], object]) -> KvError:
    """The error of the call. It changed no state, and the steps can go on."""
    scene.manager.take_events()
    scene.other_manager.take_events()
    before = seen(scene)
    with pytest.raises(KvError) as raised:
        call(scene)
    after = seen(scene)
    for what, values in before.items():
        assert after[what] == values, what
    for manager in scene.handles(BlockManager):
        manager.check()
    carry_on(scene)
    return raised.value


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=list(MISUSES))
def test_misuse_is_named_and_changes_nothing(scene: Scene, misuse: Misuse) -> None:
    says = misuse.says.format(s=scene)
    error = refused(scene, misuse.call)
    assert type(error) is misuse.error, error
    assert says in str(error), error


@pytest.mark.parametrize("length", [65_537, 2**20])
@pytest.mark.parametrize("call", ["sequence", "match_prefix"])
def test_a_namespace_that_is_too_long(scene: Scene, call: str, length: int) -> None:
    take = getattr(scene.manager, call)
    error = refused(scene, lambda s: take([1, 2, 3, 4], namespace=b"x" * length))
    assert type(error) in {ConfigError, TokenError}, error
    assert str(length) in str(error).replace(",", ""), error


def test_the_longest_namespace() -> None:
    manager = BlockManager(4, BLOCK)
    namespace = b"x" * 65_536
    sequence = computed(manager, [1, 2, 3, 4], namespace=namespace)
    assert manager.match_prefix([1, 2, 3, 4], namespace=namespace).blocks == sequence.block_table
    assert manager.match_prefix([1, 2, 3, 4], namespace=namespace[1:]).blocks == []
    manager.check()


def test_the_scene_by_itself_shows_what_the_rows_rely_on(scene: Scene) -> None:
    """All four states, two open steps, and a check that changes nothing."""
    states = {scene.manager.state(block) for block in range(scene.manager.num_blocks)}
    assert states == {"free", "evictable", "active", "pinned"}
    seen(scene)  # takes the events
    assert seen(scene) == seen(scene)
    assert (scene.older.num_samples, scene.newer.num_samples) == (4, 1)
    carry_on(scene)
