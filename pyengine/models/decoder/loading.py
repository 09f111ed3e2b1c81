"""From a folder to a spec, and to a decoder with its weights, without transformers."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.adapters import AdapterLimits
from pyengine.models.config import check_sizes
from pyengine.models.decoder.adapters import AdapterTables
from pyengine.models.decoder.checkpoint import Checkpoint, Tensors
from pyengine.models.decoder.decoder import Decoder, Unchanged
from pyengine.models.decoder.families import NEUTRAL, NO_EFFECT, TABLE, Family
from pyengine.models.decoder.kernels import Kernels
from pyengine.models.decoder.mtp import MTPLayers
from pyengine.models.decoder.names import OTHER_MTP_LAYERS, Names
from pyengine.models.decoder.packed import PackedCheckpoint, layout_of
from pyengine.models.decoder.ranks import WHOLE, Rank, divided
from pyengine.models.decoder.settings import BeyondTableError, Settings
from pyengine.models.decoder.spec import DecoderSpec
from pyengine.models.decoder.weights import NoKernels, Weights
from pyengine.models.pooling import (
    Classifier,
    has_classifier,
    is_for_pooling,
    read_classifier,
)
from pyengine.models.transformers_calls import read_object
from pyengine.utils.validation import shown


def family_of(folder: Path) -> Family | None:
    """The row of the table for the model in `folder`; None: its family is not in the table."""
    model_type = read_object(folder / "config.json").get("model_type")
    return TABLE.get(model_type) if isinstance(model_type, str) else None


def fallback_reason(folder: Path) -> str | None:
    """Why the model in `folder` runs as transformers' module; None: in a decoder of ours.

    Raises `ModelLoadError` for a configuration that cannot be read.
    """
    values = read_object(folder / "config.json")
    if family_of(folder) is None:
        return f"{shown(values.get('model_type'))} is not in the table of families"
    try:
        packing = values.pop("quantization_config", None)
        if packing is not None:
            layout_of(packing, folder / "config.json")
        spec_of(values, "config.json")
    except BeyondTableError as error:
        return str(error)
    except ModelLoadError:
        return None  # raised again, where the tensors are known, too
    return None


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


def names_of(spec: DecoderSpec) -> Names:
    """The names of a family's tensors in safetensors files."""
    return TABLE[spec.family].names


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose tensors all exist; none is read yet.

    `formats` are those of quantised weights, as text; empty: all are floats. `classifier` is in
    place of a head, if there is one.
    """

    spec: DecoderSpec
    weights: Weights
    formats: str = ""
    classifier: Classifier | None = None
    has_head: bool = True
    """False: the files have no head, and the decoder takes the embedding in its place."""
    pair_size: int | None = None
    """See `AdapterTables.pair_size`."""

    def decoder(
        self,
        kernels: Kernels,
        rank: Rank = WHOLE,
        adapters: AdapterTables | None = None,
        unchanged: Unchanged | None = None,
    ) -> Decoder:
        """The decoder, laid out by `kernels`, or the part of a `rank` of it.

        With `adapters` its linear layers have these tables. What is `unchanged` is not read. One
        tensor of a file is read at a time; a rank reads its part. Raises `ModelLoadError` for
        weights that are not finite, and `ConfigurationError` if the ranks cannot divide the model.
        """
        weights = self.weights.with_kernels(kernels, rank)
        if adapters is not None:
            weights = weights.with_adapters(adapters)
        return Decoder(divided(self.spec, rank.size), weights, unchanged)

    def adapter_tables(self, kernels: Kernels, limits: AdapterLimits) -> AdapterTables:
        """Tables for adapters of the linear layers that `kernels` lay out."""
        return AdapterTables(kernels.adapter_table, limits, names_of(self.spec), self.pair_size)

    def mtp_layers(self, decoder: Decoder) -> MTPLayers:
        """The layers for multi-token prediction, for a model that was opened with them.

        They have the kernels and the rank of the model's decoder. Raises as `decoder`.
        """
        return MTPLayers(decoder, self.weights.with_kernels(decoder.kernels, decoder.rank))


def open_model(folder: Path, *, with_mtp_layers: bool = False) -> OpenedModel:
    """The model in `folder`, with its tensors; reads headers only.

    Raises `ModelLoadError` as `read_spec`, and for tensors that are missing, of other shapes or
    formats, or not part of the model, by name. Those of layers for multi-token prediction are
    accepted as they are, or with `with_mtp_layers` are part of the model; then raises
    `ConfigurationError` for a model without such layers.
    """
    path = folder / "config.json"
    values = read_object(path)
    packing = values.pop("quantization_config", None)
    checkpoint = Checkpoint(folder) if packing is None else PackedCheckpoint(folder, packing)
    check_sizes(values, checkpoint.headers, path)
    spec = spec_of(values, str(path))
    names = names_of(spec)
    if with_mtp_layers:
        _check_mtp_layers(folder, spec, names, checkpoint)
    classifier = None
    if has_classifier(values):
        classifier = read_classifier(values, checkpoint, str(path), spec.hidden_size)
    has_head = spec.is_tied or _has_head(names, checkpoint)
    if not has_head and (classifier is not None or is_for_pooling(folder, values)):
        spec = replace(spec, is_tied=True)
    weights = checked_weights(spec, names, checkpoint, with_mtp_layers=with_mtp_layers)
    return OpenedModel(spec, weights, checkpoint.formats, classifier, has_head)


def _has_head(names: Names, tensors: Tensors) -> bool:
    return Weights(tensors.named_from(names.base), names, NoKernels()).has("head")


def no_mtp_layers(name: str, layers: int) -> ConfigurationError:
    """The error for a model of `layers` layers, which has none for multi-token prediction."""
    return ConfigurationError(
        f"speculation='mtp': {name} has no MTP layers, which predict further tokens: neither its "
        f"configuration nor its files go beyond its {layers} layers; use 'ngram', 'suffix', or none"
    )


def _check_mtp_layers(folder: Path, spec: DecoderSpec, names: Names, tensors: Tensors) -> None:
    layers = _mtp_layers(spec)
    if any(tensors.first_of(re.escape(names.layer.format(layer))) for layer in layers):
        return
    other = tensors.first_of(OTHER_MTP_LAYERS)
    if other is None:
        raise no_mtp_layers(str(folder), layers.start)
    known = sorted(name for name in TABLE if "mtp_projection" in TABLE[name].names.inside)
    raise ConfigurationError(
        f"speculation='mtp': the MTP layers in {folder} ({other}) are of another form than those "
        f"of {', '.join(known)}, which pyengine runs; use 'ngram', 'suffix', or none"
    )


def _mtp_layers(spec: DecoderSpec) -> range:
    """The numbers of the layers for multi-token prediction, which follow the last one in files."""
    first = len(spec.layers)
    return range(first, first + len(spec.mtp_layers))


def checked_weights(
    spec: DecoderSpec, names: Names, tensors: Tensors, *, with_mtp_layers: bool = False
) -> Weights:
    """The weights of a decoder, whose tensors all exist; reads none of them.

    Raises `ModelLoadError` for tensors that are missing, unexpected, or of other shapes or formats.
    """
    weights = Weights(tensors.named_from(names.base), names, NoKernels())
    decoder = Decoder(spec, weights)
    known = {**names.no_effect, **tensors.no_effect}
    if with_mtp_layers:
        MTPLayers(decoder, weights)
    else:
        for layer in _mtp_layers(spec):
            if weights.of_layer(layer).has("mtp_projection"):
                known[re.escape(names.layer.format(layer)) + ".*"] = "layers for speculation"
    tensors.finish(known)
    return weights
