"""The tensors of a GGUF file that hold the weights of all experts of a layer."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyengine.models.gguf_file import FLOATS, UnsupportedGGUFError, other_shape
from pyengine.models.gguf_header import GGUFTensor
from pyengine.models.quantized_experts import Mixture, mixture_of

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
_OTHER_EXPERTS = re.compile(r"_exps\.|\.ffn_(gate|up|down)\.\d+\.")


@dataclass(slots=True)
class ExpertTensors:
    """A mixture of experts, and its tensors: of all experts, by `gate`, `up` and `down`."""

    mixture: Mixture
    weights: dict[str, GGUFTensor] = field(default_factory=dict)
    biases: dict[str, GGUFTensor] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """True if no tensor is missing."""
        kinds = self.mixture.shapes.keys()
        return self.weights.keys() == kinds and (
            not self.mixture.has_biases or self.biases.keys() == kinds
        )


def add_experts(
    path: Path,
    tensor: GGUFTensor,
    names: Mapping[str, str],
    model: Any,
    found: dict[str, ExpertTensors],
) -> bool:
    """Add a tensor to `found` if it has the weights or biases of a mixture; True if it has.

    `found` are the mixtures by the names of their modules.
    """
    match = _EXPERTS.fullmatch(tensor.name)
    if match is None:
        if _OTHER_EXPERTS.search(tensor.name):
            raise UnsupportedGGUFError(f"{tensor.name} has experts in an unknown layout")
        return False
    layer, kind, own = match.groups()
    name = names.get(f"blk.{layer}.ffn_down_exps", "").rpartition(".")[0]
    if not name:
        raise UnsupportedGGUFError(f"{tensor.name} has experts, which the model has not")
    if name not in found:
        module = model.get_submodule(name)
        mixture = mixture_of(module)
        if mixture is None:
            raise UnsupportedGGUFError(f"the experts {tensor.name} are {type(module).__name__}")
        found[name] = ExpertTensors(mixture)
    experts = found[name]
    shape: tuple[int, ...] = experts.mixture.shapes[kind]
    if own == "bias":
        if not experts.mixture.has_biases:
            raise UnsupportedGGUFError(f"{tensor.name} is a bias, which the experts have not")
        shape = shape[:2]
    if tensor.shape != shape:
        raise other_shape(path, tensor.name, tensor.shape, shape)
    if (own == "bias") != (tensor.type in FLOATS):
        raise UnsupportedGGUFError(f"{tensor.name} has experts of type {tensor.type}")
    (experts.biases if own == "bias" else experts.weights)[kind] = tensor
    return True


def tensors_of_experts(tensor: GGUFTensor) -> Iterator[GGUFTensor]:
    """The tensors of the experts in a tensor of all of them."""
    count, *shape = tensor.shape
    size = tensor.num_bytes // count
    for number in range(count):
        yield replace(
            tensor,
            name=f"{tensor.name}[{number}]",
            shape=tuple(shape),
            offset=tensor.offset + number * size,
            num_bytes=size,
        )
