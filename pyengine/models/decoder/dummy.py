"""Decoders with dummy weights: the shapes of a configuration, without its files.

For measurements without the weights of a model (`load_format="dummy"`).
"""

from pathlib import Path
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.config import DRAWN, check_sizes
from pyengine.models.decoder.checkpoint import StoredTensor, Tensors
from pyengine.models.decoder.decoder import Decoder
from pyengine.models.decoder.dummy_numbers import DummyStored
from pyengine.models.decoder.loading import OpenedModel, names_of, spec_of
from pyengine.models.decoder.spec import DecoderSpec
from pyengine.models.decoder.weights import NoKernels, Weights
from pyengine.models.transformers_calls import read_object
from pyengine.utils.validation import shown

_FORMATS = {"bfloat16": "BF16", "float16": "F16"}
"""The formats of files, by the number format that a configuration names; else F32."""


class DummyTensors(Tensors):
    """A tensor for every requested name and shape, in the `number_format`."""

    def __init__(self, number_format: str = "F32") -> None:
        super().__init__({}, "dummy weights")
        self._format = number_format
        self.shapes: dict[str, tuple[int, ...]] = {}
        """The shapes of the requested tensors."""

    def take(self, name: str, *shapes: tuple[int, ...]) -> StoredTensor:
        """See `Tensors.take`; no tensor is missing."""
        if self.has(name):  # by an update
            return super().take(name, *shapes)
        self.shapes[name] = shapes[0]
        return DummyStored(Path(), name, self._format, shapes[0], 0)


def open_dummy(folder: Path) -> OpenedModel:
    """The model of the configuration in `folder`, with dummy weights.

    They are of the number format that the configuration names. Raises `ModelLoadError` as
    `read_spec`, for sizes that no model has, and for quantised weights.
    """
    path = folder / "config.json"
    values = read_object(path)
    refuse_quantised(values.pop("quantization_config", None), path)
    check_sizes(values, DRAWN, path)
    spec = spec_of(values, str(path))
    tensors = DummyTensors(_FORMATS.get(spec.saved_dtype or "", "F32"))
    return OpenedModel(spec, _weights(spec, tensors))


def refuse_quantised(packing: Any, path: Path) -> None:
    """Raise `ModelLoadError` if `packing`, the quantization_config in `path`, is not None."""
    if packing is None:
        return
    method = packing.get("quant_method") if isinstance(packing, dict) else packing
    raise ModelLoadError(
        f"{path} has a quantization_config ({shown(method)}), and load_format='dummy' draws "
        "floating-point weights: give a folder with a copy of config.json without this entry; the "
        "setting quantization then quantises the weights"
    )


def dummy_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that a decoder of `spec` reads; makes none of them."""
    tensors = DummyTensors()
    Decoder(spec, _weights(spec, tensors))
    return tensors.shapes


def _weights(spec: DecoderSpec, tensors: DummyTensors) -> Weights:
    return Weights(tensors, names_of(spec), NoKernels())
