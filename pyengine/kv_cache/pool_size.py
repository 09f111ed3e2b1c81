"""The size of a KV pool: the number of blocks that fit, and of states beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pyengine.errors import ConfigurationError
from pyengine.kv_cache.memory import available_memory, in_gib
from pyengine.kv_cache.pool import KVCacheSpec, bytes_per_block
from pyengine.utils.devices import Device

_CPU_DEFAULT_LIMIT = 4 << 30
_CPU_DEFAULT_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings of the pool; `None` leaves the choice to `resolve_num_blocks`.

    `kv_cache_memory` is in bytes. `gpu_memory_utilization` is the share of the memory that is
    free once the model is loaded, and applies to CUDA devices. `blocks_per_seq` is the maximum of
    a sequence of `max_model_len` tokens; `None`: one table, no block freed. `available_memory`, in
    bytes, is a limit beside the free memory of the device; `None`: none. `bytes_beside` are the
    bytes per block of a draft model's pool: both pools together keep to the limits. `state_bytes`
    are those of one state of a model with recurrent layers, else 0.
    """

    block_size: int
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_model_len: int = 8192
    blocks_per_seq: int | None = None
    available_memory: int | None = None
    bytes_beside: int = 0
    state_bytes: int = 0

    def most_states(self, num_bytes: int) -> int:
        """The most states in half of these bytes, at least one."""
        return max(1, num_bytes // 2 // self.state_bytes) if self.state_bytes else 0

    @property
    def beside_states(self) -> str:
        """For messages, the memory of states."""
        return f", beside states of {self.state_bytes} bytes" if self.state_bytes else ""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value}: it must be at least 1")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigurationError(
                f"num_blocks={self.num_blocks} and kv_cache_memory={self.kv_cache_memory} "
                "both set the size of the KV pool: give one of them"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: "
                "it must be above 0 and at most 1"
            )


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool that fits: its blocks, the bytes of its tensors (null block included), and why.

    `num_states` are the states of running sequences beside it: `max_num_seqs`, or as many as half
    of the memory holds. They are not in `num_bytes`.
    """

    num_blocks: int
    num_bytes: int
    reason: str
    num_states: int = 0


def resolve_num_blocks(
    settings: PoolSettings, specs: Sequence[KVCacheSpec], device: Device
) -> PoolSize:
    """Choose the number of blocks of the pool, before its allocation.

    `specs` are those of the pool's tensors: of all layers, or of one group. Without `num_blocks`
    and `kv_cache_memory` the pool takes, on the CPU, a quarter of the available memory, at most
    4 GiB; on CUDA `gpu_memory_utilization` of the free memory; and never more than `max_num_seqs`
    sequences of `max_model_len` tokens can use.

    Raises `ConfigurationError` if the pool does not fit, with the requested and available size.
    """
    own = bytes_per_block(specs, settings.block_size)
    per_block = own + settings.bytes_beside
    available = settings.available_memory
    if available is None:
        available = available_memory(device)
    num_states = settings.max_num_seqs if settings.state_bytes else 0
    if settings.num_blocks is not None:
        num_blocks, reason = settings.num_blocks, f"num_blocks={settings.num_blocks}"
        num_states = min(num_states, settings.most_states(2 * num_blocks * per_block))
    elif settings.kv_cache_memory is not None:
        reason = f"kv_cache_memory={settings.kv_cache_memory}"
        num_states = min(num_states, settings.most_states(settings.kv_cache_memory))
        for_blocks = settings.kv_cache_memory - num_states * settings.state_bytes
        num_blocks = for_blocks // per_block - 1
        if num_blocks < 1:
            raise ConfigurationError(
                f"{reason} bytes hold no KV pool: two blocks of {settings.block_size} tokens "
                f"(one of them the null block) take {2 * per_block} bytes for this model"
                f"{settings.beside_states}; give at least that, or a smaller block_size"
            )
    else:
        budget, reason = _default_budget(settings, device, available)
        num_states = min(num_states, settings.most_states(budget))
        affordable = (budget - num_states * settings.state_bytes) // per_block - 1
        num_blocks = max(1, affordable)
        if (useful := _useful_blocks(settings, per_block)) <= num_blocks:
            sequences = f"{settings.max_num_seqs} sequences of {settings.max_model_len} tokens"
            num_blocks, reason = useful, f"all that {sequences} can use"
    num_bytes = (num_blocks + 1) * per_block + num_states * settings.state_bytes
    if num_bytes > available:
        fitting = (available - num_states * settings.state_bytes) // per_block - 1
        way_out = (
            f"at most num_blocks={fitting} would fit; leave memory for the model's activations"
            if fitting >= 1
            else "free some memory, or choose a smaller block_size"
        )
        raise ConfigurationError(
            f"the KV pool does not fit into memory: {reason} needs {in_gib(num_bytes)} "
            f"({num_blocks} + 1 blocks of {settings.block_size} tokens, {per_block} bytes each"
            f"{settings.beside_states}), {in_gib(available)} are available on {device}; {way_out}"
        )
    return PoolSize(num_blocks, (num_blocks + 1) * own, reason, num_states)


def _default_budget(settings: PoolSettings, device: Device, available: int) -> tuple[int, str]:
    """The default bytes of blocks and states, and the reason as text."""
    if device.type == "cuda":
        budget = int(available * settings.gpu_memory_utilization)
        return (
            budget,
            f"{settings.gpu_memory_utilization:.0%} of {in_gib(available)} free on {device}",
        )
    budget = min(int(available * _CPU_DEFAULT_SHARE), _CPU_DEFAULT_LIMIT)
    return (
        budget,
        f"a quarter of {in_gib(available)} available, at most {in_gib(_CPU_DEFAULT_LIMIT)}",
    )


def _useful_blocks(settings: PoolSettings, per_block: int) -> int:
    """The most blocks that sequences can use, each with a snapshot at both ends of its answer."""
    per_table = -(-settings.max_model_len // settings.block_size)
    per_snapshot = -(-settings.state_bytes // per_block)
    per_seq = (settings.blocks_per_seq or per_table) + 2 * per_snapshot
    return settings.max_num_seqs * per_seq
