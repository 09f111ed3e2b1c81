"""Snapshots of states through the Python binding."""

import pytest

from pyengine.kv_cache import (
    BlockManager,
    Computing,
    ConfigError,
    Extended,
    NoRoom,
    PlanError,
    Prefilled,
    Sequence,
    StateUsage,
    replay,
)

Copies = list[tuple[int, int, list[int]]]


def stateful(num_blocks: int = 64, **options: object) -> BlockManager:
    """Blocks of four tokens, snapshots of two blocks, spare ones every 16 tokens."""
    return BlockManager(
        num_blocks,
        4,
        state_blocks=2,
        snapshot_cadence=16,
        snapshot_min_tokens=8,
        **options,  # type: ignore[arg-type]
    )


def compute(manager: BlockManager, sequence: Sequence) -> list[tuple[int, Copies, Copies]]:
    """Compute all tokens; the number of tokens, the loads and the saves of each step."""
    steps = []
    samples = False
    while not samples:
        plan = manager.begin_step(1000)
        answer = plan.prefill(sequence, 1000)
        assert isinstance(answer, Prefilled)
        steps.append((answer.num_tokens, plan.state_loads(), plan.state_saves()))
        samples = answer.samples
        plan.commit([7] if samples else [])
        manager.check()
    return steps


def test_a_second_request_continues_a_snapshot() -> None:
    manager = stateful(explain=True)
    first = manager.sequence(range(42))
    steps = compute(manager, first)
    assert [tokens for tokens, _, _ in steps] == [16, 16, 8, 2]
    assert steps[0][1] == [(first.id, 0, [])]  # the state of no token
    assert [[position for _, position, _ in saves] for _, _, saves in steps] == [
        [16],
        [32],
        [40],
        [],
    ]
    kept = steps[0][2][0][2]
    assert len(kept) == 2

    prompt = [*range(26), *range(900, 908)]
    explanation = manager.explain(prompt)
    assert (explanation.reason, explanation.position) == ("no_snapshot", 16)
    assert (explanation.cached_to, explanation.num_pool_tokens) == (24, 16)
    second = manager.sequence(prompt)
    steps = compute(manager, second)
    assert steps[0][1] == [(second.id, 16, kept)]
    assert [tokens for tokens, _, _ in steps] == [8, 8, 2]  # 8 again, up to the branch point
    assert second.block_table[:6] == first.block_table[:6]
    stats = manager.stats()
    assert (stats.loaded_snapshots, stats.replayed_tokens) == (1, 8)
    assert manager.state_usage().snapshots == stats.saved_snapshots == 5


def test_usage_and_pins() -> None:
    manager = stateful()
    sequence = manager.sequence(range(22))
    compute(manager, sequence)
    usage = manager.state_usage()
    assert isinstance(usage, StateUsage)
    assert (usage.snapshots, usage.blocks, usage.pending_blocks) == (1, 2, 0)
    del sequence
    with manager.match_prefix(range(20)) as pin:
        assert (pin.num_tokens, pin.num_state_tokens) == (20, 16)
        assert pin.blocks[-2:] == pin.state_blocks
        manager.evict_all()
        assert manager.state_usage().snapshots == 1
    manager.evict_all()
    assert manager.state_usage().snapshots == 0
    assert repr(manager.state_usage()).startswith("StateUsage(snapshots=0, blocks=0")


def test_wanted_snapshots() -> None:
    manager = stateful()
    sequence = manager.sequence(range(20))
    sequence.want_snapshots([7, 13])
    saves = [saves for _, _, saves in compute(manager, sequence)]
    assert [position for save in saves for _, position, _ in save] == [4, 12]


def test_equal_prompts_wait_for_the_first() -> None:
    manager = stateful()
    first, second = manager.sequence(range(20)), manager.sequence(range(20))
    plan = manager.begin_step(100)
    assert isinstance(plan.prefill(first, 100), Prefilled)
    assert isinstance(plan.prefill(second, 100), Computing)
    plan.commit([])
    assert compute(manager, second)[0][0] == 4


def test_snapshots_of_more_blocks_than_the_pool_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of a snapshot"):
        BlockManager(4, 4, state_blocks=5)


def test_a_recording_has_the_settings(tmp_path: object) -> None:
    manager = stateful()
    path = f"{tmp_path}/states.kvtrace"
    manager.record(path)
    sequence = manager.sequence(range(42))
    sequence.want_snapshots([9])
    compute(manager, sequence)
    manager.stop_recording()
    report = replay(path)
    assert report.divergence is None
    assert report.settings["state_blocks"] == 2
    assert report.settings["snapshot_cadence"] == 16


def test_an_engine_without_plans_keeps_and_continues_snapshots() -> None:
    manager = stateful()
    first = manager.sequence(range(22))
    for count in (12, 10):
        assert isinstance(first.extend(count), Extended)
        first.publish(count)
        if first.num_computed_tokens == 12:
            kept = first.keep_snapshot()
            assert isinstance(kept, Extended)
            assert (len(kept.blocks), len(kept.blocks[0]), kept.copies) == (1, 2, [])
    with pytest.raises(PlanError, match="22 computed tokens; a snapshot is kept at the end of a"):
        first.keep_snapshot()

    second = manager.sequence([*range(20), 99])
    assert second.reuse_cached() == 12
    with second.pin() as pin:
        assert (pin.num_state_tokens, pin.state_blocks) == (12, kept.blocks[0])
    again = second.keep_snapshot()
    assert isinstance(again, Extended) and again.blocks == [[]]  # it is there
    second.extend(8)
    assert len(second.publish(8)) == 2  # merged with those of the first
    assert manager.state_usage().snapshots == 1
    manager.check()


def test_a_snapshot_without_room_is_not_kept() -> None:
    manager = BlockManager(4, 4, state_blocks=3)
    sequence = manager.sequence(range(9))
    sequence.extend(8)
    sequence.publish(8)
    refused = sequence.keep_snapshot()
    assert isinstance(refused, NoRoom) and (refused.needed, refused.available) == (3, 2)
    manager.check()
