"""The Triton kernel of gated activations against torch, without a GPU."""

from typing import Any

import torch

from pyengine.models.decoder.spec import MLP, ClampedGate
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.support.kernels import in_compiler, in_interpreter, machine_code

ACTIVATIONS: tuple[Any, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
CLAMPED = ClampedGate(alpha=1.7, limit=2.0)


@in_interpreter
def test_gates_are_those_of_torch() -> None:
    """In the interpreter: what torch gives in float64, rounded; NaN stays NaN."""
    from pyengine.kernels.gate import Gate, gated

    torch.manual_seed(0)
    torches = TorchKernels(torch.device("cpu"), torch.float64)
    gates = {name: Gate(name) for name in ACTIVATIONS}
    gates[CLAMPED] = Gate("clamped", CLAMPED.alpha, CLAMPED.limit)
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 2.0**-10)):
        for count, size in ((3, 24), (1, 1100), (0, 8)):
            rows = (3 * torch.randn(count, 4 * size)).to(dtype)[:, : 2 * size]
            for activation, gate in gates.items():
                actual = gated(rows, gate)
                exact = torches.activated(rows.double(), MLP(size=size, activation=activation))
                assert actual.shape == (count, size) and actual.dtype == dtype
                torch.testing.assert_close(actual.double(), exact, rtol=limit, atol=limit)
    rows = torch.full((1, 16), torch.nan)
    assert all(gated(rows, gate).isnan().all() for gate in gates.values())


@in_compiler
def test_the_kernel_becomes_machine_code() -> None:
    """Every activation, for GPUs of several generations."""
    from pyengine.kernels.gate import _kernel

    kinds = {"rows": "*bf16", "out": "*bf16", "row_stride": "i32"}
    for capability in (80, 90, 100):
        for activation in (*ACTIVATIONS, "clamped"):
            constants = {"size": 3072, "activation": activation, "alpha": 1.7, "limit": 7.0}
            constants["block"] = 1024
            assert len(machine_code(_kernel, kinds, constants, capability, 4)) > 1000
