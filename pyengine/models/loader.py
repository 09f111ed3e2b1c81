"""Loads a model and its tokenizer, with its limits for the engine.

A family of the table (`models/decoder/families`) runs in a decoder of ours. Every other one runs as
a module of transformers (`models/fallback`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.checkpoint_files import check_weights
from pyengine.models.config import default_sampling, gguf_sampling, read_config, refuse_pipes
from pyengine.models.decoder.dummy import dummy_shapes, open_dummy
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.decoder.kernel_sets import KernelSettings, check_rounded, kernel_set
from pyengine.models.decoder.loading import (
    OpenedModel,
    fallback_reason,
    no_mtp_layers,
    open_model,
    read_spec,
)
from pyengine.models.decoder.model import DecoderModel, attending_layers
from pyengine.models.decoder.ranks import divided, rank_of
from pyengine.models.decoder.spec import Attention, DecoderSpec
from pyengine.models.decoder.update import WeightSource
from pyengine.models.gguf_file import GGUFFile, file_digest
from pyengine.models.kv_scales import Scales, read_kv_scales
from pyengine.models.loaded import LoadedModel
from pyengine.models.placement import (
    check_dummy_memory,
    check_tensor_parallel,
    choose_dtype,
    resolve_device,
)
from pyengine.models.pooling import PoolingConfig, read_pooling
from pyengine.models.source import ModelSource, resolve_source
from pyengine.models.tokenizer import eos_token_ids, load_tokenizer, tokenizer_of_gguf
from pyengine.utils.beside import beside
from pyengine.utils.devices import Device
from pyengine.utils.gc_pause import paused_gc
from pyengine.utils.packaging import is_installed, needs_extra

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_DEFAULTS = KernelSettings()


def load_model(
    model: str | Path | ModelSource | None,
    *,
    device: "str | torch.device" = "auto",
    dtype: "str | torch.dtype" = "auto",
    kernels: KernelSettings = _DEFAULTS,
    num_threads: int | None = None,
    tensor_parallel_size: int = 1,
) -> LoadedModel:
    """Load a hub id, a local folder, a GGUF file, or (None) the embedded default.

    A version on the hub, or an access token, is for `resolve_source`, whose result is accepted too.
    Weights are read tensor by tensor and laid out as `kernels` says. On the CPU `num_threads`
    compute, None: as many as `compute_threads` chooses. With a `tensor_parallel_size`
    above 1, every process of torch's default group calls this at the same time and gets its part of
    the model.

    Raises `ModelLoadError` for a model that is missing, damaged or of an unsupported kind (see
    docs/reference/models.md), and `ConfigurationError` for a device, a dtype or a setting of
    `kernels` that is not available.
    """
    where = resolve_device(device)
    with paused_gc():
        source = resolve_source(model)
        if source.load_format == "dummy":
            _log.warning("load_format: dummy: the weights of %s are random", source.name)
        reason = None if source.is_gguf else fallback_reason(source.folder)
        if reason is None:
            return _load(source, _Target(where, dtype, num_threads), kernels, tensor_parallel_size)
        _check_fallback_settings(source, kernels, reason)
        require_fallback(source.name, reason)
        from pyengine.models.fallback import load_fallback

        return load_fallback(source, where, dtype, reason=reason, shards=tensor_parallel_size)


def checked_source(
    model: str | Path | None, *, revision: str | None = None, token: str | None = None
) -> ModelSource:
    """What `model` names, as the engine would load it on a CPU.

    Raises `ModelLoadError` if the engine cannot run it. Reads headers only.
    """
    source = resolve_source(model, revision=revision, token=token)
    if source.is_gguf:
        with _opened(source, _DEFAULTS) as (_, read_texts):
            read_texts()
            return source
    try:
        check_folder(source.folder)
    except ModelLoadError as error:
        raise ModelLoadError(f"{source.name} is in {source.folder}, but {error}") from error
    return source


def check_folder(folder: Path) -> None:
    """Raise `ModelLoadError` if the engine cannot run the model in `folder`.

    Reads the headers of its weights only.
    """
    if (reason := fallback_reason(folder)) is not None:
        require_fallback(str(folder), reason)
        from pyengine.models.fallback import check_fallback

        check_fallback(folder)
    else:
        refuse_pipes(folder)
        open_model(folder)


def tokenizer_of(source: ModelSource) -> Any:
    """The tokenizer of a model, or None for a folder without one."""
    if not source.is_gguf:
        return load_tokenizer(source.folder)
    with GGUFFile.open(source.path) as file:
        return tokenizer_of_gguf(file).tokenizer


def check_divisible(source: ModelSource, size: int, device: Device) -> None:
    """Raise `ConfigurationError` unless a model can be divided over `size` processes.

    `device` is that of the first of them. Reads no weights.
    """
    if source.is_gguf:
        with GGUFFile.open(source.path) as file:
            divided(open_gguf(file).spec, size)
    elif fallback_reason(source.folder) is not None:
        if source.load_format == "dummy":
            raise ConfigurationError(
                f"load_format='dummy' cannot be combined with tensor_parallel_size={size} for "
                f"{source.name}, which runs as transformers' module: leave one of them out"
            )
        check_tensor_parallel(read_config(source.folder), size, device)
    else:
        divided(read_spec(source.folder), size)


def dummy_weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the dummy weights for the configuration in `folder`.

    Raises `ModelLoadError` as `load_model`.
    """
    if (reason := fallback_reason(folder)) is not None:
        require_fallback(str(folder), reason)
        from pyengine.models.fallback import fallback_shapes

        return fallback_shapes(folder)
    return dummy_shapes(open_dummy(folder).spec)


