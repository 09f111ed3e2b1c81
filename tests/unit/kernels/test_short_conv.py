"""The Triton kernel of short convolutions: against torch, and made for absent GPUs."""

from typing import Any

import torch

from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.kernels import ConvWeights
from pyengine.models.decoder.recurrent import Convolution
from pyengine.models.decoder.torch_states import TorchStates
from tests.support.kernels import in_compiler, in_interpreter, machine_code
from tests.unit.kernels.states import STEPS, check_beside, compare, in_a_wider_row, num_tokens


@in_interpreter
def test_convolutions_are_those_of_torch() -> None:
    """In the interpreter: sequences continue from their states, and leave theirs."""
    from pyengine.kernels.short_conv import short_conv

    torch.manual_seed(0)
    for step in STEPS:
        for dtype, channels, size, silu, has_bias, has_gates in (
            (torch.float32, 24, 4, "silu", True, False),
            (torch.float16, 300, 2, None, False, True),
            (torch.bfloat16, 70, 5, "silu", False, True),
        ):
            conv = Convolution(channels=channels, size=size, activation=silu)
            bias = torch.randn(channels) if has_bias else None
            weights = ConvWeights(conv, torch.randn(channels, size), bias)
            count = 3 if has_gates else 1
            shape = (num_tokens(step), channels)
            rows = tuple(in_a_wider_row(torch.randn(shape).to(dtype)) for _ in range(count))

            def compute(parts: Any, state: torch.Tensor, own: Any, of: Any = weights) -> Any:
                has_silu = of.conv.activation == "silu"
                arrays = (parts[0], of.weight, of.bias, state, own)
                return short_conv(*arrays, has_silu=has_silu, gates=parts[1:] or None)

            def oracle(
                parts: Any, state: LayerState, own: StateInputs, of: Any = weights
            ) -> torch.Tensor:
                return TorchStates().short_conv(parts[0], of, state, own, parts[1:] or None)

            compare(step, rows, (size - 1, channels), compute, oracle)


@in_interpreter
def test_sequences_have_the_same_bits_beside_others() -> None:
    """In the interpreter: prompts and decodes, whose tiles differ."""
    from pyengine.kernels import short_conv

    torch.manual_seed(0)
    rows = (torch.randn(num_tokens("mixed"), 70).half(),)
    weight, bias = torch.randn(70, 4), torch.randn(70)

    def compute(parts: Any, state: torch.Tensor, own: Any) -> torch.Tensor:
        return short_conv.short_conv(parts[0], weight, bias, state, own, has_silu=True)

    check_beside(rows, (3, 70), compute, short_conv, ["_kernel"])


@in_compiler
def test_the_kernel_becomes_machine_code() -> None:
    """For GPUs of several generations."""
    from pyengine.kernels.short_conv import _kernel

    kinds: dict[str, Any] = {
        **dict.fromkeys(("rows", "out", "input_gate", "output_gate"), "*bf16"),
        **dict.fromkeys(("weight", "bias", "state"), "*fp32"),
        **{"starts": "*i32", "sources": "*i64", "slots": "*i64"},
        **dict.fromkeys(("row_stride", "input_stride", "output_stride"), "i32"),
    }
    for capability in (80, 90, 100):
        for block_t, block_c in ((1, 256), (64, 64)):
            constants: dict[str, Any] = {"channels": 8192, "size": 4, "has_silu": True}
            constants |= {"block_taps": 4, "block_t": block_t, "block_c": block_c}
            assert len(machine_code(_kernel, kinds, constants, capability, 4)) > 1000
