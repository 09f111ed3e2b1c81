"""The simulator of benches/cluster: real caches, every policy, figures that make sense."""

from random import Random

import numpy as np
import pytest

from benches.cluster.replica import Costs
from benches.cluster.simulate import (
    BLOCK_SIZE,
    POLICIES,
    Arrival,
    endless,
    simulate,
    stretched,
)

COSTS = Costs(step=0.01, prompt_token=0.0005, prompt_context=0.0, row=0.001, row_context=0.0001)


def families(count: int, each: int, blocks: int) -> list[Arrival]:
    """Prompts that share a beginning of so many blocks with those of their family."""
    random = Random(0)
    arrivals = []
    for number in range(count * each):
        family = random.randrange(count)
        begin = np.arange(blocks * BLOCK_SIZE, dtype=np.int64) + 10_000 * family
        own = np.array([random.randrange(10**6) for _ in range(20)], dtype=np.int64)
        arrivals.append(Arrival(number * 0.1, np.concatenate([begin, own]), 10, family))
    return arrivals


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    arrivals = families(12, 20, 40)
    assert stretched(arrivals, COSTS, 4, 0.9) > 0
    return {name: simulate(name, arrivals, 4, 40 * 6, COSTS) for name in POLICIES}


def test_knowing_the_caches_finds_more_than_not(found: dict[str, dict[str, float]]) -> None:
    bound = endless(families(12, 20, 40))
    hits = {name: figures["hit_rate"] for name, figures in found.items()}
    assert all(0 <= rate <= bound + 1e-9 for rate in hits.values())
    assert hits["ours"] > 1.3 * hits["round robin"]
    assert hits["ours"] > 1.3 * hits["least load"]
    assert hits["ours"] >= 0.95 * hits["no removals"]


def test_what_is_expected_is_there(found: dict[str, dict[str, float]]) -> None:
    ours, deaf = found["ours"], found["no removals"]
    assert ours["expected_rate"] == pytest.approx(ours["hit_rate"], rel=0.1)
    assert deaf["expected_rate"] > deaf["hit_rate"]


def test_requests_are_divided(found: dict[str, dict[str, float]]) -> None:
    assert found["round robin"]["imbalance"] == 1.0
    assert found["ours"]["imbalance"] < 2
