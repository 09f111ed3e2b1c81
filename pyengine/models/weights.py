"""Safetensors files are checked before they are mapped: a short one is named, not crashed on."""

import json
import struct
from pathlib import Path

from pyengine.core.errors import ModelLoadError

_HEADER_SIZE = struct.Struct("<Q")


def check_weights(folder: Path) -> None:
    """Raise `ModelLoadError` unless `folder` holds whole safetensors files.

    Compares each file's size with what its header declares, and, for a model in several
    files, the files with the index. Reads headers only.
    Layout: https://github.com/huggingface/safetensors#format
    """
    files = sorted(folder.glob("*.safetensors"))
    for index in sorted(folder.glob("*.safetensors.index.json")):
        missing = sorted(_indexed_files(index) - {file.name for file in files})
        if missing:
            raise ModelLoadError(
                f"{index} names weights that are not there: {', '.join(missing)}; "
                "download the model again"
            )
    if not files:
        raise ModelLoadError(
            f"{folder} holds no .safetensors file: is it a model folder? "
            "(weights in other formats have to be converted first)"
        )
    for file in files:
        expected, found = _declared_size(file), file.stat().st_size
        if found != expected:
            raise ModelLoadError(
                f"{file} is {'truncated' if found < expected else 'damaged'}: its header declares "
                f"{expected} bytes, the file has {found}; delete it and get it again"
            )


def _indexed_files(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{index} is damaged: {error}; download the model again") from error


def _declared_size(file: Path) -> int:
    """Bytes that a safetensors file must have: length field, header, tensors."""
    with file.open("rb") as stream:
        head = stream.read(_HEADER_SIZE.size)
        length = _HEADER_SIZE.unpack(head)[0] if len(head) == _HEADER_SIZE.size else 0
        available = file.stat().st_size - _HEADER_SIZE.size
        if not 2 <= length <= available:
            raise ModelLoadError(
                f"{file} is truncated or no safetensors file: its header should take {length} "
                f"bytes, {max(0, available)} follow; delete it and get it again"
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        return _HEADER_SIZE.size + int(length) + max(ends, default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{file} is no safetensors file: its header is damaged ({error}); "
            "delete it and get it again"
        ) from error
