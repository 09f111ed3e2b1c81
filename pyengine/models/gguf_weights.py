"""Weights of a GGUF file in a transformers model, quantised as they are in the file.

transformers' tables say which parameter a tensor is, and how its values are changed (`process`). A
change that only moves whole rows is applied to the quantised rows. Other changes of quantised
tensors, and modules other than linear layers, embeddings and mixtures of experts, are refused:
`UnsupportedGGUFError`, after which the file can be converted (`models/gguf.py`).

The file is read tensor by tensor, and each is released once it is packed; of a mixture, expert by
expert.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from tqdm import tqdm

from pyengine.cpu import QuantizedWeight
from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import TensorHeader, WeightHeaders
from pyengine.models.config import empty_model, initialise_buffers
from pyengine.models.gguf_experts import ExpertTensors, add_experts, tensors_of_experts
from pyengine.models.gguf_file import FLOATS, Bytes, GGUFFile, UnsupportedGGUFError, other_shape
from pyengine.models.gguf_header import GGUFHeader, GGUFTensor
from pyengine.models.gguf_names import parameter_of, refuse_unknown, transformers_tables
from pyengine.models.linear import packed_embedding
from pyengine.models.quantized_experts import Expert, QuantizedExperts
from pyengine.models.quantized_linear import QuantizedProduct, joined_bias, replace_by_products

_log = logging.getLogger(__name__)

_Order = npt.NDArray[np.int64]

_KEPT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Formats that are kept: those of `QuantizedWeight`."""
_LONG_LOAD = 3.0  # seconds after which a bar shows how far a load has come


def has_kept_formats(header: GGUFHeader) -> bool:
    """True if the file has quantised tensors, and the kernels multiply by all of their formats."""
    kinds = set(quantised_formats(header))
    if others := sorted(kinds - set(_KEPT)):
        _log.warning(
            "tensors of type %s cannot be kept as they are: the file is converted",
            " and ".join(others),
        )
    return bool(kinds) and not others


def quantised_formats(header: GGUFHeader) -> list[str]:
    """The quantised formats in the file, the largest share of its bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        if tensor.type not in FLOATS:
            sizes[tensor.type] += tensor.num_bytes
    return [kind for kind, _ in sizes.most_common()]


def weight_headers(header: GGUFHeader) -> WeightHeaders:
    """The headers of a GGUF file, as those of a folder of safetensors files."""
    tensors = {tensor.name: TensorHeader(tensor.type, tensor.shape) for tensor in header.tensors}
    return WeightHeaders(tensors, header.file_size)


@dataclass(slots=True)
class _Plan:
    """Where the tensors of a file belong in a model.

    Keys of `quantised` are parameters: a linear layer and an embedding can share one. Values of
    `rows` are the order in which a tensor's rows are stored, if that is not the model's.
    """

    floats: dict[str, GGUFTensor] = field(default_factory=dict)
    quantised: dict[nn.Parameter, GGUFTensor] = field(default_factory=dict)
    rows: dict[str, _Order] = field(default_factory=dict)
    experts: dict[str, ExpertTensors] = field(default_factory=dict)
    """By the names of modules."""

    def tensor_of(self, module: Any) -> GGUFTensor | None:
        """The quantised tensor that is the weight of `module`."""
        weight = getattr(module, "weight", None)
        return self.quantised.get(weight) if isinstance(weight, nn.Parameter) else None


def load_quantised(file: GGUFFile, config: Any, dtype: torch.dtype) -> Any:
    """The model of `config` with the weights of `file`, ready to run; rows are of `dtype`.

    Raises `UnsupportedGGUFError` before weights are read, and `ModelLoadError` for tensors that are
    missing, of other shapes, or not finite.
    """
    model, processor, plan = plan_weights(file.path, file.header, config, dtype)
    with _bar(file) as bar:
        _Loading(file, plan, dtype, bar).fill(model, processor)
    return model.eval()


def plan_weights(
    path: Path, header: GGUFHeader, config: Any, dtype: torch.dtype
) -> tuple[Any, Any, _Plan]:
    """A model without memory for its weights, transformers' processor, and the plan for both."""
    config.dtype = dtype
    model = empty_model(config)
    model.tie_weights()
    initialise_buffers(model)
    processor, names = transformers_tables(header, model)
    plan = _Plan()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = set[nn.Parameter]()
    for tensor in header.tensors:
        if add_experts(path, tensor, names, model, plan.experts):
            continue
        name = parameter_of(names, tensor.name)
        if name is None:
            refuse_unknown(path, tensor.name, model)
            continue
        parameter = parameters.get(name)
        if parameter is None:
            raise UnsupportedGGUFError(f"{name} is no parameter")
        found.add(parameter)
        if tensor.type in FLOATS:
            plan.floats[name] = tensor
            continue
        order = _row_order(processor, tensor)  # first: GPT-2's are turned over
        if tensor.shape != tuple(parameter.shape):
            raise other_shape(path, name, tensor.shape, parameter.shape)
        plan.quantised[parameter] = tensor
        if order is not None:
            plan.rows[tensor.name] = order
    for module, experts in plan.experts.items():
        if experts.is_whole:
            found.update(model.get_submodule(module).parameters())
    _refuse_missing(path, model, found)
    _refuse_other_modules(model, plan)
    return model, processor, plan


