"""Loads a model and its tokenizer, with its limits for the engine.

`with_mtp_layers` adds the layers for multi-token prediction (MTP): Gloeckle et al. (2024),
arXiv:2404.19737, and DeepSeek-V3, section 2.2. Each is one more decoder layer, whose inputs are the
embedding of a token and the hidden state before it; it shares embedding and output with the model.
Their weights are in the model's files, as the layers after its last; transformers skips them when
it loads the model.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.checkpoint_files import WeightHeaders, check_number_formats, check_weights
from pyengine.models.config import (
    default_sampling,
    empty_model,
    eos_token_ids,
    max_model_len,
    read_config,
)
from pyengine.models.dummy_weights import dummy_config, dummy_model
from pyengine.models.float8_linear import take_over_fp8
from pyengine.models.gguf_file import GGUFFile, UnsupportedGGUFError, file_digest
from pyengine.models.gguf_header import read_header
from pyengine.models.gguf_weights import (
    load_quantised,
    plan_weights,
    quantised_formats,
    weight_headers,
)
from pyengine.models.kv_scales import Scales, is_kv_scale, read_kv_scales
from pyengine.models.packed_checkpoints import load_packed, packed_layout
from pyengine.models.packed_layout import PackedLayout
from pyengine.models.placement import DtypeChoice, choose_dtype, kv_shards, resolve_device
from pyengine.models.source import ModelSource, resolve_source
from pyengine.models.tokenizer_growth import check_growth
from pyengine.models.transformers_calls import (
    code_asked_for,
    load_errors,
    quiet_transformers,
    read_json,
    remote_code,
)
from pyengine.utils.gc_pause import paused_gc

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = re.compile(r"\.(\d+)\.")
_OF_THE_FOLDER = ("_name_or_path", "transformers_version")
"""Entries of a configuration that say where a model came from."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model of transformers, ready to run.

    `tokenizer` is None for a folder without one: then prompts are token ids. `eos_token_ids` end a
    generation. `max_model_len` is the number of positions, `vocab_size` the number of token ids. If
    the model is divided over processes, this is one process's part, which has 1 / `kv_shards` of
    the KV heads. `dtype_reason` says why the weights are of `dtype`. `default_sampling` holds the
    fields of `SamplingParams` that the model's generation_config.json sets. `mtp_layers` predict
    tokens after the next one; None if they were not loaded. `properties` are those that its KV
    depends on (`model_properties`), if they are needed. `quantization` names the formats of linear
    layers that are quantised, of all of them unless `has_float_linears`. `gguf` is the file whose
    weights are kept in its formats, if any. `kv_scales` are those of an 8-bit KV cache. Weights are
    random if `load_format` is "dummy"."""

    model: Any
    tokenizer: Any
    path: Path
    name: str
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str = ""
    kv_shards: int = 1
    default_sampling: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    mtp_layers: Any = None
    properties: tuple[tuple[str, bytes], ...] = ()
    quantization: str = "none"
    has_float_linears: bool = True
    gguf: Path | None = None
    weight_files: tuple[Path, ...] = ()
    kv_scales: Scales = field(default_factory=lambda: MappingProxyType({}))
    load_format: str = "auto"

    @property
    def config(self) -> Any:
        """The model's transformers configuration."""
        return self.model.config

    @property
    def num_mtp_layers(self) -> int:
        """The number of MTP layers."""
        return 0 if self.mtp_layers is None else len(self.mtp_layers.layers)

    @property
    def cached_configs(self) -> list[Any]:
        """Configurations of the layers that keep keys and values, in order: its own, its MTP
        layers'."""
        return [self.config] if self.mtp_layers is None else [self.config, self.mtp_layers.config]


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

    `revision` and `token` are for the hub, as in `resolve_source`, whose result is accepted too.
    Weights are mapped from the safetensors files, never initialised first. With a
    `tensor_parallel_size` above 1, every process of torch's default group calls this at the same
    time and gets its part of the model. A GGUF file whose weights were to stay as they are is
    converted for GPUs, for several processes and for unknown families.

    Raises `ModelLoadError` for a model that is missing, damaged or of an unsupported kind (see
    docs/reference/models.md), and `ConfigurationError` for a device or dtype that cannot be had.
    """
    where = resolve_device(device)
    with paused_gc():
        source = resolve_source(model, revision=revision, token=token)
        if source.load_format == "dummy":
            with quiet_transformers():
                return _load_dummy(source, where, dtype)
        if where.type != "cpu" or tensor_parallel_size != 1:
            source = source.converted()
        try:
            with quiet_transformers():
                if source.gguf is None:
                    return _load(source, where, dtype, tensor_parallel_size)
                return _load_gguf(source, source.gguf, where, dtype)
        except UnsupportedGGUFError as error:
            _log.warning("%s is converted, as %s", source.gguf, error)
            source = _converted(source, f"it was to be converted, as {error}")
        except ModelLoadError as error:
            raise ModelLoadError(f"{error}{source.way_out}") from error
        return load_model(source, device=device, dtype=dtype)


def _converted(source: ModelSource, reason: str) -> ModelSource:
    """The same model with float weights; the reason is in a refusal."""
    try:
        return source.converted()
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}; {reason}") from error


def checked_source(
    model: str | Path | None, *, revision: str | None = None, token: str | None = None
) -> ModelSource:
    """What `model` names, as the engine would load it on a CPU.

    Raises `ModelLoadError` if the engine cannot run it. Builds the model without its weights; only
    their headers are read.
    """
    source = resolve_source(model, revision=revision, token=token, keep_quantized=True)
    try:
        if source.gguf is not None:
            _check_gguf(source.gguf, source.folder)
            return source
    except UnsupportedGGUFError as error:
        source = _converted(source, f"it was to be converted, as {error}")
    try:
        check_folder(source.folder)
    except ModelLoadError as error:
        raise ModelLoadError(f"{source.name} is in {source.folder}, but {error}") from error
    return source


def _check_gguf(path: Path, folder: Path) -> None:
    header = read_header(path)
    config = read_config(folder, weight_headers(header))
    with load_errors(f"the GGUF file {path} could not be loaded"), quiet_transformers():
        model, _, _ = plan_weights(path, header, config, torch.float32)
        _refuse_unpageable(model, folder)


def check_folder(folder: Path) -> None:
    """Raise `ModelLoadError` if the engine cannot run the model in `folder`.

    Builds the model without its weights; only their headers are read.
    """
    headers = check_weights(folder)
    config = read_config(folder, headers)
    with load_errors(f"the model in {folder} could not be loaded"), quiet_transformers():
        _refuse_unpageable(empty_model(config), folder)


def model_properties(loaded: LoadedModel) -> list[tuple[str, bytes]]:
    """The configuration of a model, and a SHA-256 digest of each of its weights.

    Names and values, in order. Weights that are kept in the formats of files have the digests of
    those files. Reads all weights once: 0.5 to 2 GB/s on each core.
    """
    model = loaded.model
    config = model.config.to_dict()
    for name in _OF_THE_FOLDER:
        config.pop(name, None)
    weights = sorted(model.state_dict().items())
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(_digest, [tensor for _, tensor in weights]))
        files = b"".join(threads.map(file_digest, loaded.weight_files))
    return [
        *([] if loaded.load_format == "auto" else [("weights", loaded.load_format.encode())]),
        ("class", type(model).__name__.encode()),
        ("config", json.dumps(config, sort_keys=True, default=str).encode()),
        *((name, digest) for (name, _), digest in zip(weights, digests, strict=True)),
        *([("files", files)] if files else []),
    ]


def _digest(tensor: torch.Tensor) -> bytes:
    """The digest of a tensor: its type, its shape and its elements."""
    about = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    digest = hashlib.sha256(about)
    digest.update(memoryview(content))  # the interpreter's lock is released meanwhile
    return digest.digest()


def _load(
    source: ModelSource, device: torch.device, dtype: str | torch.dtype, shards: int
) -> LoadedModel:
    folder = source.folder
    headers = check_weights(folder)
    config = read_config(folder, headers)
    quantised = getattr(config, "quantization_config", None) is not None
    check_number_formats(headers, folder, quantised=quantised)
    saved = source.saved_dtype or getattr(config.get_text_config(), "dtype", None)
    choice = choose_dtype(dtype, saved, device)
    _log.info("dtype %s: %s", choice.dtype, choice.reason)
    layout, refused = None, ""
    if quantised and device.type == "cpu" and shards == 1:
        found = packed_layout(config.quantization_config)
        if isinstance(found, str):
            refused = f"; pyengine itself does not read {found}"
        else:
            layout = found
    if layout is not None:
        return _load_packed(source, headers, config, layout, choice)
    transposed = "" if source.is_converted else _refuse_other_sizes(config, headers, folder)
    way_out = f"{refused}{transposed}"
    with load_errors(f"the model in {folder} could not be loaded", way_out=way_out):
        model = _load_weights(folder, config, choice.dtype, _placement(device, shards))
    if not source.is_converted or choice.dtype == torch.float16:
        refuse_not_finite(model, folder)
    loaded = _loaded(source, model, device, choice)
    if quantised and device.type == "cuda" and shards == 1 and take_over_fp8(model):
        loaded = replace(loaded, quantization="fp8")
    scales = read_kv_scales(folder, headers)
    return replace(loaded, kv_shards=kv_shards(config, shards), kv_scales=scales)


def _load_dummy(source: ModelSource, device: torch.device, dtype: str | torch.dtype) -> LoadedModel:
    """The model of a folder with random weights; only its configuration is read."""
    folder = source.folder
    config = dummy_config(folder)
    choice = choose_dtype(dtype, getattr(config.get_text_config(), "dtype", None), device)
    _log.warning("load_format: dummy: the weights of %s are random", source.name)
    with load_errors(f"the model in {folder} could not be built"):
        model = dummy_model(config, choice.dtype, device)
    _refuse_unpageable(model, folder)
    refuse_not_finite(model, folder)
    return replace(_loaded(source, model, device, choice), load_format="dummy")


def _load_packed(
    source: ModelSource,
    headers: WeightHeaders,
    config: Any,
    layout: PackedLayout,
    choice: DtypeChoice,
) -> LoadedModel:
    """The model of a folder with quantised weights, which stay so."""
    if choice.dtype == torch.float16:
        raise ConfigurationError(
            f"dtype='float16': on the CPU, quantised weights ({layout.name}) are multiplied in "
            "float32 and bfloat16: leave dtype out"
        )
    del config.quantization_config
    folder = source.folder
    with load_errors(f"the model in {folder} could not be loaded"):
        model = load_packed(folder, headers, config, layout, choice.dtype)
    _refuse_unpageable(model, folder)
    refuse_not_finite(model, folder)
    return replace(
        _loaded(source, model, torch.device("cpu"), choice),
        quantization=layout.name,
        has_float_linears=_has_float_linears(model),
        weight_files=tuple(sorted(folder.glob("*.safetensors"))),
        kv_scales=read_kv_scales(folder, headers),
    )


def _has_float_linears(model: Any) -> bool:
    """True if a matrix is left, of a linear layer or a router."""
    return any(parameter.ndim > 1 for parameter in model.parameters())


def _load_gguf(
    source: ModelSource, path: Path, device: torch.device, dtype: str | torch.dtype
) -> LoadedModel:
    """The model of a GGUF file, with the weights in its formats."""
    choice = choose_dtype(dtype, source.saved_dtype, device)
    if choice.dtype == torch.float16:
        raise UnsupportedGGUFError("its quantised weights are not multiplied in float16")
    with GGUFFile.open(path) as file:
        config = read_config(source.folder, weight_headers(file.header))
        with load_errors(f"the GGUF file {path} could not be loaded"):
            model = load_quantised(file, config, choice.dtype)
    _refuse_unpageable(model, source.folder)
    return replace(
        _loaded(source, model, device, choice),
        quantization=" and ".join(quantised_formats(file.header)),
        has_float_linears=_has_float_linears(model),
        gguf=path,
        weight_files=(path,),
    )


def _loaded(
    source: ModelSource, model: Any, device: torch.device, choice: DtypeChoice
) -> LoadedModel:
    """A model with its tokenizer and its limits."""
    folder = source.folder
    tokenizer = load_tokenizer(folder, is_plain=source.is_converted)
    text = model.config.get_text_config()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        path=folder,
        name=source.name,
        eos_token_ids=eos_token_ids(model, tokenizer, folder),
        max_model_len=max_model_len(text, folder),
        vocab_size=text.vocab_size,
        device=device,
        dtype=choice.dtype,
        dtype_reason=choice.reason,
        default_sampling=default_sampling(folder),
    )


def _placement(device: torch.device, shards: int) -> dict[str, Any]:
    """Keyword arguments that place the weights: on one device, or a part in every process."""
    if shards > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=shards)}
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _load_weights(folder: Path, config: Any, dtype: torch.dtype, placement: dict[str, Any]) -> Any:
    """The model of `config` with the weights of the folder, ready to run."""
    from transformers import AutoModelForCausalLM

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
    _refuse_unpageable(model, folder)
    _refuse_other_tensors(model, info, folder)
    model.eval()
    return model


def _refuse_other_sizes(config: Any, headers: WeightHeaders, folder: Path) -> str:
    """Raise if the model of `config` has more weights than the files, or tensors of other sizes.

    transformers would fill such tensors with random numbers before it fails. Returns the message
    for a later failure: other shapes of the same size may be intended.
    """
    with load_errors(f"{folder / 'config.json'} cannot be used"):
        model = empty_model(config)
        num_weights = sum(parameter.numel() for parameter in model.parameters())
    if num_weights > headers.num_bits:
        raise ModelLoadError(
            f"{folder / 'config.json'} describes a model of {num_weights} weights, and the files "
            f"have {headers.num_bytes} bytes: the two are not of the same model"
        )
    if getattr(config, "quantization_config", None) is not None:
        return ""  # packed: another shape by the same name
    transposed = ""
    for name, item in model.named_parameters():
        found = headers.tensors.get(name)
        if found is None or found.shape == tuple(item.shape):
            continue
        differ = (
            f"the weights {name} in {folder} have the shape {list(found.shape)}, and "
            f"config.json asks for {list(item.shape)}: the two are not of the same model"
        )
        if prod(found.shape) != item.numel():
            raise ModelLoadError(differ)
        transposed = transposed or f"; {differ}"
    return transposed


def _refuse_other_tensors(model: Any, info: Any, folder: Path) -> None:
    """Raise if files and model have different tensors; log those that are unused.

    transformers fills missing tensors with random numbers. Layers beyond the number in config.json
    are left out, so half a model would answer; MTP layers are left out on purpose.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"the weights in {folder} lack {missing[0]}{more}, which config.json asks for: "
            "the two are not of the same model, or a file is missing"
        )
    unread = sorted(name for name in info["unexpected_keys"] if not is_kv_scale(name))
    text = model.config.get_text_config()
    stacks = {_LAYER.sub(".#.", name, count=1) for name in model.state_dict()}
    last = text.num_hidden_layers + (getattr(text, "num_nextn_predict_layers", None) or 0)
    for name in unread:
        layer = _LAYER.search(name)
        if layer and int(layer[1]) >= last and _LAYER.sub(".#.", name, count=1) in stacks:
            raise ModelLoadError(
                f"the weights in {folder} have a layer {layer[1]} ({name}), and config.json says "
                f"num_hidden_layers={text.num_hidden_layers}: the two are not of the same model"
            )
    if unread:
        _log.warning(
            "%s: %d tensors are not part of a %s and are left out: %s",
            *(folder, len(unread), type(model).__name__),
            ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else ""),
        )


