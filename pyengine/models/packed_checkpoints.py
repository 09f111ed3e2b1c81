"""Checkpoints with quantised weights that the kernels multiply by as they are.

`models/packed_groups.py` has the layouts of 4 bits, `models/packed_bytes.py` those of 8.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import WeightHeaders
from pyengine.models.config import empty_model, initialise_buffers
from pyengine.models.packed_bytes import float8_layout, fp8_layout, int8_layout
from pyengine.models.packed_groups import awq_layout, gptq_layout, w4a16_layout
from pyengine.models.packed_layout import PackedLayout, Shape

_log = logging.getLogger(__name__)

_FORMATS = {
    "pack-quantized": w4a16_layout,
    "int-quantized": int8_layout,
    "float-quantized": float8_layout,
}
"""Formats of compressed-tensors."""

_QUANTISED = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2")
"""Formats of numbers that are nothing without a scale."""


def packed_layout(settings: Mapping[str, Any]) -> PackedLayout | str:
    """The layout that a `quantization_config` names, or why the kernels do not multiply by it."""
    method = settings.get("quant_method")
    known = {"awq": awq_layout, "gptq": gptq_layout, "fp8": fp8_layout}
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    return known[method](settings) if method in known else f"quant_method={method!r}"


def _compressed_tensors(settings: Mapping[str, Any]) -> PackedLayout | str:
    groups, kind = list((settings.get("config_groups") or {}).values()), settings.get("format")
    if kind not in _FORMATS or len(groups) != 1:
        return f"compressed-tensors with format={kind!r} and {len(groups)} config_groups"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "compressed-tensors with a sparsity_config"
    return _FORMATS[kind](groups[0])


def load_packed(
    folder: Path, headers: WeightHeaders, config: Any, layout: PackedLayout, dtype: torch.dtype
) -> Any:
    """The model of `config` with the weights of the folder, ready to run; rows are of `dtype`.

    Raises `ModelLoadError` for tensors that are missing or of other shapes, before one is read.
    """
    config.dtype = dtype
    model = empty_model(config)
    model.tie_weights()
    initialise_buffers(model)
    linears: dict[nn.Module, str] = {
        module: name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and f"{name}.{layout.key_name}" in headers.tensors
    }
    floats = _check_tensors(folder, headers, model, layout, linears)
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt"))
            for path in sorted(folder.glob("*.safetensors"))
        ]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name in floats:
            owner, _, own = name.rpartition(".")
            value = places[name].get_tensor(name).to(dtype)
            setattr(model.get_submodule(owner), own, nn.Parameter(value, requires_grad=False))
        model.tie_weights()

        def read(layer: nn.Module) -> Callable[[str], torch.Tensor]:
            def read_own(own: str) -> torch.Tensor:
                name = f"{linears[layer]}.{own}"
                tensor: torch.Tensor = places[name].get_tensor(name)
                return tensor

            return read_own

        layout.replace(model, linears, read, dtype)
    return model.eval()


def _check_tensors(
    folder: Path,
    headers: WeightHeaders,
    model: Any,
    layout: PackedLayout,
    linears: Mapping[nn.Module, str],
) -> list[str]:
    """Raise unless the tensors are those of the model; returns the names of those with floats."""
    expected: dict[str, tuple[Shape, ...]] = {}
    for module, name in linears.items():
        linear: Any = module
        outputs, inputs = linear.out_features, linear.in_features
        if why := layout.unfit(outputs, inputs):
            raise ModelLoadError(
                f"{folder}: {name} has {inputs} inputs and {outputs} outputs, which are {why}"
            )
        shapes = layout.shapes(outputs, inputs)
        expected |= {f"{name}.{own}": possible for own, possible in shapes.items()}
    packed = {f"{name}.weight" for name in linears.values()}
    floats = {name: item for name, item in model.named_parameters() if name not in packed}
    expected |= {name: (tuple(item.shape),) for name, item in floats.items()}
    if missing := sorted(expected.keys() - headers.tensors.keys()):
        raise ModelLoadError(
            f"the weights in {folder} lack {missing[0]} ({len(missing)} tensors are missing), "
            f"which config.json asks for in {layout.name}: the two are not of the same model, or "
            "the layer is of a kind whose quantised weights are not supported"
        )
    for name, shapes_of_it in expected.items():
        found = headers.tensors[name].shape
        if found not in shapes_of_it:
            asked = " or ".join(str(list(shape)) for shape in shapes_of_it)
            raise ModelLoadError(
                f"the weights {name} in {folder} have the shape {list(found)}, and config.json "
                f"asks for {asked}: the two are not of the same model"
            )
    _check_formats(folder, headers, layout, linears.values(), floats)
    known = (*(f"{name}." for name in linears.values()), *floats)
    unread = sorted(name for name in headers.tensors if not name.startswith(known))
    if unread:
        _log.warning(
            "%s: %d tensors are not part of a %s and are left out: %s",
            *(folder, len(unread), type(model).__name__, unread[0]),
        )
    return list(floats)


def _check_formats(
    folder: Path,
    headers: WeightHeaders,
    layout: PackedLayout,
    linears: Iterable[str],
    floats: Iterable[str],
) -> None:
    """Raise for tensors of other number formats than the layout has."""
    for layer in linears:
        for own, dtype in layout.dtypes.items():
            found = headers.tensors[f"{layer}.{own}"].dtype
            if found != dtype:
                raise ModelLoadError(
                    f"the weights {layer}.{own} in {folder} are {found}, and config.json asks for "
                    f"{dtype} ({layout.name}): the two are not of the same model"
                )
    for name in floats:
        if (found := headers.tensors[name].dtype) in _QUANTISED:
            raise ModelLoadError(
                f"the weights {name} in {folder} are {found}, and {layout.key_name}, by which "
                f"{layout.name} multiplies them, is not beside them"
            )
