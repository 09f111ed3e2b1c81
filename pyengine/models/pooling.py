"""How a model's folder says that hidden states become embeddings or classes.

Folders of sentence-transformers have a modules.json, which lists a Transformer, a Pooling and
perhaps a Normalize module with their folders. Models of transformers with a classifier
(`...ForSequenceClassification`) have its weights as `score.weight`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.checkpoint import Checkpoint
from pyengine.models.transformers_calls import read_object, read_value
from pyengine.pooling_params import Pooling
from pyengine.utils.dtypes import widened
from pyengine.utils.validation import shown

Activation = Literal["softmax", "sigmoid", "none"]

_CLASSIFIER = "ForSequenceClassification"
_SCORE = "score.weight"
_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_OLD_KEY = re.compile(r"pooling_mode_(\w+?)(_tokens?)?")
"""Keys of older files: `pooling_mode_mean_tokens: true`."""


@dataclass(frozen=True, slots=True)
class Classifier:
    """Maps a hidden state to classes.

    `weight` is float32 `[labels, hidden]`, `labels` are their names, `activation` makes
    probabilities of the logits.
    """

    weight: npt.NDArray[np.float32]
    labels: tuple[str, ...]
    activation: Activation

    def logits(self, state: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The logits `[labels]` of a hidden state `[hidden]`."""
        logits: npt.NDArray[np.float32] = self.weight @ state
        return logits

    def probabilities(self, state: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """The probabilities `[labels]` of a hidden state `[hidden]`."""
        logits = self.logits(state).astype(np.float64)
        if self.activation == "none":
            return logits
        if self.activation == "sigmoid":
            return 1 / (1 + np.exp(-logits))
        powers = np.exp(logits - logits.max())
        probabilities: npt.NDArray[np.float64] = powers / powers.sum()
        return probabilities


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The defaults of a model's embeddings, and its classifier, if it has one.

    `generates` is False for a model without a head, which can only be pooled.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    classifier: Classifier | None = None
    generates: bool = True


def read_pooling(folder: Path) -> PoolingConfig:
    """The defaults that modules.json says, or those of a folder without one.

    Raises `ModelLoadError` for modules and ways of pooling that are not supported, by name.
    """
    path = folder / "modules.json"
    if not path.exists():
        return PoolingConfig()
    pooling, normalize = None, False
    for index, (kind, own) in enumerate(_modules(path)):
        if kind == "Transformer" and index == 0:
            continue
        if kind == "Pooling" and pooling is None:
            pooling = _read_way(folder / own / "config.json")
        elif kind == "Normalize" and pooling is not None:
            normalize = True
        else:
            raise ModelLoadError(
                f"{path} lists a module of type {shown(kind)}: pyengine embeds by a Transformer, a "
                "Pooling and a Normalize, in this order"
            )
    if pooling is None:
        raise ModelLoadError(f"{path} lists no Pooling module: it is damaged, or no text model's")
    _refuse_messages(folder / "sentence_bert_config.json")
    return PoolingConfig(pooling, normalize)


def _refuse_messages(path: Path) -> None:
    """Raise for a Transformer that puts each text into the chat template, as a message."""
    kinds = read_object(path).get("modality_config") if path.exists() else None
    if isinstance(kinds, dict) and "message" in kinds:
        raise ModelLoadError(
            f"{path} says that texts are messages of a chat (modality_config.message), and "
            "pyengine embeds them as they are: save the model without that entry"
        )


def _modules(path: Path) -> list[tuple[str, str]]:
    """The types of the modules in a modules.json, without their packages, and their folders."""
    modules = read_value(path)
    if not isinstance(modules, list):
        raise ModelLoadError(f"{path} is not a list of modules: get it again")
    found = []
    for module in modules:
        kind, own = (module.get(key) if isinstance(module, dict) else None for key in _FIELDS)
        if not isinstance(kind, str) or not isinstance(own, str):
            raise ModelLoadError(f"{path}: {shown(module)} is no module with a type and a path")
        if own != Path(own).name and own:
            raise ModelLoadError(f"{path}: {shown(own)} is no folder beside it")
        found.append((kind.rpartition(".")[2], own))
    return found


_FIELDS = ("type", "path")


def _read_way(path: Path) -> Pooling:
    """The way of pooling in the configuration of a Pooling module."""
    values = read_object(path)
    ways = values.get("pooling_mode")
    if ways is None:
        matches = {key: _OLD_KEY.fullmatch(key) for key in values}
        ways = [match[1] for key, match in matches.items() if match and values[key] is True]
    ways = ways if isinstance(ways, list) else [ways]
    if len(ways) == 1 and isinstance(ways[0], str) and ways[0] in _POOLINGS:
        return _POOLINGS[ways[0]]
    raise ModelLoadError(
        f"{path} says that hidden states are pooled by {shown(ways)}: pyengine pools causal models "
        f"by one of {', '.join(_POOLINGS)}"
    )


def is_for_pooling(folder: Path, config: Mapping[str, Any]) -> bool:
    """True if the model in `folder` is meant without its head, by its class or a modules.json."""
    names = config.get("architectures")
    is_base = isinstance(names, list) and any(str(name).endswith("Model") for name in names)
    return is_base or (folder / "modules.json").exists()


def has_classifier(config: Mapping[str, Any]) -> bool:
    """True if a configuration is that of a model with a classifier in place of its head."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_CLASSIFIER) for name in names)


def read_classifier(
    config: Mapping[str, Any], checkpoint: Checkpoint, where: str, hidden: int
) -> Classifier:
    """The classifier of a model; `where` its configuration is from, for messages.

    Raises `ModelLoadError` for weights that are missing, not finite or of another shape.
    """
    labels = _labels(config, where)
    stored = checkpoint.take(_SCORE, (len(labels), hidden))
    weight = np.array(widened(stored.read()))
    if not np.isfinite(weight).all():
        raise ModelLoadError(
            f"the weights {_SCORE} of {where} hold NaN or infinity: get them again"
        )
    problem = config.get("problem_type")
    activation: Activation = "softmax" if len(labels) > 1 else "sigmoid"
    if problem == "multi_label_classification":
        activation = "sigmoid"
    elif problem == "regression":
        activation = "none"
    return Classifier(weight, labels, activation)


def _labels(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The names of the classes, by their numbers; two without any, as transformers has it."""
    names = config.get("id2label")
    if names is None:
        count = config.get("num_labels", 2)
        names = {str(index): f"LABEL_{index}" for index in range(_checked(count, where))}
    if not isinstance(names, dict) or set(names) != {str(index) for index in range(len(names))}:
        raise ModelLoadError(f"{where} says id2label={shown(names)}: it must number its labels")
    _checked(len(names), where)
    return tuple(str(names[str(index)]) for index in range(len(names)))


def _checked(count: Any, where: str) -> int:
    if type(count) is not int or not 1 <= count <= _MOST_LABELS:
        raise ModelLoadError(
            f"{where} says num_labels={shown(count)}: it must be from 1 to {_MOST_LABELS}"
        )
    return count


_MOST_LABELS = 1 << 16
