"""vLLM's `KVCacheManager` interface over the block manager.

vLLM's Scheduler chooses the chunks, holds the tokens and requests slots. This module has vLLM's
names and arguments; `vllm_tables` manages the blocks.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from pyengine.integrations.vllm_keys import EventWriter
from pyengine.integrations.vllm_states import by_kind, state_layers
from pyengine.integrations.vllm_tables import LayerGroups, RequestBlocks, RequiredBlocks, Tables
from pyengine.kv_cache import Pin

logger = logging.getLogger("vllm.pyengine")  # a child of vLLM's logger, for the same format


class Blocks:
    """vLLM's `KVCacheBlocks`: block ids by layer group; the first `num_cached` are registered."""

    __slots__ = ("_view", "ids", "num_cached")

    def __init__(
        self, ids: list[list[int]], view: Callable[[int, bool], Any], num_cached: int
    ) -> None:
        self.ids = ids
        self.num_cached = num_cached
        self._view = view

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Any = None) -> Any:
        """A copy of the ids of these groups; None if there are none and `allow_none`."""
        groups = self.ids if group_ids is None else [self.ids[group] for group in group_ids]
        if allow_none and not any(groups):
            return None
        return tuple(ids.copy() for ids in groups)

    def get_unhashed_block_ids(self) -> list[int]:
        """The block ids of a single group that are not registered: a connector fills them."""
        [ids] = self.get_unhashed_block_ids_all_groups()
        return ids

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """The same, by layer group, without the null block."""
        return [[block for block in ids[self.num_cached :] if block] for ids in self.ids]

    def new_empty(self) -> "Blocks":
        """No blocks, of the same pool."""
        return Blocks([[] for _ in self.ids], self._view, 0)

    @property
    def blocks(self) -> tuple[list[Any], ...]:
        """Block objects with a `block_id` and a `block_hash`, by layer group."""
        cached, view = self.num_cached, self._view
        return tuple(
            [view(block, index < cached) for index, block in enumerate(ids)] for ids in self.ids
        )

    def __repr__(self) -> str:
        return f"<Blocks {self.ids}>"


@dataclass(frozen=True, slots=True)
class BlockView:
    """The public part of vLLM's `KVCacheBlock`."""

    block_id: int
    is_cached: bool
    _tables: Tables

    @property
    def ref_cnt(self) -> int:
        """Requests that hold it."""
        return self._tables.seq_refs(self.block_id)

    @property
    def is_null(self) -> bool:
        """True for the null block."""
        return self.block_id == 0

    @property
    def block_hash(self) -> bytes | None:
        """None if the block is not registered. Connectors use no more of it."""
        return b"registered" if self.is_cached and not self.is_null else None


class BlockPool:
    """The part of `BlockPool` that vLLM's Scheduler uses."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def get_num_free_blocks(self) -> int:
        """Blocks that no request holds, cached or not."""
        return self._tables.kv.usage().available

    def get_usage(self) -> float:
        """Share of the blocks that requests hold."""
        usable = self._tables.num_blocks - 1
        return 1.0 - self.get_num_free_blocks() / usable if usable else 0.0

    def free_blocks(self, ordered_blocks: "Iterable[RequestBlocks | CopySource]") -> None:
        """Release what `pop_blocks_for_free` and `take_kv_cache_block_copies` returned."""
        for block in ordered_blocks:
            block.free()


@dataclass(frozen=True, slots=True)
class CopySource:
    """Blocks that must stay until their copies are made."""

    pin: Pin

    def free(self) -> None:
        """Release the blocks."""
        self.pin.release()


@dataclass(frozen=True, slots=True)
class Group:
    """The part of vLLM's single-type managers that is used."""

    block_size: int
    kv_cache_spec: Any


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The part of vLLM's coordinator that is used."""

    single_type_managers: tuple[Group, ...]
    tables: Tables
    enable_partial_hash_hits: bool = False

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *,
        total_computed_tokens: int = 0,
        apply_admission_cap: bool = True,
        prefill_end: int = 0,
        **_unused: Any,
    ) -> int:
        """Blocks that an admitted request still needs for `num_tokens` tokens."""
        tables, entry = self.tables, self.tables.entries.get(request_id)
        have, columns = (len(entry.blocks[0]), entry.columns) if entry else (0, [])
        blocks = tables.blocks_of(num_tokens)
        missing = tables.num_missing(blocks, have, capped=apply_admission_cap)
        step = (total_computed_tokens, num_tokens, prefill_end)
        return missing + tables.num_state_blocks(columns, *step)


@dataclass(slots=True)
class Load:
    """A synchronous load: `step` fills the blocks from `first` to `end` and then computes, up to
    `num_tokens` tokens."""

    request: Any
    entry: RequestBlocks
    first: int
    end: int
    num_tokens: int
    step: Any = None


