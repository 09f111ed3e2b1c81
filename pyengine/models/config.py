"""The configuration of a model, and its defaults of sampling, checked before weights are read."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyengine.errors import InvalidRequestError, ModelLoadError
from pyengine.models.checkpoint_files import WeightHeaders, check_weights
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.transformers_calls import load_errors, read_json, remote_code, required_code
from pyengine.models.unsupported import missing
from pyengine.sampling_params import SamplingParams

_PAGEABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
_STRETCHED_ROPE = {"dynamic", "longrope"}
_SIZES = re.compile(
    r"^(num|n)_|_(layers?|heads|size|dim|rank|experts|embeddings|positions|length|embd|ctx|inner)$"
)
"""Names of settings that are sizes."""
_LAYERS = re.compile(r"^(num_hidden_layers|num_layers|n_layers?|(num_)?(en|de)coder_layers)$")
_POSITIONS = re.compile(r"(positions?|position_embeddings|length|ctx|context_size)$")
_UNQUESTIONED, _UNQUESTIONED_LAYERS, _UNQUESTIONED_EXPERTS = 2**24, 256, 2**16
"""Sizes that are always accepted: small models come with settings that they do not use."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # sampling fields of generation_config.json
DRAWN = WeightHeaders({}, 0)
"""In place of the headers of a folder whose weights are drawn at random."""


def read_config(folder: Path, headers: WeightHeaders | None = None) -> Any:
    """The transformers configuration in `folder`; `ModelLoadError` if it cannot be used.

    Sizes that the weights cannot have are refused before a model is built; `headers` are those of
    the folder, by default read here, or `DRAWN`. Code in the folder is never run, and an attention
    implementation that it names is ignored.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    path = folder / "config.json"
    settings = read_json(path) if path.is_file() else {}
    code = required_code(settings, "AutoConfig")
    with load_errors(f"{path} cannot be used"):
        refuse_pipes(folder)
        check_sizes(settings, headers or check_weights(folder), path)
        if code and settings.get("model_type") not in CONFIG_MAPPING:
            raise remote_code(path, code)
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config._attn_implementation = config._experts_implementation = None
        _refuse_unknown_quantisation(config, path)
        _refuse_unpageable(config, folder)
    return config


def refuse_pipes(folder: Path) -> None:
    """Raise for a pipe, a device or a socket among the files: a read might never end."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelLoadError(f"{path} is not a regular file: model folders hold files only")


def check_sizes(settings: Any, headers: WeightHeaders, path: Path) -> None:
    """Raise `ModelLoadError` for a size in `settings` that weights with these headers cannot have.

    A model is built before its weights are read, and one of 10^12 layers, or with heads of 10^12
    numbers, takes all memory. Every layer has a tensor, every neuron a bit; positions have 32 bits.
    """
    pending = [settings]
    while pending:  # no recursion: a file may be nested deeper than Python's stack
        values = pending.pop()
        if isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, int | float) and _SIZES.search(name):
                    _check_size(name, value, headers, path)
            pending += values.values()
        elif isinstance(values, list):
            pending += values


def _check_size(name: str, value: float, headers: WeightHeaders, path: Path) -> None:
    num_tensors = len(headers.tensors)
    max_value, why = max(_UNQUESTIONED, headers.num_bits), f"take {headers.num_bytes} bytes"
    if _LAYERS.search(name):
        max_value, why = max(_UNQUESTIONED_LAYERS, num_tensors), f"are {num_tensors} tensors"
    elif _POSITIONS.search(name):
        max_value, why = 2**31 - 1, "are counted in 32 bits"
    elif "experts" in name:
        max_value = max(_UNQUESTIONED_EXPERTS, num_tensors, headers.longest)
        why = f"are {num_tensors} tensors, the longest of {headers.longest}"
    if value > max_value and headers is DRAWN:
        raise ModelLoadError(
            f"{path} says {name}={value}: load_format='dummy' accepts at most {max_value} there"
        )
    if value > max_value:
        subject = "positions" if _POSITIONS.search(name) else "the weights"
        raise ModelLoadError(
            f"{path} says {name}={value}, which these weights cannot have: {subject} {why}; the "
            "file belongs to other weights, or is damaged"
        )


