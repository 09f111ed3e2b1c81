"""GGUF files: checked, dequantised once into a safetensors folder, then loaded from there."""

import hashlib
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pyengine.core.distribution import needs_engine_extra
from pyengine.core.errors import ModelLoadError
from pyengine.models.cache_folder import build_once, cache_root
from pyengine.models.quiet import quiet_transformers

CONVERSION_VERSION = 1
"""Part of the name of every converted folder: raise it when the conversion changes."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of key-value pairs


def converted_gguf(path: Path) -> Path:
    """The safetensors folder for a GGUF file, converted on first use.

    The folder is found again by the file's absolute path, size and time of change. Raises
    `ModelLoadError` for a file that is no GGUF, is damaged, or of an unknown architecture.
    """
    check_gguf(path)
    status = path.stat()
    identity = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{CONVERSION_VERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return convert_once(path, cache_root() / "models" / f"{path.stem}-{key}", label=path.name)


def check_gguf(path: Path) -> None:
    """Raise `ModelLoadError` unless `path` starts like a GGUF file that can be read.

    Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise ModelLoadError(
            f"{path} is not a GGUF file: it starts with {head[:4]!r}, not {_MAGIC!r} "
            f"({path.stat().st_size} bytes); download it again or name another model"
        )
    _, version, _, _ = _HEADER.unpack(head)
    if version not in _VERSIONS:
        raise ModelLoadError(
            f"{path} is a GGUF file of version {version}; versions {_VERSIONS} can be read"
        )


def convert_once(path: Path, target: Path, *, label: str) -> Path:
    """Return `target`, after converting the GGUF file at `path` into it if it is not there."""

    def build(folder: Path) -> None:
        print(f"pyengine: preparing {label}, once (some seconds) ...", file=sys.stderr)
        started = time.monotonic()
        _convert(path, folder)
        seconds = time.monotonic() - started
        print(f"pyengine: {label} is ready in {target} ({seconds:.0f} s)", file=sys.stderr)

    return build_once(target, build)


def _convert(path: Path, folder: Path) -> None:
    """Dequantise to float32 and save model and tokenizer to `folder`.

    The file is read by a link in a folder of its own: what lies beside it has no say.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers(), tempfile.TemporaryDirectory(prefix="pyengine-") as alone:
        (Path(alone) / path.name).symlink_to(path.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                alone, gguf_file=path.name, trust_remote_code=False
            )
            model: Any = AutoModelForCausalLM.from_pretrained(
                alone,
                gguf_file=path.name,
                dtype=torch.float32,
                trust_remote_code=False,
            )
        except ImportError as error:
            raise ModelLoadError(
                needs_engine_extra("reading GGUF files", error.name or "gguf")
            ) from error
        except Exception as error:  # whatever the readers trip over in a damaged file
            raise ModelLoadError(
                f"the GGUF file {path} could not be converted: {error}; it may be damaged (then "
                "download it again) or of an architecture that transformers cannot read"
            ) from error
        # The weights are plain now; save_pretrained refuses what still claims to be quantised.
        for attribute in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, attribute):
                delattr(model.config, attribute)
        model.hf_quantizer = None
        model.is_quantized = False
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
