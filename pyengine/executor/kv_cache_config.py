"""The KV cache of a model before it is allocated: its layers' specs and groups, and its size."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyengine.kv_cache import BlockManager
from pyengine.kv_cache.layer_groups import LayerGroups, choose_layer_groups
from pyengine.kv_cache.pool import KVCacheSpec, KVPool, tensor_specs
from pyengine.kv_cache.pool_size import PoolSettings, PoolSize, resolve_num_blocks
from pyengine.kv_cache.states import StatePool, StateSpec, state_bytes
from pyengine.models.loaded import LoadedModel
from pyengine.utils.dtypes import DType


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """A KV cache before it is allocated: the layers' specs, their groups, the size of the pool."""

    specs: list[KVCacheSpec]
    groups: LayerGroups
    size: PoolSize
    block_size: int
    states: Sequence[StateSpec] = ()
    """Those of the layers that keep one."""

    def manager(self, **settings: Any) -> BlockManager:
        """The block manager over it; `settings` are further ones of `BlockManager`."""
        blocks, windows = self.size.num_blocks, self.groups.windows
        if self.states:
            settings["state_blocks"] = self.snapshot_blocks
        return BlockManager(blocks, self.block_size, groups=windows, **settings)

    @property
    def snapshot_blocks(self) -> int:
        """Blocks of a snapshot of the states; 0 without states."""
        per_block = self.size.num_bytes // (self.size.num_blocks + 1)
        return -(-state_bytes(self.states) // per_block)

    def pool(self, loaded: LoadedModel) -> KVPool:
        """Allocate the tensors on the model's device."""
        size, device = self.size, loaded.device
        states = StatePool(self.states, size.num_states, device) if self.states else None
        return KVPool(self.specs, size.num_blocks, self.block_size, device, self.groups, states)


def configure_cache(
    loaded: LoadedModel,
    settings: PoolSettings,
    max_tokens: int,
    *,
    layer_groups: bool,
    kv_dtype: DType | None = None,
) -> KVCacheConfig:
    """Group the model's layers and size the pool; steps compute up to `max_tokens` tokens.

    `kv_dtype` is the element type of the pool, None: the model's. Without `layer_groups` all layers
    are in one group that keeps every block. Raises `ConfigurationError` if the pool does not fit
    into memory.
    """
    specs = cache_specs(loaded, kv_dtype or loaded.dtype)
    groups = LayerGroups.single(len(specs))
    if layer_groups:
        windows = [layer.window for layer in loaded.layers]
        sizes = [spec.token_bytes for spec in specs]
        groups = choose_layer_groups(windows, sizes, settings.max_model_len)
    arithmetic = BlockManager(1, settings.block_size, groups=groups.windows)
    blocks_per_seq = arithmetic.blocks_for(settings.max_model_len, max_tokens)
    settings = replace(
        settings, blocks_per_seq=blocks_per_seq, state_bytes=state_bytes(loaded.states)
    )
    size = resolve_num_blocks(settings, tensor_specs(specs, groups), loaded.device)
    return KVCacheConfig(specs, groups, size, settings.block_size, loaded.states)


def cache_specs(loaded: LoadedModel, kv_dtype: DType) -> list[KVCacheSpec]:
    """The KV cache of each layer of a model, its MTP layers last; with scales in 8-bit floats."""
    specs = [
        KVCacheSpec(
            layer.kv_heads // loaded.kv_shards, layer.head_dim_k, layer.head_dim_v, kv_dtype
        )
        for layer in loaded.layers
    ]
    scales = loaded.kv_scales if kv_dtype == "float8_e4m3fn" else {}
    return [
        replace(spec, scale_k=scales[layer][0], scale_v=scales[layer][1])
        if layer in scales
        else spec
        for layer, spec in enumerate(specs)
    ]


def longest_sequence(manager: BlockManager, max_tokens: int, max_length: int) -> int:
    """The most tokens, up to `max_length`, of one sequence alone in the pool."""
    return bisect_right(
        range(1, max_length + 1),
        manager.num_blocks,
        key=lambda num_tokens: manager.blocks_for(num_tokens, max_tokens),
    )
