"""The Triton kernels of state spaces: against torch, and made for absent GPUs."""

from typing import Any

import torch

from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.kernels import MambaWeights
from pyengine.models.decoder.torch_states import TorchStates
from tests.support.kernels import in_compiler, in_interpreter, machine_code
from tests.unit.kernels.states import STEPS, check_beside, compare, in_a_wider_row, num_tokens


def check(step: str, rows: tuple[torch.Tensor, ...], weights: MambaWeights, shape: Any) -> None:
    """The kernel computes what torch does, of x, time steps, B, C and maybe a gate."""
    from pyengine.kernels.state_space import SpaceWeights, state_space

    space = SpaceWeights(weights.rate, weights.bias, weights.skip)

    def compute(parts: Any, state: torch.Tensor, own: Any) -> torch.Tensor:
        return state_space(parts[:4], space, state, own, parts[4] if parts[4:] else None)

    def oracle(parts: Any, state: LayerState, own: StateInputs) -> torch.Tensor:
        gate = parts[4] if parts[4:] else None
        return TorchStates().mamba(parts[:4], weights, state, own, gate)

    compare(step, tuple(in_a_wider_row(part) for part in rows), shape, compute, oracle)


@in_interpreter
def test_mamba_2_is_that_of_torch() -> None:
    """In the interpreter: heads that share what writes and reads, with and without gates."""
    torch.manual_seed(0)
    for step in STEPS:
        for dtype, heads, head_dim, groups, state_size, has_gate in (
            (torch.float32, 4, 12, 2, 16, True),
            (torch.float16, 3, 64, 1, 100, False),
            (torch.bfloat16, 2, 130, 2, 5, True),
        ):
            count = num_tokens(step)
            shapes = [(heads, head_dim), (heads,), *[(groups, state_size)] * 2]
            shapes += [(heads, head_dim)] if has_gate else []
            rows = tuple(torch.randn(count, *shape).to(dtype) for shape in shapes)
            rows[1][::7] = 30.0  # a step so long that the state is forgotten
            rate = -torch.rand(heads)
            weights = MambaWeights(rate, torch.randn(heads), torch.randn(heads))
            check(step, rows, weights, (heads, state_size, head_dim))


@in_interpreter
def test_mamba_is_that_of_torch() -> None:
    """In the interpreter: decays that differ by number of the state."""
    torch.manual_seed(0)
    for step in STEPS:
        for dtype, width, state_size, has_gate in (
            (torch.float32, 24, 8, True),
            (torch.float16, 100, 16, True),
            (torch.bfloat16, 64, 3, False),
        ):
            count = num_tokens(step)
            sizes = [width, width, state_size, state_size, *[width] * has_gate]
            rows = tuple(torch.randn(count, size).to(dtype) for size in sizes)
            rate = -torch.rand(state_size, width)
            weights = MambaWeights(rate, torch.randn(width), torch.randn(width))
            check(step, rows, weights, (state_size, width))


@in_interpreter
def test_sequences_have_the_same_bits_beside_others() -> None:
    """In the interpreter: prompts and decodes."""
    from pyengine.kernels import state_space

    torch.manual_seed(0)
    shapes = [(4, 12), (4,), (2, 8), (2, 8)]
    rows = tuple(torch.randn(num_tokens("mixed"), *shape).half() for shape in shapes)
    weights = state_space.SpaceWeights(-torch.rand(4), torch.randn(4), torch.randn(4))

    def compute(parts: Any, state: torch.Tensor, own: Any) -> torch.Tensor:
        return state_space.state_space(parts, weights, state, own)

    check_beside(rows, (4, 8, 12), compute, state_space)


KINDS: dict[str, Any] = {
    **dict.fromkeys(("x", "time", "b", "c", "gate", "out"), "*bf16"),
    **dict.fromkeys(("rate", "bias", "skip", "state"), "*fp32"),
    **{"starts": "*i32", "sources": "*i64", "slots": "*i64", "strides": ("i32",) * 5},
    "longest": "i32",
}


@in_compiler
def test_the_kernels_become_machine_code() -> None:
    """For GPUs of several generations."""
    from pyengine.kernels.state_space import _chunked_kernel, _recurrent_kernel

    mamba2 = {"heads": 128, "groups": 8, "state_size": 128, "head_dim": 64, "block_n": 128}
    mamba2 |= {"block_p": 32}
    mamba = {"heads": 1, "groups": 1, "state_size": 16, "head_dim": 8192, "block_n": 16}
    mamba |= {"block_p": 64, "by_channel": True}
    for capability in (80, 90, 100):
        for constants in (mamba, {**mamba2, "by_channel": False}):
            assert len(machine_code(_recurrent_kernel, KINDS, constants, capability, 4)) > 1000
        chunks = {**mamba2, "chunk": 32}
        assert len(machine_code(_chunked_kernel, KINDS, chunks, capability, 4)) > 1000
