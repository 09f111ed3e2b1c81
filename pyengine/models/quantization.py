"""The setting `quantization`: float weights that become smaller while a model is loaded."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pyengine.errors import ConfigurationError
from pyengine.models import float8_linear
from pyengine.models.float8_linear import quantise_linears_to_fp8, unquantised
from pyengine.models.grouped_experts import experts_of
from pyengine.models.integer_linear import quantise_linears
from pyengine.models.loader import LoadedModel


def with_quantization(loaded: LoadedModel, quantization: str | None) -> LoadedModel:
    """The same model with the linear layers that the setting asks for; "none" changes nothing.

    Raises `ConfigurationError`, without changes, for a device that does not multiply such weights,
    for a model with weights outside plain linear layers, and for one that is quantised already.
    """
    if quantization in (None, "none"):
        return loaded
    if loaded.quantization != "none":
        raise ConfigurationError(
            f"quantization={quantization!r}: the weights of {loaded.name} are quantised already "
            f"({loaded.quantization}); leave quantization out"
        )
    quantise_model(loaded.model, loaded.device, str(quantization))
    has_float_linears = quantization == "fp8"  # the head
    return replace(loaded, quantization=str(quantization), has_float_linears=has_float_linears)


def quantise_model(model: Any, device: torch.device, quantization: str) -> int:
    """Replace every linear layer of `model`; returns how many. Raises as `with_quantization`."""
    _check_device(device, quantization)
    others = {*experts_of(model), *unquantised(model)} if quantization == "fp8" else set()
    for name, module in _matrices(model):
        is_known = type(module) is nn.Linear or isinstance(module, nn.Embedding)
        if not is_known and module not in others:
            raise ConfigurationError(
                f"quantization={quantization!r}: {type(model).__name__} cannot take it: its "
                f"weights {name} are those of a {type(module).__name__}, and only plain linear "
                "layers are quantised; leave quantization out"
            )
    if quantization == "fp8":
        return quantise_linears_to_fp8(model)
    return quantise_linears(model, quantization)


def _check_device(device: torch.device, quantization: str) -> None:
    """Raise `ConfigurationError` for a device that does not multiply such weights."""
    if quantization != "fp8":
        if device.type != "cpu":
            raise ConfigurationError(
                f"quantization={quantization!r} runs on cpu, the device is {device}: take 'fp8' "
                "there, or leave quantization out"
            )
        return
    major, minor = float8_linear.OLDEST
    needs = f"quantization='fp8' needs a CUDA device of compute capability {major}.{minor} or later"
    if device.type != "cuda":
        raise ConfigurationError(
            f"{needs}, the device is {device}: take 'int8' or 'int4' on the CPU, or leave "
            "quantization out"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < float8_linear.OLDEST:
        found = ".".join(map(str, capability))
        raise ConfigurationError(f"{needs}, {device} has {found}: leave quantization out")


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every weight of two dimensions or more: its name and its module."""
    for name, module in model.named_modules():
        for own, weight in module.named_parameters(prefix=name, recurse=False):
            if weight.ndim > 1:
                yield own, module
