"""Decoders with made-up weights: the shapes of a configuration, without its files.

For measurements of models whose weights are not there (`load_format="dummy"`). Numbers are the same
in every process, and small enough that hidden states stay finite.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyengine.models.decoder.checkpoint import Array, StoredTensor, Tensors
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.loading import OpenedModel, read_spec
from pyengine.models.decoder.weights import NoKernels, Weights

_DIFFERENT = 1 << 20
"""Numbers after which those of a tensor repeat: making more of them takes longer than a load."""


@dataclass(frozen=True, slots=True)
class DummyStored(StoredTensor):
    """A tensor of made-up numbers: of a matrix random, of a vector near 1."""

    def read(self) -> Array:
        """The tensor in float32."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {self.start}".encode()))
        count = min(_DIFFERENT, int(np.prod(self.shape, dtype=np.int64)))
        numbers = rng.standard_normal(count, dtype=np.float32)
        numbers *= np.float32(max(self.shape[-1], 1) ** -0.5)
        found: Array = np.resize(numbers, self.shape)
        if len(self.shape) == 1:
            found += 1
        found = found.T if self.is_transposed else found
        return found if self.rows is None else found[self.rows]


class DummyTensors(Tensors):
    """Every tensor that is asked for, of the shape that is asked for."""

    def __init__(self) -> None:
        super().__init__({}, "made-up weights")

    def take(self, name: str, *shapes: tuple[int, ...]) -> StoredTensor:
        """See `Tensors.take`; there is no tensor that is missing."""
        return DummyStored(Path(), name, "F32", shapes[0], 0)


def open_dummy(folder: Path) -> OpenedModel:
    """The model of the configuration in `folder`, with made-up floats.

    Raises `ModelLoadError` as `read_spec`.
    """
    spec = read_spec(folder)
    return OpenedModel(spec, Weights(DummyTensors(), TABLE[spec.family].names, NoKernels()))
