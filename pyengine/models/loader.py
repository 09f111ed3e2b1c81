"""A model and its tokenizer in memory, and the few facts that the engine needs of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyengine.core.errors import ModelLoadError
from pyengine.models.placement import resolve_device, resolve_dtype
from pyengine.models.quiet import paused_gc, quiet_transformers
from pyengine.models.sharding import kv_shards
from pyengine.models.source import ModelSource, resolve_source
from pyengine.models.weights import check_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PAGEABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
_STRETCHED_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model of transformers, ready to run.

    `tokenizer` is None for a folder without one: then prompts are token ids. `eos_token_ids`
    end a generation. `max_model_len` is the number of positions, `vocab_size` the number of
    token ids that the model knows. Where the model is divided over processes, this is one
    process's part, which has 1 / `kv_shards` of the KV heads.
    """

    model: Any
    tokenizer: Any
    path: Path
    name: str
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    kv_shards: int = 1

    @property
    def config(self) -> Any:
        """The model's transformers configuration."""
        return self.model.config


def load_model(
    model: str | Path | None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    tensor_parallel_size: int = 1,
) -> LoadedModel:
    """Load a hub id, a local folder, a GGUF file, or (None) the embedded default.

    Weights are mapped from the safetensors files, never initialised first. With a
    `tensor_parallel_size` above 1, every process of torch's default group, which has as many,
    calls this at the same time and gets its part of the model. Raises `ModelLoadError` for a
    model that is missing, damaged or of an unsupported kind, and `ConfigurationError` for a
    device or dtype that cannot be had.
    """
    where = resolve_device(device)
    with paused_gc():
        source = resolve_source(model)
        check_weights(source.folder)
        with quiet_transformers():
            return _load(source, where, dtype, tensor_parallel_size)


def read_config(folder: Path) -> Any:
    """The transformers configuration in `folder`; `ModelLoadError` if it cannot be used.

    Code that the folder brings along is never run.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    asked = _code_asked_for(folder / "config.json", "AutoConfig")
    try:
        if asked and _read_json(folder / "config.json").get("model_type") not in CONFIG_MAPPING:
            raise _foreign_code(folder / "config.json", asked)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{folder / 'config.json'} cannot be used: {error}") from error
    _refuse_unpageable(config, folder)
    return config


def _load(
    source: ModelSource, device: torch.device, dtype: str | torch.dtype, shards: int
) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    folder = source.folder
    config = read_config(folder)
    resolved_dtype = resolve_dtype(dtype, config, device)
    placement = _placement(device, shards)
    try:
        loading: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            trust_remote_code=False,
            dtype=resolved_dtype,
            use_safetensors=True,
            output_loading_info=True,
            **placement,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"the model in {folder} could not be loaded: {error}") from error
    model, info = loading
    _refuse_missing(info, folder)
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(
            f"{type(model).__name__} ({folder}) keeps a recurrent state, which a paged KV cache "
            "does not hold: this model is not supported"
        )
    model.eval()
    tokenizer = _load_tokenizer(folder)
    text = config.get_text_config()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        path=folder,
        name=source.name,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_model_len=_max_model_len(text, folder),
        vocab_size=text.vocab_size,
        device=device,
        dtype=resolved_dtype,
        kv_shards=kv_shards(config, shards),
    )


def _placement(device: torch.device, shards: int) -> dict[str, Any]:
    """What tells transformers where the weights go: to one device, or a part to every process."""
    if shards > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=shards)}
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _refuse_missing(info: Any, folder: Path) -> None:
    """Raise where the files lack tensors, which transformers would fill with random numbers."""
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"the weights in {folder} lack {missing[0]}{more}, which config.json asks for: "
            "the two are not of the same model, or a file is missing"
        )


def _refuse_unpageable(config: Any, folder: Path) -> None:
    """Raise for layers whose attention is neither full nor a sliding window."""
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    foreign = sorted(layer_types - _PAGEABLE_LAYERS)
    if foreign:
        raise ModelLoadError(
            f"the model in {folder} ({config.model_type}) has layers of type {', '.join(foreign)}; "
            f"supported are {', '.join(sorted(_PAGEABLE_LAYERS))}"
        )


def _load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, or None where it has none."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    import transformers
    from transformers import AutoTokenizer

    settings = folder / "tokenizer_config.json"
    if asked := _code_asked_for(settings, "AutoTokenizer"):
        named = str(_read_json(settings).get("tokenizer_class")).removesuffix("Fast")
        if not (hasattr(transformers, named) or hasattr(transformers, f"{named}Fast")):
            raise _foreign_code(settings, asked)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the Rust library raises bare Exception on a bad file
        raise ModelLoadError(f"the tokenizer in {folder} could not be loaded: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where it is missing or damaged, which others report."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _code_asked_for(path: Path, purpose: str) -> str:
    """The Python that the file at `path` wants to be run for `purpose`, in words; "" if none."""
    wanted = _read_json(path).get("auto_map")
    if isinstance(wanted, dict):
        wanted = wanted.get(purpose)
    names = wanted if isinstance(wanted, list) else [wanted]
    return ", ".join(sorted({str(name) for name in names if name}))


def _foreign_code(path: Path, asked: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} asks for Python code of its own ({asked}), and pyengine never runs code out of "
        "model folders: choose a model that transformers itself knows"
    )


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Token ids that end a generation, by the generation configuration and the tokenizer."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = set(declared if isinstance(declared, list) else [declared])
    ids.add(getattr(tokenizer, "eos_token_id", None))
    return frozenset(token for token in ids if token is not None)


def _max_model_len(text: Any, folder: Path) -> int:
    """Positions that the model can tell apart.

    Dynamic and LongRoPE scaling choose their frequencies by the longest sequence of the batch.
    Past the original length they would change under keys that are cached already, so such
    models run up to their original length.
    """
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
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
