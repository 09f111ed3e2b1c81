"""Torch's varlen_attn: its signature is the real one's, its kernel (CUDA only) a stand-in."""

import inspect

import pytest
from hypothesis import given, settings

from pyengine.attention.varlen import CudnnBackend, VarlenBackend
from pyengine.errors import ConfigurationError
from tests.unit.attention import fake_kernels
from tests.unit.attention.steps import (
    CASES,
    Shape,
    assert_graph_metadata_follows,
    assert_like_oracle,
    assert_turns_like_oracle,
    make_step,
    new_and_context,
    options_of,
)

real = pytest.importorskip("torch.nn.attention.varlen")
PARAMETERS = inspect.signature(real.varlen_attn).parameters
SHAPE = Shape()
SERVED = [
    (backend, case)
    for backend in (VarlenBackend, CudnnBackend)
    for case, options in CASES.items()
    if "softcap" not in options
]


@pytest.fixture(autouse=True, scope="module")
def fake_kernel():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "varlen_attn", fake_kernels.varlen_attn)
        yield


def test_the_stand_in_has_the_parameters_of_the_real_one():
    ours = inspect.signature(fake_kernels.varlen_attn).parameters
    assert list(ours) == list(PARAMETERS)
    assert [our.kind for our in ours.values()] == [
        parameter.kind for parameter in PARAMETERS.values()
    ]


@pytest.mark.parametrize(("backend", "case"), SERVED)
@settings(max_examples=15)
@given(lengths=new_and_context)
def test_every_step_gives_what_the_oracle_gives(backend, case, lengths):
    step = make_step(lengths, SHAPE)
    assert_like_oracle(backend, SHAPE.pool(), step, options_of(case))
    assert_turns_like_oracle(backend, SHAPE.pool(), step, options_of(case))


@pytest.mark.parametrize(("backend", "case"), SERVED)
def test_graph_metadata_follows_its_steps(backend, case):
    assert_graph_metadata_follows(backend, SHAPE.pool(), SHAPE, options_of(case))


@pytest.mark.parametrize("backend", [VarlenBackend, CudnnBackend])
def test_a_softcap_is_refused_rather_than_ignored(backend):
    step = make_step([(1, 2)], SHAPE)
    metadata = backend(SHAPE.pool()).metadata(step.inputs)
    with pytest.raises(ConfigurationError, match=r"softcap of 0\.7"):
        step.run(metadata, options_of("softcap"))
