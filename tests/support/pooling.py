"""Small models that embed and classify, and their vectors by transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.checkpoints import save_weights
from tests.support.serving import save_small_model

Vector = npt.NDArray[np.float32]


def save_classifier(folder: Path, *, labels: int, **settings: Any) -> Path:
    """The model of `save_small_model` with a classifier of random weights in place of its head."""
    save_small_model(folder, **settings)
    add_classifier(folder, labels)
    return folder


def add_classifier(folder: Path, labels: int) -> None:
    """Replace the head of a saved model by a classifier."""
    from safetensors.numpy import load_file

    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    config["id2label"] = {str(at): f"LABEL_{at}" for at in range(labels)}
    path.write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    random = np.random.default_rng(labels)
    shape = labels, config["hidden_size"]
    weights["score.weight"] = random.standard_normal(shape, dtype=np.float32)
    save_weights(folder / "model.safetensors", weights, "float32")


def save_modules(folder: Path, pooling: dict[str, Any], *kinds: str) -> None:
    """A modules.json of sentence-transformers: a Transformer, a Pooling, and these `kinds`."""
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *((f"{kind}", kind) for kind in kinds),
    ]
    listed = [
        {"idx": at, "name": f"{at}", "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def hidden_states(model: Any, token_ids: list[int]) -> Vector:
    """The states after the last norm `[T, hidden]`, by transformers' module without its head."""
    import torch

    with torch.inference_mode():
        states: Vector = model(torch.tensor([token_ids])).last_hidden_state[0].float().numpy()
    return states


def pooled(states: Vector, pooling: str, dimensions: int | None = None) -> Vector:
    """A normalised embedding of states `[T, hidden]`."""
    vector = (states[-1] if pooling == "last" else states.mean(axis=0))[:dimensions]
    unit: Vector = vector / np.linalg.norm(vector)
    return unit
