"""Random LoRA adapters in folders of PEFT, and checkpoints with adapters merged into them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.utils.dtypes import rounded, widened
from tests.support.checkpoints import read_weights, save_weights, write_json

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path,
    model: Path | Mapping[str, tuple[int, ...]],
    *,
    seed: int = 0,
    rank: int = 4,
    targets: tuple[str, ...] = ALL_LINEAR,
    scale: float = 0.3,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """Save an adapter of a model's linear layers with these last parts of their names.

    The model is a folder, or the names and shapes of its weights.
    """
    if isinstance(model, Path):
        model = {name: weight.shape for name, weight in read_weights(model).items()}
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tensors = {}
    for name, shape in sorted(model.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or len(shape) != 2:
            continue
        outputs, inputs = shape
        for letter, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
            numbers = random.standard_normal(size, dtype=np.float32) * np.float32(scale)
            tensors[f"base_model.model.{module}.lora_{letter}.weight"] = numbers
    save_weights(folder / "adapter_model.safetensors", tensors, dtype)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    write_json(folder / "adapter_config.json", {**values, "target_modules": [*targets], **config})
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Change the configuration of an adapter."""
    path = folder / "adapter_config.json"
    write_json(path, {**json.loads(path.read_text()), **values})


def merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Save the model with the adapter added to its weights."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    weights, deltas = read_weights(model), read_weights(adapter)
    for name in weights:
        key = f"base_model.model.{name.removesuffix('weight')}lora_"
        if f"{key}A.weight" in deltas:
            first, second = (widened(deltas[f"{key}{letter}.weight"]) for letter in "AB")
            kind = weights[name].dtype.type
            delta = np.float32(scaling) * (second @ first)
            weights[name] = rounded(widened(weights[name]) + delta, kind)
    save_weights(folder / "model.safetensors", weights)
    return folder
