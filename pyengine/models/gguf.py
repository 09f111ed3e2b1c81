"""GGUF files: checked, dequantised once into a safetensors folder, then loaded from there.

The header is checked against the file first: later readers trust it, and a false count lets them
loop until memory ends. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import json
import mmap
import re
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

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
from pyengine.models.transformers_calls import load_errors, quiet_transformers
from pyengine.utils.packaging import needs_engine_extra

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_START = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of key-value pairs
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor in the header; `type` is ggml's name (`Q4_K`), `offset` that in the data."""

    name: str
    num_elements: int
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file: numbers and strings by key (no arrays), and tensors."""

    values: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    @property
    def num_elements(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def main_type(self) -> str:
        """The type of most of the numbers."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.type] += tensor.num_elements
        return counts.most_common(1)[0][0]


def read_header(path: Path) -> GGUFHeader:
    """The header of the GGUF file at `path`.

    Raises `ModelLoadError` for a file that is no GGUF, of an unknown version, or whose counts,
    types, offsets or number of layers do not match the file.
    """
    with load_errors(f"{path} cannot be read"), path.open("rb") as file:
        head = file.read(_START.size)
        size = path.stat().st_size
        if len(head) < _START.size or not head.startswith(_MAGIC):
            raise ModelLoadError(
                f"{path} is not a GGUF file: it starts with {head[:4]!r}, not {_MAGIC!r} "
                f"({size} bytes); download it again or name another model"
            )
        _, version, num_tensors, num_values = _START.unpack(head)
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"{path} is a GGUF file of version {version}; versions {_VERSIONS} can be read"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Reader(data).header(num_tensors, num_values)
            except (struct.error, ValueError, UnicodeDecodeError) as error:
                raise ModelLoadError(
                    f"the header of the GGUF file {path} is damaged: {error}; download it again"
                ) from error
    _check_layers(path, header)
    return header


class _Reader:
    """Reads from its position on; raises `struct.error` or `ValueError` past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = _START.size

    def header(self, num_tensors: int, num_values: int) -> GGUFHeader:
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            value = self._value(self._number("I"))
            if value is not None:
                values[key] = value
        found = [self._tensor() for _ in range(num_tensors)]
        if not found:
            raise ValueError("it declares no tensors")
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment > mmap.PAGESIZE:
            raise ValueError(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        self._check_places(found, start)
        return GGUFHeader(values, tuple(found))

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self._at:
            raise ValueError(f"{num_bytes} bytes at {self._at} do not end within the file")
        self._at += num_bytes

    def _string(self) -> str:
        length, start = self._number("Q"), self._at
        self._skip(length)
        return self._data[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        """One value; None for an array, which is skipped."""
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"a value is of type {kind}, which GGUF does not have")
        item, length = self._number("I"), self._number("Q")
        if item in _NUMBERS:
            self._skip(length * struct.calcsize(f"<{_NUMBERS[item]}"))
        elif item == _STRING:
            if length * 8 > len(self._data) - self._at:
                raise ValueError(f"{length} strings at {self._at} do not end within the file")
            for _ in range(length):
                self._skip(self._number("Q"))
        else:
            raise ValueError(f"an array is of type {item}")
        return None

    def _tensor(self) -> GGUFTensor:
        sizes = _ggml_types()
        name, num_dimensions = self._string(), self._number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name!r} has {num_dimensions} dimensions")
        shape = [self._number("Q") for _ in range(num_dimensions)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in sizes:
            raise ValueError(f"{name!r} is of type {kind}, which the library gguf does not know")
        type_name, block, num_bytes = sizes[kind]
        if shape[0] % block or prod(shape) < 1:
            raise ValueError(f"{name!r} of type {type_name} cannot have the shape {shape}")
        return GGUFTensor(name, prod(shape), type_name, offset, prod(shape) // block * num_bytes)

    def _check_places(self, tensors: list[GGUFTensor], start: int) -> None:
        """Raise unless every tensor has a unique name and place within the file."""
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ValueError("two of its tensors have one name")
        end, before = 0, ""
        for tensor in sorted(tensors, key=lambda each_tensor: each_tensor.offset):
            if tensor.offset < end:
                raise ValueError(f"{tensor.name!r} lies within {before!r}")
            end, before = tensor.offset + tensor.num_bytes, tensor.name
            if start + end > len(self._data):
                raise ValueError(f"{tensor.name!r} does not end within the file: it was cut short")


@cache
def _ggml_types() -> dict[int, tuple[str, int, int]]:
    """By number: a type's name, the elements of its block, and the bytes of one."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        missing = error.name or "gguf"
        raise ModelLoadError(needs_engine_extra("reading GGUF files", missing)) from error
    return {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}


