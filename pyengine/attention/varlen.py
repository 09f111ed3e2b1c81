"""Attention by torch's `varlen_attn`: its copy of flash-attn 2, or cuDNN.

The copy of flash-attn has pages of 256 tokens and no softcap. With more than `num_splits=1`, rows
were left unwritten upstream. Sinks are added from the logarithm of the sum under the softmax.

cuDNN has pages of any power of two on compute capability 9.0 and 10.0, and no windows.
"""

import importlib
from typing import Any

import torch

from pyengine.attention.backend import QKV, AttentionBackend, AttentionOptions, StepInputs
from pyengine.attention.flash_kernels import (
    PAGE,
    Extents,
    flash_kernel_obstacle,
    longest_ever,
    longest_in,
)
from pyengine.attention.needs import AttentionNeeds, cuda_obstacle
from pyengine.attention.paged import KVWriter, window_left, with_sinks
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.pool import KVPool

_MIN_TORCH = (2, 12)
_MIN_TORCH_FOR_CUDNN = (2, 15)
_MIN_CUDNN = 92400
_CUDNN_CAPABILITIES = (9, 10)  # major
_CUDNN_HEAD_DIM = 128


class VarlenBackend(AttentionBackend):
    """Attention over a `KVPool` by `torch.nn.attention.varlen.varlen_attn`.

    Raises `ImportError` for a torch that has none.
    """

    name = "varlen"
    strength = "torch's own paged kernel serves this model"
    is_uncertain = True
    block_size = PAGE
    supports_graphs = True
    num_splits: int | None = 1
    """The parts that the keys of a sequence are split into; None: the kernel decides."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("torch.nn.attention.varlen")

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        return _obstacle(needs, (8, 0), _MIN_TORCH) or flash_kernel_obstacle(needs)

    def metadata(self, inputs: StepInputs) -> "VarlenMetadata":
        """Prepare a step."""
        return VarlenMetadata(self, inputs, longest_in(inputs))

    def graph_metadata(self, inputs: StepInputs) -> "VarlenMetadata":
        """Prepare a step whose sequences may grow to the width of their tables."""
        return VarlenMetadata(self, inputs, longest_ever(inputs, self.pool.block_size))

    def attend(self, *arguments: Any, **settings: Any) -> Any:
        """`varlen_attn` by the kernel of this backend."""
        return self.library.varlen_attn(*arguments, **settings)


def _obstacle(
    needs: AttentionNeeds, capability: tuple[int, int], minimum: tuple[int, int]
) -> str | None:
    obstacle = cuda_obstacle(needs, capability)
    if obstacle is not None:
        return obstacle
    if needs.torch_version < minimum:
        version, required = (".".join(map(str, item)) for item in (needs.torch_version, minimum))
        return f"its varlen_attn takes block tables from torch {required} on, this is {version}"
    if any(layer.softcap is not None for layer in needs.layers):
        return "varlen_attn has no softcap, which the model needs"
    return None


class CudnnBackend(VarlenBackend):
    """`varlen_attn` by cuDNN."""

    name = "cudnn"
    strength = "cuDNN's paged kernel serves this model"
    auto_on = ()
    block_size = 16
    num_splits = None

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self._attention: Any = importlib.import_module("torch.nn.attention")

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        obstacle = _obstacle(needs, (9, 0), _MIN_TORCH_FOR_CUDNN)
        if obstacle is not None:
            return obstacle
        if needs.capability is not None and needs.capability[0] not in _CUDNN_CAPABILITIES:
            return "it runs on compute capability 9.0 and 10.0"
        if needs.cudnn_version < _MIN_CUDNN:
            return f"it needs cuDNN 9.24, this is {needs.cudnn_version}"
        size = needs.block_size
        if size is not None and size & (size - 1):
            return f"its blocks are powers of two, block_size={size}"
        for layer in needs.layers:
            if layer.head_dim_k > _CUDNN_HEAD_DIM:
                return f"its head sizes end at {_CUDNN_HEAD_DIM}, the model has {layer.head_dim_k}"
            if layer.window is not None or layer.sinks:
                return "it has neither windows nor sinks, which the model needs"
        return flash_kernel_obstacle(needs, 1)

    def attend(self, *arguments: Any, **settings: Any) -> Any:
        """`varlen_attn` by cuDNN: an error where cuDNN cannot, not another kernel."""
        with self._attention.sdpa_kernel(self._attention.SDPBackend.CUDNN_ATTENTION):
            return super().attend(*arguments, **settings)


class VarlenMetadata:
    """One step by `varlen_attn`; no sequence is longer than `longest`."""

    def __init__(self, backend: VarlenBackend, inputs: StepInputs, longest: int) -> None:
        self._backend = backend
        self._inputs = inputs
        self._extents = Extents(inputs, longest)

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphMetadata.refresh`."""
        self._extents.refresh(inputs)

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`."""
        backend, inputs, extents = self._backend, self._inputs, self._extents
        if options.softcap is not None:
            raise ConfigurationError(
                f"layer {layer} asks for a softcap of {options.softcap}, which "
                f"attention_backend={backend.name!r} does not have; choose another"
            )
        pool, sinks = backend.pool, options.sinks
        query = backend.writer.write_step(layer, qkv, inputs.slot_mapping, options.rotation)
        result = backend.attend(
            query.contiguous(),
            pool.keys[layer],
            pool.values[layer],
            inputs.query_start_loc,
            extents.key_starts,
            extents.max_rows,
            extents.max_keys,
            return_aux=None if sinks is None else backend.library.AuxRequest(lse=True),
            scale=options.scaling,
            window_size=self._window_size(options.sliding_window),
            enable_gqa=True,
            seqused_k=inputs.seq_lens,
            block_table=inputs.block_tables[pool.layer_tables[layer]],
            num_splits=backend.num_splits,
        )
        return with_sinks(result, sinks)

    def _window_size(self, window: int | None) -> tuple[int, int]:
        """The window of `varlen_attn`.

        Single rows see all keys, causal or not. Without a window at all, the copy of flash-attn
        computes the query heads of a KV head together.
        """
        if window is None and self._extents.max_rows == 1:
            return -1, -1
        return window_left(window), 0
