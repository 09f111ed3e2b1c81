"""flashinfer's metadata: with a stand-in for the package, the numbers are the oracle's."""

import sys

import pytest
import torch
from hypothesis import given, settings

from pyengine.attention import flashinfer
from pyengine.attention.flashinfer import FlashInferBackend, PlanMemory
from tests.unit.attention import fake_kernels
from tests.unit.attention.steps import (
    CASES,
    Shape,
    assert_graph_plan_follows,
    assert_like_oracle,
    make_step,
    new_and_context,
    options_of,
)

SHAPE = Shape()


@pytest.fixture(autouse=True, scope="module")
def fake_package():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_kernels.flashinfer)
        patch.setattr(flashinfer, "_WORKSPACE_BYTES", 1024)
        yield


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15)
@given(lengths=new_and_context)
def test_every_step_gives_what_the_oracle_gives(case, lengths):
    assert_like_oracle(FlashInferBackend, SHAPE.pool(), make_step(lengths, SHAPE), options_of(case))


@pytest.mark.parametrize("case", CASES)
def test_a_cache_in_8_bit_floats_is_read_with_its_scales(case):
    pool = SHAPE.pool(torch.float8_e4m3fn, scale_k=0.5, scale_v=2.0)
    step = make_step([(1, 9), (3, 4)], SHAPE)
    assert_like_oracle(FlashInferBackend, pool, step, options_of(case))


@pytest.mark.parametrize("case", CASES)
def test_a_graph_plan_follows_its_steps(case):
    assert_graph_plan_follows(FlashInferBackend, SHAPE.pool(), SHAPE, options_of(case))


def test_a_wrapper_is_planned_once_per_step_and_kind_of_layer():
    backend = FlashInferBackend(SHAPE.pool())
    step = make_step([(1, 9), (3, 4)], SHAPE)
    for _ in range(2):
        plan = backend.plan(step.inputs)
        for case in ("plain", "window", "plain", "window", "sinks"):
            step.run(plan, options_of(case))
    assert sorted(wrapper.plans for wrapper in backend._wrappers.values()) == [2, 2, 2, 2]


@pytest.mark.parametrize("with_graphs", [False, True])
def test_a_plan_is_not_written_over_one_that_the_device_has_yet_to_read(monkeypatch, with_graphs):
    """Two steps are open at a time, and each plans for two kinds of layer."""
    monkeypatch.setattr(fake_kernels, "queue", queue := fake_kernels.PlanQueue())
    backend = FlashInferBackend(SHAPE.pool())
    memory = backend.plan_memory = PlanMemory(queue.mark)
    step = make_step([(1, 9), (1, 4)], SHAPE)
    plan = backend.graph_plan(step.inputs)
    if with_graphs:
        for case in ("plain", "window"):
            step.run(plan, options_of(case))
    queue.is_late = True
    for _ in range(4):
        for _ in range(2):
            if with_graphs:
                plan.refresh(step.inputs)
            else:
                plan = backend.plan(step.inputs)
            for case in ("plain", "window"):
                step.run(plan, options_of(case))
        assert len(queue.waiting) == 4
        queue.run()
    assert len(memory._lent) <= 4 + 2 * with_graphs, "memory is used again"
