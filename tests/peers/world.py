"""vLLM's real Scheduler with a stub model, whose KV cache is simulated and checks every read.

A slot holds a number that stands for all tokens up to its position, in their namespace and their
group of layers. A step writes what it computes and then reads, for every request, all positions up
to the last, or those in the window of a group: what is there must be what its own tokens give. The
next token follows from it. Groups of recurrent layers have a number for all tokens in a block of
their own, which a step reads before it writes.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tests.peers.vllm_own import models

MASK = (1 << 62) - 1
EMPTY = -1
BAD = -2  # a load that failed, and what is computed after it
STATE = "state"  # instead of a window: a group of recurrent layers


def link(before: int, token: int) -> int:
    """The number for a prefix that is longer by a token."""
    return ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 >> 1) & MASK


@dataclass
class State:
    """A request as the worker knows it, with a block table for each group of layers. `chain[p]`
    stands for its tokens up to position p."""

    tokens: list[int]
    tables: list[list[int]]
    root: int
    chain: np.ndarray

    @property
    def table(self) -> list[int]:
        """The table of the first group."""
        return self.tables[0]

    def link_up_to(self, start: int, tokens: list[int], end: int) -> None:
        """Compute `chain[start:end]` for these tokens."""
        value = int(self.chain[start - 1]) if start else self.root
        for position in range(start, end):
            value = link(value, tokens[position])
            self.chain[position] = value


class Worker:
    """Executes steps in the order in which they were scheduled, as a device does."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocabulary: int = 50,
        windows: tuple[int | str | None, ...] = (None,),
        state_size: int = 0,
        checkpoint_alignment: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.state_size = state_size or block_size
        self.checkpoint_alignment = checkpoint_alignment
        self.vocabulary = vocabulary
        self.kv = np.full((num_blocks, block_size), EMPTY, np.int64)
        self.states: dict[str, State] = {}
        self.roots: dict[str, int] = {}
        self.reads = 0
        self.wrong: list[str] = []
        self.invalid: set[int] = set()
        """Blocks of this step whose load failed: the Scheduler drops what their requests sample."""

    def run(self, step: Any) -> Any:
        """The output of a step."""
        for request_id in step.finished_req_ids:
            self.states.pop(request_id, None)
        if step.kv_cache_block_copies:
            pairs = np.array(step.kv_cache_block_copies, np.int64)
            self.kv[pairs[:, 1]] = self.kv[pairs[:, 0]]
        starts = self._take_tables(step)
        inputs = {}
        for request_id, count in step.num_scheduled_tokens.items():
            state, start = self.states[request_id], starts[request_id]
            drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
            tokens = [*state.tokens, *drafts]
            end = start + count
            if end > len(tokens):
                raise AssertionError(f"{request_id}: {end} tokens computed, {len(tokens)} known")
            state.link_up_to(start, tokens, end)
            is_bad = not self.invalid.isdisjoint(state.table)
            for group, table in enumerate(state.tables):
                if self.windows[group] == STATE:
                    self._read_state(request_id, group, start)
                else:
                    slots = self._slots(table, start, end)
                    self.kv.reshape(-1)[slots] = BAD if is_bad else state.chain[start:end] ^ group
            inputs[request_id] = (start, end, drafts)
        for request_id, (start, end, _) in inputs.items():
            self._write_states(self.states[request_id], start, end)
        sampled = [self._read(request_id, *inputs[request_id]) for request_id in inputs]
        outputs = importlib.import_module("vllm.v1.outputs")
        ids = list(inputs)
        return outputs.ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            pooler_output=[],
        )

    def _take_tables(self, step: Any) -> dict[str, int]:
        """Takes note of new requests and blocks; how many tokens each has computed."""
        starts = {}
        for new in step.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            root = self.roots.get(new.req_id, 0)
            tables = [list(ids) for ids in new.block_ids]
            state = State(tokens, tables, root, np.zeros(2048, np.int64))
            state.link_up_to(0, tokens, len(tokens))
            self.states[new.req_id] = state
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state, blocks = self.states[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                state.tables = [list(ids) for ids in blocks]
            elif blocks is not None:
                for table, ids in zip(state.tables, blocks, strict=True):
                    table.extend(ids)
            if request_id in cached.all_token_ids:
                state.tokens = list(cached.all_token_ids[request_id])
                state.link_up_to(0, state.tokens, len(state.tokens))
            starts[request_id] = cached.num_computed_tokens[index]
        return starts

    def _slots(self, table: list[int], start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = np.array(table, np.int64)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def _read_state(self, request_id: str, group: int, start: int) -> None:
        """The state after `start` tokens, which the step continues."""
        state = self.states[request_id]
        if start == 0:
            return
        block = state.tables[group][(start - 1) // self.state_size]
        self.reads += 1
        if block == 0 or (self.kv[block] != state.chain[start - 1] ^ group).any():
            self.wrong.append(f"{request_id}: the state after {start} tokens in block {block}")

    def _write_states(self, state: State, start: int, end: int) -> None:
        """The state after `end` tokens, and the one that a backend exports within the chunk."""
        checkpoint = importlib.import_module("vllm.model_executor.layers.mamba.checkpoint")
        size = self.state_size
        [offset], [column] = checkpoint.compute_mamba_prefill_checkpoints(
            [end], [end - start], size, size, self.checkpoint_alignment, False, size
        )
        for group, table in enumerate(state.tables):
            if self.windows[group] == STATE:
                if table[(end - 1) // size] == 0:
                    raise AssertionError(f"no block for the state after {end} tokens")
                self.kv[table[(end - 1) // size]] = state.chain[end - 1] ^ group
                if offset:
                    self.kv[table[column]] = state.chain[start + offset - 1] ^ group

    def _read(self, request_id: str, start: int, end: int, drafts: list[int]) -> list[int]:
        state = self.states[request_id]
        if not self.invalid.isdisjoint(state.table):
            return [0] if end >= len(state.tokens) else []
        for group, (table, window) in enumerate(zip(state.tables, self.windows, strict=True)):
            if isinstance(window, str):
                continue
            first = max(start + 1 - window, 0) if window else 0
            found = self.kv.reshape(-1)[self._slots(table, first, end)]
            self.reads += end - first
            wrong = np.flatnonzero(found != state.chain[first:end] ^ group)
            if wrong.size:
                at = first + wrong[0]
                self.wrong.append(f"{request_id}: position {at} of {end}, computed from {start}")
        known = len(state.tokens)
        if end < known:
            return []  # a chunk
        sampled = []
        for offset in range(end - known + 1):
            token = int(state.chain[known - 1 + offset]) % self.vocabulary
            sampled.append(token)
            if offset >= len(drafts) or drafts[offset] != token:
                break
        state.tokens += sampled
        return sampled


@dataclass
class Settings:
    """Of a Scheduler."""

    ours: bool
    num_blocks: int = 100
    block_size: int = 4
    max_num_seqs: int = 16
    budget: int = 256
    max_model_len: int = 512
    caching: bool = True
    overlapping: bool = False
    policy: str = "fcfs"
    drafts: int = 0
    events: bool = False
    own: Any = None
    runner: str = "auto"
    windows: tuple[int | str | None, ...] = (None,)
    checkpoint_alignment: int | None = None
    """Of a backend that exports states inside a chunk."""
    retention_interval: int | None = None
    adjust: Callable[[Any, Any], None] = lambda config, cache: None
    """Called with the configurations of the engine and of its KV cache."""

    @property
    def state_size(self) -> int:
        """Tokens for which a state has a block."""
        return self.block_size if self.caching else self.max_model_len


_own: list[Any] = []


def managers() -> tuple[Any, Callable[..., Any]]:
    """vLLM's manager, and what stands in its place when ours does. Engages the plugin."""
    from pyengine.integrations import vllm as integration

    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler")
    if not _own:
        own = scheduler.KVCacheManager
        integration.install()
        _own.extend((own, scheduler.KVCacheManager))
    return _own[0], _own[1]


def make_scheduler(settings: Settings, folder: Path) -> Any:
    """A Scheduler over a configuration without weights, which is made in `folder`."""
    import torch
    from vllm.config import (
        CacheConfig,
        KVEventsConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    model = folder / models.LONG
    if not model.exists():
        models.write_all(folder)
    size, length = settings.block_size, settings.max_model_len
    model_config = ModelConfig(
        model=str(model),
        dtype="float16",
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=length,
        runner=settings.runner,
    )
    drafts = None
    if settings.drafts:
        drafts = SpeculativeConfig(
            method="ngram",
            model="ngram",
            num_speculative_tokens=settings.drafts,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
        )
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.budget,
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=settings.overlapping,
            policy=settings.policy,
            watermark=0.0,
        ),
        model_config=model_config,
        cache_config=CacheConfig(
            block_size=size, cache_dtype="auto", enable_prefix_caching=settings.caching
        ),
        speculative_config=drafts,
        kv_events_config=events if settings.events else None,
    )
    heads = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    exports = settings.checkpoint_alignment is not None
    state = MambaSpec(
        block_size=settings.state_size,
        shapes=((1, 1),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align" if settings.caching else "none",
        num_prefill_checkpoint_blocks=int(exports),
        prefill_checkpoint_alignment=settings.checkpoint_alignment,
    )
    specs = [
        state
        if window == STATE
        else SlidingWindowSpec(sliding_window=window, **heads)
        if window
        else FullAttentionSpec(**heads)
        for window in settings.windows
    ]
    cache = KVCacheConfig(
        num_blocks=settings.num_blocks,
        kv_cache_tensors=[],
        prefix_cache_retention_interval=settings.retention_interval,
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)
        ],
    )
    config.scheduler_config.async_scheduling = settings.overlapping  # which the CPU turns off
    config.cache_config.num_gpu_blocks = settings.num_blocks
    config.cache_config.mamba_cache_mode = state.mamba_cache_mode
    settings.adjust(config, cache)
    register_all_kvcache_specs(config)
    own, ours = managers()
    module: Any = importlib.import_module("vllm.v1.core.sched.scheduler")
    module.KVCacheManager = ours if settings.ours else settings.own or own
    try:
        scheduler = (AsyncScheduler if settings.overlapping else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            block_size=math.lcm(*(spec.block_size for spec in specs)),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
    finally:
        module.KVCacheManager = ours
    scheduler.use_v2_model_runner = False
    return scheduler


def hasher(block_size: int, ours: bool) -> Any:
    """The block hasher of requests, as by vLLM's default."""
    from vllm.config import CacheConfig
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    if ours:
        return None
    function = get_hash_fn_by_name(CacheConfig().prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(block_size, function)


def make_request(name: str, tokens: list[int], block_hasher: Any, **settings: Any) -> Any:
    """A request for `max_tokens` tokens; `salt`, `priority`, `reads` (the cache) as given."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=settings.get("max_tokens", 8), ignore_eos=True)
    if not settings.get("reads", True):
        sampling.skip_reading_prefix_cache = True
    request = Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        cache_salt=settings.get("salt"),
        priority=settings.get("priority", 0),
        arrival_time=settings.get("arrival", 0.0),
        block_hasher=block_hasher,
    )
    return request


class World:
    """A Scheduler and a worker, which runs its steps; with overlapping ones a step behind."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.scheduler = make_scheduler(settings, folder)
        self.manager = self.scheduler.kv_cache_manager
        self.worker = Worker(
            settings.num_blocks,
            settings.block_size,
            windows=settings.windows,
            state_size=settings.state_size,
            checkpoint_alignment=settings.checkpoint_alignment,
        )
        self.hasher = hasher(settings.block_size, settings.ours)
        self.outputs: dict[str, list[int]] = {}
        self.hits: dict[str, list[int]] = {}
        self.waiting_output: list[tuple[Any, Any]] = []
        self.preemptions = 0

    def add(self, name: str, tokens: list[int], **settings: Any) -> None:
        """A request arrives."""
        salt = settings.get("salt")
        self.worker.roots[name] = link(0, crc32(salt.encode())) if salt else 0
        self.scheduler.add_request(make_request(name, tokens, self.hasher, **settings))
        self.outputs[name], self.hits[name] = [], []

    def abort(self, name: str) -> None:
        """The caller goes away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """One call of `schedule()`, its work, and what came of the step before or of this one."""
        step = self.scheduler.schedule()
        for new in step.scheduled_new_reqs:
            self.hits[new.req_id].append(new.num_computed_tokens)
        self.preemptions += len(step.preempted_req_ids or ())
        result = self.worker.run(step)
        self.waiting_output.append((step, result))
        keep = 1 if self.settings.overlapping and step.total_num_scheduled_tokens else 0
        while len(self.waiting_output) > keep:
            self._deliver(*self.waiting_output.pop(0))
        return step

    def _deliver(self, step: Any, result: Any) -> None:
        for outputs in self.scheduler.update_from_output(step, result).values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids
        if self.settings.drafts:
            self._draft()

    def _draft(self) -> None:
        """Guesses, of which some are right: the worker's own next tokens, spoilt now and then."""
        from vllm.v1.outputs import DraftTokenIds

        ids, drafts = [], []
        for request in self.scheduler.running:
            state = self.worker.states.get(request.request_id)
            if state is None or state.tokens != request._all_token_ids:
                continue
            value = int(state.chain[len(state.tokens) - 2])
            value = link(value, state.tokens[-1])
            guesses = []
            for _ in range(self.settings.drafts):
                token = value % self.worker.vocabulary
                guesses.append(token if value & 12 else (token + 1) % self.worker.vocabulary)
                value = link(value, token)
            ids.append(request.request_id)
            drafts.append(guesses)
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def drain(self, most: int = 100_000) -> None:
        """Steps until no request is left."""
        for _ in range(most):
            if not self.scheduler.has_requests() and not self.waiting_output:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.get_request_counts()} are still there")
