"""Loading: from a name, a folder, a GGUF file or nothing to a model and its tokenizer."""

from pyengine.models.loader import LoadedModel, load_model
from pyengine.models.placement import resolve_device, resolve_dtype

__all__ = ["LoadedModel", "load_model", "resolve_device", "resolve_dtype"]
