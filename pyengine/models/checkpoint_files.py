"""Checks of safetensors files, by their headers."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.transformers_calls import read_object


def readable_size(num_bytes: int) -> str:
    """A number of bytes for people: `1.3 GB`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 1e3:.1f} kB"


_HEADER_SIZE = struct.Struct("<Q")


_LONGEST_HEADER = 100_000_000
"""Bytes of a header: the limit of the library safetensors."""
_MAX_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in the header of a file; `dtype` as safetensors writes it: `BF16`.

    In safetensors files its bytes are from `start` to `end` in the file at `path`.
    """

    dtype: str
    shape: tuple[int, ...]
    path: Path = Path()
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class WeightHeaders:
    """The headers of a folder's safetensors files; `num_bytes` of all tensors."""

    tensors: dict[str, TensorHeader]
    num_bytes: int

    @property
    def num_bits(self) -> int:
        """Bits of all files, the upper bound of every size of a model in them."""
        return 8 * self.num_bytes

    @property
    def longest(self) -> int:
        """The largest dimension of any tensor."""
        return max((size for tensor in self.tensors.values() for size in tensor.shape), default=0)


def check_weights(folder: Path) -> WeightHeaders:
    """Return the headers of `folder`; `ModelLoadError` unless it has complete safetensors files.

    Compares each file's size with what its header declares, and, for a model in several
    files, the files with the index. Reads headers only.
    Layout: https://github.com/huggingface/safetensors#format
    """
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    for index in sorted(folder.glob("*.safetensors.index.json")):
        indexed = _indexed_files(index)
        outside = sorted(name for name in indexed if Path(name).name != name)
        if outside:
            raise ModelLoadError(
                f"{index} names weights outside of its folder: {outside[0]!r}; pyengine reads "
                "weights beside the index only"
            )
        missing = sorted(indexed - {file.name for file in files})
        if missing:
            raise ModelLoadError(
                f"{index} names missing weights: {', '.join(missing)}; download the model again"
            )
    if not files:
        raise _no_safetensors(folder)
    tensors: dict[str, TensorHeader] = {}
    num_bytes = 0
    for file in _of_the_model(folder, files):
        header = checked_file(file)
        if twice := header.keys() & tensors.keys():
            name = min(twice)
            raise ModelLoadError(
                f"{tensors[name].path} and {file} both have {name}: the folder holds the weights "
                "twice; remove the files of one copy"
            )
        tensors.update(header)
        num_bytes += file.stat().st_size
    return WeightHeaders(tensors, num_bytes)


def checked_file(file: Path) -> dict[str, TensorHeader]:
    """The tensors in the header of a safetensors file; `ModelLoadError` unless it is complete."""
    header, expected = _header(file)
    size = file.stat().st_size
    if size != expected:
        raise ModelLoadError(
            f"{file} is {'truncated' if size < expected else 'damaged'}: its header declares "
            f"{expected} bytes, the file has {size}; delete it and get it again"
        )
    return header


def _of_the_model(folder: Path, files: list[Path]) -> list[Path]:
    """The files that make up the model: `model.safetensors`, those of the index, or all.

    Folders of the hub hold further copies (`consolidated.safetensors`) and adapters.
    """
    whole = folder / "model.safetensors"
    if whole in files:
        return [whole]
    index = folder / "model.safetensors.index.json"
    names = _indexed_files(index) if index.is_file() else {file.name for file in files}
    return [file for file in files if file.name in names]


def check_number_formats(headers: WeightHeaders, folder: Path, *, quantised: bool) -> None:
    """Raise `ModelLoadError` for weights that are not floating-point numbers.

    Complex ones would lose their imaginary part. Integers are the codes of a quantised model, and
    need its quantisation configuration.
    """
    for name, tensor in headers.tensors.items():
        if tensor.dtype.startswith("C"):
            raise ModelLoadError(
                f"the weights in {folder} are complex numbers ({name} is {tensor.dtype}): no model "
                "of transformers computes with them"
            )
        if (
            not quantised
            and name.endswith(".weight")
            and tensor.dtype[0] in "IUB"
            and tensor.dtype != "BF16"
        ):
            raise ModelLoadError(
                f"the weights in {folder} are integers ({name} is {tensor.dtype}), and config.json "
                "has no quantization_config that says what they stand for"
            )


def _no_safetensors(folder: Path) -> ModelLoadError:
    pickled = sorted(
        path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}")
    )
    if pickled:
        return ModelLoadError(
            f"{folder} holds its weights as pickles ({', '.join(pickled[:3])}), which can run code "
            "and are never opened; if you trust them, convert them once: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
        )
    return ModelLoadError(
        f"{folder} holds no .safetensors file: is it a model folder? "
        "(weights in other formats have to be converted first)"
    )


def _indexed_files(index: Path) -> set[str]:
    try:
        names = set(read_object(index)["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError("weight_map holds a value that is not a file name")
    except (KeyError, AttributeError, TypeError, ModelLoadError) as error:
        raise ModelLoadError(f"{index} is damaged: {error}; download the model again") from error
    return names


def _header(file: Path) -> tuple[dict[str, TensorHeader], int]:
    """The tensors of a safetensors file, and the bytes it must have: length, header, tensors."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEADER_SIZE.size)
            length = _HEADER_SIZE.unpack(head)[0] if len(head) == _HEADER_SIZE.size else 0
            available = file.stat().st_size - _HEADER_SIZE.size
            fits = 2 <= length <= min(available, _LONGEST_HEADER)
            text = stream.read(length) if fits else b""
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not text:
        raise ModelLoadError(
            f"{file} is truncated or not a safetensors file: its header should take {length} "
            f"bytes, {max(0, available)} follow; delete it and get it again"
        )
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        data = _HEADER_SIZE.size + int(length)
        tensors = {
            name: _tensor_header(file, data, name, **entry) for name, entry in entries.items()
        }
        return tensors, max((tensor.end for tensor in tensors.values()), default=data)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelLoadError(
            f"{file} is not a safetensors file: its header is damaged ({error}); "
            "delete it and get it again"
        ) from error


def _tensor_header(
    file: Path, data: int, name: str, dtype: Any, shape: Any, data_offsets: Any
) -> TensorHeader:
    """One entry of a header, whose offsets are from `data` on."""
    if not isinstance(dtype, str):
        raise ValueError(f"{name[:200]!r} is of type {dtype!r:.80}")
    for field, numbers in (("shape", shape), ("data_offsets", data_offsets)):
        is_list = isinstance(numbers, list) and len(numbers) <= _MAX_DIMENSIONS
        if not is_list or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{name[:200]!r} has the {field} {numbers!r:.80}")
    start, end = data_offsets
    if start > end:
        raise ValueError(f"{name[:200]!r} has the data_offsets {data_offsets}")
    return TensorHeader(dtype, tuple(shape), file, data + start, data + end)
