"""New weights for a decoder that runs: of a folder, or tensors by name.

    folder or tensors -> OpenedModel, checked -> Decoder beside the old one -> in its place

Layers that no given tensor belongs to are those of the old decoder. The other ones are laid out
anew, from the given tensors and, for the rest, from the files.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pyengine.errors import ModelLoadError, WeightUpdateError
from pyengine.models.checkpoint_files import check_weights
from pyengine.models.decoder.adapters import AdapterTables
from pyengine.models.decoder.checkpoint import Array, StoredTensor
from pyengine.models.decoder.decoder import Decoder, Unchanged
from pyengine.models.decoder.kernels import Kernels
from pyengine.models.decoder.loading import OpenedModel, checked_weights, open_model
from pyengine.models.decoder.mtp import MTPLayers
from pyengine.models.decoder.spec import DecoderSpec
from pyengine.models.gguf_file import file_digest
from pyengine.utils.tensors import array_of
from pyengine.utils.validation import shown

NamedTensors: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Tensors of torch or arrays of NumPy, of floats, by their names in the checkpoint."""

_FORMATS = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16"}
"""Formats of safetensors by the names of NumPy's types; uint16 are the bits of bfloat16."""


@dataclass(slots=True)
class _Given:
    """The numbers of a given tensor, until they are laid out."""

    array: Array | None


@dataclass(frozen=True, slots=True)
class GivenTensor(StoredTensor):
    """A tensor of an update, in memory: it can be read until `release`."""

    numbers: _Given = field(default_factory=lambda: _Given(None), repr=False, compare=False)

    def read(self) -> Array:
        """See `StoredTensor.read`; the array is not to be written."""
        if self.numbers.array is None:
            raise _released([self.name])
        flat = self.numbers.array.reshape(-1)
        start = self.start // flat.itemsize
        array = flat[start : start + int(np.prod(self.shape))].reshape(self.shape)
        return self.cut(array.T if self.is_transposed else array)

    @property
    def is_released(self) -> bool:
        """True if its numbers are kept in the layout of the decoder alone."""
        return self.numbers.array is None

    def release(self) -> None:
        """Drop the numbers."""
        self.numbers.array = None


def _is_released(tensor: StoredTensor) -> bool:
    """True if only a decoder has the numbers of a tensor."""
    return isinstance(tensor, GivenTensor) and tensor.is_released


