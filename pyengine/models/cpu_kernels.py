"""Products of linear layers and norms on the CPU, by oneDNN and by the Rust kernels.

A product holds one weight, laid out once, with its bias. It also computes what follows while that
is in the processor's cache: the activation of a gate, and the gate times what it lets through.
"""

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from typing import Any, Literal
from weakref import ref

import numpy.typing as npt
import torch
from torch import nn

from pyengine.cpu import CpuAttention, PackedWeight
from pyengine.utils.host_copy import cpu_array
from pyengine.utils.openmp import openmp_runtime

Product = Literal["torch", "onednn", "onednn-unpacked", "pyengine"]
"""`torch.nn.functional.linear`; oneDNN with weights in its layout, which is a copy; oneDNN with
weights as they are; the Rust kernel, with a copy in its layout."""

Activation = Literal["silu", "gelu_tanh"]
"""The function of a gate; the second is the GELU by its formula with tanh, as in Gemma."""

FORMATS = (torch.float32, torch.bfloat16)
"""Of weights that oneDNN and the Rust kernel multiply by, and of norms that the latter computes."""

_PACKED_FOR = 32  # rows for which oneDNN lays weights out
_REUSED = 64 << 20  # bytes of results that are kept: 64 rows of 262,144 logits in float32


class OneDNNProduct:
    """Products by oneDNN with `weight`, a copy in oneDNN's layout or the weight as it is."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_packed: bool = True
    ) -> None:
        operators: Any = torch.ops.mkldnn
        self._multiply = operators._linear_pointwise.default
        self._multiply_by = operators._linear_pointwise.binary
        self.weight = weight
        if is_packed:
            with torch.no_grad():
                self.weight = operators._reorder_linear_weight(weight, _PACKED_FOR)
        self._bias = bias

    def multiply(self, rows: torch.Tensor, after: tuple[str, str] = ("none", "")) -> torch.Tensor:
        """`rows` times the transposed weight; `after`: an operator and algorithm of oneDNN."""
        operator, algorithm = after
        product: torch.Tensor = self._multiply(
            rows, self.weight, self._bias, operator, [], algorithm
        )
        return product

    def multiply_gated(
        self, rows: torch.Tensor, gate: "OneDNNProduct", activation: Activation = "silu"
    ) -> torch.Tensor:
        """`activation(gate(rows)) * self(rows)`."""
        gates = gate.multiply(rows, ("swish", "") if activation == "silu" else ("gelu", "tanh"))
        product: torch.Tensor = self._multiply_by(rows, gates, self.weight, self._bias, "mul")
        return product


class KernelProduct:
    """Products by the Rust kernel, with a copy of `weight` in its layout, float32 or bfloat16.

    A row has the same bits in every batch. Sums are float32.
    """

    results: "ReusedMemory | None" = None
    """Where the results of `multiply` are; None: in new memory."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed: Any = PackedWeight(cpu_array(weight.detach().contiguous()))
        self._bias = None if bias is None else cpu_array(bias.detach().contiguous())
        self._threads = kernel_threads(torch.get_num_threads())
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    @property
    def takes_rows(self) -> bool:
        """True if `write` takes rows as `multiply` does."""
        return True

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` times the transposed weight."""
        flat, out = self._arrays(rows)
        self.write(cpu_array(flat), cpu_array(out))
        return out.view(*rows.shape[:-1], out.shape[1])

    def write(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """The same from `rows` `[T, in_features]` into `out` `[T, out_features]`."""
        self._packed.multiply(self._threads, rows, out, self._bias)

    def can_gate(self, gate: object) -> bool:
        """True if `write_gated` takes this gate."""
        return type(gate) is type(self) and self._bias is None and gate._bias is None

    def multiply_gated(
        self, rows: torch.Tensor, gate: "KernelProduct", activation: Activation = "silu"
    ) -> torch.Tensor:
        """`activation(gate(rows)) * self(rows)`."""
        if not self.can_gate(gate):
            return activated(gate.multiply(rows), activation) * self.multiply(rows)
        flat, out = self._arrays(rows)
        self.write_gated(cpu_array(flat), gate, cpu_array(out), activation)
        return out.view(*rows.shape[:-1], out.shape[1])

    def write_gated(
        self,
        rows: npt.NDArray[Any],
        gate: "KernelProduct",
        out: npt.NDArray[Any],
        activation: Activation,
    ) -> None:
        """`multiply_gated` from `rows` into `out` `[T, out_features]`, for a gate of `can_gate`."""
        self._packed.multiply_gated(self._threads, rows, gate._packed, out, activation)

    def gather(self, outputs: torch.Tensor) -> torch.Tensor:
        """The rows of the weight with these numbers: `[...]` to `[..., in_features]`."""
        flat = outputs.reshape(-1).to(torch.int64).contiguous()
        out = torch.empty(flat.shape[0], self.weight.shape[1], dtype=self.weight.dtype)
        self._packed.gather(cpu_array(flat), cpu_array(out))
        return out.view(*outputs.shape, out.shape[1])

    def _arrays(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[T, in_features]`, and memory for their products."""
        out_features, in_features = self.weight.shape
        flat = rows.detach().reshape(-1, in_features).contiguous()
        shape = flat.shape[0], out_features
        if self.results is None:
            return flat, flat.new_empty(shape)
        return flat, self.results.empty(shape, flat.dtype)


class ReusedMemory:
    """Memory of large results, used again once no tensor holds the last one.

    glibc places smaller tensors in the memory of freed logits. Then those of the next step, or of
    another number of rows, no longer fit there, and its heaps grow. Pages are allocated when they
    are first written, so this takes the memory of the largest batch so far.
    """

    def __init__(self) -> None:
        self._memory: npt.NDArray[Any] | None = None
        self._last: Callable[[], object] = lambda: None

    def empty(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if num_bytes > _REUSED:
            return torch.empty(shape, dtype=dtype)
        if self._memory is None or self._last() is not None:
            self._memory = torch.empty(_REUSED, dtype=torch.uint8).numpy()
        used = self._memory[:num_bytes]
        self._last = ref(used)  # tensors over it hold it
        return torch.from_numpy(used).view(dtype).view(shape)


def reuse_logits(model: Any) -> None:
    """Let the head of `model` write all logits into the same memory, if a Rust kernel multiplies.

    Logits of the last step that are still in use keep theirs.
    """
    product = getattr(model.get_output_embeddings(), "product", None)
    if isinstance(product, KernelProduct):
        product.results = ReusedMemory()


class Float8Product(KernelProduct):
    """The same with a weight in 8 bits, `bytes` of E4M3 `[N, K]`, which stays so.

    Each `block` inputs of an output have one of `scales` `[N, blocks]`. `dtype` is that of rows and
    results. Raises `ValueError` for weights and scales that are not finite.
    """

    def __init__(
        self,
        bytes: torch.Tensor,
        scales: torch.Tensor,
        block: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._packed = PackedWeight.from_float8(
            cpu_array(bytes.contiguous()), cpu_array(scales.contiguous()), block
        )
        self._bias = None if bias is None else cpu_array(bias.detach().to(dtype).contiguous())
        self._threads = kernel_threads(torch.get_num_threads())
        self.weight = torch.empty(bytes.shape, dtype=dtype, device="meta")


def activated(gates: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of each gate, by torch."""
    if activation == "silu":
        return torch.nn.functional.silu(gates)
    return torch.nn.functional.gelu(gates, approximate="tanh")


