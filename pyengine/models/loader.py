"""Loads a model and its tokenizer, with its limits for the engine.

A family of the table (`models/decoder/families`) runs in a decoder of ours. Every other one runs as
a module of transformers (`models/fallback`).
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.checkpoint_files import check_weights
from pyengine.models.config import default_sampling, eos_token_ids, refuse_pipes
from pyengine.models.decoder.dummy import open_dummy
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.decoder.kernel_sets import KernelSettings, kernel_set
from pyengine.models.decoder.loading import OpenedModel, family_of, open_model
from pyengine.models.decoder.model import DecoderModel, attending_layers
from pyengine.models.fallback import check_fallback, load_fallback
from pyengine.models.gguf_file import GGUFFile, file_digest
from pyengine.models.kv_scales import Scales, read_kv_scales
from pyengine.models.linear_kernels import ProductChooser
from pyengine.models.loaded import LoadedModel
from pyengine.models.placement import choose_dtype, named_dtype, resolve_device
from pyengine.models.source import ModelSource, resolve_source
from pyengine.models.tokenizers import load_tokenizer
from pyengine.models.transformers_calls import read_json
from pyengine.utils.gc_pause import paused_gc

_log = logging.getLogger(__name__)

_DEFAULTS = KernelSettings()


def load_model(
    model: str | Path | ModelSource | None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    kernels: KernelSettings = _DEFAULTS,
    tensor_parallel_size: int = 1,
) -> LoadedModel:
    """Load a hub id, a local folder, a GGUF file, or (None) the embedded default.

    A version on the hub, or an access token, is for `resolve_source`, whose result is accepted too.
    Weights are read tensor by tensor and laid out as `kernels` says. With a `tensor_parallel_size`
    above 1, every process of torch's default group calls this at the same time and gets its part of
    the model.

    Raises `ModelLoadError` for a model that is missing, damaged or of an unsupported kind (see
    docs/reference/models.md), and `ConfigurationError` for a device, a dtype or a setting of
    `kernels` that cannot be had.
    """
    where = resolve_device(device)
    with paused_gc():
        source = resolve_source(model)
        if tensor_parallel_size != 1:
            source = source.converted()
        try:
            reason = _fallback_reason(source, kernels, tensor_parallel_size)
            if reason is None:
                return _load(source, where, dtype, kernels)
            _check_fallback_settings(source, kernels, reason)
            return load_fallback(
                source,
                where,
                dtype,
                reason=reason,
                shards=tensor_parallel_size,
                with_mtp_layers=kernels.with_mtp_layers,
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"{error}{source.way_out}") from error


def checked_source(
    model: str | Path | None, *, revision: str | None = None, token: str | None = None
) -> ModelSource:
    """What `model` names, as the engine would load it on a CPU.

    Raises `ModelLoadError` if the engine cannot run it. Reads headers only.
    """
    source = resolve_source(model, revision=revision, token=token, keep_quantized=True)
    if source.gguf is not None:
        with GGUFFile.open(source.gguf) as file:
            open_gguf(file)
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
    if family_of(folder) is None:
        check_fallback(folder)
    else:
        refuse_pipes(folder)
        open_model(folder)


def model_properties(source: ModelSource, loaded: LoadedModel) -> list[tuple[str, bytes]]:
    """What the KV of a model depends on: names and values, in order.

    Its settings, and a SHA-256 digest of each file of weights, all of which are read: 0.5 to 2 GB/s
    on each core.
    """
    files = (
        [source.gguf] if source.gguf is not None else sorted(source.folder.glob("*.safetensors"))
    )
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(file_digest, [] if source.load_format == "dummy" else files))
    return [
        ("load format", source.load_format.encode()),
        ("settings", loaded.model.settings.encode()),
        *(("weights", digest) for digest in digests),
    ]


def _fallback_reason(source: ModelSource, kernels: KernelSettings, shards: int) -> str | None:
    """Why the model runs as transformers' module; None: in a decoder of ours."""
    if source.gguf is not None:
        return None
    family = family_of(source.folder)
    if family is None:
        found = read_json(source.folder / "config.json").get("model_type")
        return f"{found} is not in the table of families"
    if shards > 1:
        return "the model is divided over processes"
    if kernels.with_mtp_layers:
        return "MTP layers"
    return None


def _check_fallback_settings(source: ModelSource, kernels: KernelSettings, reason: str) -> None:
    if kernels.quantises:
        raise ConfigurationError(
            f"quantization={kernels.quantization!r}: {source.name} runs as transformers' module "
            f"({reason}), whose layers are not quantised; leave quantization out"
        )


def _load(
    source: ModelSource,
    device: torch.device,
    dtype: str | torch.dtype,
    kernels: KernelSettings,
) -> LoadedModel:
    """The model in a decoder of ours."""
    folder = source.folder
    with _opened(source) as opened:
        spec = opened.spec
        choice = choose_dtype(dtype, source.saved_dtype or named_dtype(spec.saved_dtype), device)
        _log.info("dtype %s: %s", choice.dtype, choice.reason)
        if kernels.quantises and opened.formats:
            raise ConfigurationError(
                f"quantization={kernels.quantization!r}: the weights of {source.name} are "
                f"quantised already ({opened.formats}); leave quantization out"
            )
        made = kernel_set(device, choice.dtype, kernels)
        decoder = opened.decoder(made)
    formats = str(kernels.quantization) if kernels.quantises else opened.formats or "none"
    tokenizer = load_tokenizer(folder, is_plain=source.is_converted)
    declared = read_json(folder / "config.json").get("eos_token_id")
    return LoadedModel(
        model=DecoderModel(decoder, device),
        layers=attending_layers(spec),
        tokenizer=tokenizer,
        path=folder,
        name=source.name,
        eos_token_ids=eos_token_ids(folder, tokenizer, spec.vocab_size, declared),
        max_model_len=spec.max_positions,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        device=device,
        dtype=choice.dtype,
        dtype_reason=choice.reason,
        default_sampling=default_sampling(folder),
        quantization=formats,
        has_float_linears=made.has_float_products,
        products=ProductChooser(kernels.linear_backend, device, choice.dtype),
        gguf=source.gguf,
        kv_scales=_kv_scales(source),
        load_format=source.load_format,
    )


@contextmanager
def _opened(source: ModelSource) -> Iterator[OpenedModel]:
    """The model of a source, while its files are open."""
    if source.gguf is not None:
        with GGUFFile.open(source.gguf) as file:
            yield open_gguf(file)
        return
    refuse_pipes(source.folder)
    if source.load_format == "dummy":
        _log.warning("load_format: dummy: the weights of %s are random", source.name)
        yield open_dummy(source.folder)
    else:
        yield open_model(source.folder)


def _kv_scales(source: ModelSource) -> Scales:
    if source.gguf is not None or source.load_format == "dummy":
        return {}
    return read_kv_scales(source.folder, check_weights(source.folder))
