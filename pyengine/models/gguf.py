"""Folders in the cache that are made of a GGUF file on first use.

`converted_gguf` dequantises the weights into a safetensors folder. `described_gguf` keeps the
configuration and the tokenizer only, of a file whose weights stay quantised
(`models/gguf_weights.py`).
"""

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import (
    CACHE_VARIABLE,
    build_once,
    cache_root,
    check_weights,
    discard,
    readable_size,
)
from pyengine.models.config import empty_model
from pyengine.models.gguf_config import gguf_config, is_kept_only
from pyengine.models.gguf_header import GGUFHeader, read_header
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.gguf_names import refuse_unknown_tensors
from pyengine.models.gguf_tokens import (
    check_token_ids,
    complete_tokenizer,
    default_sampling,
    end_token_ids,
    gguf_tokenizer,
)
from pyengine.models.transformers_calls import load_errors, quiet_transformers, read_json
from pyengine.utils.packaging import needs_engine_extra

CONVERSION_VERSION = 2
"""Part of the name of every converted folder: raise it when the conversion changes."""
_DESCRIPTION_VERSION = 3
"""The same for folders of `described_gguf`."""

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def converted_gguf(path: Path) -> Path:
    """The safetensors folder for a GGUF file, converted on first use.

    The folder's name depends on the file's absolute path, size and time of change. It keeps the
    number format of the file; quantised weights become float16, whose 11 bits are more than any of
    them has. Raises `ModelLoadError` for a file that is no GGUF, is damaged, or of an unknown
    architecture, and if the disk has too little space.
    """
    target = cache_root() / "models" / f"{_cache_name(path)}-own"
    return convert_once(path, target, label=path.name)


def _cache_name(path: Path) -> str:
    """A name that changes when the file does."""
    with load_errors(f"{path} cannot be read"):
        status = path.stat()
        identity = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{CONVERSION_VERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return f"{path.stem[:100]}-{key}"


def described_gguf(path: Path, header: GGUFHeader) -> Path:
    """A folder with the configuration and the tokenizer of a GGUF file, made on first use.

    A damaged folder is made again. Raises `ModelLoadError` as `converted_gguf` does.
    """
    target = cache_root() / "gguf" / f"{_cache_name(path)}-v{_DESCRIPTION_VERSION}"
    if target.is_dir() and not _has_description(target):
        with load_errors(f"{target} is damaged and cannot be removed", way_out="; delete it"):
            discard(target)

    def build(folder: Path) -> None:
        with quiet_transformers(), _header_alone(path, header) as alone, _transformers_errors(path):
            parts = _parts(alone, path, header)
            way_out = f"; set {CACHE_VARIABLE} to a writable folder with enough space"
            with load_errors(f"{path} cannot be described in {folder.parent}", way_out=way_out):
                parts.config.save_pretrained(folder)
                _save_tokenizer(parts.tokenizer, folder)
                _declare(folder / "generation_config.json", parts.sampling)

    return build_once(target, build, num_bytes=header.num_bytes)


class _Parts(NamedTuple):
    """Of a file, without its weights; `sampling` are defaults for requests."""

    config: Any
    tokenizer: Any
    sampling: Mapping[str, float]


def _parts(copy: Path, path: Path, header: GGUFHeader) -> _Parts:
    """The parts of the file at `path`, whose header is at `copy`, alone in its folder.

    Raises `ModelLoadError` for keys of the header that nothing reads.
    """
    check_token_ids(HeaderKeys(path, header))
    keys = HeaderKeys(path, header)
    config = gguf_config(copy, keys)
    tokenizer = gguf_tokenizer(copy, header, config)
    complete_tokenizer(keys, tokenizer)
    ends = end_token_ids(keys, tokenizer)
    config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    sampling = default_sampling(keys)
    keys.refuse_unread()
    return _Parts(config, tokenizer, sampling)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that transformers' plain class loads it, as it is.

    Classes of families build another one from Python's lists of all tokens and merges, which they
    keep. Added tokens are in the configuration, else transformers parses the tokenizer's
    file for them, too.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer.save_pretrained(folder)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    path, added = folder / "tokenizer_config.json", tokenizer.added_tokens_decoder
    plain = {
        "tokenizer_class": PreTrainedTokenizerFast.__name__,
        "added_tokens_decoder": {number: added[number].__getstate__() for number in added},
    }
    path.write_text(json.dumps(read_json(path) | plain, indent=2))


@contextmanager
def _header_alone(path: Path, header: GGUFHeader) -> Iterator[Path]:
    """A file with the header of `path` and holes for its tensors, in a separate folder.

    transformers maps the file that it reads, and a mapped file must not become shorter.
    """
    with tempfile.TemporaryDirectory(prefix="pyengine-") as folder:
        copy = Path(folder) / path.name
        with load_errors(f"{path} cannot be read"), path.open("rb") as file, copy.open("wb") as out:
            out.write(file.read(header.num_bytes))
            out.truncate(header.file_size)
        yield copy


@contextmanager
def _transformers_errors(path: Path) -> Iterator[None]:
    """Errors of transformers about the file."""
    way_out = (
        "; it may be damaged (then download it again) or of an architecture that transformers "
        "cannot read"
    )
    with load_errors(f"the GGUF file {path} could not be converted", way_out=way_out):
        try:
            yield
        except ImportError as error:
            missing = error.name or "gguf"
            raise ModelLoadError(needs_engine_extra("reading GGUF files", missing)) from error


def convert_once(path: Path, target: Path, *, label: str, dtype: str | None = None) -> Path:
    """Return `target`, after converting the GGUF file at `path` into it at first use.

    `dtype` names the number format of the result; None: see `converted_gguf`. A damaged result is
    made again.
    """
    if target.is_dir() and _is_damaged(target):
        with load_errors(f"{target} is damaged and cannot be removed", way_out="; delete it"):
            discard(target)
        print(f"pyengine: {target} was damaged, it is made again", file=sys.stderr)
    if target.is_dir():
        return target
    header = read_header(path)
    _refuse_kept_only(path, header)
    chosen = dtype or _PLAIN.get(header.main_type, "float16")
    num_bytes = header.num_elements * _NUM_BYTES[chosen]

    def build(folder: Path) -> None:
        print(
            f"pyengine: preparing {label}, once ({readable_size(num_bytes)} of {chosen} in "
            f"{target.parent}) ...",
            file=sys.stderr,
        )
        started = time.monotonic()
        _convert(path, folder, header, chosen)
        seconds = time.monotonic() - started
        print(f"pyengine: {label} is ready in {target} ({seconds:.0f} s)", file=sys.stderr)

    return build_once(target, build, num_bytes=num_bytes)


def _refuse_kept_only(path: Path, header: GGUFHeader) -> None:
    if is_kept_only(header):
        raise ModelLoadError(
            f"{path} is a mixture of experts of the architecture "
            f"{header.values.get('general.architecture')!r}, which cannot be converted to floats; "
            "it runs on the CPU in the formats of the file, in one process, with quantization, "
            "linear_backend and dtype left out; else take the model as safetensors"
        )


def _is_damaged(folder: Path) -> bool:
    """True if a converted folder is incomplete."""
    try:
        check_weights(folder)
    except ModelLoadError:
        return True
    return not _has_description(folder)


def _has_description(folder: Path) -> bool:
    """True if a folder has its configuration and its tokenizer."""
    has_config = bool(read_json(folder / "config.json"))
    return has_config and (folder / "tokenizer_config.json").is_file()


def _convert(path: Path, folder: Path, header: GGUFHeader, dtype: str) -> None:
    """Dequantise to `dtype` and save model and tokenizer to `folder`."""
    with quiet_transformers():
        model, parts = _read(path, header, dtype)
        # The weights are plain now, which save_pretrained checks.
        for attribute in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, attribute):
                delattr(model.config, attribute)
        model.hf_quantizer = None
        model.is_quantized = False
        model.config.architectures = [type(model).__name__]
        way_out = f"; set {CACHE_VARIABLE} to a writable folder with enough space"
        with load_errors(f"{path} cannot be stored in {folder.parent}", way_out=way_out):
            model.save_pretrained(folder)
            _save_tokenizer(parts.tokenizer, folder)
            _declare(folder / "generation_config.json", parts.sampling)
            if header.main_type not in _PLAIN and dtype != "float32":  # it lacks float16's range
                _declare(folder / "config.json", {"dtype": "bfloat16"})


