"""Transfers: blocks for KV that comes from outside the pool, and blocks that leave it."""

import gc
import threading
from pathlib import Path

import pytest

from pyengine.kv_cache import (
    BlockManager,
    ConfigError,
    HandleError,
    Loading,
    NoRoom,
    PlanError,
    Prefilled,
    Sequence,
    Transfer,
    replay,
)


def reserved(sequence: Sequence, num_tokens: int) -> Transfer:
    transfer = sequence.reserve(num_tokens)
    assert isinstance(transfer, Transfer), transfer
    return transfer


def usage(manager: BlockManager) -> tuple[int, int, int, int, int]:
    manager.check()
    now = manager.usage()
    assert now.free + now.evictable + now.active + now.pinned + now.loading == now.num_blocks
    return now.free, now.evictable, now.active, now.pinned, now.loading


def test_a_prefix_is_restored() -> None:
    manager = BlockManager(8, 4)
    sequence = manager.sequence(range(10))
    transfer = reserved(sequence, 10)
    assert (transfer.id, transfer.first_index, transfer.num_blocks) == (1, 0, 2)
    assert transfer.blocks == [(0, 0, 0), (1, 0, 1)]
    assert repr(transfer) == "<Transfer 1 of blocks 0..2>"
    assert usage(manager) == (6, 0, 0, 0, 2)
    assert manager.state(0) == "loading"
    assert transfer.complete() == 8
    assert usage(manager) == (6, 0, 2, 0, 0)
    assert (sequence.num_restored_tokens, sequence.num_cached_tokens) == (8, 0)
    assert sequence.block_table == [0, 1]
    stats = manager.stats()
    assert (stats.reserved_blocks, stats.restored_blocks, stats.restored_tokens) == (2, 2, 8)
    assert stats.failed_transfers == 0


def test_others_wait_for_it() -> None:
    manager = BlockManager(8, 4)
    first, second = manager.sequence(range(10)), manager.sequence(range(10))
    transfer = reserved(first, 10)
    plan = manager.begin_step(64)
    answer = plan.prefill(second, 64)
    assert isinstance(answer, Loading)
    assert answer.transfer == transfer.id
    assert repr(answer) == "Loading(transfer=1)"
    assert isinstance(second.reserve(10), Loading)
    transfer.fail()
    answer = plan.prefill(second, 64)
    assert isinstance(answer, Prefilled)
    assert (answer.num_cached_tokens, answer.num_tokens) == (0, 10)


def test_nothing_to_restore_and_no_room() -> None:
    manager = BlockManager(2, 4)
    assert manager.sequence([1, 2, 3]).reserve(3) is None
    assert manager.sequence(range(9), read_cache=False).reserve(9) is None
    answer = manager.sequence(range(12)).reserve(12)
    assert isinstance(answer, NoRoom)
    assert (answer.needed, answer.available) == (3, 2)
    assert usage(manager) == (2, 0, 0, 0, 0)


def test_a_dropped_transfer_fails() -> None:
    manager = BlockManager(4, 4)
    sequence = manager.sequence(range(10))
    transfer = reserved(sequence, 10)
    sequence.free()
    assert usage(manager) == (2, 0, 0, 0, 2)  # the I/O may still write
    del transfer
    gc.collect()
    assert usage(manager) == (4, 0, 0, 0, 0)
    assert manager.stats().failed_transfers == 1


def test_an_abandoned_transfer_holds_its_blocks() -> None:
    manager = BlockManager(4, 4)
    sequence = manager.sequence(range(10))
    transfer = reserved(sequence, 10)
    transfer.abandon()
    assert usage(manager) == (2, 0, 0, 0, 2)
    assert sequence.extend(8)
    assert transfer.complete() == 0
    assert usage(manager) == (2, 0, 2, 0, 0)


def test_misuse_is_named() -> None:
    manager = BlockManager(8, 4)
    sequence = manager.sequence(range(10))
    plan = manager.begin_step(64)
    plan.prefill(sequence, 64)
    with pytest.raises(PlanError, match="sequence 1 is in an open plan"):
        sequence.reserve(10)
    plan.rollback()
    transfer = reserved(sequence, 10)
    for number in (2, -1, True):
        with pytest.raises(ConfigError, match=f"blocks={number} is a number: give the filled"):
            transfer.complete(number)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\(0, 0, 7\) is not one of the blocks of transfer 1"):
        transfer.complete([(0, 0, 7)])
    with pytest.raises(ConfigError, match=r"\(2, 0, 0\) is not one of the blocks of transfer 1"):
        transfer.restored_tokens([(0, 0, 0), (2, 0, 0)])
    with pytest.raises(ConfigError, match=r"blocks\[0\]=3 is not \(index in the prefix"):
        transfer.complete([3])  # type: ignore[list-item]
    assert transfer.complete(transfer.blocks[:1]) == 4
    for call in (transfer.complete, transfer.fail, transfer.abandon):
        with pytest.raises(PlanError, match="transfer 1 has ended already"):
            call()
    sequence.free()
    with pytest.raises(HandleError):
        sequence.reserve(10)


def test_threads_complete_and_drop() -> None:
    manager = BlockManager(64, 4)
    prompts = [manager.sequence([number] * 8) for number in range(16)]
    transfers = [reserved(sequence, 8) for sequence in prompts]

    def end(number: int) -> None:
        transfer = transfers.pop()
        if number % 2:
            transfer.complete()

    threads = [threading.Thread(target=end, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert usage(manager) == (48, 0, 16, 0, 0)


def test_evicted_blocks_are_told() -> None:
    manager = BlockManager(3, 4, keep_evicted=True)
    sequence = manager.sequence(range(8), namespace=b"tenant")
    sequence.extend(8)
    sequence.publish(8)
    sequence.free()
    hashes = manager.cached_hashes()
    taker = manager.sequence(range(100, 112))
    taker.extend(12)
    second, first = manager.take_evicted()
    assert (first.block, first.group, first.parent) == (0, 0, None)
    assert (second.block, second.parent) == (1, first.hash)
    assert (first.tokens, second.tokens) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert {first.hash, second.hash} == set(hashes)
    assert first.namespace == b"tenant"
    assert repr(first).startswith("Evicted(block=0, hash=")
    assert manager.take_evicted() == []


def test_blocks_are_evicted_ahead() -> None:
    manager = BlockManager(3, 4)
    sequence = manager.sequence(range(8))
    sequence.extend(8)
    sequence.publish(8)
    sequence.free()
    [evicted], pin = manager.evict(1)
    assert (evicted.tokens, pin.blocks) == ([4, 5, 6, 7], [1])
    assert usage(manager) == (1, 1, 0, 1, 0)
    pin.release()
    assert usage(manager) == (2, 1, 0, 0, 0)
    assert manager.take_evicted() == []


def test_a_recording_has_transfers(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtrace"
    manager = BlockManager(8, 4)
    manager.record(path)
    sequence = manager.sequence(range(10))
    reserved(sequence, 10).fail()
    transfer = reserved(sequence, 10)
    transfer.complete(transfer.blocks[:1])
    kept = reserved(sequence, 10)
    kept.abandon()
    del kept
    manager.evict(1)
    manager.stop_recording()
    report = replay(path)
    assert report.divergence is None
    assert report.failed_check is None
    expected = {"reserve": 3, "complete": 2, "abandon": 1, "drop_transfer": 1, "evict": 1}
    assert expected.items() <= report.operations.items()
    assert report.usage == manager.usage()
