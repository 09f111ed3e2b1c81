"""Through the Python API: a new version of the weights ends the cache of the one before."""

import pytest

from pyengine.kv_cache import BlockManager, Cleared, PinError, PlanError, Transfer
from tests.support.blocks import compute, computed


def test_a_new_version_of_the_weights() -> None:
    manager = BlockManager(8, 4, events=True, explain=True)
    computed(manager, range(9)).free()
    manager.take_events()
    assert manager.weights_version == 0
    assert manager.advance_weights_version() == 1
    assert manager.weights_version == 1
    [event] = manager.take_events()
    assert isinstance(event, Cleared) and event.weights_version == 1
    assert repr(event) == "Cleared(weights_version=1)"
    assert manager.usage().free == 8
    explanation = manager.explain(range(9))
    assert (explanation.reason, explanation.evicted_by) == ("evicted", "weights_changed")
    assert computed(manager, range(9)).num_cached_tokens == 0
    manager.check()


def test_a_sequence_goes_on_until_it_is_reset() -> None:
    manager = BlockManager(8, 4)
    sequence = computed(manager, range(9))
    assert (sequence.weights_version, sequence.is_private) == (0, False)
    manager.advance_weights_version()
    assert (sequence.weights_version, sequence.is_private) == (0, True)
    fork = sequence.fork(9)
    assert fork.is_private and fork.block_table == sequence.block_table
    assert manager.match_prefix(range(9)).num_tokens == 0
    fork.free()
    sequence.reset()
    assert (sequence.weights_version, sequence.is_private) == (1, False)
    compute(manager, sequence)
    assert manager.match_prefix(range(9)).num_tokens == 8
    manager.check()


def test_refusals() -> None:
    manager = BlockManager(8, 4)
    computed(manager, range(9)).free()
    pin = manager.match_prefix(range(9))
    request = manager.sequence(range(20, 29))
    transfer = request.reserve(8)
    assert isinstance(transfer, Transfer)
    plan = manager.begin_step(16)
    with pytest.raises(PlanError, match="1 plan and 1 transfer are open"):
        manager.advance_weights_version()
    plan.rollback()
    transfer.fail()
    manager.advance_weights_version()
    with pytest.raises(PinError, match=r"version 0 of the weights .* are at version 1"):
        manager.sequence(range(9)).attach(pin)
    assert manager.usage().pinned == 2
    pin.release()
    assert manager.usage().free == 8
    manager.check()
