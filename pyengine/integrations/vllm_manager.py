"""vLLM's `KVCacheManager` interface over the block manager.

vLLM's Scheduler chooses the chunks, holds the tokens and requests slots. This module has vLLM's
names and arguments; `vllm_tables` manages the blocks.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pyengine.integrations.vllm_keys import EventWriter
from pyengine.integrations.vllm_tables import RequestBlocks, RequiredBlocks, Tables
from pyengine.kv_cache import BlockManager

logger = logging.getLogger("vllm.pyengine")  # a child of vLLM's logger, for the same format


class Blocks:
    """vLLM's `KVCacheBlocks`: block ids of the single group."""

    __slots__ = ("_view", "ids")

    def __init__(self, ids: list[int], view: Callable[[int], Any]) -> None:
        self.ids = ids
        self._view = view

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Any = None) -> Any:
        """`([ids],)`, a copy; None if there are none and `allow_none`."""
        if allow_none and not self.ids:
            return None
        groups = (0,) if group_ids is None else group_ids
        return tuple(self.ids.copy() for _ in groups)

    @property
    def blocks(self) -> tuple[list[Any], ...]:
        """Block objects with a `block_id`."""
        return ([self._view(block) for block in self.ids],)

    def __repr__(self) -> str:
        return f"<Blocks {self.ids}>"


@dataclass(frozen=True, slots=True)
class BlockView:
    """The public part of vLLM's `KVCacheBlock`."""

    block_id: int
    _manager: BlockManager

    @property
    def ref_cnt(self) -> int:
        """Requests that hold it."""
        return self._manager.seq_refs(self.block_id)

    @property
    def is_null(self) -> bool:
        """True for the null block."""
        return self.block_id == 0


class BlockPool:
    """The part of `BlockPool` that vLLM's Scheduler uses."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def get_num_free_blocks(self) -> int:
        """Blocks that no request holds, cached or not."""
        return self._manager.usage().available

    def get_usage(self) -> float:
        """Share of the blocks that requests hold."""
        usable = self._manager.num_blocks - 1
        return 1.0 - self.get_num_free_blocks() / usable if usable else 0.0

    def free_blocks(self, ordered_blocks: Iterable[RequestBlocks]) -> None:
        """Release the blocks returned by `pop_blocks_for_free`."""
        for row in ordered_blocks:
            row.free()


@dataclass(frozen=True, slots=True)
class Group:
    """The part of vLLM's single-type managers that is used."""

    block_size: int
    kv_cache_spec: Any


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The part of vLLM's coordinator that is used."""

    single_type_managers: tuple[Group, ...]
    enable_partial_hash_hits: bool = False