def _read(path: Path, header: GGUFHeader, dtype: str) -> tuple[Any, _Parts]:
    """The model in a GGUF file, and the rest.

    It is read through a link in a separate folder, so files beside it are ignored.
    """
    with tempfile.TemporaryDirectory(prefix="pyengine-") as alone, _transformers_errors(path):
        link = Path(alone) / path.name
        link.symlink_to(path.resolve())
        parts = _parts(link, path, header)
        _refuse_unpermuted(path, header)
        model = empty_model(parts.config)
        _refuse_other_size(model, path, header)
        model.tie_weights()
        refuse_unknown_tensors(path, header, model)
        return _dequantised(link, path, parts.config, dtype), parts


def _refuse_unpermuted(path: Path, header: GGUFHeader) -> None:
    """Raise for a file without the number that transformers needs to order the rows of keys."""
    key = "llama.attention.head_count_kv"
    if header.architecture == "llama" and key not in header.values:
        raise ModelLoadError(
            f"{path} does not say {key}, without which it cannot be converted to floats; convert "
            "the model to a GGUF file again, or take it as safetensors"
        )


def _refuse_other_size(model: Any, path: Path, header: GGUFHeader) -> None:
    """Raise if the model that the header describes is much larger than the file.

    Up to twice as many weights are accepted: the output may share its weights with the embedding.
    """
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if num_weights > 2 * header.num_elements:
        raise ModelLoadError(
            f"{path} describes a model of {num_weights} weights and holds {header.num_elements}: "
            "it is damaged or was cut, get it again"
        )


def _dequantised(link: Path, path: Path, config: Any, dtype: str) -> Any:
    """The model in a GGUF file with weights of `dtype`; bfloat16 if float16 cannot hold them."""
    import torch
    from transformers import AutoModelForCausalLM

    loading: Any = AutoModelForCausalLM.from_pretrained(
        link.parent,
        gguf_file=link.name,
        config=config,
        dtype=getattr(torch, dtype),
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused here, by name
    )
    model, info = loading
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ModelLoadError(
            f"{path}: the weights {name} have the shape {list(found)}, and its header asks for "
            f"{list(wanted)}: it is damaged, get it again"
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"{path} lacks the weights of {missing[0]} ({len(missing)} tensors are missing), which "
            "its own header asks for: it is damaged or was cut, get it again"
        )
    bad = [name for name, item in model.named_parameters() if not item.isfinite().all()]
    if bad and dtype == "float16":
        return _dequantised(link, path, config, "bfloat16")
    if bad:
        raise ModelLoadError(
            f"{path}: the weights {bad[0]} hold NaN or infinity ({len(bad)} tensors do): it is "
            "damaged, get it again"
        )
    return model


def _declare(path: Path, settings: Mapping[str, object]) -> None:
    """Add settings to a JSON file, which is made for them if need be."""
    if settings:
        path.write_text(json.dumps(read_json(path) | dict(settings), indent=2))
