"""Checkpoints with 4-bit weights in groups of inputs: AWQ, GPTQ and compressed-tensors (W4A16).

Each layout has a linear layer's codes in 32-bit integers of eight, and scales and zero points of
groups of inputs. They become weights of the Rust kernels, `(code - zero) * scale`; the codes stay.

Layouts: https://github.com/casper-hansen/AutoAWQ (`gemm.py`), https://github.com/ModelCloud/GPTQModel
(`PackableQuantLinear`), https://github.com/vllm-project/compressed-tensors (`pack_quantized`).
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import nn

from pyengine.errors import ModelLoadError
from pyengine.kv_cache import QuantizedWeight
from pyengine.models.checkpoint_files import WeightHeaders
from pyengine.models.config import empty_model, initialise_buffers
from pyengine.models.quantized_linear import QuantizedProduct, joined_bias, replace_by_products

_log = logging.getLogger(__name__)

_BITS = 4
_CODES_PER_WORD = 8
_GROUP_SIZES = (32, 64, 128)
_LARGEST_GROUP = 128  # larger groups are several with the same scales
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each output in a word of AWQ

_Words = npt.NDArray[np.int32]
_Bytes = npt.NDArray[np.uint8]
Read = Callable[[str], torch.Tensor]
"""Reads a tensor of the checkpoint by its name."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """A weight: codes `[out, in]`, scales and zero points `[out, groups]`.

    `order` are the inputs in the order in which groups have them, if that is not their own.
    """

    codes: _Bytes
    scales: npt.NDArray[np.float32]
    zeros: _Bytes | None
    order: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class PackedLayout(ABC):
    """How a checkpoint has the weights of its linear layers."""

    group_size: int
    """Inputs of a group; -1: all."""
    has_order: bool
    """True if groups may have their inputs in another order."""

    name = ""
    codes_name = ""
    """The name of the codes of a layer."""

    @abstractmethod
    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a layer."""

    @abstractmethod
    def groups(self, read: Read) -> _Groups:
        """A layer's weight; `read` takes the names of `shapes`."""

    def num_groups(self, inputs: int) -> int:
        """Groups of a row."""
        return 1 if self.group_size == -1 else inputs // self.group_size

    def kernel_group_size(self, inputs: int) -> int:
        """Inputs of a group of the kernel, which divides one of the layout."""
        size = inputs if self.group_size == -1 else self.group_size
        return size if size in _GROUP_SIZES else _LARGEST_GROUP

    def fits(self, inputs: int) -> bool:
        """True if the kernel has groups for a layer of so many inputs."""
        size = inputs if self.group_size == -1 else self.group_size
        return inputs % size == 0 and size % self.kernel_group_size(inputs) == 0


class _AWQ(PackedLayout):
    name, codes_name = "AWQ", "qweight"

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        groups, words = self.num_groups(inputs), outputs // _CODES_PER_WORD
        return {
            "qweight": (inputs, words),
            "qzeros": (groups, words),
            "scales": (groups, outputs),
        }

    def groups(self, read: Read) -> _Groups:
        codes, zeros = (_columns(_words(read(name)), _AWQ_ORDER) for name in ("qweight", "qzeros"))
        return _Groups(codes.T, _floats(read("scales")).T, zeros.T)


