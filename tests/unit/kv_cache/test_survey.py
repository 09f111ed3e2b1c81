"""The whole pool in one call: the same as block by block."""

import numpy as np
import pytest

from pyengine.kv_cache import BlockManager

STATES = ["free", "idle", "active", "leased"]


@pytest.mark.parametrize("groups", [None, [None, 8]])
def test_columns_are_what_each_block_says(groups: list[int | None] | None) -> None:
    manager = BlockManager(64, 4, groups=groups, hash_seed=1)
    random, live, leases = np.random.default_rng(5), [], []
    for _ in range(60):
        tokens = random.integers(0, 2, random.integers(1, 20)).tolist()
        sequence = manager.sequence(tokens, namespace=bytes([int(random.integers(0, 2))]))
        plan = manager.begin_step(64)
        if type(plan.prefill(sequence, 64)).__name__ == "Prefilled":
            plan.copies()
            plan.commit([1])
            live.append(sequence)
            leases.append(sequence.lease())
        else:
            plan.rollback()
            live, leases = live[5:], leases[3:]
        survey = manager.survey()
        columns = {
            name: np.frombuffer(getattr(survey, name), np.uint32)
            for name in ("refs", "seq_refs", "ages", "branches", "rows")
        }
        assert [STATES[state] for state in survey.states] == [manager.state(at) for at in range(64)]
        assert columns["refs"].tolist() == [manager.refs(at) for at in range(64)]
        assert columns["seq_refs"].tolist() == [manager.seq_refs(at) for at in range(64)]
        assert ((columns["branches"] > 0) == (columns["rows"] > 0)).all()
        lengths = np.frombuffer(survey.lengths, np.uint32)
        known = columns["branches"] > 0
        assert (columns["rows"][known] <= lengths[columns["branches"][known] - 1]).all()
        names = dict(survey.namespaces)
        parents = np.frombuffer(survey.parents, np.uint32)
        assert sorted(names) == (np.flatnonzero(parents == 0) + 1).tolist()
        assert set(names.values()) <= {b"\0", b"\1"}
        manager.check()


def test_a_survey_of_nothing_is_empty() -> None:
    survey = BlockManager(3, 4).survey()
    assert survey.states == bytes(3)
    assert survey.refs == survey.ages == bytes(12)
    assert survey.lengths == b"" and survey.namespaces == []