class KVCacheManager:
    """vLLM's `KVCacheManager` for one group of full attention, without connectors.

    `classes` holds vLLM's classes of returned objects: `PrefixCacheStats`, `KVCacheBlockCopy`,
    `RequestStatus`, and those of the events.
    """

    mamba_shared_prefix_checkpoint = False
    num_kv_cache_groups = 1

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        *,
        classes: Any,
        enable_caching: bool = True,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        watermark: float = 0.0,
        **_unused: Any,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.block_size = scheduler_block_size
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.log_stats = log_stats
        self.prefix_cache_stats = classes.PrefixCacheStats() if log_stats else None
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.tables = Tables(
            kv_cache_config.num_blocks,
            scheduler_block_size,
            caching=enable_caching,
            events=enable_kv_cache_events,
        )
        kv, self._rows = self.tables.kv, self.tables.rows
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.coordinator = Coordinator((Group(scheduler_block_size, spec),))
        self.block_pool = BlockPool(kv)
        self._view = lambda block: BlockView(block, kv)
        self.empty_kv_cache_blocks = Blocks([], self._view)
        self._classes = classes
        self._not_running = (classes.RequestStatus.WAITING, classes.RequestStatus.PREEMPTED)
        images, adapter_ids = self.tables.images, self.tables.adapter_ids
        self._events = EventWriter(classes, scheduler_block_size, images, adapter_ids)
        if enable_kv_cache_events:
            self.tables.events = self._events
        self._zeroed = kv_cache_config.needs_kv_cache_zeroing
        self._new_blocks: list[int] = []

    # -- a step -------------------------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Called at the start of `schedule()`."""
        self.tables.begin_step()

    def take_new_block_ids(self) -> list[int]:
        """New blocks to be zeroed, if the model needs that. The last call of a step."""
        self.tables.end_step()
        blocks, self._new_blocks = self._new_blocks, []
        return blocks

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Copies to make before the step, for prompts whose every token is cached.

        Sources need not be retained: blocks allocated by the next step are written later.
        """
        copy = self._classes.KVCacheBlockCopy
        return [copy(source, target) for source, target in self.tables.take_copies()], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """For recurrent layers only: empty."""
        return {}

    # -- requests -----------------------------------------------------------------------------

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """True if the request may use cached blocks."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Any) -> tuple[Blocks, int, int]:
        """The cached blocks of a request and the number of cached tokens, all but one at most."""
        self.tables.publish_due()
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        lookup = self.tables.look_up(request)
        ids = lookup.blocks if lookup.source is None else [*lookup.blocks, lookup.source]
        return Blocks(ids, self._view) if ids else self.empty_kv_cache_blocks, lookup.hit, 0

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Blocks | None:
        """Allocate blocks for `num_new_tokens` after the computed tokens.

        Returns None without a change if the pool is full. Within a block, a running request needs
        no call of the block manager.
        """
        end = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        row = self._rows.get(request.request_id)
        if (
            row is not None
            and end + num_lookahead_tokens <= row.capacity
            and end < row.next_publish
        ):
            return self.empty_kv_cache_blocks
        if num_external_computed_tokens or delay_cache_blocks:
            raise NotImplementedError("blocks that a connector fills are not supported")
        if num_new_tokens == 0 and num_new_computed_tokens == 0:
            raise ValueError("num_new_tokens must be above 0 if no tokens are cached")
        tables = self.tables
        whole = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else 0
        waits = has_scheduled_reqs and request.status in self._not_running
        required = RequiredBlocks(
            slots=tables.blocks_of(min(end + num_lookahead_tokens, self.max_model_len)),
            whole=tables.blocks_of(whole),
            spare=self.watermark_blocks if waits else 0,
            reserved=reserved_blocks,
        )
        known = min(end, request.num_tokens)
        if row is None:
            new = tables.admit(request, num_new_computed_tokens, required, known)
        else:
            new = tables.grow(row, required)
            if new is not None and known >= row.next_publish:
                tables.publish_in_time(row, request, known)
        if new is None:
            return None
        if self._zeroed:
            self._new_blocks.extend(new)
        return Blocks(new, self._view) if new else self.empty_kv_cache_blocks

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Register the full blocks of a request. Their tokens are computed before others read."""
        row = self._rows.get(request.request_id)
        if row is not None and num_computed_tokens >= row.next_publish:
            known = min(num_computed_tokens, request.num_tokens)
            self.tables.publish_in_time(row, request, known)

    def merged_rows(self, running: Iterable[Any]) -> dict[str, list[int]]:
        """See `Tables.merged_rows`; not a method of vLLM."""
        return self.tables.merged_rows(running)

    def free(self, request: Any) -> None:
        """Release a request's blocks, if it has any."""
        row = self.tables.pop(request.request_id)
        if row is not None:
            row.free()

    def pop_blocks_for_free(self, request: Any) -> list[RequestBlocks]:
        """Remove a request; `block_pool.free_blocks` releases its blocks."""
        row = self.tables.pop(request.request_id)
        return [] if row is None else [row]

    def get_blocks(self, request_id: str) -> Blocks:
        """The block table of a request as the workers have it."""
        row = self._rows.get(request_id)
        return Blocks(row.blocks, self._view) if row else self.empty_kv_cache_blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The block ids of a request."""
        ids: tuple[list[int], ...] = self.get_blocks(request_id).get_block_ids()
        return ids

    def estimate_cached_tokens(self, request: Any) -> int:
        """Tokens of a request that are in registered blocks."""
        row = self._rows.get(request.request_id)
        if row is None:
            return 0
        return max(row.published, self.tables.blocks_of(row.hit) * self.block_size)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Always 0: vLLM no longer uses it."""
        return [0]

    # -- all of it ----------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks. Returns False without a change if a request holds blocks."""
        used = self.tables.clear()
        if used:
            logger.warning("The prefix cache is not reset: %d blocks are in use", used)
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold."""
        return self.block_pool.get_usage()

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Count the look-up of an admitted request."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_hits,
                preempted=request.num_preemptions > 0,
            )

    def make_prefix_cache_stats(self) -> Any:
        """The counts since the last call; None without `log_stats`."""
        if self.prefix_cache_stats is None:
            return None
        stats, self.prefix_cache_stats = self.prefix_cache_stats, self._classes.PrefixCacheStats()
        return stats

    def take_events(self) -> list[Any]:
        """Events since the last call, in vLLM's classes."""
        if not self.enable_kv_cache_events:
            return []
        self._events.collect(self.tables.kv.take_events())
        return self._events.take()