def _refuse_unknown_quantisation(config: Any, path: Path) -> None:
    """Raise for weights quantised by a method that transformers does not know and would ignore."""
    packed = getattr(config, "quantization_config", None)
    if packed is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    supports: Any = AutoHfQuantizer.supports_quant_method
    if not isinstance(packed, dict) or not supports(packed):
        method = packed.get("quant_method") if isinstance(packed, dict) else packed
        raise ModelLoadError(
            f"{path}: the weights are quantised by {method!r}, which transformers cannot read; "
            "take a checkpoint that is not quantised, or quantised by another method"
        )


def _refuse_unpageable(config: Any, folder: Path) -> None:
    """Raise for layers whose attention is neither full nor a sliding window, and for no layers."""
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", 1) < 1:
        raise ModelLoadError(
            f"{folder / 'config.json'} says num_hidden_layers={text.num_hidden_layers}: a model "
            "has at least one layer"
        )
    layer_types = set(getattr(text, "layer_types", None) or ())
    unsupported = sorted(layer_types - _PAGEABLE_LAYERS)
    if unsupported:
        raise ModelLoadError(
            f"the model in {folder} ({config.model_type}) has layers of type "
            f"{', '.join(unsupported)}; pyengine has no {missing(text.model_type, unsupported)}"
        )


def max_model_len(text: Any, folder: Path) -> int:
    """The number of positions of the model; `text` is its text configuration.

    Dynamic and LongRoPE scaling choose their frequencies by the longest sequence of the batch.
    Beyond the original length these would change under cached keys, so such models stop there.
    """
    positions = getattr(text, "max_position_embeddings", None)
    if type(positions) is not int or positions < 1:
        raise ModelLoadError(
            f"{folder / 'config.json'} does not say max_position_embeddings (found {positions!r}): "
            "the number of positions must be known to size the KV cache"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _STRETCHED_ROPE:
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        return min(positions, original or positions)
    return positions


def default_sampling(folder: Path) -> Mapping[str, object]:
    """Fields of `SamplingParams` that the folder's generation_config.json sets, with their values.

    Only values of the file itself, no defaults of transformers. `max_new_tokens` becomes
    `max_tokens`. With `do_sample: false` the model is greedy: its temperature is 0, and other
    sampling fields are left out, as transformers does. Raises `ModelLoadError` for invalid values.
    """
    path = folder / "generation_config.json"
    settings = read_json(path)
    names = {name: name for name in (*_SAMPLING, "repetition_penalty")}
    names["max_new_tokens"] = "max_tokens"
    fields = {
        ours: settings[theirs] for theirs, ours in names.items() if settings.get(theirs) is not None
    }
    if settings.get("do_sample") is False:
        fields = {name: value for name, value in fields.items() if name not in _SAMPLING}
        fields["temperature"] = 0.0
    return _checked_sampling(fields, f"{path}")


def gguf_sampling(file: GGUFFile) -> Mapping[str, object]:
    """The same fields from the header of a GGUF file.

    Other keys of the group (`mirostat`, `xtc_threshold`) have no counterpart here. Raises
    `ModelLoadError` for values that no request could have.
    """
    keys, group = HeaderKeys(file.path, file.header), "general.sampling"
    fields = {
        "temperature": keys.number(f"{group}.temp", zero=True),
        "top_k": keys.count(f"{group}.top_k", low=0),
        "top_p": keys.number(f"{group}.top_p", maximum=1.0),
        "min_p": keys.number(f"{group}.min_p", maximum=1.0, zero=True),
        "repetition_penalty": keys.number(f"{group}.penalty_repeat"),
    }
    declared = {name: value for name, value in fields.items() if value is not None}
    return _checked_sampling(declared, f"the header of {file.path}")


def _checked_sampling(fields: Mapping[str, Any], where: str) -> Mapping[str, object]:
    """Check fields of `SamplingParams`; `ModelLoadError` for values that no request could have.

    `where` is their source, for messages.
    """
    try:
        SamplingParams(**fields)
    except (InvalidRequestError, TypeError) as error:
        raise ModelLoadError(
            f"{where} sets a value that no request may have: {error}; correct the file or delete it"
        ) from error
    return MappingProxyType(dict(fields))