def _released(names: list[str]) -> WeightUpdateError:
    return WeightUpdateError(
        f"give {', '.join(names)} too: an earlier update has changed them, and a layer of which "
        "any tensor changes is laid out anew"
    )


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A decoder with new weights, which does not run yet.

    It `is_whole` if all weights are new. `digests` are those of the files or of the given tensors,
    if they were asked for.
    """

    opened: OpenedModel
    decoder: Decoder
    mtp_layers: MTPLayers | None
    is_whole: bool
    digests: tuple[bytes, ...] = ()

    def release(self) -> None:
        """Drop the numbers of given tensors: they are laid out."""
        for tensor in self.opened.weights.tensors:
            if isinstance(tensor, GivenTensor):
                tensor.release()


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where the weights of a decoder are from, and how new ones are laid out.

    `refusal` is why they cannot be replaced; empty: they can.
    """

    opened: OpenedModel
    kernels: Kernels
    adapters: AdapterTables | None = None
    with_mtp_layers: bool = False
    refusal: str = ""

    def staged(
        self,
        weights: "NamedTensors | str | Path",
        old: Decoder | None,
        *,
        with_digests: bool = False,
    ) -> StagedWeights:
        """A decoder with new weights beside the `old` one; raises `WeightUpdateError`.

        Given tensors are read until this returns. Without an old one all weights are new, or of
        files.
        """
        if self.refusal:
            raise WeightUpdateError(self.refusal)
        try:
            if isinstance(weights, str | Path):
                return self._of_folder(Path(weights), with_digests)
            return self._of_tensors(weights, old, with_digests)
        except ModelLoadError as error:
            raise WeightUpdateError(f"the weights are as before: {error}") from error

    def reread(self) -> StagedWeights:
        """The weights once more, from their files."""
        lost = [tensor.name for tensor in self.opened.weights.tensors if _is_released(tensor)]
        if lost:
            raise WeightUpdateError(
                f"{lost[0]} and {len(lost) - 1} more are of an update by name, which no file has: "
                "give wake_up(weights=...) all weights, as a folder or by name"
            )
        return self._laid_out(self.opened, None, is_whole=True)

    def _of_folder(self, folder: Path, with_digests: bool) -> StagedWeights:
        if not (folder / "config.json").is_file():
            raise WeightUpdateError(
                f"{folder} is not a folder with a config.json and safetensors files: give the "
                "folder that the trainer has saved, or tensors by name"
            )
        opened = open_model(folder, with_mtp_layers=self.with_mtp_layers)
        differences = _differences(self.opened.spec, opened.spec)
        if differences:
            raise WeightUpdateError(
                f"{folder} holds another model: {differences}; start an engine with it"
            )
        if opened.formats != self.opened.formats:
            raise WeightUpdateError(
                f"the weights in {folder} are {opened.formats or 'floats'}, those of the engine "
                f"{self.opened.formats or 'floats'}: give the same format"
            )
        digests: tuple[bytes, ...] = ()
        if with_digests:
            files = {header.path for header in check_weights(folder).tensors.values()}
            digests = tuple(file_digest(file) for file in sorted(files))
        return self._laid_out(opened, None, is_whole=True, digests=digests)

    def _of_tensors(
        self, named: NamedTensors, old: Decoder | None, with_digests: bool
    ) -> StagedWeights:
        if self.opened.formats:
            raise WeightUpdateError(
                f"the weights of the engine are quantised in their files ({self.opened.formats}), "
                "so tensors of floats cannot replace them: give a folder in the same format, or "
                "start with a folder of floats and the setting quantization"
            )
        spec, weights = self.opened.spec, self.opened.weights
        given = dict(self._given(named))
        if not given:
            raise WeightUpdateError("no tensors were given: name those that change")
        tensors = weights.tensors.with_others(given)
        checked = checked_weights(
            spec, weights.names, tensors, with_mtp_layers=self.with_mtp_layers
        )
        opened = OpenedModel(spec, checked)
        changed = self._changed(given, everything=old is None)
        lost = [
            tensor.name
            for tensor in tensors
            if _is_released(tensor) and self._layer_of(tensor.name) in changed
        ]
        if lost:
            raise _released(sorted(lost))
        layers = frozenset(range(len(spec.layers))) - changed
        unchanged = None if old is None else Unchanged(old, layers, outside=None not in changed)
        digests = (_digest(given),) if with_digests else ()
        return self._laid_out(opened, unchanged, is_whole=False, digests=digests)

    def _laid_out(
        self,
        opened: OpenedModel,
        unchanged: Unchanged | None,
        *,
        is_whole: bool,
        digests: tuple[bytes, ...] = (),
    ) -> StagedWeights:
        decoder = opened.decoder(self.kernels, adapters=self.adapters, unchanged=unchanged)
        mtp = opened.mtp_layers(decoder) if self.with_mtp_layers else None
        return StagedWeights(opened, decoder, mtp, is_whole, digests)

    def _changed(self, given: Iterable[str], *, everything: bool) -> set[int | None]:
        """The layers to lay out anew, by number; None: what is outside of them."""
        spec = self.opened.spec
        if everything:
            return {None, *range(len(spec.layers) + len(spec.mtp_layers))}
        changed = {self._layer_of(name) for name in given}
        for number, layer in enumerate(spec.layers):
            source = None if layer.attention is None else layer.attention.shares
            if source is not None and source in changed:
                changed.add(number)  # it has norms of the other layer
        return changed

    def _given(self, named: NamedTensors) -> Iterator[tuple[str, StoredTensor]]:
        """The given tensors by their names in the files, checked by type."""
        base = self.opened.weights.names.base
        tensors = self.opened.weights.tensors
        pairs = named.items() if isinstance(named, Mapping) else named
        seen = set()
        for pair in pairs:
            try:
                name, numbers = pair
            except (TypeError, ValueError):
                name = numbers = None
            if not isinstance(name, str):
                raise WeightUpdateError(
                    f"{shown(pair)} is no pair of a name and a tensor: give (name, tensor) pairs, "
                    "a mapping, or a folder"
                )
            if not tensors.has(name) and tensors.has(base + name):
                name = base + name
            if name in seen:
                raise WeightUpdateError(f"{name} is given twice: leave one out")
            seen.add(name)
            array, dtype = _as_array(name, numbers)
            yield (
                name,
                GivenTensor(Path("update"), name, dtype, array.shape, 0, numbers=_Given(array)),
            )

    def _layer_of(self, name: str) -> int | None:
        """The number of the layer that a tensor belongs to; None: it is outside of layers."""
        before, after = self.opened.weights.names.layer.split("{}")
        found = re.match(f"{re.escape(before)}([0-9]+){re.escape(after)}", name)
        return None if found is None else int(found[1])


