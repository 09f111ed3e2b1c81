"""Loading: from a name, a folder, a GGUF file or nothing to a model and its tokenizer."""

from pyengine.models.loader import LoadedModel, load_model, read_config
from pyengine.models.placement import resolve_device, resolve_dtype, resolve_first_device
from pyengine.models.sharding import check_tensor_parallel
from pyengine.models.source import resolve_source

__all__ = [
    "LoadedModel",
    "check_tensor_parallel",
    "load_model",
    "read_config",
    "resolve_device",
    "resolve_dtype",
    "resolve_first_device",
    "resolve_source",
]