def model_properties(source: ModelSource, loaded: LoadedModel) -> list[tuple[str, bytes]]:
    """The properties that the KV of a model depends on: names and values, in order.

    Its settings, and a SHA-256 digest of each file of weights: 0.5 to 2 GB/s on each core.
    """
    files = [source.path] if source.is_gguf else sorted(source.folder.glob("*.safetensors"))
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(file_digest, [] if source.load_format == "dummy" else files))
    return [
        ("load format", source.load_format.encode()),
        ("settings", loaded.model.settings.encode()),
        *(("weights", digest) for digest in digests),
    ]


def _check_fallback_settings(source: ModelSource, kernels: KernelSettings, reason: str) -> None:
    if kernels.quantises:
        raise ConfigurationError(
            f"quantization={kernels.quantization!r}: {source.name} runs as transformers' module "
            f"({reason}), whose layers are not quantised; leave quantization out"
        )

    if kernels.adapters is not None:
        raise ConfigurationError(
            f"enable_lora=True: {source.name} runs as transformers' module ({reason}), whose "
            "layers take no adapters here; merge the adapter into the model"
        )

    if kernels.with_mtp_layers:
        raise ConfigurationError(
            f"speculation='mtp': {source.name} runs as transformers' module ({reason}), whose MTP "
            "layers pyengine does not run; use 'ngram', 'suffix', or none"
        )


class _Target(NamedTuple):
    """The device, the requested number format, and the threads of the CPU."""

    device: Device
    dtype: "str | torch.dtype"
    num_threads: int | None


def require_fallback(name: str, reason: str) -> None:
    """Raise `ModelLoadError` if transformers, which runs `name` for a `reason`, is missing."""
    for library in ("torch", "transformers"):
        if not is_installed(library):
            feature = f"{name} runs as transformers' module ({reason}), which"
            raise ModelLoadError(needs_extra("torch", feature, library))


def _load(
    source: ModelSource, target: _Target, kernels: KernelSettings, shards: int
) -> LoadedModel:
    """The model in a decoder of ours, or this process's part of it."""
    device = target.device
    with _opened(source, kernels) as (opened, read_texts), beside(read_texts) as reading:
        spec = opened.spec
        if not spec.cached:
            raise ModelLoadError(
                f"{source.name} has no layer with attention: pyengine runs models with at least "
                "one, whose keys and values it caches"
            )
        choice = choose_dtype(target.dtype, spec.saved_dtype, device)
        _log.info("dtype %s: %s", choice.dtype, choice.reason)
        if kernels.quantises and opened.formats:
            raise ConfigurationError(
                f"quantization={kernels.quantization!r}: the weights of {source.name} are "
                f"quantised already ({opened.formats}); leave quantization out"
            )
        ops = kernel_set(device, choice.dtype, kernels, target.num_threads)
        if source.load_format == "dummy":
            count = sum(map(prod, dummy_shapes(spec).values()))
            own = count // shards if device.type == "cuda" else count  # ranks share a host's memory
            check_dummy_memory(own, kernels.min_bits(choice.dtype, spec.saved_dtype), device)
        rank = rank_of(shards)
        with rank.failing_together():
            limits = kernels.adapters
            tables = None if limits is None else opened.adapter_tables(ops, limits)
            decoder = opened.decoder(ops, rank, tables)
            mtp = opened.mtp_layers(decoder) if kernels.with_mtp_layers else None
        check_rounded(ops, kernels, source.name)
        texts = reading.result()
    refusal = _no_new_weights(source, kernels, device, shards)
    weight_source = WeightSource(opened, ops, tables, mtp is not None, refusal)
    # A rank's part of a quantised weight is floats.
    formats = opened.formats if ops.keeps_formats and shards == 1 else ""
    return LoadedModel(
        model=DecoderModel(decoder, device, mtp, weight_source),
        layers=attending_layers(spec, with_mtp_layers=mtp is not None),
        states=tuple(spec.state_specs),
        tokenizer=texts.tokenizer,
        path=source.path,
        name=source.name,
        eos_token_ids=texts.eos_token_ids,
        max_model_len=spec.max_positions,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        device=device,
        dtype=choice.dtype,
        dtype_reason=choice.reason,
        kv_shards=shards,
        num_mtp_layers=0 if mtp is None else len(mtp),
        default_sampling=texts.default_sampling,
        quantization=str(kernels.quantization) if kernels.quantises else formats or "none",
        has_float_linears=ops.has_float_products,
        has_torch_products=ops.has_torch_products,
        torch_computes=ops.torch_computes,
        products=ops.products,
        kv_scales=_kv_scales(source),
        load_format=source.load_format,
        pooling=_pooling(source, opened),
        adapters=decoder.adapters,
    )


