"""A step on CPUs has no operation of torch between the token ids and the logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from pyengine import LLM, SamplingParams
from pyengine.cpu import CpuAttention
from tests.unit.models.decoder.tiny_models import Tiny, save

pytestmark = pytest.mark.skipif(not CpuAttention.is_fast(), reason="no fast CPU kernels")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
MODELS = (
    Tiny("llama-of-64", "llama", SIZES),
    Tiny("qwen3-of-64", "qwen3", {**SIZES, "head_dim": 16, "attention_bias": True}),
    Tiny("gemma2-of-64", "gemma2", {**SIZES, "head_dim": 16, "final_logit_softcapping": 2.0}),
    Tiny("gemma3-of-64", "gemma3_text", {**SIZES, "head_dim": 16, "sliding_window": 9}),
    Tiny("granite-of-64", "granite", {**SIZES, "embedding_multiplier": 2.5, "logits_scaling": 1.7}),
)
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


class Operations(TorchDispatchMode):
    """The names of the operations that torch runs in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


@contextmanager
def operations_of(llm: LLM) -> Iterator[set[str]]:
    """Names of operations inside the decoder, in all steps of the block."""
    model: Any = llm._engine._executor.runner._model  # type: ignore[attr-defined]
    decoder, operations, calls = model._decoder, Operations(), []

    def observed(*arguments: Any) -> Any:
        calls.append(len(arguments[0]))
        with operations:
            return decoder(*arguments)

    model._decoder = observed
    yield operations.seen
    model._decoder = decoder
    assert max(calls) > 3, "prompts were computed"
    assert min(calls) <= 3, "and decodes"


def seen_in(folder: Path, **settings: Any) -> set[str]:
    with LLM(folder, device="cpu", num_blocks=64, **settings) as llm, operations_of(llm) as seen:
        llm.generate([[5, 6, 7, 8] * 9, [9] * 5], GREEDY, use_tqdm=False)
    return seen


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("tiny", MODELS, ids=[tiny.name for tiny in MODELS])
def test_a_step_of_the_default_path_runs_none(
    tiny: Tiny, settings: dict[str, Any], saved: Any
) -> None:
    folder, _ = saved(tiny)
    assert seen_in(folder, **settings) == set()


def test_a_step_of_the_default_model_runs_none() -> None:
    """That of the embedded file, in 4 bits."""
    with LLM(device="cpu", num_blocks=64) as llm, operations_of(llm) as seen:
        llm.generate([[5, 6, 7, 8] * 9, [9] * 5], GREEDY, use_tqdm=False)
    assert seen == set()


@pytest.mark.parametrize("product", ["torch", "onednn"])
def test_products_of_torch_would_be_seen(product: str, tmp_path: Path) -> None:
    save(MODELS[0], tmp_path)
    seen = seen_in(tmp_path, dtype="float32", linear_backend=product)
    names = {"torch": "aten::linear", "onednn": "mkldnn::_linear_pointwise"}
    assert names[product] in seen
