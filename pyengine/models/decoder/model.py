"""A decoder of ours as the runner calls it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyengine.attention.backend import AttentionMetadata, AttentionOptions, KernelOptions
from pyengine.attention.context import PagedContext
from pyengine.attention.cpu import CpuMetadata
from pyengine.attention.needs import LayerNeeds
from pyengine.cpu import CpuAttention
from pyengine.errors import WeightUpdateError
from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation
from pyengine.models.decoder.adapters import AdapterTables
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.decoder import Decoder
from pyengine.models.decoder.mtp import MTPLayers
from pyengine.models.decoder.spec import Attention, DecoderSpec, Layer
from pyengine.models.decoder.update import NamedTensors, StagedWeights, WeightSource, copy_into
from pyengine.utils.device_arrays import concatenated
from pyengine.utils.devices import Device
from pyengine.utils.tensors import array_of, tensor_of

if TYPE_CHECKING:
    from pyengine.attention.dispatch import CompiledModel


class DecoderModel:
    """See `Model`. Its MTP layers, if they were loaded, go with it: see `MTPModel`."""

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        mtp_layers: MTPLayers | None = None,
        source: WeightSource | None = None,
    ) -> None:
        """Without a `source` the weights cannot be replaced."""
        self._decoder, self.device, self._mtp_layers = decoder, device, mtp_layers
        self._source = source
        self.name = decoder.spec.family
        self.origin = f"pyengine ({decoder.spec.family})"
        self.settings = repr(decoder.spec)
        self.takes_arrays = isinstance(decoder.kernels, CpuKernels)

    def __call__(
        self, ids: Any, positions: Any, rows: Any, paged: "PagedContext | CompiledModel"
    ) -> Any:
        """See `Model`. In place of arrays, tensors on the CPU are taken, and give one."""
        states = slots = None
        if isinstance(paged, PagedContext):
            states, slots = paged.states, paged.adapter_slots
        if not self.takes_arrays or isinstance(ids, np.ndarray):
            return self._decoder(ids, positions, rows, self._adapted(paged), states, slots)
        own = array_of(ids), array_of(positions), array_of(rows)
        return tensor_of(self._decoder(*own, self._adapted(paged), states, slots))

    @property
    def adapters(self) -> AdapterTables | None:
        """The tables of adapters; None: it was loaded without."""
        return self._decoder.adapters

    def stage(
        self, weights: "NamedTensors | str | Path", *, with_digests: bool = False
    ) -> StagedWeights:
        """See `ReplaceableModel.stage`."""
        if self._source is None:
            raise WeightUpdateError("the weights of this model cannot be replaced")
        return self._source.staged(weights, self._decoder, with_digests=with_digests)

    def reread(self) -> StagedWeights:
        """The weights once more, from their files.

        Raises `WeightUpdateError` if no file has some of them.
        """
        assert self._source is not None
        return self._source.reread()

    def drop(self) -> None:
        """Drop the weights: no step may run before others replace them."""
        self._decoder = self._mtp_layers = None  # type: ignore[assignment]

    def replace(self, staged: StagedWeights) -> None:
        """See `ReplaceableModel.replace`."""
        assert self._source is not None
        if self.takes_arrays:
            self._decoder, self._mtp_layers = staged.decoder, staged.mtp_layers
        else:
            copy_into(self._decoder, staged.decoder)
            if self._mtp_layers is not None and staged.mtp_layers is not None:
                copy_into(self._mtp_layers, staged.mtp_layers)
        self._source = replace(self._source, opened=staged.opened)
        staged.release()

    def with_hidden(
        self, ids: Any, positions: Any, rows: Any, hidden_rows: Any, paged: PagedContext
    ) -> tuple[Any, Any]:
        """See `Model.with_hidden`."""
        decoder, count = self._decoder, len(rows)
        both = concatenated([rows, hidden_rows])
        metadata = self._adapted(paged)
        states = decoder.hidden_states(ids, positions, metadata, paged.states, rows=both)
        hidden = self._kept(states[count:])
        return decoder.logits(states[:count]), hidden

    def hidden_states(self, ids: Any, positions: Any, metadata: AttentionMetadata) -> Any:
        """See `MTPModel.hidden_states`."""
        return self._kept(self._decoder.hidden_states(ids, positions, self._adapted(metadata)))

    def logits(self, states: Any) -> Any:
        """See `MTPModel.logits`."""
        return self._decoder.logits(states)

    def mtp_states(
        self, layer: int, ids: Any, previous: Any, positions: Any, metadata: AttentionMetadata
    ) -> Any:
        """See `MTPModel.mtp_states`."""
        assert self._mtp_layers is not None
        states = self._mtp_layers.states(layer, ids, previous, positions, self._adapted(metadata))
        return self._kept(states)

    def mtp_logits(self, layer: int, states: Any) -> Any:
        """See `MTPModel.mtp_logits`."""
        assert self._mtp_layers is not None
        return self._mtp_layers.logits(layer, states)

    def _kept(self, rows: Any) -> Any:
        """Rows that outlive the next call: a kernel set over arrays may reuse its memory."""
        return rows.copy() if self.takes_arrays else rows

    def _adapted(self, paged: "PagedContext | CompiledModel | AttentionMetadata") -> Any:
        metadata: Any = paged.metadata if isinstance(paged, PagedContext) else paged
        is_over_tensors = self.takes_arrays and not isinstance(metadata, CpuMetadata)
        return _ArrayMetadata(metadata) if is_over_tensors else metadata

    def check_attended(self, context: PagedContext) -> None:
        """See `Model.check_attended`: our layers do."""


class _ArrayMetadata:
    """Metadata of a backend over tensors, for a decoder over arrays."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def attend(
        self,
        layer: int,
        arrays: tuple[Any, ...],
        options: KernelOptions,
        rotation: tuple[Any, ...] | None,
        threads: CpuAttention,
    ) -> None:
        """See `CpuMetadata.attend`; the backend computes with torch's threads instead."""
        query, key, value, out = map(tensor_of, arrays)
        turn = None
        if rotation is not None:
            cos, sin, size, is_pairs, step, norms = rotation
            layout = RotaryLayout(size, "pairs" if is_pairs else "halves", step)
            norm = None
            if norms is not None:
                norm = HeadNorm(tensor_of(norms[0]), tensor_of(norms[1]), *norms[2:])
            turn = Rotation(tensor_of(cos), tensor_of(sin), layout, norm)
        sinks = None if options.sinks is None else tensor_of(options.sinks)
        own = AttentionOptions(
            options.scaling, options.sliding_window, options.softcap, sinks, turn
        )
        out.copy_(self._metadata.forward(layer, (query, key, value), own))


def attending_layers(spec: DecoderSpec, *, with_mtp_layers: bool = False) -> tuple[LayerNeeds, ...]:
    """The attention of every layer that has its own KV cache, those for MTP last."""
    layers = [spec.layers[number] for number in spec.cached]
    return tuple(map(_needs, [*layers, *(spec.mtp_layers if with_mtp_layers else ())]))


def _needs(layer: Layer) -> LayerNeeds:
    mixer = layer.attention
    assert mixer is not None
    cache = mixer.cache("float32")
    return LayerNeeds(
        query_heads=mixer.heads,
        kv_heads=cache.num_kv_heads,
        head_dim_k=cache.head_dim_k,
        head_dim_v=cache.head_dim_v,
        window=mixer.window,
        softcap=mixer.softcap,
        sinks=isinstance(mixer, Attention) and mixer.sinks,
    )