def _no_new_weights(
    source: ModelSource, kernels: KernelSettings, device: Device, shards: int
) -> str:
    """Why a model's weights cannot be replaced; empty: they can."""
    if source.is_gguf:
        return f"the weights of {source.name} are of a GGUF file: start with a safetensors folder"
    if shards > 1:
        return f"tensor_parallel_size={shards}: weights are not replaced in several processes"
    if kernels.is_compiled and device.type == "cpu":
        return "compile=True: the compiled model holds its weights; leave compile out"
    return ""


def _pooling(source: ModelSource, opened: OpenedModel) -> PoolingConfig:
    classifier = opened.classifier
    generates = opened.has_head and classifier is None
    of_folder = PoolingConfig() if source.is_gguf else read_pooling(source.folder)
    return replace(of_folder, classifier=classifier, generates=generates)


class _Texts(NamedTuple):
    """The text side of a model: see `LoadedModel`."""

    tokenizer: Any
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, object]


@contextmanager
def _opened(
    source: ModelSource, kernels: KernelSettings
) -> Iterator[tuple[OpenedModel, Callable[[], _Texts]]]:
    """The model of a source, and the reader of its text side, while its files are open."""
    if source.is_gguf:
        with GGUFFile.open(source.path) as file:
            opened = open_gguf(file, keeps_formats=kernels.keeps_formats)
            if kernels.adapters is not None and not _is_plain(opened.spec):
                raise ConfigurationError(
                    f"enable_lora=True: {source.name} is a GGUF file, which has layers of "
                    f"{opened.spec.family} in another order than adapters of PEFT; take the "
                    "model's safetensors files"
                )
            if kernels.with_mtp_layers:
                raise no_mtp_layers(source.name, len(opened.spec.layers))
            yield opened, partial(_texts_of_file, file, opened.spec.vocab_size)
        return
    refuse_pipes(source.folder)
    if source.load_format == "dummy":
        opened = open_dummy(source.folder)
    else:
        opened = open_model(source.folder, with_mtp_layers=kernels.with_mtp_layers)
    yield opened, partial(_texts_of_folder, source.folder, opened.spec.vocab_size)


def _is_plain(spec: DecoderSpec) -> bool:
    """True if every layer has plain attention: llama.cpp converts other linear layers."""
    return all(isinstance(layer.mixer, Attention) and layer.beside is None for layer in spec.layers)


def _texts_of_file(file: GGUFFile, vocab_size: int) -> _Texts:
    tokenizer, ends = tokenizer_of_gguf(file)
    known = frozenset(token for token in ends if token < vocab_size)
    return _Texts(tokenizer, known, gguf_sampling(file))


def _texts_of_folder(folder: Path, vocab_size: int) -> _Texts:
    tokenizer = load_tokenizer(folder)
    ends = eos_token_ids(folder, tokenizer, vocab_size)
    return _Texts(tokenizer, ends, default_sampling(folder))


def _kv_scales(source: ModelSource) -> Scales:
    if source.is_gguf or source.load_format == "dummy":
        return {}
    return read_kv_scales(source.folder, check_weights(source.folder))
