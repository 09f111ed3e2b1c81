"""The kernel set of a device: chosen once, from what the caller asks for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from pyengine.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from pyengine.models.decoder.cpu_kernels import CpuKernels
    from pyengine.models.decoder.cpu_numbers import Dtype
    from pyengine.models.decoder.torch_kernels import TorchKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """Settings that a model's arithmetic depends on; see `EngineSettings`.

    `is_compiled`: the decoder is to be compiled by torch. `with_mtp_layers`: those for multi-token
    prediction are loaded, too.
    """

    quantization: str | None = None
    linear_backend: str = "auto"
    is_compiled: bool = False
    with_mtp_layers: bool = False

    @property
    def keeps_formats(self) -> bool:
        """True if products are of the formats of a GGUF file, where there are kernels for them."""
        return self.quantization is None and self.linear_backend == "auto"

    @property
    def quantises(self) -> bool:
        """True if weights of floats are to be rounded."""
        return self.quantization not in (None, "none")

    def least_bits(self, dtype: "torch.dtype", saved: str | None) -> int:
        """The least bits of a weight: rounded, in rows' `dtype`, or as `saved` in bfloat16."""
        if self.quantises:
            return 4 if self.quantization == "int4" else 8
        return 16 if saved == "bfloat16" else 8 * dtype.itemsize


def kernel_set(
    device: "torch.device", dtype: "torch.dtype", settings: KernelSettings
) -> "CpuKernels | TorchKernels":
    """The kernels for a model of `dtype` on `device`.

    On CPUs they are ours, over arrays. For compiled models they are torch's with our products, and
    for other dtypes torch's alone.
    Raises `ConfigurationError` for a setting that the device cannot honour.
    """
    import torch

    quantization = str(settings.quantization) if settings.quantises else "none"
    if device.type != "cpu":
        _refuse_product(settings, dtype, device)
    if device.type == "cuda":
        from pyengine.models.decoder.cuda_kernels import CudaKernels, check_float8

        if quantization == "none":
            return CudaKernels(device, dtype)
        if quantization != "fp8":
            raise ConfigurationError(
                f"quantization={quantization!r} runs on cpu, the device is {device}: take 'fp8' "
                "there, or leave quantization out"
            )
        check_float8(device)
        return CudaKernels(device, dtype, "fp8")
    names: dict[torch.dtype, Dtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    if device.type == "cpu" and dtype in names:
        from pyengine.cpu.threads import kernel_threads
        from pyengine.models.decoder.cpu_kernels import CpuKernels
        from pyengine.models.decoder.product_choice import ProductChooser

        if quantization not in ("none", "int4", "int8"):
            raise ConfigurationError(
                f"quantization={quantization!r} needs a CUDA device, the device is cpu: "
                "take 'int8' or 'int4', or leave quantization out"
            )
        rounded_to = cast("Literal['none', 'int4', 'int8']", quantization)
        products = ProductChooser(settings.linear_backend, names[dtype])
        beside_torch = settings.is_compiled or products.may_be_torch
        threads = kernel_threads(torch.get_num_threads(), beside_torch=beside_torch)
        over_arrays = CpuKernels(threads, rounded_to, names[dtype], products)
        if not settings.is_compiled:
            return over_arrays
        if settings.linear_backend != "torch":
            from pyengine.models.decoder.compiled_kernels import CompiledCpuKernels

            return CompiledCpuKernels(device, dtype, over_arrays)
    from pyengine.models.decoder.torch_kernels import TorchKernels

    _refuse_product(settings, dtype, device)
    if quantization != "none":
        raise ConfigurationError(
            f"quantization={quantization!r} is not for {dtype} on {device}: leave quantization out"
        )
    return TorchKernels(device, dtype)


def _refuse_product(settings: KernelSettings, dtype: "torch.dtype", device: "torch.device") -> None:
    """Raise `ConfigurationError` if a product is asked for that is not torch's."""
    if settings.linear_backend not in ("auto", "torch"):
        raise ConfigurationError(
            f"linear_backend={settings.linear_backend!r} has no product for {dtype} on {device} "
            "here; use linear_backend='auto'"
        )


def check_rounded(made: "CpuKernels | TorchKernels", settings: KernelSettings, name: str) -> None:
    """Raise `ConfigurationError` if "fp8" was asked for, and no matrix of model `name` has it."""
    if settings.quantization != "fp8":
        return
    from pyengine.models.decoder.cuda_kernels import CudaKernels

    if isinstance(made, CudaKernels) and not made.rounded:
        raise ConfigurationError(
            f"quantization='fp8': {name} has no linear layer whose inputs and outputs are "
            "multiples of 16; leave quantization out"
        )
