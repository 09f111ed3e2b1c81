"""The kernel set of a device: chosen once, from what the caller asks for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from pyengine.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from pyengine.models.decoder.cpu_kernels import CpuKernels
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
    def quantises(self) -> bool:
        """True if weights of floats are to be rounded."""
        return self.quantization not in (None, "none")


def kernel_set(
    device: "torch.device", dtype: "torch.dtype", settings: KernelSettings
) -> "CpuKernels | TorchKernels":
    """The kernels for a model of `dtype` on `device`.

    On CPUs they are ours, over arrays; for compiled models and for float16 they are torch's.
    Raises `ConfigurationError` for a setting that the device cannot honour.
    """
    import torch

    quantization = settings.quantization if settings.quantises else None
    if device.type == "cpu" and dtype == torch.float32 and not settings.is_compiled:
        from pyengine.models.cpu_kernels import kernel_threads
        from pyengine.models.decoder.cpu_kernels import CpuKernels

        if quantization not in (None, "int4", "int8"):
            raise ConfigurationError(
                f"quantization={quantization!r} needs a CUDA device, the device is cpu: "
                "take 'int8' or 'int4', or leave quantization out"
            )
        rounded_to = cast("Literal['none', 'int4', 'int8']", quantization or "none")
        return CpuKernels(kernel_threads(torch.get_num_threads()), rounded_to)
    from pyengine.models.decoder.torch_kernels import TorchKernels

    if quantization is not None:
        raise ConfigurationError(
            f"quantization={quantization!r} is not for {dtype} on {device}: leave quantization out"
        )
    return TorchKernels(device, dtype)
