"""From a folder to a spec, and to a decoder with its weights, without transformers."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.config import check_sizes
from pyengine.models.decoder.checkpoint import Checkpoint, Tensors
from pyengine.models.decoder.decoder import Decoder
from pyengine.models.decoder.families import NEUTRAL, NO_EFFECT, TABLE, Family
from pyengine.models.decoder.kernels import Kernels
from pyengine.models.decoder.names import Names
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import DecoderSpec
from pyengine.models.decoder.weights import NoKernels, Weights
from pyengine.models.transformers_calls import read_object
from pyengine.utils.validation import shown


def family_of(folder: Path) -> Family | None:
    """The row of the table for the model in `folder`; None: its family is not in the table."""
    model_type = read_object(folder / "config.json").get("model_type")
    return TABLE.get(model_type) if isinstance(model_type, str) else None


def read_spec(folder: Path) -> DecoderSpec:
    """The spec of the model in `folder`, whether its weights are packed or not.

    Raises `ModelLoadError` for a family that is not in the table, and for a key that is missing,
    has a value that it cannot have, or is unknown.
    """
    path = folder / "config.json"
    values = read_object(path)
    values.pop("quantization_config", None)
    return spec_of(values, str(path))


def spec_of(values: dict[str, Any], where: str) -> DecoderSpec:
    """The spec of a configuration's dictionary; `where` it is from, for messages."""
    model_type = values.get("model_type")
    family = TABLE.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelLoadError(
            f"{where} says model_type={shown(model_type)}, which pyengine has no decoder for: "
            f"there are {', '.join(sorted(TABLE))}"
        )
    try:
        settings = Settings(values, where, family.defaults, family.aliases)
        spec = family.spec(settings)
    except ModelLoadError as error:
        if str(error).startswith(where):
            raise
        raise ModelLoadError(f"{where} cannot be used: {error}") from error
    except (ArithmeticError, ValueError) as error:
        raise ModelLoadError(f"{where} has numbers that no model has: {error}") from error
    settings.pass_over({**NO_EFFECT, **family.no_effect})
    settings.pass_over_neutral(NEUTRAL)
    settings.finish()
    return spec


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose tensors are all there; none of them is read yet.

    `formats` are those of quantised weights, in words; empty: all are floats.
    """

    spec: DecoderSpec
    weights: Weights
    formats: str = ""

    def decoder(self, kernels: Kernels) -> Decoder:
        """The decoder, laid out by `kernels`; one tensor of a file is read at a time.

        Raises `ModelLoadError` for weights that are not finite.
        """
        return Decoder(self.spec, self.weights.with_kernels(kernels))


def open_model(folder: Path) -> OpenedModel:
    """The model in `folder`, with its tensors; reads headers only.

    Raises `ModelLoadError` as `read_spec`, and for tensors that are missing, of other shapes or
    formats, or not part of the model, by name.
    """
    path = folder / "config.json"
    values = read_object(path)
    packing = values.pop("quantization_config", None)
    checkpoint = Checkpoint(folder) if packing is None else _packed(folder, packing)
    check_sizes(values, checkpoint.headers, path)
    spec = spec_of(values, str(path))
    weights = checked_weights(spec, TABLE[spec.family].names, checkpoint)
    return OpenedModel(spec, weights, checkpoint.formats)


def _packed(folder: Path, packing: Any) -> Checkpoint:
    """The tensors of a folder whose linear layers are packed as a `quantization_config` says."""
    from pyengine.models.decoder.packed import PackedCheckpoint  # imports torch

    return PackedCheckpoint(folder, packing)


def checked_weights(spec: DecoderSpec, names: Names, tensors: Tensors) -> Weights:
    """The weights of a decoder, all of whose tensors are there; reads none of them.

    Raises `ModelLoadError` for tensors that are missing, of other shapes or formats, or not part of
    the model.
    """
    weights = Weights(tensors.named_from(names.base), names, NoKernels())
    Decoder(spec, weights)
    known = {**names.no_effect, **tensors.no_effect}
    for layer in range(len(spec.layers), len(spec.layers) + spec.mtp_layers):
        known[re.escape(names.layer.format(layer)) + ".*"] = "layers for speculation, read by it"
    tensors.finish(known)
    return weights