def available_products(dtype: torch.dtype) -> list[Product]:
    """The products that this CPU has for weights of this format."""
    products: list[Product] = ["torch"]
    if onednn_supports(dtype):
        products += ["onednn", "onednn-unpacked"]
    if kernel_supports(dtype):
        products += ["pyengine"]
    return products


def prepared_product(weight: torch.Tensor, bias: torch.Tensor | None, product: Product) -> Any:
    """The product of this name, which is not torch's, for a layer's weight and bias."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if product == "pyengine":
        return KernelProduct(weight, bias)
    return OneDNNProduct(weight, bias, is_packed=product == "onednn")


@cache
def kernel_threads(num_threads: int) -> CpuAttention:
    """Threads of torch's pool: as many, or fewer where torch has been told so since."""
    return CpuAttention(num_threads, openmp_runtime())


def kernel_supports(dtype: torch.dtype) -> bool:
    """True if the Rust kernel multiplies this format here, and has instructions to be fast."""
    return dtype in FORMATS and CpuAttention.is_fast()


def kernel_is_default(dtype: torch.dtype) -> bool:
    """True if `linear_backend="auto"` is the Rust kernel for this format.

    The kernel has no tiles of AMX: where bfloat16 is multiplied by those, oneDNN's prefills are
    faster.
    """
    return kernel_supports(dtype) and not (dtype == torch.bfloat16 and CpuAttention.isa() == "amx")


