"""Attention by the packages flash-attn: version 2, with pages of 256 tokens, and 3, with any.

Version 2: leading sequences with one new token are decoded apart, since the kernel splits long
caches over the GPU if all sequences have one. Up to 2.8.3 that is `flash_attn_with_kvcache`. Later
releases read the longest length from the device there, so the host would wait in every layer, and a
graph cannot be captured. `flash_attn_varlen_func` gets it from the host.

Version 3, for Hopper, takes all sequences in one call. Sinks are added from the log-sum-exp.
"""

import importlib
import re
from typing import Any

import torch

from pyengine.attention.backend import QKV, AttentionBackend, AttentionOptions, StepInputs
from pyengine.attention.flash_kernels import (
    PAGE,
    Extents,
    flash_kernel_obstacle,
    flash_settings,
    longest_ever,
    longest_in,
)
from pyengine.attention.needs import AttentionNeeds, cuda_obstacle
from pyengine.attention.paged import KVWriter, apply_sinks, leading_decodes, with_sinks
from pyengine.kv_cache.pool import KVPool

_READS_LENGTHS = (2, 8, 4)
"""The release from which `flash_attn_with_kvcache` reads the longest length from the device."""


class FlashAttnBackend(AttentionBackend):
    """Attention over a `KVPool` by flash-attn 2. Raises `ImportError` where that is missing."""

    name = "flash-attn"
    strength = "its paged kernels serve this model"
    is_uncertain = True
    block_size = PAGE
    supports_graphs = True

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("flash_attn")
        self.reads_lengths = _release(self.library.__version__) >= _READS_LENGTHS

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        obstacle = cuda_obstacle(needs, (8, 0))
        if obstacle is not None:
            return obstacle
        if "flash_attn" not in needs.packages:
            return "the package flash-attn is not installed"
        return flash_kernel_obstacle(needs)

    def metadata(self, inputs: StepInputs) -> "FlashAttnMetadata":
        """Prepare a step."""
        return FlashAttnMetadata(self, inputs, longest_in(inputs))

    def graph_metadata(self, inputs: StepInputs) -> "FlashAttnMetadata":
        """Prepare a step whose sequences may grow to the width of their tables."""
        return FlashAttnMetadata(self, inputs, longest_ever(inputs, self.pool.block_size))


def _release(version: str) -> tuple[int, ...]:
    """`2.8.3.post1` as (2, 8, 3)."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else (0, 0, 0)


class FlashAttnMetadata:
    """One step by flash-attn 2; no sequence is longer than `longest`."""

    def __init__(self, backend: FlashAttnBackend, inputs: StepInputs, longest: int) -> None:
        self._backend = backend
        self._inputs = inputs
        self._decodes = decodes = leading_decodes(inputs.host_query_start_loc)
        self._has_rest = decodes < len(inputs.host_seq_lens)
        self._extents: Extents | None = None
        if self._has_rest or backend.reads_lengths:
            self._extents = Extents(inputs, longest)
        self._starts = inputs.query_start_loc[decodes:] - decodes if self._has_rest else None

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphMetadata.refresh`."""
        if self._extents is not None:
            self._extents.refresh(inputs)

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`."""
        backend, inputs, decodes = self._backend, self._inputs, self._decodes
        query = backend.writer.write_step(layer, qkv, inputs.slot_mapping, options.rotation)
        query = query.contiguous()
        parts = []
        if decodes:
            parts.append(self._decode(layer, query[:decodes], options))
        if self._starts is not None and self._extents is not None:
            sequences = slice(decodes, None)
            parts.append(
                self._attend(
                    layer, query[decodes:], options, self._starts, sequences, self._extents.max_rows
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        inputs, sequences = self._inputs, slice(self._decodes)
        if self._backend.reads_lengths:
            starts = inputs.query_start_loc[: self._decodes + 1]
            return self._attend(layer, query, options, starts, sequences, 1)
        result = self._backend.library.flash_attn_with_kvcache(
            query[:, None],
            self._backend.pool.keys[layer],
            self._backend.pool.values[layer],
            cache_seqlens=inputs.seq_lens[sequences],
            block_table=self._table(layer)[sequences],
            return_softmax_lse=options.sinks is not None,
            **flash_settings(options),
        )
        if options.sinks is None:
            out: torch.Tensor = result[:, 0]
            return out
        attended, lse = result  # [B, 1, heads, d] and [B, heads, 1]
        return apply_sinks(attended[:, 0], lse[..., 0], options.sinks)

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        options: AttentionOptions,
        starts: torch.Tensor,
        sequences: slice,
        max_rows: int,
    ) -> torch.Tensor:
        extents = self._extents
        assert extents is not None
        last = None if sequences.stop is None else sequences.stop + 1
        result = self._backend.library.flash_attn_varlen_func(
            query,
            self._backend.pool.keys[layer],
            self._backend.pool.values[layer],
            cu_seqlens_q=starts,
            cu_seqlens_k=extents.key_starts[sequences.start : last],
            max_seqlen_q=max_rows,
            max_seqlen_k=extents.max_keys,
            block_table=self._table(layer)[sequences],
            return_attn_probs=options.sinks is not None,
            **flash_settings(options),
        )
        return with_sinks(result, options.sinks)

    def _table(self, layer: int) -> Any:
        return self._inputs.block_tables[self._backend.pool.layer_tables[layer]]


class FlashAttn3Backend(AttentionBackend):
    """Attention over a `KVPool` by flash-attn 3. Raises `ImportError` where that is missing."""

    name = "flash-attn-3"
    strength = "its kernels for Hopper serve this model"
    is_uncertain = True
    supports_graphs = True

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("flash_attn_interface")

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        obstacle = cuda_obstacle(needs, (9, 0))
        if obstacle is not None:
            return obstacle
        if needs.capability is not None and needs.capability != (9, 0):
            return "its kernels are for compute capability 9.0"
        if "flash_attn_interface" not in needs.packages:
            return "the package flash-attn-3 is not installed"
        return flash_kernel_obstacle(needs, 1)

    def metadata(self, inputs: StepInputs) -> "FlashAttn3Metadata":
        """Prepare a step."""
        return FlashAttn3Metadata(self, inputs)

    def graph_metadata(self, inputs: StepInputs) -> "FlashAttn3Metadata":
        """The same: lengths and tables come from the step's tensors alone."""
        return FlashAttn3Metadata(self, inputs)


class FlashAttn3Metadata:
    """One step by flash-attn 3."""

    def __init__(self, backend: FlashAttn3Backend, inputs: StepInputs) -> None:
        self._backend = backend
        self._inputs = inputs
        starts = inputs.host_query_start_loc
        self._max_rows = int((starts[1:] - starts[:-1]).max())

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphMetadata.refresh`; there is nothing to do."""

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`."""
        backend, inputs = self._backend, self._inputs
        pool = backend.pool
        query = backend.writer.write_step(layer, qkv, inputs.slot_mapping, options.rotation)
        result = backend.library.flash_attn_with_kvcache(
            query.contiguous(),
            pool.keys[layer],
            pool.values[layer],
            cache_seqlens=inputs.seq_lens,
            page_table=inputs.block_tables[pool.layer_tables[layer]],
            cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_q=self._max_rows,
            return_softmax_lse=options.sinks is not None,
            **flash_settings(options),
        )
        return with_sinks(result, options.sinks)
