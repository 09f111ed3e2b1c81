"""The setting `quantization`: float weights that become integers while a model is loaded."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pyengine.errors import ConfigurationError
from pyengine.models.integer_linear import quantise_linears
from pyengine.models.loader import LoadedModel


def with_quantization(loaded: LoadedModel, quantization: str | None) -> LoadedModel:
    """The same model with the linear layers that the setting asks for; "none" changes nothing.

    Raises `ConfigurationError`, without changes, for a device other than the CPU, for a model with
    weights outside plain linear layers, and for one that is quantised already.
    """
    if quantization in (None, "none"):
        return loaded
    if loaded.quantization != "none":
        raise ConfigurationError(
            f"quantization={quantization!r}: the weights of {loaded.name} are quantised already "
            f"({loaded.quantization}); leave quantization out"
        )
    quantise_model(loaded.model, loaded.device, str(quantization))
    return replace(loaded, quantization=str(quantization), has_float_linears=False)


def quantise_model(model: Any, device: torch.device, quantization: str) -> int:
    """Replace every linear layer of `model`; returns how many. Raises as `with_quantization`."""
    if device.type != "cpu":
        raise ConfigurationError(
            f"quantization={quantization!r} runs on cpu, the device is {device}: leave "
            "quantization out"
        )
    for name, module in _matrices(model):
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
            raise ConfigurationError(
                f"quantization={quantization!r}: {type(model).__name__} cannot take it: its "
                f"weights {name} are those of a {type(module).__name__}, and only plain linear "
                "layers are quantised; leave quantization out"
            )
    return quantise_linears(model, quantization)


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every weight of two dimensions or more: its name and its module."""
    for name, module in model.named_modules():
        for own, weight in module.named_parameters(prefix=name, recurse=False):
            if weight.ndim > 1:
                yield own, module
