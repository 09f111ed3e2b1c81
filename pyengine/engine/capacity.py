"""What fits: the KV cache of a model, and the longest sequence that it takes."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import torch

from pyengine.cache import BlockManager
from pyengine.cache.kv_pool import (
    KVCacheSpec,
    KVPool,
    PoolSettings,
    PoolSize,
    kv_cache_specs,
    resolve_num_blocks,
)
from pyengine.cache.layer_groups import LayerGroups, choose_layer_groups, layer_windows
from pyengine.core.errors import ConfigurationError
from pyengine.engine.engine import ModelFacts
from pyengine.models import LoadedModel


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A KV cache before it is allocated: the layers' specs, their groups, the size of the pool."""

    specs: list[KVCacheSpec]
    groups: LayerGroups
    size: PoolSize
    block_size: int

    def manager(self, **settings: Any) -> BlockManager:
        """The block manager over it, `settings` being those of `BlockManager` beside the sizes."""
        blocks, windows = self.size.num_blocks, self.groups.windows
        return BlockManager(blocks, self.block_size, groups=windows, **settings)

    def pool(self, loaded: LoadedModel) -> KVPool:
        """Allocate the tensors on the model's device."""
        blocks = self.size.num_blocks
        return KVPool(self.specs, blocks, self.block_size, loaded.device, self.groups)


def plan_cache(
    loaded: LoadedModel,
    settings: PoolSettings,
    max_tokens: int,
    *,
    layer_groups: bool,
    kv_dtype: torch.dtype | None = None,
) -> CachePlan:
    """Group the model's layers and size the pool; steps compute up to `max_tokens` tokens.

    `kv_dtype` is the element type of the pool, None: the model's.

    Without `layer_groups` all layers are in one group that keeps everything. Raises
    `ConfigurationError` where the pool does not fit into memory.
    """
    specs = kv_cache_specs(loaded.config, kv_dtype or loaded.dtype, loaded.kv_shards)
    groups = LayerGroups.single(len(specs))
    if layer_groups:
        groups = choose_layer_groups(layer_windows(loaded.config), specs, settings.max_model_len)
    arithmetic = BlockManager(1, settings.block_size, groups=groups.windows)
    blocks_per_seq = arithmetic.blocks_for(settings.max_model_len, max_tokens)
    settings = replace(settings, blocks_per_seq=blocks_per_seq)
    size = resolve_num_blocks(settings, groups.tensor_shapes(specs), loaded.device)
    return CachePlan(specs, groups, size, settings.block_size)


def longest_sequence(manager: BlockManager, max_tokens: int, most: int) -> int:
    """Tokens, up to `most`, that one sequence may have in a pool that is empty but for it."""

    def blocks(num_tokens: int) -> int:
        return manager.blocks_for(num_tokens, max_tokens)

    return bisect_right(range(1, most + 1), manager.num_blocks, key=blocks)


def model_facts(
    loaded: LoadedModel,
    settings: PoolSettings,
    manager: BlockManager,
    max_tokens: int,
    asked: int | None,
) -> ModelFacts:
    """The longest sequence, and what sets it: the model's positions, the pool, or the caller.

    `asked` is the caller's `max_model_len`. Raises `ConfigurationError` if that cannot be had.
    """
    if asked is not None and asked > loaded.max_model_len:
        raise ConfigurationError(
            f"max_model_len={asked}: {loaded.name} has {loaded.max_model_len} positions"
        )
    longest = longest_sequence(manager, max_tokens, settings.max_model_len)
    pool = f"the KV pool holds {manager.num_blocks} blocks of {manager.block_size} tokens"
    if longest == settings.max_model_len:
        positions = f"the model has {loaded.max_model_len} positions"
        limited_by = positions if asked is None else f"max_model_len={asked}"
    else:
        wanted = longest + 1 if asked is None else asked
        taken = f"{wanted} tokens take {manager.blocks_for(wanted, max_tokens)}"
        limited_by = f"{pool}, {taken}"
        if asked is not None or longest < 2:
            raise ConfigurationError(
                f"max_model_len={wanted} does not fit: {limited_by}; give a larger num_blocks"
            )
    return ModelFacts(
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=longest,
        limited_by=limited_by,
        max_num_seqs=settings.max_num_seqs,
    )
