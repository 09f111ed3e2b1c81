"""The parameters of a model by the names of a GGUF file's tensors, as transformers knows them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pyengine.errors import ModelLoadError
from pyengine.models.gguf_file import UnsupportedGGUFError
from pyengine.models.gguf_header import GGUFHeader
from pyengine.models.gguf_rope import ROPE_TENSORS


def transformers_tables(header: GGUFHeader, model: Any) -> tuple[Any, dict[str, str]]:
    """transformers' processor of tensors, and its names of parameters by the file's names."""
    from transformers import modeling_gguf_pytorch_utils

    tables: Any = modeling_gguf_pytorch_utils
    architecture = header.architecture
    settings = model.config.to_dict()
    kind = "llama" if architecture == "llama" else None  # Mixtral's tensors have llama's names
    processor = tables.TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)(config=settings)
    try:
        # Each child of a model takes the table of all names again: seconds for some hundred.
        childless = _Childless(model)
        names: dict[str, str] = tables.get_gguf_hf_weights_map(childless, processor, kind)
        if not set(names.values()).issuperset(name for name, _ in model.named_parameters()):
            names = tables.get_gguf_hf_weights_map(model, processor, kind)
    except (KeyError, NotImplementedError, ValueError) as error:
        raise UnsupportedGGUFError(f"its tensors are not known by name: {error}") from error
    return processor, names


class _Childless:
    """A model without its modules, for transformers' names of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> tuple[()]:
        """None."""
        return ()


def parameter_of(names: Mapping[str, str], tensor: str) -> str | None:
    """The parameter that a tensor is; None if there is none."""
    return names.get(tensor) or names.get(tensor.removesuffix(".weight"))


def refuse_unknown(path: Path, tensor: str, model: Any) -> None:
    """Raise for a tensor that is no parameter, unless the configuration was made of it."""
    if tensor in ROPE_TENSORS and getattr(model.config, "rope_parameters", None):
        return
    raise ModelLoadError(
        f"{path}: the tensor {tensor} is no weight of a {type(model).__name__}, and the model may "
        "depend on it: the two do not belong together, or pyengine does not know this variant; "
        "take the model as safetensors"
    )


def refuse_unknown_tensors(path: Path, header: GGUFHeader, model: Any) -> None:
    """Raise `ModelLoadError` for tensors of the file that are not part of `model`."""
    _, names = transformers_tables(header, model)
    for tensor in header.tensors:
        if parameter_of(names, tensor.name) is None:
            refuse_unknown(path, tensor.name, model)