@torch.no_grad()
def refuse_not_finite(model: Any, folder: Path) -> None:
    """Raise for weights that are NaN or infinite: every answer would be token 0.

    One sum per tensor, which reads all weights: a tenth of a second for 135 million of them in
    memory. All processes of a divided model call this together, and all of them raise.
    """
    weights = [
        (name, tensor) for name, tensor in model.named_parameters() if tensor.dtype in _DTYPES
    ]
    sums = [_of_all(tensor.sum()) for _, tensor in weights]
    for (name, tensor), total in zip(weights, sums, strict=True):
        if not total.isfinite() and _of_all(tensor.isfinite().logical_not().sum()):
            raise ModelLoadError(
                f"the weights {name} in {folder} hold NaN or infinity, in {tensor.dtype}: the "
                "file is damaged, or dtype='bfloat16' or 'float32' is what the model needs"
            )


def _of_all(number: Any) -> torch.Tensor:
    """The sum over all processes of a divided model."""
    # torch 2.9 shows each process its part of a DTensor only.
    whole: torch.Tensor = number.full_tensor() if hasattr(number, "full_tensor") else number
    return whole


def _refuse_unpageable(model: Any, folder: Path) -> None:
    """Raise for a model whose layers keep a state, or attend to later tokens.

    Attention that is not causal is marked in its module (`is_causal`) or in the configuration. Its
    mask never reaches our attention, so its answers would be nonsense.
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


def load_tokenizer(folder: Path, *, is_plain: bool = False) -> Any:
    """The tokenizer in `folder`, or None without one.

    Folders made of GGUF files need no class of a family, which loses settings of the file.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = folder / "tokenizer_config.json"
    settings = read_json(path)
    if asked := code_asked_for(settings, "AutoTokenizer"):
        named = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if not (hasattr(transformers, named) or hasattr(transformers, f"{named}Fast")):
            raise remote_code(path, asked)
    plain = PreTrainedTokenizerFast.__name__
    is_plain = is_plain and settings.get("tokenizer_class") == plain
    kind: Any = PreTrainedTokenizerFast if is_plain else AutoTokenizer
    with load_errors(f"the tokenizer in {folder} could not be loaded"):
        tokenizer: Any = kind.from_pretrained(folder, trust_remote_code=False)
        wanted = sorted({*(tokenizer.vocab_files_names or {}).values()})
        if wanted and not any((folder / name).is_file() for name in (*wanted, "tekken.json")):
            raise ModelLoadError(
                f"the tokenizer in {folder} has no vocabulary: none of {', '.join(wanted)} is "
                "there; download the model again, or without tokenizer_config.json give token ids"
            )
        check_growth(tokenizer)
        return tokenizer