def _processed(processor: Any, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`values` of the file's tensor `name`, as the model has them."""
    try:
        result = processor.process(
            weights=values, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        )
    except Exception as error:  # shapes that the family does not have
        raise UnsupportedGGUFError(f"{name} is not laid out as expected: {error}") from error
    if result.name != name:
        raise UnsupportedGGUFError(f"{name} becomes other tensors")
    weights: npt.NDArray[Any] = result.weights
    return weights


def _row_order(processor: Any, tensor: GGUFTensor) -> _Order | None:
    """The stored row of each row of the model; None if they are in order."""
    if len(tensor.shape) != 2:
        raise UnsupportedGGUFError(f"{tensor.name} has {len(tensor.shape)} dimensions")
    rows = np.arange(tensor.shape[0])
    found = _processed(processor, tensor.name, rows[:, None])
    if found.shape != (len(rows), 1) or found.dtype != rows.dtype:
        raise UnsupportedGGUFError(f"{tensor.name} is not a matrix of whole rows")
    order = found[:, 0]
    if np.array_equal(order, rows):
        return None
    if not np.array_equal(np.sort(order), rows):
        raise UnsupportedGGUFError(f"the values of {tensor.name} are changed")
    return order


def _refuse_missing(path: Path, model: Any, found: set[nn.Parameter]) -> None:
    missing = sorted(name for name, item in model.named_parameters() if item not in found)
    if missing:
        raise ModelLoadError(
            f"{path} lacks the weights of {missing[0]} ({len(missing)} tensors are missing), which "
            "its own header asks for: it is damaged or was cut, get it again"
        )


def _refuse_other_modules(model: Any, plan: _Plan) -> None:
    """Raise unless all quantised weights are those of linear layers and plain embeddings."""
    persistent = sorted(
        name for name, buffer in model.named_buffers() if buffer.device.type == "meta"
    )
    if persistent:
        raise UnsupportedGGUFError(f"{persistent[0]} is no parameter")
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter not in plan.quantised:
                continue
            is_weight = own == "weight"
            is_embedding = is_weight and packed_embedding(module, None) is not None
            if not is_embedding and not (is_weight and type(module) is nn.Linear):
                raise UnsupportedGGUFError(
                    f"{name}.{own} is quantised, and {type(module).__name__} is neither a linear "
                    "layer nor a plain embedding"
                )


class _Loading:
    """Fills a model with the tensors of a file."""

    def __init__(self, file: GGUFFile, plan: _Plan, dtype: torch.dtype, bar: Any) -> None:
        self._file, self._plan, self._dtype, self._bar = file, plan, dtype, bar
        self._packed: dict[str, QuantizedWeight] = {}
        """Weights of embeddings, which a head may share."""
        self._owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}

    def fill(self, model: Any, processor: Any) -> None:
        """Fill `model`. Large tensors come first: each is in memory twice for a moment."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._owners.setdefault(parameter, []).append((module, name))
        for name, tensor in self._plan.floats.items():
            self._set_floats(model, processor, name, tensor)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                stored = self._plan.tensor_of(child) if isinstance(child, nn.Embedding) else None
                if stored is not None:
                    self._packed[stored.name] = self._pack([stored])
                    product = QuantizedProduct(self._packed[stored.name], self._dtype)
                    setattr(parent, name, packed_embedding(child, product))
        for name, experts in self._plan.experts.items():
            model.set_submodule(name, self._experts(experts))
        replace_by_products(
            model,
            lambda module: type(module) is nn.Linear and self._plan.tensor_of(module) is not None,
            self._product,
            self._format,
        )

    def _set_floats(self, model: Any, processor: Any, name: str, tensor: GGUFTensor) -> None:
        floats = self._read_floats(tensor)
        values = torch.from_numpy(np.array(_processed(processor, tensor.name, floats)))
        module_name, _, own = name.rpartition(".")
        module = model.get_submodule(module_name)
        parameter: nn.Parameter = getattr(module, own)
        if values.shape != parameter.shape:
            raise other_shape(self._file.path, name, values.shape, parameter.shape)
        weight = nn.Parameter(values.to(parameter.dtype), requires_grad=False)
        for owner, key in self._owners[parameter]:
            setattr(owner, key, weight)

    def _read_floats(self, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
        from gguf import GGMLQuantizationType, dequantize

        stored = np.empty(tensor.num_bytes, np.uint8)
        self._read(tensor, stored)
        floats: npt.NDArray[np.float32] = dequantize(stored, GGMLQuantizationType[tensor.type])
        if not np.isfinite(floats).all():
            raise ModelLoadError(
                f"{self._file.path}: the weights {tensor.name} hold NaN or infinity: it is "
                "damaged, get it again"
            )
        return floats.reshape(tensor.shape)

    def _experts(self, experts: ExpertTensors) -> QuantizedExperts:
        """The experts of a mixture, read one by one."""
        products = []
        for kind in ("gate", "up", "down"):
            tensor = experts.weights[kind]
            biases: Sequence[torch.Tensor | None] = [None] * experts.mixture.num_experts
            if kind in experts.biases:
                biases = torch.from_numpy(self._read_floats(experts.biases[kind])).unbind()
            products.append(
                [
                    QuantizedProduct(self._pack([part]), self._dtype, bias)
                    for part, bias in zip(tensors_of_experts(tensor), biases, strict=True)
                ]
            )
        return QuantizedExperts(
            experts.mixture, [Expert(*each) for each in zip(*products, strict=True)]
        )

    def _format(self, linear: Any) -> str:
        tensor = self._plan.tensor_of(linear)
        assert tensor is not None
        return tensor.type

    def _product(self, linears: Sequence[nn.Linear]) -> QuantizedProduct:
        """The product of linear layers of one format, whose outputs follow each other."""
        tensors = [self._plan.tensor_of(linear) for linear in linears]
        known = [tensor for tensor in tensors if tensor is not None]
        packed = self._packed.get(known[0].name) if len(known) == 1 else None
        return QuantizedProduct(packed or self._pack(known), self._dtype, joined_bias(linears))

    def _pack(self, tensors: Sequence[GGUFTensor]) -> QuantizedWeight:
        """One weight of tensors of the same format and row length."""
        kind, in_features = tensors[0].type, tensors[0].shape[1]
        num_rows = sum(tensor.shape[0] for tensor in tensors)
        stored = np.empty(sum(tensor.num_bytes for tensor in tensors), np.uint8)
        start = 0
        for tensor in tensors:
            part = stored[start : start + tensor.num_bytes]
            self._read(tensor, part)
            order = self._plan.rows.get(tensor.name)
            if order is not None:
                rows = part.reshape(len(order), -1)
                rows[:] = rows[order]
            start += tensor.num_bytes
        try:
            return QuantizedWeight(kind, stored.data, num_rows, in_features)
        except ValueError as error:  # a scale that is not finite
            names = ", ".join(tensor.name for tensor in tensors)
            raise ModelLoadError(
                f"{self._file.path}: the weights {names} are damaged: {error}; get the file again"
            ) from error

    def _read(self, tensor: GGUFTensor, out: Bytes) -> None:
        self._file.read(tensor, out)
        self._bar.update(tensor.num_bytes)


def _bar(file: GGUFFile) -> Any:
    """A progress bar of the bytes that were read, for loads that take longer than a moment."""
    return tqdm(
        total=sum(tensor.num_bytes for tensor in file.header.tensors),
        desc=f"pyengine: loading {file.path.name}",
        unit="B",
        unit_scale=True,
        delay=_LONG_LOAD,
        leave=False,
    )
