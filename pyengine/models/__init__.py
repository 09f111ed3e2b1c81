"""Loading: from a name, a folder, a GGUF file or nothing to a model and its tokenizer."""

from pyengine.models.config import read_config
from pyengine.models.loader import LoadedModel, load_model
from pyengine.models.placement import (
    check_tensor_parallel,
    resolve_device,
    resolve_dtype,
    resolve_first_device,
)
from pyengine.models.source import ModelSource, resolve_source

__all__ = [
    "LoadedModel",
    "ModelSource",
    "check_tensor_parallel",
    "load_model",
    "read_config",
    "resolve_device",
    "resolve_dtype",
    "resolve_first_device",
    "resolve_source",
]
