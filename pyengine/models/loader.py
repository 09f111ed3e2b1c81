"""A model and its tokenizer in memory, and the few facts that the engine needs of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pyengine.core.errors import ModelLoadError
from pyengine.models.boundary import (
    code_asked_for,
    foreign_code,
    load_errors,
    paused_gc,
    quiet_transformers,
    read_json,
)
from pyengine.models.config import default_sampling, eos_token_ids, max_model_len, read_config
from pyengine.models.placement import kv_shards, resolve_device, resolve_dtype
from pyengine.models.source import ModelSource, resolve_source
from pyengine.models.weights import check_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model of transformers, ready to run.

    `tokenizer` is None for a folder without one: then prompts are token ids. `eos_token_ids`
    end a generation. `max_model_len` is the number of positions, `vocab_size` the number of
    token ids that the model knows. Where the model is divided over processes, this is one
    process's part, which has 1 / `kv_shards` of the KV heads. `default_sampling` holds the fields
    of `SamplingParams` that the model's generation_config.json sets.
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
    default_sampling: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def config(self) -> Any:
        """The model's transformers configuration."""
        return self.model.config


def load_model(
    model: str | Path | ModelSource | None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    tensor_parallel_size: int = 1,
    revision: str | None = None,
    token: str | bool | None = None,
) -> LoadedModel:
    """Load a hub id, a local folder, a GGUF file, or (None) the embedded default.

    `revision` and `token` are for the hub, as in `resolve_source`, whose result is taken too.
    Weights are mapped from the safetensors files, never initialised first. With a
    `tensor_parallel_size` above 1, every process of torch's default group, which has as many,
    calls this at the same time and gets its part of the model. Raises `ModelLoadError` for a
    model that is missing, damaged or of an unsupported kind (docs/models.md lists them), and
    `ConfigurationError` for a device or dtype that cannot be had.
    """
    where = resolve_device(device)
    with paused_gc():
        source = resolve_source(model, revision=revision, token=token)
        try:
            with quiet_transformers():
                return _load(source, where, dtype, tensor_parallel_size)
        except ModelLoadError as error:
            raise ModelLoadError(f"{error}{source.way_out}") from error


def _load(
    source: ModelSource, device: torch.device, dtype: str | torch.dtype, shards: int
) -> LoadedModel:
    folder = source.folder
    check_weights(folder)
    config = read_config(folder)
    resolved_dtype = resolve_dtype(dtype, config, device)
    model = _load_weights(folder, config, resolved_dtype, _placement(device, shards))
    tokenizer = _load_tokenizer(folder)
    text = config.get_text_config()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        path=folder,
        name=source.name,
        eos_token_ids=eos_token_ids(model, tokenizer),
        max_model_len=max_model_len(text, folder),
        vocab_size=text.vocab_size,
        device=device,
        dtype=resolved_dtype,
        kv_shards=kv_shards(config, shards),
        default_sampling=default_sampling(folder),
    )


def _placement(device: torch.device, shards: int) -> dict[str, Any]:
    """What tells transformers where the weights go: to one device, or a part to every process."""
    if shards > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=shards)}
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _load_weights(folder: Path, config: Any, dtype: torch.dtype, placement: dict[str, Any]) -> Any:
    """The model of `config` with the weights of the folder, ready to run."""
    from transformers import AutoModelForCausalLM

    with load_errors(f"the model in {folder} could not be loaded"):
        loading: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            trust_remote_code=False,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **placement,
        )
    model, info = loading
    _refuse_missing(info, folder)
    _refuse_unpageable(model, folder)
    model.eval()
    return model


def _refuse_missing(info: Any, folder: Path) -> None:
    """Raise where the files lack tensors, which transformers would fill with random numbers."""
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"the weights in {folder} lack {missing[0]}{more}, which config.json asks for: "
            "the two are not of the same model, or a file is missing"
        )


def _refuse_unpageable(model: Any, folder: Path) -> None:
    """Raise for a model whose layers keep a state, or look at tokens that come later.

    Attention that is not causal says so in its module (`is_causal`), or transformers reads it in
    the configuration. Its mask never reaches an attention of our own, so it would answer nonsense.
    """
    name = f"{type(model).__name__} ({folder})"
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(
            f"{name} keeps a recurrent state, which a paged KV cache does not hold: "
            "this model is not supported"
        )
    looking_ahead = [
        layer
        for layer in model.get_decoder().modules()
        if getattr(layer, "layer_idx", None) is not None
        and getattr(layer, "is_causal", True) is False
    ]
    if looking_ahead or not getattr(model.config.get_text_config(), "is_causal", True):
        raise ModelLoadError(
            f"{name} attends to later tokens too: it is made to embed or classify text, not to "
            "generate it, and is not supported"
        )


def _load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, or None where it has none."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    import transformers
    from transformers import AutoTokenizer

    path = folder / "tokenizer_config.json"
    settings = read_json(path)
    if asked := code_asked_for(settings, "AutoTokenizer"):
        named = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if not (hasattr(transformers, named) or hasattr(transformers, f"{named}Fast")):
            raise foreign_code(path, asked)
    with load_errors(f"the tokenizer in {folder} could not be loaded"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