def _check_layers(path: Path, header: GGUFHeader) -> None:
    """Raise unless the file holds as many layers as it declares."""
    if header.values.get("split.count", 0) not in (0, 1):
        raise ModelLoadError(
            f"{path} is one of {header.values['split.count']} files of a model, which have to be "
            "merged first: llama-gguf-split --merge FIRST_FILE NEW_FILE"
        )
    architecture = header.values.get("general.architecture")
    declared = header.values.get(f"{architecture}.block_count")
    found = {int(match[1]) for tensor in header.tensors if (match := _LAYER.match(tensor.name))}
    if found != set(range(len(found))) or declared != len(found):
        raise ModelLoadError(
            f"the GGUF file {path} declares {declared} layers of the architecture "
            f"{architecture!r} and holds the tensors of {len(found)}: it is damaged or was cut, "
            "get it again"
        )


CONVERSION_VERSION = 1
"""Part of the name of every converted folder: raise it when the conversion changes."""

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def converted_gguf(path: Path) -> Path:
    """The safetensors folder for a GGUF file, converted on first use.

    The folder's name depends on the file's absolute path, size and time of change. It keeps the
    number format of the file; quantised weights become float16, whose 11 bits are more than any of
    them has. Raises `ModelLoadError` for a file that is no GGUF, is damaged, or of an unknown
    architecture, and if the disk has too little space.
    """
    with load_errors(f"{path} cannot be read"):
        status = path.stat()
        identity = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{CONVERSION_VERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_root() / "models" / f"{path.stem[:100]}-{key}-own"
    return convert_once(path, target, label=path.name)


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


def _is_damaged(folder: Path) -> bool:
    """True if a converted folder is incomplete."""
    try:
        check_weights(folder)
        json.loads((folder / "config.json").read_bytes())
    except (ModelLoadError, OSError, ValueError):
        return True
    return not (folder / "tokenizer_config.json").is_file()


def _convert(path: Path, folder: Path, header: GGUFHeader, dtype: str) -> None:
    """Dequantise to `dtype` and save model and tokenizer to `folder`."""
    with quiet_transformers():
        model, tokenizer = _read(path, header, dtype)
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
            tokenizer.save_pretrained(folder)
            if header.main_type not in _PLAIN and dtype != "float32":
                _declare_bfloat16(folder / "config.json")


def _read(path: Path, header: GGUFHeader, dtype: str) -> tuple[Any, Any]:
    """The model and the tokenizer in a GGUF file.

    It is read through a link in a separate folder, so files beside it are ignored.
    """
    from transformers import AutoTokenizer

    way_out = (
        "; it may be damaged (then download it again) or of an architecture that transformers "
        "cannot read"
    )
    with (
        tempfile.TemporaryDirectory(prefix="pyengine-") as alone,
        load_errors(f"the GGUF file {path} could not be converted", way_out=way_out),
    ):
        link = Path(alone) / path.name
        link.symlink_to(path.resolve())
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                alone, gguf_file=path.name, trust_remote_code=False
            )
            _refuse_other_size(link, path, header)
            return _dequantised(link, path, dtype), tokenizer
        except ImportError as error:
            missing = error.name or "gguf"
            raise ModelLoadError(needs_engine_extra("reading GGUF files", missing)) from error


def _refuse_other_size(link: Path, path: Path, header: GGUFHeader) -> None:
    """Raise if the model that the header describes is much larger than the file.

    Up to twice as many weights are accepted: this configuration does not say if the output shares
    its weights with the embedding.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(link.parent, gguf_file=link.name, trust_remote_code=False)
    num_weights = sum(parameter.numel() for parameter in empty_model(config).parameters())
    if num_weights > 2 * header.num_elements:
        raise ModelLoadError(
            f"{path} describes a model of {num_weights} weights and holds {header.num_elements}: "
            "it is damaged or was cut, get it again"
        )


def _dequantised(link: Path, path: Path, dtype: str) -> Any:
    """The model in a GGUF file with weights of `dtype`; bfloat16 if float16 cannot hold them."""
    import torch
    from transformers import AutoModelForCausalLM

    loading: Any = AutoModelForCausalLM.from_pretrained(
        link.parent,
        gguf_file=link.name,
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
        return _dequantised(link, path, "bfloat16")
    if bad:
        raise ModelLoadError(
            f"{path}: the weights {bad[0]} hold NaN or infinity ({len(bad)} tensors do): it is "
            "damaged, get it again"
        )
    return model


def _declare_bfloat16(config: Path) -> None:
    """Declare the model's dtype as bfloat16, which has the range that float16 lacks."""
    settings = json.loads(config.read_bytes())
    settings["dtype"] = "bfloat16"
    config.write_text(json.dumps(settings, indent=2))
