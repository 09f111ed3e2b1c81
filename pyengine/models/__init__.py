"""Loading: from a name, a folder, a GGUF file or nothing to a model and its tokenizer."""

from pyengine.models.config import read_config
from pyengine.models.heads import with_heads
from pyengine.models.loader import LoadedModel, load_model
from pyengine.models.placement import (
    DtypeChoice,
    check_tensor_parallel,
    choose_dtype,
    resolve_device,
    resolve_first_device,
)
from pyengine.models.source import ModelSource, resolve_source

__all__ = [
    "DtypeChoice",
    "LoadedModel",
    "ModelSource",
    "check_tensor_parallel",
    "choose_dtype",
    "load_model",
    "read_config",
    "resolve_device",
    "resolve_first_device",
    "resolve_source",
    "with_heads",
]