@dataclass(frozen=True, slots=True)
class _GPTQ(PackedLayout):
    zero_offset: int
    """The first format has zero points less one."""

    name, codes_name = "GPTQ", "qweight"

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        groups = self.num_groups(inputs)
        order = {"g_idx": (inputs,)} if self.has_order else {}
        return {
            "qweight": (inputs // _CODES_PER_WORD, outputs),
            "qzeros": (groups, outputs // _CODES_PER_WORD),
            "scales": (groups, outputs),
            **order,
        }

    def groups(self, read: Read) -> _Groups:
        codes = _columns(_words(read("qweight")).T)
        zeros = _columns(_words(read("qzeros"))).T + np.uint8(self.zero_offset)
        return _ordered(self, _Groups(codes, _floats(read("scales")).T, zeros), read, "g_idx")


@dataclass(frozen=True, slots=True)
class _CompressedTensors(PackedLayout):
    is_symmetric: bool

    name, codes_name = "compressed-tensors", "weight_packed"

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        groups = self.num_groups(inputs)
        zeros = {} if self.is_symmetric else {"weight_zero_point": (outputs // 8, groups)}
        order = {"weight_g_idx": (inputs,)} if self.has_order else {}
        return {
            "weight_packed": (outputs, inputs // _CODES_PER_WORD),
            "weight_scale": (outputs, groups),
            **zeros,
            **order,
        }

    def groups(self, read: Read) -> _Groups:
        codes = _columns(_words(read("weight_packed")))
        zeros = None
        if not self.is_symmetric:
            zeros = _columns(_words(read("weight_zero_point")).T).T
        found = _Groups(codes, _floats(read("weight_scale")), zeros)
        return _ordered(self, found, read, "weight_g_idx")


def _words(tensor: torch.Tensor) -> _Words:
    words: _Words = tensor.to(torch.int32).numpy()
    return words


def _floats(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    floats: npt.NDArray[np.float32] = tensor.float().numpy()
    return floats


def _columns(words: _Words, places: Sequence[int] = range(_CODES_PER_WORD)) -> _Bytes:
    """The codes of words `[R, C]`, `[R, 8 * C]`; `places` are those of each of eight in a word."""
    rows, columns = words.shape
    codes = np.empty((rows, columns, _CODES_PER_WORD), np.uint8)
    for number, place in enumerate(places):
        codes[:, :, number] = (words >> (_BITS * place)) & 0xF
    return codes.reshape(rows, -1)


def _ordered(layout: PackedLayout, found: _Groups, read: Read, name: str) -> _Groups:
    """The same weight with the inputs of each group side by side."""
    if not layout.has_order:
        return found
    groups = read(name).long().numpy()
    inputs, count = len(groups), layout.num_groups(len(groups))
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], np.arange(inputs) // (inputs // count)):
        raise ModelLoadError(f"{name} does not give each of {count} groups as many inputs")
    if np.array_equal(order, np.arange(inputs)):
        return found
    return _Groups(found.codes[:, order], found.scales, found.zeros, order)


def packed_layout(settings: Mapping[str, Any]) -> PackedLayout | str:
    """The layout that a `quantization_config` names, or why the kernels do not multiply by it."""
    method = settings.get("quant_method")
    if method == "awq":
        return _awq(settings)
    if method == "gptq":
        return _gptq(settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    return f"quant_method={method!r}"


def _awq(settings: Mapping[str, Any]) -> PackedLayout | str:
    bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    if bits != _BITS or version != "gemm":
        return f"AWQ with bits={bits} and version={version!r}"
    return _with_group_size(_AWQ(settings.get("group_size", 128), has_order=False))


def _gptq(settings: Mapping[str, Any]) -> PackedLayout | str:
    bits, kind = settings.get("bits"), settings.get("checkpoint_format") or "gptq"
    offsets = {"gptq": 1, "gptq_v2": 0}
    if bits != _BITS or kind not in offsets:
        return f"GPTQ with bits={bits} and checkpoint_format={kind!r}"
    has_order = bool(settings.get("desc_act"))
    return _with_group_size(_GPTQ(settings.get("group_size", 128), has_order, offsets[kind]))


def _compressed_tensors(settings: Mapping[str, Any]) -> PackedLayout | str:
    groups, kind = list((settings.get("config_groups") or {}).values()), settings.get("format")
    if kind != "pack-quantized" or len(groups) != 1:
        return f"compressed-tensors with format={kind!r} and {len(groups)} config_groups"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "compressed-tensors with a sparsity_config"
    weights = groups[0].get("weights") or {}
    bits, number, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    if (bits, number) != (_BITS, "int") or strategy not in ("group", "channel"):
        return f"compressed-tensors with num_bits={bits}, type={number!r}, strategy={strategy!r}"
    if groups[0].get("input_activations") is not None:
        return "compressed-tensors with quantized activations"
    size = weights.get("group_size") if strategy == "group" else -1
    has_order = weights.get("actorder") in ("group", "dynamic")
    is_symmetric = bool(weights.get("symmetric", True))
    return _with_group_size(_CompressedTensors(size or -1, has_order, is_symmetric))


def _with_group_size(layout: PackedLayout) -> PackedLayout | str:
    size = layout.group_size
    if type(size) is int and (
        size in (-1, *_GROUP_SIZES) or (size > 0 and size % _LARGEST_GROUP == 0)
    ):
        return layout
    return f"{layout.name} with group_size={size}"


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
        if type(module) is nn.Linear and f"{name}.{layout.codes_name}" in headers.tensors
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

        def groups(layer: nn.Linear, name: str) -> _Groups:
            def read(own: str) -> torch.Tensor:
                tensor: torch.Tensor = places[f"{name}.{own}"].get_tensor(f"{name}.{own}")
                return tensor

            return layout.groups(read)

        def product(layers: Sequence[nn.Linear]) -> QuantizedProduct:
            parts = [groups(layer, linears[layer]) for layer in layers]
            return _product(layout, parts, dtype, joined_bias(layers))

        def kind(layer: nn.Linear) -> object:
            return id(layer) if layout.has_order else None

        replace_by_products(model, lambda module: module in linears, product, kind)
    return model.eval()


def _product(
    layout: PackedLayout,
    parts: Sequence[_Groups],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> QuantizedProduct:
    """The product of layers whose outputs follow each other."""
    codes = np.concatenate([part.codes for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    zeros = [part.zeros for part in parts if part.zeros is not None]
    size = layout.kernel_group_size(codes.shape[1])
    repeats = codes.shape[1] // size // scales.shape[1]
    pairs = codes[:, ::2] | (codes[:, 1::2] << _BITS)
    packed = QuantizedWeight.from_groups(
        np.ascontiguousarray(pairs).data,
        np.ascontiguousarray(scales.repeat(repeats, axis=1)),
        np.ascontiguousarray(np.concatenate(zeros).repeat(repeats, axis=1)).data if zeros else None,
        group_size=size,
    )
    order = parts[0].order
    return QuantizedProduct(packed, dtype, bias, None if order is None else torch.from_numpy(order))


def _check_tensors(
    folder: Path,
    headers: WeightHeaders,
    model: Any,
    layout: PackedLayout,
    linears: Mapping[nn.Module, str],
) -> list[str]:
    """Raise unless the tensors are those of the model; returns the names of those with floats."""
    expected: dict[str, tuple[int, ...]] = {}
    for module, name in linears.items():
        linear: Any = module
        outputs, inputs = linear.out_features, linear.in_features
        if not layout.fits(inputs) or outputs % _CODES_PER_WORD:
            raise ModelLoadError(
                f"{folder}: {name} has {inputs} inputs and {outputs} outputs, which are not whole "
                f"groups of {layout.group_size} and words of {_CODES_PER_WORD}"
            )
        shapes = layout.shapes(outputs, inputs)
        expected |= {f"{name}.{own}": shape for own, shape in shapes.items()}
    packed = {f"{name}.weight" for name in linears.values()}
    floats = {name: item for name, item in model.named_parameters() if name not in packed}
    expected |= {name: tuple(item.shape) for name, item in floats.items()}
    if missing := sorted(expected.keys() - headers.tensors.keys()):
        raise ModelLoadError(
            f"the weights in {folder} lack {missing[0]} ({len(missing)} tensors are missing), "
            f"which config.json asks for in {layout.name}: the two are not of the same model, or "
            "the layer is of a kind whose 4-bit weights are not supported"
        )
    for name, shape in expected.items():
        found = headers.tensors[name].shape
        if found != shape:
            raise ModelLoadError(
                f"the weights {name} in {folder} have the shape {list(found)}, and config.json "
                f"asks for {list(shape)}: the two are not of the same model"
            )
    known = (*(f"{name}." for name in linears.values()), *floats)
    unread = sorted(name for name in headers.tensors if not name.startswith(known))
    if unread:
        _log.warning(
            "%s: %d tensors are not part of a %s and are left out: %s",
            *(folder, len(unread), type(model).__name__, unread[0]),
        )
    return list(floats)
