"""The limits of a model over a KV pool, which requests are checked against."""

from dataclasses import dataclass

from pyengine.errors import ConfigurationError
from pyengine.executor.kv_cache_config import longest_sequence
from pyengine.kv_cache import BlockManager
from pyengine.kv_cache.pool_size import PoolSettings
from pyengine.models.loaded import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits that requests are checked against.

    `max_model_len` is the most tokens a sequence may have, prompt and output; `limited_by` says
    in words what set it: the model's positions, the pool, or the caller. `generates` is False for a
    model without a head, which gives no tokens.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    limited_by: str
    max_num_seqs: int
    generates: bool = True


def compute_model_limits(
    loaded: LoadedModel,
    settings: PoolSettings,
    manager: BlockManager,
    max_tokens: int,
    requested: int | None,
) -> ModelLimits:
    """Compute the limits of a model over a KV pool.

    `requested` is the caller's `max_model_len`. Raises `ConfigurationError` if it does not fit.
    """
    if requested is not None and requested > loaded.max_model_len:
        raise ConfigurationError(
            f"max_model_len={requested}: {loaded.name} has {loaded.max_model_len} positions"
        )
    longest = longest_sequence(manager, max_tokens, settings.max_model_len)
    pool = f"the KV pool holds {manager.num_blocks} blocks of {manager.block_size} tokens"
    if longest == settings.max_model_len:
        positions = f"the model has {loaded.max_model_len} positions"
        limited_by = positions if requested is None else f"max_model_len={requested}"
    else:
        needed = longest + 1 if requested is None else requested
        taken = f"{needed} tokens take {manager.blocks_for(needed, max_tokens)}"
        limited_by = f"{pool}, {taken}"
        if requested is not None or longest < 2:
            raise ConfigurationError(
                f"max_model_len={needed} does not fit: {limited_by}; give a larger num_blocks"
            )
    return ModelLimits(
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=longest,
        limited_by=limited_by,
        max_num_seqs=settings.max_num_seqs,
        generates=loaded.pooling.generates,
    )
