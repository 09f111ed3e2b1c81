"""Attention by flash-attn 2, from its package or from torch (`varlen_attn`); pages of 256 tokens.

The package: leading sequences with one new token go to `flash_attn_with_kvcache`, which splits long
caches over the GPU, the rest to `flash_attn_varlen_func`. torch 2.12 and later has a copy without a
softcap; with more than `num_splits=1`, rows were left unwritten upstream. Sinks are added from the
logarithm of the sum under the softmax.
"""

import importlib
from typing import Any

import numpy as np
import torch

from pyengine.attention.backend import AttentionBackend, AttentionOptions, Rows, StepInputs
from pyengine.attention.needs import (
    AttentionNeeds,
    cache_dtype_obstacle,
    cuda_obstacle,
    equal_dims_obstacle,
    half_obstacle,
    page_obstacle,
)
from pyengine.attention.paged import KVWriter, apply_sinks, cumulative, leading_decodes, window_left
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.pool import KVPool
from pyengine.utils.host_copy import upload

PAGE = 256
"""The tokens of a page are a multiple of this."""


def flash_kernel_obstacle(needs: AttentionNeeds) -> str | None:
    """Why the kernels of flash-attn 2, torch's copy of them too, cannot serve; None: they can."""
    for layer in needs.layers:
        if layer.head_dim_k > 256 or layer.head_dim_k % 8:
            return (
                f"its head sizes are the multiples of 8 up to 256, the model has {layer.head_dim_k}"
            )
    return (
        half_obstacle(needs)
        or equal_dims_obstacle(needs)
        or cache_dtype_obstacle(needs)
        or page_obstacle(needs, PAGE)
    )


class FlashAttnBackend(AttentionBackend):
    """Attention over a `KVPool` by flash-attn. Raises `ImportError` where that is missing."""

    name = "flash-attn"
    strength = "its paged kernels serve this model"
    is_uncertain = True
    block_size = PAGE
    supports_graphs = True

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("flash_attn")

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        obstacle = cuda_obstacle(needs, (8, 0))
        if obstacle is not None:
            return obstacle
        if "flash_attn" not in needs.packages:
            return "the package flash-attn is not installed"
        return flash_kernel_obstacle(needs)

    def plan(self, inputs: StepInputs) -> "FlashAttnPlan":
        """Prepare a step."""
        return FlashAttnPlan(self, inputs)

    def graph_plan(self, inputs: StepInputs) -> "FlashAttnPlan":
        """The same: decoding reads lengths and tables from the step's tensors alone."""
        return FlashAttnPlan(self, inputs)


