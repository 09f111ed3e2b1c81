"""Decoders with made-up weights: the shapes of a configuration, without its files.

For measurements of models whose weights are not there (`load_format="dummy"`).
"""

from pathlib import Path

from pyengine.models.decoder.checkpoint import StoredTensor, Tensors
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.loading import OpenedModel, read_spec
from pyengine.models.decoder.made_up import DummyStored
from pyengine.models.decoder.weights import NoKernels, Weights


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
