"""flash-attn's metadata: with a stand-in for the package, the numbers are the oracle's."""

import sys
from typing import Any

import pytest
from hypothesis import given, settings

from pyengine.attention.flash_attn import FlashAttn3Backend, FlashAttnBackend, _release
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

SHAPE = Shape()
LIBRARIES: dict[str, tuple[Any, str, Any]] = {
    "2.8.3": (FlashAttnBackend, "flash_attn", fake_kernels.flash_attn),
    "2.8.4": (FlashAttnBackend, "flash_attn", fake_kernels.flash_attn_reading_lengths),
    "3": (FlashAttn3Backend, "flash_attn_interface", fake_kernels.flash_attn_3),
}


@pytest.fixture(params=LIBRARIES, scope="module")
def backend(request: pytest.FixtureRequest) -> Any:
    backend, module, library = LIBRARIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, library)
        yield backend


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15)
@given(lengths=new_and_context)
def test_every_step_gives_what_the_oracle_gives(backend, case, lengths):
    step = make_step(lengths, SHAPE)
    assert_like_oracle(backend, SHAPE.pool(), step, options_of(case))
    assert_turns_like_oracle(backend, SHAPE.pool(), step, options_of(case))


@pytest.mark.parametrize("case", CASES)
def test_graph_metadata_follows_its_steps(backend, case):
    assert_graph_metadata_follows(backend, SHAPE.pool(), SHAPE, options_of(case))


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.8.3", (2, 8, 3)),
        ("2.8.3.post2", (2, 8, 3)),
        ("2.10.0+cu13", (2, 10, 0)),
        ("?", (0, 0, 0)),
    ],
)
def test_the_release_is_read_from_the_version(version, release):
    assert _release(version) == release