def _as_array(name: str, numbers: Any) -> tuple[Array, str]:
    """The numbers of a given tensor on the host, and their format as safetensors names it."""
    if hasattr(numbers, "detach"):
        numbers = numbers.detach()
        if "float" in str(numbers.dtype):
            numbers = array_of(numbers.cpu().contiguous())
    elif getattr(numbers, "dtype", None) == np.uint16:
        numbers = None  # of torch's tensors it stands for bfloat16
    dtype = _FORMATS.get(str(getattr(numbers, "dtype", None)))
    if dtype is None or not isinstance(numbers, np.ndarray):
        raise WeightUpdateError(
            f"{name} is {shown(getattr(numbers, 'dtype', type(numbers).__name__))}: give a tensor "
            "of torch or an array of NumPy of float32, bfloat16 (torch), float16 or float64"
        )
    return np.ascontiguousarray(numbers), dtype


def _differences(spec: DecoderSpec, other: DecoderSpec) -> str:
    """The fields in which two specs differ, but for those that change no arithmetic."""
    names = [item.name for item in fields(spec) if item.name != "saved_dtype"]
    differing = [name for name in names if getattr(spec, name) != getattr(other, name)]
    return ", ".join(differing)


def _digest(given: Mapping[str, StoredTensor]) -> bytes:
    """A SHA-256 digest of tensors: their names, formats, shapes and numbers."""
    digest = sha256()
    for name, tensor in sorted(given.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape};".encode())
        digest.update(tensor.read().view(np.uint8).data)
    return digest.digest()


def copy_into(old: Any, new: Any) -> None:
    """Copy the tensors of a decoder or of MTP layers over torch into those of an older one.

    Addresses stay: graphs that were captured with it compute with the new numbers. Raises
    `WeightUpdateError` before any is changed if the two are not of the same tensors.
    """
    import torch

    targets: dict[Any, Any] = {}
    _pair(old, new, targets, set())
    with torch.inference_mode():
        for before, after in targets.items():
            before.copy_(after)


def _pair(old: Any, new: Any, targets: dict[Any, Any], seen: set[tuple[int, int]]) -> None:
    """Find the new tensor for each old one, in two objects of the same structure."""
    import torch

    if old is new or (id(old), id(new)) in seen:
        return
    seen.add((id(old), id(new)))
    if type(old) is not type(new):
        raise _other_structure(old, new)
    if isinstance(old, torch.Tensor):
        is_same = old.shape == new.shape and old.dtype == new.dtype
        if not is_same or targets.setdefault(old, new) is not new:
            raise _other_structure(old, new)
        return
    for before, after in zip(_parts(old), _parts(new), strict=True):
        _pair(before, after, targets, seen)


def _other_structure(old: Any, new: Any) -> WeightUpdateError:
    return WeightUpdateError(
        f"the new weights are laid out otherwise ({type(old).__name__}, {type(new).__name__}): the "
        "head is the embedding in one of them and a matrix of its own in the other; start an "
        "engine with them"
    )


def _parts(whole: Any) -> list[Any]:
    """The objects that an object of this package holds."""
    if isinstance(whole, list | tuple):
        return list(whole)
    if isinstance(whole, dict):
        return list(whole.values())
    if not type(whole).__module__.startswith("pyengine."):
        return []
    slots = [name for kind in type(whole).__mro__ for name in getattr(kind, "__slots__", ())]
    own = [getattr(whole, name) for name in slots if hasattr(whole, name)]
    return own + list(getattr(whole, "__dict__", {}).values())