def with_mtp_layers(loaded: LoadedModel) -> LoadedModel:
    """The same model with its MTP layers.

    Raises `ConfigurationError` for a model that has none, and `ModelLoadError` for layers that are
    damaged or of an unsupported kind.
    """
    text = loaded.config.get_text_config()
    first, count = text.num_hidden_layers, getattr(text, "num_mtp_layers", None) or 0
    names = {} if loaded.gguf else check_weights(loaded.path).tensors
    layers = [f".layers.{layer}." for layer in range(first, first + count)]
    if not any(layer in name for layer in layers for name in names):
        raise ConfigurationError(
            f"speculation='mtp': {loaded.name} has no MTP layers, which predict further tokens: "
            f"neither its configuration nor its files go beyond its {first} layers; use 'ngram', "
            "'suffix', or none"
        )
    with quiet_transformers(), load_errors(f"the MTP layers in {loaded.path} could not be loaded"):
        mtp_layers = _load_mtp_layers(loaded.model, first, count)
    refuse_not_finite(mtp_layers, loaded.path)
    return replace(loaded, mtp_layers=mtp_layers)


def _load_mtp_layers(model: Any, first: int, count: int) -> Any:
    """transformers' `MtpModel` over a model.

    transformers finds the layers by names that the model's class ignores, those of released
    checkpoints. This adds the numbers of their layers, for any model of that kind.
    """
    import transformers
    from transformers.modeling_layers import MtpModel

    if not hasattr(MtpModel, "forward_layer"):
        raise ConfigurationError(
            f"speculation='mtp': transformers {transformers.__version__} cannot run a single layer "
            "(MtpModel.forward_layer): install transformers 5.20 or later"
        )
    ours = [rf"model\.layers\.{layer}\." for layer in range(first, first + count)]
    known = model._keys_to_ignore_on_load_unexpected or []
    model._keys_to_ignore_on_load_unexpected = [*known, *ours]
    layers: Any = MtpModel.from_pretrained(model, device_map={"": model.device})
    return layers.eval()
