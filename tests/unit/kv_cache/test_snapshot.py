"""The whole pool in one call: the same as block by block."""

import numpy as np
import pytest

from pyengine.kv_cache import BlockManager

STATES = ["free", "evictable", "active", "pinned", "loading"]


@pytest.mark.parametrize("groups", [None, [None, 8]])
def test_columns_are_what_each_block_says(groups: list[int | None] | None) -> None:
    manager = BlockManager(64, 4, groups=groups, hash_seed=1)
    random, live, pins = np.random.default_rng(5), [], []
    for _ in range(60):
        tokens = random.integers(0, 2, random.integers(1, 20)).tolist()
        sequence = manager.sequence(tokens, namespace=bytes([int(random.integers(0, 2))]))
        plan = manager.begin_step(64)
        if type(plan.prefill(sequence, 64)).__name__ == "Prefilled":
            plan.copies()
            plan.commit([1])
            live.append(sequence)
            pins.append(sequence.pin())
        else:
            plan.rollback()
            live, pins = live[5:], pins[3:]
        snapshot = manager.snapshot()
        columns = {
            name: np.frombuffer(getattr(snapshot, name), np.uint32)
            for name in ("refs", "seq_refs", "ages", "nodes", "node_indices")
        }
        assert [STATES[state] for state in snapshot.states] == [
            manager.state(at) for at in range(64)
        ]
        assert columns["refs"].tolist() == [manager.refs(at) for at in range(64)]
        assert columns["seq_refs"].tolist() == [manager.seq_refs(at) for at in range(64)]
        assert ((columns["nodes"] > 0) == (columns["node_indices"] > 0)).all()
        lengths = np.frombuffer(snapshot.lengths, np.uint32)
        known = columns["nodes"] > 0
        assert (columns["node_indices"][known] <= lengths[columns["nodes"][known] - 1]).all()
        names = dict(snapshot.namespaces)
        parents = np.frombuffer(snapshot.parents, np.uint32)
        assert sorted(names) == (np.flatnonzero(parents == 0) + 1).tolist()
        assert set(names.values()) <= {b"\0", b"\1"}
        manager.check()


def test_a_snapshot_of_nothing_is_empty() -> None:
    snapshot = BlockManager(3, 4).snapshot()
    assert snapshot.states == bytes(3)
    assert snapshot.refs == snapshot.ages == bytes(12)
    assert snapshot.lengths == b"" and snapshot.namespaces == []
