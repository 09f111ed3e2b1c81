"""The kernel set of a device: chosen once, from the caller's settings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from pyengine.errors import ConfigurationError
from pyengine.models.adapters import AdapterLimits
from pyengine.utils.devices import Device, for_torch
from pyengine.utils.dtypes import DType, itemsize, torch_dtype
from pyengine.utils.packaging import require_torch

if TYPE_CHECKING:
    from pyengine.models.decoder.cpu_kernels import CpuKernels
    from pyengine.models.decoder.torch_kernels import TorchKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """Settings that a model's arithmetic depends on; see `EngineSettings`.

    `is_compiled`: the decoder is to be compiled by torch. `with_mtp_layers`: those for multi-token
    prediction are loaded, too. `adapters`: linear layers have tables for so many; None: no tables.
    """

    quantization: str | None = None
    linear_backend: str = "auto"
    is_compiled: bool = False
    with_mtp_layers: bool = False
    adapters: AdapterLimits | None = None

    @property
    def keeps_formats(self) -> bool:
        """True if products are of the formats of a GGUF file, where there are kernels for them."""
        return self.quantization is None and self.linear_backend == "auto"

    @property
    def quantises(self) -> bool:
        """True if weights of floats are to be rounded."""
        return self.quantization not in (None, "none")

    def min_bits(self, dtype: DType, saved: str | None) -> int:
        """The minimum bits of a weight: rounded, in rows' `dtype`, or as `saved` in bfloat16."""
        if self.quantises:
            return 4 if self.quantization == "int4" else 8
        return 16 if saved == "bfloat16" else 8 * itemsize(dtype)


def kernel_set(
    device: Device, dtype: DType, settings: KernelSettings, num_threads: int | None = None
) -> "CpuKernels | TorchKernels":
    """The kernels for a model of `dtype` on `device`.

    On the CPU `num_threads` compute, None: as many as `compute_threads` chooses.

    On CPUs they are ours, over arrays. For compiled models they are torch's with our products,
    unless torch is to multiply (`linear_backend`), and for other dtypes torch's alone.
    Raises `ConfigurationError` for a setting that the device cannot honour, or that needs torch
    where it is not installed.
    """
    quantization = str(settings.quantization) if settings.quantises else "none"
    if device.type == "cuda":
        return _cuda_set(device, dtype, settings, quantization)
    if dtype in ("float32", "bfloat16"):
        from pyengine.cpu.threads import compute_threads, kernel_threads
        from pyengine.models.decoder.cpu_kernels import CpuKernels
        from pyengine.models.decoder.product_choice import ProductChooser

        if quantization not in ("none", "int4", "int8"):
            raise ConfigurationError(
                f"quantization={quantization!r} needs a CUDA device, the device is cpu: "
                "take 'int8' or 'int4', or leave quantization out"
            )
        rounded_to = cast("Literal['none', 'int4', 'int8']", quantization)
        products = ProductChooser(settings.linear_backend, dtype)
        beside_torch = settings.is_compiled or products.may_be_torch
        threads = kernel_threads(compute_threads(num_threads).count, beside_torch=beside_torch)
        over_arrays = CpuKernels(threads, rounded_to, dtype, products)
        if not settings.is_compiled:
            return over_arrays
        require_torch("compile=True")
        if settings.linear_backend != "torch":
            from pyengine.models.decoder.compiled_kernels import CompiledCpuKernels

            return CompiledCpuKernels(for_torch(device), torch_dtype(dtype), over_arrays)
    require_torch(f"dtype={dtype!r} on the CPU")
    from pyengine.models.decoder.torch_kernels import TorchKernels

    _refuse_product(settings, dtype, device)
    if quantization != "none":
        raise ConfigurationError(
            f"quantization={quantization!r} is not for {dtype} on {device}: leave quantization out"
        )
    return TorchKernels(for_torch(device), torch_dtype(dtype))


def _cuda_set(
    device: Device, dtype: DType, settings: KernelSettings, quantization: str
) -> "TorchKernels":
    from pyengine.models.decoder.cuda_kernels import CudaKernels, check_float8

    _refuse_product(settings, dtype, device)
    own, kind = for_torch(device), torch_dtype(dtype)
    if quantization == "none":
        return CudaKernels(own, kind)
    if quantization != "fp8":
        raise ConfigurationError(
            f"quantization={quantization!r} runs on cpu, the device is {device}: take 'fp8' "
            "there, or leave quantization out"
        )
    check_float8(own)
    return CudaKernels(own, kind, "fp8")


def _refuse_product(settings: KernelSettings, dtype: DType, device: Device) -> None:
    """Raise `ConfigurationError` if a requested product is not torch's."""
    if settings.linear_backend not in ("auto", "torch"):
        raise ConfigurationError(
            f"linear_backend={settings.linear_backend!r} has no product for {dtype} on {device} "
            "here; use linear_backend='auto'"
        )


def check_rounded(ops: "CpuKernels | TorchKernels", settings: KernelSettings, name: str) -> None:
    """Raise `ConfigurationError` if "fp8" was requested, and no matrix of model `name` has it."""
    if settings.quantization != "fp8":
        return
    from pyengine.models.decoder.cuda_kernels import CudaKernels

    if isinstance(ops, CudaKernels) and not ops.rounded:
        raise ConfigurationError(
            f"quantization='fp8': {name} has no linear layer whose inputs and outputs are "
            "multiples of 16; leave quantization out"
        )
