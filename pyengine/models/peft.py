"""Reads LoRA adapters from folders of PEFT: adapter_config.json and adapter_model.safetensors.

Layout: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.errors import AdapterError, ModelLoadError
from pyengine.models.adapters import Adapter, AdapterLimits, Floats
from pyengine.models.checkpoint_files import checked_file
from pyengine.models.decoder.adapters import AdapterModule, AdapterTables
from pyengine.models.decoder.checkpoint import StoredTensor, stored_tensor
from pyengine.models.transformers_calls import read_object
from pyengine.utils.dtypes import widened
from pyengine.utils.validation import is_integer, is_real, shown

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = ("F32", "BF16", "F16")
_MAX_TOKENS = 1024
"""Of an invocation."""
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales the base's weights, too; train without use_dora, or merge it",
    "use_qalora": "QALoRA is of quantised groups; train without use_qalora, or merge it",
    "use_bdlora": "block-diagonal LoRA is not LoRA's product; train without use_bdlora",
    "lora_bias": "biases of B are not added; train with lora_bias=False, or merge it",
    "modules_to_save": "whole modules would replace the base's; merge it into a model of its own",
    "trainable_token_indices": "embeddings would change; merge it into a model of its own",
    "target_parameters": "parameters of experts cannot have adapters; merge it",
    "layer_replication": "the layers would not be those of the base; merge it",
    "megatron_config": "parallel layers of Megatron are not those of the base; convert it",
    "arrow_config": "routing between adapters is not done; name one adapter",
    "kasa_config": "KaSA has singular values beside A and B; merge it",
    "velora_config": "VeLoRA has projections beside A and B; merge it",
    "monteclora_config": "MonteCLoRA draws samples; merge it",
}
"""Keys of a configuration that must be neutral, and why."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract from the base's weights."""
_NO_EFFECT = frozenset(
    (
        *("base_model_name_or_path", "revision", "peft_version", "auto_mapping", "task_type"),
        *("inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("ensure_weight_tying", "parent_library", "peft_type", "bias", "init_lora_weights"),
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        "alora_invocation_tokens",
    )
)
"""Keys that are read, or say what the tensors show."""
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_PATTERN = re.compile(r"\^?[\w.\\]+")


def read_adapter(path: str | Path, tables: AdapterTables) -> Adapter:
    """The adapter in a folder, for the model of these tables.

    Raises `AdapterError` for files that are missing or damaged, for kinds that cannot be served,
    and for an adapter of another model.
    """
    folder = Path(path)
    try:
        config = _Config(folder / _CONFIG, _read_config(folder))
        tensors = checked_file(folder / _WEIGHTS)
        pairs = _pairs(folder, {name: stored_tensor(name, of) for name, of in tensors.items()})
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    modules = {name: _module(folder, name, tables) for name in pairs}
    for name, (first, second) in pairs.items():
        _check_shapes(folder, name, (first, second), modules[name][1], config, tables.limits)
    matrices = {}
    for name, (first, second) in pairs.items():
        scaling = np.float32(config.scaling(name, first.shape[0]))
        own = _numbers(first), _numbers(second) * scaling
        known = modules[name][0]
        if known in matrices:
            raise AdapterError(f"{folder} has two adapters for the module {known}")
        if not all(np.isfinite(matrix).all() for matrix in own):
            raise AdapterError(f"{folder} holds NaN or infinity for {name}: get it again")
        matrices[known] = own
    return Adapter(matrices, config.invocation_tokens)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise AdapterError(
            f"lora_path={str(folder)!r} is no folder: give the local folder of an adapter "
            f"({_CONFIG}, {_WEIGHTS})"
        )
    for name in (_CONFIG, _WEIGHTS):
        if (folder / name).is_file():
            continue
        pickled = [path.name for path in sorted(folder.glob("adapter_model.*"))]
        if name == _WEIGHTS and pickled:
            raise AdapterError(
                f"{folder} holds its adapter as {pickled[0]}, which can run code and is never "
                "opened; if you trust it, load it with PEFT and save it once with "
                "save_pretrained(NEW_FOLDER, safe_serialization=True)"
            )
        raise AdapterError(f"{folder} has no file {name}: it is no adapter of PEFT")
    return read_object(folder / _CONFIG)


class _Config:
    """A checked configuration."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path, self._values = path, values
        self._check()
        self.rank = self._number("r", 8)
        self._alpha, self._is_rslora = self._number("lora_alpha", 8), values.get("use_rslora")
        self._ranks = self._pattern("rank_pattern")
        self._alphas = self._pattern("alpha_pattern")
        self.invocation_tokens = self._tokens()

    def rank_of(self, module: str) -> float:
        """The rank that it asks for."""
        return _of_pattern(self._ranks, module, self.rank)

    def scaling(self, module: str, rank: int) -> float:
        """The factor of a module's products."""
        alpha = _of_pattern(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._is_rslora else rank)

    def _check(self) -> None:
        values = self._values
        if values.get("peft_type") != "LORA":
            raise self._error("peft_type", "adapters of LoRA are served; merge it, or train a LoRA")
        for key, reason in _REFUSED.items():
            if values.get(key):
                raise self._error(key, reason)
        if values.get("bias", "none") != "none":
            raise self._error("bias", "biases of the base would change; train with bias='none'")
        kind = values.get("init_lora_weights", True)
        if isinstance(kind, str) and kind.lower().startswith(_CHANGES_BASE):
            raise self._error(
                "init_lora_weights",
                "it is for a base with other weights; convert it with PEFT's "
                "save_pretrained(path_initial_model_for_weight_conversion=...)",
            )
        for key, value in values.items():
            if key not in _NO_EFFECT and key not in _REFUSED and value:
                raise self._error(key, "pyengine does not know this setting of PEFT")

    def _error(self, key: str, reason: str) -> AdapterError:
        value = shown(self._values.get(key))
        return AdapterError(f"{self._path} says {key}={value}: {reason}")

    def _number(self, key: str, default: int) -> float:
        value = self._values.get(key, default)
        if not _is_positive(value):
            raise self._error(key, "it must be a number above 0")
        return float(value)

    def _pattern(self, key: str) -> Mapping[str, float]:
        pattern = self._values.get(key) or {}
        if not isinstance(pattern, dict):
            raise self._error(key, "it must be a mapping from modules to numbers")
        for name, value in pattern.items():
            if not _PATTERN.fullmatch(name) or not _is_positive(value):
                raise self._error(key, "keys must be names of modules, values numbers above 0")
        return {name.replace("\\", ""): float(value) for name, value in pattern.items()}

    def _tokens(self) -> tuple[int, ...] | None:
        tokens = self._values.get("alora_invocation_tokens")
        if tokens is None:
            return None
        is_list = isinstance(tokens, list) and 0 < len(tokens) <= _MAX_TOKENS
        if not is_list or not all(is_integer(token) and token >= 0 for token in tokens):
            raise self._error("alora_invocation_tokens", "it must be a list of token ids")
        return tuple(tokens)


def _is_positive(value: Any) -> bool:
    return is_real(value) and 0 < value < math.inf


def _of_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first key that is the module's name, or its end after a dot."""
    for key, value in pattern.items():
        if module == key.removeprefix("^") or (key[0] != "^" and module.endswith(f".{key}")):
            return value
    return default


def _pairs(
    folder: Path, tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """A and B of each module."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"{folder} has the tensor {name}, which is neither A nor B of a linear layer's "
                "LoRA: embeddings, magnitudes and whole modules are not served; merge it"
            )
        if tensor.dtype not in _FLOATS:
            raise AdapterError(
                f"{folder} has {name} as {tensor.dtype}: save it in one of {', '.join(_FLOATS)}"
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise AdapterError(f"{folder} has no tensors: it changes nothing")
    for module, pair in found.items():
        if len(pair) < 2:
            missing = "AB".replace(next(iter(pair)), "")
            raise AdapterError(f"{folder} lacks lora_{missing} of {module}: a file is damaged")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _module(folder: Path, name: str, tables: AdapterTables) -> tuple[str, AdapterModule]:
    """A module of the model, and its name there."""
    known = name
    if known not in tables.modules:  # of the text model in one for several media
        known = known.replace("language_model.", "")
        if known not in tables.modules and f"model.{known}" in tables.modules:
            known = f"model.{known}"
    module = tables.modules.get(known)
    if module is None:
        raise AdapterError(
            f"{folder} has an adapter for {name}, which is no linear layer of this model that can "
            "have one: embeddings, heads, routers and experts cannot, and other models have other "
            "layers"
        )
    return known, module


def _check_shapes(
    folder: Path,
    name: str,
    pair: tuple[StoredTensor, StoredTensor],
    module: AdapterModule,
    config: _Config,
    limits: AdapterLimits,
) -> None:
    first, second = (tensor.shape for tensor in pair)
    rank = first[0] if len(first) == 2 else 0
    if first != (rank, module.inputs) or second != (module.outputs, rank) or not rank:
        raise AdapterError(
            f"{folder} has A {list(first)} and B {list(second)} for {name}, which maps "
            f"{module.inputs} to {module.outputs} numbers in this model: it is of another base"
        )
    if rank != config.rank_of(name):
        raise AdapterError(
            f"{folder} has A of rank {rank} for {name}, and its configuration says "
            f"{config.rank_of(name):g}: the two are not of the same adapter"
        )
    if rank > limits.max_rank:
        raise AdapterError(
            f"{folder} has rank {rank} for {name}, and max_lora_rank={limits.max_rank}: start with "
            f"max_lora_rank={rank}"
        )


def _numbers(tensor: StoredTensor) -> Floats:
    """A tensor in float32, a copy."""
    numbers = tensor.read()
    floats = widened(numbers) if tensor.dtype == "BF16" else numbers
    return np.array(floats, np.float32, order="C")