@cache
def onednn_supports(dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies this format here with weights in its layout."""
    backend: Any = torch.backends.mkldnn
    if dtype not in FORMATS or not backend.is_available():
        return False
    try:
        with torch.inference_mode():
            product = OneDNNProduct(torch.zeros(16, 16, dtype=dtype))
            product.multiply(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


class FusedRMSNorm(nn.Module):
    """Computes `norm`, a `LlamaRMSNorm`, `Gemma3RMSNorm` or equal, up to the rounding of a sum.

    `offset` is added to the weight: 1 for Gemma's, whose weights are differences from 1 and which
    multiplies in float32.

    transformers' eight operators each write all rows to memory; the Rust kernel makes one pass.
    Compiled graphs keep their own fused norm.
    """

    def __init__(self, norm: Any, threads: CpuAttention, offset: float = 0.0) -> None:
        super().__init__()
        self.plain = norm
        weight = norm.weight.detach()
        self._weight = cpu_array(weight.float() + offset if offset else weight)
        self._epsilon = float(getattr(norm, "variance_epsilon", None) or norm.eps)
        self._threads = threads

    @property
    def weight(self) -> Any:
        """The weight of the replaced norm, for other code that computes it."""
        return self.plain.weight

    @property
    def variance_epsilon(self) -> float:
        """The epsilon of the replaced norm."""
        return self._epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., size]`."""
        if torch.compiler.is_compiling() or hidden_states.dtype != self.plain.weight.dtype:
            plain: torch.Tensor = self.plain(hidden_states)
            return plain
        rows = hidden_states.detach().reshape(-1, hidden_states.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        self.write(cpu_array(rows), cpu_array(out))
        return out.view(hidden_states.shape)

    def write(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Normalise `rows` `[T, size]` into `out`; both have the dtype of the norm's weight."""
        self._threads.rms_norm(rows, self._weight, out, self._epsilon)


def fuse_norms(model: nn.Module) -> int:
    """Replace every standard RMSNorm of `model`; returns their number.

    That is 0 if the processor lacks the instructions, and on other devices.
    """
    if not CpuAttention.is_fast():
        return 0
    threads = kernel_threads(torch.get_num_threads())
    num_fused = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            offset = None if isinstance(parent, FusedRMSNorm) else _offset_of(child)
            if offset is not None:
                setattr(parent, name, FusedRMSNorm(child, threads, offset))
                num_fused += 1
    return num_fused


def _offset_of(module: Any) -> float | None:
    """The `offset` of a `FusedRMSNorm` in the place of `module`; None for other modules."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.device.type != "cpu":
        return None
    if weight.dtype not in FORMATS:
        return None
    instructions = instructions_of(type(module))
    if instructions == instructions_of(LlamaRMSNorm):
        return 0.0
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm  # most need no other

    return 1.0 if instructions == instructions_of(Gemma3RMSNorm) else None


def instructions_of(kind: type[nn.Module]) -> tuple[object, ...]:
    """The code of a module's `forward`: most families copy the modules of Llama."""
    code: Any = getattr(unwrap(kind.forward), "__code__", None)
    return (code.co_code, code.co_names, code.co_consts) if code else (kind,)