class FlashAttnPlan:
    """One step by flash-attn."""

    def __init__(self, backend: FlashAttnBackend, inputs: StepInputs) -> None:
        self._backend = backend
        self._inputs = inputs
        starts, lens = inputs.host_query_start_loc, inputs.host_seq_lens
        self._decodes = decodes = leading_decodes(starts)
        self._starts: torch.Tensor | None = None
        if decodes < len(lens):
            self._starts = inputs.query_start_loc[decodes:] - decodes
            self._key_starts = upload(cumulative(lens[decodes:]), backend.pool.device)
            self._max_rows = int(np.diff(starts[decodes:]).max())
            self._max_keys = int(lens[decodes:].max())

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphPlan.refresh`; there is nothing to do."""

    def forward(self, layer: int, rows: Rows, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionPlan.forward`."""
        slots = self._inputs.slot_mapping
        query = self._backend.writer.write_step(layer, rows, slots, options.rotation)
        query, decodes = query.contiguous(), self._decodes
        if self._starts is None:
            return self._decode(layer, query, options)
        rest = self._prefill(layer, query[decodes:], options)
        if not decodes:
            return rest
        return torch.cat([self._decode(layer, query[:decodes], options), rest])

    def _decode(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        result = self._backend.library.flash_attn_with_kvcache(
            query[:, None],
            self._backend.pool.keys[layer],
            self._backend.pool.values[layer],
            cache_seqlens=self._inputs.seq_lens[: self._decodes],
            block_table=self._table(layer)[: self._decodes],
            return_softmax_lse=options.sinks is not None,
            **_settings(options),
        )
        if options.sinks is None:
            return _tensor(result)[:, 0]
        out, lse = result  # [B, 1, heads, d] and [B, heads, 1]
        return apply_sinks(out[:, 0], lse[..., 0], options.sinks)

    def _prefill(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        result = self._backend.library.flash_attn_varlen_func(
            query,
            self._backend.pool.keys[layer],
            self._backend.pool.values[layer],
            cu_seqlens_q=self._starts,
            cu_seqlens_k=self._key_starts,
            max_seqlen_q=self._max_rows,
            max_seqlen_k=self._max_keys,
            block_table=self._table(layer)[self._decodes :],
            return_attn_probs=options.sinks is not None,
            **_settings(options),
        )
        if options.sinks is None:
            return _tensor(result)
        out, lse = result[:2]  # [T, heads, d] and [heads, T]
        return apply_sinks(out, lse.T, options.sinks)

    def _table(self, layer: int) -> torch.Tensor:
        return self._inputs.block_tables[self._backend.pool.groups.places[layer].group]


def _settings(options: AttentionOptions) -> dict[str, Any]:
    left = window_left(options.sliding_window)
    return {
        "softmax_scale": options.scaling,
        "causal": True,
        "window_size": (left, -1 if left < 0 else 0),
        "softcap": options.softcap or 0.0,
    }


def _tensor(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result
    return tensor


_LEAST_TORCH = (2, 12)


class VarlenBackend(AttentionBackend):
    """Attention over a `KVPool` by `torch.nn.attention.varlen.varlen_attn`.

    Raises `ImportError` for a torch that has none.
    """

    name = "varlen"
    strength = "torch's own paged kernel serves this model"
    is_uncertain = True
    block_size = PAGE
    supports_graphs = True

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("torch.nn.attention.varlen")

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        obstacle = cuda_obstacle(needs, (8, 0))
        if obstacle is not None:
            return obstacle
        if needs.torch_version < _LEAST_TORCH:
            version = ".".join(map(str, needs.torch_version))
            return f"varlen_attn takes block tables from torch 2.12 on, this is {version}"
        if any(layer.softcap is not None for layer in needs.layers):
            return "varlen_attn has no softcap, which the model needs"
        return flash_kernel_obstacle(needs)

    def plan(self, inputs: StepInputs) -> "VarlenPlan":
        """Prepare a step."""
        longest = int(inputs.host_seq_lens.max())
        return VarlenPlan(self, inputs, longest)

    def graph_plan(self, inputs: StepInputs) -> "VarlenPlan":
        """Prepare a step whose sequences may grow to the width of their tables."""
        return VarlenPlan(self, inputs, inputs.block_tables.shape[2] * self.pool.block_size)


class VarlenPlan:
    """One step by `varlen_attn`; no sequence is longer than `longest`."""

    def __init__(self, backend: VarlenBackend, inputs: StepInputs, longest: int) -> None:
        self._backend = backend
        self._inputs = inputs
        self._longest = longest
        self._max_rows = int(np.diff(inputs.host_query_start_loc).max())
        self._key_starts = torch.zeros_like(inputs.query_start_loc)
        self.refresh(inputs)

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphPlan.refresh`."""
        torch.cumsum(inputs.seq_lens, 0, dtype=torch.int32, out=self._key_starts[1:])

    def forward(self, layer: int, rows: Rows, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionPlan.forward`."""
        if options.softcap is not None:
            raise ConfigurationError(
                f"layer {layer} asks for a softcap of {options.softcap}, which "
                "attention_backend='varlen' does not have; choose another"
            )
        pool, inputs = self._backend.pool, self._inputs
        group = pool.groups.places[layer].group
        writer, library = self._backend.writer, self._backend.library
        query = writer.write_step(layer, rows, inputs.slot_mapping, options.rotation)
        sinks = options.sinks
        result = library.varlen_attn(
            query.contiguous(),
            pool.keys[layer],
            pool.values[layer],
            inputs.query_start_loc,
            self._key_starts,
            self._max_rows,
            self._longest,
            return_aux=None if sinks is None else library.AuxRequest(lse=True),
            scale=options.scaling,
            window_size=(window_left(options.sliding_window), 0),
            enable_gqa=True,
            seqused_k=inputs.seq_lens,
            block_table=inputs.block_tables[group],
            num_splits=1,
        )
        if sinks is None:
            out: torch.Tensor = result
            return out
        attended, lse = result  # [T, heads, d] and [heads, T]
        return apply_sinks(attended, lse.T, sinks)
