"""The Triton kernel of norms with a gate: against torch, and made for absent GPUs."""

from typing import Any, Literal

import torch

from pyengine.models.decoder.kernels import GatedNormWeights
from pyengine.models.decoder.recurrent import GatedNorm
from pyengine.models.decoder.torch_states import TorchStates
from tests.support.kernels import in_compiler, in_interpreter, machine_code
from tests.unit.kernels.states import LIMITS, in_a_wider_row


@in_interpreter
def test_norms_are_those_of_torch() -> None:
    """In the interpreter: groups of a row, gated before the norm or after it."""
    from pyengine.kernels.gated_norm import gated_norm

    torch.manual_seed(0)
    functions: tuple[Literal["silu", "sigmoid"], ...] = ("silu", "sigmoid")
    for dtype, limit in LIMITS.items():
        for groups, size in ((1, 24), (3, 40), (2, 1024)):
            rows, gate = (in_a_wider_row(torch.randn(5, groups * size).to(dtype)) for _ in range(2))
            weight = torch.randn(groups * size).to(dtype)
            for function in functions:
                for gates_first in (False, True):
                    norm = GatedNorm(
                        size=size, eps=1e-3, activation=function, gates_first=gates_first
                    )
                    has_silu = function == "silu"
                    actual = gated_norm(
                        *(rows, gate, weight, size, norm.eps),
                        has_silu=has_silu,
                        gates_first=gates_first,
                    )
                    of = GatedNormWeights(norm, weight)
                    expected = TorchStates().gated_norm(rows, gate, of)
                    assert actual.dtype == dtype and actual.is_contiguous()
                    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)
    assert not gated_norm(rows[:0], gate[:0], weight, size, 1e-6).numel()


@in_compiler
def test_the_kernel_becomes_machine_code() -> None:
    """For GPUs of several generations."""
    from pyengine.kernels.gated_norm import _kernel

    kinds: dict[str, Any] = dict.fromkeys(("rows", "gate", "weight", "out"), "*bf16")
    kinds |= {"row_stride": "i32", "gate_stride": "i32", "eps": "fp32"}
    for capability in (80, 90, 100):
        for groups, size, has_silu in ((1, 128, True), (8, 512, False)):
            constants = {"groups": groups, "size": size, "has_silu": has_silu, "block": size}
            constants["gates_first"] = not has_silu
            assert len(machine_code(_kernel, kinds, constants, capability, 1)) > 1000
