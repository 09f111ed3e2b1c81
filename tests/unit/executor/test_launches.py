"""How many launches a layer of a decode step takes: no more than are known of."""

import pytest

from benches.gpu.launches import FAMILIES, _calls, compiled, eager, module

EAGER = {"llama": 9, "qwen3": 9, "gemma3_text": 11, "gpt_oss": 16}
COMPILED = {"llama": 9, "qwen3": 9, "gemma3_text": 9, "gpt_oss": 16}


def test_every_family_is_held_to_a_number() -> None:
    assert set(EAGER) == set(FAMILIES)


@pytest.mark.parametrize("family", EAGER)
def test_an_eager_layer_dispatches_no_more_than_it_did(family: str) -> None:
    assert 5 < eager(family) <= EAGER[family]


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
