"""Products of compiled decoders on CPUs: operators over the Rust kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyengine.cpu import CpuAttention, PackedWeight
from pyengine.cpu.threads import kernel_threads
from pyengine.models.decoder.compiled_kernels import CompiledCpuKernels, OpaqueProduct
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.cpu_products import CpuProduct
from pyengine.models.decoder.kernel_sets import KernelSettings, kernel_set
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.tiny_models import MODELS, Tiny

Saved = Callable[[Tiny], tuple[Path, Any]]
pytestmark = pytest.mark.skipif(not CpuAttention.is_fast(), reason="no AVX2 with FMA")
COMPILED = KernelSettings(is_compiled=True)


def logits(folder: Path, kernels: Any, prompt: list[int]) -> torch.Tensor:
    runner = Runner(open_model(folder).decoder(kernels))
    sequence = runner.add(prompt)
    runner.step((sequence, 20))
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2"])
def test_logits_are_those_of_torch(name: str, saved: Saved, prompts: list[list[int]]) -> None:
    folder, _ = saved(next(tiny for tiny in MODELS if tiny.name == name))
    kernels = CompiledCpuKernels(CPU, torch.float32, CpuKernels(kernel_threads(1)))
    actual = logits(folder, kernels, prompts[0])
    expected = logits(folder, TorchKernels(CPU, torch.float32), prompts[0])
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


def test_a_graph_holds_the_product_as_one_operator() -> None:
    torch.manual_seed(0)
    packed = PackedWeight(torch.randn(5, 8).numpy())
    product = OpaqueProduct(CpuProduct(CpuAttention(1), packed), 5)
    seen: list[Any] = []

    def record(graph: Any, _inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(product.multiply, backend=record)
    rows = torch.randn(3, 8)
    assert torch.equal(compiled(rows), product.multiply(rows))
    assert torch.ops.pyengine.packed_linear in [
        getattr(operator, "_overloadpacket", operator) for operator in seen
    ]


def test_settings_choose_it_where_the_kernel_multiplies_the_format() -> None:
    assert isinstance(kernel_set(CPU, "float32", COMPILED), CompiledCpuKernels)
    plain = [
        kernel_set(CPU, "float16", COMPILED),
        kernel_set(CPU, "float32", KernelSettings(is_compiled=True, linear_backend="torch")),
    ]
    assert [type(kernels) for kernels in plain] == [TorchKernels] * 2


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("llama", KernelSettings(), False),
        ("llama", COMPILED, False),
        ("llama", KernelSettings(linear_backend="torch"), True),
        ("llama", KernelSettings(linear_backend="torch", is_compiled=True), True),
        ("mixtral", KernelSettings(), False),
        ("mixtral", COMPILED, True),  # routers and experts
    ],
)
def test_a_set_says_if_torch_multiplies(
    name: str, settings: KernelSettings, expected: bool, saved: Saved
) -> None:
    """Then the bits depend on the number of threads, which must not change during a request."""
    folder, _ = saved(next(tiny for tiny in MODELS if tiny.name == name))
    kernels = kernel_set(CPU, "float32", settings)
    open_model(folder).decoder(kernels)
    assert kernels.has_torch_products is expected
