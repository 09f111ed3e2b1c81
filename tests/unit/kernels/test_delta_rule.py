"""The Triton kernels of gated delta rules: against torch, and made for absent GPUs."""

from typing import Any

import torch

from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.kernels import MIN_NORM, DeltaWeights
from pyengine.models.decoder.torch_states import TorchStates
from tests.support.kernels import in_compiler, in_interpreter, machine_code
from tests.unit.kernels.states import STEPS, check_beside, compare, in_a_wider_row, num_tokens


def check(step: str, rows: tuple[torch.Tensor, ...], weights: DeltaWeights) -> None:
    """The kernel computes what torch does, of queries, keys, values, decay and learning rate."""
    from pyengine.kernels.delta_rule import DeltaRule, gated_delta

    own_rule = (weights.rate, weights.bias, weights.beta_scale, weights.tiled_heads, MIN_NORM)
    rule = DeltaRule(*own_rule)

    def compute(parts: Any, state: torch.Tensor, own: Any) -> torch.Tensor:
        return gated_delta(parts, rule, state, own)

    def oracle(parts: Any, state: LayerState, own: StateInputs) -> torch.Tensor:
        return TorchStates().gated_delta(parts, weights, state, own)

    _, key, value, _, _ = rows
    shape = (value.shape[1], key.shape[2], value.shape[2])
    compare(step, tuple(in_a_wider_row(part) for part in rows), shape, compute, oracle)


@in_interpreter
def test_delta_rules_are_those_of_torch() -> None:
    """In the interpreter: a decay by head, of heads that share keys in both orders."""
    torch.manual_seed(0)
    for step in STEPS:
        for dtype, key_heads, value_heads, key_dim, value_dim, scale, is_tiled in (
            (torch.float32, 2, 6, 8, 12, 1.0, False),
            (torch.float16, 2, 4, 20, 40, 2.0, True),
            (torch.bfloat16, 1, 1, 128, 70, 1.0, False),
        ):
            count = num_tokens(step)
            shapes = [(key_heads, key_dim)] * 2 + [(value_heads, value_dim)]
            shapes += [(value_heads,)] * 2  # type: ignore[list-item]
            rows = tuple(torch.randn(count, *shape).to(dtype) for shape in shapes)
            rows[3][::7] = 40.0  # a decay so fast that the state is forgotten
            rate, bias = -torch.rand(value_heads), torch.randn(value_heads)
            check(step, rows, DeltaWeights(rate, bias, scale, is_tiled))


@in_interpreter
def test_decays_by_channel_are_those_of_torch() -> None:
    """In the interpreter: Kimi's delta attention."""
    torch.manual_seed(0)
    for step in STEPS:
        for dtype, heads, size in ((torch.float32, 4, 8), (torch.bfloat16, 1, 40)):
            count = num_tokens(step)
            shapes: list[Any] = [(heads, size)] * 3 + [(heads * size,), (heads,)]
            rows = tuple(torch.randn(count, *shape).to(dtype) for shape in shapes)
            rows[3][::7] = 40.0
            check(step, rows, DeltaWeights(-torch.rand(heads), torch.randn(heads * size)))


@in_interpreter
def test_sequences_have_the_same_bits_beside_others() -> None:
    """In the interpreter: prompts and decodes, with decays by head and by channel."""
    from pyengine.kernels import delta_rule

    torch.manual_seed(0)
    for gates in (2, 2 * 20):
        shapes: list[Any] = [(2, 20)] * 3 + [(gates,), (2,)]
        rows = tuple(torch.randn(num_tokens("mixed"), *shape).half() for shape in shapes)
        numbers = -torch.rand(2), torch.randn(gates)
        rule = delta_rule.DeltaRule(*numbers, 1.0, tiled_heads=False, eps=MIN_NORM)

        def compute(parts: Any, state: torch.Tensor, own: Any, of: Any = rule) -> torch.Tensor:
            return delta_rule.gated_delta(parts, of, state, own)

        check_beside(rows, (2, 20, 20), compute, delta_rule)


@in_interpreter
def test_equal_keys_that_are_learned_at_once_stay_exact() -> None:
    """In the interpreter: the system of a chunk is solved row by row.

    A series of its powers would grow to thousands and cancel.
    """
    rows = [torch.ones(37, 1, 32).half() for _ in range(2)]
    rows += [torch.randn(37, 1, 16, generator=torch.Generator().manual_seed(0)).half()]
    rows += [torch.full((37, 1), -30.0).half(), torch.full((37, 1), 30.0).half()]
    weights = DeltaWeights(-torch.ones(1), torch.zeros(1))
    step = "mixed"
    wide = tuple(part.repeat(3, *[1] * (part.dim() - 1))[: num_tokens(step)] for part in rows)
    check(step, wide, weights)


KINDS: dict[str, Any] = {
    **dict.fromkeys(("query", "key", "value", "gate", "rate_gate", "out"), "*bf16"),
    **dict.fromkeys(("rate", "bias", "state"), "*fp32"),
    **{"starts": "*i32", "sources": "*i64", "slots": "*i64", "strides": ("i32",) * 5},
    **dict.fromkeys(("scale", "eps", "beta_scale"), "fp32"),
    "longest": "i32",
}
SHAPES = (
    {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "by_channel": False},
    {"key_heads": 32, "value_heads": 32, "key_dim": 128, "value_dim": 128, "by_channel": True},
)
"""Of Qwen3-Next and of Kimi Linear."""


@in_compiler
def test_the_kernels_become_machine_code() -> None:
    """For GPUs of several generations."""
    from pyengine.kernels.delta_rule import _chunked_kernel, _recurrent_kernel

    for capability in (80, 90, 100):
        for shape in SHAPES:
            constants = {**shape, "tiled_heads": False, "block_k": 128, "block_v": 32}
            assert len(machine_code(_recurrent_kernel, KINDS, constants, capability, 4)) > 1000
            constants |= {"chunk": 16, "block_d": 16}
            assert len(machine_code(_chunked_kernel, KINDS, constants, capability, 4)) > 1000
