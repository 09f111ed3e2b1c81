"""How many launches a layer of a decode step takes: no more than are known of."""

import pytest

from benches.engine.states import SHAPES
from benches.gpu.launches import FAMILIES, RECURRENT, _calls, compiled, eager, module, whole_step
from pyengine.models.decoder.loading import spec_of

EAGER = {"llama": 9, "qwen3": 9, "gemma3_text": 11, "gpt_oss": 16}
OF_STATES = {"lfm2": 8, "qwen3_5_text": 12, "granitemoehybrid": 10}
"""Of a layer that keeps a state."""
STEPS = {"LFM2-350M": 147, "Qwen3.5-0.8B": 301, "Granite-4.0-H-350M": 321}
"""Of a whole step."""
COMPILED = {"llama": 9, "qwen3": 9, "gemma3_text": 9, "gpt_oss": 16}


def test_every_family_is_held_to_a_number() -> None:
    assert set(EAGER) == set(FAMILIES)
    assert set(OF_STATES) == set(RECURRENT)
    assert set(STEPS) == set(SHAPES)


@pytest.mark.parametrize("family", EAGER)
def test_an_eager_layer_dispatches_no_more_than_it_did(family: str) -> None:
    assert 5 < eager(family) <= EAGER[family]


@pytest.mark.parametrize("family", OF_STATES)
def test_nor_does_a_layer_that_keeps_a_state(family: str) -> None:
    assert 5 < eager(family) <= OF_STATES[family]


@pytest.mark.parametrize("name", STEPS)
def test_nor_does_a_step_of_a_model_with_states(name: str) -> None:
    """Each recurrent layer has one kernel of a decode, none of chunks."""
    counts = whole_step(name)
    assert 100 < counts.total() <= STEPS[name]
    recurrent = len(spec_of(SHAPES[name], name).recurrent)
    assert counts["short_conv"] == recurrent
    assert counts["delta_rule"] + counts["state_space"] in {0, recurrent}


def test_a_module_of_transformers_takes_more() -> None:
    assert eager("llama", module) > 4 * EAGER["llama"]


@pytest.mark.soak
@pytest.mark.parametrize("family", COMPILED)
def test_a_compiled_layer_calls_no_more_than_it_did(family: str) -> None:
    assert 5 < compiled(family) <= COMPILED[family]


def test_the_calls_of_a_compiled_graph_are_counted() -> None:
    source = """
def call(args):
    buf1 = reinterpret_tensor(buf0, (1, 2), (2, 1), 0)  # alias
    cpp_fused_mul_silu_5(buf41, buf40)
    extern_kernels.mm(reinterpret_tensor(buf22, (64, 128)), out=buf3)
    buf13 = torch.ops.pyengine.paged_attention.default(buf11, buf12)
    assert_alignment(buf13, 16, 'torch.ops.pyengine.paged_attention.default')
    buf14 = torch.ops.aten.topk.default(buf13)
"""
    assert _calls(source) == 1 + 1 + 2 + 1
