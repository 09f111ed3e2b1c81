"""flash-attn's metadata: with a stand-in for the package, the numbers are the oracle's."""

import sys

import pytest
from hypothesis import given, settings

from pyengine.attention.varlen import FlashAttnBackend
from tests.unit.attention import fake_kernels
from tests.unit.attention.steps import (
    CASES,
    Shape,
    assert_graph_plan_follows,
    assert_like_oracle,
    assert_turns_like_oracle,
    make_step,
    new_and_context,
    options_of,
)

SHAPE = Shape()


@pytest.fixture(autouse=True, scope="module")
def fake_package():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", fake_kernels.flash_attn)
        yield


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15)
@given(lengths=new_and_context)
def test_every_step_gives_what_the_oracle_gives(case, lengths):
    step = make_step(lengths, SHAPE)
    assert_like_oracle(FlashAttnBackend, SHAPE.pool(), step, options_of(case))
    assert_turns_like_oracle(FlashAttnBackend, SHAPE.pool(), step, options_of(case))


@pytest.mark.parametrize("case", CASES)
def test_a_graph_plan_follows_its_steps(case):
    assert_graph_plan_follows(FlashAttnBackend, SHAPE.pool(), SHAPE, options_of(case))
