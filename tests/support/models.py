"""Models of transformers as the loader makes them ready, in our decoder where there is one."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pyengine.models.decoder.kernel_sets import KernelSettings
from pyengine.models.fallback import FallbackModel, attending_layers
from pyengine.models.loaded import LoadedModel
from pyengine.models.loader import load_model

BY_TORCH = KernelSettings(is_compiled=True, linear_backend="torch")
"""Settings that choose torch's kernels."""


def as_loaded(
    module: Any,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    kernels: KernelSettings = BY_TORCH,
) -> LoadedModel:
    """A module's weights as the loader gives them, without tokenizer and files."""
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        loaded = load_model(Path(folder), device=device, dtype=dtype, kernels=kernels)
    return replace(loaded, path=Path("none"), name="random")


def as_fallback(module: Any) -> FallbackModel:
    """A module that runs as it is."""
    return FallbackModel(module, attending_layers(module), "a test")