class KVCacheManager:
    """vLLM's `KVCacheManager` for groups of full attention, of sliding windows, and of recurrent
    layers.

    All groups share one pool. Their blocks have the same size, but for states that are not cached.

    `classes` holds vLLM's classes of returned objects: `PrefixCacheStats`, `KVCacheBlockCopy`,
    `RequestStatus`, and those of the events.
    """

    mamba_shared_prefix_checkpoint = False

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        *,
        classes: Any,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        watermark: float = 0.0,
        **_unused: Any,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        attention, _ = by_kind(specs)
        self.block_size: int = attention[0].block_size
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.log_stats = log_stats
        self.prefix_cache_stats = classes.PrefixCacheStats() if log_stats else None
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        in_flight = max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        self.num_kv_cache_groups = len(specs)
        self.tables = tables = Tables(
            kv_cache_config.num_blocks,
            self.block_size,
            caching=enable_caching,
            events=enable_kv_cache_events,
            layers=LayerGroups(
                windows=tuple(getattr(spec, "sliding_window", None) for spec in attention),
                caps=tuple(
                    spec.max_admission_blocks_per_request(in_flight, max_model_len)
                    if getattr(spec, "sliding_window", None)
                    else math.inf
                    for spec in attention
                ),
                states=state_layers(specs, kv_cache_config.prefix_cache_retention_interval),
            ),
        )
        self._entries = tables.entries
        self._passes_blocks = tables.has_windows or tables.state_layers is not None
        groups = tuple(Group(spec.block_size, spec) for spec in specs)
        self.coordinator = Coordinator(groups, tables)
        self.block_pool = BlockPool(tables)
        self._view = lambda block, is_cached: BlockView(block, is_cached, tables)
        self.empty_kv_cache_blocks = Blocks([[] for _ in specs], self._view, 0)
        self._loads: list[Load] = []
        self._classes = classes
        self._not_running = (classes.RequestStatus.WAITING, classes.RequestStatus.PREEMPTED)
        images, adapter_ids = self.tables.images, self.tables.adapter_ids
        self._events = EventWriter(classes, self.block_size, images, adapter_ids)
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
        """Copies to make before the step, for prompts whose every token is cached; and their
        sources, which stay until `block_pool.free_blocks`."""
        copies = self.tables.take_copies()
        copy = self._classes.KVCacheBlockCopy
        pairs = [copy(source, target) for pairs, _ in copies for source, target in pairs]
        return pairs, [CopySource(pin) for _, pin in copies]

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """For recurrent layers only: empty."""
        return {}

    # -- requests -----------------------------------------------------------------------------

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """True if the request may use cached blocks."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Any) -> tuple[Blocks, int, int]:
        """The cached blocks of a request and the number of cached tokens, all but one at most; and
        the number that is cached for attention, if there is no state so far on, else 0."""
        self.tables.publish_due()
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        lookup = self.tables.look_up(request)
        ids = self.tables.blocks_of_lookup(lookup)
        if lookup.sources:
            ids = [[*blocks, last] for blocks, last in zip(ids, lookup.sources, strict=True)]
        attention_hit = lookup.attention_hit if lookup.attention_hit > lookup.hit else 0
        return self._cached(ids), lookup.hit, attention_hit

    def _cached(self, ids: list[list[int]]) -> Blocks:
        return Blocks(ids, self._view, len(ids[0])) if ids[0] else self.empty_kv_cache_blocks

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
        computed = request.num_computed_tokens + num_new_computed_tokens
        end = computed + num_external_computed_tokens + num_new_tokens
        entry = self._entries.get(request.request_id)
        if self._passes_blocks and entry is not None:
            begin = min(computed + num_external_computed_tokens, self.max_model_len)
            self.tables.process(entry, max(begin - request.num_in_flight_tokens, 0))
        if (
            entry is not None
            and end + num_lookahead_tokens <= entry.capacity
            and end < entry.next_publish
            and not reserved_blocks
        ):
            return self.empty_kv_cache_blocks
        if end == request.num_computed_tokens:
            raise ValueError("num_new_tokens must be above 0 if no tokens are cached or loaded")
        tables = self.tables
        whole = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else 0
        waits = has_scheduled_reqs and request.status in self._not_running
        required = RequiredBlocks(
            start=min(computed + num_external_computed_tokens, self.max_model_len),
            end=min(end, self.max_model_len),
            slots=tables.blocks_of(min(end + num_lookahead_tokens, self.max_model_len)),
            whole=whole,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
            spare=self.watermark_blocks if waits else 0,
            reserved=reserved_blocks,
        )
        known = min(end, request.num_tokens)
        if entry is None:
            loads = num_external_computed_tokens > 0
            new = tables.admit(request, num_new_computed_tokens, required, known, loads=loads)
            if new is not None and loads:
                self._begin_load(
                    request, computed, num_external_computed_tokens, known, delay_cache_blocks
                )
        else:
            new = tables.grow(entry, required)
            if new is not None and known >= entry.next_publish:
                tables.publish_in_time(entry, request, known)
        if new is None:
            return None
        if self._zeroed:
            loaded = tables.blocks_of(num_external_computed_tokens) if skip_zeroing_group_ids else 0
            zeroed = (blocks for index, blocks in enumerate(new) if index not in tables.recurrent)
            self._new_blocks.extend(block for blocks in zeroed for block in blocks[loaded:])
        return Blocks(new, self._view, 0) if any(new) else self.empty_kv_cache_blocks

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Register the full blocks of a request. Their tokens are computed before others read.

        For a request with an asynchronous load, this is vLLM's word that the load has ended.
        """
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        if entry.loading:
            # If all tokens were loaded, the last one is computed again, in place. Its block is
            # registered then.
            self.tables.loaded(entry, request, min(num_computed_tokens, request.num_tokens - 1))
        elif num_computed_tokens >= entry.next_publish:
            known = min(num_computed_tokens, request.num_tokens)
            self.tables.publish_in_time(entry, request, known)

    # -- loads of a connector ----------------------------------------------------------------

    def _begin_load(
        self, request: Any, start: int, num_tokens: int, known: int, is_async: bool
    ) -> None:
        """A connector fills the blocks of `num_tokens` tokens from `start` on."""
        entry = self._entries[request.request_id]
        entry.loading = is_async
        if not is_async:
            first, end = start // self.block_size, self.tables.blocks_of(start + num_tokens)
            self._loads.append(Load(request, entry, first, end, known))

    def loads_planned(self, step: Any) -> None:
        """The synchronous loads begun since the last call happen in this step; not of vLLM."""
        for load in self._loads:
            load.step = step if load.step is None else load.step

    def loads_ended(self, step: Any, invalid_blocks: Collection[int]) -> None:
        """Register the blocks that a step loaded and computed, up to the first invalid one.

        vLLM computes a request's tokens again from that one on, in place. Not a method of vLLM.
        """
        ended = [load for load in self._loads if load.step is step]
        if not ended:
            return
        invalid = frozenset(invalid_blocks)
        self._loads = [load for load in self._loads if load.step is not step]
        for load in ended:
            if self._entries.get(load.request.request_id) is not load.entry:
                continue  # preempted, or finished
            rows = list(zip(*load.entry.blocks, strict=True))[: load.end]
            failed = (i for i in range(load.first, load.end) if invalid.intersection(rows[i]))
            index = next(failed, None)
            filled = load.num_tokens if index is None else index * self.block_size
            self.tables.loaded(load.entry, load.request, filled)

    def get_computed_blocks_for_connector(self, request: Any) -> tuple[Blocks, int, int, bool]:
        """The same as `get_computed_blocks`: all groups match the same."""
        return *self.get_computed_blocks(request), False

    def truncate_computed_blocks(self, blocks: Blocks, num_computed_tokens: int) -> Blocks:
        """The blocks of the first `num_computed_tokens` tokens of a look-up, which are full."""
        end = num_computed_tokens // self.block_size
        return self._cached([ids[:end] for ids in blocks.ids])

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """The ids of a request's blocks with computed tokens."""
        end = self.tables.blocks_of(num_computed_tokens)
        return tuple(ids[:end] for ids in self.get_block_ids(request_id))

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Release the blocks that windows have passed after so many processed tokens."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self.tables.process(entry, processed_computed_tokens)

    def finalize_partial_tail_offloads(self, request: Any) -> list[tuple[int, int, int]]:
        """For recurrent layers only: empty."""
        return []

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Zero a request's blocks from `start_token` on: a failed load did not fill them."""
        entry = self._entries.get(request_id)
        if entry is not None and self._zeroed:
            start = start_token // self.block_size
            self._new_blocks.extend(block for blocks in entry.blocks for block in blocks[start:])

    def evict_blocks(self, block_ids: set[int]) -> None:
        """vLLM's call after failed loads. `loads_ended` has not registered any of these blocks."""
        nodes, offset = memoryview(self.tables.kv.snapshot().nodes).cast("I"), self.tables.offset
        if late := sorted(block for block in block_ids if nodes[block - offset]):
            logger.error("Loads of blocks %s failed after their step: they stay cached", late)

    def merged_tables(self, running: Iterable[Any]) -> dict[str, tuple[list[int], ...]]:
        """See `Tables.merged_tables`; not a method of vLLM."""
        return self.tables.merged_tables(running)

    def free(self, request: Any) -> None:
        """Release a request's blocks, if it has any."""
        entry = self.tables.pop(request.request_id)
        if entry is not None:
            entry.free()

    def pop_blocks_for_free(self, request: Any) -> list[RequestBlocks]:
        """Remove a request; `block_pool.free_blocks` releases its blocks."""
        entry = self.tables.pop(request.request_id)
        return [] if entry is None else [entry]

    def get_blocks(self, request_id: str) -> Blocks:
        """The block table of a request as the workers have it."""
        entry = self._entries.get(request_id)
        if entry is None:
            return self.empty_kv_cache_blocks
        ids = self.tables.all_tables(entry.blocks, entry.states)
        return Blocks(ids, self._view, entry.published // self.block_size)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The block ids of a request."""
        ids: tuple[list[int], ...] = self.get_blocks(request_id).get_block_ids()
        return ids

    def estimate_cached_tokens(self, request: Any) -> int:
        """Tokens of a request that are in registered blocks."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return 0
        return max(entry.published, self.tables.blocks_of(entry.hit) * self.block_size)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Always 0: vLLM no longer uses it."""
        return [0] * self.num_kv_cache_groups

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
