"""Random weights in place of a checkpoint's (`load_format="dummy"`): a shape without its weights.

transformers initialises the model, as one that is to be trained: norms are ones, biases zeros, and
matrices have the standard deviation of the configuration (`initializer_range`). Activations are
then of ordinary size in every layer.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.kv_cache.memory import available_memory
from pyengine.models.checkpoint_files import TensorHeader, readable_size
from pyengine.models.config import DRAWN, empty_model, read_config

_SEED = 0
_CHUNK = 1 << 15
"""Elements that are drawn at a time on the CPU, in float32: torch copies so many in one thread."""


def dummy_config(folder: Path) -> Any:
    """The transformers configuration in `folder`, which needs no weights.

    Raises `ModelLoadError` as `read_config` does, and for quantised weights.
    """
    config = read_config(folder, DRAWN)
    packed = getattr(config, "quantization_config", None)
    if packed is not None:
        raise ModelLoadError(
            f"{folder / 'config.json'} has a quantization_config ({packed.get('quant_method')}), "
            "and load_format='dummy' draws floating-point weights: give a folder with a copy of "
            "config.json without this entry; the setting quantization then quantises the weights"
        )
    return config


def dummy_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of `config` with random weights, made on `device` and ready to run.

    The weights depend on nothing but the configuration, `dtype` and the kind of device; torch's
    own random state is neither read nor changed. Raises `ConfigurationError` if they do not fit
    into the memory of the device.
    """
    config.dtype = dtype
    model = empty_model(config)
    _check_memory(model, dtype, device)
    tied = model.all_tied_weights_keys
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in tied:
            parameter._is_hf_initialized = True  # it becomes another parameter
            continue
        values = _zeros(model, name, parameter, dtype, device)
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, nn.Parameter(values, requires_grad=False))
    passing = {name for name, _ in model.named_non_persistent_buffers()}
    for name, buffer in list(model.named_buffers()):
        if name in passing:
            values = torch.zeros_like(buffer, device=device)
        else:
            values = _zeros(model, name, buffer, dtype, device)
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        module.register_buffer(own, values, persistent=name not in passing)
    with _Seeded():
        model.initialize_weights()
    model.tie_weights()
    return model.eval()


def _zeros(
    model: Any, name: str, empty: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros for a tensor of the model's files, in float32 if transformers keeps it so."""
    in_float32 = "|".join(model._get_dtype_plan(dtype)).replace("*", ".*")
    is_kept = empty.is_floating_point() and in_float32 and re.search(in_float32, name)
    return torch.zeros(empty.shape, dtype=torch.float32 if is_kept else empty.dtype, device=device)


def dummy_headers(folder: Path) -> dict[str, TensorHeader]:
    """The names and shapes of the weights that are drawn for `folder`; tied ones count once."""
    model = empty_model(dummy_config(folder))
    return {
        name: TensorHeader("BF16", tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if name not in model.all_tied_weights_keys
    }


def _check_memory(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    tied = model.all_tied_weights_keys
    count = sum(item.numel() for name, item in model.named_parameters() if name not in tied)
    needed, available = count * dtype.itemsize, available_memory(device)
    if needed > available:
        raise ConfigurationError(
            f"load_format='dummy': the {count} weights take {readable_size(needed)} in {dtype}, "
            f"and {readable_size(available)} are available on {device}: take a smaller model or "
            "dtype"
        )


class _Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, random numbers of this thread come from generators with a fixed seed.

    On the CPU, normal numbers of 16 bits are drawn in float32: torch before 2.15 draws them slowly,
    and from few values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, with our generator if it takes one and has none."""
        kwargs = dict(kwargs or {})
        takes_one = any(argument.name == "generator" for argument in func._schema.arguments)
        if not takes_one or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        kwargs["generator"] = self._generator(args[0].device)
        is_short = args[0].device.type == "cpu" and args[0].dtype.itemsize == 2
        if func is torch.ops.aten.normal_.default and is_short and args[0].is_contiguous():
            return _draw_in_chunks(*args, **kwargs)
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(_SEED)
        return self._generators[device]


def _draw_in_chunks(
    tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator
) -> torch.Tensor:
    """Fill `tensor` with normal numbers, which are drawn in float32 and rounded."""
    flat = tensor.view(-1)
    drawn = torch.empty(min(_CHUNK, len(flat)), dtype=torch.float32, device="cpu")
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        part.copy_(drawn[: len(part)].normal_(mean, std, generator=generator))
    return tensor
