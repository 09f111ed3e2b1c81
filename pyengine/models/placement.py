"""Where a model runs and in which number format."""

from typing import Any

import torch

from pyengine.core.errors import ConfigurationError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:1".

    "auto" is the first CUDA device where there is one, else the CPU. Raises
    `ConfigurationError` for a device that torch does not know or does not see.
    """
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(
            f"device={device!r} is not known: use 'auto', 'cpu', 'cuda' or 'cuda:0'"
        ) from error
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = resolved.index or 0
        if index >= count:
            raise ConfigurationError(
                f"device={str(device)!r}: torch {torch.__version__} sees {count} CUDA devices; "
                "use device='cpu' or one that is there"
            )
        return torch.device("cuda", index)
    if resolved.type != "cpu":
        raise ConfigurationError(
            f"device={str(device)!r} is not supported: use 'auto', 'cpu' or 'cuda'"
        )
    return torch.device("cpu")


def resolve_first_device(device: str | torch.device, size: int) -> torch.device:
    """The device of the first of `size` processes that divide a model; the others take the next.

    On CUDA these are the devices 0 to `size - 1`. Raises `ConfigurationError` where there are
    fewer, for another first device, and for the CPU of a machine that has CUDA devices:
    transformers divides a model over those wherever torch sees them.
    """
    if size < 1:
        raise ConfigurationError(f"tensor_parallel_size={size}: it must be at least 1")
    first = resolve_device(device)
    if size == 1:
        return first
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = f"tensor_parallel_size={size}, device={str(device)!r}"
    if first.type == "cpu" and count:
        raise ConfigurationError(
            f"{asked}: transformers divides a model over the {count} CUDA devices that torch sees; "
            "start Python with CUDA_VISIBLE_DEVICES= (empty) to divide it over CPU processes"
        )
    if first.type == "cuda" and first.index:
        raise ConfigurationError(
            f"{asked}: the processes take the devices from cuda:0 on; say device='cuda', and "
            "choose devices with CUDA_VISIBLE_DEVICES"
        )
    if first.type == "cuda" and size > count:
        raise ConfigurationError(
            f"{asked}: torch sees {count} CUDA devices and each process takes one; "
            f"use tensor_parallel_size={count} or less"
        )
    return first


def resolve_dtype(dtype: str | torch.dtype, config: Any, device: torch.device) -> torch.dtype:
    """The number format for "auto", "float32", "bfloat16", "float16" or a torch dtype.

    "auto" is float32 on the CPU; on CUDA the one that the model was saved in, with bfloat16 in
    place of float32 or where the model does not say.
    """
    if dtype == "auto":
        saved = getattr(config.get_text_config(), "dtype", None)
        if device.type == "cpu":
            return torch.float32
        return saved if saved in (torch.bfloat16, torch.float16) else torch.bfloat16
    resolved = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved is None or resolved not in _DTYPES.values():
        raise ConfigurationError(f"dtype={dtype!r} is not known: use 'auto', {', '.join(_DTYPES)}")
    return resolved
